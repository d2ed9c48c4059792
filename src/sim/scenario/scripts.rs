//! Worlds written by hand, one for each thing a reader should see happen. Their stories are golden: see
//! `tests/scenarios.rs`.

mod needs;

use super::{Deed, Scenario};
use crate::{
    fleet::event::Order,
    model::{
        Accelerator, Accelerators, Configuration, EngineId, Idle, LevelPolicy, Memory, ModelSpec, OnDeadline,
        OwnQueue, Settings,
    },
    sim::client::Request,
    units::{Bytes, Millis},
};

/// A scenario and how long it is watched.
pub type Script = (Scenario, Millis);

/// Every script.
#[must_use]
pub fn all() -> Vec<Script> {
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
    all.extend(needs::all());
    all
}

/// Neither fits beside the other: the first is put to sleep for the second, and woken again.
fn two_models_on_one_gpu() -> Script {
    let scenario = world("two-models-on-one-gpu", 1, vec![model("qwen", 20), model("llama", 20)]);
    let scenario = ask(scenario, 1, "qwen", 2);
    let scenario = ask(scenario, 30, "llama", 2);
    (ask(scenario, 60, "qwen", 2), Millis::secs(70))
}

/// Five requests every three seconds, by turns for one model and the other: a swap for each burst would be thrash.
fn alternating_bursts() -> Script {
    let mut scenario = world("alternating-bursts", 1, vec![model("qwen", 20), model("llama", 20)]);
    for burst in 0..12 {
        let name = if burst % 2 == 0 { "qwen" } else { "llama" };
        for request in 0..5 {
            let after = Millis(1000 + burst * 3000 + request * 20);
            scenario = scenario.at(after, Deed::Ask(Request::stream(name, Millis(500))));
        }
    }
    (scenario, Millis::secs(60))
}

/// A request waits in vain for a pinned model's memory; once it is unpinned, the next one is served.
fn a_pinned_model_in_the_way() -> Script {
    let mut pinned = model("llama", 20);
    pinned.pinned = true;
    let mut scenario = world("a-pinned-model-in-the-way", 1, vec![model("qwen", 20), pinned]);
    scenario.configuration.settings.queue.max_wait = Millis::secs(20);
    let scenario = ask(scenario, 20, "qwen", 1);
    let scenario = ask(scenario, 50, "qwen", 1);
    (scenario.at(Millis::secs(55), Deed::Order("llama".into(), Order::Unpin)), Millis::secs(75))
}

/// Two idle models, one on each accelerator, make room for one that needs both.
fn two_victims_for_a_model_on_two_gpus() -> Script {
    let mut large = model("large", 18);
    large.accelerators = Accelerators::Count(2);
    let models = vec![model("qwen", 20), model("llama", 20), large];
    let scenario = world("two-victims-for-a-model-on-two-gpus", 2, models);
    let scenario = ask(scenario, 1, "qwen", 1);
    let scenario = ask(scenario, 2, "llama", 3);
    (ask(scenario, 30, "large", 1), Millis::secs(50))
}

/// The engine says that it sleeps, and its memory is free only two seconds later: nothing is launched on its word.
fn memory_that_comes_back_late() -> Script {
    let mut scenario = world("memory-that-comes-back-late", 1, vec![model("qwen", 20), model("llama", 20)]);
    scenario.configuration.settings.timeouts.settle = Millis::secs(5);
    let scenario = ask(scenario, 1, "qwen", 1);
    let late = Deed::LateMemory(engine("qwen"), Millis::secs(2));
    (ask(scenario.at(Millis::secs(20), late), 30, "llama", 1), Millis::secs(50))
}

/// The engine refuses to wake: it is stopped and started from nothing, and whoever waited is served.
fn a_wake_that_fails() -> Script {
    let scenario = world("a-wake-that-fails", 1, vec![model("qwen", 20)]);
    let scenario = ask(scenario, 1, "qwen", 1);
    let scenario = scenario
        .at(Millis::secs(20), Deed::Order("qwen".into(), Order::Sleep { level: None }))
        .at(Millis::secs(25), Deed::RefuseWake(engine("qwen")));
    (ask(scenario, 30, "qwen", 1), Millis::secs(50))
}

