//! Input of the decisions: every observation and every outcome of a command.
//!
//! All of them pass through one channel and into the journal, so a journal is the whole input of a
//! [`crate::fleet::Fleet`].

mod display;
mod published;

use std::{collections::BTreeMap, net::SocketAddr};

use serde::{Deserialize, Serialize};

pub use self::published::{GatewayDemand, PublishedEngine, PublishedEngineState, PublishedFailure};
pub use crate::fleet::{dispatch::fairness::FairnessCounters, plan::Planner};
use crate::{
    engine::{
        last_outcome::{EngineDiagnostics, FailureRecord},
        saturation_limit::SaturationLimit,
        turn_clients::TurnClients,
    },
    fault::FailureCause,
    fleet::quote::LearnedTimes,
    model::{AcceleratorId, EngineId, FleetConfig, ModelName, SleepLevel, VariantName},
    units::{Bytes, Generation, Millis, Tick},
};

/// An observation or an outcome. The fleet ignores one whose `generation` is not the engine's current one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "event")]
pub enum Event {
    /// The configuration was loaded or reloaded. Models and accelerators that it lacks are on their way out.
    Configured {
        configuration: Box<FleetConfig>,
    },
    /// Measurements of a model's variant from an earlier run of the gateway.
    MeasurementsRestored {
        model: ModelName,
        #[serde(default, skip_serializing_if = "VariantName::is_default")]
        variant: VariantName,
        learned: LearnedMeasurements,
    },
    /// The last failure of an engine in an earlier run of the gateway. The engine had not served since.
    ///
    /// Ignored if the engine was found serving or asleep, or if its model's configuration has another fingerprint now.
    FailureRestored {
        engine: EngineId,
        /// Fingerprint of the model's configuration at that time.
        fingerprint: u64,
        at: Tick,
        failure: FailureRecord,
    },
    /// All engines that already ran are reported: scheduling may begin.
    AdoptionDone,

    // Requests
    Arrived {
        waiter: Waiter,
    },
    /// The client of a parked request disconnected, or the request's own timer ended the wait.
    Left {
        waiter: WaiterId,
    },
    /// A sample of the gate.
    ///
    /// Fields: the number of leases, the end of the last lease, the time of the last response byte, the clients that
    /// have held a lease since the gate last closed, and the pause before the latest use.
    GateSampled {
        engine: EngineId,
        generation: Generation,
        leases: u32,
        last_lease_end: Tick,
        last_byte: Tick,
        #[serde(default, skip_serializing_if = "TurnClients::is_empty")]
        clients: TurnClients,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        idle_gap: Option<Millis>,
    },
    /// The data path ejected an engine because requests to it fail, or restored it.
    ///
    /// `until`: no waiter goes to the engine before this moment, and then one does. `None`: the engine is not ejected.
    EjectionChanged {
        engine: EngineId,
        generation: Generation,
        until: Option<Tick>,
    },
    /// The engine reported a load that changes how many of this gateway's requests it gets, or for how long.
    ///
    /// `limit`: the most of them, and until when. `None`: as many as the configuration allows. An unchanged limit is
    /// sent again only when the one sent before ends, so the reported load in it may be as old as a limit lasts.
    SaturationChanged {
        engine: EngineId,
        generation: Generation,
        limit: Option<SaturationLimit>,
    },
    /// The engine's stub refused a request or a probe because its gate is closed. The engine never saw that request.
    StubGateClosed {
        engine: EngineId,
        generation: Generation,
    },
    /// The engine's stub admits requests again.
    StubGateOpened {
        engine: EngineId,
        generation: Generation,
    },
    /// Weighted tokens that a model served to a key since the last such event.
    Served {
        model: ModelName,
        key: String,
        tokens: u64,
    },
    /// Fairness counters from before the journal began. Only in a snapshot.
    FairnessRestored {
        model: ModelName,
        band: i32,
        counters: FairnessCounters,
    },
    /// Models, engines and memory from before the journal began. Only in a snapshot.
    StateRestored {
        state: Box<Planner>,
    },
    /// The demand of another gateway, which replaces that gateway's former demand. `None`: that gateway is gone.
    ///
    /// A gateway never receives its own demand.
    RemoteDemand {
        gateway: String,
        demand: Option<BTreeMap<ModelName, GatewayDemand>>,
    },
    /// Whether this gateway leads the cluster. A gateway that never receives this event leads.
    ///
    /// A new leader then receives the running engines as `Adopted`, followed by `AdoptionDone`.
    LeadershipChanged {
        leads: bool,
    },
    /// Whether the cluster's API server answers this gateway. Until this event, the fleet assumes that it does.
    ApiServerChanged {
        answers: bool,
    },
    /// Whether this gateway sees other gateways. Until this event, the fleet assumes that there are some.
    PeersChanged {
        exist: bool,
    },
    /// Engines that start from here on get a generation above this one.
    ///
    /// A new leader does not know all earlier generations, and other gateways do.
    GenerationFloor {
        generation: Generation,
    },
    /// The leader's published state of an engine; `None`: the engine has no process.
    ///
    /// Intermediate states may be missing. Send it also for an engine known here that the leader does not publish.
    Published {
        engine: EngineId,
        generation: Generation,
        published: Option<PublishedEngine>,
    },
    /// The gate is closed and no lease is left.
    Drained {
        engine: EngineId,
        generation: Generation,
    },
    /// Result of the first request, or of the adapter's one-token probe, after a start or wake.
    Canary {
        engine: EngineId,
        generation: Generation,
        verdict: CanaryVerdict,
    },

