//! What the fault of an attempt says about the engine.

use rouse::fault::{ExchangeTimeout, FailureCause, Fault};
use rouse_net::relay;

/// What a failed canary says about its engine. `None`: the engine is not to blame (its lease was revoked).
pub(super) const fn canary_failure_cause(fault: &Fault) -> Option<FailureCause> {
    match fault {
        Fault::EngineTimeout { .. } => Some(FailureCause::Timeout),
        Fault::EngineUnreachable { .. }
        | Fault::EngineClosedConnection { .. }
        | Fault::EngineFailed {
            cause:
                FailureCause::Exited(_)
                | FailureCause::Killed(_)
                | FailureCause::Unreachable
                | FailureCause::ConnectionBroken,
            ..
        } => Some(FailureCause::Unreachable),
        _ => None,
    }
}

/// Reports an exited process as a closed connection. Either event may be noticed first, so before the first byte of the
/// response the client gets the same error for both, and the same advice on whether to retry.
pub(super) fn exit_as_closed(failed: relay::ExchangeError) -> Fault {
    match failed.fault {
        Fault::EngineFailed {
            model,
            cause: FailureCause::Exited(_) | FailureCause::Killed(_),
            wait: None,
        } => Fault::EngineClosedConnection { model, may_have_started: failed.begun },
        other => other,
    }
}

/// Whether the request lost its engine and another engine may serve it. False when the gateway itself shuts down.
pub(super) const fn is_revocation(fault: &Fault) -> bool {
    matches!(fault, Fault::EngineFailed { .. } | Fault::TurnEnded { .. })
}

/// Whether the engine is unreachable or revoked, whichever of its socket and its process showed that first.
pub(super) const fn is_engine_gone(fault: &Fault) -> bool {
    is_revocation(fault)
        || matches!(
            fault,
            Fault::EngineUnreachable { .. } | Fault::EngineTimeout { timeout: ExchangeTimeout::Connect, .. }
        )
}
