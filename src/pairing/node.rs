//! What is known of one node. Nothing is decided over two nodes at once.

use std::collections::BTreeMap;

use super::{
    command::{Farewell, Why},
    event::{AcceleratorFacts, NodeFacts, Record, SeenProvider, SeenRequester, Sizes, Stage},
    ids::{Build, EngineId, Mode, NodeName, ProviderId, RequesterId, Uid},
    remains::Remains,
    settings::Settings,
};
use crate::{
    model::{AcceleratorId, Level, LevelPolicy},
    units::{Bytes, Generation, Millis, Tick},
};

#[derive(Clone, Debug)]
pub struct Node {
    pub name: NodeName,
    pub facts: NodeFacts,
    /// The Node object has been seen and is there.
    pub exists: bool,
    /// Its kubelet has stopped reporting; it was heard of again at `heard`.
    pub silent: bool,
    pub heard: Tick,
    pub accelerators: BTreeMap<AcceleratorId, Accelerator>,
    pub requesters: BTreeMap<RequesterId, Requester>,
    pub providers: BTreeMap<ProviderId, Provider>,
    pub engines: BTreeMap<EngineId, Engine>,
    /// Of Pods whose objects vanished.
    pub remains: Vec<Remains>,
}

#[derive(Clone, Debug)]
pub struct Accelerator {
    pub facts: AcceleratorFacts,
    /// When an engine last fell asleep here.
    pub last_sleep: Option<Tick>,
    /// When an engine was last seen gone from here.
    pub last_gone: Option<Tick>,
    /// The last reading of the meter, and its moment.
    pub observed: Option<(Bytes, Tick)>,
    /// Launchers of this accelerator and of one build that failed in a row, which build that is, and until when none of it is made
    /// after the last.
    pub crashes: u32,
    pub crashed: Option<Build>,
    /// The last of them was never ready; else it had engines that did not end.
    pub unready: bool,
    pub not_before: Tick,
    /// The meter found more than is known of: until it has been read again after something was deleted for that, what is known
    /// is not enough to go by.
    pub doubted: bool,
}

#[derive(Clone, Debug)]
pub struct Requester {
    pub seen: SeenRequester,
    /// Sorted; empty until its stub said which.
    pub accelerators: Vec<AcceleratorId>,
    /// What it lost, for which it is to be deleted.
    pub doomed: Option<Farewell>,
    /// Its deletion has been ordered.
    pub deleted: Option<Farewell>,
    /// The container of its stub whose gate is closed, as this leader has made sure: it has no engine before that.
    pub gated: Option<Uid>,
    /// Its stub need not hold on.
    pub released: bool,
    /// Starts that failed for it in a row, and the pause after the last one.
    pub failures: u32,
    /// How the last of them did.
    pub failed: Option<Why>,
    pub not_before: Tick,
    pub call: Option<Call>,
    pub retry: Retry,
}

#[derive(Clone, Debug)]
pub struct Provider {
    /// `None`: ordered and not seen yet.
    pub uid: Option<Uid>,
    pub stage: Stage,
    pub deleting: bool,
    pub restarts: u32,
    /// Of a launcher that was seen.
    pub build: Option<Build>,
    /// Its memory limit, if it has been seen and has one.
    pub host: Option<Bytes>,
    pub since: Tick,
    /// Of a launcher: since when an engine in it has proved that it works.
    pub proved: Option<Tick>,
    /// The order to make it was carried out.
    pub made: bool,
    /// The order was refused, since another Pod has the name; and that Pod, once it is seen.
    pub taken: bool,
    pub elder: Option<SeenProvider>,
    /// Of a launcher; the commands for a direct provider are its engine's.
    pub call: Option<Call>,
    pub retry: Retry,
}

