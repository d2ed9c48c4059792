//! Checks the invariants and describes each broken one.

use super::{
    Pairing,
    node::{PairingEngineState, PairingNode},
};
use crate::units::Bytes;

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
        if !node.providers.contains_key(&engine.provider) {
            broken.push(format!("{} is in {}, which does not exist", engine.id, engine.provider));
        }
        let owner = engine.requester();
        if owner.is_some_and(|r| node.engines.values().filter(|e| e.requester() == Some(r)).count() > 1) {
            broken.push(format!("{} shares its requester with another engine", engine.id));
        }
    }
    broken
}
