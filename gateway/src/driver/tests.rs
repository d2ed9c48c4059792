//! Tests the driver's turns. Their cost must not grow with what a turn does not touch.

use futures_util::FutureExt as _;
use rouse::{
    driver::MAX_PLATFORM_EVENTS_PER_TURN,
    engine::saturation_limit::MAX_LIMIT_AGE,
    fault::Fault,
    fleet::{
        command::Command,
        event::{AdoptedEngine, LearnedMeasurements, OperatorAction, PublishedEngine, PublishedEngineState},
        quote::{LearnedTimes, TimeEstimate, WaitRange},
    },
    model::{
        Accelerator, AcceleratorId, EngineId, EngineMemory, FleetConfig, FleetSettings, ModelName, ModelSpec,
    },
    sim::simulated_model,
    units::{Bytes, Generation, Tick},
};
use rouse_net::{
    engine_load::EngineLoad,
    lease::{Lease, TickClock},
};
use tokio::time::Instant;

use rouse_platform::{DriverClient as _, Platform};

use super::{
    handle::{MAX_IN_TRANSIT, REQUEST_QUEUE_CAPACITY},
    *,
};
use crate::{metrics::Metrics, routing::RouteTable};

const MODELS: usize = 500;
const START: Tick = Tick(1_000_000_000);

/// Executes no command.
struct InertPlatform;

impl Platform for InertPlatform {
    fn submit(&self, _: Command) {}
}

/// Records its commands, and has stub gates.
#[derive(Default)]
struct StubGatePlatform(std::sync::Mutex<Vec<Command>>);

impl Platform for StubGatePlatform {
    fn submit(&self, command: Command) {
        self.0.lock().unwrap().push(command);
    }

