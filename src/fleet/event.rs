//! What the decisions are told. Every observation and every outcome of a command is one of these, on one channel and
//! in the journal, so that a journal is the whole input of a [`crate::fleet::Fleet`].

use std::{collections::BTreeMap, fmt, net::SocketAddr};

use serde::{Deserialize, Serialize};

pub use crate::fleet::{dispatch::fairness::FairnessCounters, plan::Planner};
use crate::{
    engine::{Engine, last_outcome::EngineDiagnostics, state::LifecycleState, turn_clients::TurnClients},
    fault::FailureCause,
    model::{AcceleratorId, EngineId, FleetConfig, ModelName, SleepLevel},
    units::{Bytes, Generation, Millis, Tick},
};

/// A parked request's identity, unique in one gateway's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct WaiterId(pub u64);

/// One operator's order, unique in one gateway's life.
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
    /// Whose request it is, for fairness; empty without keys.
    pub key: String,
    /// The client as a hash: of its API key, else of the user or session that the request names, else of its address. 0: unknown.
    #[serde(default)]
    pub client: u64,
    /// When it first arrived; a replayed canary keeps it.
    pub arrived: Tick,
    /// When its wait ends in any case.
    pub deadline: Tick,
    /// It can be the canary: a stream, which can be replayed until its first byte.
    pub stream: bool,
    /// Nobody but this life of an engine has what it goes on from; it means nothing once that life no longer serves.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub required_engine: Option<(EngineId, Generation)>,
}

/// An observation or an outcome. Those with a `generation` are ignored when the engine has moved on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "event")]
pub enum Event {
    /// Loaded or reloaded; models and accelerators that are absent are on their way out.
    Configured {
        configuration: Box<FleetConfig>,
    },
    /// What an earlier life learned of a model.
    MeasurementsRestored {
        model: ModelName,
        learned: LearnedMeasurements,
    },
    /// Everything that already ran has been reported: scheduling may begin.
    AdoptionDone,

    // Requests
    Arrived {
        waiter: Waiter,
    },
    /// The client of a parked request went away, or its own timer ended it.
    Left {
        waiter: WaiterId,
    },
    /// Sampled from the gate: leases held, when the last one ended, when the last response byte passed, who has held one
    /// since the gate was last closed, and how long nobody had before its latest use.
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
    /// The data path's opinion of an engine changed. `until`: requests to it fail, so no waiter is to be sent there before
    /// this moment, and then one; `None`: it is like any other.
    EjectionChanged {
        engine: EngineId,
        generation: Generation,
        until: Option<Tick>,
    },
    /// The stub in front of the engine lets nobody in, as it answered a request or a probe; no engine has seen that one.
    StubGateClosed {
        engine: EngineId,
        generation: Generation,
    },
    /// It lets requests in again.
    StubGateOpened {
        engine: EngineId,
        generation: Generation,
    },
    /// What a key was served by a model since this was told last, in weighted tokens.
    Served {
        model: ModelName,
        key: String,
        tokens: u64,
    },
    /// What keys were served before a journal began, and are charged for: only in a snapshot.
    FairnessRestored {
        model: ModelName,
        band: i32,
        counters: FairnessCounters,
    },
    /// Everything that was known of models, engines and memory before a journal began: only in a snapshot.
    StateRestored {
        state: Box<Planner>,
    },
    /// Another gateway of the cluster says what it has of every model: this replaces what it said before. `None`: that
    /// gateway is gone. What this gateway has itself is never told so.
    RemoteDemand {
        gateway: String,
        demand: Option<BTreeMap<ModelName, GatewayDemand>>,
    },
    /// Whether this gateway leads, in a cluster; one that is never told does. Who comes to lead is then told what is
    /// found running, as `Adopted`, and that this is all, as `AdoptionDone`.
    LeadershipChanged {
        leads: bool,
    },
    /// Whether the cluster's API answers this gateway; one that is never told takes it to.
    ApiServerChanged {
        answers: bool,
    },
    /// Whether there are other gateways, as far as can be seen; one that is never told takes it that there are.
    PeersChanged {
        exist: bool,
    },
    /// Lives of engines that begin from here on are later ones than this. A new leader has not heard of all that there were
    /// before it, and others have.
    GenerationFloor {
        generation: Generation,
    },
    /// What the gateway that leads says of an engine; `None`: it has no process. States in between may be left out. To be
    /// told also of an engine known here that is not among those published.
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
    /// How the first request, or the adapter's one-token probe, after a start or wake went.
    Canary {
        engine: EngineId,
        generation: Generation,
        verdict: CanaryVerdict,
    },

