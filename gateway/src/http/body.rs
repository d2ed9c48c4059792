//! Reading a request's body: whole, before it is routed, within every limit.
//!
//! The body is read before routing because the model's name is in it, and because a body left unread hides that the
//! client left. What it costs is bounded three ways: `limits.body` for one, `limits.bodyTotal` for all that are held
//! (charged as bytes arrive, given back at the response's head), `limits.bodyRate` for how long one may take.
//!
//! No client gets more than a quarter of `limits.bodyTotal`, by its address and by its key, or a few large bodies in dribs
//! would keep everybody else out. For the same reason the least rate grows with what is held. Both counts are atomics
//! that the connection and the key bring along: there is nothing to look up.
//!
//! A large body disturbs nobody: its memory grows, is read and is given back away from the core, which only copies what
//! comes, and no more than [`MAX_BYTES_PER_TURN`] at a time.
//!
//! Memory of one parked request beside its body, at most and with the default limits: its head (64 KiB, usually below
//! 2 KiB), hyper's two buffers (16 KiB, grown to 80 KiB by a large body), what its client pipelined (16 KiB), its state
//! and its connection's (about 4 KiB): 164 KiB, usually 22 KiB. So 1000 waiting requests hold 164 MiB at most beside
//! `limits.bodyTotal`.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use http_body::Body;
use http_body_util::BodyExt;
use rouse::{
    fault::{DisconnectPhase, Fault},
    units,
};
use rouse_net::{openai::routing_fields::MAX_ON_CORE_BYTES as LARGE, yield_to_reactor};
use tokio::{runtime::Handle, time::Instant};

use crate::config::ApiLimits;

/// The time over which a body must keep up with `limits.bodyRate`.
const RATE_WINDOW: Duration = Duration::from_secs(5);

/// One client may hold this part of `limits.bodyTotal`, but one largest body always.
const CLIENT_SHARE_DIVISOR: u64 = 4;
/// Beyond `limits.bodyRate`, a body must grow by this part of what it holds in each second.
const BUFFERED_RATE_DIVISOR: u64 = 1000;

/// So many bytes of one body are taken before others have their turn.
const MAX_BYTES_PER_TURN: usize = 256 << 10;

/// The bytes of bodies that are held now: of all, or of one client's.
#[derive(Debug, Default)]
pub(crate) struct BodyByteCounter(AtomicU64);

/// Who is charged for a body.
#[derive(Debug)]
pub(crate) struct ChargedBodyCounters {
    pub(crate) total: Arc<BodyByteCounter>,
    pub(crate) address: Option<Arc<BodyByteCounter>>,
    pub(crate) key: Option<Arc<BodyByteCounter>>,
}

/// One body's part of what its payers hold, given back on drop.
#[derive(Debug)]
pub(crate) struct BodyBytesGuard {
    counters: ChargedBodyCounters,
    bytes: u64,
}

/// Reads the body. The charge is to be kept as long as the body is.
pub(crate) async fn read<B>(
    body: B,
    limits: &ApiLimits,
    payers: ChargedBodyCounters,
) -> Result<(Bytes, BodyBytesGuard), Fault>
where
    B: Body<Data = Bytes>,
    B::Error: std::error::Error + 'static,
{
    let mut charge = BodyBytesGuard { counters: payers, bytes: 0 };
    let too_large = || Fault::BodyTooLarge { setting: "limits.body".into(), limit: limits.body };
    let declared = body.size_hint().exact();
    if declared.is_some_and(|length| length > limits.body.0) {
        return Err(too_large());
    }
    let mut body = pin!(body);
    let (mut whole, mut turn) = (BodyBuffer::Empty, 0);
    let mut pace = MinRateTimer::new(limits.body_rate);
    while let Some(frame) = pace.next(body.frame(), charge.bytes).await? {
        let Ok(data) = frame.map_err(|error| body_error_fault(&error))?.into_data() else {
            continue;
        };
        if charge.bytes + data.len() as u64 > limits.body.0 {
            return Err(too_large());
        }
        charge.add(data.len() as u64, limits)?;
        turn += data.len();
        whole.add(data, declared).await?;
        if turn > MAX_BYTES_PER_TURN {
            // However fast its client is: it is one of many.
            turn = 0;
            yield_to_reactor::yield_once().await;
        }
    }
    Ok((whole.finish(), charge))
}

/// One frame is passed on as it came; only a body of several is copied together.
enum BodyBuffer {
    Empty,
    Single(Bytes),
    Joined(DeferredFreeBuf),
}

/// What a body was copied together into. To give back that of a large one takes milliseconds, for which a core's streams
/// would stand still, so it goes elsewhere: also when the body is cut, too long or given up half way.
struct DeferredFreeBuf(Vec<u8>);

impl BodyBuffer {
    async fn add(&mut self, data: Bytes, declared: Option<u64>) -> Result<(), Fault> {
        let declared = usize::try_from(declared.unwrap_or(0)).unwrap_or(usize::MAX);
        let mut many = match std::mem::replace(self, Self::Empty) {
            Self::Empty => {
                *self = Self::Single(data);
                return Ok(());
            }
            Self::Single(first) => {
                // What a client declares is believed up to 1 MiB; beyond, memory follows what it sends.
                let mut many =
                    DeferredFreeBuf(Vec::with_capacity(declared.min(LARGE).max(first.len() + data.len())));
                many.0.extend_from_slice(&first);
                many
            }
            Self::Joined(many) => many,
        };
        let length = many.0.len();
        if many.0.capacity() - length < data.len() && length + data.len() > LARGE {
            many = grow_off_core(many, data.len(), declared).await?;
        }
        many.0.extend_from_slice(&data);
        *self = Self::Joined(many);
        Ok(())
    }

