//! Helpers that the tests of several crates share.

pub mod port;
pub mod run_queue;
pub mod sample;
pub mod tls;
