//! Scripted worlds, one for each behaviour worth showing. Their transcripts are golden: see `tests/scenarios.rs`.

mod dependencies;

use super::{Scenario, ScenarioAction};
use crate::{
    fleet::event::OperatorAction,
    model::{
        Accelerator, AcceleratorRequirement, DrainDeadlinePolicy, EngineId, EngineMemory, FleetConfig,
        FleetSettings, ModelSpec,
    },
    sim::{client::SimulatedRequest, simulated_model},
    units::{Bytes, Millis},
};

/// A scenario and its duration.
pub type ScriptedScenario = (Scenario, Millis);

/// Every script.
#[must_use]
pub fn all() -> Vec<ScriptedScenario> {
    let mut all = vec![
        two_models_on_one_gpu(),
        alternating_bursts(),
        a_pinned_model_in_the_way(),
        two_victims_for_a_model_on_two_gpus(),
        memory_that_comes_back_late(),
        a_wake_that_fails(),
        a_start_that_fails(),
        a_busy_model_gives_up_its_turn(),
        a_stream_outlasts_its_turn(),
        two_replicas_share_the_load(),
        a_replica_makes_room(),
        replicas_by_reload(),
        two_keys_take_turns(),
        a_stub_closes_its_gate(),
        a_stub_that_never_opens(),
    ];
    all.extend(dependencies::all());
    all
}

/// Neither model fits beside the other: the first is put to sleep for the second, and woken again.
fn two_models_on_one_gpu() -> ScriptedScenario {
    let scenario = base_scenario("two-models-on-one-gpu", 1, vec![model("qwen", 20), model("llama", 20)]);
    let scenario = with_request(scenario, 1, "qwen", 2);
    let scenario = with_request(scenario, 30, "llama", 2);
    (with_request(scenario, 60, "qwen", 2), Millis::secs(70))
}

/// Bursts of five requests every three seconds alternate between two models. A swap per burst would be thrash.
fn alternating_bursts() -> ScriptedScenario {
    let mut scenario = base_scenario("alternating-bursts", 1, vec![model("qwen", 20), model("llama", 20)]);
    for burst in 0..12 {
        let name = if burst % 2 == 0 { "qwen" } else { "llama" };
        for request in 0..5 {
            let after = Millis(1000 + burst * 3000 + request * 20);
            scenario =
                scenario.at(after, ScenarioAction::SendRequest(SimulatedRequest::stream(name, Millis(500))));
        }
    }
    (scenario, Millis::secs(60))
}

/// A request waits in vain for a pinned model's memory. After the unpin, the next one is served.
fn a_pinned_model_in_the_way() -> ScriptedScenario {
    let mut pinned = model("llama", 20);
    pinned.pinned = true;
    let mut scenario = base_scenario("a-pinned-model-in-the-way", 1, vec![model("qwen", 20), pinned]);
    scenario.configuration.settings.queue.max_wait = Millis::secs(20);
    let scenario = with_request(scenario, 20, "qwen", 1);
    let scenario = with_request(scenario, 50, "qwen", 1);
    (
        scenario.at(Millis::secs(55), ScenarioAction::OperatorAction("llama".into(), OperatorAction::Unpin)),
        Millis::secs(75),
    )
}

/// Two idle models, one on each accelerator, make room for one that needs both.
fn two_victims_for_a_model_on_two_gpus() -> ScriptedScenario {
    let mut large = model("large", 18);
    large.accelerators = AcceleratorRequirement::Count(2);
    let models = vec![model("qwen", 20), model("llama", 20), large];
    let scenario = base_scenario("two-victims-for-a-model-on-two-gpus", 2, models);
    let scenario = with_request(scenario, 1, "qwen", 1);
    let scenario = with_request(scenario, 2, "llama", 3);
    (with_request(scenario, 30, "large", 1), Millis::secs(50))
}

/// The engine reports that it sleeps, but its memory is free only two seconds later. No engine is launched on the
/// report alone.
fn memory_that_comes_back_late() -> ScriptedScenario {
    let mut scenario =
        base_scenario("memory-that-comes-back-late", 1, vec![model("qwen", 20), model("llama", 20)]);
    scenario.configuration.settings.timeouts.meter_lag = Millis::secs(5);
    let scenario = with_request(scenario, 1, "qwen", 1);
    let late = ScenarioAction::DelayNextRelease(engine("qwen"), Millis::secs(2));
    (with_request(scenario.at(Millis::secs(20), late), 30, "llama", 1), Millis::secs(50))
}

