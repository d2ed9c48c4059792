//! A task of a takeover.

use std::future;

use tokio::task::JoinSet;

use crate::kit;

/// Work that goes on while the takeover does something else. Its drop ends the work.
pub(in crate::platform) struct TakeoverTask<T>(JoinSet<T>);

impl<T: Send + 'static> TakeoverTask<T> {
    /// Starts the work on this runtime.
    pub(in crate::platform) fn start(work: impl Future<Output = T> + Send + 'static) -> Self {
        let mut task = JoinSet::new();
        task.spawn(work);
        Self(task)
    }

    /// Returns the outcome of the work. Panics if the work did.
    pub(super) async fn finish(mut self) -> T {
        match self.0.join_next().await {
            Some(joined) => kit::outcome(joined).await,
            None => future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    #[tokio::test]
    async fn the_work_goes_on_meanwhile_and_ends_with_a_takeover_that_is_dropped() {
        let (sent, received) = oneshot::channel();
        let task = TakeoverTask::start(async move { sent.send(7).is_ok() });
        assert_eq!(received.await, Ok(7), "the work has begun before its outcome is awaited");
        assert!(task.finish().await);

        let (sent, received) = oneshot::channel::<()>();
        let task = TakeoverTask::start(async move {
            let _held = sent;
            future::pending::<()>().await;
        });
        tokio::task::yield_now().await;
        drop(task);
        assert!(received.await.is_err(), "the work is dropped, and with it the sender");
    }
}
