//! The backend of load tests: an engine so cheap that it and the load client, together on one core, outpace a proxy on
//! another core. It parses no JSON and keeps no bodies. A client can check each byte of its responses (`wire`).

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

/// Thousands of streams open within a second or two. The kernel's own limit (`somaxconn`) also applies.
pub(crate) const BACKLOG: u32 = 16_384;

/// State shared by all connections.
struct FastEngine {
    responses: wire::FastResponses,
    finders: KeyFinders,
    /// Streams so far, which gives each stream its own phase.
    streams: AtomicU32,
}

impl FastEngine {
    /// A fraction of an interval, in [0, 1), far from those of the preceding streams: steps of the golden ratio.
    fn phase(&self) -> f64 {
        (f64::from(self.streams.fetch_add(1, Relaxed)) * 0.618_033_988_749_894_9).fract()
    }
}

/// Serves `model` on `listener` while polled.
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
