//! The real gateway, as a process, over engine-sim: what clients and operators see.

mod support;
mod swap;
