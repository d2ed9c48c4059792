//! Reads a request's whole body before routing, within every limit.
//!
//! The body is read before routing because it holds the model's name, and because an unread body hides a disconnect of
//! the client. Three settings bound its cost: `limits.body` for one body, `limits.bodyTotal` for all held bodies
//! (charged as bytes arrive, released at the response's head), `limits.bodyRate` for the time that one body may take.
//!
//! No client holds more than a quarter of `limits.bodyTotal`, by its address and by its key; otherwise a few large
//! bodies in dribs would keep every other client out. For the same reason the minimum rate grows with the bytes held.
//! Both counts are atomics that the connection and the key carry, so charging needs no lookup.
//!
//! A large body does not stall the core: it is parsed and freed off the core. The core only copies incoming data, at most
//! [`MAX_BYTES_PER_TURN`] at a time.
//!
//! The memory of one parked request over HTTP/1.1 beside its body, at most and with the default limits: its head (64
//! KiB, usually below 2 KiB), pipelined data of its client (16 KiB, usually none), its state and its connection's (about
//! 4 KiB): 84 KiB, usually 6 KiB. So 1000 waiting requests hold 84 MiB at most beside `limits.bodyTotal`.

use std::{
    mem,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use http_body::Body;
use http_body_util::BodyExt;
use memmap2::{MmapMut, MmapOptions};
use rouse::{
    fault::{DisconnectPhase, Fault},
    units::{self, Bytes as Size},
};
use rouse_net::{
    openai::routing_fields::MAX_ON_CORE_BYTES as LARGE,
    server::{
        RequestBodyError,
        body_rate::{MinRateTimer, RATE_WINDOW},
    },
    yield_to_reactor,
};
use tokio::runtime::Handle;

use rouse_config::ApiLimits;

mod client_body;

pub(crate) use client_body::ClientBody;

/// One client may hold this fraction of `limits.bodyTotal`, but always one body of the maximum size.
const CLIENT_SHARE_DIVISOR: u64 = 4;

/// The bytes of one body that a core reads before it yields to other tasks.
const MAX_BYTES_PER_TURN: usize = 256 << 10;

/// Counts the body bytes held now, in total or by one client.
#[derive(Debug, Default)]
pub(crate) struct BodyByteCounter(AtomicU64);

/// The counters charged for a body.
#[derive(Debug)]
pub(crate) struct ChargedBodyCounters {
    pub(crate) total: Arc<BodyByteCounter>,
    pub(crate) address: Option<Arc<BodyByteCounter>>,
    pub(crate) key: Option<Arc<BodyByteCounter>>,
}

/// One body's charge to its counters, released on drop.
#[derive(Debug)]
pub(crate) struct BodyBytesGuard {
    counters: ChargedBodyCounters,
    bytes: u64,
}

/// Reads the body. The caller keeps the returned guard as long as the body.
pub(crate) async fn read<B>(
    body: B,
    limits: &ApiLimits,
    counters: ChargedBodyCounters,
) -> Result<(Bytes, BodyBytesGuard), Fault>
where
    B: Body<Data = Bytes>,
    B::Error: std::error::Error + 'static,
{
    let mut charge = BodyBytesGuard { counters, bytes: 0 };
    let too_large = || Fault::BodyTooLarge { setting: "limits.body".into(), limit: limits.body };
    let declared = body.size_hint().exact();
    if declared.is_some_and(|length| length > limits.body.0) {
        return Err(too_large());
    }
    let mut body = pin!(body);
    let (mut whole, mut turn) = (BodyBuffer::Empty, 0);
    let mut rate = MinRateTimer::new(limits.body_rate, RATE_WINDOW);
    while let Some(frame) = rate.next(body.frame(), charge.bytes).await.map_err(|_| too_slow(limits))? {
        let Ok(data) = frame.map_err(|error| body_error_fault(&error))?.into_data() else {
            continue;
        };
        if charge.bytes + data.len() as u64 > limits.body.0 {
            return Err(too_large());
        }
        charge.add(data.len() as u64, limits)?;
        turn += data.len();
        whole.add(data, declared, limits.body)?;
        if turn > MAX_BYTES_PER_TURN {
            // Yield even to a fast client, because this core serves many.
            turn = 0;
            yield_to_reactor::yield_once().await;
        }
    }
    Ok((whole.finish(), charge))
}

/// Collects a body. A single frame passes through unchanged; only a body of several frames is copied.
enum BodyBuffer {
    Empty,
    Single(Bytes),
    Small(Vec<u8>),
    Large(MappedBody),
}

/// A body of more than [`LARGE`] bytes, in pages of its own. It never moves as it grows, and its memory follows the bytes
/// sent, not those allowed. Unmapping many pages takes milliseconds and would stall the core's streams, so it happens on
/// another thread, also when the body is cut, too long or abandoned half way.
struct MappedBody {
    /// `None` only while it is dropped.
    pages: Option<MmapMut>,
    length: usize,
}

impl BodyBuffer {
    /// Adds data. The whole must not become longer than `limit`.
    fn add(&mut self, data: Bytes, declared: Option<u64>, limit: Size) -> Result<(), Fault> {
        let mut small = match self {
            Self::Empty => {
                *self = Self::Single(data);
                return Ok(());
            }
            Self::Large(mapped) => return mapped.push(&data),
            Self::Single(first) => {
                // Trust the declared length up to 1 MiB.
                let declared = usize::try_from(declared.unwrap_or(0)).unwrap_or(usize::MAX);
                let mut small = Vec::with_capacity(declared.max(first.len() + data.len()).min(LARGE));
                small.extend_from_slice(first);
                small
            }
            Self::Small(small) => mem::take(small),
        };
        *self = if small.len() + data.len() > LARGE {
            let mut mapped = MappedBody::reserve(limit)?;
            mapped.push(&small)?;
            mapped.push(&data)?;
            Self::Large(mapped)
        } else {
            small.extend_from_slice(&data);
            Self::Small(small)
        };
        Ok(())
    }

    fn finish(self) -> Bytes {
        match self {
            Self::Empty => Bytes::new(),
            Self::Single(data) => data,
            Self::Small(small) => small.into(),
            Self::Large(mapped) => Bytes::from_owner(mapped),
        }
    }
}

impl MappedBody {
    /// Reserves addresses for a body of this size. They take no memory before bytes are written.
    fn reserve(limit: Size) -> Result<Self, Fault> {
        let length = usize::try_from(limit.0).unwrap_or(usize::MAX);
        match MmapOptions::new().len(length).no_reserve_swap().map_anon() {
            Ok(pages) => Ok(Self { pages: Some(pages), length: 0 }),
            Err(error) => {
                tracing::error!(%limit, %error, "cannot reserve addresses for a request body: check the limit of the address space (ulimit -v) and vm.overcommit_memory");
                Err(Fault::Internal)
            }
        }
    }

    fn push(&mut self, data: &[u8]) -> Result<(), Fault> {
        let end = self.length + data.len();
        let room = self.pages.as_mut().and_then(|pages| pages.get_mut(self.length..end));
        room.ok_or(Fault::Internal)?.copy_from_slice(data);
        self.length = end;
        Ok(())
    }
}

impl AsRef<[u8]> for MappedBody {
    fn as_ref(&self) -> &[u8] {
        self.pages.as_deref().and_then(|pages| pages.get(..self.length)).unwrap_or_default()
    }
}

impl Drop for MappedBody {
    fn drop(&mut self) {
        let pages = self.pages.take();
        // Without a runtime there are no streams to stall.
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn_blocking(move || drop(pages)));
        }
    }
}

