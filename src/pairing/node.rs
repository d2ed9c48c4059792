//! What is known of one node. Nothing is decided over two nodes at once.

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
    /// The Node object has been seen and is there.
    pub exists: bool,
    /// Its kubelet has stopped reporting; it was heard of again at `reporting_since`.
    pub kubelet_silent: bool,
    pub reporting_since: Tick,
    pub accelerators: BTreeMap<AcceleratorId, PairingAccelerator>,
    pub requesters: BTreeMap<RequesterId, PairingRequester>,
    pub providers: BTreeMap<ProviderId, PairingProvider>,
    pub engines: BTreeMap<PairingEngineId, PairingEngine>,
    /// Of Pods whose objects vanished.
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
    /// Launchers of this accelerator and of one build that failed in a row, which build that is, and until when none of it is made
    /// after the last.
    pub crashes: u32,
    pub crashed_build: Option<LauncherBuild>,
    /// The last of them was never ready; else it had engines that did not end.
    pub never_ready: bool,
    pub not_before: Tick,
    /// The meter found more than is known of: until it has been read again after something was deleted for that, what is known
    /// is not enough to go by.
    pub needs_reading: bool,
}

#[derive(Clone, Debug)]
pub struct PairingRequester {
    pub observed: ObservedRequester,
    /// Sorted; empty until its stub said which.
    pub accelerators: Vec<AcceleratorId>,
    /// What it lost, for which it is to be deleted.
    pub delete_reason: Option<RequesterDeleteReason>,
    /// Its deletion has been ordered.
    pub delete_issued: Option<RequesterDeleteReason>,
    /// The container of its stub whose gate is closed, as this leader has made sure: it has no engine before that.
    pub gated_stub: Option<Uid>,
    /// Its stub need not hold on.
    pub released: bool,
    /// Starts that failed for it in a row, and the pause after the last one.
    pub failures: u32,
    /// How the last of them did.
    pub last_failure: Option<EngineStopReason>,
    pub not_before: Tick,
    pub pending: Option<PendingCommand>,
    pub retry: RetryState,
}

#[derive(Clone, Debug)]
pub struct PairingProvider {
    /// `None`: ordered and not seen yet.
    pub uid: Option<Uid>,
    pub phase: ProviderPhase,
    pub deleting: bool,
    pub restarts: u32,
    /// Of a launcher that was seen.
    pub build: Option<LauncherBuild>,
    /// Its memory limit, if it has been seen and has one.
    pub memory_limit: Option<Bytes>,
    pub since: Tick,
    /// Of a launcher: since when an engine in it has proved that it works.
    pub proven_since: Option<Tick>,
    /// The order to make it was carried out.
    pub created: bool,
    /// The order was refused, since another Pod has the name; and that Pod, once it is seen.
    pub name_taken: bool,
    pub name_holder: Option<ObservedProvider>,
    /// Of a launcher; the commands for a direct provider are its engine's.
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
    /// Asleep for so long, it is ended.
    pub stop_after: Option<Millis>,
    pub state: PairingEngineState,
    /// When the state was entered.
    pub since: Tick,
    /// What is reserved for it on each of its accelerators.
    pub reserved: Bytes,
    pub reserved_host: Bytes,
    pub binding: Option<Binding>,
    pub last_used: Tick,
    /// It answers; a canary may be sent.
    pub ready: bool,
    /// Its requester's stub was told of it, by this controller, and in the container that now runs.
    pub opened_stub: Option<Uid>,
    /// The last step failed in a way that ends this life.
    pub failure: Option<EngineStopReason>,
    /// The order to end it was taken.
    pub stop_accepted: bool,
    /// An order to start it that was given up can still arrive until then: it is not believed gone before.
    pub may_start_until: Tick,
    /// It was ordered to start more than once: that a process of it died may be said of the one before.
    pub relaunched: bool,
    pub pending: Option<PendingCommand>,
    pub retry: RetryState,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    pub requester: RequesterId,
    /// It is written on the provider.
    pub written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PairingEngineState {
    /// Seen after a restart, and not yet asked.
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
    /// To be ended. `asleep`: it is a sleeper, and holds no more than its residue.
    Stopping {
        asleep: bool,
        reason: EngineStopReason,
    },
    /// Its process is seen gone; its record or Pod is still there.
    Gone,
}

/// A command whose outcome is awaited, at most until `until`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingCommand {
    pub serial: u64,
    pub kind: PendingCommandKind,
    pub until: Tick,
    /// The container of the stub that is spoken to, where that matters.
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

/// Failures in a row of what can be tried again, and when that is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RetryState {
    pub failures: u32,
    pub at: Tick,
}

