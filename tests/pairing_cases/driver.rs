//! A node in a test's hands: what is seen is said, what is ordered is looked at.

use rouse::{
    model::{AcceleratorId, Level, LevelPolicy},
    pairing::{
        Pairing,
        command::{Command, OfProvider, OfRequester, Order, Step},
        event::{
            AcceleratorFacts, Answer, Ask, Cause, Condition, Epoch, Event, NodeFacts, Record, SeenProvider,
            SeenRequester, Sizes, Stage,
        },
        ids::{EngineId, Fingerprint, Mode, NodeName, ProviderId, RequesterId},
        node::{Engine, Node, State},
        settings::Settings,
    },
    units::{Bytes, Generation, Millis, Tick},
};

pub(crate) struct Case {
    pub(crate) pairing: Pairing,
    pub(crate) now: Tick,
    /// Everything ordered so far, in words.
    pub(crate) story: Vec<String>,
    /// Gates that are to be closed before there is an engine are closed at once.
    pub(crate) gates_close: bool,
    orders: Vec<Command>,
}

pub(crate) const CAPACITY: Bytes = Bytes::gib(80);

pub(crate) fn node() -> NodeName {
    "node".into()
}

pub(crate) fn ask(mode: Mode, fingerprint: u64) -> Ask {
    let sizes = Sizes { awake: Bytes::gib(60), asleep: Bytes::gib(2), host: Bytes::gib(20) };
    Ask {
        mode,
        fingerprint: Fingerprint(fingerprint),
        build: None,
        sizes,
        level: LevelPolicy::One,
        stop_after: None,
    }
}

pub(crate) fn engine(mode: Mode, fingerprint: u64, on: &[&str]) -> EngineId {
    let accelerators: Vec<AcceleratorId> = on.iter().map(|a| AcceleratorId::from(*a)).collect();
    EngineId { mode, accelerators: accelerators.into(), fingerprint: Fingerprint(fingerprint) }
}

/// What there is of one that is well.
pub(crate) fn accelerator(index: u32) -> AcceleratorFacts {
    let sleeping = Some(Bytes::gib(8));
    AcceleratorFacts { index, capacity: CAPACITY, healthy: true, sleeping, launcher: false }
}

impl Case {
    /// A node with so many accelerators, `a`, `b`, …, of 80 GiB, with 8 GiB each for sleepers.
    pub(crate) fn new(accelerators: usize) -> Self {
        let mut case = Self {
            pairing: Pairing::new(Settings::default()),
            now: Tick(1_000_000),
            story: Vec::new(),
            gates_close: true,
            orders: Vec::new(),
        };
        case.lead(accelerators, 1);
        case.on(Event::Listed);
        case
    }

    /// A leader with this epoch, which has been told of the node and not of its Pods.
    pub(crate) fn lead(&mut self, accelerators: usize, epoch: u64) {
        self.orders.clear();
        self.on(Event::Led { epoch: Epoch(epoch) });
        self.cordon(false);
        for (index, name) in
            ["a", "b", "c", "d", "e", "f", "g", "h"].into_iter().take(accelerators).enumerate()
        {
            self.facts(name, index as u32, true);
        }
    }

    pub(crate) fn facts(&mut self, name: &str, index: u32, healthy: bool) {
        let facts = AcceleratorFacts { healthy, ..accelerator(index) };
        self.on(Event::Accelerator { node: node(), accelerator: name.into(), facts });
    }

    pub(crate) fn cordon(&mut self, cordoned: bool) {
        let facts = NodeFacts { cordoned, host: Bytes::gib(1000) };
        self.on(Event::Node { node: node(), facts });
    }

    pub(crate) fn on(&mut self, event: Event) {
        self.pairing.on(&event, self.now);
        let plan = self.pairing.plan(self.now);
        self.pairing.issued(&plan, self.now);
        assert_eq!(self.pairing.plan_everywhere(self.now).commands, [], "a second plan orders something");
        assert_eq!(self.pairing.check(), [""; 0]);
        for command in plan.commands {
            self.story.push(command.order.to_string());
            self.orders.push(command);
        }
        let shuts = |order: &Order| matches!(order, Order::Requester { step: OfRequester::Gate, .. });
        while self.gates_close && self.has(shuts) {
            self.done(shuts);
        }
    }

    pub(crate) fn after(&mut self, span: Millis) {
        let end = self.now + span;
        while let Some(at) = self.pairing.next_deadline().filter(|at| *at <= end) {
            self.now = at;
            self.on(Event::Template {
                fingerprint: Fingerprint(u64::MAX),
                standing: rouse::pairing::event::Standing::Current,
            });
        }
        self.now = end;
    }

    pub(crate) fn node(&self) -> &Node {
        self.pairing.node(&node()).expect("the node is known")
    }

    pub(crate) fn state(&self, engine: &EngineId) -> Option<State> {
        self.node().engines.get(engine).map(|engine| engine.state)
    }

    pub(crate) fn known(&self, engine: &EngineId) -> &Engine {
        self.node().engines.get(engine).expect("the engine is known")
    }

