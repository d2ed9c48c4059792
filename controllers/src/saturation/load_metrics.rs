//! The load of engines: the highest KV cache use and queue length of each over the last minute.
//!
//! It comes from the engines themselves, which the leader reads through their stubs, or from a Prometheus that scrapes
//! them. What is missing, not a number or old is unknown, never zero.

mod engine_reader;
mod prometheus_query;

pub(crate) use self::{
    engine_reader::{EngineAddress, read_engines},
    prometheus_query::{engine_loads, load_query},
};
