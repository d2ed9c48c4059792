//! The engine as a real process behind a real socket, read byte by byte. These tests check what a gateway's tests rely
//! on.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod apis;
mod fast;
mod faults;
mod http;
mod memory;
mod sleep;
mod streams;
mod support;
