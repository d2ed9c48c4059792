//! Dual pods, case by case: each row of the failures that are known of other controllers, and the race for an accelerator that
//! is handed on while its engine is awake.

mod builds;
mod covering;
mod deposed;
mod driver;
mod failures;
mod host;
mod launchers;
mod measures;
mod modes;
mod places;
mod race;
mod scale;
mod sleepers;
mod stories;
mod taken;
mod vanished;