    // Outcomes of commands
    /// The reservation stands; on one machine its accelerators are known at once.
    Placed {
        engine: EngineId,
        generation: Generation,
        accelerators: Vec<AcceleratorId>,
    },
    /// Somebody else reserved first.
    Conflict {
        engine: EngineId,
        generation: Generation,
    },
    /// The process or Pod exists; it will answer here.
    Started {
        engine: EngineId,
        generation: Generation,
        address: SocketAddr,
    },
    /// The engine has measured free memory and taken its own: others may start beside it.
    Profiled {
        engine: EngineId,
        generation: Generation,
    },
    /// Health answers, after a launch or a wake.
    Ready {
        engine: EngineId,
        generation: Generation,
    },
    /// The engine said that it sleeps.
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
    /// A start that cannot succeed, though the process may still be there.
    StartFailed {
        engine: EngineId,
        generation: Generation,
        cause: FailureCause,
    },
    /// The process or Pod is seen gone, by order or by itself.
    Gone {
        engine: EngineId,
        generation: Generation,
        cause: FailureCause,
    },

    // Observations
    /// What an engine itself shows of why it does not serve: told before `Gone` and `StartFailed` where it is known by then.
    Diagnostics {
        engine: EngineId,
        generation: Generation,
        diagnostics: EngineDiagnostics,
    },
    /// A health probe of an awake engine. `progressed`: its own token counters moved since the last one.
    Health {
        engine: EngineId,
        generation: Generation,
        ok: bool,
        progressed: bool,
    },
    /// A meter reading: bytes in use on the accelerator, and by which engine where that can be told.
    MeterRead {
        accelerator: AcceleratorId,
        used: Bytes,
        by_engine: Option<BTreeMap<EngineId, Bytes>>,
    },
    /// What was in use on one accelerator of this engine, where nobody else is: the most of them. Of an engine of a pool,
    /// whose accelerators the decisions do not know.
    UsageObserved {
        engine: EngineId,
        generation: Generation,
        used: Bytes,
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

    // People
    OperatorRequest {
        operation: OperationId,
        model: ModelName,
        action: OperatorAction,
    },
    /// No more waking; every waiter is refused, engines are stopped when `engines` says so.
    Shutdown {
        stop_engines: bool,
    },
}

/// What a gateway found of an engine when it started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedEngine {
    pub address: SocketAddr,
    pub accelerators: Vec<AcceleratorId>,
    /// Told to sleep at this level; `None`: awake, or still starting when `ready` is false.
    pub asleep: Option<SleepLevel>,
    /// It serves, or sleeps, for certain. One that was told to sleep, and of which nobody knows whether it does, is being asked.
    pub ready: bool,
    /// Which template it was started from.
    pub fingerprint: u64,
    /// When its last lease ended, as recorded by the gateway before.
    pub last_lease_end: Tick,
    pub started: Tick,
}

/// What one gateway has of one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayDemand {
    /// Requests that wait there.
    pub waiting: u32,
    /// Requests at an engine.
    pub in_flight: u32,
    /// When the last one ended, in wall time.
    pub last_request: Tick,
}

/// An engine, as the gateway that leads publishes it to the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishedEngine {
    pub state: PublishedEngineState,
    /// Where it answers, once that is known.
    pub address: Option<SocketAddr>,
    /// Which template it was started from.
    pub fingerprint: u64,
    pub accelerators: Vec<AcceleratorId>,
    /// When the state was entered, in wall time.
    pub since: Tick,
    /// Of one that is left alone after a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<PublishedFailure>,
}

/// Why an engine is left alone: what those who wait for it are told.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishedFailure {
    pub cause: FailureCause,
    /// Failures in a row.
    pub failures: u32,
    /// Those of them since it last proved that it serves.
    pub failures_since_serving: u32,
    /// When it is tried again, in wall time.
    pub until: Tick,
}

/// What others need to know of an engine's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum PublishedEngineState {
    Launching,
    Loading,
    Awake,
    Draining,
    FallingAsleep,
    Asleep(SleepLevel),
    Waking,
    Failing,
    Stopping,
    Backoff,
}

