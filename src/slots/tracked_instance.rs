//! What the leader knows of one instance, and what it writes next to it.

use std::collections::BTreeMap;

use super::{
    command::{InstanceEnd, NodeLoss, SlotsCommand},
    event::InstanceFacts,
    ids::InstanceName,
    instance::InstanceUsage,
    slot_node::SlotNode,
};
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
};

/// Time until the configuration of an instance must be observed. The two kinds are watched apart.
const CONFIGURATION_WITHIN: Millis = Millis::secs(30);

/// One instance.
#[derive(Clone, Debug)]
pub(super) struct TrackedInstance {
    pub(super) facts: InstanceFacts,
    pub(super) usage: InstanceUsage,
    /// No node sees the device since.
    unseen_since: Option<Tick>,
    /// Its configuration does not exist since.
    orphaned_since: Option<Tick>,
    /// The nodes that the instance names and on which no agent offers it, each with since when.
    without_agent: BTreeMap<NodeName, Tick>,
    hold: Option<InstanceHold>,
}

/// Nothing is ordered until this moment, or until the instance is observed with another version.
#[derive(Clone, Debug)]
struct InstanceHold {
    version: String,
    until: Tick,
}

/// What the decision about an instance depends on.
pub(super) struct InstanceContext<'a> {
    pub(super) nodes: &'a BTreeMap<NodeName, SlotNode>,
    /// `None` if the configuration does not exist.
    pub(super) capacity: Option<u32>,
    pub(super) node_timeout: Millis,
    pub(super) now: Tick,
}

impl TrackedInstance {
    pub(super) const fn new(facts: InstanceFacts, usage: InstanceUsage) -> Self {
        let without_agent = BTreeMap::new();
        Self { facts, usage, unseen_since: None, orphaned_since: None, without_agent, hold: None }
    }

    /// Takes a newer observation.
    pub(super) fn update(&mut self, facts: InstanceFacts, usage: InstanceUsage) {
        if self.hold.as_ref().is_some_and(|hold| hold.version != facts.version) {
            self.hold = None;
        }
        (self.facts, self.usage) = (facts, usage);
    }

    /// Orders nothing until then, if the instance still has this version.
    pub(super) fn hold(&mut self, version: &str, until: Tick) {
        if self.facts.version == version {
            self.hold = Some(InstanceHold { version: version.to_owned(), until });
        }
    }

    /// The moment until which nothing is ordered.
    pub(super) fn held_until(&self) -> Option<Tick> {
        self.hold.as_ref().map(|hold| hold.until)
    }

    /// Decides the next write, and when to decide again.
    pub(super) fn decide(
        &mut self,
        name: &InstanceName,
        context: &InstanceContext<'_>,
    ) -> (Option<SlotsCommand>, Option<Tick>) {
        let now = context.now;
        self.note_time(name, context);
        if let Some(until) = self.held_until().filter(|until| *until > now) {
            return (None, Some(until));
        }
        self.hold = None;
        let losses = self.losses(name, context);
        let ends = self.ends(context);
        let command = self
            .free_node(name, &losses, now)
            .or_else(|| self.set_layout(name, context.capacity))
            .or_else(|| self.delete(name, &ends, now));
        let moments = losses.iter().map(|(at, ..)| *at).chain(ends.iter().map(|(at, _)| *at));
        (command, moments.filter(|at| *at > now).min())
    }

    fn note_time(&mut self, name: &InstanceName, context: &InstanceContext<'_>) {
        let since = |before: Option<Tick>, is_so: bool| before.or(Some(context.now)).filter(|_| is_so);
        self.unseen_since = since(self.unseen_since, self.usage.nodes.is_empty());
        self.orphaned_since = since(self.orphaned_since, context.capacity.is_none());
        let lacks_agent =
            |node: &NodeName| context.nodes.get(node).is_some_and(|known| known.lacks_agent(name));
        let without_agent = self.usage.named_nodes().into_iter().filter(lacks_agent);
        let noted = |node: NodeName| {
            let since = self.without_agent.get(&node).copied().unwrap_or(context.now);
            (node, since)
        };
        self.without_agent = without_agent.map(noted).collect();
    }

    /// The nodes that are lost from some moment on.
    fn losses(&self, name: &InstanceName, context: &InstanceContext<'_>) -> Vec<(Tick, NodeName, NodeLoss)> {
        let losses = self.usage.named_nodes().into_iter().filter_map(|node| {
            let known = context.nodes.get(&node)?;
            let (at, cause) = known
                .lost_from(context.node_timeout)
                .or_else(|| self.agent_lost_from(name, &node, known, context.node_timeout))?;
            Some((at, node, cause))
        });
        losses.collect()
    }

    /// The moment from which a ready node counts as lost for this instance, because its agent is gone.
    ///
    /// No agent is left to free the slots of containers that have ended. Only the kubelet knows which slots the others
    /// have, so all of the node's slots stay claimed until no Pod there may have one.
    fn agent_lost_from(
        &self,
        name: &InstanceName,
        node: &NodeName,
        known: &SlotNode,
        timeout: Millis,
    ) -> Option<(Tick, NodeLoss)> {
        let since = self.without_agent.get(node)?;
        (!known.may_use(name, &self.facts.configuration)).then(|| (*since + timeout, NodeLoss::NoAgent))
    }

    /// The reasons to delete the instance, each from some moment on. An instance in use has none.
    fn ends(&self, context: &InstanceContext<'_>) -> Vec<(Tick, InstanceEnd)> {
        if self.usage.used() > 0 {
            return Vec::new();
        }
        let orphaned =
            self.orphaned_since.map(|at| (at + CONFIGURATION_WITHIN, InstanceEnd::NoConfiguration));
        let unseen = self.unseen_since.map(|at| (at + context.node_timeout, InstanceEnd::NoNodes));
        orphaned.into_iter().chain(unseen).collect()
    }

    fn free_node(
        &self,
        name: &InstanceName,
        losses: &[(Tick, NodeName, NodeLoss)],
        now: Tick,
    ) -> Option<SlotsCommand> {
        let (_, node, cause) = losses.iter().find(|(at, ..)| *at <= now)?;
        Some(SlotsCommand::FreeNode {
            instance: name.clone(),
            version: self.facts.version.clone(),
            node: node.clone(),
            cause: *cause,
            changes: self.usage.freed_of(node),
        })
    }

    fn set_layout(&self, name: &InstanceName, capacity: Option<u32>) -> Option<SlotsCommand> {
        let changes = self.usage.layout(name, capacity?);
        let version = self.facts.version.clone();
        (!changes.is_empty()).then(|| SlotsCommand::SetLayout { instance: name.clone(), version, changes })
    }

    fn delete(&self, name: &InstanceName, ends: &[(Tick, InstanceEnd)], now: Tick) -> Option<SlotsCommand> {
        let (_, cause) = ends.iter().find(|(at, _)| *at <= now)?;
        let version = self.facts.version.clone();
        Some(SlotsCommand::DeleteInstance { instance: name.clone(), version, cause: *cause })
    }
}
