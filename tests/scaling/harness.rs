//! Worlds with scaled models, and the commands of their fleets.

use std::collections::BTreeMap;

use rouse::{
    engine::state::LifecycleState,
    fleet::{
        command::{CloseReason, Command},
        report::VariantReport,
    },
    journal,
    model::{
        Accelerator, AcceleratorRequirement, EngineId, EngineMemory, EngineVariant, FleetConfig,
        FleetSettings, ModelSpec, VariantName,
    },
    sim::{Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, simulated_model},
    units::{Bytes, Millis},
};

pub(crate) fn memory(gib: u64) -> EngineMemory {
    EngineMemory { awake: Bytes::gib(gib), asleep: Bytes::mib(256), host: Bytes::gib(1) }
}

pub(crate) fn model(name: &str, replicas: u32) -> ModelSpec {
    ModelSpec { replicas, can_sleep: false, ..simulated_model(name, memory(20)) }
}

/// A model whose targets say how many engines run.
pub(crate) fn scaled(name: &str, replicas: u32) -> ModelSpec {
    ModelSpec { scaled: true, ..model(name, replicas) }
}

/// Accelerators that each hold one engine.
pub(crate) fn base_scenario(gpus: usize, models: Vec<ModelSpec>) -> Scenario {
    with_accelerators(&vec![24; gpus], models)
}

pub(crate) fn with_accelerators(gib: &[u64], models: Vec<ModelSpec>) -> Scenario {
    let settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    let gpu = |(n, gib): (usize, &u64)| Accelerator {
        metered: true,
        ..Accelerator::new(format!("gpu-{n}").into(), Bytes::gib(*gib))
    };
    let accelerators = gib.iter().enumerate().map(gpu).collect();
    Scenario::new("scaling", FleetConfig { settings, accelerators, models })
}

/// A cheap variant on gpu-0 and a dear one, with twice its memory, on gpu-1.
pub(crate) fn with_variants(name: &str) -> ModelSpec {
    let on = |gpu: &str, gib| ModelSpec {
        accelerators: AcceleratorRequirement::Ids(vec![gpu.into()]),
        memory: memory(gib),
        fingerprint: gib,
        ..scaled(name, 1)
    };
    let (cheap, dear) = (on("gpu-0", 20), on("gpu-1", 40));
    let variants = vec![
        EngineVariant::from_spec("h100".into(), 5.0, &dear),
        EngineVariant::from_spec("l4".into(), 1.0, &cheap),
    ];
    ModelSpec { variants, ..cheap }
}

pub(crate) fn request(model: &str, seconds: u64) -> ScenarioAction {
    ScenarioAction::SendRequest(SimulatedRequest::stream(model, Millis::secs(seconds)))
}

pub(crate) fn target(model: &str, replicas: u32) -> ScenarioAction {
    ScenarioAction::SetTarget(model.into(), VariantName::default(), replicas)
}

pub(crate) fn engine(model: &str, replica: u32) -> EngineId {
    EngineId::new(model.into(), replica)
}

pub(crate) fn variant_engine(variant: &str) -> EngineId {
    EngineId::of_variant("qwen".into(), variant.into(), 0)
}

pub(crate) fn simulated(scenario: Scenario) -> SimulatedWorld {
    SimulatedWorld::new(scenario).with_journal()
}

/// Runs the world until this many seconds after its start.
pub(crate) fn until(world: &mut SimulatedWorld, seconds: u64) {
    world.run_until(Millis::secs(seconds)).unwrap_or_else(|failure| panic!("{failure}"));
}

pub(crate) fn awake(world: &SimulatedWorld) -> Vec<String> {
    let awake = world.fleet().engines().filter(|e| e.state == LifecycleState::Awake);
    awake.map(|e| e.id.to_string()).collect()
}

pub(crate) fn variants(world: &SimulatedWorld, model: &str) -> BTreeMap<VariantName, VariantReport> {
    world.fleet().variants(&world.fleet().plan(world.now()), &model.into())
}

pub(crate) fn default_variant(world: &SimulatedWorld, model: &str) -> VariantReport {
    variants(world, model).remove(VariantName::DEFAULT).expect("it is configured")
}

/// All issued commands, with seconds since the start of the world, as the journal's text replays them.
pub(crate) fn commands(world: &SimulatedWorld) -> Vec<(f64, Command)> {
    let mut all = Vec::new();
    let start = world.journal()[0].at();
    let lines: Vec<journal::JournalLine> = world
        .journal()
        .iter()
        .map(|line| {
            serde_json::from_str(&journal::write(line).expect("a line is written")).expect("a line is read")
        })
        .collect();
    assert!(lines == world.journal(), "a journal is read as it was written");
    journal::replay(&lines, |at, _, plan, _| {
        let after = at.since(start).0 as f64 / 1000.0;
        all.extend(plan.commands.iter().map(|command| (after, command.clone())));
    });
    all
}

/// When the gate of this engine first closed for this reason.
pub(crate) fn closed_at(world: &SimulatedWorld, of: &EngineId, why: CloseReason) -> Option<f64> {
    let mut closed = commands(world).into_iter().filter(
        |(_, c)| matches!(c, Command::CloseGate { engine, reason, .. } if engine == of && *reason == why),
    );
    closed.next().map(|(at, _)| at)
}

pub(crate) fn launched(world: &SimulatedWorld) -> Vec<String> {
    let launches = commands(world).into_iter().filter_map(|(_, command)| match command {
        Command::Launch { engine, accelerators, bytes, .. } => {
            Some(format!("{engine} on {} with {bytes}", accelerators[0]))
        }
        _ => None,
    });
    launches.collect()
}
