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

mod accelerators;
pub mod cli;
mod driver;
mod epoch;
pub mod launcher;
#[cfg(test)]
mod page;
mod pages;
pub mod proxy;
mod serve;
mod token;
