//! State of one node. No decision spans two nodes.

use std::collections::BTreeMap;

use super::{
    command::{EngineStopReason, RequesterDeleteReason},
    event::{
        AcceleratorFacts, EngineRecord, MemorySizes, ObservedProvider, ObservedRequester, PairingNodeFacts,
        ProviderPhase,
    },
    ids::{LauncherBuild, NodeName, PairingEngineId, ProviderId, ProviderMode, RequesterId, Uid},
    settings::PairingSettings,
    vanished::VanishedEngine,
};
use crate::{
    model::{AcceleratorId, SleepLevel, SleepLevelPolicy},
    units::{Bytes, Generation, Millis, Tick},
};

#[derive(Clone, Debug)]
pub struct PairingNode {
    pub name: NodeName,
    pub facts: PairingNodeFacts,
    /// The Node object exists and has been observed.
    pub exists: bool,
    /// The kubelet has stopped reporting. `reporting_since` is when it last resumed.
    pub kubelet_silent: bool,
    pub reporting_since: Tick,
    pub accelerators: BTreeMap<AcceleratorId, PairingAccelerator>,
    pub requesters: BTreeMap<RequesterId, PairingRequester>,
    pub providers: BTreeMap<ProviderId, PairingProvider>,
    pub engines: BTreeMap<PairingEngineId, PairingEngine>,
    /// Engines of Pods whose objects vanished.
    pub vanished: Vec<VanishedEngine>,
}

#[derive(Clone, Debug)]
pub struct PairingAccelerator {
    pub facts: AcceleratorFacts,
    /// When an engine last fell asleep here.
    pub last_sleep: Option<Tick>,
    /// When an engine was last seen gone from here.
    pub last_engine_gone: Option<Tick>,
    /// The last reading of the meter, and its moment.
    pub last_reading: Option<(Bytes, Tick)>,
    /// Number of launchers of one build that failed in a row on this accelerator. `crashed_build` is that build, and
    /// `not_before` the earliest moment for its next launcher.
    pub crashes: u32,
    pub crashed_build: Option<LauncherBuild>,
    /// The last failed launcher was never ready; otherwise it had engines that did not stop.
    pub never_ready: bool,
    pub not_before: Tick,
    /// The meter found more than the known residues, and engines were deleted for that. Until the next valid reading
    /// the known residues are not enough to decide.
    pub needs_reading: bool,
}

#[derive(Clone, Debug)]
pub struct PairingRequester {
    pub observed: ObservedRequester,
    /// Sorted; empty until the stub reports them.
    pub accelerators: Vec<AcceleratorId>,
    /// What the requester lost, for which it must be deleted.
    pub delete_reason: Option<RequesterDeleteReason>,
    /// Why its deletion was ordered, if it was.
    pub delete_issued: Option<RequesterDeleteReason>,
    /// The stub container whose gate this leader has confirmed closed. The requester gets no engine before that.
    pub gated_stub: Option<Uid>,
    /// The stub has been released and may end.
    pub released: bool,
    /// Starts that failed in a row for this requester. `not_before` ends the pause after the last.
    pub failures: u32,
    /// Why the last start failed.
    pub last_failure: Option<EngineStopReason>,
    pub not_before: Tick,
    pub pending: Option<PendingCommand>,
    pub retry: RetryState,
}

#[derive(Clone, Debug)]
pub struct PairingProvider {
    /// `None`: ordered and not observed yet.
    pub uid: Option<Uid>,
    pub phase: ProviderPhase,
    pub deleting: bool,
    pub restarts: u32,
    /// Build of an observed launcher.
    pub build: Option<LauncherBuild>,
    /// Memory limit of the container, if observed and set.
    pub memory_limit: Option<Bytes>,
    pub since: Tick,
    /// Launchers only: when an engine in it first passed its canary.
    pub proven_since: Option<Tick>,
    /// The create command succeeded.
    pub created: bool,
    /// The create command was refused because another Pod has the name. `name_holder` is that Pod, once observed.
    pub name_taken: bool,
    pub name_holder: Option<ObservedProvider>,
    /// Launchers only: the commands for a direct provider are pending on its engine.
    pub pending: Option<PendingCommand>,
    pub retry: RetryState,
}

