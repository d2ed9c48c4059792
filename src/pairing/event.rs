//! Events that the pairing decisions receive.
//!
//! There are three kinds: facts about nodes and accelerators, *observations* of Pods and launchers, and the *outcome*
//! of each command. Observations come from watches, which may lag, skip states, or restart. They bring engines back
//! after a restart or a change of leader, and report generations that end. Once an engine is known, outcomes alone move
//! its state, since a watch may show a state from before them.

use serde::{Deserialize, Serialize};

use super::ids::{
    EngineFingerprint, LauncherBuild, NodeName, PairingEngineId, ProviderId, ProviderMode, RequesterId, Uid,
};
use crate::{
    model::{AcceleratorId, SleepLevel, SleepLevelPolicy},
    units::{Bytes, Generation, Millis, Tick},
};

/// The epoch of a leader: `Lease.leaseTransitions`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaderEpoch(pub u64);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "event")]
pub enum PairingEvent {
    /// This controller leads from now on, with this epoch. It forgets its state; observations bring the present state.
    LeadershipGained {
        epoch: LeaderEpoch,
    },
    /// Every existing object has been observed once. Nothing is planned before.
    Listed,
    /// A stub, launcher or Pod refused a write of this epoch because it knows a newer leader. If the epoch is this
    /// controller's own, it plans nothing more until [`Self::LeadershipGained`]: the newer leader acts on the state,
    /// and the refusal says nothing about the engine that the write was for.
    Superseded {
        epoch: LeaderEpoch,
    },
    Node {
        node: NodeName,
        facts: PairingNodeFacts,
    },
    /// The Node object is gone. Its engines count until their Pods are gone.
    NodeGone {
        node: NodeName,
    },
    Accelerator {
        node: NodeName,
        accelerator: AcceleratorId,
        facts: AcceleratorFacts,
    },
    /// A reading of the meter: the memory in use at `at`, by any process.
    MeterRead {
        node: NodeName,
        accelerator: AcceleratorId,
        used: Bytes,
        at: Tick,
    },
    /// The status of the template with this fingerprint.
    Template {
        fingerprint: EngineFingerprint,
        status: TemplateStatus,
    },
    /// The policy for launchers of this build. Arrives before any requester requests the build.
    LauncherBuild {
        build: LauncherBuild,
        policy: LauncherBuildPolicy,
    },
    RequesterObserved {
        node: NodeName,
        requester: RequesterId,
        observed: ObservedRequester,
    },
    RequesterGone {
        node: NodeName,
        requester: RequesterId,
    },
    ProviderObserved {
        node: NodeName,
        provider: ProviderId,
        observed: ObservedProvider,
    },
    /// The Pod is gone, and its containers have ended, so that it holds nothing.
    ProviderGone {
        node: NodeName,
        provider: ProviderId,
        uid: Uid,
    },
    /// The Pod's object vanished before its containers were seen to end: deleted by force, or collected with its node.
    /// Its reservation stays for a while.
    ProviderVanished {
        node: NodeName,
        provider: ProviderId,
        uid: Uid,
    },
    /// The node's kubelet reports, or has stopped reporting. A kubelet without this event counts as reporting.
    KubeletReporting {
        node: NodeName,
        reports: bool,
    },
    /// The gateway wants this requester's engine awake or asleep while the requester stays. It counts only for a
    /// requester that the gateway actuates, and may arrive before the requester is observed. It is forgotten with the
    /// requester and at a change of leader.
    Want {
        node: NodeName,
        requester: RequesterId,
        wanted: WantedState,
    },
    /// The gateway no longer wants this requester's engine awake, because the requester is about to go.
    WantWithdrawn {
        node: NodeName,
        requester: RequesterId,
    },
    /// An engine answers. Of a direct provider, the Pod's readiness reports the same.
    EngineReady {
        node: NodeName,
        engine: PairingEngineId,
        generation: Generation,
    },
    /// An engine's process ended or cannot serve. `gone` means that its memory is free. Otherwise remaining processes
    /// may hold memory until the engine is stopped.
    EngineDied {
        node: NodeName,
        engine: PairingEngineId,
        generation: Generation,
        gone: bool,
    },
    /// The result of a command.
    Outcome {
        node: NodeName,
        target: CommandTarget,
        serial: u64,
        result: Result<CommandReply, CommandFailure>,
    },
}