    fn finish(self) -> Bytes {
        match self {
            Self::Empty => Bytes::new(),
            Self::Single(data) => data,
            Self::Joined(many) if many.is_large() => Bytes::from_owner(many),
            Self::Joined(mut many) => std::mem::take(&mut many.0).into(),
        }
    }
}

/// With room for `more`, twice what it had, but for no more than was declared. Away from this core, since all that came may
/// have to be copied.
async fn grow_off_core(
    mut many: DeferredFreeBuf,
    more: usize,
    declared: usize,
) -> Result<DeferredFreeBuf, Fault> {
    let length = many.0.len();
    let left = declared.checked_sub(length).filter(|left| *left > 0).unwrap_or(usize::MAX);
    let more = length.min(left).max(more);
    let grow = move || {
        many.0.reserve_exact(more);
        many
    };
    tokio::task::spawn_blocking(grow).await.map_err(|_| Fault::Internal)
}

impl DeferredFreeBuf {
    fn is_large(&self) -> bool {
        self.0.capacity() > LARGE
    }
}

impl AsRef<[u8]> for DeferredFreeBuf {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Drop for DeferredFreeBuf {
    fn drop(&mut self) {
        if !self.is_large() {
            return;
        }
        let memory = std::mem::take(&mut self.0);
        // Without a runtime there are no streams to disturb.
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn_blocking(move || drop(memory)));
        }
    }
}

/// Ends a body that comes in dribs: what came fast before is no credit, or one burst would buy hours. The timer exists
/// only once a body has made us wait.
struct MinRateTimer {
    min_rate: u64,
    window: Duration,
    /// When the present window began, and how many bytes had come by then. The first begins when there is something to
    /// wait for.
    window_start: Option<Instant>,
    bytes_at_window_start: u64,
    timer: Option<Pin<Box<tokio::time::Sleep>>>,
}

impl MinRateTimer {
    fn new(least: units::Bytes) -> Self {
        Self {
            min_rate: least.0,
            window: RATE_WINDOW,
            window_start: None,
            bytes_at_window_start: 0,
            timer: None,
        }
    }

    async fn next<F: Future>(&mut self, frame: F, so_far: u64) -> Result<F::Output, Fault> {
        let mut frame = pin!(frame);
        if let Poll::Ready(ready) = poll_fn(|cx| Poll::Ready(frame.as_mut().poll(cx))).await {
            return Ok(ready);
        }
        loop {
            let since = *self.window_start.get_or_insert_with(Instant::now);
            let timer =
                self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(since + self.window)));
            tokio::select! {
                biased;
                ready = &mut frame => return Ok(ready),
                () = timer.as_mut() => {
                    // 0 asks for nothing, however much is held.
                    let least = if self.min_rate == 0 { 0 } else { self.min_rate + so_far / BUFFERED_RATE_DIVISOR };
                    let now = Instant::now();
                    let wanted = (now - since).as_millis() * u128::from(least) / 1000;
                    if u128::from(so_far - self.bytes_at_window_start) < wanted {
                        return Err(Fault::RequestTimeout {
                            what: format!(
                                "its body came slower than limits.bodyRate ({}/s) and a thousandth of what had come",
                                units::Bytes(self.min_rate)
                            ),
                        });
                    }
                    (self.window_start, self.bytes_at_window_start) = (Some(now), so_far);
                    timer.as_mut().reset(now + self.window);
                }
            }
        }
    }
}

impl BodyByteCounter {
    /// What is held with these.
    fn add(&self, bytes: u64) -> u64 {
        self.0.fetch_add(bytes, Ordering::Relaxed) + bytes
    }
}

impl BodyBytesGuard {
    fn add(&mut self, bytes: u64, limits: &ApiLimits) -> Result<(), Fault> {
        let share = units::Bytes((limits.body_total.0 / CLIENT_SHARE_DIVISOR).max(limits.body.0));
        self.bytes += bytes;
        // Everybody is charged before anybody objects, since the drop gives back from all.
        let most = self.client_counters().map(|client| client.add(bytes)).max();
        let all = self.counters.total.add(bytes);
        if all > limits.body_total.0 {
            return Err(Fault::BodyMemoryFull { limit: limits.body_total });
        }
        if most.is_some_and(|most| most > share.0) {
            return Err(Fault::ClientBodyMemoryFull { limit: share });
        }
        Ok(())
    }

    fn client_counters(&self) -> impl Iterator<Item = &BodyByteCounter> {
        self.counters.address.iter().chain(&self.counters.key).map(AsRef::as_ref)
    }
}

impl Drop for BodyBytesGuard {
    fn drop(&mut self) {
        for payer in self.client_counters().chain([&*self.counters.total]) {
            payer.0.fetch_sub(self.bytes, Ordering::Relaxed);
        }
    }
}

/// A body that ends too early, or that HTTP/2 resets, is a client that left; one that cannot be decoded is a bad
/// request.
fn body_error_fault(error: &(dyn std::error::Error + 'static)) -> Fault {
    let garbled = std::iter::successors(Some(error), |e| e.source()).any(|e| {
        e.downcast_ref::<io::Error>()
            .is_some_and(|io| matches!(io.kind(), io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput))
    });
    if garbled {
        Fault::InvalidRequest { message: "the body could not be read: broken framing".into(), param: None }
    } else {
        Fault::ClientDisconnected { phase: DisconnectPhase::Connecting }
    }
}

#[cfg(test)]
mod tests;
