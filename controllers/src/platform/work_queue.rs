//! Bounded queues whose sender neither waits nor loses an item.
//!
//! The driver's turn must not wait for the engine manager, which itself waits for the driver's event channel; and the
//! manager must not wait for an engine task or for a pool's ledger, or it could not see that this gateway no longer
//! leads. A lost item would leave an engine in a state that the fleet does not expect. So each queue has room for all
//! items that can be outstanding, and a full queue is a broken invariant: the gateway reports it and ends, and the next
//! leader takes over what runs.
//!
//! How many can be outstanding: the fleet orders the next step of an engine once it has the outcome of the last one,
//! and an order without an outcome (a gate, a shrunk reservation) comes with a step. That is one step, one stop, one
//! probe and the gate's orders, less than ten for each engine. [`MAX_PER_ENGINE`] is three times that. A change of a
//! pool's ledger follows from a step as well. During a takeover the fleet orders no steps.

use std::sync::Arc;

use tokio::sync::{
    Notify,
    mpsc::{self, error::TrySendError},
};

/// Maximum number of outstanding items of one engine.
pub(super) const MAX_PER_ENGINE: usize = 32;
/// Number of engines that the shared queues have room for.
const MAX_ENGINES: usize = 8192;
/// Maximum number of outstanding items of all engines. A queue takes memory only for the items that are in it.
pub(super) const MAX_OF_ALL_ENGINES: usize = MAX_ENGINES * MAX_PER_ENGINE;

/// Reports that the platform cannot go on, which ends the gateway.
#[derive(Clone, Debug, Default)]
pub(super) struct PlatformFailure(Arc<Notify>);

impl PlatformFailure {
    pub(super) fn report(&self) {
        self.0.notify_one();
    }

    /// Returns once a failure is reported.
    pub(super) async fn reported(&self) {
        self.0.notified().await;
    }
}

/// The sender of a bounded queue.
pub(super) struct WorkQueue<T> {
    name: &'static str,
    items: mpsc::Sender<T>,
    failure: PlatformFailure,
}

impl<T> WorkQueue<T> {
    /// `name`: what is in the queue, for the log.
    pub(super) fn new(
        name: &'static str,
        capacity: usize,
        failure: &PlatformFailure,
    ) -> (Self, mpsc::Receiver<T>) {
        let (items, received) = mpsc::channel(capacity);
        (Self { name, items, failure: failure.clone() }, received)
    }

    /// Appends an item. Returns false if the receiver has ended.
    ///
    /// With a full queue, the item is lost and the gateway ends.
    pub(super) fn push(&self, item: T) -> bool {
        match self.items.try_send(item) {
            Ok(()) => true,
            Err(TrySendError::Closed(_)) => false,
            Err(TrySendError::Full(_)) => {
                let capacity = self.items.max_capacity();
                tracing::error!(
                    queue = self.name,
                    capacity,
                    "a queue of the engine manager is full: its reader hangs, and this gateway ends"
                );
                self.failure.report();
                true
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_full_queue_ends_the_gateway_and_one_without_a_reader_does_not() {
        let failure = PlatformFailure::default();
        let (queue, mut items) = WorkQueue::new("numbers", 2, &failure);
        assert!(queue.push(1) && queue.push(2));
        assert!(timeout(Duration::from_millis(1), failure.reported()).await.is_err());
        assert!(queue.push(3));
        failure.reported().await;
        assert_eq!((items.recv().await, items.recv().await), (Some(1), Some(2)));
        drop(items);
        assert!(!queue.push(4));
        assert!(timeout(Duration::from_millis(1), failure.reported()).await.is_err());
    }
}