/// The state that the gateway wants an engine in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum WantedState {
    Awake,
    /// At this level if the engine's policy allows it, else as the policy says.
    Asleep {
        level: SleepLevel,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairingNodeFacts {
    pub cordoned: bool,
    /// Host RAM that all level-1 sleepers may hold together.
    pub host_sleep_memory: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorFacts {
    /// Index on the node. An engine on several accelerators runs in the launcher of the lowest index.
    pub index: u32,
    pub capacity: Bytes,
    /// False after a fault (Xid, ECC), or when the accelerator has disappeared.
    pub healthy: bool,
    /// Memory that sleepers may hold on it while an engine is awake there; `None`: all that is left.
    pub sleeping_memory: Option<Bytes>,
    /// A launcher must exist there even without a requester.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wants_launcher: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TemplateStatus {
    Current,
    /// Its sleepers are deleted before others.
    Outdated,
    /// No requester will request it again. Its sleepers are deleted, and its awake engines are stopped instead of put
    /// to sleep.
    Obsolete,
}

/// Policy for launchers of one build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LauncherBuildPolicy {
    /// No further launcher is created of it. A launcher of it is deleted once no requester is bound to an engine in it.
    pub obsolete: bool,
    /// How many engines a launcher may hold, asleep and awake; `None`: as many as memory allows.
    pub max_engines: Option<u32>,
}

/// Memory of an engine: `awake` and `asleep` per accelerator, `host` in total.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySizes {
    pub awake: Bytes,
    /// Memory that it keeps asleep, as declared or measured.
    pub asleep: Bytes,
    /// Host RAM that holds its weights at level 1.
    pub host: Bytes,
}

/// The engine that a requester requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedEngine {
    pub mode: ProviderMode,
    pub fingerprint: EngineFingerprint,
    /// The build that the engine's launcher must have ([`ProviderMode::Launcher`] only); `None`: any.
    pub build: Option<LauncherBuild>,
    pub sizes: MemorySizes,
    pub level: SleepLevelPolicy,
    /// How long the engine may sleep before it is stopped; `None`: without limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_after: Option<Millis>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedRequester {
    pub requested: RequestedEngine,
    /// Requesters are served in the order of their creation.
    pub created: Tick,
    /// The stub's container while it runs. A new container starts with a closed gate and no state.
    pub stub_container: Option<Uid>,
    /// From its annotation, if a controller has queried them before.
    pub accelerators: Vec<AcceleratorId>,
    /// When its deletion began.
    pub deleting_since: Option<Tick>,
    /// How long after its deletion the kubelet kills its containers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace: Option<Millis>,
    /// Its containers have ended for good: the kubelet may allocate its accelerators anew.
    pub terminated: bool,
    /// Our finalizer is on it.
    pub finalizer: bool,
    /// The gateway decides when its engine starts, sleeps and wakes while the requester stays: see
    /// [`PairingEvent::Want`]. Before a want, a bound engine is neither put to sleep nor woken, and none starts.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub actuated: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedProvider {
    pub uid: Uid,
    pub phase: ProviderPhase,
    pub deleting: bool,
    /// How often its container was restarted. A launcher's engines end with the container. A direct provider's Pod
    /// never restarts it, because the new process would take memory without a reservation.
    pub restarts: u32,
    /// The launcher's build, if its Pod carries one.
    pub build: Option<LauncherBuild>,
    /// The memory limit of the container that its engines run in. Weights in host RAM count against it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<Bytes>,
    /// The engine records in its annotations.
    pub records: Vec<EngineRecord>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProviderPhase {
    /// Its container does not run yet.
    Pending,
    Running,
    Ready,
    /// Its container crashed and is not ready again.
    Crashed,
    /// Its containers have ended for good, and their memory is free.
    Terminated,
}

/// An engine's record in its provider's annotations. Written before the launch, changed by binding and unbinding, and
/// removed when the engine is gone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineRecord {
    pub engine: PairingEngineId,
    pub generation: Generation,
    pub sizes: MemorySizes,
    pub level: SleepLevelPolicy,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_after: Option<Millis>,
    pub requester: Option<RequesterId>,
    pub last_used: Tick,
}

/// The object of a command.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CommandTarget {
    Engine(PairingEngineId, Generation),
    Requester(RequesterId),
    Provider(ProviderId),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CommandReply {
    Done,
    /// The accelerators that a stub reported.
    Accelerators(Vec<AcceleratorId>),
    /// The engine sleeps. `residue` is what it keeps of each accelerator, if measured.
    Asleep {
        residue: Option<Bytes>,
    },
    /// The condition that an engine's query found.
    Condition(QueriedCondition),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum QueriedCondition {
    /// Its process runs and does not answer yet.
    Starting,
    Awake,
    Asleep {
        level: SleepLevel,
        residue: Option<Bytes>,
    },
    /// The engine sleeps at an unknown level. Its host RAM stays reserved, and its wake must suit either level.
    AsleepAtUnknownLevel {
        residue: Option<Bytes>,
    },
    /// The engine still executes a command of an earlier leader.
    Busy,
    /// The process does not exist.
    Absent,
}

/// Why a command had no effect, or no known effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CommandFailure {
    /// The target did not answer, or not in time.
    Unreachable,
    /// The target answered with an error.
    Refused,
    /// Another object or writer came first. A conflict with a newer epoch becomes [`PairingEvent::Superseded`] instead.
    Conflict,
}