#[derive(Clone, Debug)]
pub struct PairingEngine {
    pub id: PairingEngineId,
    pub generation: Generation,
    pub provider: ProviderId,
    pub sizes: MemorySizes,
    pub level: SleepLevelPolicy,
    /// How long the engine may sleep before it is stopped.
    pub stop_after: Option<Millis>,
    pub state: PairingEngineState,
    /// When the state was entered.
    pub since: Tick,
    /// Memory reserved on each of its accelerators.
    pub reserved: Bytes,
    pub reserved_host: Bytes,
    pub binding: Option<Binding>,
    pub last_used: Tick,
    /// The engine answers; a canary may be sent.
    pub ready: bool,
    /// The stub container whose gate this controller opened to the engine.
    pub opened_stub: Option<Uid>,
    /// A step failed in a way that ends this generation.
    pub failure: Option<EngineStopReason>,
    /// The stop command was accepted.
    pub stop_accepted: bool,
    /// A start command that was given up can still arrive until then. The engine is not believed gone before.
    pub may_start_until: Tick,
    /// The engine was ordered to start more than once: a report of its death may be about the earlier process.
    pub relaunched: bool,
    pub pending: Option<PendingCommand>,
    pub retry: RetryState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    pub requester: RequesterId,
    /// The binding is written on the provider.
    pub written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairingEngineState {
    /// Observed after a restart, and not yet queried.
    Unknown,
    Creating,
    Starting,
    Awake,
    Draining {
        until: Tick,
        drained: bool,
    },
    FallingAsleep {
        level: SleepLevel,
    },
    Asleep {
        level: SleepLevel,
    },
    Waking,
    /// Ordered to stop. `asleep`: it stops from sleep and holds no more than its residue.
    Stopping {
        asleep: bool,
        reason: EngineStopReason,
    },
    /// Its process is seen gone; its record or Pod still exists.
    Gone,
}

/// Why an engine's weights do not fit into host RAM. `left`: what the other sleepers leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostMemoryShortage {
    /// The node's budget for sleepers has too little left.
    Node { budget: Bytes, left: Bytes },
    /// The memory limit of the engine's Pod has too little left.
    Pod { limit: Bytes, left: Bytes },
    /// The Pod was not observed yet, so its memory limit is unknown.
    UnobservedPod,
}

/// A command whose outcome is awaited, at most until `until`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingCommand {
    pub serial: u64,
    pub kind: PendingCommandKind,
    pub until: Tick,
    /// The stub container that the command addresses, where that matters.
    pub stub_container: Option<Uid>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PendingCommandKind {
    Create,
    Bind,
    Launch,
    SendCanary,
    OpenGate,
    CloseGate,
    Sleep,
    Wake,
    Unbind,
    Forget,
    Stop,
    Query,
    QueryAccelerators,
    Delete,
    SetFinalizer(bool),
    Release,
}

/// Consecutive failures of a retryable command, and the time of the next attempt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryState {
    pub failures: u32,
    pub at: Tick,
}

impl RetryState {
    pub(super) fn record_failure(&mut self, now: Tick) {
        self.failures += 1;
        // The first retry comes early: a container reported as running may not listen yet.
        self.at = now + if self.failures == 1 { FIRST_RETRY_DELAY } else { retry_delay(self.failures - 1) };
    }
}

impl PairingAccelerator {
    /// Counts a failed launcher and sets the pause before the next. The pause grows with each failure. A failure of
    /// another build, or of a launcher with an engine proven for `launcher_proven_after`, starts the count anew.
    pub(super) fn launcher_crashed(
        &mut self,
        build: Option<LauncherBuild>,
        proved: Option<Tick>,
        settings: &PairingSettings,
        now: Tick,
    ) {
        if self.crashed_build != build || proved.is_some_and(|at| at + settings.launcher_proven_after <= now)
        {
            self.crashes = 0;
        }
        self.crashes += 1;
        self.crashed_build = build;
        self.not_before = now + settings.launcher_backoff_for(self.crashes);
    }
}

/// Delay before the first retry.
const FIRST_RETRY_DELAY: Millis = Millis(20);

/// Retry delay: 100 ms, doubled with each failure, at most 30 s.
fn retry_delay(failures: u32) -> Millis {
    Millis((50 << failures.min(10)).min(30_000))
}

impl PairingEngineState {
    /// Whether the process is about to end or gone.
    #[must_use]
    pub const fn is_stopping_or_gone(self) -> bool {
        matches!(self, Self::Stopping { .. } | Self::Gone)
    }
}