    fn has_stub_gates(&self) -> bool {
        true
    }
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
        let arrived = self.handle.clock().now();
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

fn configured(models: usize, awake: usize, priority: i32) -> Event {
    let gpu = |n| Accelerator::new(gpu(n), Bytes::gib(24));
    let accelerators = (0..awake).map(gpu).collect();
    let models = (0..models).map(|n| model(n, if n == 7 { priority } else { 0 })).collect();
    let configuration = FleetConfig { settings: FleetSettings::default(), accelerators, models };
    Event::Configured { configuration: Box::new(configuration) }
}

fn adopted(n: usize) -> Event {
    let found = AdoptedEngine {
        address: ([127, 0, 0, 1], 9).into(),
        accelerators: vec![gpu(n)],
        asleep: None,
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

fn name(n: usize) -> ModelName {
    format!("model-{n:05}").into()
}

fn gpu(n: usize) -> AcceleratorId {
    format!("gpu-{n}").into()
}

#[tokio::test]
async fn who_waits_and_is_granted_a_place_makes_nothing_anew_that_others_read() {
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
async fn a_report_of_a_saturated_engine_holds_requests_here_and_a_lower_one_lets_them_go() {
    let mut harness = DriverHarness::new(1, 1);
    let Event::Configured { mut configuration } = configured(1, 1, 0) else { unreachable!() };
    configuration.models[0].max_concurrency = Some(9);
    harness.turn([Event::Configured { configuration }]);
    let endpoint = harness.routes().models.get(&name(0)).unwrap().endpoints[0].clone();
    let clock = harness.handle.clock();
    let report = |kv_use, waiting| {
        let load = EngineLoad { kv_use: Some(kv_use), waiting: Some(waiting), running: None };
        endpoint.activity.record_load(&load, clock.now());
    };
    let [first, _second] = [harness.lease(0), harness.lease(0)];
    report(0.9, 1.0);
    let _parked = [harness.park(0), harness.park(0)];
    while harness.driver.core.fleet().waiting(&name(0)) < 2 {
        harness.step().await;
    }
    harness.turn([]);
    assert_eq!(
        harness.driver.core.fleet().waiting(&name(0)),
        2,
        "the engine has as many requests as it may have"
    );
    drop(first);
    harness.step().await;
    assert_eq!(harness.driver.core.fleet().waiting(&name(0)), 1, "one has ended");
    report(0.1, 0.0);
    harness.step().await;
    assert_eq!(harness.driver.core.fleet().waiting(&name(0)), 0);
}

#[tokio::test]
async fn of_the_reports_of_a_saturated_engine_the_driver_takes_those_that_change_or_renew_its_limit() {
    let mut harness = DriverHarness::new(1, 1);
    let Event::Configured { mut configuration } = configured(1, 1, 0) else { unreachable!() };
    configuration.models[0].max_concurrency = Some(9);
    harness.turn([Event::Configured { configuration }]);
    let endpoint = harness.routes().models.get(&name(0)).unwrap().endpoints[0].clone();
    let _held = harness.lease(0);
    harness.turn([]);
    let begin = harness.handle.clock().now();
    let report = |kv_use, waiting, now| {
        let load = EngineLoad { kv_use: Some(kv_use), waiting: Some(waiting), running: None };
        endpoint.activity.record_load(&load, now);
    };
    let is_woken = |harness: &DriverHarness| harness.driver.platform.gates.changed().now_or_never().is_some();
    let event = |harness: &mut DriverHarness, now| {
        let mut batch = Vec::new();
        harness.driver.platform.gates.sample(&mut batch, true, now);
        batch.into_iter().find_map(|event| match event {
            Event::SaturationChanged { limit, .. } => Some(limit.map(|limit| (limit.leases, limit.until))),
            _ => None,
        })
    };
    is_woken(&harness);
    report(0.9, 1.0, begin);
    assert!(is_woken(&harness));
    let until = begin + MAX_LIMIT_AGE;
    assert_eq!(event(&mut harness, begin), Some(Some((Some(1), until))));

    let second = begin + Millis::secs(2);
    report(0.97, 2.0, second);
    assert!(!is_woken(&harness), "the limit is as before");
    assert_eq!(event(&mut harness, second), None);
    let renewed = second + MAX_LIMIT_AGE;
    assert_eq!(event(&mut harness, until), Some(Some((Some(1), renewed))), "the fleet's copy ends now");

    let third = until + Millis(1);
    report(0.97, 0.0, third);
    assert!(is_woken(&harness), "the engine may have more");
    assert_eq!(event(&mut harness, third), Some(Some((Some(6), third + MAX_LIMIT_AGE))));
    report(0.1, 0.0, third);
    assert!(is_woken(&harness));
    assert_eq!(event(&mut harness, third), Some(None));
}

#[tokio::test]
async fn an_engine_is_saturated_by_the_thresholds_of_its_model_also_after_a_reload() {
    let mut harness = DriverHarness::new(1, 1);
    let endpoint = harness.routes().models.get(&name(0)).unwrap().endpoints[0].clone();
    let clock = harness.handle.clock();
    let is_saturated = |kv_use| {
        endpoint.activity.clear_load();
        let load = EngineLoad { kv_use: Some(kv_use), waiting: Some(0.0), running: None };
        endpoint.activity.record_load(&load, clock.now());
        endpoint.activity.saturation().is_saturated(|| clock.now())
    };
    assert!(is_saturated(0.85) && !is_saturated(0.75));
    let Event::Configured { mut configuration } = configured(1, 1, 0) else { unreachable!() };
    configuration.models[0].saturation_thresholds.kv_cache = 0.95;
    harness.turn([Event::Configured { configuration }]);
    assert!(is_saturated(0.96) && !is_saturated(0.85));
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
async fn the_gate_of_a_life_that_ended_is_kept_until_its_last_lease_is_gone() {
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
        "nor for what other gateways are told"
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
async fn an_order_is_judged_by_all_that_was_heard_before_it() {
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
async fn an_order_behind_more_events_than_a_turn_takes_is_judged_by_all_of_them() {
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

/// Parks a request. A granted lease is dropped at once.
fn park_briefly(harness: &DriverHarness) -> tokio::task::JoinHandle<Result<(), Fault>> {
    let (handle, request) = (harness.handle.clone(), harness.request(0));
    tokio::spawn(async move { handle.park(request).await.map(drop) })
}

#[tokio::test]
async fn what_waits_for_a_driver_that_is_held_up_is_bounded_and_none_of_it_is_lost() {
    let mut harness = DriverHarness::new(1, 1);
    let places = harness.driver.core.fleet().max_waiting() + MAX_IN_TRANSIT;
    let mut parked: Vec<_> = (0..places + 5).map(|_| park_briefly(&harness)).collect();
    while !parked[places..].iter().all(|request| request.is_finished()) {
        tokio::task::yield_now().await;
    }
    for refused in parked.drain(places..) {
        assert!(matches!(refused.await.unwrap(), Err(Fault::QueueFull { .. })));
    }
    assert_eq!(harness.driver.requests.len(), REQUEST_QUEUE_CAPACITY, "the others wait for room");
    assert!(!parked.iter().any(|request| request.is_finished()));

    // Of those that leave, the driver receives the ones that are in the channel.
    let mut staying = parked.split_off(places / 2);
    for request in &mut parked {
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
    }
    let (mut arrived, mut left) = (0, 0);
    while arrived < REQUEST_QUEUE_CAPACITY + staying.len() {
        let counts = harness.receive().await;
        (arrived, left) = (arrived + counts.0, left + counts.1);
    }
    assert_eq!((arrived, left), (REQUEST_QUEUE_CAPACITY + staying.len(), REQUEST_QUEUE_CAPACITY));

    // Those that the driver knows keep their places until it has received that they left.
    for request in &mut staying {
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
    }
    let free = places - staying.len();
    let next: Vec<_> = (0..=free).map(|_| park_briefly(&harness)).collect();
    while !next[free].is_finished() {
        tokio::task::yield_now().await;
    }
    assert!(!next[..free].iter().any(|request| request.is_finished()));
    while left < REQUEST_QUEUE_CAPACITY + staying.len() {
        left += harness.receive().await.1;
    }
    assert_eq!(left, REQUEST_QUEUE_CAPACITY + staying.len());
    let request = harness.request(0);
    assert!(harness.handle.park(request).now_or_never().is_none(), "there are places again");
}

#[tokio::test]
async fn the_places_of_a_crowd_that_has_its_answers_are_all_released_without_a_turn() {
    const CROWD: usize = 3 * MAX_REQUESTS_PER_TURN;
    let mut harness = DriverHarness::new(1, 1);
    let parked: Vec<_> = (0..CROWD).map(|_| park_briefly(&harness)).collect();
    while harness.driver.requests.len() < CROWD {
        tokio::task::yield_now().await;
    }
    while !harness.driver.requests.is_empty() {
        harness.step().await;
    }
    harness.turn([Event::Shutdown { stop_engines: false }]);
    for request in parked {
        drop(request.await.unwrap());
    }
    harness.batch.clear();
    assert!(!harness.driver.take_reports(&mut harness.batch), "nothing is left to decide");
    let rest = harness.driver.shared.reports.take(&mut harness.batch, usize::MAX);
    assert!(rest.is_empty(), "{} places are still taken", rest.len());
}

#[tokio::test]
async fn what_waits_for_a_driver_that_has_ended_is_refused() {
    let harness = DriverHarness::new(1, 1);
    let parked: Vec<_> = (0..REQUEST_QUEUE_CAPACITY + 5).map(|_| park_briefly(&harness)).collect();
    while harness.driver.requests.len() < REQUEST_QUEUE_CAPACITY {
        tokio::task::yield_now().await;
    }
    let request = harness.request(0);
    let DriverHarness { handle, driver, .. } = harness;
    drop(driver);
    for request in parked {
        assert_eq!(request.await.unwrap(), Err(Fault::ShuttingDown));
    }
    assert_eq!(handle.park(request).await.map(drop), Err(Fault::ShuttingDown));
    handle.send_event(Event::ApiServerChanged { answers: true });
    handle.refresh().await;
    let refused = handle.submit_order(name(0), OperatorAction::Stop).await.unwrap_err();
    assert!(refused.contains("shutting down"), "{refused}");
}

fn published(state: PublishedEngineState) -> Event {
    let engine = EngineId::new(name(0), 0);
    let (address, accelerators) = (Some(([127, 0, 0, 1], 9).into()), vec![gpu(0)]);
    let published =
        PublishedEngine { state, address, fingerprint: 1, accelerators, since: START, failure: None };
    Event::Published { engine, generation: Generation(1), published: Some(published) }
}

#[tokio::test]
async fn the_gates_of_a_gateway_that_does_not_lead_are_as_is_published() {
    let mut harness = DriverHarness::new(2, 1);
    let gate = Arc::clone(&harness.routes().models.get(&name(0)).unwrap().endpoints[0].gate);
    let lease = harness.lease(0);
    harness.turn([Event::LeadershipChanged { leads: false }]);
    assert!(gate.is_open(), "what was awake goes on serving");
    harness.turn([published(PublishedEngineState::Draining)]);
    assert!(harness.routes().models.get(&name(0)).unwrap().endpoints.is_empty() && !gate.is_open());
    assert_eq!(gate.leases(), 1, "whoever is inside stays");
    let waiting = harness.park(0);
    harness.step().await;
    assert!(!waiting.is_finished());
    drop(lease);
    harness.turn([published(PublishedEngineState::Awake)]);
    drop(waiting.await.unwrap());
    assert!(gate.is_open() && harness.routes().models.get(&name(0)).unwrap().endpoints.len() == 1);
    harness.turn([Event::LeadershipChanged { leads: true }]);
    assert!(gate.is_open() && harness.routes().ready, "and so does what is taken over");
    harness.turn([adopted(0), Event::AdoptionDone]);
    assert!(
        Arc::ptr_eq(&gate, &harness.routes().models.get(&name(0)).unwrap().endpoints[0].gate)
            && gate.is_open()
    );
}

#[tokio::test]
async fn a_gate_that_all_pass_is_moved_by_the_gateway_that_leads() {
    let platform = Arc::new(StubGatePlatform::default());
    let mut harness = DriverHarness::on(Arc::clone(&platform) as _, 2, 1);
    let take_calls = || std::mem::take(&mut *platform.0.lock().unwrap());
    assert!(matches!(take_calls()[..], [Command::OpenGate { .. }]));
    let operation = harness.driver.shared.begin(name(0), OperatorAction::Stop);
    harness.turn([Event::OperatorRequest { operation, model: name(0), action: OperatorAction::Stop }]);
    assert!(matches!(take_calls()[..], [Command::CloseGate { .. }, Command::RevokeLeases { .. }]));
    harness.turn([]);
    assert!(take_calls().is_empty(), "whether it is drained the platform tells, for all who pass");
    harness.turn([Event::LeadershipChanged { leads: false }]);
    harness.turn([published(PublishedEngineState::Awake)]);
    harness.turn([published(PublishedEngineState::Draining)]);
    assert!(take_calls().is_empty(), "its own gate is nobody else's");
    harness.driver.platform.gates.sample(&mut harness.batch, false, START);
    assert!(matches!(harness.batch[..], [Event::Drained { .. }]), "{:?}", harness.batch);
}

/// Covers a stub that is drained while the gateway still sends the end of a stream.
#[tokio::test]
async fn what_the_platform_calls_drained_is_left_alone_until_who_is_inside_here_has_gone() {
    let platform = Arc::new(StubGatePlatform::default());
    let mut harness = DriverHarness::on(Arc::clone(&platform) as _, 2, 1);
    let take_calls = || std::mem::take(&mut *platform.0.lock().unwrap());
    let lease = harness.lease(0);
    let operation = harness.driver.shared.begin(name(0), OperatorAction::Stop);
    harness.turn([Event::OperatorRequest { operation, model: name(0), action: OperatorAction::Stop }]);
    take_calls();
    let (engine, generation) = (EngineId::new(name(0), 0), Generation(1));
    harness.turn([Event::Drained { engine, generation }]);
    assert!(take_calls().is_empty());
    drop(lease);
    harness.turn([]);
    assert!(matches!(take_calls()[..], [Command::Stop { .. }]));
}

#[tokio::test]
async fn a_request_that_waits_is_quoted_once_and_requests_read_its_wait_without_the_driver() {
    let mut harness = DriverHarness::new(2, 1);
    // The second model gets an accelerator of its own.
    harness.turn([configured(2, 2, 0)]);
    let known = TimeEstimate { mean: Millis::secs(40), deviation: Millis::secs(2) };
    let times = LearnedTimes { start: Some(known), ..LearnedTimes::default() };
    let learned = LearnedMeasurements { times, ..LearnedMeasurements::default() };
    harness.turn([Event::MeasurementsRestored { model: name(1), variant: Default::default(), learned }]);
    assert_eq!(harness.handle.expected_wait(&name(1)), None, "no request waits");
    let (handle, request) = (harness.handle.clone(), harness.request(1));
    let quoted = Arc::clone(&request.quoted);
    let waiting = tokio::spawn(async move { drop(handle.park(request).await) });
    tokio::task::yield_now().await;
    harness.step().await;
    let quote = quoted.get().copied().expect("a quote");
    assert_eq!(quote.likely, Millis::secs(40));
    let left = harness.handle.expected_wait(&name(1)).expect("it waits");
    assert!(left.high <= quote.high && left.likely > Millis::secs(30), "{left:?}");
    let handle = harness.handle.clone();
    let listed = tokio::spawn(async move { handle.expected_waits().await });
    tokio::task::yield_now().await;
    assert!(harness.driver.receive(&mut harness.batch).now_or_never().is_none(), "it takes no turn");
    let listed = listed.await.unwrap();
    assert_eq!(listed.get(&name(0)).map(|forecast| forecast.range), Some(WaitRange::ZERO));
    assert_eq!(listed.get(&name(1)).map(|forecast| forecast.range.likely), Some(Millis::secs(40)));
    waiting.abort();
}