/// The engine refuses to wake. It is stopped and started cold, and its waiters are served.
fn a_wake_that_fails() -> ScriptedScenario {
    let scenario = base_scenario("a-wake-that-fails", 1, vec![model("qwen", 20)]);
    let scenario = with_request(scenario, 1, "qwen", 1);
    let scenario = scenario
        .at(
            Millis::secs(20),
            ScenarioAction::OperatorAction("qwen".into(), OperatorAction::Sleep { level: None }),
        )
        .at(Millis::secs(25), ScenarioAction::RefuseNextWake(engine("qwen")));
    (with_request(scenario, 30, "qwen", 1), Millis::secs(50))
}

/// Starts fail: the waiters are refused, and the failure is remembered until the next request. Another model fits on no
/// accelerator.
fn a_start_that_fails() -> ScriptedScenario {
    let mut scenario = base_scenario("a-start-that-fails", 1, vec![model("qwen", 20), model("huge", 90)]);
    scenario.fault_rates.exit_at_start = 1.0;
    let scenario = with_request(with_request(scenario, 1, "qwen", 1), 2, "huge", 1);
    (with_request(scenario, 40, "qwen", 1), Millis::secs(60))
}

/// A model that is never idle has its turn. Then its gate closes, its streams finish, and the other has its turn.
fn a_busy_model_gives_up_its_turn() -> ScriptedScenario {
    let mut scenario =
        base_scenario("a-busy-model-gives-up-its-turn", 1, vec![model("qwen", 20), model("llama", 20)]);
    for n in 0..30 {
        scenario = scenario.at(
            Millis(1000 + n * 1500),
            ScenarioAction::SendRequest(SimulatedRequest::stream("qwen", Millis::secs(3))),
        );
    }
    (with_request(scenario, 15, "llama", 1), Millis::secs(65))
}

/// A stream runs longer than policy lets a drain last: it is cut.
fn a_stream_outlasts_its_turn() -> ScriptedScenario {
    let mut scenario =
        base_scenario("a-stream-outlasts-its-turn", 1, vec![model("qwen", 20), model("llama", 20)]);
    scenario.configuration.settings.turns.on_deadline = DrainDeadlinePolicy::Cut;
    let scenario = with_request(scenario, 1, "qwen", 120);
    (with_request(scenario, 15, "llama", 1), Millis::secs(60))
}

/// Two engines start for one burst, each on its own accelerator, and each takes half of it. Unused, both fall asleep.
fn two_replicas_share_the_load() -> ScriptedScenario {
    let mut twice = model("qwen", 20);
    twice.replicas = 2;
    twice.max_concurrency = Some(2);
    twice.idle.sleep_after = Some(Millis::secs(10));
    let scenario = base_scenario("two-replicas-share-the-load", 2, vec![twice]);
    let scenario = with_request(scenario, 1, "qwen", 4);
    let scenario = (0..5).fold(scenario, |scenario, _| with_request(scenario, 15, "qwen", 4));
    (scenario, Millis::secs(40))
}

/// The second engine has the only accelerator that another model could have. It gives way at once although in use, and
/// returns once the other model sleeps.
fn a_replica_makes_room() -> ScriptedScenario {
    let mut twice = model("qwen", 20);
    twice.replicas = 2;
    let mut other = model("llama", 20);
    other.idle.sleep_after = Some(Millis::secs(5));
    let scenario = base_scenario("a-replica-makes-room", 2, vec![twice, other]);
    let scenario = with_request(with_request(scenario, 1, "qwen", 30), 12, "qwen", 5);
    let scenario = with_request(scenario, 13, "llama", 2);
    (scenario, Millis::secs(50))
}

/// One engine becomes three while in use, and one again: the two surplus engines finish their streams first.
fn replicas_by_reload() -> ScriptedScenario {
    let scenario = base_scenario("replicas-by-reload", 3, vec![model("qwen", 20)]);
    let mut three = scenario.configuration.clone();
    three.models[0].replicas = 3;
    let one = scenario.configuration.clone();
    let mut scenario = with_request(scenario, 1, "qwen", 40);
    scenario = scenario.at(Millis::secs(15), ScenarioAction::ReloadConfig(Box::new(three)));
    for n in 0..3 {
        scenario = with_request(scenario, 26 + n, "qwen", 10);
    }
    (scenario.at(Millis::secs(30), ScenarioAction::ReloadConfig(Box::new(one))), Millis::secs(50))
}

