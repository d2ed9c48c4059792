//! Dual pods, case by case: each row of the failures that are known of other controllers, and the race for an accelerator that
//! is handed on while its engine is awake.

mod builds;
mod eviction_sets;
mod failures;
mod harness;
mod host;
mod launcher_capacity;
mod launchers;
mod measures;
mod modes;
mod name_conflicts;
mod race;
mod scale;
mod sleepers;
mod stories;
mod superseded;
mod vanished;
