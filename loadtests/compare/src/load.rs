//! Loads for a proxy, and their results.
//!
//! The client shares its core with the backend, so its own cost reduces the load that the proxy can get. It therefore
//! sends prebuilt requests with one read and one write each, and parses no more HTTP than responses of a known form
//! need. It still checks each byte of them.

mod ad_hoc;
mod chunks;
mod http;
mod idle;
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
pub(crate) use idle::IdleConnections;
pub(crate) use requests::requests;
pub(crate) use soak::SoakArgs;
pub(crate) use streams::{MAX_OPENED_PER_SECOND, streams};

/// How requests are paced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum RequestPace {
    /// Each connection sends its next request after the previous response.
    Closed,
    /// A rate over all connections, on a schedule that a slow response does not shift. Latency counts from a request's
    /// due time, so a stall also counts for all requests that were due meanwhile.
    Open { per_second: f64 },
}

/// Check of each answer and event.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum ResponseCheck {
    /// Each byte must be what the engine sent.
    #[default]
    Bytes,
    /// The text must be what the engine sent, in order: for proxies that write JSON anew.
    Content,
}

/// Non-streaming requests for a time.
#[derive(Clone, Debug)]
pub(crate) struct RequestLoad {
    pub(crate) proxy: SocketAddr,
    pub(crate) model: String,
    /// Sent as a bearer token.
    pub(crate) key: String,
    pub(crate) connections: usize,
    /// Size of the request's body in bytes.
    pub(crate) body: usize,
    /// The engine's response time.
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
    /// Interval between two events of a stream. 0 sends as fast as the sockets accept.
    pub(crate) interval: Duration,
    /// Events per stream.
    pub(crate) events: u32,
    /// Streams opened per second.
    pub(crate) opened_per_second: u32,
    pub(crate) check: ResponseCheck,
}

/// The result of a load. Times in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct LoadResult {
    /// Requests answered in full, or events received.
    pub(crate) units: u64,
    pub(crate) errors: u64,
    /// Events with unexpected bytes or at an unexpected position, or unexpected responses.
    pub(crate) corrupted: u64,
    /// From first to last unit.
    pub(crate) wall: Duration,
    /// For requests: until the response was complete. For streams: until the first event.
    pub(crate) latency: Histogram<u64>,
    /// From an event's sending by the engine to its arrival.
    pub(crate) lag: Histogram<u64>,
    /// The first error.
    pub(crate) first_error: Option<String>,
}

/// Upper bounds against typing errors, which would load the machine instead of a proxy.
const MAX_CONNECTIONS: usize = 20_000;
const MAX_BODY_BYTES: usize = 1 << 30;
const MAX_DURATION: Duration = Duration::from_hours(24);

/// Refuses other machines and unbounded loads.
fn check_bounds(proxy: SocketAddr, connections: usize, body: usize, lasts: Duration) -> anyhow::Result<()> {
    ensure!(proxy.ip().is_loopback(), "load may go only to loopback addresses, and {proxy} is not one");
    ensure!(
        (1..=MAX_CONNECTIONS).contains(&connections),
        "{connections} connections: the range is 1 to {MAX_CONNECTIONS}"
    );
    ensure!(body <= MAX_BODY_BYTES, "a body of {body} bytes is over {MAX_BODY_BYTES}");
    ensure!(lasts <= MAX_DURATION, "{lasts:?} is over {MAX_DURATION:?}");
    Ok(())
}

/// Connections need descriptors, and the usual limit is too low for these loads.
fn raise_descriptor_limit() -> anyhow::Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

#[cfg(test)]
mod tests;
