//! Maps accelerator UUIDs to `CUDA_VISIBLE_DEVICES`: a whole accelerator by its index in PCI order, which is also
//! NVML's order; a partition (MIG) by its UUID, since it has no index.
//!
//! The first instance that needs accelerators triggers the driver query, and a successful answer is kept for good. The
//! driver may hang, so the query runs on a detached thread with one deadline, counted from the start of the query and
//! shared by all waiters. Any number of waiters therefore costs one thread, and none waits longer than
//! [`nvml::QUERY_TIMEOUT`]. A request after the deadline fails at once. A late answer is used from then on. After a
//! failed query the next request starts a new query.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rouse_net::{
    accelerators_file::{self, AcceleratorEntry, read_accelerators_file},
    nvml::{self, Nvml},
};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::accelerator_driver::AcceleratorDriver;

/// UUIDs, each with its entry for `CUDA_VISIBLE_DEVICES`.
type CudaDeviceNames = BTreeMap<String, String>;

/// The driver's answer, once it has come.
type ListingResult = Option<Result<Arc<CudaDeviceNames>, Arc<nvml::Error>>>;

/// Why the accelerators that a caller named cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("accelerator {uuid} is not on this node: {}", known_text(.known))]
    Unknown { uuid: String, known: Vec<String> },
    #[error("cannot list the accelerators: {0}")]
    Driver(Arc<nvml::Error>),
    #[error("cannot list the accelerators: NVML did not answer within {0:?}")]
    Hung(Duration),
    #[error(
        "cannot list the accelerators: the query of NVML ended without an answer; see the launcher's log"
    )]
    Lost,
}

fn known_text(uuids: &[String]) -> String {
    if uuids.is_empty() {
        "the node has none".to_owned()
    } else {
        format!("the node has {}", uuids.join(", "))
    }
}

/// The accelerators of this node.
#[derive(Debug)]
pub(crate) struct NodeAccelerators {
    driver: Arc<dyn AcceleratorDriver>,
    timeout: Duration,
    listing: Mutex<Option<AcceleratorListing>>,
}

/// One driver query, answered or pending.
#[derive(Clone, Debug)]
struct AcceleratorListing {
    result_rx: watch::Receiver<ListingResult>,
    /// Waiters give up at this time.
    deadline: Instant,
}

impl NodeAccelerators {
    /// Lists the accelerators from the driver, on first use.
    pub(crate) fn from_driver(driver: Arc<dyn AcceleratorDriver>) -> Self {
        Self { driver, timeout: nvml::QUERY_TIMEOUT, listing: Mutex::default() }
    }

    /// Uses a fixed list.
    pub(crate) fn from_entries(listed: Vec<AcceleratorEntry>) -> Self {
        let (_, answer) = watch::channel(Some(Ok(Arc::new(device_names(listed)))));
        let without_listing = Self::from_driver(Arc::new(Nvml::default()));
        Self {
            listing: Mutex::new(Some(AcceleratorListing { result_rx: answer, deadline: Instant::now() })),
            ..without_listing
        }
    }

    /// Stand-ins with the public launcher's names: GPU-0, GPU-1 and so on.
    pub(crate) fn mock(count: u32) -> Self {
        let listed = |index| AcceleratorEntry {
            id: format!("GPU-{index}").as_str().into(),
            index: Some(index),
            memory: None,
        };
        Self::from_entries((0..count).map(listed).collect())
    }

    /// Returns the value for `CUDA_VISIBLE_DEVICES`, in the order of `uuids`.
    pub(crate) async fn visible_devices(&self, uuids: &[String]) -> Result<String, Error> {
        let device_names = match self.device_names().await {
            // Without a driver the node has no accelerators, so the error reports an unknown UUID and an empty list.
            Err(Error::Driver(error)) if matches!(*error, nvml::Error::NoDriver(_)) => Arc::default(),
            other => other?,
        };
        let visible_name = |uuid: &String| {
            let known_uuids = || device_names.keys().cloned().collect();
            device_names
                .get(uuid)
                .cloned()
                .ok_or_else(|| Error::Unknown { uuid: uuid.clone(), known: known_uuids() })
        };
        Ok(uuids.iter().map(visible_name).collect::<Result<Vec<_>, _>>()?.join(","))
    }

    async fn device_names(&self) -> Result<Arc<CudaDeviceNames>, Error> {
        let AcceleratorListing { result_rx: mut answer, deadline: by } = self.listing();
        let answer = timeout_at(by, answer.wait_for(Option::is_some)).await;
        match answer.map_err(|_| Error::Hung(self.timeout))?.as_deref() {
            Ok(Some(Ok(device_names))) => Ok(Arc::clone(device_names)),
            Ok(Some(Err(error))) => Err(Error::Driver(Arc::clone(error))),
            Ok(None) | Err(_) => Err(Error::Lost),
        }
    }

    /// Returns the answered or pending query, or else starts a new query.
    fn listing(&self) -> AcceleratorListing {
        let mut question = self.listing.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |question: &AcceleratorListing| match &*question.result_rx.borrow() {
            Some(answer) => answer.is_ok(),
            // The query thread still holds the sender.
            None => question.result_rx.has_changed().is_ok(),
        };
        match question.as_ref().filter(|question| holds(question)) {
            Some(question) => question.clone(),
            None => question.insert(self.start_listing()).clone(),
        }
    }

    fn start_listing(&self) -> AcceleratorListing {
        let (result_tx, result_rx) = watch::channel(None);
        let driver = Arc::clone(&self.driver);
        let thread = std::thread::Builder::new().name("accelerators".to_owned()).spawn(move || {
            let answer = driver.list().map(|listed| Arc::new(device_names(listed)));
            if let Err(error) = &answer {
                tracing::warn!(%error, "listing the accelerators failed");
            }
            result_tx.send_replace(Some(answer.map_err(Arc::new)));
        });
        if let Err(error) = thread {
            tracing::error!(%error, "cannot start the thread that lists the accelerators");
        }
        AcceleratorListing { result_rx, deadline: Instant::now() + self.timeout }
    }
}

fn device_names(listed: Vec<AcceleratorEntry>) -> CudaDeviceNames {
    let name_of = |AcceleratorEntry { id, index, .. }: AcceleratorEntry| {
        let uuid = id.as_str().to_owned();
        (uuid.clone(), index.map_or(uuid, |index| index.to_string()))
    };
    listed.into_iter().map(name_of).collect()
}

/// The source of the accelerator list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum AcceleratorListSource {
    #[default]
    Driver,
    Mock(u32),
    File(PathBuf),
}

impl AcceleratorListSource {
    /// Loads the list; the driver is queried later.
    ///
    /// # Errors
    /// The file cannot be read, or holds no list.
    pub(crate) fn load(&self) -> Result<NodeAccelerators, accelerators_file::Error> {
        match self {
            Self::Driver => Ok(NodeAccelerators::from_driver(Arc::new(Nvml::default()))),
            Self::Mock(count) => Ok(NodeAccelerators::mock(*count)),
            Self::File(path) => read_accelerators_file(path).map(NodeAccelerators::from_entries),
        }
    }
}

#[cfg(test)]
mod tests;
