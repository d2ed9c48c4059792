//! Counts of what happened, so that a run that tested nothing is visible.

use std::{collections::BTreeMap, fmt};

/// Counts by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    pub fn add(&mut self, what: &'static str) {
        *self.0.entry(what).or_default() += 1;
    }

    #[must_use]
    pub fn count(&self, what: &str) -> u64 {
        self.0.get(what).copied().unwrap_or(0)
    }

    pub fn merge(&mut self, other: &Self) {
        for (what, n) in &other.0 {
            *self.0.entry(what).or_default() += n;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, n) in &self.0 {
            writeln!(f, "{n:>12}  {what}")?;
        }
        Ok(())
    }
}
