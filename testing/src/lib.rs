//! Helpers that the tests of several crates share.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

pub mod page;
pub mod port;
pub mod random;
pub mod raw_client;
pub mod run_queue;
pub mod sample;
pub mod scripted_engine;
pub mod tls;
pub mod wait;
