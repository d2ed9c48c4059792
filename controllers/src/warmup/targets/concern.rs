//! Whether a change of some nodes can change the targets of a Warmup. Costs what has changed, however many nodes there
//! are.

use rouse::{pairing::ids::NodeName, warmup::WarmupTargets};

use super::{ResolvedTargets, TargetInputs, is_selected, model};
use crate::convert::warmup::WarmupTarget;

/// Whether the targets may be others than `before`. `inputs` has those of the changed nodes that exist, and no others.
pub(in crate::warmup) fn concerned(
    target: &WarmupTarget,
    changed: &[&NodeName],
    before: &ResolvedTargets,
    inputs: TargetInputs<'_>,
) -> bool {
    // On which node the target is wrong is not known.
    if matches!(before.targets, WarmupTargets::Refused { .. }) {
        return true;
    }
    let was_target = |name: &NodeName| before.actions.contains_key(name);
    match target {
        WarmupTarget::Nodes { names, selector, .. } => {
            let is_target = |name: &NodeName| {
                names.contains(name) || inputs.nodes.get(name).is_some_and(|node| is_selected(selector, node))
            };
            changed.iter().any(|name| is_target(name) != was_target(name))
        }
        WarmupTarget::Group { roles, .. } => {
            let has_role = |name: &NodeName| {
                inputs.group_pods.iter().any(|pod| pod.node == *name && roles.contains_key(&pod.role))
            };
            let is_target = |name: &NodeName| inputs.nodes.contains_key(name) && has_role(name);
            changed.iter().any(|name| is_target(name) != was_target(name))
        }
        WarmupTarget::Model { model, nodes } => {
            let fitting = model::targets(model, None, inputs).actions;
            match nodes {
                // Of a limited number of nodes, one that fits may be better than those that were chosen.
                Some(_) => changed.iter().any(|name| was_target(name) || fitting.contains_key(*name)),
                None => changed.iter().any(|name| fitting.get(*name) != before.actions.get(*name)),
            }
        }
    }
}
