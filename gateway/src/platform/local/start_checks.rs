//! Checks that an engine of this machine must pass before it may serve.

use rouse::fault::FailureCause;
use rouse_net::process::table;

use super::engine_task::LocalEngine;

/// Checks an engine that answers: its listeners and its served name.
pub(super) async fn check_start(local_engine: &LocalEngine) -> Result<(), FailureCause> {
    if !local_engine.client.model.allow_public {
        let (port, group, mark) =
            (local_engine.client.address.port(), local_engine.process_group(), local_engine.mark());
        let public = tokio::task::spawn_blocking(move || listens_publicly(port, group, &mark)).await;
        if public.unwrap_or(true) {
            return Err(FailureCause::PublicListener);
        }
    }
    local_engine.client.adapter.check_served_name(local_engine.client.health_timeout()).await
}

/// Whether the engine's port is reachable from other machines.
///
/// If the engine's own processes do not listen there (a container runtime's forwarder does), all listeners count.
fn listens_publicly(port: u16, group: Option<i32>, mark: &str) -> bool {
    let all = table::listeners(port);
    // Finding the owners scans every process of the machine, and a parked request waits for this answer.
    if all.iter().all(|listener| listener.address.is_loopback()) {
        return false;
    }
    let own_ports = table::owned_by(&all, &table::members(group, mark));
    let relevant = if own_ports.is_empty() { all } else { own_ports };
    relevant.iter().any(|listener| !listener.address.is_loopback())
}
