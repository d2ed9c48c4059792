//! Checks that an engine of this machine must pass before it may serve.

use rouse::fault::FailureCause;
use rouse_net::process::table;

use super::engine_task::LocalEngine;

/// Checks an engine that answers: its listeners and its served name.
pub(super) async fn check_start(tenant: &LocalEngine) -> Result<(), FailureCause> {
    if !tenant.client.model.allow_public {
        let (port, group, mark) = (tenant.client.address.port(), tenant.process_group(), tenant.mark());
        let public = tokio::task::spawn_blocking(move || listens_publicly(port, group, &mark)).await;
        if public.unwrap_or(true) {
            return Err(FailureCause::PublicListener);
        }
    }
    tenant.client.adapter.check_served_name(tenant.client.health_timeout()).await
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
    let own = table::owned_by(&all, &table::members(group, mark));
    let relevant = if own.is_empty() { all } else { own };
    relevant.iter().any(|listener| !listener.address.is_loopback())
}
