//! The leader: takes what it observes, plans, executes, writes the status, and is killed.

use std::sync::Arc;

use super::{
    LEASE_TIME, STATUS_INTERVAL, WATCH_TIME, WRITE_TIME,
    world::{WarmupWorld, WarmupWorldEvent},
};
use crate::{
    units::{Millis, Tick},
    warmup::{WarmupCommand, WarmupEvent, WarmupPlan, WarmupReport, WarmupTargets, Warmups},
};

impl WarmupWorld {
    /// A new leader observes all that the API server has.
    pub(super) fn begin_term(&mut self) {
        self.epoch += 1;
        self.warmups = Warmups::new();
        (self.report, self.is_status_due) = (None, false);
        let mut events = vec![WarmupEvent::LeadershipGained];
        events.extend(self.warmup_events());
        let nodes = self.nodes.iter();
        events.extend(
            nodes.map(|(name, facts)| WarmupEvent::Node { name: name.clone(), facts: Some(facts.clone()) }),
        );
        let pods = self.pods.iter();
        events
            .extend(pods.map(|(name, pod)| WarmupEvent::Pod { name: name.clone(), pod: Some(pod.clone()) }));
        events.push(WarmupEvent::Listed);
        self.observed.clear();
        events.into_iter().for_each(|event| self.deliver(event));
    }

    /// The leader takes what it observes.
    pub(super) fn deliver(&mut self, event: WarmupEvent) {
        if let WarmupEvent::Pod { name, pod } = &event {
            match pod {
                Some(pod) => drop(self.observed.insert(name.clone(), pod.state.clone())),
                None => drop(self.observed.remove(name)),
            }
        }
        self.warmups.on(event, self.now);
    }

    fn warmup_events(&self) -> Vec<WarmupEvent> {
        let Some(request) = &self.request else { return Vec::new() };
        let targets = self.nodes.keys().map(|name| (name.clone(), Arc::clone(&self.items))).collect();
        vec![
            WarmupEvent::Warmup {
                id: self.id.clone(),
                request: Arc::clone(request),
                stored: Arc::clone(&self.stored),
            },
            WarmupEvent::Targets { id: self.id.clone(), targets: WarmupTargets::Nodes(targets) },
        ]
    }

    /// The watch delivers the Warmup.
    pub(super) fn observe_warmup(&mut self) {
        for event in self.warmup_events().into_iter().take(1) {
            self.observe(event);
        }
    }

    /// The watch delivers an event after a while, in order.
    pub(super) fn observe(&mut self, event: WarmupEvent) {
        let after = Millis(WATCH_TIME.1);
        self.schedule(after, WarmupWorldEvent::Observed(self.epoch, event));
    }

    pub(super) fn turn(&mut self, plan: &mut dyn FnMut(&mut Warmups, Tick) -> WarmupPlan) {
        let plan = plan(&mut self.warmups, self.now);
        let mut issued = plan.commands;
        if let Some(limit) = self.scenario.kill_leader_after {
            let left = limit.saturating_sub(self.tally.commands);
            issued.truncate(usize::try_from(left).unwrap_or(usize::MAX));
        }
        self.warmups.issued(&issued, self.now);
        for command in issued {
            self.tally.commands += 1;
            self.count_command(&command);
            let after = self.between(WRITE_TIME);
            let seen = match &command {
                WarmupCommand::DeletePod { name, .. } => self.observed.get(name).cloned(),
                _ => None,
            };
            self.schedule(after, WarmupWorldEvent::Arrives(self.epoch, command, seen));
        }
        for report in plan.reports.into_values() {
            self.take_report(report);
        }
        if self.scenario.kill_leader_after.is_some_and(|limit| self.tally.commands >= limit) {
            self.kill_leader();
        }
    }

    /// Kills the leader. Its writes under way take effect, and it sees no replies.
    fn kill_leader(&mut self) {
        self.scenario.kill_leader_after = None;
        self.warmups = Warmups::new();
        self.epoch += 1;
        self.schedule(LEASE_TIME, WarmupWorldEvent::LeaderBegins);
    }

    fn count_command(&mut self, command: &WarmupCommand) {
        let node = match command {
            WarmupCommand::CreatePod { node, .. }
            | WarmupCommand::SetWarm { node, .. }
            | WarmupCommand::RemoveWarm { node, .. } => Some(node.clone()),
            WarmupCommand::DeletePod { name, .. } => self.pods.get(name).map(|pod| pod.node.clone()),
            WarmupCommand::DeleteWarmup { .. } => None,
        };
        if let Some(node) = node {
            *self.commands_by_node.entry(node).or_default() += 1;
        }
    }

    /// Schedules a write of the status, at once if the phase has changed.
    fn take_report(&mut self, report: Arc<WarmupReport>) {
        let is_urgent = report.progress.phase != self.stored.phase;
        let due = self.last_status_at.map_or(self.now, |at| at + STATUS_INTERVAL).max(self.now);
        let after = if is_urgent { Millis::ZERO } else { due.since(self.now) };
        self.report = Some(report);
        if is_urgent || !self.is_status_due {
            self.is_status_due = true;
            self.schedule(after, WarmupWorldEvent::WriteStatus(self.epoch));
        }
    }

    pub(super) fn write_status(&mut self, epoch: u64) {
        let Some(report) = self.report.clone().filter(|_| epoch == self.epoch && self.request.is_some())
        else {
            return;
        };
        (self.is_status_due, self.last_status_at) = (false, Some(self.now));
        self.tally.status_writes += 1;
        let record = serde_json::to_string(&report.progress.record.groups()).unwrap_or_default();
        let listing = serde_json::to_string(&report.nodes).unwrap_or_default();
        self.tally.max_record_bytes = self.tally.max_record_bytes.max(record.len());
        self.tally.max_listing_bytes = self.tally.max_listing_bytes.max(listing.len());
        self.stored = Arc::new(report.progress.clone());
        self.observe_warmup();
    }
}