    // Outcomes of commands
    /// The reservation is granted; on one machine its accelerators are known at once.
    Placed {
        engine: EngineId,
        generation: Generation,
        accelerators: Vec<AcceleratorId>,
    },
    /// Another party reserved first.
    Conflict {
        engine: EngineId,
        generation: Generation,
    },
    /// The process or Pod exists and will answer at this address.
    Started {
        engine: EngineId,
        generation: Generation,
        address: SocketAddr,
    },
    /// The engine has measured free memory and allocated its own: others may start beside it.
    Profiled {
        engine: EngineId,
        generation: Generation,
    },
    /// The health check answers, after a launch or a wake.
    Ready {
        engine: EngineId,
        generation: Generation,
    },
    /// The engine reported that it sleeps.
    Slept {
        engine: EngineId,
        generation: Generation,
        level: SleepLevel,
    },
    SleepFailed {
        engine: EngineId,
        generation: Generation,
        cause: FailureCause,
    },
    WakeFailed {
        engine: EngineId,
        generation: Generation,
        cause: FailureCause,
    },
    /// A start that cannot succeed, although the process may still exist.
    StartFailed {
        engine: EngineId,
        generation: Generation,
        cause: FailureCause,
    },
    /// The process or Pod has ended, by order or by itself.
    Gone {
        engine: EngineId,
        generation: Generation,
        cause: FailureCause,
    },

    // Observations
    /// Diagnostics of an engine that does not serve. Sent before `Gone` and `StartFailed` if known by then.
    Diagnostics {
        engine: EngineId,
        generation: Generation,
        diagnostics: EngineDiagnostics,
    },
    /// Result of a health probe of an awake engine. `progressed`: the engine's own token counters moved since the last
    /// probe.
    Health {
        engine: EngineId,
        generation: Generation,
        ok: bool,
        progressed: bool,
    },
    /// A meter reading: bytes in use on the accelerator, per engine if the meter can tell them apart.
    MeterRead {
        accelerator: AcceleratorId,
        used: Bytes,
        by_engine: Option<BTreeMap<EngineId, Bytes>>,
    },
    /// Largest usage on one accelerator of this engine, where no other engine uses it.
    ///
    /// Only for an engine of a pool: the decisions do not read the meters of its accelerators.
    UsageObserved {
        engine: EngineId,
        generation: Generation,
        used: Bytes,
    },
    /// Memory that an engine keeps on each of its accelerators while it sleeps. Sent before `Slept`.
    ///
    /// Only for an engine of a pool that another controller put to sleep and measured.
    ResidueMeasured {
        engine: EngineId,
        generation: Generation,
        bytes: Bytes,
    },
    /// Memory in use on each of an engine's accelerators, by all engines there, when it has fallen asleep. Sent before
    /// `Slept`.
    ///
    /// Only for an engine of a pool with slots, whose stub put it to sleep.
    UsageAfterSleep {
        engine: EngineId,
        generation: Generation,
        used: BTreeMap<AcceleratorId, Bytes>,
    },
    AcceleratorLost {
        accelerator: AcceleratorId,
    },
    AcceleratorRecovered {
        accelerator: AcceleratorId,
    },
    /// An engine that already ran when this gateway started.
    Adopted {
        engine: EngineId,
        generation: Generation,
        found: AdoptedEngine,
    },

