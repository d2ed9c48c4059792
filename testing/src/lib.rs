//! What tests of several crates share.

pub mod port;
pub mod sample;
