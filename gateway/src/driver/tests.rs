//! Tests the driver's turns. Their cost must not grow with what a turn does not touch.
//!
//! This file has the harness, the routes, and the driver's readers and orders.

use rouse::{
    driver::MAX_PLATFORM_EVENTS_PER_TURN,
    fleet::{
        command::Command,
        event::{AdoptedEngine, OperatorAction},
    },
    model::{
        Accelerator, AcceleratorId, EngineId, EngineMemory, FleetConfig, FleetSettings, ModelName, ModelSpec,
        SleepLevel,
    },
    sim::simulated_model,
    units::{Bytes, Generation, Tick},
};
use rouse_net::lease::{Lease, TickClock};
use rouse_platform::{DriverClient as _, Platform};
use tokio::time::Instant;

use super::*;
use crate::{metrics::Metrics, routing::RouteTable};

mod gates;
mod parking;
mod saturation;

const MODELS: usize = 500;
pub(super) const START: Tick = Tick(1_000_000_000);

/// Executes no command.
struct InertPlatform;

impl Platform for InertPlatform {
    fn submit(&self, _: Command) {}
}

struct DriverHarness {
    handle: DriverHandle,
    driver: Driver,
    batch: Vec<Event>,
}

impl DriverHarness {
    /// Creates `models` models. The first `awake` ones are awake, each on its own accelerator.
    fn new(models: usize, awake: usize) -> Self {
        Self::on(Arc::new(InertPlatform), models, awake)
    }

    fn on(platform: Arc<dyn Platform>, models: usize, awake: usize) -> Self {
        let (_, events) = mpsc::channel(1);
        let metrics = Arc::new(Metrics::new());
        let clock = TickClock::new(Instant::now(), START);
        let journal = Journal::default();
        let (handle, driver) = DriverHandle::new(platform, events, journal, metrics, clock);
        let mut harness = Self { handle, driver, batch: Vec::new() };
        harness.turn([configured(models, awake, 0)]);
        harness.turn((0..awake).map(adopted).chain([Event::AdoptionDone]));
        for _ in 0..4 {
            harness.turn([]);
        }
        assert_eq!(
            harness.routes().models.values().filter(|route| !route.endpoints.is_empty()).count(),
            awake
        );
        harness
    }

    fn turn(&mut self, events: impl IntoIterator<Item = Event>) {
        self.batch.extend(events);
        self.driver.turn(&mut self.batch);
    }

    /// Takes one turn with all pending events.
    async fn step(&mut self) {
        self.driver.receive(&mut self.batch).await;
        self.driver.turn(&mut self.batch);
    }

    fn routes(&self) -> Arc<RouteTable> {
        Arc::clone(&self.handle.routes())
    }

    fn lease(&self, n: usize) -> Lease {
        self.routes().models.get(&name(n)).unwrap().endpoints[0].gate.take().unwrap()
    }

    fn park(&self, n: usize) -> tokio::task::JoinHandle<GrantedLease> {
        let (handle, request) = (self.handle.clone(), self.request(n));
        tokio::spawn(async move { handle.park(request).await.unwrap() })
    }

    fn request(&self, n: usize) -> ParkRequest {
        park_request(n, self.handle.clock().now())
    }

    /// Receives without a turn. Returns how many waiters arrived and how many left.
    async fn receive(&mut self) -> (usize, usize) {
        self.driver.receive(&mut self.batch).await;
        let count = |of: fn(&Event) -> bool| self.batch.iter().filter(|event| of(event)).count();
        let counts = (
            count(|event| matches!(event, Event::Arrived { .. })),
            count(|event| matches!(event, Event::Left { .. })),
        );
        self.batch.clear();
        counts
    }
}

/// Returns a request that waits for this model for a minute.
pub(super) fn park_request(n: usize, arrived: Tick) -> ParkRequest {
    ParkRequest {
        model: name(n),
        band: 0,
        key: String::new(),
        client: 0,
        arrived,
        deadline: arrived + Millis::secs(60),
        stream: true,
        required_engine: None,
        quoted: QuotedWait::default(),
    }
}

fn configured(models: usize, awake: usize, priority: i32) -> Event {
    configured_with((0..models).map(|n| model(n, if n == 7 { priority } else { 0 })).collect(), awake)
}

/// Configures these models, and so many accelerators of 24 GiB.
pub(super) fn configured_with(models: Vec<ModelSpec>, accelerators: usize) -> Event {
    let accelerators = (0..accelerators).map(|n| Accelerator::new(gpu(n), Bytes::gib(24))).collect();
    let configuration = FleetConfig { settings: FleetSettings::default(), accelerators, models };
    Event::Configured { configuration: Box::new(configuration) }
}

fn adopted(n: usize) -> Event {
    adopted_in(n, None)
}

