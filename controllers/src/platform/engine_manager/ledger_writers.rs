//! The writers of the pools' ledgers, one for each pool that was used in this term.

use std::{collections::BTreeMap, sync::Arc};

use super::EngineManager;
use crate::platform::{
    ModelPlacement,
    ledger_writer::{self, LedgerChange},
    work_queue::{MAX_OF_ALL_ENGINES, WorkQueue},
};

/// Queues of the ledger writers, by pool.
pub(super) type LedgerWriters = BTreeMap<String, WorkQueue<LedgerChange>>;

impl EngineManager {
    /// Requests a change of the ledger of the placement's pool, if it has one.
    pub(super) fn change_ledger(&mut self, placement: &ModelPlacement, change: LedgerChange) {
        if let Some(pool) = &placement.pool {
            self.change_pool_ledger(pool, change);
        }
    }

    /// Requests a change of this pool's ledger. Starts the pool's writer on first use.
    ///
    /// While the ledger cannot be written, the pool's engines stop at the next step that needs a reservation or a
    /// release. So few changes of each engine wait.
    pub(in crate::platform) fn change_pool_ledger(&mut self, pool: &str, change: LedgerChange) {
        if let Some(writer) = self.ledger_writers.get(pool) {
            // A writer ends only with this leadership.
            writer.push(change);
            return;
        }
        let (writer, changes) = WorkQueue::new("ledger changes", MAX_OF_ALL_ENGINES, &self.shared.failure);
        self.tasks.spawn(ledger_writer::run(Arc::clone(&self.shared), pool.to_owned(), changes));
        writer.push(change);
        self.ledger_writers.insert(pool.to_owned(), writer);
    }
}
