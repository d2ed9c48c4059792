//! What must hold of an engine of this machine before it may serve.

use rouse::fault::FailureCause;
use rouse_net::process::table;

use super::engine_task::LocalEngine;

/// What must hold of an engine that answers before it may serve.
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

/// Whether the engine's port can be reached from elsewhere. Where the listener is not the engine's own process
/// (a container runtime's forwarder), whoever listens there counts.
fn listens_publicly(port: u16, group: Option<i32>, mark: &str) -> bool {
    let all = table::listeners(port);
    // Whose they are takes a look at every process of the machine, and a parked request waits for this answer.
    if all.iter().all(|listener| listener.address.is_loopback()) {
        return false;
    }
    let own = table::owned_by(&all, &table::members(group, mark));
    let relevant = if own.is_empty() { all } else { own };
    relevant.iter().any(|listener| !listener.address.is_loopback())
}