/// Adopts an engine that is awake, or that sleeps at this level, on an accelerator of its own.
pub(super) fn adopted_in(n: usize, asleep: Option<SleepLevel>) -> Event {
    let found = AdoptedEngine {
        address: ([127, 0, 0, 1], 9).into(),
        accelerators: vec![gpu(n)],
        asleep,
        ready: true,
        fingerprint: 1,
        last_lease_end: START,
        started: START,
    };
    Event::Adopted { engine: EngineId::new(name(n), 0), generation: Generation(1), found }
}

fn model(n: usize, priority: i32) -> ModelSpec {
    ModelSpec {
        aliases: vec![format!("alias-{n}")],
        priority,
        max_concurrency: Some(1),
        start_timeout: Millis::secs(600),
        explicit_memory: true,
        ..simulated_model(
            name(n),
            EngineMemory { awake: Bytes::gib(20), asleep: Bytes::gib(1), host: Bytes::gib(1) },
        )
    }
}

pub(super) fn name(n: usize) -> ModelName {
    format!("model-{n:05}").into()
}

fn gpu(n: usize) -> AcceleratorId {
    format!("gpu-{n}").into()
}

#[tokio::test]
async fn a_wait_and_a_grant_publish_no_new_routes_view_or_report() {
    let mut harness = DriverHarness::new(MODELS, 1);
    let (routes, view, report) = (harness.routes(), harness.handle.view(), harness.handle.report());
    let lease = harness.lease(0);
    let waiting = harness.park(0);
    harness.step().await;
    assert!(!waiting.is_finished() && harness.driver.core.fleet().queued_models().eq([&name(0)]));
    drop(lease);
    harness.step().await;
    drop(waiting.await.unwrap());
    harness.step().await;
    assert!(Arc::ptr_eq(&routes, &harness.routes()));
    assert!(Arc::ptr_eq(&view, &harness.handle.view()) && Arc::ptr_eq(&report, &harness.handle.report()));
}

#[tokio::test]
async fn a_turn_samples_the_gates_that_requests_use_and_no_other() {
    let mut harness = DriverHarness::new(MODELS, 8);
    let leases = |harness: &DriverHarness| {
        harness.driver.core.fleet().engine(&EngineId::new(name(3), 0)).map_or(0, |engine| engine.leases)
    };
    assert_eq!((harness.driver.platform.gates.sampled_count(), leases(&harness)), (0, 0));
    let lease = harness.lease(3);
    harness.turn([]);
    assert_eq!((harness.driver.platform.gates.sampled_count(), leases(&harness)), (1, 1));
    drop(lease);
    harness.turn([]);
    assert_eq!((harness.driver.platform.gates.sampled_count(), leases(&harness)), (0, 0));
    let again = harness.lease(3);
    harness.turn([]);
    assert_eq!(
        (harness.driver.platform.gates.sampled_count(), leases(&harness)),
        (1, 1),
        "a second use is announced too"
    );
    drop(again);
}

#[tokio::test]
async fn what_happens_to_one_model_makes_one_route_anew() {
    let mut harness = DriverHarness::new(MODELS, 2);
    let before = harness.routes();
    let engine = EngineId::new(name(1), 0);
    let cause = rouse::fault::FailureCause::Stopped;
    harness.turn([Event::Gone { engine, generation: Generation(1), cause }]);
    let after = harness.routes();
    let same =
        |model: &ModelName| Arc::ptr_eq(before.models.get(model).unwrap(), after.models.get(model).unwrap());
    assert!(before.models.keys().filter(|model| !same(model)).eq([&name(1)]));
    assert!(after.models.get(&name(1)).unwrap().endpoints.is_empty());
    assert!(Arc::ptr_eq(&before.registry, &after.registry));
}

#[tokio::test]
async fn a_reload_makes_anew_what_is_configured_otherwise() {
    let mut harness = DriverHarness::new(MODELS, 1);
    let before = harness.routes();
    harness.turn([configured(MODELS, 1, 0)]);
    assert!(Arc::ptr_eq(&before, &harness.routes()));
    harness.turn([configured(MODELS, 1, 5)]);
    let after = harness.routes();
    assert_eq!(after.models.get(&name(7)).unwrap().priority, 5);
    assert!(Arc::ptr_eq(before.models.get(&name(8)).unwrap(), after.models.get(&name(8)).unwrap()));
    assert!(Arc::ptr_eq(&before.registry, &after.registry));
    harness.turn([configured(MODELS - 1, 1, 5)]);
    assert_eq!(harness.routes().models.len(), MODELS - 1);
    assert!(harness.routes().registry.find("alias-499").is_none());
}

