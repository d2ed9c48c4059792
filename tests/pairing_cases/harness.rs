//! A node under a test's control: the test reports observations and inspects the orders.

use rouse::{
    model::{AcceleratorId, SleepLevel, SleepLevelPolicy},
    pairing::{
        Pairing,
        command::{EngineStep, PairingAction, PairingCommand, ProviderStep, RequesterStep},
        event::{
            AcceleratorFacts, CommandFailure, CommandReply, EngineRecord, LeaderEpoch, MemorySizes,
            ObservedProvider, ObservedRequester, PairingEvent, PairingNodeFacts, ProviderPhase,
            QueriedCondition, RequestedEngine,
        },
        ids::{EngineFingerprint, NodeName, PairingEngineId, ProviderId, ProviderMode, RequesterId},
        node::{PairingEngine, PairingEngineState, PairingNode},
        settings::PairingSettings,
    },
    units::{Bytes, Generation, Millis, Tick},
};

pub(crate) struct PairingCase {
    pub(crate) pairing: Pairing,
    pub(crate) now: Tick,
    /// All orders so far, as text.
    pub(crate) story: Vec<String>,
    /// Acknowledges at once the closing of a requester's gate before there is an engine.
    pub(crate) auto_close_gates: bool,
    orders: Vec<PairingCommand>,
}

pub(crate) const CAPACITY: Bytes = Bytes::gib(80);

pub(crate) fn node() -> NodeName {
    "node".into()
}

pub(crate) fn ask(mode: ProviderMode, fingerprint: u64) -> RequestedEngine {
    let sizes = MemorySizes { awake: Bytes::gib(60), asleep: Bytes::gib(2), host: Bytes::gib(20) };
    RequestedEngine {
        mode,
        fingerprint: EngineFingerprint(fingerprint),
        build: None,
        sizes,
        level: SleepLevelPolicy::One,
        stop_after: None,
    }
}

pub(crate) fn engine(mode: ProviderMode, fingerprint: u64, on: &[&str]) -> PairingEngineId {
    let accelerators: Vec<AcceleratorId> = on.iter().map(|a| AcceleratorId::from(*a)).collect();
    PairingEngineId { mode, accelerators: accelerators.into(), fingerprint: EngineFingerprint(fingerprint) }
}

/// The facts of a healthy accelerator.
pub(crate) fn accelerator(index: u32) -> AcceleratorFacts {
    let sleeping = Some(Bytes::gib(8));
    AcceleratorFacts {
        index,
        capacity: CAPACITY,
        healthy: true,
        sleeping_memory: sleeping,
        wants_launcher: false,
    }
}

impl PairingCase {
    /// A node with this many accelerators, `a`, `b`, …, of 80 GiB, with 8 GiB each for sleepers.
    pub(crate) fn new(accelerators: usize) -> Self {
        let mut case = Self {
            pairing: Pairing::new(PairingSettings::default()),
            now: Tick(1_000_000),
            story: Vec::new(),
            auto_close_gates: true,
            orders: Vec::new(),
        };
        case.lead(accelerators, 1);
        case.on(PairingEvent::Listed);
        case
    }

    /// Starts a leader with this epoch, which knows the node but not its Pods.
    pub(crate) fn lead(&mut self, accelerators: usize, epoch: u64) {
        self.orders.clear();
        self.on(PairingEvent::LeadershipGained { epoch: LeaderEpoch(epoch) });
        self.cordon(false);
        for (index, name) in
            ["a", "b", "c", "d", "e", "f", "g", "h"].into_iter().take(accelerators).enumerate()
        {
            self.facts(name, index as u32, true);
        }
    }

    pub(crate) fn facts(&mut self, name: &str, index: u32, healthy: bool) {
        let facts = AcceleratorFacts { healthy, ..accelerator(index) };
        self.on(PairingEvent::Accelerator { node: node(), accelerator: name.into(), facts });
    }

    pub(crate) fn cordon(&mut self, cordoned: bool) {
        let facts = PairingNodeFacts { cordoned, host_sleep_memory: Bytes::gib(1000) };
        self.on(PairingEvent::Node { node: node(), facts });
    }

