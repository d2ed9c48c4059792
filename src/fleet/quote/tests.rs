//! Forecasts of a small fleet: two models that exclude each other on one accelerator.

use super::{LearnedTimes, TimeEstimate, WaitRange};
use crate::{
    fleet::{
        Fleet, Plan,
        command::Command,
        event::{AdoptedEngine, CanaryVerdict, Event, LearnedMeasurements, Waiter, WaiterId},
        tests::adopted_engine,
    },
    model::{
        Accelerator, EngineId, EngineMemory, FleetConfig, FleetSettings, ModelName, ModelSpec, SleepLevel,
    },
    sim::simulated_model,
    units::{Bytes, Generation, Millis, Tick},
};

const START: Tick = Tick(1_000_000_000);
const GENERATION: Generation = Generation(1);

/// A fleet with a turn at each change.
struct QuotingFleet {
    fleet: Fleet,
    plan: Plan,
    now: Tick,
    waiters: u64,
}

fn range(low: u64, likely: u64, high: u64) -> WaitRange {
    WaitRange { low: Millis(low), likely: Millis(likely), high: Millis(high) }
}

fn model(name: &str) -> ModelSpec {
    let memory = EngineMemory { awake: Bytes::gib(16), asleep: Bytes::gib(1), host: Bytes::gib(1) };
    ModelSpec { explicit_memory: true, ..simulated_model(name, memory) }
}

/// Times of many equal steps: 40 s to start, 800 ms to wake, 400 ms to sleep.
fn learned() -> LearnedMeasurements {
    let known = |mean| Some(TimeEstimate { mean: Millis(mean), deviation: Millis::ZERO });
    let times = LearnedTimes {
        start: known(40_000),
        wake_one: known(800),
        sleep: known(400),
        ..LearnedTimes::default()
    };
    LearnedMeasurements { times, ..LearnedMeasurements::default() }
}

impl QuotingFleet {
    /// `asleep` and `cold` exist; `awake` has the accelerator. Each of their times is known if `knows_times`.
    fn new(knows_times: bool, change: impl Fn(&mut ModelSpec)) -> Self {
        let gpu = Accelerator::new("gpu-0".into(), Bytes::gib(24));
        let settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
        let mut models = ["asleep", "awake", "cold"].map(model);
        models.iter_mut().for_each(change);
        let configuration =
            Box::new(FleetConfig { settings, accelerators: vec![gpu], models: models.into() });
        let adopted = |name: &str, asleep| Event::Adopted {
            engine: EngineId::new(name.into(), 0),
            generation: GENERATION,
            found: AdoptedEngine {
                accelerators: vec!["gpu-0".into()],
                started: START,
                ..adopted_engine(asleep)
            },
        };
        let mut world = Self { fleet: Fleet::new(), plan: Plan::default(), now: START, waiters: 0 };
        world.fleet.on(&Event::Configured { configuration }, START);
        for name in ["asleep", "awake", "cold"].iter().filter(|_| knows_times) {
            let (model, learned) = (ModelName::from(*name), learned());
            world
                .fleet
                .on(&Event::MeasurementsRestored { model, variant: Default::default(), learned }, START);
        }
        world.fleet.on(&adopted("asleep", Some(SleepLevel::One)), START);
        world.fleet.on(&adopted("awake", None), START);
        world.fleet.on(&Event::AdoptionDone, START);
        while !world.turn().is_empty() {}
        world
    }

    fn turn(&mut self) -> Vec<Command> {
        self.plan = self.fleet.plan(self.now);
        self.fleet.issued(&self.plan.commands, self.now);
        self.plan.commands.clone()
    }

    fn on(&mut self, event: &Event) {
        self.fleet.on(event, self.now);
    }

    /// Parks a request, and returns its quote.
    fn arrive(&mut self, model: &str) -> Option<WaitRange> {
        self.waiters += 1;
        let waiter = Waiter {
            id: WaiterId(self.waiters),
            model: model.into(),
            band: 0,
            key: String::new(),
            client: self.waiters,
            arrived: self.now,
            deadline: self.now + Millis::secs(600),
            stream: true,
            required_engine: None,
        };
        self.on(&Event::Arrived { waiter });
        self.turn();
        let quotes = self.fleet.quote_arrivals(&self.plan, &[WaiterId(self.waiters)], self.now);
        quotes.first().map(|(_, _, forecast)| forecast.range)
    }

    /// The expected wait of a request that arrives now.
    fn expected(&self, model: &str) -> Option<WaitRange> {
        let waits = self.fleet.expected_waits(&self.plan);
        waits.get(&ModelName::from(model)).map(|forecast| forecast.at(self.now))
    }

    fn sample(&mut self, model: &str, leases: u32) {
        let now = self.now;
        self.on(&Event::GateSampled {
            engine: EngineId::new(model.into(), 0),
            generation: GENERATION,
            leases,
            last_lease_end: if leases == 0 { now } else { Tick(0) },
            last_byte: now,
            clients: Default::default(),
            idle_gap: None,
        });
        self.turn();
    }
}