#[tokio::test]
async fn the_gate_of_an_ended_generation_is_kept_until_its_last_lease_is_gone() {
    let mut harness = DriverHarness::new(2, 1);
    let lease = harness.lease(0);
    let engine = EngineId::new(name(0), 0);
    let gate = Arc::downgrade(&harness.routes().models.get(&name(0)).unwrap().endpoints[0].gate);
    let cause = rouse::fault::FailureCause::Stopped;
    harness.turn([Event::Gone { engine, generation: Generation(1), cause }]);
    harness.turn([]);
    assert!(gate.upgrade().is_some_and(|gate| !gate.is_open()));
    drop(lease);
    harness.turn([]);
    harness.turn([]);
    assert!(gate.upgrade().is_none());
}

#[tokio::test]
async fn gauges_show_the_last_turn_and_the_leases_of_now_whenever_they_are_asked_for() {
    let mut harness = DriverHarness::new(3, 1);
    harness.turn([]);
    let lease = harness.lease(0);
    let handle = harness.handle.clone();
    let mut lines = handle.journal();
    let measuring = tokio::spawn(async move { handle.update_gauges().await });
    tokio::task::yield_now().await;
    let request = harness.driver.requests.try_recv().unwrap();
    assert!(!harness.driver.handle_request(request, &mut harness.batch), "no turn is taken for it");
    measuring.await.unwrap();
    let handle = harness.handle.clone();
    let telling = tokio::spawn(async move { handle.demand(None).await });
    tokio::task::yield_now().await;
    let asked = harness.driver.requests.try_recv().unwrap();
    assert!(
        !harness.driver.handle_request(asked, &mut harness.batch),
        "nor for the demand that other gateways read"
    );
    let all = telling.await.unwrap();
    assert_eq!(all[&name(0)].in_flight, 1);
    let handle = harness.handle.clone();
    let some = std::collections::BTreeSet::from([name(0), name(1)]);
    let telling = tokio::spawn(async move { handle.demand(Some(some)).await });
    tokio::task::yield_now().await;
    let asked = harness.driver.requests.try_recv().unwrap();
    assert!(!harness.driver.handle_request(asked, &mut harness.batch), "nor for some models alone");
    assert_eq!(telling.await.unwrap(), all, "the other one has no demand");
    let text = harness.handle.metrics().encode();
    for line in [
        "rouse_leases{model=\"model-00000\"} 1",
        "rouse_model_state{model=\"model-00000\",state=\"awake\"} 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    assert!(lines.try_recv().is_err());
    drop(lease);
    let handle = harness.handle.clone();
    let telling = tokio::spawn(async move { handle.demand(None).await });
    tokio::task::yield_now().await;
    let asked = harness.driver.requests.try_recv().unwrap();
    harness.driver.handle_request(asked, &mut harness.batch);
    let demand = telling.await.unwrap()[&name(0)];
    assert!(
        demand.in_flight == 0 && demand.last_request > Tick(0),
        "its gate knows when it ended: {demand:?}"
    );
}

#[tokio::test]
async fn what_is_shown_when_the_driver_has_ended_is_its_end() {
    let harness = DriverHarness::new(3, 1);
    let handle = harness.handle.clone();
    handle.send_event(Event::Shutdown { stop_engines: false });
    harness.driver.run(None).await;
    handle.refresh().await;
    assert_eq!(handle.view().models.len(), 3);
    assert_eq!(handle.learned().await.len(), 3);
    handle.update_gauges().await;
    assert!(handle.metrics().encode().contains("rouse_model_state{model=\"model-00002\",state=\"cold\"} 1"));
}

#[tokio::test]
async fn an_order_is_validated_after_all_events_sent_before_it() {
    let mut harness = DriverHarness::new(1, 1);
    let handle = harness.handle.clone();
    handle.send_event(configured(2, 1, 0));
    // The model does not exist before this event is processed.
    let order = tokio::spawn(async move { handle.submit_order(name(1), OperatorAction::Stop).await });
    tokio::task::yield_now().await;
    while !order.is_finished() {
        harness.step().await;
        tokio::task::yield_now().await;
    }
    order.await.unwrap().unwrap();
}

#[tokio::test]
async fn an_order_behind_more_events_than_a_turn_takes_is_validated_after_all_of_them() {
    const EVENTS: usize = 3 * MAX_PLATFORM_EVENTS_PER_TURN;
    let mut harness = DriverHarness::new(1, 1);
    let (sender, events) = mpsc::channel(EVENTS);
    harness.driver.events = events;
    for _ in 1..EVENTS {
        sender.try_send(Event::GenerationFloor { generation: Generation(1) }).unwrap();
    }
    // The model does not exist before this event is processed.
    sender.try_send(configured(2, 1, 0)).unwrap();
    let handle = harness.handle.clone();
    let order = tokio::spawn(async move { handle.submit_order(name(1), OperatorAction::Stop).await });
    while harness.driver.requests.is_empty() {
        tokio::task::yield_now().await;
    }
    while !order.is_finished() {
        harness.step().await;
        tokio::task::yield_now().await;
    }
    order.await.unwrap().unwrap();
}