    pub(crate) fn on(&mut self, event: PairingEvent) {
        self.pairing.on(&event, self.now);
        let plan = self.pairing.plan(self.now);
        self.pairing.issued(&plan, self.now);
        assert_eq!(self.pairing.plan_everywhere(self.now).commands, [], "a second plan orders something");
        assert_eq!(self.pairing.check(), [""; 0]);
        for command in plan.commands {
            self.story.push(command.action.to_string());
            self.orders.push(command);
        }
        let shuts = |order: &PairingAction| {
            matches!(order, PairingAction::Requester { step: RequesterStep::CloseGate, .. })
        };
        while self.auto_close_gates && self.has(shuts) {
            self.done(shuts);
        }
    }

    pub(crate) fn advance(&mut self, span: Millis) {
        let end = self.now + span;
        while let Some(at) = self.pairing.next_deadline().filter(|at| *at <= end) {
            self.now = at;
            self.on(PairingEvent::Template {
                fingerprint: EngineFingerprint(u64::MAX),
                status: rouse::pairing::event::TemplateStatus::Current,
            });
        }
        self.now = end;
    }

    pub(crate) fn node(&self) -> &PairingNode {
        self.pairing.node(&node()).expect("the node is known")
    }

    pub(crate) fn state(&self, engine: &PairingEngineId) -> Option<PairingEngineState> {
        self.node().engines.get(engine).map(|engine| engine.state)
    }

    pub(crate) fn known(&self, engine: &PairingEngineId) -> &PairingEngine {
        self.node().engines.get(engine).expect("the engine is known")
    }

    /// Whether our finalizer is on the requester.
    pub(crate) fn has_finalizer(&self, requester: &str) -> bool {
        self.node()
            .requesters
            .get(&RequesterId::from(requester))
            .is_some_and(|known| known.observed.finalizer)
    }

    /// The requester's consecutive failed starts.
    pub(crate) fn failures(&self, requester: &str) -> u32 {
        self.node().requesters.get(&RequesterId::from(requester)).map_or(0, |known| known.failures)
    }

    /// Why the requester is waiting now.
    pub(crate) fn reason(&self, requester: &str) -> String {
        let plan = self.pairing.plan_everywhere(self.now);
        plan.reasons.get(&(node(), requester.into())).cloned().unwrap_or_default()
    }

    // Observations

    pub(crate) fn requester(
        &mut self,
        id: &str,
        ask: RequestedEngine,
        on: &[&str],
        change: impl FnOnce(&mut ObservedRequester),
    ) {
        let mut observed = ObservedRequester {
            requested: ask,
            created: self.now,
            stub_container: Some("stub".into()),
            accelerators: on.iter().map(|a| AcceleratorId::from(*a)).collect(),
            deleting_since: None,
            grace: None,
            terminated: false,
            finalizer: self.node().requesters.get(id).is_some_and(|known| known.observed.finalizer),
            actuated: self.node().requesters.get(id).is_some_and(|known| known.observed.actuated),
        };
        change(&mut observed);
        self.on(PairingEvent::RequesterObserved { node: node(), requester: id.into(), observed });
    }

    pub(crate) fn delete(&mut self, id: &str) {
        let mut observed =
            self.node().requesters.get(&RequesterId::from(id)).expect("it is known").observed.clone();
        observed.deleting_since = Some(self.now);
        self.on(PairingEvent::RequesterObserved { node: node(), requester: id.into(), observed });
    }

    /// Kills a requester without grace: its accelerators are reassigned at once.
    pub(crate) fn kill(&mut self, id: &str) {
        let mut observed =
            self.node().requesters.get(&RequesterId::from(id)).expect("it is known").observed.clone();
        (observed.deleting_since, observed.terminated, observed.stub_container) =
            (Some(self.now), true, None);
        self.on(PairingEvent::RequesterObserved { node: node(), requester: id.into(), observed });
    }

    pub(crate) fn provider(
        &mut self,
        id: &ProviderId,
        stage: ProviderPhase,
        change: impl FnOnce(&mut ObservedProvider),
    ) {
        let mut observed = ObservedProvider {
            uid: "uid".into(),
            phase: stage,
            deleting: false,
            restarts: 0,
            build: None,
            memory_limit: None,
            records: Vec::new(),
        };
        change(&mut observed);
        self.on(PairingEvent::ProviderObserved { node: node(), provider: id.clone(), observed });
    }

    pub(crate) fn provider_gone(&mut self, id: &ProviderId) {
        self.on(PairingEvent::ProviderGone { node: node(), provider: id.clone(), uid: "uid".into() });
    }

