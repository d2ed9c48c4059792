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

use crate::dual_pods::{command_context::CommandContext, host_memory, pod_events::is_failure};

/// Logs an executed command.
pub(super) fn log_executed(context: &CommandContext, took: Duration) {
    let (PairingCommand { node, action, .. }, took) = (&context.command, Millis::from(took));
    match level(action) {
        Level::WARN => tracing::warn!(%node, command = %action, duration = %took, "command executed"),
        Level::INFO => {
            let reason = host_memory::shortage_note(context);
            tracing::info!(%node, command = %action, duration = %took, reason, "command executed");
        }
        _ => tracing::debug!(%node, command = %action, duration = %took, "command executed"),
    }
}

/// Failures are warnings.
const fn level(action: &PairingAction) -> Level {
    match action {
        PairingAction::Engine { step: EngineStep::Stop { reason }, .. } if is_failure(*reason) => Level::WARN,
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
    use std::{
        io,
        sync::{Arc, Mutex},
    };

    use rouse::{
        model::SleepLevel,
        pairing::{
            command::EngineStopReason,
            event::{EngineRecord, LeaderEpoch},
            node::HostMemoryShortage,
        },
        units::{Bytes, Generation},
    };

    use super::*;
    use crate::dual_pods::testing::engine_record;

    /// Collects the lines of a log.
    #[derive(Clone, Default)]
    struct LogLines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for LogLines {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(text);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// Returns what `log_executed` writes for this command.
    fn logged(job: &CommandContext) -> String {
        let lines = LogLines::default();
        let out = lines.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Level::TRACE)
            .with_ansi(false)
            .with_writer(move || out.clone())
            .finish();
        tracing::subscriber::with_default(subscriber, || log_executed(job, Duration::from_secs(2)));
        let text = lines.0.lock().unwrap().clone();
        String::from_utf8(text).unwrap()
    }

    fn executed(action: PairingAction) -> CommandContext {
        CommandContext::for_test(PairingCommand {
            node: "n".into(),
            epoch: LeaderEpoch(1),
            serial: 1,
            action,
        })
    }

    fn record() -> EngineRecord {
        engine_record(Bytes::gib(72), Bytes::gib(2), Bytes::gib(72))
    }

    fn engine_action(step: EngineStep) -> PairingAction {
        PairingAction::Engine { engine: record().engine, generation: Generation(1), step }
    }

    fn stop(reason: EngineStopReason) -> PairingAction {
        engine_action(EngineStep::Stop { reason })
    }

    fn delete(reason: RequesterDeleteReason) -> PairingAction {
        PairingAction::Requester { requester: "r".into(), step: RequesterStep::Delete { reason } }
    }

    #[test]
    fn the_log_has_deaths_as_warnings_and_regular_steps_below() {
        let mut expected = vec![
            (stop(EngineStopReason::Idle), " INFO "),
            (stop(EngineStopReason::Evicted), " INFO "),
            (stop(EngineStopReason::Unneeded), " INFO "),
            (engine_action(EngineStep::Sleep { level: SleepLevel::One, via: None }), " INFO "),
            (delete(RequesterDeleteReason::ProviderDeleted), " INFO "),
            (engine_action(EngineStep::Query), " DEBUG "),
        ];
        let deaths = [
            EngineStopReason::StartFailed,
            EngineStopReason::WakeFailed,
            EngineStopReason::CanaryFailed,
            EngineStopReason::SleepFailed,
            EngineStopReason::Lost,
        ];
        expected.extend(deaths.map(|reason| (stop(reason), " WARN ")));
        let lost = [
            RequesterDeleteReason::EngineGone,
            RequesterDeleteReason::NodeGone,
            RequesterDeleteReason::AcceleratorFaulty,
        ];
        expected.extend(lost.map(|reason| (delete(reason), " WARN ")));
        for (action, level) in expected {
            let line = logged(&executed(action.clone()));
            assert!(line.contains(level), "{level}: {line}");
            assert_eq!(line.matches('\n').count(), 1, "one line: {line}");
            let command = format!("command executed node=n command={action} duration=2s");
            assert!(line.contains(&command), "{command}: {line}");
        }
    }

    #[test]
    fn a_sleep_at_level_2_for_lack_of_host_memory_is_logged_with_its_reason() {
        let mut job = executed(engine_action(EngineStep::Sleep { level: SleepLevel::Two, via: None }));
        job.record = Some(record());
        assert!(!logged(&job).contains("reason="), "{}", logged(&job));
        job.host_memory_shortage =
            Some(HostMemoryShortage::Node { budget: Bytes::gib(64), left: Bytes::gib(64) });
        let line = logged(&job);
        assert!(line.contains(" INFO ") && line.contains("reason="), "{line}");
        assert!(line.contains("set the annotation rouse.dev/host-memory"), "{line}");
    }
}
