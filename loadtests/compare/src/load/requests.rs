//! Non-streaming requests.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use anyhow::{bail, ensure};
use bytes::{Buf as _, Bytes};
use engine_sim::fast::wire::{FastResponses, monotonic_ns};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout_at},
};

use super::{
    LoadResult, RequestLoad, RequestPace, check_bounds,
    chunks::LoadChunkedDecoder,
    http::{LoadConnection, LoadRequest, LoadResponseFraming, LoadResponseHead},
    raise_descriptor_limit, response_check,
    tally::LoadTally,
};

/// How long responses may take beyond the engine's time. Then the load ends, even with responses missing.
pub(super) const RESPONSE_GRACE: Duration = Duration::from_secs(10);

/// Sends requests to a proxy. Runs on the current runtime, ideally single-threaded.
///
/// Errors: the load is out of bounds or not for this machine. Failed requests are counted.
pub(crate) async fn requests(load: &RequestLoad) -> anyhow::Result<LoadResult> {
    check_bounds(load.proxy, load.connections, load.body, load.duration)?;
    if let RequestPace::Open { per_second } = load.pace {
        ensure!(
            per_second > 0.0 && per_second <= 1e6,
            "{per_second} requests per second: the rate must be above 0 and at most 1000000"
        );
    }
    raise_descriptor_limit()?;
    let tally = LoadTally::new()?;
    let worker = RequestWorker::new(load, &tally);
    let mut workers = JoinSet::new();
    for _ in 0..load.connections {
        workers.spawn(worker.clone().run());
    }
    let last = worker.end + load.engine_time + RESPONSE_GRACE;
    while let Ok(Some(_)) = timeout_at(last, workers.join_next()).await {}
    tally.counts().errors += workers.len() as u64;
    Ok(tally.result())
}

impl RequestLoad {
    /// The body of each request.
    pub(crate) fn json(&self) -> String {
        self.request().json()
    }

    fn request(&self) -> LoadRequest<'_> {
        LoadRequest {
            proxy: self.proxy,
            model: &self.model,
            key: &self.key,
            body: self.body,
            events: None,
            interval: Duration::ZERO,
            engine_time: self.engine_time,
        }
    }
}

/// Sends one request after another; each clone has a connection of its own.
#[derive(Clone)]
pub(super) struct RequestWorker {
    load: RequestLoad,
    request: Bytes,
    expected: Arc<FastResponses>,
    tally: LoadTally,
    /// Requests of the schedule that any worker has taken.
    issued: Arc<AtomicU64>,
    start: Instant,
    end: Instant,
}

impl RequestWorker {
    /// The load begins now.
    pub(super) fn new(load: &RequestLoad, tally: &LoadTally) -> Self {
        let start = Instant::now();
        Self {
            request: load.request().bytes().into(),
            expected: Arc::new(FastResponses::new(&load.model)),
            tally: tally.clone(),
            issued: Arc::new(AtomicU64::new(0)),
            start,
            end: start + load.duration,
            load: load.clone(),
        }
    }

    async fn run(self) {
        let mut connection = None;
        while let Some(due_ns) = self.next_due().await {
            match self.exchange(&mut connection).await {
                Ok(right) => {
                    let now = monotonic_ns();
                    let mut counts = self.tally.counts();
                    counts.unit(now);
                    counts.latency(now.saturating_sub(due_ns));
                    drop(counts);
                    if !right {
                        self.tally.corrupted("a response is not the engine's");
                    }
                }
                Err(error) => {
                    self.tally.error(&error);
                    connection = None;
                    // Avoid a hundred thousand requests a second against a proxy that refuses everything.
                    sleep(Duration::from_millis(10)).await;
                }
            }
        }
    }

    /// Returns the time from which the next request counts; `None` when time is up.
    async fn next_due(&self) -> Option<u64> {
        let now = Instant::now();
        let RequestPace::Open { per_second } = self.load.pace else {
            return (now < self.end).then(monotonic_ns);
        };
        let nth = self.issued.fetch_add(1, Relaxed);
        let due = self.start + Duration::from_secs_f64(nth as f64 / per_second);
        if due >= self.end {
            return None;
        }
        if due > now {
            // A free worker waited, so a late timer is the client's fault. Without a free worker the wait counts for
            // the proxy.
            sleep_until(due).await;
            return Some(monotonic_ns());
        }
        Some(monotonic_ns().saturating_sub((now - due).as_nanos() as u64))
    }

    /// Sends a request. Returns whether the response is correct.
    pub(super) async fn exchange(&self, kept_alive: &mut Option<LoadConnection>) -> anyhow::Result<bool> {
        let mut connection = match kept_alive.take() {
            Some(connection) => connection,
            None => LoadConnection::open(self.load.proxy).await?,
        };
        connection.send(&self.request).await?;
        let head = connection.head().await?;
        let right = self.body(&mut connection, head).await?;
        if head.status != 200 {
            bail!("status {}", head.status);
        }
        if head.keeps_alive {
            *kept_alive = Some(connection);
        }
        Ok(right)
    }

    async fn body(&self, connection: &mut LoadConnection, head: LoadResponseHead) -> anyhow::Result<bool> {
        match head.framing {
            LoadResponseFraming::Length(length) => {
                while connection.read.len() < length {
                    connection.read_more().await?;
                }
                let right = self.is_expected(&connection.read[..length]);
                connection.read.advance(length);
                Ok(right && connection.read.is_empty())
            }
            LoadResponseFraming::Chunked => {
                let (mut chunks, mut body) = (LoadChunkedDecoder::default(), Vec::new());
                loop {
                    let mut bytes = &connection.read[..];
                    while let Some(piece) =
                        chunks.next(&mut bytes).map_err(|_| anyhow::anyhow!("malformed chunks"))?
                    {
                        body.extend_from_slice(piece);
                    }
                    let left = bytes.len();
                    connection.read.advance(connection.read.len() - left);
                    if chunks.ended() {
                        return Ok(self.is_expected(&body) && left == 0);
                    }
                    connection.read_more().await?;
                }
            }
        }
    }

    fn is_expected(&self, body: &[u8]) -> bool {
        response_check::is_expected_body(&self.expected, self.load.check, body)
    }
}
