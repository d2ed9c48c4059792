//! The stub: the gateway's agent in Pods.
//!
//! ```text
//!   proxy      in a requester Pod: relays to the engine in the provider's, holds its gate and its readiness
//!   launcher   in a provider Pod: starts and stops engines as its child processes
//! ```
//!
//! The stub decides nothing: the leader sends orders with an epoch, and the stub executes or refuses them.

// As in the crate `rouse`: a release build aborts on panic, which ends all streams.
#![warn(clippy::indexing_slicing)]

mod accelerator_driver;
mod browser_guard;
pub mod cli;
#[cfg(test)]
mod docs_check;
mod epoch;
pub mod launcher;
pub mod proxy;
mod serve;
mod token;
