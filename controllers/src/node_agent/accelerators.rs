//! Lists this node's accelerators: from the driver, or from a file on machines without one.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
};

use rouse::{model::AcceleratorId, units::Bytes};
use rouse_net::{
    accelerators_file::{self, read_accelerators_file},
    nvml::{self, Nvml, NvmlDevice},
};
use tokio::{sync::Semaphore, task, time};

use super::agent_view::SeenDevice;
use crate::convert::device_configuration::{INDEX_PROPERTY, UUID_PROPERTY};

/// Where the accelerators are listed.
#[derive(Debug)]
pub(super) enum AcceleratorInventory {
    Driver {
        nvml: Arc<Nvml>,
        /// One query at a time: a query keeps its thread for as long as the driver hangs.
        permit: Arc<Semaphore>,
    },
    File(PathBuf),
}

/// Why the accelerators cannot be listed. Nothing is known about them then.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Driver(#[from] nvml::Error),
    #[error(transparent)]
    File(#[from] accelerators_file::Error),
    #[error("the query ended without an answer")]
    Lost,
    #[error("the driver does not answer within {:?}: check the node's driver", nvml::QUERY_TIMEOUT)]
    NoAnswer,
}

impl AcceleratorInventory {
    pub(super) fn new(file: Option<PathBuf>) -> Self {
        let driver = || Self::Driver { nvml: Arc::default(), permit: Arc::new(Semaphore::new(1)) };
        file.map_or_else(driver, Self::File)
    }

    /// Returns the accelerators by UUID. A driver that hangs makes all of the `known` ones faulty.
    ///
    /// # Errors
    /// The source says nothing about the accelerators.
    pub(super) async fn list(
        &self,
        known: &BTreeMap<String, SeenDevice>,
    ) -> Result<BTreeMap<String, SeenDevice>, Error> {
        match self {
            Self::File(path) => {
                let path = path.clone();
                task::spawn_blocking(move || read_file(&path)).await.map_err(|_| Error::Lost)?
            }
            Self::Driver { nvml, permit } => {
                let (nvml, permit, before) = (Arc::clone(nvml), Arc::clone(permit), known.clone());
                let query = async move {
                    // Nothing closes the semaphore.
                    let permit = permit.acquire_owned().await.ok();
                    let query = task::spawn_blocking(move || {
                        let _permit = permit;
                        query_driver(&nvml, before)
                    });
                    query.await.map_err(|_| Error::Lost)?
                };
                match time::timeout(nvml::QUERY_TIMEOUT, query).await {
                    Ok(found) => found,
                    // An empty list would say that there are none.
                    Err(_) if known.is_empty() => Err(Error::NoAnswer),
                    Err(_) => {
                        tracing::warn!(timeout = ?nvml::QUERY_TIMEOUT, "the accelerators' driver does not answer");
                        Ok(known
                            .iter()
                            .map(|(uuid, device)| (uuid.clone(), device.with_health(false)))
                            .collect())
                    }
                }
            }
        }
    }
}

impl SeenDevice {
    fn accelerator(uuid: &str, index: Option<u32>, memory: Option<Bytes>, healthy: bool) -> Self {
        let index_property = index.map(|index| (INDEX_PROPERTY.to_owned(), index.to_string()));
        let properties = std::iter::once((UUID_PROPERTY.to_owned(), uuid.to_owned())).chain(index_property);
        Self { properties: properties.collect(), healthy, index, memory }
    }

    fn with_health(&self, healthy: bool) -> Self {
        Self { healthy, ..self.clone() }
    }
}

/// Reads the accelerators from the file. Blocks.
fn read_file(file: &Path) -> Result<BTreeMap<String, SeenDevice>, Error> {
    let entries = read_accelerators_file(file)?.into_iter();
    let device = |entry: accelerators_file::AcceleratorEntry| {
        let uuid = entry.id.as_str();
        (uuid.to_owned(), SeenDevice::accelerator(uuid, entry.index, entry.memory, true))
    };
    Ok(entries.map(device).collect())
}

/// Asks the driver for its accelerators, and each of them for its memory. Blocks.
///
/// An accelerator that fell off the bus makes the driver's list fail. Then the accelerators that were known are asked.
fn query_driver(
    nvml: &Nvml,
    known: BTreeMap<String, SeenDevice>,
) -> Result<BTreeMap<String, SeenDevice>, Error> {
    let answers = |uuid: &str| match nvml.read(&AcceleratorId::from(uuid)) {
        Ok(_) => true,
        Err(error) => {
            tracing::warn!(accelerator = uuid, %error, "accelerator is faulty");
            false
        }
    };
    match nvml.devices() {
        Ok(devices) => {
            let device = |NvmlDevice { id, index, usable }: NvmlDevice| {
                let uuid = id.as_str();
                (uuid.to_owned(), SeenDevice::accelerator(uuid, index, Some(usable), answers(uuid)))
            };
            Ok(devices.into_iter().map(device).collect())
        }
        Err(error) if known.is_empty() => Err(error.into()),
        Err(error) => {
            tracing::warn!(%error, "the accelerators cannot be listed, so each is asked");
            let device = |(uuid, device): (String, SeenDevice)| {
                let healthy = answers(&uuid);
                (uuid, device.with_health(healthy))
            };
            Ok(known.into_iter().map(device).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_lists_accelerators_with_their_memory_and_one_that_cannot_be_read_says_nothing() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "GPU-b 80Gi\nGPU-a\n").unwrap();
        let source = AcceleratorInventory::new(Some(file.path().to_owned()));
        let found = source.list(&BTreeMap::new()).await.unwrap();
        let seen: Vec<_> =
            found.iter().map(|(uuid, seen)| (uuid.as_str(), seen.index, seen.memory)).collect();
        assert_eq!(seen, [("GPU-a", Some(1), None), ("GPU-b", Some(0), Some(Bytes::gib(80)))]);
        assert!(found.values().all(|seen| seen.healthy));
        assert_eq!(found["GPU-b"].properties["index"], "0");
        file.close().unwrap();
        assert!(matches!(source.list(&found).await, Err(Error::File(_))));
    }
}
