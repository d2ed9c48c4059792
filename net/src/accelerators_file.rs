//! Reads an accelerators file (`--accelerators-file`), which lists a machine's accelerators where no driver does.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use rouse::{
    model::AcceleratorId,
    units::{self, Bytes},
};
use serde::Deserialize;

/// One accelerator, as the driver or a file lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceleratorEntry {
    pub id: AcceleratorId,
    /// Index in the driver's order, from 0. `None` for a partition (MIG), which has no index.
    pub index: Option<u32>,
    /// Memory, without what the driver reserves for itself; `None` if the source does not report it.
    pub memory: Option<Bytes>,
}

/// The value of an entry of a JSON object: the index, or the index and the memory.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum IndexEntry {
    Index(u32),
    Sized { index: u32, memory: Option<Bytes> },
}

/// Why the accelerators file is unusable.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{file} cannot be read: {source}")]
    Read { file: PathBuf, source: io::Error },
    #[error("{file} is not an array of names: {source}")]
    Array { file: PathBuf, source: serde_json::Error },
    #[error("{file} is not an object of names and numbers: {source}")]
    Object { file: PathBuf, source: serde_json::Error },
    #[error("{file} has an accelerator whose memory is not a size: {source}")]
    Memory { file: PathBuf, source: units::Error },
}

/// Reads the accelerators from a file in one of three formats.
///
/// * One UUID a line, optionally followed by the memory (`GPU-1 80Gi`); a line that begins with `#` is a comment.
/// * A JSON array of such texts.
/// * A JSON object of UUIDs and indices, as a node's entry in the ConfigMap `gpu-map` holds. Instead of the index, a
///   value may be an object with `index` and `memory`.
///
/// Lines and arrays are in index order, and partitions take no index. A repeated UUID counts once. The entries of an
/// object are sorted by index, with partitions last.
///
/// # Errors
/// The file cannot be read, or holds none of these formats.
pub fn read_accelerators_file(file: &Path) -> Result<Vec<AcceleratorEntry>, Error> {
    let named = || file.to_owned();
    let text = fs::read_to_string(file).map_err(|source| Error::Read { file: named(), source })?;
    let listed = match text.trim_start().chars().next() {
        Some('{') => {
            let object = serde_json::from_str(&text);
            return object.map(from_index_map).map_err(|source| Error::Object { file: named(), source });
        }
        Some('[') => {
            let names: Vec<String> =
                serde_json::from_str(&text).map_err(|source| Error::Array { file: named(), source })?;
            from_texts(names.iter().map(String::as_str))
        }
        _ => from_texts(text.lines().filter(|line| !line.trim_start().starts_with('#'))),
    };
    listed.map_err(|source| Error::Memory { file: named(), source })
}

/// CUDA names partitions `MIG-…` and whole accelerators `GPU-…`.
fn is_mig_partition(name: &str) -> bool {
    name.starts_with("MIG-")
}

fn from_index_map(object: BTreeMap<String, IndexEntry>) -> Vec<AcceleratorEntry> {
    let listed = |(name, entry): (String, IndexEntry)| {
        let (index, memory) = match entry {
            IndexEntry::Index(index) => (index, None),
            IndexEntry::Sized { index, memory } => (index, memory),
        };
        AcceleratorEntry {
            index: (!is_mig_partition(&name)).then_some(index),
            id: name.as_str().into(),
            memory,
        }
    };
    let mut all: Vec<AcceleratorEntry> = object.into_iter().map(listed).collect();
    all.sort_by_key(|listed| listed.index.unwrap_or(u32::MAX));
    all
}

fn from_texts<'a>(texts: impl Iterator<Item = &'a str>) -> Result<Vec<AcceleratorEntry>, units::Error> {
    let mut all = Vec::<AcceleratorEntry>::new();
    let mut next = 0;
    for text in texts {
        let (name, memory) = text.trim().split_once(char::is_whitespace).unwrap_or_else(|| (text.trim(), ""));
        if name.is_empty() || all.iter().any(|listed| listed.id.as_str() == name) {
            continue;
        }
        let memory = Some(memory.trim()).filter(|memory| !memory.is_empty());
        let memory = memory.map(str::parse::<Bytes>).transpose()?;
        let index = (!is_mig_partition(name)).then_some(next);
        next += u32::from(index.is_some());
        all.push(AcceleratorEntry { id: name.into(), index, memory });
    }
    Ok(all)
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
    fn each_format_may_tell_the_memory() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for text in [
            "GPU-b 80Gi\n GPU-a \n",
            r#"["GPU-b  80Gi", "GPU-a"]"#,
            r#"{"GPU-a": 1, "GPU-b": {"index": 0, "memory": "80Gi"}}"#,
        ] {
            fs::write(file.path(), text).unwrap();
            let all = read_accelerators_file(file.path()).unwrap();
            let listed: Vec<_> =
                all.iter().map(|listed| (listed.id.as_str(), listed.index, listed.memory)).collect();
            assert_eq!(
                listed,
                [("GPU-b", Some(0), Some(Bytes::gib(80))), ("GPU-a", Some(1), None)],
                "{text}"
            );
        }
    }

    #[test]
    fn what_is_no_list_says_so() {
        for (text, what) in [
            ("[1]", "is not an array of names"),
            (r#"{"GPU-a": "one"}"#, "is not an object of names and numbers"),
            (r#"{"GPU-a": -1}"#, "is not an object of names and numbers"),
            ("{", "is not an object of names and numbers"),
            ("GPU-a lots", "has an accelerator whose memory is not a size: 'lots'"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(what), "{text}: {error}");
        }
        let error = read_accelerators_file(Path::new("/nowhere/at/all")).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/at/all cannot be read: "), "{error}");
    }
}
