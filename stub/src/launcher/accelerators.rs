//! Accelerators by UUID, and how CUDA is told to show each: a whole one by its place in PCI order, which is NVML's too; a
//! part of one (MIG) by its UUID, since it has no number there.
//!
//! The driver is asked when the first instance wants some, and not again once it told. It may hang, so the question has
//! a thread that nobody waits for and one deadline, counted from its beginning and shared by all who want the answer:
//! however many they are, and whenever they come, it costs one thread, and none of them waits longer than
//! [`nvml::QUERY_TIMEOUT`]. Who comes after that is told at once. One that answers after all is believed from then on; one
//! that fails is asked anew by whoever comes next.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rouse_net::nvml::{self, Nvml};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::{
    accelerator_driver::AcceleratorDriver,
    accelerators::{self, AcceleratorEntry, read_accelerators_file},
};

/// UUIDs, and the word for each in `CUDA_VISIBLE_DEVICES`.
type CudaDeviceNames = BTreeMap<String, String>;

/// What the driver said, once it did.
type ListingResult = Option<Result<Arc<CudaDeviceNames>, Arc<nvml::Error>>>;

/// Why the accelerators that a caller named cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("accelerator {uuid} is not on this node: {}", known_text(.known))]
    Unknown { uuid: String, known: Vec<String> },
    #[error("the accelerators cannot be listed: {0}")]
    Driver(Arc<nvml::Error>),
    #[error("the accelerators cannot be listed: NVML has not answered within {0:?}")]
    Hung(Duration),
    #[error("the accelerators cannot be listed: the question to NVML was lost, see the log")]
    Lost,
}

fn known_text(known: &[String]) -> String {
    if known.is_empty() { "it has none".to_owned() } else { format!("it has {}", known.join(", ")) }
}

/// What there is on this node.
#[derive(Debug)]
pub(crate) struct NodeAccelerators {
    driver: Arc<dyn AcceleratorDriver>,
    timeout: Duration,
    listing: Mutex<Option<AcceleratorListing>>,
}

/// One question to the driver, answered or not.
#[derive(Clone, Debug)]
struct AcceleratorListing {
    result_rx: watch::Receiver<ListingResult>,
    /// Nobody waits for the answer beyond this.
    deadline: Instant,
}

impl NodeAccelerators {
    /// As the driver will tell them.
    pub(crate) fn from_driver(driver: Arc<dyn AcceleratorDriver>) -> Self {
        Self { driver, timeout: nvml::QUERY_TIMEOUT, listing: Mutex::default() }
    }

    /// These and no others.
    pub(crate) fn from_entries(listed: Vec<AcceleratorEntry>) -> Self {
        let (_, answer) = watch::channel(Some(Ok(Arc::new(device_names(listed)))));
        let known = Self::from_driver(Arc::new(Nvml::default()));
        Self {
            listing: Mutex::new(Some(AcceleratorListing { result_rx: answer, deadline: Instant::now() })),
            ..known
        }
    }

    /// Stand-ins, named as the public launcher names them: GPU-0, GPU-1 and so on.
    pub(crate) fn mock(count: u32) -> Self {
        let listed =
            |index| AcceleratorEntry { id: format!("GPU-{index}").as_str().into(), index: Some(index) };
        Self::from_entries((0..count).map(listed).collect())
    }

    /// The value for `CUDA_VISIBLE_DEVICES`, in the order in which they were named.
    pub(crate) async fn visible_devices(&self, uuids: &[String]) -> Result<String, Error> {
        let words = match self.device_names().await {
            // Without a driver there are no accelerators: the caller is told that this one is not here, and that none is.
            Err(Error::Driver(error)) if matches!(*error, nvml::Error::NoDriver(_)) => Arc::default(),
            other => other?,
        };
        let word = |uuid: &String| {
            let known = || words.keys().cloned().collect();
            words.get(uuid).cloned().ok_or_else(|| Error::Unknown { uuid: uuid.clone(), known: known() })
        };
        Ok(uuids.iter().map(word).collect::<Result<Vec<_>, _>>()?.join(","))
    }

    async fn device_names(&self) -> Result<Arc<CudaDeviceNames>, Error> {
        let AcceleratorListing { result_rx: mut answer, deadline: by } = self.listing();
        let answer = timeout_at(by, answer.wait_for(Option::is_some)).await;
        match answer.map_err(|_| Error::Hung(self.timeout))?.as_deref() {
            Ok(Some(Ok(words))) => Ok(Arc::clone(words)),
            Ok(Some(Err(error))) => Err(Error::Driver(Arc::clone(error))),
            Ok(None) | Err(_) => Err(Error::Lost),
        }
    }

    /// The one that was answered or waits for an answer; else a new one.
    fn listing(&self) -> AcceleratorListing {
        let mut question = self.listing.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |question: &AcceleratorListing| match &*question.result_rx.borrow() {
            Some(answer) => answer.is_ok(),
            // Somebody still owes it.
            None => question.result_rx.has_changed().is_ok(),
        };
        match question.as_ref().filter(|question| holds(question)) {
            Some(question) => question.clone(),
            None => question.insert(self.start_listing()).clone(),
        }
    }

    fn start_listing(&self) -> AcceleratorListing {
        let (tell, answer) = watch::channel(None);
        let driver = Arc::clone(&self.driver);
        let asking = std::thread::Builder::new().name("accelerators".to_owned()).spawn(move || {
            let answer = driver.list().map(|listed| Arc::new(device_names(listed)));
            if let Err(error) = &answer {
                tracing::warn!(%error, "the accelerators cannot be listed");
            }
            tell.send_replace(Some(answer.map_err(Arc::new)));
        });
        if let Err(error) = asking {
            tracing::error!(%error, "no thread on which to ask for the accelerators");
        }
        AcceleratorListing { result_rx: answer, deadline: Instant::now() + self.timeout }
    }
}

fn device_names(listed: Vec<AcceleratorEntry>) -> CudaDeviceNames {
    let word = |AcceleratorEntry { id, index }: AcceleratorEntry| {
        let uuid = id.as_str().to_owned();
        (uuid.clone(), index.map_or(uuid, |index| index.to_string()))
    };
    listed.into_iter().map(word).collect()
}

/// Where the list comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum AcceleratorListSource {
    #[default]
    Driver,
    Mock(u32),
    File(PathBuf),
}

impl AcceleratorListSource {
    /// # Errors
    /// The file cannot be read, or holds no list.
    pub(crate) fn load(&self) -> Result<NodeAccelerators, accelerators::Error> {
        match self {
            Self::Driver => Ok(NodeAccelerators::from_driver(Arc::new(Nvml::default()))),
            Self::Mock(count) => Ok(NodeAccelerators::mock(*count)),
            Self::File(path) => read_accelerators_file(path).map(NodeAccelerators::from_entries),
        }
    }
}

#[cfg(test)]
mod tests;
