//! A large fleet and its leader: what a Pod event costs, how often gateways write, how soon another gateway leads, and
//! a rollout whose leader is killed.
//!
//! The API server and the gateways are real. The fleet has objects only: this process plays the controllers of
//! Deployments, the kubelets (`workloads`), and the stubs with their engines (`stub`).
//!
//! `make soak` runs a tenth of the fleet and then all of it, and prints how the cost of a Pod event grows. The gate runs
//! the tenth.

mod cost;
mod fleet;
mod lease;
mod ledger;
mod load_readings;
mod objects;
mod pods;
mod reports;
mod rollout;
mod scaling;
mod stub;
mod takeover;
mod wire;
mod workloads;
mod writes;

use nix::sys::signal::Signal;
use rouse_net::fd_limit;
use rouse_testing::sample::{is_soak, size};
use tokio::time::Duration;

use self::fleet::{FleetInstallation, FleetSize};
use crate::support::own_cluster;

/// The fleet that the figures are promised for: 1,000 nodes and 5,000 engines.
const WHOLE: FleetSize = FleetSize {
    models: 1000,
    gateways: 10,
    start_timeout: Duration::from_secs(1200),
    // A minute after its last write, an Event is written again if there were repetitions.
    without_events: Duration::from_secs(65),
    pod_events: 2000,
    in_use: 100,
    writes_window: Duration::from_secs(30),
    rollout_rate: 500,
    rollout: Duration::from_secs(60),
};
const TENTH: FleetSize = FleetSize {
    models: 100,
    gateways: 4,
    start_timeout: Duration::from_secs(120),
    // The gate does not wait for repetitions: those of so few models are a few writes a second.
    without_events: Duration::from_secs(5),
    pod_events: 500,
    in_use: 80,
    writes_window: Duration::from_secs(6),
    rollout_rate: 50,
    rollout: Duration::from_secs(10),
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_of_thousands_of_engines_is_cheap_quiet_and_soon_replaced() {
    // Each Pod has two listeners here.
    fd_limit::raise().unwrap();
    let mut costs = Vec::new();
    for fleet in size(&[TENTH, WHOLE][..], &[TENTH][..]) {
        costs.push(Box::pin(check(*fleet)).await);
    }
    if let [Some(tenth), Some(whole)] = costs[..] {
        let growth = whole.as_secs_f64() / tenth.as_secs_f64();
        println!("a Pod event of a fleet ten times as large costs {growth:.2} times as much");
    }
}

/// Checks a fleet of this size, and returns the leader's CPU time for a Pod event, if that is measurable.
async fn check(size: FleetSize) -> Option<Duration> {
    let cluster = own_cluster().await;
    let mut fleet = Box::pin(FleetInstallation::start(&cluster, size)).await;
    fleet.check_memory("when all engines serve").await;
    let cost = Box::pin(cost::check_pod_event(&fleet)).await;
    Box::pin(writes::check_rate(&fleet)).await;
    Box::pin(takeover::check(&mut fleet, Signal::SIGTERM, 0, None)).await;
    fleet.check_memory("after a takeover").await;
    Box::pin(rollout::check(&mut fleet, 1)).await;
    fleet.check_memory("after a rollout").await;
    if is_soak() {
        Box::pin(load_readings::check(&fleet)).await;
    }
    fleet.lease.check_renewals(fleet.optimised);
    cost
}
