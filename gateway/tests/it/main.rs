//! The gateway as its clients and operators meet it.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod cli;
mod demo;
