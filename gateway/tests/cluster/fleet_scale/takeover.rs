//! How soon a new leader decides once it holds the Lease.

use std::net::SocketAddr;

use nix::sys::signal::Signal;
use tokio::time::{Duration, Instant};

use super::{
    fleet::FleetInstallation,
    objects::{ENGINES, cold_name},
};
use crate::{
    installation::{ClusterGateway, blocking},
    load::BackgroundLoad,
};

/// From the Lease to the first decision, as promised. The decision here is a new Deployment, after a reservation.
const MAX_TAKEOVER: Duration = Duration::from_secs(5);

/// A gateway that was ended.
pub(super) struct EndedGateway {
    pub(super) api: SocketAddr,
    /// When a killed process was gone.
    pub(super) at: Instant,
}

/// Ends the leader with this signal, and asserts that the next one decides in time: a request for a cold model, sent
/// when the new holder is seen, gets its engine. `cold`: the number of that model, which nothing has asked for yet.
pub(super) async fn check(
    fleet: &mut FleetInstallation<'_>,
    signal: Signal,
    cold: usize,
    load: Option<&BackgroundLoad>,
) -> EndedGateway {
    let (former, place) = fleet.leader().await;
    let mut leader = fleet.gateways.remove(place).process;
    let api = leader.api;
    let signalled = Instant::now();
    leader.signal(signal);
    if signal == Signal::SIGKILL {
        leader.wait().await;
    }
    let ended = EndedGateway { api, at: Instant::now() };
    if let Some(load) = load {
        load.remove_gateway(api);
    }
    let held = fleet.lease.holder_after(&former).await;
    let client = fleet.gateways[0].process.client();
    let model = cold_name(cold);
    let asked = tokio::spawn(blocking(move || client.chat(&model, false, 1)));
    let decided = fleet.world.runner.until_deployed(&cold_name(cold)).await;
    let took = decided.saturating_duration_since(held.seen);
    println!(
        "{signal}: {} holds the Lease after {:.1?} and decides {took:.1?} later, with {} engines",
        held.holder,
        held.seen - signalled,
        fleet.size.models * ENGINES as usize
    );
    let (_, place) = fleet.leader().await;
    print_steps(&fleet.gateways[place].process);
    assert!(took <= MAX_TAKEOVER, "the new leader decided {took:?} after it had the Lease");
    let answer = asked.await.unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    if signal != Signal::SIGKILL {
        leader.wait().await;
    }
    ended
}

/// Prints how long the steps of the new leader's takeover took, by its own clock.
fn print_steps(leader: &ClusterGateway) {
    let metrics = leader.metrics();
    let steps = metrics.lines().filter_map(|line| line.strip_prefix("rouse_takeover_seconds{step=\""));
    let steps: Vec<String> = steps.map(|step| step.replace("\"}", "")).collect();
    println!("steps of the takeover, in seconds: {}", steps.join(", "));
    assert_eq!(steps.len(), 4, "a leader that decides has the times of its takeover: {steps:?}");
}
