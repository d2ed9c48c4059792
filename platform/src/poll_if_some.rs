//! Awaits work that may be absent.

use std::{future::pending, pin::Pin};

/// Polls the work to its end. `None`: never completes.
///
/// A task that runs an engine awaits several of these at once, and the work stays in its place when another completes
/// first. After it has completed, the caller must replace it.
pub async fn poll_if_some<T>(work: &mut Option<Pin<Box<dyn Future<Output = T> + Send>>>) -> T {
    match work {
        Some(work) => work.as_mut().await,
        None => pending().await,
    }
}
