//! The engine as a real process behind a real socket, read byte by byte: what a gateway's tests rely on is checked here first.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod apis;
mod fast;
mod faults;
mod http;
mod memory;
mod sleep;
mod streams;
mod support;
