//! Input of the decisions: every observation and every outcome of a command.
//!
//! All of them pass through one channel and into the journal, so a journal is the whole input of a
//! [`crate::fleet::Fleet`].

use std::{collections::BTreeMap, fmt, net::SocketAddr};

use serde::{Deserialize, Serialize};

pub use crate::fleet::{dispatch::fairness::FairnessCounters, plan::Planner};
use crate::{
    engine::{
        Engine,
        last_outcome::{EngineDiagnostics, FailureRecord},
        state::LifecycleState,
        turn_clients::TurnClients,
    },
    fault::FailureCause,
    model::{AcceleratorId, EngineId, FleetConfig, ModelName, SleepLevel},
    units::{Bytes, Generation, Millis, Tick},
};

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

/// An observation or an outcome. The fleet ignores one whose `generation` is not the engine's current one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "event")]
pub enum Event {
    /// The configuration was loaded or reloaded. Models and accelerators that it lacks are on their way out.
    Configured {
        configuration: Box<FleetConfig>,
    },
    /// Measurements of a model from an earlier run of the gateway.
    MeasurementsRestored {
        model: ModelName,
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
    /// Only for an engine of a pool, whose accelerators the decisions do not know.
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

    // Operators
    OperatorRequest {
        operation: OperationId,
        model: ModelName,
        action: OperatorAction,
    },
    /// Shutdown: the fleet wakes nothing, refuses every waiter, and stops the engines if `stop_engines` is set.
    Shutdown {
        stop_engines: bool,
    },
}

/// An engine as a gateway found it when the gateway started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AdoptedEngine {
    pub address: SocketAddr,
    pub accelerators: Vec<AcceleratorId>,
    /// The engine was ordered to sleep at this level; `None`: awake, or still starting if `ready` is false.
    pub asleep: Option<SleepLevel>,
    /// The engine is known to serve or to sleep. False while the gateway still asks an engine that was ordered to
    /// sleep.
    pub ready: bool,
    /// Fingerprint of the template that the engine was started from.
    pub fingerprint: u64,
    /// When the last lease ended, as the previous gateway recorded it.
    pub last_lease_end: Tick,
    pub started: Tick,
}

/// One gateway's demand for one model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GatewayDemand {
    /// Requests that wait at that gateway.
    pub waiting: u32,
    /// Requests at an engine.
    pub in_flight: u32,
    /// When the last request ended, in wall time.
    pub last_request: Tick,
}

/// An engine as the leader publishes it to the other gateways.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishedEngine {
    pub state: PublishedEngineState,
    /// The engine's address, once known.
    pub address: Option<SocketAddr>,
    /// Fingerprint of the template that the engine was started from.
    pub fingerprint: u64,
    pub accelerators: Vec<AcceleratorId>,
    /// When the state was entered, in wall time.
    pub since: Tick,
    /// Present while the engine is in back-off after a failure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<PublishedFailure>,
}

/// Why an engine is in back-off, as waiters learn it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PublishedFailure {
    pub cause: FailureCause,
    /// Failures in a row.
    pub failures: u32,
    /// Failures in a row since the engine last proved that it serves.
    pub failures_since_serving: u32,
    /// End of the back-off, in wall time.
    pub until: Tick,
}

/// An engine's state as other gateways need it.
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
    /// Returns what the leader publishes of an engine; `None` if it is [`LifecycleState::Cold`].
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
    /// Returns `None` unless the engine is in back-off.
    #[must_use]
    pub fn of(engine: &Engine) -> Option<Self> {
        let LifecycleState::Backoff { until, cause } = &engine.state else { return None };
        let (failures, fruitless) = (engine.failures, engine.failures_since_serving);
        Some(Self { cause: cause.clone(), failures, failures_since_serving: fruitless, until: *until })
    }
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

/// Measurements of a model, restored at start so that estimates need not be learned again.
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
}

