//! What moves bytes: requests to engines and their responses, and the calls to engines, stubs and launchers.
//!
//! * [`lease`]: the gate of an engine, and the leases that requests hold on it.
//! * [`relay`]: one exchange with an engine; [`downstream`]: what the client's side of it reads and writes; [`openai`]: the bodies that
//!   both sides send; [`tcp`] and [`backend_origin`]: the connections; [`yield_to_reactor`]: long work beside streams.
//! * [`http_client`]: short calls; [`adapter`]: how each kind of engine is told to sleep and wake; [`stub_api`]: what gateway, stub and
//!   launcher send each other.
//! * [`process`], [`nvml`], [`fd_limit`], [`file_watch`], [`port`]: processes, accelerators, descriptors, files and ports.
//!
//! Nothing here decides: what to run where is the crate `rouse`'s, and this crate takes it as an argument.

// Bytes from outside are read nearly everywhere, and an index that is out of bounds ends every stream: releases abort at a panic.
#![warn(clippy::indexing_slicing)]

pub mod adapter;
pub mod backend_origin;
pub mod downstream;
pub mod fd_limit;
pub mod file_watch;
pub mod http_client;
pub mod lease;
pub mod nvml;
pub mod openai;
pub mod port;
pub mod process;
pub mod relay;
pub mod stub_api;
pub mod tcp;
pub mod yield_to_reactor;
