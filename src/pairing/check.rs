//! Checks the invariants and describes each broken one.

use super::{
    Pairing,
    node::{PairingAccelerator, PairingEngine, PairingEngineState, PairingNode},
};
use crate::{model::AcceleratorId, units::Bytes};

impl Pairing {
    /// Returns every broken invariant; empty if all hold. Memory adopted beyond capacity is no violation, because plans
    /// add nothing to it.
    #[must_use]
    pub fn check(&self) -> Vec<String> {
        self.nodes.values().flat_map(|node| check_node(node)).collect()
    }
}

pub(super) fn check_node(node: &PairingNode) -> Vec<String> {
    let mut broken = Vec::new();
    for engine in node.engines.values() {
        let expected = if engine.may_hold_full_memory() { engine.sizes.awake } else { Bytes::ZERO };
        if engine.reserved < expected {
            broken.push(format!("{} is {} with only {} reserved", engine.id, engine.state, engine.reserved));
        }
        if matches!(engine.state, PairingEngineState::Waking | PairingEngineState::Creating)
            && engine.binding.is_none()
        {
            broken.push(format!("{} is {} without a requester", engine.id, engine.state));
        }
        broken.extend(check_wants(node, engine));
        if !node.providers.contains_key(&engine.provider) {
            broken.push(format!("{} is in {}, which does not exist", engine.id, engine.provider));
        }
        let owner = engine.requester();
        if owner.is_some_and(|r| node.engines.values().filter(|e| e.requester() == Some(r)).count() > 1) {
            broken.push(format!("{} shares its requester with another engine", engine.id));
        }
    }
    broken.extend(node.accelerators.iter().filter_map(|(a, accelerator)| check_wakes(node, a, accelerator)));
    broken
}

/// A sleeper that awaits a want is bound and asleep, and no engine wakes while the gateway wants it asleep.
fn check_wants(node: &PairingNode, engine: &PairingEngine) -> Option<String> {
    let is_asleep = matches!(engine.state, PairingEngineState::Asleep { .. });
    if engine.awaits_want && !(is_asleep && engine.binding.is_some()) {
        return Some(format!("{} is {} and awaits a want", engine.id, engine.state));
    }
    let requester = engine.requester()?;
    let want = node.wants.get(requester).filter(|want| want.since < engine.since)?;
    let is_woken = engine.state == PairingEngineState::Waking && node.wants_asleep(requester);
    is_woken.then(|| format!("{} is woken although it is wanted asleep since {}", engine.id, want.since))
}

/// An engine that takes its memory back does so beside the sleepers' reservations and those of other such engines.
fn check_wakes(node: &PairingNode, a: &AcceleratorId, accelerator: &PairingAccelerator) -> Option<String> {
    let wakes = |engine: &PairingEngine| engine.state == PairingEngineState::Waking && !engine.ready;
    let counts =
        |engine: &&PairingEngine| wakes(engine) || matches!(engine.state, PairingEngineState::Asleep { .. });
    let reserved: Bytes = node.engines_on(a).filter(counts).map(|engine| engine.reserved).sum();
    let is_waking = node.engines_on(a).any(wakes);
    (is_waking && reserved > accelerator.facts.capacity)
        .then(|| format!("{reserved} of {a} are reserved for sleepers and wakes"))
}
