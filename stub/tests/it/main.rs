//! The real `rouse-stub proxy`, over real sockets: its parts, on [`support`]; and the way of requests, on [`world`], before
//! engine-sim or an engine that does as it is told.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod accelerators;
mod bars;
mod cancel;
mod contract;
mod early;
mod ends;
mod gate;
mod gpu;
mod life;
mod passage;
mod probes;
mod readiness;
mod relay;
mod set_log;
mod support;
mod watching;
mod world;
