//! Moves bytes: requests to engines and their responses, and calls to engines, stubs and launchers.
//!
//! * [`lease`]: the gate of an engine, and the leases that requests hold on it.
//! * [`server`]: the client's side of a request. [`relay`]: one exchange with an engine. [`openai`]: the bodies that
//!   both sides send. [`tcp`], [`accept`] and [`backend_origin`]: the connections. [`yield_to_reactor`]: long work beside
//!   streams.
//! * [`http_client`]: short calls. [`adapter`]: the sleep and wake calls of each kind of engine. [`engine_load`]: the
//!   load that engines report. [`stub_api`]: the messages between gateway, stub and launcher.
//! * [`process`], [`nvml`], [`accelerators_file`], [`fd_limit`], [`file_watch`], [`port`], [`timer`]: processes,
//!   accelerators, descriptors, files, ports and timers. [`quoted`]: quoted strings.
//!
//! This crate makes no decisions: the crate `rouse` decides what to run where, and this crate takes the decision as an
//! argument.

// Nearly every module reads bytes from outside. Releases abort on a panic, so one out-of-bounds index ends every
// stream.
#![warn(clippy::indexing_slicing)]

pub mod accelerators_file;
pub mod accept;
pub mod adapter;
pub mod backend_origin;
pub mod engine_load;
pub mod fd_limit;
pub mod file_watch;
pub mod http_client;
pub mod lease;
pub mod nvml;
pub mod openai;
pub mod port;
pub mod process;
pub mod quoted;
pub mod relay;
pub mod server;
pub mod stub_api;
pub mod tcp;
pub mod timer;
pub mod yield_to_reactor;
