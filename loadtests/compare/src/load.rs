//! What a client can put on a proxy, and what it saw.
//!
//! The client shares its core with the backend, so what it costs is taken from what the proxy can be given: prebuilt requests,
//! one read and one write each, and no more of HTTP than answers of a known shape need. Each byte of them is checked all the same.

mod ad_hoc;
mod chunks;
mod http;
mod requests;
mod response_check;
mod soak;
mod streams;
mod tally;

use std::{net::SocketAddr, time::Duration};

use anyhow::ensure;
use hdrhistogram::Histogram;
use nix::sys::resource::{Resource, getrlimit, setrlimit};

pub(crate) use ad_hoc::AdHocLoad;
pub(crate) use requests::requests;
pub(crate) use soak::SoakArgs;
pub(crate) use streams::{MAX_OPENED_PER_SECOND, streams};

/// How requests are spaced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RequestPace {
    /// Each connection sends its next request when the last one is answered.
    Closed,
    /// So many requests a second over all connections, on a schedule that a slow answer does not shift: latency is
    /// measured from when a request was due, so a stall is seen by all who would have come meanwhile.
    Open { per_second: f64 },
}

/// What must hold of each answer and event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ResponseCheck {
    /// Every byte is what the engine sent.
    #[default]
    Bytes,
    /// The text is what the engine sent, and in order: for proxies that write JSON anew.
    Content,
}

/// Non-streaming requests for a time.
#[derive(Clone, Debug)]
pub(crate) struct RequestLoad {
    pub(crate) proxy: SocketAddr,
    pub(crate) model: String,
    /// Sent as a bearer.
    pub(crate) key: String,
    pub(crate) connections: usize,
    /// Bytes of the request's whole body.
    pub(crate) body: usize,
    /// How long the engine takes for an answer.
    pub(crate) engine_time: Duration,
    pub(crate) pace: RequestPace,
    pub(crate) duration: Duration,
    pub(crate) check: ResponseCheck,
}

/// Streams, all open at once.
#[derive(Clone, Debug)]
pub(crate) struct StreamLoad {
    pub(crate) proxy: SocketAddr,
    pub(crate) model: String,
    pub(crate) key: String,
    pub(crate) streams: usize,
    /// Between two events of one stream; 0: as fast as the sockets take them.
    pub(crate) interval: Duration,
    /// Events of one stream.
    pub(crate) events: u32,
    /// Streams opened in a second.
    pub(crate) opened_per_second: u32,
    pub(crate) check: ResponseCheck,
}

/// What became of a load. Times in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct LoadResult {
    /// Requests that were answered in full, or events that came.
    pub(crate) units: u64,
    pub(crate) errors: u64,
    /// Events that were not the expected bytes at the expected place, or answers that were not the expected ones.
    pub(crate) corrupted: u64,
    /// From first to last unit.
    pub(crate) wall: Duration,
    /// Of requests: until the answer was complete. Of streams: until the first event.
    pub(crate) latency: Histogram<u64>,
    /// From an event's sending by the engine to its coming.
    pub(crate) lag: Histogram<u64>,
    /// What went wrong first.
    pub(crate) first_error: Option<String>,
}

/// Beyond these a typing error would load the machine, not a proxy.
const MAX_CONNECTIONS: usize = 20_000;
const MAX_BODY_BYTES: usize = 1 << 30;
const MAX_DURATION: Duration = Duration::from_hours(24);

/// Refuses what is not this machine, or not bounded.
fn check_bounds(proxy: SocketAddr, connections: usize, body: usize, lasts: Duration) -> anyhow::Result<()> {
    ensure!(proxy.ip().is_loopback(), "load goes to loopback addresses alone, and {proxy} is none");
    ensure!(
        (1..=MAX_CONNECTIONS).contains(&connections),
        "{connections} connections: 1 to {MAX_CONNECTIONS} can be had"
    );
    ensure!(body <= MAX_BODY_BYTES, "a body of {body} bytes is over {MAX_BODY_BYTES}");
    ensure!(lasts <= MAX_DURATION, "{lasts:?} is over {MAX_DURATION:?}");
    Ok(())
}

/// Connections are descriptors, and the usual limit is below what is measured here.
fn raise_descriptor_limit() -> anyhow::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

#[cfg(test)]
mod tests;
