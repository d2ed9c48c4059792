//! The stub: the gateway's hand in Pods and on nodes.
//!
//! ```text
//!   proxy      in a requester Pod: relays to the engine in the provider's, holds its gate and its readiness
//!   launcher   in a provider Pod: starts and stops engines as its child processes
//!   node       on each node: device plugin and agent (not built yet)
//! ```
//!
//! It decides nothing: whoever leads orders, with an epoch, and the stub does or refuses.

// As in the crate `rouse`: releases abort at a panic, and with it end all streams.
#![warn(clippy::indexing_slicing)]

mod accelerator_driver;
mod accelerators;
mod browser_guard;
pub mod cli;
#[cfg(test)]
mod docs_check;
mod epoch;
pub mod launcher;
pub mod proxy;
mod serve;
mod token;