    // Operators
    OperatorRequest {
        operation: OperationId,
        model: ModelName,
        action: OperatorAction,
    },
    /// How many engines of a variant should run while the model is in use. Replaces the variant's former target.
    ///
    /// Ignored unless the model's configuration says that it is scaled
    /// ([`scaled`](crate::model::ModelSpec::scaled)). A target starts nothing while no engine of the model is awake:
    /// requests, `minReplicas` and operators start the first one.
    Desired {
        model: ModelName,
        variant: VariantName,
        replicas: u32,
        /// Why, in the words of the decision that set it.
        reason: String,
    },
    /// Shutdown: the fleet wakes nothing, refuses every waiter, and stops the engines if `stop_engines` is set.
    Shutdown {
        stop_engines: bool,
    },
}

/// Identity of a parked request, unique within one run of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WaiterId(pub u64);

/// Identity of an operator's order, unique within one run of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct OperationId(pub u64);

/// A parked request, as plain data. The driver keeps the other end of its channel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Waiter {
    pub id: WaiterId,
    pub model: ModelName,
    /// The model's priority plus the key's; higher goes first.
    pub band: i32,
    /// The API key that fairness counts for; empty without keys.
    pub key: String,
    /// Hash of the client: of its API key, else of the user or session that the request names, else of its address. 0
    /// means unknown.
    #[serde(default)]
    pub client: u64,
    /// When the request first arrived; a replayed canary keeps it.
    pub arrived: Tick,
    /// When the wait ends at the latest.
    pub deadline: Tick,
    /// The request can be the canary: a stream, which the gateway can replay until its first byte.
    pub stream: bool,
    /// Only this generation of this engine has the response that the request continues. Ignored once that generation no
    /// longer serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub required_engine: Option<(EngineId, Generation)>,
}

/// An engine as a gateway found it when the gateway started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedEngine {
    pub address: SocketAddr,
    pub accelerators: Vec<AcceleratorId>,
    /// The engine was ordered to sleep at this level; `None`: awake, or still starting if `ready` is false.
    pub asleep: Option<SleepLevel>,
    /// The engine is known to serve or to sleep: by its answer, or in a cluster by the former leader's records. False
    /// while the gateway still asks an engine that was ordered to sleep.
    pub ready: bool,
    /// Fingerprint of the template that the engine was started from.
    pub fingerprint: u64,
    /// When the last lease ended, as the previous gateway recorded it.
    pub last_lease_end: Tick,
    pub started: Tick,
}

/// A canary's outcome. Any status below 500 passes; a client that disconnects proves nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CanaryVerdict {
    Passed,
    Failed(FailureCause),
    Inconclusive,
}

/// Orders that an operator may give.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OperatorAction {
    Wake,
    Sleep { level: Option<SleepLevel> },
    Stop,
    Pin,
    Unpin,
}

/// Measurements of one variant of a model, restored at start so that estimates need not be learned again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnedMeasurements {
    pub peak: Option<Bytes>,
    pub residue: Option<Bytes>,
    pub start: Option<Millis>,
    pub wake: Option<Millis>,
    pub sleep: Option<Millis>,
    /// Largest use of one accelerator that a pool reported for an engine.
    ///
    /// Unlike `peak` it does not change reservations: a pool's reservation is in a ledger that others read, and uses
    /// the declared memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed: Option<Bytes>,
    /// The times of its steps with their spread, for quotes.
    #[serde(default, skip_serializing_if = "LearnedTimes::is_empty")]
    pub times: LearnedTimes,
}
