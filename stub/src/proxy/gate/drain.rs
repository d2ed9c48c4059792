//! One drain: its deadline, what a repeated order changes, and the exchanges that it cuts.

use std::sync::{Arc, atomic::Ordering};

use rouse_net::stub_api::DrainDeadlineAction;
use tokio::time::Instant;

use super::GateGeneration;

/// The generations that one drain revoked. A generation is revoked once, so its cut exchanges belong to that drain even
/// if they end after the gate reopens.
#[derive(Debug, Default)]
pub(super) struct CutGenerations {
    pub(super) generations: Vec<Arc<GateGeneration>>,
    /// The drain has ended.
    pub(super) drain_over: bool,
}

#[derive(Debug)]
pub(super) struct GateDrain {
    pub(super) deadline: Option<Instant>,
    pub(super) on_deadline: DrainDeadlineAction,
    pub(super) stage: DrainStage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum DrainStage {
    Running,
    /// The deadline passed. Depending on the action, the remaining exchanges continue or are being cut.
    DeadlinePassed,
    Done,
}

impl CutGenerations {
    /// Returns the number of cut exchanges; `None` while it may grow, or if the drain was abandoned before its
    /// deadline.
    pub(super) fn count(&self) -> Option<u32> {
        let all_ended =
            !self.generations.is_empty() && !self.generations.iter().any(|generation| generation.is_used());
        (self.drain_over || all_ended).then(|| {
            self.generations.iter().map(|generation| generation.cut_exchanges.load(Ordering::Acquire)).sum()
        })
    }
}

impl GateDrain {
    /// Merges a repeated order. The deadline counts from the first order, so that a repeat cannot postpone it.
    /// Exchanges are cut only at a deadline given with `Cut`, never at one given with `Keep`.
    pub(super) fn tighten(&mut self, again: Self) {
        match (self.stage, self.on_deadline, again.on_deadline) {
            (DrainStage::Running, before, now) if before == now => {
                self.deadline = [self.deadline, again.deadline].into_iter().flatten().min();
            }
            (
                DrainStage::Running | DrainStage::DeadlinePassed,
                DrainDeadlineAction::Keep,
                DrainDeadlineAction::Cut,
            ) => *self = again,
            (DrainStage::Running | DrainStage::DeadlinePassed | DrainStage::Done, _, _) => {}
        }
    }
}
