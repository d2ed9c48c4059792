//! What a gateway is in a cluster, against a real API server: as a user with the rights that the chart gives it, and no
//! others.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod books;
#[path = "../it/support/client.rs"]
#[allow(dead_code, reason = "shared with the tests of one machine")]
mod client;
mod columns;
mod crashes;
mod definitions;
mod election;
mod engines;
mod flows;
mod objects;
mod objects_served;
mod outages;
mod process;
mod refusals;
mod replicas;
mod rights;
mod site;
mod stopped;
mod support;
mod world;