/// Starts fail: whoever waits is told, and what failed is remembered until somebody asks again. Another model fits nowhere.
fn a_start_that_fails() -> Script {
    let mut scenario = world("a-start-that-fails", 1, vec![model("qwen", 20), model("huge", 90)]);
    scenario.faults.exit_at_start = 1.0;
    let scenario = ask(ask(scenario, 1, "qwen", 1), 2, "huge", 1);
    (ask(scenario, 40, "qwen", 1), Millis::secs(60))
}

/// A model that is never idle has its turn; then its gate closes, its streams run out, and the other has its own.
fn a_busy_model_gives_up_its_turn() -> Script {
    let mut scenario =
        world("a-busy-model-gives-up-its-turn", 1, vec![model("qwen", 20), model("llama", 20)]);
    for n in 0..30 {
        scenario = scenario.at(Millis(1000 + n * 1500), Deed::Ask(Request::stream("qwen", Millis::secs(3))));
    }
    (ask(scenario, 15, "llama", 1), Millis::secs(65))
}

/// As before, but a stream runs longer than policy lets a drain last: it is cut.
fn a_stream_outlasts_its_turn() -> Script {
    let mut scenario = world("a-stream-outlasts-its-turn", 1, vec![model("qwen", 20), model("llama", 20)]);
    scenario.configuration.settings.turns.on_deadline = OnDeadline::Cut;
    let scenario = ask(scenario, 1, "qwen", 120);
    (ask(scenario, 15, "llama", 1), Millis::secs(60))
}

/// Two engines start for one burst, each on its own accelerator, and each takes half of it; unused, both fall asleep.
fn two_replicas_share_the_load() -> Script {
    let mut twice = model("qwen", 20);
    twice.replicas = 2;
    twice.max_concurrency = Some(2);
    twice.idle.sleep_after = Some(Millis::secs(10));
    let scenario = world("two-replicas-share-the-load", 2, vec![twice]);
    let scenario = ask(scenario, 1, "qwen", 4);
    let scenario = (0..5).fold(scenario, |scenario, _| ask(scenario, 15, "qwen", 4));
    (scenario, Millis::secs(40))
}

/// The second engine has the only accelerator that another model could have: in use as it is, it gives way at once,
/// and comes back once the other has been put away.
fn a_replica_makes_room() -> Script {
    let mut twice = model("qwen", 20);
    twice.replicas = 2;
    let mut other = model("llama", 20);
    other.idle.sleep_after = Some(Millis::secs(5));
    let scenario = world("a-replica-makes-room", 2, vec![twice, other]);
    let scenario = ask(ask(scenario, 1, "qwen", 30), 12, "qwen", 5);
    let scenario = ask(scenario, 13, "llama", 2);
    (scenario, Millis::secs(50))
}

/// One engine becomes three while it is in use, and one again: the two that are too many end their streams first.
fn replicas_by_reload() -> Script {
    let scenario = world("replicas-by-reload", 3, vec![model("qwen", 20)]);
    let mut three = scenario.configuration.clone();
    three.models[0].replicas = 3;
    let one = scenario.configuration.clone();
    let mut scenario = ask(scenario, 1, "qwen", 40);
    scenario = scenario.at(Millis::secs(15), Deed::Reload(Box::new(three)));
    for n in 0..3 {
        scenario = ask(scenario, 26 + n, "qwen", 10);
    }
    (scenario.at(Millis::secs(30), Deed::Reload(Box::new(one))), Millis::secs(50))
}

