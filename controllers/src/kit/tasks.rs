//! The tasks of one component in one term.

use std::{future, panic, sync::Arc, time::Duration};

use tokio::{
    sync::Semaphore,
    task::{JoinError, JoinSet},
    time,
};

/// Maximum number of tasks that run at once; further ones wait. The decisions have few commands outstanding for each
/// object.
///
/// Some tasks wait for a drain, a sleep or a wake, up to minutes, and must not hold up all others: a rollout drains on
/// many nodes at once. So there are two for each of 1,000 nodes.
const MAX_RUNNING: usize = 2048;

/// Returns the outcome of a task that has ended. Panics if the task did, and never completes if the runtime ends.
pub(crate) async fn outcome<T>(joined: Result<T, JoinError>) -> T {
    match joined.map_err(JoinError::try_into_panic) {
        Ok(outcome) => outcome,
        Err(Ok(payload)) => panic::resume_unwind(payload),
        Err(Err(_)) => future::pending().await,
    }
}

/// Runs tasks and returns their outcomes. Dropping it drops all tasks.
#[derive(Debug)]
pub(crate) struct Tasks<T> {
    running: JoinSet<T>,
    permits: Arc<Semaphore>,
}

impl<T: 'static> Default for Tasks<T> {
    fn default() -> Self {
        Self { running: JoinSet::new(), permits: Arc::new(Semaphore::new(MAX_RUNNING)) }
    }
}

impl<T: Send + 'static> Tasks<T> {
    /// Runs a task.
    pub(crate) fn spawn(&mut self, task: impl Future<Output = T> + Send + 'static) {
        let permits = Arc::clone(&self.permits);
        self.running.spawn(async move {
            // Nothing closes the semaphore.
            let _permit = permits.acquire().await.ok();
            task.await
        });
    }

    /// Returns this outcome after the delay.
    pub(crate) fn after(&mut self, delay: Duration, outcome: T) {
        self.running.spawn(async move {
            time::sleep(delay).await;
            outcome
        });
    }

    /// Returns the next outcome. Never completes while there is no task.
    pub(super) async fn next(&mut self) -> T {
        loop {
            match self.running.join_next().await {
                Some(Ok(outcome)) => return outcome,
                Some(Err(error)) if error.is_cancelled() => {}
                Some(Err(error)) => tracing::error!(%error, "controller task panicked"),
                None => return std::future::pending().await,
            }
        }
    }
}
