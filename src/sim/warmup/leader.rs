//! The leader: takes what it observes, plans, executes, writes the status, and is killed.

use std::sync::Arc;

use super::{
    LEASE_TIME, STATUS_INTERVAL, WATCH_TIME, WRITE_TIME,
    object::WarmupObject,
    world::{WarmupWorld, WarmupWorldEvent},
};
use crate::{
    units::{Millis, Tick},
    warmup::{WarmupCommand, WarmupEvent, WarmupId, WarmupPlan, WarmupReport, Warmups},
};

impl WarmupWorld {
    /// A new leader observes all that the API server has.
    pub(super) fn begin_term(&mut self) {
        self.epoch += 1;
        self.warmups = Warmups::new();
        self.first.begin_term();
        self.second.iter_mut().for_each(WarmupObject::begin_term);
        let mut events = vec![WarmupEvent::LeadershipGained];
        for object in self.objects().filter(|object| object.request.is_some()) {
            events.extend(warmup_event(object));
            let targets = object.targets(&self.nodes);
            events.push(WarmupEvent::Targets { id: object.id.clone(), targets });
        }
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

    /// The watch delivers the Warmup.
    pub(super) fn observe_warmup(&mut self, id: &WarmupId) {
        if let Some(event) = self.object(id).and_then(warmup_event) {
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
        for (id, report) in plan.reports {
            self.take_report(&id, report);
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
    fn take_report(&mut self, id: &WarmupId, report: Arc<WarmupReport>) {
        let (now, epoch) = (self.now, self.epoch);
        let Some(object) = self.object_mut(id) else { return };
        let is_urgent = report.progress.phase != object.stored.phase;
        let due = object.last_status_at.map_or(now, |at| at + STATUS_INTERVAL).max(now);
        let after = if is_urgent { Millis::ZERO } else { due.since(now) };
        object.report = Some(report);
        if is_urgent || !object.is_status_due {
            object.is_status_due = true;
            self.schedule(after, WarmupWorldEvent::WriteStatus(epoch, id.clone()));
        }
    }

    pub(super) fn write_status(&mut self, epoch: u64, id: &WarmupId) {
        let (now, is_current) = (self.now, epoch == self.epoch);
        let Some(object) = self.object_mut(id).filter(|object| is_current && object.request.is_some()) else {
            return;
        };
        let Some(report) = object.report.clone() else { return };
        (object.is_status_due, object.last_status_at) = (false, Some(now));
        object.stored = Arc::new(report.progress.clone());
        self.tally.status_writes += 1;
        let record = serde_json::to_string(&report.progress.record.groups()).unwrap_or_default();
        let listing = serde_json::to_string(&report.nodes).unwrap_or_default();
        self.tally.max_record_bytes = self.tally.max_record_bytes.max(record.len());
        self.tally.max_listing_bytes = self.tally.max_listing_bytes.max(listing.len());
        self.observe_warmup(id);
    }
}

fn warmup_event(object: &WarmupObject) -> Option<WarmupEvent> {
    let request = Arc::clone(object.request.as_ref()?);
    Some(WarmupEvent::Warmup { id: object.id.clone(), request, stored: Arc::clone(&object.stored) })
}
