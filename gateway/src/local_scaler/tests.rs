//! Tests with a fleet that takes its turns at once, at times that the tests choose.

use std::sync::Mutex;

use prometheus::{Registry, TextEncoder};
use rouse::{
    fleet::{
        command::Command,
        event::{AdoptedEngine, GatewayDemand},
    },
    model::{Accelerator, EngineMemory, FleetConfig, FleetSettings, ModelSpec},
    saturation::{SaturationPolicy, Thresholds},
    sim::simulated_model,
    units::{Bytes, Generation},
};
use rouse_config::SaturationConfig;
use rouse_net::{engine_load::EngineLoad, lease::TickClock};
use rouse_platform::EngineActivity;

use super::*;

const START: Tick = Tick(1_780_000_000_000);
const MODEL: &str = "qwen";

/// A fleet, and what it was sent.
#[derive(Default)]
struct InlineTurns {
    fleet: Fleet,
    plan: Plan,
    now: Tick,
    targets: Vec<u32>,
    reads: usize,
}

impl InlineTurns {
    fn take(&mut self, events: &[Event]) {
        events.iter().for_each(|event| self.fleet.on(event, self.now));
        self.plan = self.fleet.plan(self.now);
        self.fleet.issued(&self.plan.commands, self.now);
    }
}

#[derive(Clone)]
struct InlineDriver {
    clock: TickClock,
    turns: Arc<Mutex<InlineTurns>>,
}

impl DriverClient for InlineDriver {
    fn send_event(&self, event: Event) {
        let mut turns = self.turns.lock().unwrap();
        match &event {
            Event::Desired { replicas, .. } => turns.targets.push(*replicas),
            other => panic!("{other:?}"),
        }
        turns.take(&[event]);
    }

    fn clock(&self) -> TickClock {
        self.clock
    }

    async fn read_fleet<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Fleet, &Plan) -> T + Send + 'static,
    ) -> Option<T> {
        let mut turns = self.turns.lock().unwrap();
        turns.reads += 1;
        Some(read(&turns.fleet, &turns.plan))
    }

    async fn demand(&self, _: Option<BTreeSet<ModelName>>) -> BTreeMap<ModelName, GatewayDemand> {
        BTreeMap::new()
    }
}

/// Has the loads that a test sets.
#[derive(Default)]
struct ReportingEngines(Mutex<BTreeMap<EngineId, Arc<EngineActivity>>>);

impl Platform for ReportingEngines {
    fn submit(&self, _: Command) {}

    fn engine_activity(&self, engine: &EngineId, _: Generation) -> Arc<EngineActivity> {
        Arc::clone(self.0.lock().unwrap().entry(engine.clone()).or_default())
    }
}

struct ScalerScene {
    scaler: LocalScaler<InlineDriver>,
    engines: Arc<ReportingEngines>,
    turns: Arc<Mutex<InlineTurns>>,
    reloads: watch::Sender<LocalSaturation>,
    registry: Registry,
    now: Tick,
}

impl ScalerScene {
    /// A gateway that has adopted this many engines of the model, which may have three.
    fn adopted(engines: u32) -> Self {
        let scene = Self::starting();
        let adopted = (0..engines).map(adopted);
        scene.turns.lock().unwrap().take(&adopted.chain([Event::AdoptionDone]).collect::<Vec<_>>());
        scene
    }

    /// A gateway that does not know yet what runs.
    fn starting() -> Self {
        let turns = Arc::new(Mutex::new(InlineTurns { now: START, ..InlineTurns::default() }));
        turns.lock().unwrap().take(&[configured()]);
        let clock = TickClock::new(time::Instant::now(), START);
        let driver = InlineDriver { clock, turns: Arc::clone(&turns) };
        let (engines, registry) = (Arc::<ReportingEngines>::default(), Registry::new());
        let (reloads, reloaded) = watch::channel(scaled());
        let platform = Arc::clone(&engines) as Arc<dyn Platform>;
        let mut scaler = LocalScaler::new(driver, platform, SaturationMetrics::new(&registry), reloaded);
        scaler.apply_config(START);
        Self { scaler, engines, turns, reloads, registry, now: START }
    }

    /// Each of these engines reports this use of its KV cache.
    fn report(&self, engines: u32, kv_use: f64) {
        let load = EngineLoad { kv_use: Some(kv_use), waiting: Some(0.0), running: None };
        for replica in 0..engines {
            let engine = EngineId::new(MODEL.into(), replica);
            self.engines.engine_activity(&engine, Generation(1)).record_load(&load, self.now);
        }
    }

    /// Takes the turns of this many seconds, one each 5 s, with these reports.
    async fn pass(&mut self, seconds: u64, engines: u32, kv_use: f64) {
        for _ in 0..seconds / 5 {
            self.report(engines, kv_use);
            assert!(self.scaler.take_turn(self.now).await.is_ok());
            self.now = self.now + Millis::secs(5);
            self.turns.lock().unwrap().now = self.now;
        }
    }

    fn targets(&self) -> Vec<u32> {
        self.turns.lock().unwrap().targets.clone()
    }

    fn metrics(&self) -> String {
        TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap()
    }
}

