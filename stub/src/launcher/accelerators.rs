//! Accelerators by UUID, and how CUDA is told to show each: a whole one by its place in PCI order, which is NVML's too; a
//! part of one (MIG) by its UUID, since it has no number there.
//!
//! The driver is asked when the first instance wants some, and not again once it told. It may hang, so the question has
//! a thread that nobody waits for and one deadline, counted from its beginning and shared by all who want the answer:
//! however many they are, and whenever they come, it costs one thread, and none of them waits longer than
//! [`nvml::DEADLINE`]. Who comes after that is told at once. One that answers after all is believed from then on; one
//! that fails is asked anew by whoever comes next.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rouse::nvml::{self, Nvml};
use tokio::{
    sync::watch,
    time::{Instant, timeout_at},
};

use crate::{
    accelerators::{self, Listed, in_file},
    driver::Driver,
};

/// UUIDs, and the word for each in `CUDA_VISIBLE_DEVICES`.
type Words = BTreeMap<String, String>;

/// What the driver said, once it did.
type Answer = Option<Result<Arc<Words>, Arc<nvml::Error>>>;

/// Why the accelerators that a caller named cannot be used.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum Error {
    #[error("accelerator {uuid} is not on this node: {}", listed(.known))]
    Unknown { uuid: String, known: Vec<String> },
    #[error("the accelerators cannot be listed: {0}")]
    Driver(Arc<nvml::Error>),
    #[error("the accelerators cannot be listed: NVML has not answered within {0:?}")]
    Hung(Duration),
    #[error("the accelerators cannot be listed: the question to NVML was lost, see the log")]
    Lost,
}

fn listed(known: &[String]) -> String {
    if known.is_empty() { "it has none".to_owned() } else { format!("it has {}", known.join(", ")) }
}

/// What there is on this node.
#[derive(Debug)]
pub(crate) struct Accelerators {
    driver: Arc<dyn Driver>,
    within: Duration,
    question: Mutex<Option<Question>>,
}

/// One question to the driver, answered or not.
#[derive(Clone, Debug)]
struct Question {
    answer: watch::Receiver<Answer>,
    /// Nobody waits for the answer beyond this.
    by: Instant,
}

impl Accelerators {
    /// As the driver will tell them.
    pub(crate) fn of(driver: Arc<dyn Driver>) -> Self {
        Self { driver, within: nvml::DEADLINE, question: Mutex::default() }
    }

    /// These and no others.
    pub(crate) fn known(listed: Vec<Listed>) -> Self {
        let (_, answer) = watch::channel(Some(Ok(Arc::new(words(listed)))));
        let known = Self::of(Arc::new(Nvml::default()));
        Self { question: Mutex::new(Some(Question { answer, by: Instant::now() })), ..known }
    }

    /// Stand-ins, named as the public launcher names them: GPU-0, GPU-1 and so on.
    pub(crate) fn mock(count: u32) -> Self {
        let listed = |index| Listed { id: format!("GPU-{index}").as_str().into(), index: Some(index) };
        Self::known((0..count).map(listed).collect())
    }

    /// The value for `CUDA_VISIBLE_DEVICES`, in the order in which they were named.
    pub(crate) async fn visible(&self, uuids: &[String]) -> Result<String, Error> {
        let words = match self.words().await {
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

    async fn words(&self) -> Result<Arc<Words>, Error> {
        let Question { mut answer, by } = self.question();
        let answer = timeout_at(by, answer.wait_for(Option::is_some)).await;
        match answer.map_err(|_| Error::Hung(self.within))?.as_deref() {
            Ok(Some(Ok(words))) => Ok(Arc::clone(words)),
            Ok(Some(Err(error))) => Err(Error::Driver(Arc::clone(error))),
            Ok(None) | Err(_) => Err(Error::Lost),
        }
    }

    /// The one that was answered or waits for an answer; else a new one.
    fn question(&self) -> Question {
        let mut question = self.question.lock().unwrap_or_else(PoisonError::into_inner);
        let holds = |question: &Question| match &*question.answer.borrow() {
            Some(answer) => answer.is_ok(),
            // Somebody still owes it.
            None => question.answer.has_changed().is_ok(),
        };
        match question.as_ref().filter(|question| holds(question)) {
            Some(question) => question.clone(),
            None => question.insert(self.ask()).clone(),
        }
    }

    fn ask(&self) -> Question {
        let (tell, answer) = watch::channel(None);
        let driver = Arc::clone(&self.driver);
        let asking = std::thread::Builder::new().name("accelerators".to_owned()).spawn(move || {
            let answer = driver.all().map(|listed| Arc::new(words(listed)));
            if let Err(error) = &answer {
                tracing::warn!(%error, "the accelerators cannot be listed");
            }
            tell.send_replace(Some(answer.map_err(Arc::new)));
        });
        if let Err(error) = asking {
            tracing::error!(%error, "no thread on which to ask for the accelerators");
        }
        Question { answer, by: Instant::now() + self.within }
    }
}

fn words(listed: Vec<Listed>) -> Words {
    let word = |Listed { id, index }: Listed| {
        let uuid = id.as_str().to_owned();
        (uuid.clone(), index.map_or(uuid, |index| index.to_string()))
    };
    listed.into_iter().map(word).collect()
}

/// Where the list comes from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) enum Source {
    #[default]
    Driver,
    Mock(u32),
    File(PathBuf),
}

impl Source {
    /// # Errors
    /// The file cannot be read, or holds no list.
    pub(crate) fn open(&self) -> Result<Accelerators, accelerators::Error> {
        match self {
            Self::Driver => Ok(Accelerators::of(Arc::new(Nvml::default()))),
            Self::Mock(count) => Ok(Accelerators::mock(*count)),
            Self::File(path) => in_file(path).map(Accelerators::known),
        }
    }
}

#[cfg(test)]
mod tests;