/// Six requests of one key wait before the first of another comes: it is next all the same.
fn two_keys_take_turns() -> Script {
    let mut narrow = model("qwen", 20);
    narrow.max_concurrency = Some(1);
    let mut scenario = world("two-keys-take-turns", 1, vec![narrow]);
    let request =
        |key: &str| Request { key: key.into(), tokens: 300, ..Request::stream("qwen", Millis::secs(2)) };
    for n in 0..6 {
        scenario = scenario.at(Millis(1000 + n * 10), Deed::Ask(request("team-a")));
    }
    for n in 0..2 {
        scenario = scenario.at(Millis(12_000 + n * 10), Deed::Ask(request("team-b")));
    }
    (scenario, Millis::secs(30))
}

/// Streams run when the stub closes its gate; those that come wait, and are let in by their arrival when it opens.
fn a_stub_closes_its_gate() -> Script {
    let scenario = world("a-stub-closes-its-gate", 1, vec![model("qwen", 20)]);
    let scenario = ask(ask(scenario, 1, "qwen", 1), 15, "qwen", 3);
    let mut scenario = scenario.at(Millis::secs(16), Deed::Gate(engine("qwen"), true));
    for n in 0..4 {
        scenario = scenario.at(Millis(17_000 + n * 300), Deed::Ask(Request::stream("qwen", Millis(500))));
    }
    (scenario.at(Millis::secs(20), Deed::Gate(engine("qwen"), false)), Millis::secs(25))
}

/// One of two engines is behind a gate that stays closed: the other serves everybody, and the first falls asleep in its
/// time and is there for others.
fn a_stub_that_never_opens() -> Script {
    let mut twice = model("qwen", 20);
    twice.replicas = 2;
    twice.max_concurrency = Some(2);
    twice.idle.sleep_after = Some(Millis::secs(10));
    let scenario = world("a-stub-that-never-opens", 2, vec![twice]);
    let scenario = ask(ask(scenario, 1, "qwen", 2), 12, "qwen", 2);
    let mut scenario = scenario.at(Millis::secs(15), Deed::Gate(engine("qwen"), true));
    for n in 0..4 {
        scenario = scenario.at(Millis(16_000 + n * 100), Deed::Ask(Request::stream("qwen", Millis::secs(1))));
    }
    (scenario, Millis::secs(40))
}

fn ask(scenario: Scenario, at: u64, model: &str, lasts: u64) -> Scenario {
    scenario.at(Millis::secs(at), Deed::Ask(Request::stream(model, Millis::secs(lasts))))
}

fn world(name: &str, gpus: u64, models: Vec<ModelSpec>) -> Scenario {
    let mut settings = Settings { host_memory: Bytes::gib(64), ..Settings::default() };
    settings.turns.residency = Millis::secs(5);
    settings.turns.max_turn = Millis::secs(20);
    settings.turns.drain_deadline = Millis::secs(10);
    let gpu = |n| Accelerator {
        id: format!("gpu-{n}").into(),
        capacity: Bytes::gib(24),
        metered: true,
        units: None,
    };
    Scenario::new(name, Configuration { settings, accelerators: (0..gpus).map(gpu).collect(), models })
}

/// A model on one accelerator that takes `gib` GiB awake, 1 GiB asleep, and sleeps only to make room.
#[must_use]
pub fn model(name: &str, gib: u64) -> ModelSpec {
    ModelSpec {
        name: name.into(),
        aliases: Vec::new(),
        accelerators: Accelerators::Count(1),
        memory: Memory { awake: Bytes::gib(gib), asleep: Bytes::gib(1), host: Bytes::gib(gib / 2) },
        idle: Idle { sleep_after: None, stop_after: None, level: LevelPolicy::Auto },
        replicas: 1,
        pinned: false,
        min_replicas: 0,
        dependencies: Vec::new(),
        priority: 0,
        max_concurrency: None,
        start_timeout: Millis::secs(60),
        explicit_memory: false,
        can_sleep: true,
        fingerprint: 1,
        eviction: None,
        queue: OwnQueue::default(),
    }
}

fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}
