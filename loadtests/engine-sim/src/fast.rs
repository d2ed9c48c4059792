//! The backend of load tests: an engine that costs next to nothing, so that it and the load client together, on one core,
//! outrun a proxy on another. It parses no JSON and keeps no bodies; a client can check each byte of what it says (`wire`).

mod connection;
mod dated_response;
mod exact_timer;
mod head;
mod request;
pub mod wire;

use std::sync::{
    Arc,
    atomic::{AtomicU32, Ordering::Relaxed},
};

use tokio::{net::TcpListener, task::JoinSet};

use crate::{log, out_of_descriptors};
use request::KeyFinders;

/// Thousands of streams are opened within a second or two; the kernel's own limit (`somaxconn`) holds as well.
pub(crate) const BACKLOG: u32 = 16_384;

/// What all connections share.
struct FastEngine {
    responses: wire::FastResponses,
    finders: KeyFinders,
    /// Streams so far; gives each of them a phase of its own.
    streams: AtomicU32,
}

impl FastEngine {
    /// A share of an interval, in [0, 1), that is far from those of the streams just before: steps of the golden ratio.
    fn phase(&self) -> f64 {
        (f64::from(self.streams.fetch_add(1, Relaxed)) * 0.618_033_988_749_894_9).fract()
    }
}

/// Serves `model` on `listener` for as long as it is polled.
pub async fn serve(listener: TcpListener, model: &str) {
    let engine = Arc::new(FastEngine {
        responses: wire::FastResponses::new(model),
        finders: KeyFinders::new(),
        streams: 0.into(),
    });
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((io, _)) => {
                    tasks.spawn(connection::serve(Arc::clone(&engine), io));
                }
                Err(error) => {
                    log::error(&error.to_string());
                    if out_of_descriptors(&error) {
                        tasks.join_next().await;
                    }
                }
            },
            Some(_) = tasks.join_next() => {}
        }
    }
}
