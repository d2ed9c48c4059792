//! Logs executed commands.
//!
//! Changes of an engine's state are logged with reason and duration, as the driver does for its own engines. The steps
//! in between are for debugging.

use std::time::Duration;

use rouse::{
    pairing::command::{EngineStep, PairingAction, PairingCommand, RequesterDeleteReason, RequesterStep},
    units::Millis,
};
use tracing::Level;

use crate::pairing::{command_context::CommandContext, pod_events::is_failure};

/// Logs an executed command.
pub(super) fn log_executed(job: &CommandContext, took: Duration) {
    let (PairingCommand { node, action: order, .. }, took) = (&job.command, Millis::from(took));
    match level(order) {
        Level::WARN => tracing::warn!(%node, command = %order, duration = %took, "command executed"),
        Level::INFO => tracing::info!(%node, command = %order, duration = %took, "command executed"),
        _ => tracing::debug!(%node, command = %order, duration = %took, "command executed"),
    }
}

/// Failures are warnings.
const fn level(order: &PairingAction) -> Level {
    match order {
        PairingAction::Engine { step: EngineStep::Stop { reason: why }, .. } if is_failure(*why) => {
            Level::WARN
        }
        PairingAction::Requester {
            step:
                RequesterStep::Delete {
                    reason:
                        RequesterDeleteReason::EngineGone
                        | RequesterDeleteReason::NodeGone
                        | RequesterDeleteReason::AcceleratorFaulty,
                },
            ..
        } => Level::WARN,
        PairingAction::Engine {
            step:
                EngineStep::Create { .. }
                | EngineStep::Launch
                | EngineStep::Wake { .. }
                | EngineStep::Sleep { .. }
                | EngineStep::Stop { .. },
            ..
        }
        | PairingAction::Requester { step: RequesterStep::Delete { .. }, .. }
        | PairingAction::Provider { .. } => Level::INFO,
        PairingAction::Engine { .. } | PairingAction::Requester { .. } => Level::DEBUG,
    }
}

#[cfg(test)]
mod tests {
    use rouse::{
        pairing::{
            command::EngineStopReason,
            ids::{EngineFingerprint, PairingEngineId, ProviderMode},
        },
        units::Generation,
    };

    use super::*;

    #[test]
    fn deaths_are_warnings_and_what_was_wanted_is_none() {
        let stop = |reason| PairingAction::Engine {
            engine: PairingEngineId {
                mode: ProviderMode::Sleep,
                accelerators: std::iter::once("a".into()).collect(),
                fingerprint: EngineFingerprint(1),
            },
            generation: Generation(1),
            step: EngineStep::Stop { reason },
        };
        let delete = |reason| PairingAction::Requester {
            requester: "r".into(),
            step: RequesterStep::Delete { reason },
        };
        for reason in [EngineStopReason::StartFailed, EngineStopReason::WakeFailed, EngineStopReason::Lost] {
            assert_eq!(level(&stop(reason)), Level::WARN, "{reason:?}");
        }
        for reason in [EngineStopReason::Idle, EngineStopReason::Evicted, EngineStopReason::Unneeded] {
            assert_eq!(level(&stop(reason)), Level::INFO, "{reason:?}");
        }
        for reason in [RequesterDeleteReason::EngineGone, RequesterDeleteReason::NodeGone] {
            assert_eq!(level(&delete(reason)), Level::WARN, "{reason:?}");
        }
        assert_eq!(level(&delete(RequesterDeleteReason::ProviderDeleted)), Level::INFO);
    }
}
