//! Where an engine is: checks and records the accelerators that its stub reports.

use std::{net::SocketAddr, sync::atomic::Ordering};

use rouse::fault::FailureCause;

use super::engine_task::{EngineContext, PodReceiver, RetryBackoff};
use crate::{
    ledger::ReservationLocation,
    stub_client::{StubClient, StubClientError},
};

/// Records which accelerators the engine got. Completes only if the engine does not fit there.
pub(super) async fn check_location(
    context: &EngineContext,
    pod: &PodReceiver,
    proxy: SocketAddr,
) -> FailureCause {
    // What the leader chose was recorded with the reservation.
    if context.placement.location().is_none()
        && let (Some(stub), Some(node)) = (context.stub(proxy), node(pod))
    {
        let location = location(&stub, node).await;
        let known = !location.accelerators.is_empty();
        if let Err(error) =
            context.shared.commit_location(&context.placement, context.id.replica, location).await
        {
            tracing::warn!(engine = %context.id, reason = %error, "no room for the engine on the accelerators of its Pod");
            return FailureCause::InsufficientRoom;
        }
        context.located.store(known, Ordering::Relaxed);
    }
    locate(context, pod).await;
    std::future::pending().await
}

/// Checks that the engine's Pod has the accelerators that the leader chose for it.
pub(super) async fn check_chosen(
    context: &EngineContext,
    pod: &PodReceiver,
    proxy: SocketAddr,
    chosen: &ReservationLocation,
) -> Result<(), FailureCause> {
    let mut pauses = RetryBackoff::new();
    loop {
        if let (Some(stub), Some(node)) = (context.stub(proxy), node(pod)) {
            match stub.accelerators().await {
                Ok(accelerators) if node == chosen.node && chosen.has_accelerators(&accelerators) => {
                    return Ok(());
                }
                Err(error) if error.is_unauthorized() => return Err(FailureCause::Refused),
                // The stub does not listen yet, or waits for its driver.
                Err(error) if error.is_unavailable() => {
                    tracing::debug!(engine = %context.id, %error, "the stub did not report its accelerators yet");
                }
                reported => {
                    let got = ReservationLocation { node, accelerators: reported.unwrap_or_default() };
                    let reason = format!(
                        "the engine's Pod got {got}, and {chosen} is reserved for the engine: check that the node \
                         agent of Rouse runs there, and that no other device plugin offers these accelerators"
                    );
                    tracing::warn!(engine = %context.id, reason, "the engine has other accelerators than were chosen");
                    context.shared.report_failure(&context.id, context.generation, &reason).await;
                    return Err(FailureCause::InsufficientRoom);
                }
            }
        }
        pauses.pause().await;
    }
}

/// Records the accelerators that the engine's stub reports, once it reports any; only the node if the stub knows none.
/// Those that the leader chose are recorded already.
///
/// There is no check that the engine fits. The kubelet hands a requester's accelerators to the next requester before
/// the ledger releases the former engine's memory there. The pairing of requesters with engines keeps room on them.
pub(super) async fn locate(context: &EngineContext, pod: &PodReceiver) {
    if context.placement.location().is_some() {
        return;
    }
    let mut pauses = RetryBackoff::new();
    while !context.located.load(Ordering::Relaxed) {
        let stub = context.proxy(pod).and_then(|proxy| context.stub(proxy));
        if let (Some(stub), Some(node)) = (stub, node(pod)) {
            let reported = stub.accelerators().await;
            if let Err(error) = &reported {
                tracing::debug!(engine = %context.id, %error, "the stub did not report the accelerators of its Pod");
            }
            // A requester's Pod has an address before its stub listens, and a stub waits for its driver.
            if !reported.as_ref().is_err_and(StubClientError::is_unavailable) {
                let accelerators = reported.unwrap_or_default();
                let location = ReservationLocation { node, accelerators };
                context.shared.record_location(&context.placement, context.id.replica, location).await;
                context.located.store(true, Ordering::Relaxed);
                return;
            }
        }
        pauses.pause().await;
    }
}

fn node(pod: &PodReceiver) -> Option<String> {
    pod.borrow().as_ref()?.node.clone()
}

/// Returns the node and accelerators of the engine behind this stub.
pub(super) async fn location(stub: &StubClient, node: String) -> ReservationLocation {
    let accelerators = stub.accelerators().await.unwrap_or_else(|error| {
        tracing::debug!(%error, "the stub did not report the accelerators of its Pod");
        Vec::new()
    });
    ReservationLocation { node, accelerators }
}
