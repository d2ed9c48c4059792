//! What a client can put on a proxy, and what it saw.

use std::{net::SocketAddr, time::Duration};

use hdrhistogram::Histogram;

/// How requests are spaced.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Pace {
    /// Each connection sends its next request when the last one is answered.
    Closed,
    /// So many requests a second over all connections, on a schedule that a slow answer does not shift: latency is
    /// measured from when a request was due, so a stall is seen by all who would have come meanwhile.
    Open { per_second: f64 },
}

/// Non-streaming requests for a time.
#[derive(Clone, Debug)]
pub(crate) struct Requests {
    pub(crate) proxy: SocketAddr,
    pub(crate) model: String,
    /// Sent as a bearer.
    pub(crate) key: String,
    pub(crate) connections: usize,
    /// Bytes of the request's whole body.
    pub(crate) body: usize,
    /// How long the engine takes for an answer.
    pub(crate) engine_time: Duration,
    pub(crate) pace: Pace,
    pub(crate) lasts: Duration,
}

/// Streams, all open at once.
#[derive(Clone, Debug)]
pub(crate) struct Streams {
    pub(crate) proxy: SocketAddr,
    pub(crate) model: String,
    pub(crate) key: String,
    pub(crate) streams: usize,
    /// Between two events of one stream; 0: as fast as the sockets take them.
    pub(crate) interval: Duration,
    /// Events of one stream.
    pub(crate) events: u32,
}

/// What became of a load. Times in microseconds.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
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
}
