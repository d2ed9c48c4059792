//! Explains why an engine that may sleep at level 1 does not.
//!
//! Nothing measures how much RAM the weights of an engine take. An engine reports neither its weights nor what it moved
//! to the host, stubs read only the accelerators' memory, and that falls by the KV cache as well. So the decisions use
//! what the requester declares, and by default the whole that the weights can be. A user whose weights take less must
//! learn which annotation to set.

use rouse::{
    model::{SleepLevel, SleepLevelPolicy},
    pairing::{
        command::{EngineStep, EngineStopReason, PairingAction},
        ids::ProviderMode,
        node::HostMemoryShortage,
    },
    units::Bytes,
};

use super::command_context::CommandContext;
use crate::dual_pods::keys;

/// Returns why this command puts an engine to sleep at level 2, or stops it, for lack of host RAM.
pub(super) fn shortage_note(job: &CommandContext) -> Option<String> {
    let PairingAction::Engine { engine, step, .. } = &job.command.action else { return None };
    let record = job.record.as_ref()?;
    let lacks_level_1 = match step {
        EngineStep::Sleep { level: SleepLevel::Two, .. } => record.level != SleepLevelPolicy::Two,
        EngineStep::Stop { reason: EngineStopReason::Unneeded | EngineStopReason::CannotSleep } => {
            record.level == SleepLevelPolicy::OneOrStop && engine.mode != ProviderMode::Plain
        }
        _ => false,
    };
    job.host_memory_shortage.filter(|_| lacks_level_1).map(|shortage| describe(record.sizes.host, shortage))
}

fn describe(wanted: Bytes, shortage: HostMemoryShortage) -> String {
    let limit = match shortage {
        HostMemoryShortage::Node { budget: Bytes::ZERO, .. } => {
            return "no level 1: the node's AcceleratorPool sets no hostSleepMemory".to_owned();
        }
        HostMemoryShortage::Node { budget, left } => {
            format!("hostSleepMemory of the node's AcceleratorPool is {budget}, of which {left} is left")
        }
        HostMemoryShortage::Pod { limit, left } => {
            format!("the memory limit of the engine's Pod is {limit}, of which {left} is left")
        }
        HostMemoryShortage::UnobservedPod => {
            return "no level 1: the memory limit of the engine's Pod is not known yet".to_owned();
        }
    };
    format!(
        "no level 1: it would take {wanted} of host RAM, and {limit}; if the weights take less, set the annotation {} \
         of the requester to that (of an InferenceModel: hostMemory, for each accelerator)",
        keys::HOST_MEMORY
    )
}

#[cfg(test)]
mod tests {
    use rouse::{
        pairing::{
            command::PairingCommand,
            event::{EngineRecord, LeaderEpoch},
            ids::{EngineFingerprint, PairingEngineId},
        },
        units::Generation,
    };

    use super::*;
    use crate::dual_pods::testing::engine_record;

    const BUDGET: Bytes = Bytes::gib(128);

    fn engine(mode: ProviderMode) -> PairingEngineId {
        let accelerators = std::iter::once("GPU-1".into()).collect();
        PairingEngineId { mode, accelerators, fingerprint: EngineFingerprint(1) }
    }

    /// Returns the note on this step of an engine with this policy, for which the node has too little left.
    fn note(mode: ProviderMode, policy: SleepLevelPolicy, step: EngineStep) -> Option<String> {
        let (engine, generation) = (engine(mode), Generation(1));
        let action = PairingAction::Engine { engine: engine.clone(), generation, step };
        let command = PairingCommand { node: "n".into(), epoch: LeaderEpoch(1), serial: 1, action };
        let mut job = CommandContext::for_test(command);
        job.record = Some(EngineRecord {
            engine,
            level: policy,
            ..engine_record(Bytes::gib(72), Bytes::gib(2), Bytes::gib(72))
        });
        job.host_memory_shortage = Some(HostMemoryShortage::Node { budget: BUDGET, left: Bytes::gib(56) });
        shortage_note(&job)
    }

    #[test]
    fn an_engine_without_room_at_level_1_names_the_annotation_to_set() {
        let sleep = |level| EngineStep::Sleep { level, via: None };
        let stop = || EngineStep::Stop { reason: EngineStopReason::Unneeded };
        let said = note(ProviderMode::Sleep, SleepLevelPolicy::Auto, sleep(SleepLevel::Two)).unwrap();
        assert_eq!(
            said,
            "no level 1: it would take 72Gi of host RAM, and hostSleepMemory of the node's AcceleratorPool is 128Gi, \
             of which 56Gi is left; if the weights take less, set the annotation rouse.dev/host-memory of the \
             requester to that (of an InferenceModel: hostMemory, for each accelerator)"
        );
        for mode in [ProviderMode::Sleep, ProviderMode::Launcher] {
            assert!(note(mode, SleepLevelPolicy::One, sleep(SleepLevel::Two)).is_some());
            assert!(note(mode, SleepLevelPolicy::OneOrStop, stop()).is_some(), "level 2 loses adapters");
        }
    }

    #[test]
    fn an_engine_that_gets_what_it_asks_for_has_no_such_note() {
        let sleep = |level| EngineStep::Sleep { level, via: None };
        let stop = |reason| EngineStep::Stop { reason };
        for (mode, policy, step) in [
            (ProviderMode::Sleep, SleepLevelPolicy::Auto, sleep(SleepLevel::One)),
            (ProviderMode::Sleep, SleepLevelPolicy::Two, sleep(SleepLevel::Two)),
            (ProviderMode::Sleep, SleepLevelPolicy::Never, stop(EngineStopReason::Unneeded)),
            (ProviderMode::Sleep, SleepLevelPolicy::OneOrStop, stop(EngineStopReason::Idle)),
            (ProviderMode::Plain, SleepLevelPolicy::OneOrStop, stop(EngineStopReason::Unneeded)),
        ] {
            assert_eq!(note(mode, policy, step.clone()), None, "{mode:?} {policy:?} {step:?}");
        }
    }

    #[test]
    fn each_shortage_names_what_to_change() {
        let (limit, left) = (Bytes::gib(50), Bytes::gib(10));
        let pod = describe(Bytes::gib(40), HostMemoryShortage::Pod { limit, left });
        assert!(pod.contains("take 40Gi") && pod.contains("Pod is 50Gi, of which 10Gi is left"), "{pod}");
        assert!(pod.contains("set the annotation rouse.dev/host-memory"), "{pod}");
        // No annotation helps where no engine may sleep at level 1.
        let none = HostMemoryShortage::Node { budget: Bytes::ZERO, left: Bytes::ZERO };
        let none = describe(Bytes::gib(40), none);
        assert!(none.contains("hostSleepMemory") && !none.contains("annotation"), "{none}");
    }
}