    /// Our finalizer is on it.
    pub(crate) fn is_held(&self, requester: &str) -> bool {
        self.node().requesters.get(&RequesterId::from(requester)).is_some_and(|known| known.seen.finalizer)
    }

    /// Starts in a row that failed.
    pub(crate) fn failures(&self, requester: &str) -> u32 {
        self.node().requesters.get(&RequesterId::from(requester)).map_or(0, |known| known.failures)
    }

    /// Why nothing more is done for it at this moment.
    pub(crate) fn reason(&self, requester: &str) -> String {
        let plan = self.pairing.plan_everywhere(self.now);
        plan.reasons.get(&(node(), requester.into())).cloned().unwrap_or_default()
    }

    // What is seen

    pub(crate) fn requester(
        &mut self,
        id: &str,
        ask: Ask,
        on: &[&str],
        change: impl FnOnce(&mut SeenRequester),
    ) {
        let mut seen = SeenRequester {
            ask,
            created: self.now,
            stub: Some("stub".into()),
            accelerators: on.iter().map(|a| AcceleratorId::from(*a)).collect(),
            deleting: None,
            grace: None,
            ended: false,
            finalizer: self.node().requesters.get(&id.into()).is_some_and(|known| known.seen.finalizer),
        };
        change(&mut seen);
        self.on(Event::SeenRequester { node: node(), requester: id.into(), seen });
    }

    pub(crate) fn delete(&mut self, id: &str) {
        let mut seen = self.node().requesters.get(&RequesterId::from(id)).expect("it is known").seen.clone();
        seen.deleting = Some(self.now);
        self.on(Event::SeenRequester { node: node(), requester: id.into(), seen });
    }

    /// Killed without grace: its accelerators are handed on at once.
    pub(crate) fn kill(&mut self, id: &str) {
        let mut seen = self.node().requesters.get(&RequesterId::from(id)).expect("it is known").seen.clone();
        (seen.deleting, seen.ended, seen.stub) = (Some(self.now), true, None);
        self.on(Event::SeenRequester { node: node(), requester: id.into(), seen });
    }

    pub(crate) fn provider(&mut self, id: &ProviderId, stage: Stage, change: impl FnOnce(&mut SeenProvider)) {
        let mut seen = SeenProvider {
            uid: "uid".into(),
            stage,
            deleting: false,
            restarts: 0,
            build: None,
            host: None,
            records: Vec::new(),
        };
        change(&mut seen);
        self.on(Event::SeenProvider { node: node(), provider: id.clone(), seen });
    }

    pub(crate) fn provider_gone(&mut self, id: &ProviderId) {
        self.on(Event::ProviderGone { node: node(), provider: id.clone(), uid: "uid".into() });
    }

    pub(crate) fn provider_vanished(&mut self, id: &ProviderId) {
        self.on(Event::ProviderVanished { node: node(), provider: id.clone(), uid: "uid".into() });
    }

    pub(crate) fn launcher_ready(&mut self, accelerator: &str) -> ProviderId {
        let id = ProviderId::launcher(accelerator.into());
        self.provider(&id, Stage::Ready, |_| ());
        id
    }

    // What is ordered

    /// Takes the orders that are like this; others stay.
    fn take(&mut self, like: impl Fn(&Order) -> bool) -> Vec<Command> {
        let (taken, left) = std::mem::take(&mut self.orders).into_iter().partition(|c| like(&c.order));
        self.orders = left;
        taken
    }

    pub(crate) fn has(&self, like: impl Fn(&Order) -> bool) -> bool {
        self.orders.iter().any(|command| like(&command.order))
    }

    /// An order that is like this.
    pub(crate) fn ordered(&self, like: impl Fn(&Order) -> bool) -> Option<&Command> {
        self.orders.iter().find(|command| like(&command.order))
    }

    /// There is one order like this, and this becomes of it.
    pub(crate) fn settle(&mut self, like: impl Fn(&Order) -> bool, result: Result<Answer, Cause>) {
        let mut taken = self.take(like);
        let command =
            taken.pop().unwrap_or_else(|| panic!("it was not ordered; the story: {:#?}", self.story));
        let (target, serial) = (command.order.target(), command.serial);
        self.on(Event::Outcome { node: node(), target, serial, result });
    }

    pub(crate) fn done(&mut self, like: impl Fn(&Order) -> bool) {
        self.settle(like, Ok(Answer::Done));
    }

    pub(crate) fn refused(&mut self, like: impl Fn(&Order) -> bool) {
        self.settle(like, Err(Cause::Refused));
    }

    // Longer ways

    /// The engine of this requester, in a Pod of its own, has been created, has started and is open.
    pub(crate) fn cold_start(&mut self, id: &str, asked: Ask, on: &[&str]) -> EngineId {
        let id_of = engine(asked.mode, asked.fingerprint.0, on);
        self.requester(id, asked, on, |_| ());
        self.done(creates(&id_of));
        self.provider(&ProviderId::direct(&id_of), Stage::Ready, |_| ());
        self.done(proves(&id_of));
        self.done(opens(&id_of));
        self.finalized(id);
        assert_eq!(self.state(&id_of), Some(State::Awake));
        id_of
    }

