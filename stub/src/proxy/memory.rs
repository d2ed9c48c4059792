//! Reads the accelerators' memory in use: `GET /v1/dual-pods/accelerator-memory-usage`.
//!
//! The endpoint makes two promises. *Fresh*: a request after an engine's sleep must not see memory from before, so no
//! request gets a reading that began before the request. *Bounded*: a hung driver costs one thread, not one for each
//! request. One rule gives both: at most one reading runs, and all requests that arrive meanwhile share the next
//! reading. A request that has waited [`nvml::QUERY_TIMEOUT`] fails and names the accelerator at which the driver
//! hangs. While the reading is overdue, later requests fail at once.
//!
//! The reading runs on its own thread, because the runtime would wait for one of its threads at shutdown.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use rouse::{
    model::AcceleratorId,
    units::{Bytes, Millis},
};
use rouse_net::nvml;
use tokio::{
    sync::watch,
    time::{self, Instant},
};

use super::accelerators::{self, AcceleratorDiscovery};
use crate::accelerator_driver::AcceleratorDriver;

pub(crate) const PATH: &str = "/v1/dual-pods/accelerator-memory-usage";

/// UUID to MiB in use.
pub(crate) type UsedMibByUuid = BTreeMap<String, u64>;

/// Why there is no usage. Partial readings are errors, since they would look like complete ones.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    #[error(transparent)]
    Accelerators(#[from] accelerators::Error),
    /// One or more accelerators, each with the reason.
    #[error("{}", error_lines(.0))]
    Failed(Vec<(AcceleratorId, String)>),
}

/// Reads the memory of this Pod's accelerators.
#[derive(Clone)]
pub(crate) struct MemoryReader {
    inner: Arc<MemoryReaderInner>,
}

struct MemoryReaderInner {
    accelerators: AcceleratorDiscovery,
    driver: Arc<dyn AcceleratorDriver>,
    timeout: Duration,
    queue: Mutex<ReadingQueue>,
}

/// The running reading, and the next reading once a request needs it.
#[derive(Default)]
struct ReadingQueue {
    running: Option<RunningReading>,
    next: Option<MemoryReadingTx>,
}

struct RunningReading {
    reading: MemoryReadingTx,
    started_at: Instant,
}

/// The results so far, in the accelerators' order.
type MemoryReadingTx = Arc<watch::Sender<Vec<Result<Bytes, String>>>>;

impl MemoryReader {
    pub(crate) fn new(accelerators: AcceleratorDiscovery, driver: Arc<dyn AcceleratorDriver>) -> Self {
        Self::with_timeout(accelerators, driver, nvml::QUERY_TIMEOUT)
    }

    pub(super) fn with_timeout(
        accelerators: AcceleratorDiscovery,
        driver: Arc<dyn AcceleratorDriver>,
        within: Duration,
    ) -> Self {
        Self {
            inner: Arc::new(MemoryReaderInner {
                accelerators,
                driver,
                timeout: within,
                queue: Mutex::default(),
            }),
        }
    }

    /// Reads all accelerators, in a reading that begins after this call.
    ///
    /// # Errors
    /// There are no accelerators, an accelerator cannot be read, or the driver hangs.
    pub(crate) async fn read(&self) -> Result<UsedMibByUuid, Error> {
        let found = self.inner.accelerators.get().await?;
        let ids = &found.ids;
        let mut reading = self.inner.join(ids).ok_or_else(|| self.inner.hung_error(ids))?;
        let whole = reading.wait_for(|read| read.len() == ids.len());
        let read = match time::timeout(self.inner.timeout, whole).await {
            Ok(Ok(read)) => read.clone(),
            Ok(Err(_)) | Err(_) => return Err(self.inner.hung_error(ids)),
        };
        let mut usage = UsedMibByUuid::new();
        let mut failed = Vec::new();
        for (id, read) in ids.iter().zip(read) {
            match read {
                Ok(used) => {
                    usage.insert(id.as_str().to_owned(), used.0 >> 20);
                }
                Err(error) => failed.push((id.clone(), error)),
            }
        }
        if failed.is_empty() { Ok(usage) } else { Err(Error::Failed(failed)) }
    }
}

impl MemoryReaderInner {
    /// Joins a reading that begins after this call. `None` if the running reading is overdue, so that no other starts.
    fn join(self: &Arc<Self>, ids: &[AcceleratorId]) -> Option<watch::Receiver<Vec<Result<Bytes, String>>>> {
        let mut turn = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(running) = &turn.running {
            let overdue = running.started_at.elapsed() >= self.timeout;
            return (!overdue).then(|| turn.next.get_or_insert_default().subscribe());
        }
        let reading = MemoryReadingTx::default();
        let receiver = reading.subscribe();
        let (shared, ids) = (Arc::clone(self), ids.to_vec());
        let thread = std::thread::Builder::new()
            .name("accelerator-memory".to_owned())
            .spawn(move || shared.run_readings(&ids));
        if let Err(error) = thread {
            // The sender is dropped, so waiting requests fail.
            tracing::error!(%error, "cannot start the thread that reads the accelerators' memory");
        } else {
            turn.running = Some(RunningReading { reading, started_at: Instant::now() });
        }
        Some(receiver)
    }

    fn run_readings(&self, ids: &[AcceleratorId]) {
        let now = |turn: &ReadingQueue| turn.running.as_ref().map(|running| Arc::clone(&running.reading));
        let mut running = now(&self.queue.lock().unwrap_or_else(PoisonError::into_inner));
        while let Some(reading) = running {
            for id in ids {
                let read = self.driver.used_memory(id).map_err(|error| error.to_string());
                reading.send_modify(|so_far| so_far.push(read));
            }
            let mut turn = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
            turn.running =
                turn.next.take().map(|reading| RunningReading { reading, started_at: Instant::now() });
            running = now(&turn);
        }
    }

    /// The error while the driver hangs.
    fn hung_error(&self, ids: &[AcceleratorId]) -> Error {
        let turn = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(running) = &turn.running else {
            let reason = format!("was not read within {:?}", self.timeout);
            return Error::Failed(ids.iter().map(|id| (id.clone(), reason.clone())).collect());
        };
        let span = Millis::from(running.started_at.elapsed());
        let read = running.reading.borrow().len();
        let mut unread = ids.iter().skip(read);
        let hung = unread.next().map(|id| (id.clone(), format!("NVML hangs: no answer for {span}")));
        let rest = unread.map(|id| (id.clone(), "not read: NVML hangs".to_owned()));
        Error::Failed(hung.into_iter().chain(rest).collect())
    }
}

fn error_lines(failed: &[(AcceleratorId, String)]) -> String {
    failed.iter().fold(String::new(), |mut text, (id, error)| {
        let gap = if text.is_empty() { "" } else { "\n" };
        // Writing to a String cannot fail.
        _ = write!(text, "{gap}{id}: {error}");
        text
    })
}

/// Serves [`PATH`].
pub(crate) fn routes(memory: MemoryReader) -> Router {
    Router::new().route(PATH, get(usage)).with_state(memory)
}

async fn usage(State(memory): State<MemoryReader>) -> Response {
    match memory.read().await {
        Ok(usage) => {
            let json = serde_json::json!(usage);
            ([(header::CONTENT_TYPE, "application/json")], format!("{json}\n")).into_response()
        }
        Err(error) => {
            let text = error.to_string();
            tracing::warn!(error = text, "reading the accelerators' memory failed");
            (StatusCode::INTERNAL_SERVER_ERROR, format!("{text}\n")).into_response()
        }
    }
}

#[cfg(test)]
mod tests;
