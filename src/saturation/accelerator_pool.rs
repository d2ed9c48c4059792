//! Free accelerators by type.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::VariantState;
use crate::model::VariantName;

/// How many accelerators of each type are free.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AcceleratorPool {
    free: BTreeMap<String, u32>,
}

/// What a variant got of the pool, in the order in which variants were served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    pub variant: VariantName,
    pub accelerators: u32,
    /// Whether the variant wanted more.
    pub limited: bool,
}

impl FromIterator<(String, u32)> for AcceleratorPool {
    /// Adds up the accelerators of each type, over all nodes.
    fn from_iter<I: IntoIterator<Item = (String, u32)>>(accelerators: I) -> Self {
        let mut pool = Self::default();
        for (kind, count) in accelerators {
            let free = pool.free.entry(kind).or_default();
            *free = free.saturating_add(count);
        }
        pool
    }
}

impl AcceleratorPool {
    /// Returns the free accelerators by type.
    #[must_use]
    pub const fn free(&self) -> &BTreeMap<String, u32> {
        &self.free
    }

    #[must_use]
    pub fn total(&self) -> u32 {
        self.free.values().fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// For how many whole replicas of this variant accelerators are free.
    pub(super) fn replicas_of(&self, state: &VariantState) -> u32 {
        let free = self.kind_of(state).and_then(|kind| self.free.get(kind)).copied().unwrap_or_default();
        free / state.gpus_per_replica()
    }

    /// Takes the accelerators of this many replicas, or of as many as fit. Returns the number of replicas.
    pub(super) fn take(&mut self, state: &VariantState, replicas: u32) -> u32 {
        let granted = replicas.min(self.replicas_of(state));
        let kind = self.kind_of(state).map(str::to_owned);
        if let Some(free) = kind.and_then(|kind| self.free.get_mut(&kind)) {
            *free = free.saturating_sub(granted.saturating_mul(state.gpus_per_replica()));
        }
        granted
    }

    /// The type of a variant's accelerators. An unknown type is the only one there is; of several it could be any.
    fn kind_of<'a>(&'a self, state: &'a VariantState) -> Option<&'a str> {
        if !state.accelerator.is_empty() {
            return Some(&state.accelerator);
        }
        let mut kinds = self.free.keys();
        let only = kinds.next()?;
        kinds.next().is_none().then_some(only.as_str())
    }
}