impl PublishedEngine {
    /// What the leader publishes of an engine; `None` of one without a process that never failed.
    #[must_use]
    pub fn of(engine: &Engine) -> Option<Self> {
        let state = match &engine.state {
            LifecycleState::Cold => return None,
            LifecycleState::Launching => PublishedEngineState::Launching,
            LifecycleState::Loading => PublishedEngineState::Loading,
            LifecycleState::Awake => PublishedEngineState::Awake,
            LifecycleState::Draining { .. } => PublishedEngineState::Draining,
            LifecycleState::FallingAsleep { .. } => PublishedEngineState::FallingAsleep,
            LifecycleState::Asleep { level } => PublishedEngineState::Asleep(*level),
            LifecycleState::Waking { .. } => PublishedEngineState::Waking,
            LifecycleState::Failing { .. } => PublishedEngineState::Failing,
            LifecycleState::Stopping { .. } => PublishedEngineState::Stopping,
            LifecycleState::Backoff { .. } => PublishedEngineState::Backoff,
        };
        Some(Self {
            state,
            address: engine.address,
            fingerprint: engine.fingerprint,
            accelerators: engine.accelerators.clone(),
            since: engine.since,
            failure: PublishedFailure::of(engine),
        })
    }
}

impl PublishedFailure {
    /// `None` of an engine that is not left alone.
    #[must_use]
    pub fn of(engine: &Engine) -> Option<Self> {
        let LifecycleState::Backoff { until, cause } = &engine.state else { return None };
        let (failures, fruitless) = (engine.failures, engine.failures_since_serving);
        Some(Self { cause: cause.clone(), failures, failures_since_serving: fruitless, until: *until })
    }
}

/// A canary's outcome. Any status below 500 passes; a client that leaves proves nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CanaryVerdict {
    Passed,
    Failed(FailureCause),
    Inconclusive,
}

/// What an operator may order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OperatorAction {
    Wake,
    Sleep { level: Option<SleepLevel> },
    Stop,
    Pin,
    Unpin,
}

/// Learned from earlier lives, given back at the start so that estimates need not be learned again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LearnedMeasurements {
    pub peak: Option<Bytes>,
    pub residue: Option<Bytes>,
    pub start: Option<Millis>,
    pub wake: Option<Millis>,
    pub sleep: Option<Millis>,
    /// Of a pool, the most that an engine was seen to use on one accelerator. Unlike by `peak` nothing is booked by it: what is
    /// booked of a pool is in a ledger that others read, and that says what was declared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed: Option<Bytes>,
}

