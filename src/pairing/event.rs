//! What the decisions are told.
//!
//! Three kinds. Facts about nodes and accelerators; what is *seen* of Pods and launchers (by watches, which may be late, skip
//! states, or begin anew); and the *outcome* of each command. What is seen brings engines back after a restart or a change of
//! leader and tells of lives that end; once an engine is known, its state is moved by outcomes alone, since a watch may show
//! what was before them.

use serde::{Deserialize, Serialize};

use super::ids::{
    EngineFingerprint, LauncherBuild, NodeName, PairingEngineId, ProviderId, ProviderMode, RequesterId, Uid,
};
use crate::{
    model::{AcceleratorId, SleepLevel, SleepLevelPolicy},
    units::{Bytes, Generation, Millis, Tick},
};

/// Which leader says so: `Lease.leaseTransitions`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Epoch(pub u64);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "event")]
pub enum PairingEvent {
    /// This controller leads, from now on and with this epoch. What was known is forgotten: what is there will be seen.
    LeadershipGained {
        epoch: Epoch,
    },
    /// Everything that is there has been seen once. Nothing is decided before.
    Listed,
    /// Somebody has heard of a younger leader than the one with this epoch, and refused a write of it for that. If that is this
    /// controller, it decides nothing more: what it knows is another's to act on, and a refusal says nothing of the engine that
    /// the write was for. Only [`Self::LeadershipGained`] ends that.
    Superseded {
        epoch: Epoch,
    },
    Node {
        node: NodeName,
        facts: PairingNodeFacts,
    },
    /// The Node object is gone. Its engines are not believed gone before their Pods are.
    NodeGone {
        node: NodeName,
    },
    Accelerator {
        node: NodeName,
        accelerator: AcceleratorId,
        facts: AcceleratorFacts,
    },
    /// A reading of the meter: what was in use then, by whomever.
    MeterRead {
        node: NodeName,
        accelerator: AcceleratorId,
        used: Bytes,
        at: Tick,
    },
    /// What is to become of engines with this fingerprint.
    Template {
        fingerprint: EngineFingerprint,
        status: TemplateStatus,
    },
    /// What holds for launchers of this build. It is told before anybody asks for one.
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
    /// The Pod is gone, and its containers were seen ended before, or are by now: nothing of it holds anything.
    ProviderGone {
        node: NodeName,
        provider: ProviderId,
        uid: Uid,
    },
    /// The Pod's object is no longer there, and nobody saw its containers end: deleted by force, or collected with its node. What
    /// was reserved for it stays so for a while.
    ProviderVanished {
        node: NodeName,
        provider: ProviderId,
        uid: Uid,
    },
    /// The node's kubelet reports, or has stopped to. One of which nothing is told reports.
    KubeletReporting {
        node: NodeName,
        reports: bool,
    },
    /// An engine answers. Of one that has a Pod to itself, the Pod's readiness says it as well.
    EngineReady {
        node: NodeName,
        engine: PairingEngineId,
        generation: Generation,
    },
    /// An engine's process is seen gone, or the engine is hung and must be replaced (`gone` is false).
    EngineDied {
        node: NodeName,
        engine: PairingEngineId,
        generation: Generation,
        gone: bool,
    },
    /// What became of a command.
    Outcome {
        node: NodeName,
        target: CommandTarget,
        serial: u64,
        result: Result<CommandReply, CommandFailure>,
    },
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PairingNodeFacts {
    pub cordoned: bool,
    /// Host RAM that level-1 sleepers may hold together.
    pub host_sleep_memory: Bytes,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AcceleratorFacts {
    /// Its number on the node: the launcher of the lowest one of a set is asked.
    pub index: u32,
    pub capacity: Bytes,
    /// False after a fault (Xid, ECC), or when it is no longer there.
    pub healthy: bool,
    /// What sleepers may hold of it while anything is awake there; `None`: as much as is left.
    pub sleeping_memory: Option<Bytes>,
    /// A launcher is to be there, whether somebody asks for it now or not.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub wants_launcher: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TemplateStatus {
    Current,
    /// Its sleepers are deleted before others.
    Outdated,
    /// Nobody will ask for it again: its sleepers are deleted, its awake engines are ended instead of put to sleep.
    Obsolete,
}

/// Of launchers of one build.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LauncherBuildPolicy {
    /// None is made of it any more: a launcher of it is ended as soon as nobody is bound to an engine in it.
    pub obsolete: bool,
    /// How many engines one may hold, asleep and awake; `None`: as many as there is memory for.
    pub max_engines: Option<u32>,
}

/// Memory of an engine, per accelerator; host RAM for all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemorySizes {
    pub awake: Bytes,
    /// What it keeps asleep, as declared or learned.
    pub asleep: Bytes,
    /// Host RAM that it keeps its weights in at level 1.
    pub host: Bytes,
}

/// What a requester asks for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestedEngine {
    pub mode: ProviderMode,
    pub fingerprint: EngineFingerprint,
    /// In mode `wants_launcher`: of what build the engine's launcher is to be; `None`: of any.
    pub build: Option<LauncherBuild>,
    pub sizes: MemorySizes,
    pub level: SleepLevelPolicy,
    /// Asleep for so long, its engine is ended; `None`: never for that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stop_after: Option<Millis>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedRequester {
    pub requested: RequestedEngine,
    /// Who came first is served first.
    pub created: Tick,
    /// The stub's container, while it runs; another one is gated and knows nothing.
    pub stub_container: Option<Uid>,
    /// From its annotation, if a controller asked before.
    pub accelerators: Vec<AcceleratorId>,
    /// Being deleted since.
    pub deleting_since: Option<Tick>,
    /// How long after its deletion the kubelet kills what still runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub grace: Option<Millis>,
    /// Its containers have ended for good: the kubelet hands its accelerators on.
    pub terminated: bool,
    /// Our finalizer is on it.
    pub finalizer: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedProvider {
    pub uid: Uid,
    pub phase: ProviderPhase,
    pub deleting: bool,
    /// How often its container was started anew. Engines of a launcher end with it; that of a direct provider must not be
    /// started anew at all (it would take its memory unasked), so its Pod is made without restarts.
    pub restarts: u32,
    /// Of a launcher, if its Pod says it.
    pub build: Option<LauncherBuild>,
    /// The memory limit of the container that its engines run in. Weights in host RAM count against it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit: Option<Bytes>,
    /// What its annotations say of its engines.
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
    /// Its containers have ended for good, and what they held is free.
    Terminated,
}

/// What a provider's annotations keep of an engine: written before it is launched, changed when it is bound and unbound,
/// removed when it is gone.
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

/// Whom a command was about.
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
    /// Of a stub that was asked for its accelerators.
    Accelerators(Vec<AcceleratorId>),
    /// It sleeps, and keeps so much of each accelerator, if that was measured.
    Asleep {
        residue: Option<Bytes>,
    },
    /// Of an engine that was asked how it is.
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
    /// It sleeps, and nobody knows how deeply: host RAM is kept for it, and what wakes it must do for either level.
    AsleepAtUnknownLevel {
        residue: Option<Bytes>,
    },
    /// It is doing what a leader before told it.
    Busy,
    /// There is no process.
    Absent,
}

/// Why a command had no effect, or none that is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CommandFailure {
    /// Nobody answers there, or not in time.
    Unreachable,
    /// It was answered, with an error.
    Refused,
    /// Another one was there first. Of a younger epoch [`PairingEvent::Superseded`] is told instead.
    Conflict,
}
