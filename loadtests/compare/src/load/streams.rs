//! Event streams, each of which is checked.

use std::{sync::Arc, time::Duration};

use anyhow::{anyhow, bail, ensure};
use bytes::Bytes;
use engine_sim::fast::wire::{FastResponses, monotonic_ns};
use tokio::{
    io::AsyncReadExt as _,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
    time::{Instant, sleep_until, timeout_at},
};

use super::{
    LoadResult, ResponseCheck, StreamLoad, check_bounds,
    chunks::LoadChunkedDecoder,
    http::{LoadConnection, LoadRequest, LoadResponseFraming},
    raise_descriptor_limit,
    response_check::{CheckedEvent, EventChecker},
    tally::LoadTally,
};

/// Maximum rate of new streams. Backlogs hold a few hundred connections, and the first events must not all coincide.
pub(crate) const MAX_OPENED_PER_SECOND: u32 = 2000;
/// How many streams may wait for their first event at a time.
const MAX_OPENING: usize = 128;
/// How long a load may take beyond its ramp and intervals. Then it ends, even with events missing.
const LOAD_GRACE: Duration = Duration::from_secs(30);

/// Opens streams through a proxy and reads them to their ends. Runs on the current runtime, ideally single-threaded.
///
/// Errors: the load is out of bounds or not for this machine. Failed streams are counted.
pub(crate) async fn streams(load: &StreamLoad) -> anyhow::Result<LoadResult> {
    ensure!(
        (1..=MAX_OPENED_PER_SECOND).contains(&load.opened_per_second),
        "{} streams opened per second: the range is 1 to {MAX_OPENED_PER_SECOND}",
        load.opened_per_second
    );
    let each = Duration::from_secs(1) / load.opened_per_second;
    let ramp = each.saturating_mul(u32::try_from(load.streams)?);
    // One interval more, because the engine shifts each stream by a fraction of one.
    let lasts = ramp + load.interval.saturating_mul(load.events.saturating_add(1));
    check_bounds(load.proxy, load.streams, 0, lasts)?;
    raise_descriptor_limit()?;
    let tally = LoadTally::new()?;
    let reader = StreamReader::new(load, &tally);
    let start = Instant::now();
    let opening = Arc::new(Semaphore::new(MAX_OPENING));
    let last = start + lasts + LOAD_GRACE;
    let mut readers = JoinSet::new();
    for nth in 0..load.streams {
        sleep_until(start + each.saturating_mul(u32::try_from(nth)?)).await;
        let Ok(permit) = timeout_at(last, Arc::clone(&opening).acquire_owned()).await else { break };
        readers.spawn(reader.clone().run(Some(permit?), u32::MAX));
    }
    let missing = load.streams - readers.len();
    while let Ok(Some(_)) = timeout_at(last, readers.join_next()).await {}
    tally.counts().errors += (missing + readers.len()) as u64;
    Ok(tally.result())
}

/// Reads one stream; each clone reads another.
#[derive(Clone)]
pub(super) struct StreamReader {
    load: StreamLoad,
    request: Bytes,
    expected: Arc<FastResponses>,
    tally: LoadTally,
}

impl StreamReader {
    pub(super) fn new(load: &StreamLoad, tally: &LoadTally) -> Self {
        let ask = LoadRequest {
            proxy: load.proxy,
            model: &load.model,
            key: &load.key,
            body: 1024,
            events: Some(load.events),
            interval: load.interval,
            engine_time: Duration::ZERO,
        };
        Self {
            request: ask.bytes().into(),
            expected: Arc::new(FastResponses::new(&load.model)),
            tally: tally.clone(),
            load: load.clone(),
        }
    }

    /// Reads the stream. Holds `opening` until the first event, and disconnects after `leaves_after` events if the
    /// stream is that long.
    pub(super) async fn run(self, opening: Option<OwnedSemaphorePermit>, leaves_after: u32) {
        if let Err(error) = self.read(opening, leaves_after).await {
            self.tally.error(&error);
        }
    }

    async fn read(&self, mut opening: Option<OwnedSemaphorePermit>, leaves_after: u32) -> anyhow::Result<()> {
        let mut connection = LoadConnection::open(self.load.proxy).await?;
        let asked_ns = monotonic_ns();
        connection.send(&self.request).await?;
        let head = connection.head().await?;
        ensure!(head.status == 200, "status {}", head.status);
        ensure!(head.framing == LoadResponseFraming::Chunked, "a stream is not chunked");
        let mut chunks = LoadChunkedDecoder::default();
        let mut events = EventChecker::new(self.load.check, self.load.events);
        loop {
            let came_ns = monotonic_ns();
            let mut bytes = &connection.read[..];
            while let Some(piece) = chunks.next(&mut bytes).map_err(|_| anyhow!("malformed chunks"))? {
                self.count(&mut events, piece, (asked_ns, came_ns));
                drop(opening.take());
            }
            let left = bytes.len();
            connection.read.clear();
            if chunks.ended() {
                ensure!(left == 0, "bytes after the end of a stream");
                break;
            }
            if events.count() >= leaves_after {
                return Ok(());
            }
            connection.read.reserve(4096);
            if connection.io.read_buf(&mut connection.read).await? == 0 {
                bail!("a stream was cut");
            }
        }
        ensure!(events.complete(), "a stream ended without all of its events");
        Ok(())
    }

    fn count(&self, events: &mut EventChecker, piece: &[u8], (asked_ns, came_ns): (u64, u64)) {
        let mut counts = self.tally.counts();
        let mut wrong = false;
        events.feed(&self.expected, piece, |came| match came {
            CheckedEvent::Event { first, sent_ns } => {
                counts.unit(came_ns);
                counts.lag(came_ns.saturating_sub(sent_ns));
                if first {
                    counts.latency(came_ns.saturating_sub(asked_ns));
                }
            }
            CheckedEvent::Wrong => {
                counts.unit(came_ns);
                wrong = true;
                counts.corrupted += 1;
            }
        });
        if wrong {
            let what = if self.load.check == ResponseCheck::Bytes { "bytes" } else { "text" };
            counts.record_first_error(|| format!("an event is not the {what} expected at its place"));
        }
    }
}