    pub(crate) fn provider_vanished(&mut self, id: &ProviderId) {
        self.on(PairingEvent::ProviderVanished { node: node(), provider: id.clone(), uid: "uid".into() });
    }

    pub(crate) fn launcher_ready(&mut self, accelerator: &str) -> ProviderId {
        let id = ProviderId::launcher(accelerator.into());
        self.provider(&id, ProviderPhase::Ready, |_| ());
        id
    }

    // Orders

    /// Takes the orders that match; the others stay.
    fn take(&mut self, like: impl Fn(&PairingAction) -> bool) -> Vec<PairingCommand> {
        let (taken, left) = std::mem::take(&mut self.orders).into_iter().partition(|c| like(&c.action));
        self.orders = left;
        taken
    }

    pub(crate) fn has(&self, like: impl Fn(&PairingAction) -> bool) -> bool {
        self.orders.iter().any(|command| like(&command.action))
    }

    /// Returns an order that matches.
    pub(crate) fn ordered(&self, like: impl Fn(&PairingAction) -> bool) -> Option<&PairingCommand> {
        self.orders.iter().find(|command| like(&command.action))
    }

    /// Completes the only order that matches, with this result.
    pub(crate) fn complete(
        &mut self,
        like: impl Fn(&PairingAction) -> bool,
        result: Result<CommandReply, CommandFailure>,
    ) {
        let mut matching = self.take(like);
        let command =
            matching.pop().unwrap_or_else(|| panic!("it was not ordered; the story: {:#?}", self.story));
        let (target, serial) = (command.action.target(), command.serial);
        self.on(PairingEvent::Outcome { node: node(), target, serial, result });
    }

    pub(crate) fn done(&mut self, like: impl Fn(&PairingAction) -> bool) {
        self.complete(like, Ok(CommandReply::Done));
    }

    pub(crate) fn refused(&mut self, like: impl Fn(&PairingAction) -> bool) {
        self.complete(like, Err(CommandFailure::Refused));
    }

    // Longer sequences

    /// Creates and starts this requester's engine in its own Pod, and opens its gate.
    pub(crate) fn cold_start(
        &mut self,
        id: &str,
        requested: RequestedEngine,
        on: &[&str],
    ) -> PairingEngineId {
        let id_of = engine(requested.mode, requested.fingerprint.0, on);
        self.requester(id, requested, on, |_| ());
        self.done(creates(&id_of));
        self.provider(&ProviderId::direct(&id_of), ProviderPhase::Ready, |_| ());
        self.done(sends_canary(&id_of));
        self.done(opens(&id_of));
        self.finalized(id);
        assert_eq!(self.state(&id_of), Some(PairingEngineState::Awake));
        id_of
    }

    /// Starts this requester's engine in any mode, and opens its gate.
    pub(crate) fn started(&mut self, id: &str, requested: RequestedEngine, on: &[&str]) -> PairingEngineId {
        if requested.mode != ProviderMode::Launcher {
            return self.cold_start(id, requested, on);
        }
        let id_of = engine(requested.mode, requested.fingerprint.0, on);
        if let Some(lowest) = on.first() {
            self.launcher_ready(lowest);
        }
        self.requester(id, requested, on, |_| ());
        self.launched(&id_of);
        self.finalized(id);
        id_of
    }

    /// Starts an engine in its ready launcher, and opens its gate.
    pub(crate) fn launched(&mut self, id: &PairingEngineId) {
        self.done(binds(id));
        self.done(launches(id));
        let generation = generation(self.known(id));
        self.on(PairingEvent::EngineReady { node: node(), engine: id.clone(), generation });
        self.done(sends_canary(id));
        self.done(opens(id));
        assert_eq!(self.state(id), Some(PairingEngineState::Awake));
    }

    pub(crate) fn finalized(&mut self, id: &str) {
        while self.has(finalizes(id)) {
            self.done(finalizes(id));
        }
    }

    /// Deletes the requester and puts its engine to sleep, then waits until the meters have settled.
    pub(crate) fn put_to_sleep(&mut self, id: &str, of: &PairingEngineId) {
        self.delete(id);
        self.done(closes_gate(of));
        self.complete(sleeps(of), Ok(CommandReply::Asleep { residue: None }));
        self.done(unbinds(of));
        self.finalized(id);
        self.on(PairingEvent::RequesterGone { node: node(), requester: id.into() });
        self.advance(Millis::secs(61));
    }

