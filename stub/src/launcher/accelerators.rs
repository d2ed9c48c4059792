//! Accelerators by UUID, and the index under which CUDA knows each: its place in PCI order, which is NVML's too.

use std::{
    collections::BTreeMap,
    fs, io,
    path::{Path, PathBuf},
};

use rouse::nvml::{self, Nvml};
use tokio::{
    sync::{Mutex, OnceCell},
    task::{JoinError, JoinHandle, spawn_blocking},
    time::timeout,
};

type Asked = Result<Vec<String>, nvml::Error>;

/// UUIDs, and their indices.
pub(crate) type Indices = BTreeMap<String, usize>;

/// Why the accelerators that a caller named cannot be used.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("accelerator {uuid} is not on this node: {}", listed(.known))]
    Unknown { uuid: String, known: Vec<String> },
    #[error("the accelerators cannot be listed: {0}")]
    Driver(#[from] nvml::Error),
    #[error("the accelerators cannot be listed: the driver does not answer")]
    Hung,
    #[error("the accelerators cannot be listed: {0}")]
    Lost(#[from] JoinError),
}

fn listed(known: &[String]) -> String {
    if known.is_empty() { "it has none".to_owned() } else { format!("it has {}", known.join(", ")) }
}

/// What there is on this node; the driver is asked when the first instance wants some, and not again once it told.
#[derive(Debug, Default)]
pub(crate) struct Accelerators {
    indices: OnceCell<Indices>,
    /// A question that the driver has not answered yet: a hung one is waited for, not asked again and again.
    asked: Mutex<Option<JoinHandle<Asked>>>,
}

impl Accelerators {
    /// Stand-ins, named as the public launcher names them: GPU-0, GPU-1 and so on.
    pub(crate) fn mock(count: usize) -> Self {
        Self::known((0..count).map(|index| (format!("GPU-{index}"), index)).collect())
    }

    /// From a file: one UUID a line in the order of their indices, or a JSON object of UUIDs and indices, which is what
    /// a node's entry in the ConfigMap `gpu-map` holds.
    pub(crate) fn file(path: &Path) -> io::Result<Self> {
        read(&fs::read_to_string(path)?).map(Self::known)
    }

    pub(crate) fn known(indices: Indices) -> Self {
        Self { indices: OnceCell::new_with(Some(indices)), asked: Mutex::default() }
    }

    /// The value for `CUDA_VISIBLE_DEVICES`, in the order in which they were named.
    pub(crate) async fn visible(&self, uuids: &[String]) -> Result<String, Error> {
        let indices = self.indices.get_or_try_init(|| self.ask()).await;
        // Without a driver there are no accelerators: the caller is told that this one is not here, and that none is.
        let none = Indices::new();
        let indices = match indices {
            Err(Error::Driver(nvml::Error::NoDriver(_))) => &none,
            other => other?,
        };
        let index = |uuid: &String| {
            let known = || indices.keys().cloned().collect();
            let index = indices.get(uuid).map(usize::to_string);
            index.ok_or_else(|| Error::Unknown { uuid: uuid.clone(), known: known() })
        };
        Ok(uuids.iter().map(index).collect::<Result<Vec<_>, _>>()?.join(","))
    }

    async fn ask(&self) -> Result<Indices, Error> {
        let mut asked = self.asked.lock().await;
        let question = asked.get_or_insert_with(|| {
            spawn_blocking(|| {
                let devices = Nvml::default().devices()?;
                Ok(devices.into_iter().map(|device| device.id.as_str().to_owned()).collect())
            })
        });
        let Ok(answer) = timeout(nvml::DEADLINE, question).await else {
            return Err(Error::Hung);
        };
        *asked = None;
        Ok(answer??.into_iter().enumerate().map(|(index, uuid)| (uuid, index)).collect())
    }
}

fn read(text: &str) -> io::Result<Indices> {
    if text.trim_start().starts_with('{') {
        return serde_json::from_str(text).map_err(io::Error::from);
    }
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    Ok(lines.enumerate().map(|(index, uuid)| (uuid.to_owned(), index)).collect())
}

/// Where the list comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Source {
    #[default]
    Driver,
    Mock(usize),
    File(PathBuf),
}

impl Source {
    /// # Errors
    /// The file cannot be read, or holds no list.
    pub(crate) fn open(&self) -> io::Result<Accelerators> {
        match self {
            Self::Driver => Ok(Accelerators::default()),
            Self::Mock(count) => Ok(Accelerators::mock(*count)),
            Self::File(path) => Accelerators::file(path),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn strings(words: &[&str]) -> Vec<String> {
        words.iter().map(|&word| word.to_owned()).collect()
    }

    #[tokio::test]
    async fn instance_uuid_to_index_translation() {
        let known = Accelerators::mock(4);
        assert_eq!(known.visible(&strings(&["GPU-3", "GPU-0"])).await.unwrap(), "3,0");
    }

    #[tokio::test]
    async fn what_is_not_here_is_named_with_what_is() {
        let error = Accelerators::mock(2).visible(&strings(&["GPU-1", "GPU-7"])).await.unwrap_err();
        assert_eq!(error.to_string(), "accelerator GPU-7 is not on this node: it has GPU-0, GPU-1");
        let error = Accelerators::mock(0).visible(&strings(&["GPU-7"])).await.unwrap_err();
        assert_eq!(error.to_string(), "accelerator GPU-7 is not on this node: it has none");
    }

    #[test]
    fn a_file_lists_them_in_order_or_says_the_indices() {
        let expected = Indices::from([("GPU-a".into(), 1), ("GPU-b".into(), 0)]);
        assert_eq!(read("# of node 1\nGPU-b\n\nGPU-a\n").unwrap(), expected);
        assert_eq!(read(r#"{"GPU-a": 1, "GPU-b": 0}"#).unwrap(), expected);
        assert!(read(r#"{"GPU-a": "one"}"#).is_err());
    }
}