#[derive(Clone, Debug)]
pub struct Engine {
    pub id: EngineId,
    pub generation: Generation,
    pub provider: ProviderId,
    pub sizes: Sizes,
    pub level: LevelPolicy,
    /// Asleep for so long, it is ended.
    pub stop_after: Option<Millis>,
    pub state: State,
    /// When the state was entered.
    pub since: Tick,
    /// What is reserved for it on each of its accelerators.
    pub held: Bytes,
    pub held_host: Bytes,
    pub binding: Option<Binding>,
    pub last_used: Tick,
    /// It answers; a canary may be sent.
    pub answers: bool,
    /// Its requester's stub was told of it, by this controller, and in the container that now runs.
    pub opened: Option<Uid>,
    /// The last step failed in a way that ends this life.
    pub failed: Option<Why>,
    /// The order to end it was taken.
    pub ended: bool,
    /// An order to start it that was given up can still arrive until then: it is not believed gone before.
    pub may_start_until: Tick,
    /// It was ordered to start more than once: that a process of it died may be said of the one before.
    pub relaunched: bool,
    pub call: Option<Call>,
    pub retry: Retry,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    pub requester: RequesterId,
    /// It is written on the provider.
    pub written: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
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
        level: Level,
    },
    Asleep {
        level: Level,
    },
    Waking,
    /// To be ended. `asleep`: it is a sleeper, and holds no more than its residue.
    Ending {
        asleep: bool,
        why: Why,
    },
    /// Its process is seen gone; its record or Pod is still there.
    Gone,
}

/// A command whose outcome is awaited, at most until `until`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    pub serial: u64,
    pub kind: Kind,
    pub until: Tick,
    /// The container of the stub that is spoken to, where that matters.
    pub stub: Option<Uid>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Create,
    Bind,
    Launch,
    Prove,
    Open,
    Gate,
    Sleep,
    Wake,
    Unbind,
    Forget,
    End,
    Query,
    Accelerators,
    Delete,
    Finalize(bool),
    Release,
}

/// Failures in a row of what can be tried again, and when that is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retry {
    pub failures: u32,
    pub at: Tick,
}

impl Retry {
    pub(super) fn failed(&mut self, now: Tick) {
        self.failures += 1;
        // The first time soon: a container that is said to run may not listen yet.
        self.at = now + if self.failures == 1 { SOON } else { pause(self.failures - 1) };
    }
}

impl Accelerator {
    /// A launcher there is of no use, and another one is made later each time; soon again after one in which an engine lived for
    /// long enough.
    pub(super) fn launcher_crashed(
        &mut self,
        build: Option<Build>,
        proved: Option<Tick>,
        settings: &Settings,
        now: Tick,
    ) {
        if self.crashed != build || proved.is_some_and(|at| at + settings.lived <= now) {
            self.crashes = 0;
        }
        self.crashes += 1;
        self.crashed = build;
        self.not_before = now + settings.relaunch_after(self.crashes);
    }
}

/// When what failed once is tried again.
const SOON: Millis = Millis(20);

/// 100 ms, then twice as long each time, half a minute at most.
fn pause(failures: u32) -> Millis {
    Millis((50 << failures.min(10)).min(30_000))
}

impl State {
    /// Its process is on its way out, or gone.
    #[must_use]
    pub const fn is_over(self) -> bool {
        matches!(self, Self::Ending { .. } | Self::Gone)
    }
}