impl RetryState {
    pub(super) fn record_failure(&mut self, now: Tick) {
        self.failures += 1;
        // The first time soon: a container that is said to run may not listen yet.
        self.at = now + if self.failures == 1 { FIRST_RETRY_DELAY } else { retry_delay(self.failures - 1) };
    }
}

impl PairingAccelerator {
    /// A launcher there is of no use, and another one is made later each time; soon again after one in which an engine lived for
    /// long enough.
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

/// When what failed once is tried again.
const FIRST_RETRY_DELAY: Millis = Millis(20);

/// 100 ms, then twice as long each time, half a minute at most.
fn retry_delay(failures: u32) -> Millis {
    Millis((50 << failures.min(10)).min(30_000))
}

impl PairingEngineState {
    /// Its process is on its way out, or gone.
    #[must_use]
    pub const fn is_stopping_or_gone(self) -> bool {
        matches!(self, Self::Stopping { .. } | Self::Gone)
    }
}

impl PairingEngine {
    /// An engine whose state is not known holds all that it may hold.
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

    /// It may hold all that it holds awake: it is awake, was, will be, or nobody knows.
    #[must_use]
    pub fn may_hold_full_memory(&self) -> bool {
        match self.state {
            // A sleeper that is about to be woken has all of it reserved.
            PairingEngineState::Asleep { .. } => self.reserved > self.residue(),
            PairingEngineState::Stopping { asleep, .. } => !asleep,
            PairingEngineState::Gone => false,
            _ => true,
        }
    }

    /// It takes its memory for the first time, and measures what is there for it; or may be doing so. It is over with that when it
    /// answers.
    #[must_use]
    pub const fn is_launching(&self) -> bool {
        match self.state {
            PairingEngineState::Unknown | PairingEngineState::Creating => true,
            PairingEngineState::Starting => !self.ready,
            _ => false,
        }
    }

    /// It gives memory back, or takes it again.
    #[must_use]
    pub const fn is_moving_memory(&self) -> bool {
        match self.state {
            PairingEngineState::FallingAsleep { .. } => true,
            PairingEngineState::Waking => !self.ready,
            _ => false,
        }
    }

    /// A call's outcome is awaited.
    #[must_use]
    pub fn is_busy(&self, now: Tick) -> bool {
        self.pending.as_ref().is_some_and(|call| call.until > now)
    }

    /// It sleeps, for nobody, and nothing is under way about it.
    #[must_use]
    pub fn is_evictable(&self) -> bool {
        matches!(self.state, PairingEngineState::Asleep { .. })
            && self.binding.is_none()
            && self.pending.is_none()
    }

    /// A wake from there reads only the model's own weights again.
    #[must_use]
    pub fn is_at_level_2(&self) -> bool {
        self.state == PairingEngineState::Asleep { level: SleepLevel::Two }
    }

    /// When it will have slept for as long as it may, without anybody it is for.
    #[must_use]
    pub fn stops_at(&self) -> Option<Tick> {
        let rests = matches!(self.state, PairingEngineState::Asleep { .. }) && self.binding.is_none();
        self.stop_after.filter(|_| rests).map(|after| self.last_used + after)
    }

    /// What it keeps once it sleeps.
    #[must_use]
    pub fn residue(&self) -> Bytes {
        self.sizes.asleep.min(self.sizes.awake)
    }

    /// What becomes free of it by itself.
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
    /// A start failed for it; the next comes later each time.
    pub(super) fn start_failed(&mut self, why: EngineStopReason, now: Tick) {
        self.failures += 1;
        self.last_failure = Some(why);
        self.not_before = now + retry_delay(self.failures);
    }

