//! Hands published statuses to their one reader: the latest of each model, and no more of them than there are models.
//!
//! A reader that is behind skips intermediate statuses, which a watch may skip as well.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use super::PublishedModel;
use crate::crd::ledger::ObjectName;

/// The latest status of each model that the reader has not taken yet.
#[derive(Debug, Default)]
pub struct PublishedMailbox {
    unread: Mutex<UnreadStatuses>,
    posted: Notify,
}

/// Statuses in the order in which they were posted.
#[derive(Debug, Default)]
struct UnreadStatuses {
    by_number: BTreeMap<u64, Arc<PublishedModel>>,
    numbers: BTreeMap<ObjectName, u64>,
    next: u64,
}

impl PublishedMailbox {
    /// Posts a status, in place of an earlier one of this model that was not taken yet. Never waits.
    pub fn post(&self, status: Arc<PublishedModel>) {
        let mut unread = self.lock();
        let number = unread.next;
        unread.next += 1;
        // The later place keeps the order between models: a model's end precedes its successor of the same name.
        if let Some(earlier) = unread.numbers.insert(status.object.clone(), number) {
            unread.by_number.remove(&earlier);
        }
        unread.by_number.insert(number, status);
        drop(unread);
        self.posted.notify_one();
    }

    /// Takes the oldest status; waits for one if there is none. A call that is dropped takes nothing.
    pub async fn take(&self) -> Arc<PublishedModel> {
        loop {
            if let Some(status) = self.try_take() {
                return status;
            }
            self.posted.notified().await;
        }
    }

    /// Takes the oldest status, if there is one.
    #[must_use]
    pub fn try_take(&self) -> Option<Arc<PublishedModel>> {
        let mut unread = self.lock();
        let (_, status) = unread.by_number.pop_first()?;
        unread.numbers.remove(&status.object);
        Some(status)
    }

    fn lock(&self) -> MutexGuard<'_, UnreadStatuses> {
        self.unread.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::iter;

    use rouse::units::Tick;

    use super::*;

    fn status(object: &str, last_request: u64) -> Arc<PublishedModel> {
        Arc::new(PublishedModel {
            object: ObjectName::new("chat", object),
            model: object.into(),
            engines: Vec::new(),
            last_request: Tick(last_request),
            learned: None,
            learned_of_variants: BTreeMap::new(),
        })
    }

    #[test]
    fn only_the_latest_status_of_each_model_is_kept_in_the_order_of_the_posts() {
        let mailbox = PublishedMailbox::default();
        for number in 0..1000 {
            mailbox.post(status("a", number));
            mailbox.post(status("b", number));
        }
        mailbox.post(status("a", 1000));
        let taken: Vec<Arc<PublishedModel>> = iter::from_fn(|| mailbox.try_take()).collect();
        assert_eq!(taken, [status("b", 999), status("a", 1000)]);
        mailbox.post(status("a", 1001));
        assert_eq!(mailbox.try_take(), Some(status("a", 1001)));
        assert_eq!(mailbox.try_take(), None);
    }

    #[tokio::test]
    async fn a_reader_that_waits_gets_each_status() {
        let mailbox = Arc::new(PublishedMailbox::default());
        let reader = Arc::clone(&mailbox);
        let taken = tokio::spawn(async move { [reader.take().await, reader.take().await] });
        tokio::task::yield_now().await;
        mailbox.post(status("a", 1));
        mailbox.post(status("b", 2));
        assert_eq!(taken.await.unwrap(), [status("a", 1), status("b", 2)]);
    }
}