impl BodyByteCounter {
    /// Adds bytes and returns the new count.
    fn add(&self, bytes: u64) -> u64 {
        self.0.fetch_add(bytes, Ordering::Relaxed) + bytes
    }
}

impl BodyBytesGuard {
    fn add(&mut self, bytes: u64, limits: &ApiLimits) -> Result<(), Fault> {
        let share = units::Bytes((limits.body_total.0 / CLIENT_SHARE_DIVISOR).max(limits.body.0));
        self.bytes += bytes;
        // Charge every counter before checking any, since the drop releases from all of them.
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

fn too_slow(limits: &ApiLimits) -> Fault {
    Fault::RequestTimeout {
        what: format!(
            "the body arrived slower than limits.bodyRate ({}/s) plus a thousandth of the received bytes per second",
            limits.body_rate
        ),
    }
}

/// Maps a body error: a body that ends early or is reset by HTTP/2 is a disconnect, and an undecodable body is a bad
/// request.
fn body_error_fault(error: &(dyn std::error::Error + 'static)) -> Fault {
    let malformed = std::iter::successors(Some(error), |e| e.source()).find_map(|e| {
        match e.downcast_ref::<RequestBodyError>() {
            Some(RequestBodyError::Malformed(reason)) => Some(*reason),
            Some(RequestBodyError::Disconnected | RequestBodyError::ExchangeEnded) | None => None,
        }
    });
    match malformed {
        Some(reason) => Fault::InvalidRequest {
            message: format!("cannot read the body: its framing is broken: {reason}"),
            param: None,
        },
        None => Fault::ClientDisconnected { phase: DisconnectPhase::Connecting },
    }
}

#[cfg(test)]
mod tests;