/// Six requests of one key wait before the first of another arrives. The other key's request is still next.
fn two_keys_take_turns() -> ScriptedScenario {
    let mut narrow = model("qwen", 20);
    narrow.max_concurrency = Some(1);
    let mut scenario = base_scenario("two-keys-take-turns", 1, vec![narrow]);
    let request = |key: &str| SimulatedRequest {
        key: key.into(),
        tokens: 300,
        ..SimulatedRequest::stream("qwen", Millis::secs(2))
    };
    for n in 0..6 {
        scenario = scenario.at(Millis(1000 + n * 10), ScenarioAction::SendRequest(request("team-a")));
    }
    for n in 0..2 {
        scenario = scenario.at(Millis(12_000 + n * 10), ScenarioAction::SendRequest(request("team-b")));
    }
    (scenario, Millis::secs(30))
}

/// Streams run when the stub closes its gate. New requests wait, and are admitted in the order of their arrival when it
/// opens.
fn a_stub_closes_its_gate() -> ScriptedScenario {
    let scenario = base_scenario("a-stub-closes-its-gate", 1, vec![model("qwen", 20)]);
    let scenario = with_request(with_request(scenario, 1, "qwen", 1), 15, "qwen", 3);
    let mut scenario = scenario.at(Millis::secs(16), ScenarioAction::SetStubGateClosed(engine("qwen"), true));
    for n in 0..4 {
        scenario = scenario.at(
            Millis(17_000 + n * 300),
            ScenarioAction::SendRequest(SimulatedRequest::stream("qwen", Millis(500))),
        );
    }
    (
        scenario.at(Millis::secs(20), ScenarioAction::SetStubGateClosed(engine("qwen"), false)),
        Millis::secs(25),
    )
}

/// One of two engines is behind a gate that stays closed. The other serves all requests; the first falls asleep when
/// idle and is then available to others.
fn a_stub_that_never_opens() -> ScriptedScenario {
    let mut twice = model("qwen", 20);
    twice.replicas = 2;
    twice.max_concurrency = Some(2);
    twice.idle.sleep_after = Some(Millis::secs(10));
    let scenario = base_scenario("a-stub-that-never-opens", 2, vec![twice]);
    let scenario = with_request(with_request(scenario, 1, "qwen", 2), 12, "qwen", 2);
    let mut scenario = scenario.at(Millis::secs(15), ScenarioAction::SetStubGateClosed(engine("qwen"), true));
    for n in 0..4 {
        scenario = scenario.at(
            Millis(16_000 + n * 100),
            ScenarioAction::SendRequest(SimulatedRequest::stream("qwen", Millis::secs(1))),
        );
    }
    (scenario, Millis::secs(40))
}

fn with_request(scenario: Scenario, at: u64, model: &str, lasts: u64) -> Scenario {
    scenario.at(
        Millis::secs(at),
        ScenarioAction::SendRequest(SimulatedRequest::stream(model, Millis::secs(lasts))),
    )
}

fn base_scenario(name: &str, gpus: u64, models: Vec<ModelSpec>) -> Scenario {
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.turns.residency = Millis::secs(5);
    settings.turns.max_turn = Millis::secs(20);
    settings.turns.drain_deadline = Millis::secs(10);
    let gpu =
        |n| Accelerator { metered: true, ..Accelerator::new(format!("gpu-{n}").into(), Bytes::gib(24)) };
    Scenario::new(name, FleetConfig { settings, accelerators: (0..gpus).map(gpu).collect(), models })
}

/// A model on one accelerator that takes `gib` GiB awake, 1 GiB asleep, and sleeps only to make room.
#[must_use]
pub fn model(name: &str, gib: u64) -> ModelSpec {
    let memory = EngineMemory { awake: Bytes::gib(gib), asleep: Bytes::gib(1), host: Bytes::gib(gib / 2) };
    simulated_model(name, memory)
}

fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}