/// In words, for golden scenarios and people reading a journal. The generation is left out: an engine has one at a
/// time.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Configured { configuration } => {
                let plural = |n: usize| if n == 1 { "" } else { "s" };
                let (models, gpus) = (configuration.models.len(), configuration.accelerators.len());
                write!(f, "configured: {models} model{}, {gpus} accelerator{}", plural(models), plural(gpus))
            }
            Self::MeasurementsRestored { model, .. } => write!(f, "what an earlier life learned of {model}"),
            Self::AdoptionDone => f.write_str("everything that ran is known"),
            Self::Arrived { waiter } => {
                let kind = if waiter.stream { "stream" } else { "request" };
                write!(f, "waiter {} arrives: a {kind} for {}", waiter.id.0, waiter.model)
            }
            Self::Left { waiter } => write!(f, "waiter {} leaves", waiter.0),
            Self::GateSampled { engine, leases, .. } => {
                write!(f, "{engine} has {leases} lease{}", if *leases == 1 { "" } else { "s" })
            }
            Self::EjectionChanged { engine, until: Some(_), .. } => {
                write!(f, "{engine} is left out: requests to it fail")
            }
            Self::EjectionChanged { engine, .. } => write!(f, "{engine} is not left out"),
            Self::StubGateClosed { engine, .. } => {
                write!(f, "{engine} is behind a closed gate, says its stub")
            }
            Self::StubGateOpened { engine, .. } => write!(f, "the stub of {engine} has opened its gate"),
            Self::Served { model, key, tokens } => write!(f, "{model} served {tokens} tokens to {key}"),
            Self::FairnessRestored { model, .. } => write!(f, "what keys were served by {model} before"),
            Self::StateRestored { state } => write!(f, "what was known before: {}", state.summary()),
            Self::RemoteDemand { gateway, demand: Some(demand) } => {
                let sum =
                    |of: fn(&GatewayDemand) -> u32| demand.values().map(|d| u64::from(of(d))).sum::<u64>();
                let (waiting, in_flight) = (sum(|d| d.waiting), sum(|d| d.in_flight));
                write!(f, "{gateway} has {waiting} waiting and {in_flight} in flight")
            }
            Self::RemoteDemand { gateway, demand: None } => write!(f, "{gateway} is gone"),
            Self::LeadershipChanged { leads: true } => f.write_str("this gateway leads"),
            Self::LeadershipChanged { .. } => f.write_str("another gateway leads"),
            Self::ApiServerChanged { answers: true } => f.write_str("the cluster's API server answers"),
            Self::ApiServerChanged { .. } => f.write_str("the cluster's API server does not answer"),
            Self::PeersChanged { exist: true } => f.write_str("there are other gateways"),
            Self::PeersChanged { .. } => f.write_str("there is no other gateway"),
            Self::GenerationFloor { generation } => write!(f, "lives are counted from {generation} on"),
            Self::Published { engine, published: Some(published), .. } => {
                write!(f, "{engine} is published as {:?}", published.state)
            }
            Self::Published { engine, .. } => write!(f, "{engine} is published as not running"),
            Self::Drained { engine, .. } => write!(f, "{engine} is drained"),
            Self::Canary { engine, verdict, .. } => write!(f, "the first answer of {engine}: {verdict}"),
            Self::Placed { engine, accelerators, .. } => {
                let names: Vec<_> = accelerators.iter().map(AcceleratorId::as_str).collect();
                write!(f, "{engine} is placed on {}", names.join(" and "))
            }
            Self::Conflict { engine, .. } => write!(f, "{engine} is not placed: somebody reserved first"),
            Self::Started { engine, .. } => write!(f, "{engine} runs"),
            Self::Profiled { engine, .. } => write!(f, "{engine} has measured its memory"),
            Self::Ready { engine, .. } => write!(f, "{engine} is ready"),
            Self::Slept { engine, level, .. } => write!(f, "{engine} sleeps at level {}", level.number()),
            Self::SleepFailed { engine, cause, .. } => write!(f, "{engine} does not fall asleep: {cause}"),
            Self::WakeFailed { engine, cause, .. } => write!(f, "{engine} does not wake: {cause}"),
            Self::StartFailed { engine, cause, .. } => write!(f, "{engine} does not start: {cause}"),
            Self::Gone { engine, cause, .. } => write!(f, "{engine} is gone: {cause}"),
            Self::Diagnostics { engine, diagnostics: symptoms, .. } => {
                write!(f, "{engine} does not serve{}", symptoms.describe())
            }
            Self::Health { engine, ok, progressed, .. } => {
                let health = if *ok { "healthy" } else { "not healthy" };
                let progress = if *progressed { ", makes progress" } else { "" };
                write!(f, "{engine} is {health}{progress}")
            }
            Self::MeterRead { accelerator, used, .. } => write!(f, "{accelerator} has {used} in use"),
            Self::UsageObserved { engine, used, .. } => write!(f, "{engine} uses {used} of an accelerator"),
            Self::AcceleratorLost { accelerator } => write!(f, "{accelerator} is lost"),
            Self::AcceleratorRecovered { accelerator } => write!(f, "{accelerator} is back"),
            Self::Adopted { engine, found, .. } => {
                let state = match found.asleep {
                    Some(level) => format!("asleep at level {}", level.number()),
                    None if found.ready => "awake".to_owned(),
                    None => "not ready".to_owned(),
                };
                write!(f, "{engine} is found running, {state}")
            }
            Self::OperatorRequest { operation, model, action: order } => {
                write!(f, "order {}: {order} {model}", operation.0)
            }
            Self::Shutdown { stop_engines: true } => f.write_str("shut down, and the engines with it"),
            Self::Shutdown { .. } => f.write_str("shut down; the engines stay"),
        }
    }
}

impl fmt::Display for CanaryVerdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed => f.write_str("passed"),
            Self::Failed(cause) => write!(f, "failed: {cause}"),
            Self::Inconclusive => f.write_str("inconclusive"),
        }
    }
}

impl fmt::Display for OperatorAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Wake => f.write_str("wake"),
            Self::Sleep { level: None } => f.write_str("sleep"),
            Self::Sleep { level: Some(level) } => write!(f, "sleep at level {}", level.number()),
            Self::Stop => f.write_str("stop"),
            Self::Pin => f.write_str("pin"),
            Self::Unpin => f.write_str("unpin"),
        }
    }
}