    /// The engine of this requester has been started, in whatever mode, and is open.
    pub(crate) fn started(&mut self, id: &str, asked: Ask, on: &[&str]) -> EngineId {
        if asked.mode != Mode::Launcher {
            return self.cold_start(id, asked, on);
        }
        let id_of = engine(asked.mode, asked.fingerprint.0, on);
        if let Some(lowest) = on.first() {
            self.launcher_ready(lowest);
        }
        self.requester(id, asked, on, |_| ());
        self.launched(&id_of);
        self.finalized(id);
        id_of
    }

    /// An engine for which its launcher is ready has been started, and is open.
    pub(crate) fn launched(&mut self, id: &EngineId) {
        self.done(binds(id));
        self.done(launches(id));
        let generation = generation(self.known(id));
        self.on(Event::Answers { node: node(), engine: id.clone(), generation });
        self.done(proves(id));
        self.done(opens(id));
        assert_eq!(self.state(id), Some(State::Awake));
    }

    pub(crate) fn finalized(&mut self, id: &str) {
        while self.has(finalizes(id)) {
            self.done(finalizes(id));
        }
    }

    /// The requester goes and its engine falls asleep, with a pause behind it in which the meters settle.
    pub(crate) fn put_to_sleep(&mut self, id: &str, of: &EngineId) {
        self.delete(id);
        self.done(gates(of));
        self.settle(sleeps(of), Ok(Answer::Asleep { residue: None }));
        self.done(unbinds(of));
        self.finalized(id);
        self.on(Event::RequesterGone { node: node(), requester: id.into() });
        self.after(Millis::secs(61));
    }

    pub(crate) fn record(&self, of: &EngineId) -> Record {
        let known = self.known(of);
        Record {
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

pub(crate) fn asleep() -> Result<Answer, Cause> {
    Ok(Answer::Condition(Condition::Asleep { level: Level::One, residue: None }))
}

pub(crate) fn condition(condition: Condition) -> Result<Answer, Cause> {
    Ok(Answer::Condition(condition))
}

fn step<'a>(id: &'a EngineId, like: impl Fn(&Step) -> bool + 'a) -> impl Fn(&Order) -> bool + 'a {
    move |order| matches!(order, Order::Engine { engine, step, .. } if engine == id && like(step))
}

macro_rules! steps {
    ($($name:ident: $pattern:pat,)*) => {$(
        pub(crate) fn $name(id: &EngineId) -> impl Fn(&Order) -> bool + '_ {
            step(id, |step| matches!(step, $pattern))
        }
    )*};
}

steps! {
    creates: Step::Create { .. },
    binds: Step::Bind { .. },
    launches: Step::Launch,
    proves: Step::Prove,
    opens: Step::Open { .. },
    gates: Step::Gate { .. },
    sleeps: Step::Sleep { .. },
    wakes: Step::Wake { .. },
    unbinds: Step::Unbind { forget: false, .. },
    forgets: Step::Unbind { forget: true, .. },
    ends: Step::End { .. },
    queries: Step::Query,
}

pub(crate) fn finalizes(id: &str) -> impl Fn(&Order) -> bool + '_ {
    move |order| matches!(order, Order::Requester { requester, step: OfRequester::Finalize { .. } } if requester.as_str() == id)
}

pub(crate) fn shuts(id: &str) -> impl Fn(&Order) -> bool + '_ {
    move |order| matches!(order, Order::Requester { requester, step: OfRequester::Gate } if requester.as_str() == id)
}

pub(crate) fn asks(id: &str, gate: bool) -> impl Fn(&Order) -> bool + '_ {
    let asked = OfRequester::Accelerators { gate };
    move |order| matches!(order, Order::Requester { requester, step } if requester.as_str() == id && *step == asked)
}

pub(crate) fn deletes(id: &str) -> impl Fn(&Order) -> bool + '_ {
    move |order| matches!(order, Order::Requester { requester, step: OfRequester::Delete { .. } } if requester.as_str() == id)
}

pub(crate) fn makes_launcher(order: &Order) -> bool {
    matches!(order, Order::Provider { step: OfProvider::Create { .. }, .. })
}

pub(crate) fn deletes_launcher(order: &Order) -> bool {
    matches!(order, Order::Provider { step: OfProvider::Delete { .. }, .. })
}

/// Anything that makes an engine take memory.
pub(crate) fn starts_anything(order: &Order) -> bool {
    matches!(order, Order::Engine { step: Step::Create { .. } | Step::Launch | Step::Wake { .. }, .. })
}

/// At which level this orders an engine to sleep.
pub(crate) fn level_of(Command { order, .. }: &Command) -> Option<u8> {
    let Order::Engine { step: Step::Sleep { level, .. }, .. } = order else { return None };
    Some(level.number())
}

pub(crate) fn generation(of: &Engine) -> Generation {
    of.generation
}