impl PairingEngine {
    /// Creates the engine of a record. Reserves its full awake memory; in state `Unknown` also its host RAM.
    pub(super) fn from_record(
        record: &EngineRecord,
        provider: ProviderId,
        state: PairingEngineState,
        now: Tick,
    ) -> Self {
        let binding = record.requester.clone().map(|requester| Binding { requester, written: true });
        Self {
            id: record.engine.clone(),
            generation: record.generation,
            provider,
            sizes: record.sizes,
            level: record.level,
            stop_after: record.stop_after,
            state,
            since: now,
            reserved: record.sizes.awake,
            reserved_host: if state == PairingEngineState::Unknown { record.sizes.host } else { Bytes::ZERO },
            binding,
            last_used: record.last_used,
            ready: false,
            opened_stub: None,
            failure: None,
            stop_accepted: false,
            may_start_until: Tick(0),
            relaunched: false,
            pending: None,
            retry: RetryState::default(),
        }
    }

    #[must_use]
    pub fn uses(&self, accelerator: &AcceleratorId) -> bool {
        self.id.accelerators.contains(accelerator)
    }

    #[must_use]
    pub fn requester(&self) -> Option<&RequesterId> {
        self.binding.as_ref().map(|binding| &binding.requester)
    }

    /// Whether the engine may hold its full awake memory: it is, was or will be awake, or its state is unknown.
    #[must_use]
    pub fn may_hold_full_memory(&self) -> bool {
        match self.state {
            // A sleeper that is about to be woken has its full memory reserved.
            PairingEngineState::Asleep { .. } => self.reserved > self.residue(),
            PairingEngineState::Stopping { asleep, .. } => !asleep,
            PairingEngineState::Gone => false,
            _ => true,
        }
    }

    /// Whether the engine may be taking its memory for the first time. A launching engine measures the free memory, and
    /// is done when it answers.
    #[must_use]
    pub const fn is_launching(&self) -> bool {
        match self.state {
            PairingEngineState::Unknown | PairingEngineState::Creating => true,
            PairingEngineState::Starting => !self.ready,
            _ => false,
        }
    }

    /// Whether the engine is returning memory or taking it back.
    #[must_use]
    pub const fn is_moving_memory(&self) -> bool {
        match self.state {
            PairingEngineState::FallingAsleep { .. } => true,
            PairingEngineState::Waking => !self.ready,
            _ => false,
        }
    }

    /// Whether a command's outcome is awaited.
    #[must_use]
    pub fn is_busy(&self, now: Tick) -> bool {
        self.pending.as_ref().is_some_and(|call| call.until > now)
    }

    /// Whether the engine sleeps unbound with no command pending.
    #[must_use]
    pub fn is_evictable(&self) -> bool {
        matches!(self.state, PairingEngineState::Asleep { .. })
            && self.binding.is_none()
            && self.pending.is_none()
    }

    /// Whether the engine sleeps at level 2. A wake from there reads only the model's own weights again.
    #[must_use]
    pub fn is_at_level_2(&self) -> bool {
        self.state == PairingEngineState::Asleep { level: SleepLevel::Two }
    }

    /// When an unbound sleeper reaches its sleep limit `stop_after`.
    #[must_use]
    pub fn stops_at(&self) -> Option<Tick> {
        let rests = matches!(self.state, PairingEngineState::Asleep { .. }) && self.binding.is_none();
        self.stop_after.filter(|_| rests).map(|after| self.last_used + after)
    }

    /// The memory that it keeps on each accelerator while asleep.
    #[must_use]
    pub fn residue(&self) -> Bytes {
        self.sizes.asleep.min(self.sizes.awake)
    }

    /// The memory that this engine is about to release.
    #[must_use]
    pub fn pending_release(&self) -> Bytes {
        match self.state {
            PairingEngineState::Stopping { .. } => self.reserved,
            PairingEngineState::Draining { .. } | PairingEngineState::FallingAsleep { .. } => {
                self.reserved.saturating_sub(self.residue())
            }
            _ => Bytes::ZERO,
        }
    }

    pub(super) fn enter(&mut self, state: PairingEngineState, now: Tick) {
        self.state = state;
        self.since = now;
        self.retry = RetryState::default();
    }