    /// It is there for good, as far as anybody knows.
    #[must_use]
    pub const fn stays(&self) -> bool {
        let goes = self.delete_issued.is_some() || self.delete_reason.is_some();
        self.observed.deleting_since.is_none() && !self.observed.terminated && !goes
    }

    /// Behind the gate of its stub nobody can reach an engine that it is given.
    #[must_use]
    pub fn is_gated(&self) -> bool {
        self.gated_stub.is_some() && self.gated_stub == self.observed.stub_container
    }

    /// Its stub can be spoken to.
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

    /// Nothing is left to be known of it.
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

    /// Whether a reading of this accelerator can change a decision: an engine or a vanished Pod may hold memory there, or a requester
    /// waits for it.
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

    /// An engine in this launcher that somebody is bound to: the launcher stays for that.
    #[must_use]
    pub fn bound_in<'a>(&'a self, launcher: &'a ProviderId) -> Option<&'a PairingEngine> {
        self.engines_in(launcher)
            .find(|engine| engine.binding.is_some() && !engine.state.is_stopping_or_gone())
    }

    /// Nothing has happened in this launcher, or on its accelerator, since then.
    #[must_use]
    pub fn idle_since(&self, launcher: &ProviderId) -> Option<Tick> {
        let gone =
            launcher.accelerators.iter().filter_map(|a| self.accelerators.get(a)?.last_engine_gone).max();
        Some(self.providers.get(launcher)?.since.max(gone.unwrap_or_default()))
    }

    /// The engine that this requester has.
    #[must_use]
    pub fn engine_of(&self, requester: &RequesterId) -> Option<&PairingEngine> {
        self.engines.values().find(|engine| engine.requester() == Some(requester))
    }

    /// All that is reserved of an accelerator.
    #[must_use]
    pub fn reserved(&self, accelerator: &AcceleratorId) -> Bytes {
        self.engines_on(accelerator).map(|engine| engine.reserved).sum::<Bytes>()
            + self.vanished_on(accelerator)
    }

    /// What is reserved of it for what may be left of Pods that vanished.
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

    /// Whether this engine's weights fit into host RAM: into the node's budget for sleepers, and into the memory limit of its Pod,
    /// which all engines of the Pod share. The kernel kills an engine beyond the limit, so a Pod not seen yet has no room.
    #[must_use]
    pub(super) fn has_host_memory_for(&self, engine: &PairingEngine) -> bool {
        let wanted = engine.sizes.host;
        let provider = self.providers.get(&engine.provider).filter(|provider| provider.uid.is_some());
        let within = |limit| {
            let others = self.engines_in(&engine.provider).filter(|other| other.id != engine.id);
            others.map(|other| other.reserved_host).sum::<Bytes>() + wanted <= limit
        };
        self.reserved_host().saturating_sub(engine.reserved_host) + wanted <= self.facts.host_sleep_memory
            && provider.is_some_and(|provider| provider.memory_limit.is_none_or(within))
    }

    /// Its requester, unless that is gone or on its way out.
    #[must_use]
    pub fn staying_requester(&self, engine: &PairingEngine) -> Option<&PairingRequester> {
        self.requesters.get(engine.requester()?).filter(|requester| requester.stays())
    }

    /// The engine that this requester asks for, whether there is one or not.
    #[must_use]
    pub fn requested_engine_id(&self, requester: &PairingRequester) -> PairingEngineId {
        PairingEngineId {
            mode: requester.observed.requested.mode,
            accelerators: requester.accelerators.as_slice().into(),
            fingerprint: requester.observed.requested.fingerprint,
        }
    }

    /// Where this engine is to run.
    #[must_use]
    pub fn provider_for(&self, engine: &PairingEngineId) -> ProviderId {
        if engine.mode != ProviderMode::Launcher {
            return ProviderId::direct(engine);
        }
        let index = |a: &AcceleratorId| self.accelerators.get(a).map_or(u32::MAX, |known| known.facts.index);
        let lowest = engine.accelerators.iter().min_by_key(|a| (index(a), (*a).clone()));
        lowest.map_or_else(|| ProviderId::direct(engine), |lowest| ProviderId::launcher(lowest.clone()))
    }

    /// Who came first of those that ask for an engine in this launcher and have none.
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
            Self::Stopping { .. } => "being ended",
            Self::Gone => "gone",
        })
    }
}