/// Text for golden scenarios and for people who read a journal. The generation is left out: an engine has one at a
/// time.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Configured { configuration } => {
                let plural = |n: usize| if n == 1 { "" } else { "s" };
                let (models, gpus) = (configuration.models.len(), configuration.accelerators.len());
                write!(f, "configured: {models} model{}, {gpus} accelerator{}", plural(models), plural(gpus))
            }
            Self::MeasurementsRestored { model, .. } => write!(f, "measurements of {model} restored"),
            Self::FailureRestored { engine, at, failure, .. } => {
                write!(f, "failure of {engine} restored: {}", failure.describe(*at))
            }
            Self::AdoptionDone => f.write_str("adoption of running engines is complete"),
            Self::Arrived { waiter } => {
                let kind = if waiter.stream { "stream" } else { "request" };
                write!(f, "waiter {} arrives: a {kind} for {}", waiter.id.0, waiter.model)
            }
            Self::Left { waiter } => write!(f, "waiter {} leaves", waiter.0),
            Self::GateSampled { engine, leases, .. } => {
                write!(f, "{engine} has {leases} lease{}", if *leases == 1 { "" } else { "s" })
            }
            Self::EjectionChanged { engine, until: Some(_), .. } => {
                write!(f, "{engine} is ejected: its requests fail")
            }
            Self::EjectionChanged { engine, .. } => write!(f, "{engine} is no longer ejected"),
            Self::StubGateClosed { engine, .. } => {
                write!(f, "the stub of {engine} reports a closed gate")
            }
            Self::StubGateOpened { engine, .. } => write!(f, "the stub of {engine} opened its gate"),
            Self::Served { model, key, tokens } => write!(f, "{model} served {tokens} tokens to {key}"),
            Self::FairnessRestored { model, .. } => write!(f, "fairness counters of {model} restored"),
            Self::StateRestored { state } => write!(f, "state restored: {}", state.summary()),
            Self::RemoteDemand { gateway, demand: Some(demand) } => {
                let sum =
                    |of: fn(&GatewayDemand) -> u32| demand.values().map(|d| u64::from(of(d))).sum::<u64>();
                let (waiting, in_flight) = (sum(|d| d.waiting), sum(|d| d.in_flight));
                write!(f, "{gateway} reports {waiting} waiting and {in_flight} in-flight requests")
            }
            Self::RemoteDemand { gateway, demand: None } => write!(f, "{gateway} is gone"),
            Self::LeadershipChanged { leads: true } => f.write_str("this gateway leads"),
            Self::LeadershipChanged { .. } => f.write_str("another gateway leads"),
            Self::ApiServerChanged { answers: true } => f.write_str("the cluster's API server answers"),
            Self::ApiServerChanged { .. } => f.write_str("the cluster's API server does not answer"),
            Self::PeersChanged { exist: true } => f.write_str("other gateways exist"),
            Self::PeersChanged { .. } => f.write_str("no other gateway exists"),
            Self::GenerationFloor { generation } => {
                write!(f, "new engine generations start above {generation}")
            }
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
            Self::Conflict { engine, .. } => {
                write!(f, "{engine} is not placed: another reservation came first")
            }
            Self::Started { engine, .. } => write!(f, "{engine} runs"),
            Self::Profiled { engine, .. } => write!(f, "{engine} has measured its memory"),
            Self::Ready { engine, .. } => write!(f, "{engine} is ready"),
            Self::Slept { engine, level, .. } => write!(f, "{engine} sleeps at level {}", level.number()),
            Self::SleepFailed { engine, cause, .. } => write!(f, "{engine} failed to fall asleep: {cause}"),
            Self::WakeFailed { engine, cause, .. } => write!(f, "{engine} failed to wake: {cause}"),
            Self::StartFailed { engine, cause, .. } => write!(f, "{engine} failed to start: {cause}"),
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
            Self::AcceleratorRecovered { accelerator } => write!(f, "{accelerator} recovered"),
            Self::Adopted { engine, found, .. } => {
                let state = match found.asleep {
                    Some(level) => format!("asleep at level {}", level.number()),
                    None if found.ready => "awake".to_owned(),
                    None => "not ready".to_owned(),
                };
                write!(f, "{engine} was found running, {state}")
            }
            Self::OperatorRequest { operation, model, action: order } => {
                write!(f, "order {}: {order} {model}", operation.0)
            }
            Self::Shutdown { stop_engines: true } => f.write_str("shutdown: the engines stop"),
            Self::Shutdown { .. } => f.write_str("shutdown: the engines keep running"),
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
