//! Plans in two passes: first what the observations mean, for all Warmups, then what each Warmup orders.
//!
//! The passes are apart because Warmups wait for each other's pulls: the end of one must be known before another
//! decides.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    Warmups, command::WarmupCommand, ids::WarmupId, orders::PlannedPulls, report::WarmupReport,
    state::RefreshEffects,
};
use crate::units::Tick;

/// The commands to execute now, and what has changed for the statuses.
#[derive(Clone, Debug, Default)]
pub struct WarmupPlan {
    pub commands: Vec<WarmupCommand>,
    /// The reports of Warmups whose report differs from their last one.
    pub reports: BTreeMap<WarmupId, Arc<WarmupReport>>,
}

impl Warmups {
    pub(super) fn build_plan(&mut self, now: Tick) -> WarmupPlan {
        self.dirty.extend(self.due.due_by(now).cloned());
        self.refresh_all(now);
        // Of two Warmups that need the same pull, the older one begins.
        let created = |id: &WarmupId| {
            let request = self.warmups.get(id).and_then(|state| state.request.as_ref());
            request.map(|request| request.created)
        };
        let mut order: Vec<(Option<Tick>, WarmupId)> =
            self.dirty.iter().map(|id| (created(id), id.clone())).collect();
        order.sort_unstable();
        let mut plan = WarmupPlan::default();
        let mut pulls = PlannedPulls::new();
        for (_, id) in order {
            self.plan_one(&id, &mut pulls, &mut plan, now);
        }
        plan.commands.append(&mut self.label_commands(now));
        plan
    }

    fn refresh_all(&mut self, now: Tick) {
        let mut queue: Vec<WarmupId> = self.dirty.iter().cloned().collect();
        while let Some(id) = queue.pop() {
            queue.extend(self.refresh_one(&id, now));
        }
    }

    /// Returns the Warmups whose nodes are affected.
    fn refresh_one(&mut self, id: &WarmupId, now: Tick) -> BTreeSet<WarmupId> {
        let Some(state) = self.warmups.get_mut(id) else { return BTreeSet::new() };
        let RefreshEffects { pulls_changed, outcomes_changed } = state.refresh(id, &mut self.nodes, now);
        self.labels_dirty.extend(outcomes_changed);
        let mut affected = BTreeSet::new();
        for name in pulls_changed {
            let Some(known) = self.nodes.get(&name) else { continue };
            for other in known.warmups.iter().filter(|other| *other != id) {
                let Some(state) = self.warmups.get_mut(other) else { continue };
                state.dirty.insert(name.clone());
                self.dirty.insert(other.clone());
                affected.insert(other.clone());
            }
        }
        affected
    }

    fn plan_one(&mut self, id: &WarmupId, pulls: &mut PlannedPulls, plan: &mut WarmupPlan, now: Tick) {
        let Some(state) = self.warmups.get_mut(id) else {
            self.dirty.remove(id);
            return;
        };
        if state.step_phase(now) {
            state.mark_all_dirty();
            self.refresh_one(id, now);
        }
        let Some(state) = self.warmups.get_mut(id) else { return };
        let mut commands = match state.request {
            Some(_) => state.orders(id, &self.nodes, pulls, now),
            None => Vec::new(),
        };
        let report = state.report(id, &self.nodes, now);
        if let Some(report) = report.filter(|report| state.last_report.as_deref() != Some(report)) {
            let report = Arc::new(report);
            state.last_report = Some(Arc::clone(&report));
            plan.reports.insert(id.clone(), report);
        }
        let next = state.next_deadline(now);
        let is_gone = state.request.is_none() && state.targets.is_none() && state.nodes.is_empty();
        self.due.set(id, next);
        // Until its commands are recorded as issued, they are planned again.
        if commands.is_empty() {
            self.dirty.remove(id);
        }
        plan.commands.append(&mut commands);
        if is_gone {
            self.warmups.remove(id);
            self.dirty.remove(id);
        }
    }
}