impl Engine {
    /// An engine whose state is not known holds all that it may hold.
    pub(super) fn of(record: &Record, provider: ProviderId, state: State, now: Tick) -> Self {
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
            held: record.sizes.awake,
            held_host: if state == State::Unknown { record.sizes.host } else { Bytes::ZERO },
            binding,
            last_used: record.last_used,
            answers: false,
            opened: None,
            failed: None,
            ended: false,
            may_start_until: Tick(0),
            relaunched: false,
            call: None,
            retry: Retry::default(),
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
    pub fn is_big(&self) -> bool {
        match self.state {
            // A sleeper that is about to be woken has all of it reserved.
            State::Asleep { .. } => self.held > self.residue(),
            State::Ending { asleep, .. } => !asleep,
            State::Gone => false,
            _ => true,
        }
    }

    /// It takes its memory for the first time, and measures what is there for it; or may be doing so. It is over with that when it
    /// answers.
    #[must_use]
    pub const fn is_launching(&self) -> bool {
        match self.state {
            State::Unknown | State::Creating => true,
            State::Starting => !self.answers,
            _ => false,
        }
    }

    /// It gives memory back, or takes it again.
    #[must_use]
    pub const fn is_shifting(&self) -> bool {
        match self.state {
            State::FallingAsleep { .. } => true,
            State::Waking => !self.answers,
            _ => false,
        }
    }

    /// A call's outcome is awaited.
    #[must_use]
    pub fn is_busy(&self, now: Tick) -> bool {
        self.call.as_ref().is_some_and(|call| call.until > now)
    }

    /// It sleeps, for nobody, and nothing is under way about it.
    #[must_use]
    pub fn is_free(&self) -> bool {
        matches!(self.state, State::Asleep { .. }) && self.binding.is_none() && self.call.is_none()
    }

    /// A wake from there reads only the model's own weights again.
    #[must_use]
    pub fn is_at_level_2(&self) -> bool {
        self.state == State::Asleep { level: Level::Two }
    }

    /// When it will have slept for as long as it may, without anybody it is for.
    #[must_use]
    pub fn stops_at(&self) -> Option<Tick> {
        let rests = matches!(self.state, State::Asleep { .. }) && self.binding.is_none();
        self.stop_after.filter(|_| rests).map(|after| self.last_used + after)
    }

    /// What it keeps once it sleeps.
    #[must_use]
    pub fn residue(&self) -> Bytes {
        self.sizes.asleep.min(self.sizes.awake)
    }

    /// What becomes free of it by itself.
    #[must_use]
    pub fn frees(&self) -> Bytes {
        match self.state {
            State::Ending { .. } => self.held,
            State::Draining { .. } | State::FallingAsleep { .. } => self.held.saturating_sub(self.residue()),
            _ => Bytes::ZERO,
        }
    }

    pub(super) fn enter(&mut self, state: State, now: Tick) {
        self.state = state;
        self.since = now;
        self.retry = Retry::default();
    }

    pub(super) fn record(&self, last_used: Tick) -> Record {
        Record {
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

impl Requester {
    /// A start failed for it; the next comes later each time.
    pub(super) fn start_failed(&mut self, why: Why, now: Tick) {
        self.failures += 1;
        self.failed = Some(why);
        self.not_before = now + pause(self.failures);
    }

    /// It is there for good, as far as anybody knows.
    #[must_use]
    pub const fn stays(&self) -> bool {
        let goes = self.deleted.is_some() || self.doomed.is_some();
        self.seen.deleting.is_none() && !self.seen.ended && !goes
    }

    /// Behind the gate of its stub nobody can reach an engine that it is given.
    #[must_use]
    pub fn is_gated(&self) -> bool {
        self.gated.is_some() && self.gated == self.seen.stub
    }

    /// Its stub can be spoken to.
    #[must_use]
    pub const fn speaks(&self) -> bool {
        !self.seen.ended && self.seen.stub.is_some()
    }
}

impl Node {
    #[must_use]
    pub fn new(name: NodeName) -> Self {
        Self {
            name,
            facts: NodeFacts::default(),
            exists: false,
            silent: false,
            heard: Tick(0),
            accelerators: BTreeMap::new(),
            requesters: BTreeMap::new(),
            providers: BTreeMap::new(),
            engines: BTreeMap::new(),
            remains: Vec::new(),
        }
    }

    /// Nothing is left to be known of it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let pods = self.requesters.is_empty() && self.providers.is_empty();
        !self.exists && pods && self.engines.is_empty() && self.remains.is_empty()
    }

    pub fn engines_on<'a>(&'a self, accelerator: &'a AcceleratorId) -> impl Iterator<Item = &'a Engine> {
        self.engines.values().filter(|engine| engine.uses(accelerator))
    }

    /// Whether a reading of this accelerator can change a decision: an engine or a vanished Pod may hold memory there, or a requester
    /// waits for it.
    #[must_use]
    pub fn needs_reading(&self, accelerator: &AcceleratorId) -> bool {
        let asks = |requester: &Requester| requester.accelerators.contains(accelerator);
        !self.remains.is_empty()
            || self.engines_on(accelerator).next().is_some()
            || self.requesters.values().any(asks)
    }

    /// The other engines that use any of its accelerators.
    pub fn beside<'a>(&'a self, engine: &'a EngineId) -> impl Iterator<Item = &'a Engine> {
        let shares = |other: &&Engine| other.id.accelerators.iter().any(|a| engine.accelerators.contains(a));
        self.engines.values().filter(move |other| other.id != *engine).filter(shares)
    }

    pub fn engines_in<'a>(&'a self, provider: &'a ProviderId) -> impl Iterator<Item = &'a Engine> {
        self.engines.values().filter(move |engine| engine.provider == *provider)
    }

    /// An engine in this launcher that somebody is bound to: the launcher stays for that.
    #[must_use]
    pub fn bound_in<'a>(&'a self, launcher: &'a ProviderId) -> Option<&'a Engine> {
        self.engines_in(launcher).find(|engine| engine.binding.is_some() && !engine.state.is_over())
    }

    /// Nothing has happened in this launcher, or on its accelerator, since then.
    #[must_use]
    pub fn idle_since(&self, launcher: &ProviderId) -> Option<Tick> {
        let gone = launcher.accelerators.iter().filter_map(|a| self.accelerators.get(a)?.last_gone).max();
        Some(self.providers.get(launcher)?.since.max(gone.unwrap_or_default()))
    }

    /// The engine that this requester has.
    #[must_use]
    pub fn engine_of(&self, requester: &RequesterId) -> Option<&Engine> {
        self.engines.values().find(|engine| engine.requester() == Some(requester))
    }

    /// All that is reserved of an accelerator.
    #[must_use]
    pub fn reserved(&self, accelerator: &AcceleratorId) -> Bytes {
        self.engines_on(accelerator).map(|engine| engine.held).sum::<Bytes>() + self.left_on(accelerator)
    }

    /// What is reserved of it for what may be left of Pods that vanished.
    #[must_use]
    pub fn left_on(&self, accelerator: &AcceleratorId) -> Bytes {
        self.remains.iter().filter_map(|remains| remains.held.get(accelerator)).copied().sum()
    }

    #[must_use]
    pub fn reserved_host(&self) -> Bytes {
        self.engines.values().map(|engine| engine.held_host).sum::<Bytes>() + self.left_of_host()
    }

    #[must_use]
    pub fn left_of_host(&self) -> Bytes {
        self.remains.iter().map(|remains| remains.held_host).sum()
    }

    /// Whether this engine's weights fit into host RAM: into the node's budget for sleepers, and into the memory limit of its Pod,
    /// which all engines of the Pod share. The kernel kills an engine beyond the limit, so a Pod not seen yet has no room.
    #[must_use]
    pub(super) fn has_host_for(&self, engine: &Engine) -> bool {
        let wanted = engine.sizes.host;
        let provider = self.providers.get(&engine.provider).filter(|provider| provider.uid.is_some());
        let within = |limit| {
            let others = self.engines_in(&engine.provider).filter(|other| other.id != engine.id);
            others.map(|other| other.held_host).sum::<Bytes>() + wanted <= limit
        };
        self.reserved_host().saturating_sub(engine.held_host) + wanted <= self.facts.host
            && provider.is_some_and(|provider| provider.host.is_none_or(within))
    }

    /// Its requester, unless that is gone or on its way out.
    #[must_use]
    pub fn staying(&self, engine: &Engine) -> Option<&Requester> {
        self.requesters.get(engine.requester()?).filter(|requester| requester.stays())
    }

    /// The engine that this requester asks for, whether there is one or not.
    #[must_use]
    pub fn wanted_by(&self, requester: &Requester) -> EngineId {
        EngineId {
            mode: requester.seen.ask.mode,
            accelerators: requester.accelerators.as_slice().into(),
            fingerprint: requester.seen.ask.fingerprint,
        }
    }

    /// Where this engine is to run.
    #[must_use]
    pub fn provider_for(&self, engine: &EngineId) -> ProviderId {
        if engine.mode != Mode::Launcher {
            return ProviderId::direct(engine);
        }
        let index = |a: &AcceleratorId| self.accelerators.get(a).map_or(u32::MAX, |known| known.facts.index);
        let lowest = engine.accelerators.iter().min_by_key(|a| (index(a), (*a).clone()));
        lowest.map_or_else(|| ProviderId::direct(engine), |lowest| ProviderId::launcher(lowest.clone()))
    }

    /// Who came first of those that ask for an engine in this launcher and have none.
    #[must_use]
    pub fn asker(&self, launcher: &ProviderId) -> Option<&RequesterId> {
        let asks = |(own, requester): &(&RequesterId, &Requester)| {
            requester.stays()
                && requester.seen.ask.mode == Mode::Launcher
                && self.provider_for(&self.wanted_by(requester)) == *launcher
                && self.engine_of(own).is_none()
        };
        let askers = self.requesters.iter().filter(asks);
        askers.min_by_key(|(own, requester)| (requester.seen.created, *own)).map(|(own, _)| own)
    }
}

impl std::fmt::Display for State {
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
            Self::Ending { .. } => "being ended",
            Self::Gone => "gone",
        })
    }
}