    pub(super) fn record(&self, last_used: Tick) -> EngineRecord {
        EngineRecord {
            engine: self.id.clone(),
            generation: self.generation,
            sizes: self.sizes,
            level: self.level,
            stop_after: self.stop_after,
            requester: self.requester().cloned(),
            last_used,
        }
    }
}

impl PairingRequester {
    /// Records a failed start. The delay before the next start grows with each failure.
    pub(super) fn start_failed(&mut self, why: EngineStopReason, now: Tick) {
        self.failures += 1;
        self.last_failure = Some(why);
        self.not_before = now + retry_delay(self.failures);
    }

    /// Whether the requester stays, as far as known: neither ended, nor deleted or about to be.
    #[must_use]
    pub const fn stays(&self) -> bool {
        let goes = self.delete_issued.is_some() || self.delete_reason.is_some();
        self.observed.deleting_since.is_none() && !self.observed.terminated && !goes
    }

    /// Whether the gate of its present stub container is confirmed closed. Behind it no client can reach an engine.
    #[must_use]
    pub fn is_gated(&self) -> bool {
        self.gated_stub.is_some() && self.gated_stub == self.observed.stub_container
    }

    /// Whether its stub container runs and can be called.
    #[must_use]
    pub const fn is_stub_reachable(&self) -> bool {
        !self.observed.terminated && self.observed.stub_container.is_some()
    }
}

impl PairingNode {
    #[must_use]
    pub fn new(name: NodeName) -> Self {
        Self {
            name,
            facts: PairingNodeFacts::default(),
            exists: false,
            kubelet_silent: false,
            reporting_since: Tick(0),
            accelerators: BTreeMap::new(),
            requesters: BTreeMap::new(),
            providers: BTreeMap::new(),
            engines: BTreeMap::new(),
            vanished: Vec::new(),
        }
    }

