//! Reply channels of parked requests. The fleet knows a waiter only as plain data.

use std::collections::HashMap;

use rouse::{
    fault::Fault,
    fleet::event::{Waiter, WaiterId},
};
use tokio::sync::oneshot;

use super::GrantedLease;

pub(super) type ParkedReply = oneshot::Sender<Result<GrantedLease, Fault>>;

#[derive(Default)]
pub(super) struct ParkedReplies {
    waiting: HashMap<WaiterId, (Waiter, ParkedReply)>,
}

impl ParkedReplies {
    pub(super) fn add(&mut self, waiter: Waiter, reply: ParkedReply) {
        self.waiting.insert(waiter.id, (waiter, reply));
    }

    pub(super) fn remove(&mut self, id: WaiterId) -> Option<(Waiter, ParkedReply)> {
        self.waiting.remove(&id)
    }

    /// Refuses all parked requests: the driver ends.
    pub(super) fn close(&mut self) {
        for (_, (_, reply)) in self.waiting.drain() {
            drop(reply.send(Err(Fault::ShuttingDown)));
        }
    }
}
