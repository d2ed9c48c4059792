//! Reads `--accelerators-file`, which lists a machine's accelerators where no other source does.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use rouse::model::AcceleratorId;

/// One accelerator, as the driver or a file lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AcceleratorEntry {
    pub(crate) id: AcceleratorId,
    /// Index in the driver's order, from 0. `None` for a partition (MIG), which has no index.
    pub(crate) index: Option<u32>,
}

/// Why the accelerators file is unusable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("{file} cannot be read: {source}")]
    Read { file: PathBuf, source: io::Error },
    #[error("{file} is not an array of names: {source}")]
    Array { file: PathBuf, source: serde_json::Error },
    #[error("{file} is not an object of names and numbers: {source}")]
    Object { file: PathBuf, source: serde_json::Error },
}

/// Reads the accelerators from a file in one of three formats.
///
/// * One UUID a line; a line that begins with `#` is a comment.
/// * A JSON array of UUIDs.
/// * A JSON object of UUIDs and indices, as a node's entry in the ConfigMap `gpu-map` holds.
///
/// Lines and arrays are in index order, and partitions take no index. A repeated UUID counts once. The entries of an
/// object are sorted by index, with partitions last.
///
/// # Errors
/// The file cannot be read, or holds none of these formats.
pub(crate) fn read_accelerators_file(file: &Path) -> Result<Vec<AcceleratorEntry>, Error> {
    let named = || file.to_owned();
    let text = fs::read_to_string(file).map_err(|source| Error::Read { file: named(), source })?;
    match text.trim_start().chars().next() {
        Some('{') => {
            let object = serde_json::from_str(&text);
            object.map(from_index_map).map_err(|source| Error::Object { file: named(), source })
        }
        Some('[') => {
            let names: Vec<String> =
                serde_json::from_str(&text).map_err(|source| Error::Array { file: named(), source })?;
            Ok(from_names(names.iter().map(String::as_str)))
        }
        _ => Ok(from_names(text.lines().filter(|line| !line.trim_start().starts_with('#')))),
    }
}

/// CUDA names partitions `MIG-…` and whole accelerators `GPU-…`.
fn is_mig_partition(name: &str) -> bool {
    name.starts_with("MIG-")
}

fn from_index_map(object: BTreeMap<String, u32>) -> Vec<AcceleratorEntry> {
    let listed = |(name, index): (String, u32)| AcceleratorEntry {
        index: (!is_mig_partition(&name)).then_some(index),
        id: name.as_str().into(),
    };
    let mut all: Vec<AcceleratorEntry> = object.into_iter().map(listed).collect();
    all.sort_by_key(|listed| listed.index.unwrap_or(u32::MAX));
    all
}

fn from_names<'a>(names: impl Iterator<Item = &'a str>) -> Vec<AcceleratorEntry> {
    let mut all = Vec::<AcceleratorEntry>::new();
    let mut next = 0;
    for name in names.map(str::trim).filter(|name| !name.is_empty()) {
        if all.iter().any(|listed| listed.id.as_str() == name) {
            continue;
        }
        let index = (!is_mig_partition(name)).then_some(next);
        next += u32::from(index.is_some());
        all.push(AcceleratorEntry { id: name.into(), index });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<(String, Option<u32>)>, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), text).unwrap();
        let all = read_accelerators_file(file.path()).map_err(|error| error.to_string())?;
        Ok(all.into_iter().map(|listed| (listed.id.as_str().to_owned(), listed.index)).collect())
    }

    fn named(all: &[(&str, Option<u32>)]) -> Result<Vec<(String, Option<u32>)>, String> {
        Ok(all.iter().map(|(name, index)| ((*name).to_owned(), *index)).collect())
    }

    #[test]
    fn lines_and_arrays_are_in_order_and_each_name_counts_once() {
        let both = named(&[("GPU-b", Some(0)), ("GPU-a", Some(1))]);
        assert_eq!(read("# of node 1\nGPU-b\n\n GPU-a \r\nGPU-b\n"), both);
        assert_eq!(read(" [\"GPU-b\", \" GPU-a\", \"GPU-b\", \"\"]\n"), both);
        assert_eq!(read(""), Ok(Vec::new()));
    }

    #[test]
    fn an_object_says_the_numbers() {
        let both = named(&[("GPU-b", Some(0)), ("GPU-a", Some(10)), ("MIG-c", None)]);
        assert_eq!(read(r#"{"GPU-a": 10, "GPU-b": 0, "MIG-c": 0}"#), both);
    }

    #[test]
    fn parts_have_no_number_and_take_none() {
        let mixed = named(&[("GPU-a", Some(0)), ("MIG-a0", None), ("MIG-a1", None), ("GPU-b", Some(1))]);
        assert_eq!(read("GPU-a\nMIG-a0\nMIG-a1\nGPU-b"), mixed);
        assert_eq!(read(r#"["GPU-a", "MIG-a0", "MIG-a1", "GPU-b"]"#), mixed);
    }

    #[test]
    fn what_is_no_list_says_so() {
        for (text, what) in [
            ("[1]", "is not an array of names"),
            (r#"{"GPU-a": "one"}"#, "is not an object of names and numbers"),
            (r#"{"GPU-a": -1}"#, "is not an object of names and numbers"),
            ("{", "is not an object of names and numbers"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
        }
        let error = read_accelerators_file(Path::new("/nowhere/at/all")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/at/all cannot be read: "), "{error}");
    }
}
