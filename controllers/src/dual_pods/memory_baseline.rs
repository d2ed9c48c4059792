//! Checks that a starting engine takes memory of each of its accelerators.
//!
//! The engine's Pod requests no accelerators from Kubernetes, so no other check shows a Pod that got access to the
//! wrong ones or to none. Such an engine serves from the processor, or fills an accelerator without a reservation.

use std::collections::BTreeMap;

use rouse::{
    model::AcceleratorId,
    pairing::ids::{NodeName, PairingEngineId},
    units::{Bytes, Generation},
};

use super::{command_context::CommandContext, per_engine::PerEngine};

/// MiB in use by accelerator UUID, as a requester's stub reads them.
pub(super) type AcceleratorUsedMib = BTreeMap<String, u64>;

/// An engine and its node.
pub(super) type EngineLocation = (NodeName, PairingEngineId);

/// In MiB. A process that just opens an accelerator uses more: a CUDA context takes a hundred and more.
const MIN_ENGINE_USE_MIB: u64 = 64;

/// Memory in use when an engine's start was ordered.
#[derive(Debug)]
pub(super) struct MemoryBaseline {
    pub(super) location: EngineLocation,
    /// Generation of the engine.
    pub(super) generation: Generation,
    /// `None` if it was not read, or if other engines had reserved memory there.
    pub(super) used: Option<AcceleratorUsedMib>,
}

/// Baselines of each engine's last start.
#[derive(Debug, Default)]
pub(super) struct MemoryBaselines(PerEngine<(Generation, Option<AcceleratorUsedMib>)>);

impl MemoryBaselines {
    /// Stores a baseline. The first start order of a generation counts: on a repetition, the engine may already run.
    pub(super) fn record(&mut self, before: MemoryBaseline) {
        let MemoryBaseline { location: (node, engine), generation, used } = before;
        if self.0.get(&node, &engine).is_none_or(|(known, _)| *known != generation) {
            self.0.insert(&node, engine, (generation, used));
        }
    }

    /// Takes the baseline of this generation. It is used once: a later wake shows nothing new.
    pub(super) fn take(
        &mut self,
        (node, engine): &EngineLocation,
        generation: Generation,
    ) -> Option<AcceleratorUsedMib> {
        self.0.remove(node, engine).filter(|(known, _)| *known == generation).and_then(|(_, used)| used)
    }

    /// Keeps the node's engines that still exist.
    pub(super) fn retain_on(&mut self, node: &NodeName, exists: impl Fn(&PairingEngineId) -> bool) {
        self.0.retain_on(node, exists);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

impl CommandContext {
    /// Whether no other engine has reserved memory on the engine's accelerators.
    pub(super) fn has_no_neighbours(&self) -> bool {
        !self.reserved_by_others.is_empty()
            && self.reserved_by_others.values().all(|others| *others == Bytes::ZERO)
    }

    /// Returns the first of the engine's accelerators without memory growth.
    ///
    /// The engine has answered by now, so it should have taken memory of each.
    ///
    /// Returns `None` if other engines have reserved memory there, because their use may have changed meanwhile.
    pub(super) fn unused_accelerator(&self, now: &AcceleratorUsedMib) -> Option<&AcceleratorId> {
        let before = self.baseline.as_ref().filter(|_| self.has_no_neighbours())?;
        self.reserved_by_others.keys().find(|a| is_unused(a, before, now))
    }
}

fn is_unused(a: &AcceleratorId, before: &AcceleratorUsedMib, now: &AcceleratorUsedMib) -> bool {
    let read = before.get(a.as_str()).zip(now.get(a.as_str()));
    read.is_some_and(|(before, now)| *now < before.saturating_add(MIN_ENGINE_USE_MIB))
}

#[cfg(test)]
mod tests {
    use rouse::pairing::ids::{EngineFingerprint, ProviderMode};

    use super::*;

    fn place() -> EngineLocation {
        let accelerators = ["a".into()].into();
        (
            "n".into(),
            PairingEngineId { mode: ProviderMode::Sleep, accelerators, fingerprint: EngineFingerprint(1) },
        )
    }

    fn usage(all: &[(&str, u64)]) -> AcceleratorUsedMib {
        all.iter().map(|(a, mib)| ((*a).to_owned(), *mib)).collect()
    }

    #[test]
    fn an_engine_takes_something_of_each_of_its_accelerators() {
        let before = usage(&[("a", 450)]);
        let is = |now: &[(&str, u64)]| is_unused(&"a".into(), &before, &usage(now));
        assert!(!is(&[("a", 40_450)]));
        assert!(!is(&[("a", 650)]), "a small model in a context of its own");
        assert!(is(&[("a", 451)]), "what a driver itself uses changes a little");
        assert!(is(&[("a", 0)]));
        assert!(!is(&[]), "it could not be read");
    }

    #[test]
    fn what_counts_is_the_first_order_of_a_life() {
        let (mut proofs, idle, busy) =
            (MemoryBaselines::default(), usage(&[("a", 450)]), usage(&[("a", 40_450)]));
        let before = |life, used| MemoryBaseline { location: place(), generation: Generation(life), used };
        proofs.record(before(1, Some(idle.clone())));
        proofs.record(before(1, Some(busy.clone())));
        assert_eq!(
            proofs.take(&place(), Generation(1)),
            Some(idle.clone()),
            "ordered again, it may have begun"
        );
        assert_eq!(proofs.take(&place(), Generation(1)), None);
        proofs.record(before(2, None));
        proofs.record(before(2, Some(busy)));
        assert_eq!(proofs.take(&place(), Generation(2)), None);
        proofs.record(before(3, Some(idle.clone())));
        assert_eq!(proofs.take(&place(), Generation(4)), None);
        proofs.record(before(5, None));
        proofs.record(before(6, Some(idle.clone())));
        assert_eq!(proofs.take(&place(), Generation(6)), Some(idle));
    }
}