#[test]
fn an_awake_model_with_a_free_place_is_no_wait_and_what_nobody_measured_is_no_number() {
    let world = QuotingFleet::new(false, |_| {});
    assert_eq!(world.expected("awake"), Some(WaitRange::ZERO));
    assert_eq!(world.expected("asleep"), None);
    assert_eq!(world.expected("cold"), None);
    assert_eq!(world.expected("absent"), None);
    let report = world.fleet.report_with_waits(&world.plan);
    assert_eq!(report.models[&ModelName::from("cold")].wait.expected_wait, None);
}

#[test]
fn a_model_behind_an_idle_one_waits_for_its_sleep_and_then_for_its_own_start() {
    let world = QuotingFleet::new(true, |_| {});
    // The spreads of 50 ms and 100 ms, and of 5 s, add as squares. The first quotes of a model reach further: one and a
    // half times below the likely wait, and twice above it.
    assert_eq!(world.expected("asleep"), Some(range(1034, 1200, 1422)));
    assert_eq!(world.expected("cold"), Some(range(32_900, 40_400, 50_400)));
    let view = world.fleet.view(&world.fleet.report_with_waits(&world.plan));
    let shown = view.models.iter().map(|model| (model.name.as_str(), model.expected_wait));
    assert_eq!(
        shown.collect::<Vec<_>>(),
        [
            ("asleep", world.expected("asleep")),
            ("awake", Some(WaitRange::ZERO)),
            ("cold", world.expected("cold")),
        ]
    );
}

#[test]
fn a_model_behind_one_in_use_waits_for_the_end_of_its_turn_and_its_requests() {
    let mut world = QuotingFleet::new(true, |_| {});
    world.now = START + Millis::secs(20);
    world.sample("awake", 1);
    let expected = world.expected("asleep").unwrap();
    let turns = FleetSettings::default().turns;
    assert!(expected.low <= Millis::secs(2), "its requests may end at once: {expected:?}");
    assert!(expected.likely >= Millis::secs(40), "{expected:?}");
    let longest = turns.max_turn + turns.drain_deadline + Millis::secs(2);
    assert!(expected.high >= longest && expected.high <= longest + longest, "{expected:?}");
}

#[test]
fn a_model_behind_one_that_never_leaves_has_no_number() {
    let world = QuotingFleet::new(true, |spec| spec.pinned = spec.name.as_str() == "awake");
    assert_eq!(world.expected("asleep"), None);
}

#[test]
fn a_parked_request_is_quoted_once_and_its_wait_gets_shorter() {
    let mut world = QuotingFleet::new(true, |_| {});
    let quote = world.arrive("asleep").unwrap();
    assert_eq!(quote, range(1034, 1200, 1422), "the engine in its way drains at once");
    world.now = world.now + Millis(300);
    let forecast = world.fleet.expected_waits(&world.plan)[&ModelName::from("asleep")];
    assert!(forecast.is_under_way);
    assert_eq!(forecast.at(world.now), range(734, 900, 1122));
    assert!(world.fleet.quote_arrivals(&world.plan, &[WaiterId(99)], world.now).is_empty(), "it has left");
    let evicted = world.arrive("awake").unwrap();
    assert!(evicted.likely >= Millis::secs(30), "it comes back after the other's turn: {evicted:?}");
}

#[test]
fn a_full_engine_has_a_number_once_a_place_has_become_free_for_a_waiter() {
    let mut world = QuotingFleet::new(true, |spec| spec.max_concurrency = Some(1));
    world.sample("awake", 1);
    assert_eq!(world.arrive("awake"), None);
    world.now = world.now + Millis::secs(6);
    world.sample("awake", 0);
    let expected = world.expected("awake").unwrap();
    assert_eq!(expected.likely, Millis::secs(6));
    let second = world.arrive("awake").unwrap();
    assert_eq!(second.likely, Millis::secs(6), "the first has the only place");
    assert_eq!(world.expected("awake").unwrap().likely, Millis::secs(12), "behind the second");
}

#[test]
fn times_are_learned_from_what_the_engines_did() {
    let mut world = QuotingFleet::new(false, |_| {});
    assert_eq!(world.arrive("asleep"), None);
    let awake = EngineId::new("awake".into(), 0);
    let drained = Event::Drained { engine: awake.clone(), generation: GENERATION };
    let slept = Event::Slept { engine: awake, generation: GENERATION, level: SleepLevel::One };
    for (after, event) in [(0, drained), (500, slept)] {
        world.now = world.now + Millis(after);
        world.on(&event);
        while !world.turn().is_empty() {}
    }
    let engine = EngineId::new("asleep".into(), 0);
    world.on(&Event::Placed {
        engine: engine.clone(),
        generation: GENERATION,
        accelerators: vec!["gpu-0".into()],
    });
    while !world.turn().is_empty() {}
    world.now = world.now + Millis(700);
    world.on(&Event::Ready { engine: engine.clone(), generation: GENERATION });
    while !world.turn().is_empty() {}
    world.now = world.now + Millis(100);
    world.on(&Event::Canary { engine, generation: GENERATION, verdict: CanaryVerdict::Passed });
    while !world.turn().is_empty() {}
    let learned = world.fleet.learned();
    assert_eq!(learned[&ModelName::from("awake")].times.sleep, Some(TimeEstimate::first(Millis(500))));
    assert_eq!(learned[&ModelName::from("asleep")].times.wake_one, Some(TimeEstimate::first(Millis(800))));
    assert_eq!(learned[&ModelName::from("asleep")].wake, Some(Millis(800)));
}