fn scaled() -> LocalSaturation {
    let policy = SaturationPolicy { stabilisation: Millis::secs(60), ..SaturationPolicy::default() };
    let model = ModelSaturation { policy, thresholds: Thresholds::default() };
    LocalSaturation { settings: SaturationConfig::default(), models: BTreeMap::from([(MODEL.into(), model)]) }
}

fn configured() -> Event {
    let accelerator = |n: u32| Accelerator::new(format!("gpu-{n}").into(), Bytes::gib(24));
    let memory = EngineMemory { awake: Bytes::gib(20), asleep: Bytes::gib(1), host: Bytes::gib(1) };
    let model = ModelSpec { replicas: 3, scaled: true, ..simulated_model(MODEL, memory) };
    let configuration = FleetConfig {
        settings: FleetSettings::default(),
        accelerators: (0..3).map(accelerator).collect(),
        models: vec![model],
    };
    Event::Configured { configuration: Box::new(configuration) }
}

fn adopted(replica: u32) -> Event {
    let found = AdoptedEngine {
        address: ([127, 0, 0, 1], 9).into(),
        accelerators: vec![format!("gpu-{replica}").into()],
        asleep: None,
        ready: true,
        fingerprint: 1,
        last_lease_end: START,
        started: START,
    };
    Event::Adopted { engine: EngineId::new(MODEL.into(), replica), generation: Generation(1), found }
}

#[tokio::test]
async fn a_full_engine_gets_a_second_one_at_the_next_decision_and_the_metrics_show_it() {
    let mut scene = ScalerScene::adopted(1);
    scene.pass(15, 1, 0.4).await;
    assert_eq!(scene.targets(), [1], "what runs, with the first reading");
    scene.pass(15, 1, 0.95).await;
    assert_eq!(scene.targets(), [1, 2]);
    for line in [
        "rouse_desired_replicas{model=\"qwen\",namespace=\"local\",variant=\"default\"} 2",
        "rouse_current_replicas{model=\"qwen\",namespace=\"local\",variant=\"default\"} 1",
        "rouse_saturation_readings_total{outcome=\"done\",source=\"engines\"} 6",
    ] {
        assert!(scene.metrics().lines().any(|found| found == line), "{line} in\n{}", scene.metrics());
    }
    let turns = scene.turns.lock().unwrap();
    let report = turns.fleet.variants(&turns.plan, &MODEL.into()).remove(VariantName::DEFAULT).unwrap();
    let reason = report.target_reason.unwrap();
    assert!(report.target == Some(2) && reason.contains("too little KV cache is spare"), "{reason}");
}

#[tokio::test]
async fn an_engine_that_is_not_needed_goes_after_the_stabilisation_and_not_while_a_load_is_unknown() {
    let mut scene = ScalerScene::adopted(2);
    scene.pass(60, 2, 0.1).await;
    assert_eq!(scene.targets(), [2]);
    scene.pass(5, 2, 0.1).await;
    assert_eq!(scene.targets(), [2, 1]);

    let mut silent = ScalerScene::adopted(2);
    silent.pass(600, 1, 0.1).await;
    assert_eq!(silent.targets(), [2], "the other one may be full");
}

#[tokio::test]
async fn nothing_is_decided_before_the_gateway_knows_what_runs() {
    let mut scene = ScalerScene::starting();
    scene.pass(5, 0, 0.0).await;
    assert!(scene.targets().is_empty());
    assert_eq!(scene.scaler.next_reading, START + ADOPTION_POLL_INTERVAL);
    scene.turns.lock().unwrap().take(&[adopted(0), adopted(1), Event::AdoptionDone]);
    scene.pass(5, 2, 0.5).await;
    assert_eq!(scene.targets(), [2]);
}

#[tokio::test]
async fn a_model_that_a_reload_no_longer_scales_has_no_series() {
    let mut scene = ScalerScene::adopted(1);
    scene.pass(5, 1, 0.4).await;
    assert!(scene.metrics().contains("model=\"qwen\""), "{}", scene.metrics());
    scene.reloads.send_replace(LocalSaturation::default());
    scene.scaler.apply_config(scene.now);
    assert!(!scene.metrics().contains("model=\"qwen\""), "{}", scene.metrics());
}

#[tokio::test]
async fn a_reload_is_decided_at_once() {
    let mut scene = ScalerScene::adopted(1);
    scene.pass(10, 1, 0.6).await;
    assert_eq!(scene.targets(), [1]);
    let mut strict = scaled();
    strict.models.values_mut().for_each(|model| model.thresholds.kv_cache = 0.5);
    scene.reloads.send_replace(strict);
    scene.scaler.apply_config(scene.now);
    assert_eq!(scene.scaler.next_reading, scene.now);
    scene.pass(5, 1, 0.6).await;
    assert_eq!(scene.targets(), [1, 2]);
}

#[tokio::test]
async fn without_a_scaled_model_the_task_reads_nothing_and_ends_with_the_application() {
    let ScalerScene { scaler, turns, reloads, .. } = ScalerScene::adopted(1);
    reloads.send_replace(LocalSaturation::default());
    let task = tokio::spawn(scaler.run());
    tokio::task::yield_now().await;
    drop(reloads);
    task.await.unwrap();
    assert_eq!(turns.lock().unwrap().reads, 0);
}
