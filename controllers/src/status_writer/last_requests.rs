//! Paces the writes of statuses in which only the time of the last request is another.
//!
//! Requests move that time for every model that they use. Without a limit for all models together, the writes would
//! grow with the number of models in use, and each write goes to every gateway.

use rouse::{
    due_times::DueTimes,
    units::{Millis, Tick},
};

use crate::crd::ledger::ObjectName;

/// Minimum interval between two such writes, over all models.
const INTERVAL: Millis = Millis(250);

/// The models whose statuses wait for such a write.
#[derive(Debug, Default)]
pub(super) struct LastRequestPacer {
    /// By the moment since when each waits.
    waiting: DueTimes<ObjectName>,
    /// When the next one may be written.
    next: Tick,
}

impl LastRequestPacer {
    /// Begins a write of this model's status if it is the model's turn. Otherwise the model waits for that.
    pub(super) fn begin(&mut self, model: &ObjectName, now: Tick) -> bool {
        if self.waiting.get(model).is_none() {
            self.waiting.set(model, Some(now));
        }
        let begins = self.turn(now) == Some(model);
        if begins {
            self.next = now + INTERVAL;
            self.forget(model);
        }
        begins
    }

    /// Returns the model that has waited longest, if it is time for a write.
    pub(super) fn turn(&self, now: Tick) -> Option<&ObjectName> {
        self.waiting.due_by(now).next().filter(|_| now >= self.next)
    }

    /// Forgets a model that needs no such write any more.
    pub(super) fn forget(&mut self, model: &ObjectName) {
        self.waiting.set(model, None);
    }

    pub(super) fn has_waiting(&self) -> bool {
        self.waiting.first().is_some()
    }

    /// When to look again who has a turn. Later than now, also if a model has its turn and all places for writes are
    /// taken.
    pub(super) fn next_turn(&self, now: Tick) -> Option<Tick> {
        self.has_waiting().then(|| if self.next > now { self.next } else { now + INTERVAL })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 1,000 models in use, each of which asks for a write every half minute.
    #[test]
    fn each_model_has_its_turn_and_all_together_are_written_four_times_a_second() {
        let model = |n: u64| ObjectName { namespace: "chat".to_owned(), name: format!("model-{n:04}") };
        let mut pacer = LastRequestPacer::default();
        let mut written = Vec::new();
        for at in 0..250_000_u64 {
            let now = Tick(at + 1);
            let asking = model(at % 30_000 / 30);
            if at % 30 == 0 && pacer.begin(&asking, now) {
                written.push(asking);
            }
            while let Some(turn) = pacer.turn(now).cloned() {
                assert!(pacer.begin(&turn, now));
                written.push(turn);
            }
            assert!(pacer.next_turn(now).is_none_or(|at| at > now));
        }
        assert_eq!(written.len(), 1000, "writes in 250 seconds");
        let first: std::collections::BTreeSet<&ObjectName> = written[..1000].iter().collect();
        assert_eq!(first.len(), 1000, "none twice before all others");
        pacer.forget(&model(0));
        assert_eq!(pacer.waiting.get(&model(0)), None);
    }
}
