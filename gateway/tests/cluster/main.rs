//! A gateway in a cluster, against a real API server: as a user with the chart's rights and no others.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod agent_policies;
mod alone;
mod audit;
mod away;
mod chart;
mod columns;
mod concurrent_reservations;
mod crashes;
mod crowd;
mod definitions;
mod dependencies;
mod dual;
mod election;
mod engines;
mod events;
mod fleet_scale;
mod flows;
mod foreign_changes;
mod granted;
mod held;
mod installation;
mod launched;
mod leftovers;
mod load;
mod machine_load;
mod memory;
mod moves;
mod namespaces;
mod network_policies;
mod nodes;
#[path = "../../../stub/tests/it/support/nvml.rs"]
#[allow(dead_code, reason = "shared with the stub's tests")]
mod nvml;
mod objects;
mod objects_served;
mod operators;
mod outages;
mod pages;
mod pairs;
mod process;
mod prometheus;
mod readiness;
mod refusals;
mod rendered;
mod replicas;
mod rights;
mod runner;
mod saturation;
mod scale;
mod scaledown;
mod scraped;
mod site;
mod slots;
mod stopped;
mod streams;
mod summary;
mod support;
mod tokens;
mod variants;
mod warmup;

use rouse_testing::raw_client as client;
