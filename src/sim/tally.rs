//! Counts of what happened, so that a run that tested nothing is visible.

use std::{collections::BTreeMap, fmt};

/// Counts by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally(BTreeMap<&'static str, u64>);

impl Tally {
    pub fn add(&mut self, counter: &'static str) {
        *self.0.entry(counter).or_default() += 1;
    }

    #[must_use]
    pub fn count(&self, counter: &str) -> u64 {
        self.0.get(counter).copied().unwrap_or(0)
    }

    pub fn merge(&mut self, other: &Self) {
        for (counter, n) in &other.0 {
            *self.0.entry(counter).or_default() += n;
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (counter, n) in &self.0 {
            writeln!(f, "{n:>12}  {counter}")?;
        }
        Ok(())
    }
}
