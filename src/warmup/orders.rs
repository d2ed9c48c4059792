//! The commands of one Warmup: deletions of Pods that are spent, new Pods as far as there is room, and its own end.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    command::WarmupCommand,
    ids::{ImageName, WarmupId},
    node_progress::KnownNode,
    node_view::StartClass,
    progress::WarmupPhase,
    state::WarmupState,
    verdict::nodes_to_begin,
};
use crate::{pairing::ids::NodeName, units::Tick};

/// Pulls that this plan begins. Of two Warmups that need the same, the first one begins.
pub(super) type PlannedPulls = BTreeSet<(NodeName, ImageName)>;

impl WarmupState {
    pub(super) fn orders(
        &self,
        id: &WarmupId,
        all_nodes: &BTreeMap<NodeName, KnownNode>,
        pulls: &mut PlannedPulls,
        now: Tick,
    ) -> Vec<WarmupCommand> {
        let mut commands = self.deletions(id, all_nodes, now);
        if self.progress.phase == WarmupPhase::InProgress && self.has_nodes {
            self.begin(id, all_nodes, pulls, now, &mut commands);
        }
        if self.is_expired(now) {
            commands.push(WarmupCommand::DeleteWarmup { id: id.clone() });
        }
        commands
    }

    fn deletions(
        &self,
        id: &WarmupId,
        all_nodes: &BTreeMap<NodeName, KnownNode>,
        now: Tick,
    ) -> Vec<WarmupCommand> {
        let mut commands = Vec::new();
        for name in &self.tally.deletable {
            let Some(node) = self.nodes.get(name) else { continue };
            let Some(context) = self.context(id, name, all_nodes, now) else { continue };
            for (pod, _) in node.pods.iter().filter(|(_, tracked)| context.may_delete(node, tracked)) {
                commands.push(WarmupCommand::DeletePod { id: id.clone(), name: pod.clone() });
            }
        }
        commands
    }

    /// Begins with nodes that have begun already, then with the others in the order of their names. Interrupted ones
    /// are last.
    fn begin(
        &self,
        id: &WarmupId,
        all_nodes: &BTreeMap<NodeName, KnownNode>,
        pulls: &mut PlannedPulls,
        now: Tick,
        commands: &mut Vec<WarmupCommand>,
    ) {
        let Some(request) = &self.request else { return };
        if self.creation.until.is_some_and(|until| until > now) {
            return;
        }
        // After a refusal one Pod shows whether others would be refused, too.
        let is_probe = self.creation.refusals > 0;
        if is_probe && self.is_creating() {
            return;
        }
        let mut room = nodes_to_begin(request.limits.parallelism, self.tally.active, u32::MAX);
        for (class, name) in &self.tally.startable {
            let takes_room = *class != StartClass::Active;
            if takes_room && room == 0 {
                return;
            }
            let Some(node) = self.nodes.get(name) else { continue };
            let Some(context) = self.context(id, name, all_nodes, now) else { continue };
            let mut has_begun = false;
            for item in context.creatable(node) {
                let pull = item.image().map(|image| (name.clone(), image.clone()));
                if pull.is_some_and(|pull| !pulls.insert(pull)) {
                    continue;
                }
                has_begun = true;
                commands.push(WarmupCommand::CreatePod {
                    id: id.clone(),
                    node: name.clone(),
                    item,
                    generation: request.generation,
                    items_hash: node.items_hash,
                    attempt: node.failures,
                });
                if is_probe {
                    return;
                }
            }
            room = room.saturating_sub(u32::from(has_begun && takes_room));
        }
    }
}