    /// Whether nothing is known of the node any more.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let pods = self.requesters.is_empty() && self.providers.is_empty();
        !self.exists && pods && self.engines.is_empty() && self.vanished.is_empty()
    }

    pub fn engines_on<'a>(
        &'a self,
        accelerator: &'a AcceleratorId,
    ) -> impl Iterator<Item = &'a PairingEngine> {
        self.engines.values().filter(|engine| engine.uses(accelerator))
    }

    /// Whether a reading of this accelerator can change a decision: an engine or a vanished Pod may hold memory there,
    /// or a requester waits for it.
    #[must_use]
    pub fn wants_reading_of(&self, accelerator: &AcceleratorId) -> bool {
        let asks = |requester: &PairingRequester| requester.accelerators.contains(accelerator);
        !self.vanished.is_empty()
            || self.engines_on(accelerator).next().is_some()
            || self.requesters.values().any(asks)
    }

    /// The other engines that use any of its accelerators.
    pub fn engines_sharing<'a>(
        &'a self,
        engine: &'a PairingEngineId,
    ) -> impl Iterator<Item = &'a PairingEngine> {
        let shares =
            |other: &&PairingEngine| other.id.accelerators.iter().any(|a| engine.accelerators.contains(a));
        self.engines.values().filter(move |other| other.id != *engine).filter(shares)
    }

    pub fn engines_in<'a>(&'a self, provider: &'a ProviderId) -> impl Iterator<Item = &'a PairingEngine> {
        self.engines.values().filter(move |engine| engine.provider == *provider)
    }

    /// A bound engine in this launcher that is not stopping. The launcher must stay for it.
    #[must_use]
    pub fn bound_in<'a>(&'a self, launcher: &'a ProviderId) -> Option<&'a PairingEngine> {
        self.engines_in(launcher)
            .find(|engine| engine.binding.is_some() && !engine.state.is_stopping_or_gone())
    }

    /// Since when neither this launcher nor its accelerator has changed.
    #[must_use]
    pub fn idle_since(&self, launcher: &ProviderId) -> Option<Tick> {
        let gone =
            launcher.accelerators.iter().filter_map(|a| self.accelerators.get(a)?.last_engine_gone).max();
        Some(self.providers.get(launcher)?.since.max(gone.unwrap_or_default()))
    }

    /// The engine bound to this requester.
    #[must_use]
    pub fn engine_of(&self, requester: &RequesterId) -> Option<&PairingEngine> {
        self.engines.values().find(|engine| engine.requester() == Some(requester))
    }

    /// The total memory reserved on an accelerator.
    #[must_use]
    pub fn reserved(&self, accelerator: &AcceleratorId) -> Bytes {
        self.engines_on(accelerator).map(|engine| engine.reserved).sum::<Bytes>()
            + self.vanished_on(accelerator)
    }

    /// The memory reserved on an accelerator for vanished Pods.
    #[must_use]
    pub fn vanished_on(&self, accelerator: &AcceleratorId) -> Bytes {
        self.vanished.iter().filter_map(|remains| remains.reserved.get(accelerator)).copied().sum()
    }

    #[must_use]
    pub fn reserved_host(&self) -> Bytes {
        self.engines.values().map(|engine| engine.reserved_host).sum::<Bytes>() + self.vanished_host()
    }

    #[must_use]
    pub fn vanished_host(&self) -> Bytes {
        self.vanished.iter().map(|remains| remains.reserved_host).sum()
    }

    /// Why this engine's weights do not fit into host RAM; `None` if they do. They must fit into the node's budget for
    /// sleepers, and into the memory limit of the engine's Pod, which all engines of the Pod share. The kernel kills an
    /// engine beyond the limit, so a Pod not observed yet has no room.
    #[must_use]
    pub fn host_memory_shortage(&self, engine: &PairingEngine) -> Option<HostMemoryShortage> {
        let wanted = engine.sizes.host;
        let budget = self.facts.host_sleep_memory;
        let others = self.reserved_host().saturating_sub(engine.reserved_host);
        if others + wanted > budget {
            return Some(HostMemoryShortage::Node { budget, left: budget.saturating_sub(others) });
        }
        let provider = self.providers.get(&engine.provider).filter(|provider| provider.uid.is_some());
        let Some(provider) = provider else { return Some(HostMemoryShortage::UnobservedPod) };
        let limit = provider.memory_limit?;
        let others = self.engines_in(&engine.provider).filter(|other| other.id != engine.id);
        let others = others.map(|other| other.reserved_host).sum::<Bytes>();
        (others + wanted > limit)
            .then(|| HostMemoryShortage::Pod { limit, left: limit.saturating_sub(others) })
    }

    /// The requester of this engine, unless it is gone or about to go.
    #[must_use]
    pub fn staying_requester(&self, engine: &PairingEngine) -> Option<&PairingRequester> {
        self.requesters.get(engine.requester()?).filter(|requester| requester.stays())
    }

    /// The id of the engine that this requester requests, whether or not that engine exists.
    #[must_use]
    pub fn requested_engine_id(&self, requester: &PairingRequester) -> PairingEngineId {
        PairingEngineId {
            mode: requester.observed.requested.mode,
            accelerators: requester.accelerators.as_slice().into(),
            fingerprint: requester.observed.requested.fingerprint,
        }
    }

    /// The provider that this engine must run in.
    #[must_use]
    pub fn provider_for(&self, engine: &PairingEngineId) -> ProviderId {
        if engine.mode != ProviderMode::Launcher {
            return ProviderId::direct(engine);
        }
        let index = |a: &AcceleratorId| self.accelerators.get(a).map_or(u32::MAX, |known| known.facts.index);
        let lowest = engine.accelerators.iter().min_by_key(|a| (index(a), (*a).clone()));
        lowest.map_or_else(|| ProviderId::direct(engine), |lowest| ProviderId::launcher(lowest.clone()))
    }

    /// The oldest requester that requests an engine in this launcher and has none.
    #[must_use]
    pub fn first_waiting_requester(&self, launcher: &ProviderId) -> Option<&RequesterId> {
        let asks = |(own, requester): &(&RequesterId, &PairingRequester)| {
            requester.stays()
                && requester.observed.requested.mode == ProviderMode::Launcher
                && self.provider_for(&self.requested_engine_id(requester)) == *launcher
                && self.engine_of(own).is_none()
        };
        let askers = self.requesters.iter().filter(asks);
        askers.min_by_key(|(own, requester)| (requester.observed.created, *own)).map(|(own, _)| own)
    }
}

impl std::fmt::Display for PairingEngineState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Unknown => "not known yet",
            Self::Creating => "being created",
            Self::Starting => "starting",
            Self::Awake => "awake",
            Self::Draining { .. } => "draining",
            Self::FallingAsleep { .. } => "falling asleep",
            Self::Asleep { .. } => "asleep",
            Self::Waking => "waking",
            Self::Stopping { .. } => "being stopped",
            Self::Gone => "gone",
        })
    }
}