    pub(crate) fn record(&self, of: &PairingEngineId) -> EngineRecord {
        let known = self.known(of);
        EngineRecord {
            engine: of.clone(),
            generation: known.generation,
            sizes: known.sizes,
            level: known.level,
            stop_after: known.stop_after,
            requester: known.requester().cloned(),
            last_used: known.last_used,
        }
    }
}

pub(crate) fn asleep() -> Result<CommandReply, CommandFailure> {
    Ok(CommandReply::Condition(QueriedCondition::Asleep { level: SleepLevel::One, residue: None }))
}

pub(crate) fn condition(condition: QueriedCondition) -> Result<CommandReply, CommandFailure> {
    Ok(CommandReply::Condition(condition))
}

fn step<'a>(
    id: &'a PairingEngineId,
    like: impl Fn(&EngineStep) -> bool + 'a,
) -> impl Fn(&PairingAction) -> bool + 'a {
    move |order| matches!(order, PairingAction::Engine { engine, step, .. } if engine == id && like(step))
}

macro_rules! steps {
    ($($name:ident: $pattern:pat,)*) => {$(
        pub(crate) fn $name(id: &PairingEngineId) -> impl Fn(&PairingAction) -> bool + '_ {
            step(id, |step| matches!(step, $pattern))
        }
    )*};
}

steps! {
    creates: EngineStep::Create { .. },
    binds: EngineStep::Bind { .. },
    launches: EngineStep::Launch,
    sends_canary: EngineStep::SendCanary,
    opens: EngineStep::OpenGate { .. },
    closes_gate: EngineStep::CloseGate { .. },
    sleeps: EngineStep::Sleep { .. },
    wakes: EngineStep::Wake { .. },
    unbinds: EngineStep::Unbind { forget: false, .. },
    forgets: EngineStep::Unbind { forget: true, .. },
    ends: EngineStep::Stop { .. },
    queries: EngineStep::Query,
}

pub(crate) fn finalizes(id: &str) -> impl Fn(&PairingAction) -> bool + '_ {
    move |order| matches!(order, PairingAction::Requester { requester, step: RequesterStep::SetFinalizer { .. } } if requester.as_str() == id)
}

pub(crate) fn closes_requester_gate(id: &str) -> impl Fn(&PairingAction) -> bool + '_ {
    move |order| matches!(order, PairingAction::Requester { requester, step: RequesterStep::CloseGate } if requester.as_str() == id)
}

pub(crate) fn asks(id: &str, gate: bool) -> impl Fn(&PairingAction) -> bool + '_ {
    let asked = RequesterStep::QueryAccelerators { close_gate: gate };
    move |order| matches!(order, PairingAction::Requester { requester, step } if requester.as_str() == id && *step == asked)
}

pub(crate) fn deletes(id: &str) -> impl Fn(&PairingAction) -> bool + '_ {
    move |order| matches!(order, PairingAction::Requester { requester, step: RequesterStep::Delete { .. } } if requester.as_str() == id)
}

pub(crate) fn releases(id: &str) -> impl Fn(&PairingAction) -> bool + '_ {
    move |order| matches!(order, PairingAction::Requester { requester, step: RequesterStep::Release } if requester.as_str() == id)
}

pub(crate) fn makes_launcher(order: &PairingAction) -> bool {
    matches!(order, PairingAction::Provider { step: ProviderStep::Create { .. }, .. })
}

pub(crate) fn deletes_launcher(order: &PairingAction) -> bool {
    matches!(order, PairingAction::Provider { step: ProviderStep::Delete { .. }, .. })
}

/// Whether an order makes an engine take memory.
pub(crate) fn starts_anything(order: &PairingAction) -> bool {
    matches!(
        order,
        PairingAction::Engine {
            step: EngineStep::Create { .. } | EngineStep::Launch | EngineStep::Wake { .. },
            ..
        }
    )
}

/// The level at which this orders an engine to sleep.
pub(crate) fn level_of(PairingCommand { action: order, .. }: &PairingCommand) -> Option<u8> {
    let PairingAction::Engine { step: EngineStep::Sleep { level, .. }, .. } = order else { return None };
    Some(level.number())
}

pub(crate) fn generation(of: &PairingEngine) -> Generation {
    of.generation
}
