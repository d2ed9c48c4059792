//! Tells which variants get no further replica for now, and why.
//!
//! The fleet itself forgets that memory was refused: once the target of the variant is back at what runs, no replica
//! waits any more. The next decision would ask for the same replica at once, and for ever. So a refusal is remembered
//! until memory has been released. The fleet does remember failed starts.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};

use super::VariantEngines;
use crate::{model::VariantName, units::Bytes};

/// Why a variant gets no further replica for now.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RefusalCause {
    /// Memory admission refused it.
    Memory,
    /// The starts of the next replica keep failing.
    StartFailed,
}

impl fmt::Display for RefusalCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Memory => "memory admission refused another replica",
            Self::StartFailed => "the starts of another replica keep failing",
        })
    }
}

/// The variants of one model that memory admission refused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct RefusedVariants(BTreeMap<VariantName, Refusal>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Refusal {
    /// The least free memory since.
    least_free: Bytes,
    /// Engines at that time.
    current: u32,
}

impl RefusedVariants {
    /// Takes what the fleet knows now, and returns the variants that are refused.
    pub(super) fn update(
        &mut self,
        variants: &BTreeMap<VariantName, VariantEngines>,
    ) -> BTreeMap<VariantName, RefusalCause> {
        self.0.retain(|variant, _| variants.contains_key(variant));
        for (variant, engines) in variants {
            if engines.refused == Some(RefusalCause::Memory) {
                let refusal = Refusal { least_free: engines.free, current: engines.current };
                self.0.insert(variant.clone(), refusal);
                continue;
            }
            let Some(refusal) = self.0.get_mut(variant) else { continue };
            if engines.free > refusal.least_free || engines.current > refusal.current {
                self.0.remove(variant);
            } else {
                refusal.least_free = engines.free;
            }
        }
        let by_memory = self.0.keys().map(|variant| (variant.clone(), RefusalCause::Memory));
        let failing =
            variants.iter().filter(|(_, engines)| engines.refused == Some(RefusalCause::StartFailed));
        by_memory.chain(failing.map(|(variant, _)| (variant.clone(), RefusalCause::StartFailed))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(free: u64, current: u32, waits: bool) -> BTreeMap<VariantName, VariantEngines> {
        let engines = VariantEngines {
            current,
            free: Bytes::gib(free),
            refused: waits.then_some(RefusalCause::Memory),
            ..VariantEngines::default()
        };
        BTreeMap::from([(VariantName::default(), engines)])
    }

    #[test]
    fn a_refusal_lasts_until_memory_is_released_or_an_engine_was_granted() {
        let mut refused = RefusedVariants::default();
        let mut is_refused = |free, current, waits| !refused.update(&now(free, current, waits)).is_empty();
        assert!(!is_refused(10, 1, false));
        assert!(is_refused(10, 1, true));
        assert!(is_refused(10, 1, false), "the target was lowered meanwhile");
        assert!(is_refused(4, 1, false), "another model took memory");
        assert!(!is_refused(8, 1, false), "some of it is free again");
        assert!(is_refused(8, 1, true) && !is_refused(8, 2, false), "an engine came");
        assert!(!is_refused(8, 1, false), "one that left is no refusal");
    }

    #[test]
    fn a_removed_variant_is_forgotten() {
        let mut refused = RefusedVariants::default();
        assert_eq!(refused.update(&now(1, 1, true)).len(), 1);
        assert!(refused.update(&BTreeMap::new()).is_empty());
        assert_eq!(refused, RefusedVariants::default());
    }

    #[test]
    fn a_failing_variant_is_refused_for_as_long_as_the_fleet_says() {
        let mut refused = RefusedVariants::default();
        let mut engines = now(10, 1, true);
        assert_eq!(refused.update(&engines)[&VariantName::default()], RefusalCause::Memory);
        engines.insert(
            VariantName::default(),
            VariantEngines { refused: Some(RefusalCause::StartFailed), ..VariantEngines::default() },
        );
        assert_eq!(refused.update(&engines)[&VariantName::default()], RefusalCause::StartFailed);
        assert!(refused.update(&now(20, 1, false)).is_empty());
    }
}
