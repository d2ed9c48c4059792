//! Dual pods, case by case: each known failure of other controllers, and the race for an accelerator that is reassigned
//! while its engine is awake.

mod bound_sleepers;
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
mod slots;
mod stories;
mod superseded;
mod vanished;
