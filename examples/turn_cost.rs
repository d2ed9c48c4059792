//! What one turn of the driver costs the decisions, with many waiters: `cargo run --release --example turn_cost`.
//!
//! Two worlds: one model that is full, with a place that comes free each turn; and fifty models on two accelerators,
//! nearly all of which are waited for.

use rouse::{
    fleet::{
        Fleet,
        command::Command,
        event::{Event, Found, Waiter, WaiterId},
    },
    model::{
        Accelerator, Accelerators, Configuration, EngineId, Idle, LevelPolicy, Memory, ModelSpec, Settings,
    },
    units::{Bytes, Generation, Millis, Tick},
};
use tokio::time::Instant;

const START: Tick = Tick(1_000_000_000);

fn model(name: &str) -> ModelSpec {
    ModelSpec {
        name: name.into(),
        aliases: Vec::new(),
        accelerators: Accelerators::Count(1),
        memory: Memory { awake: Bytes::gib(20), asleep: Bytes::mib(64), host: Bytes::gib(1) },
        idle: Idle { sleep_after: None, stop_after: None, level: LevelPolicy::Auto },
        replicas: 1,
        pinned: false,
        priority: 0,
        max_concurrency: Some(4),
        start_timeout: Millis::secs(600),
        explicit_memory: true,
        can_sleep: true,
        fingerprint: 1,
    }
}

/// The first model is awake and full; the others are cold.
fn fleet(models: usize, waiters: u64, keys: u64) -> Fleet {
    let gpu = |n| Accelerator { id: format!("gpu-{n}").into(), capacity: Bytes::gib(24), metered: false };
    let names: Vec<String> = (0..models).map(|n| format!("model-{n}")).collect();
    let mut settings = Settings::default();
    settings.queue.max_waiting = 100_000;
    let models = names.iter().map(|name| model(name)).collect();
    let configuration = Configuration { settings, accelerators: (0..2).map(gpu).collect(), models };
    let mut fleet = Fleet::new();
    let found = Found {
        address: ([127, 0, 0, 1], 9).into(),
        accelerators: vec!["gpu-0".into()],
        asleep: None,
        ready: true,
        fingerprint: 1,
        last_end: START,
        started: START,
    };
    let engine = EngineId::new("model-0".into(), 0);
    let mut events = vec![
        Event::Configured { configuration: Box::new(configuration) },
        Event::Adopted { engine, generation: Generation(1), found },
        Event::AdoptionDone,
    ];
    events.extend((0..waiters).map(|id| Event::Arrived { waiter: waiter(id, &names, keys) }));
    events.iter().for_each(|event| fleet.on(event, START));
    let plan = fleet.plan(START);
    fleet.issued(&plan.commands, START);
    fleet.on(&used(4), START);
    fleet
}

fn waiter(id: u64, names: &[String], keys: u64) -> Waiter {
    Waiter {
        id: WaiterId(id),
        model: names[id as usize % names.len()].as_str().into(),
        band: 0,
        key: if keys == 0 { String::new() } else { format!("key-{}", id / names.len() as u64 % keys) },
        arrived: START,
        deadline: START + Millis::secs(500),
        stream: true,
        only: None,
    }
}

fn used(leases: u32) -> Event {
    let engine = EngineId::new("model-0".into(), 0);
    Event::Used { engine, generation: Generation(1), leases, last_end: START, last_byte: START }
}

fn main() {
    println!("models  waiters  keys   a turn with a grant   a turn without");
    for (models, waiters, keys) in
        [(1, 1000, 0), (1, 1000, 100), (1, 10_000, 100), (50, 100, 0), (50, 1000, 0), (50, 1000, 100)]
    {
        let fresh = fleet(models, waiters, keys);
        let (mut fleet, turns) = (fresh.clone(), 100);
        let (mut busy, mut idle, mut grants) = (0.0, 0.0, 0);
        for turn in 0..turns {
            if turn % 15 == 0 {
                fleet = fresh.clone();
            }
            let now = START + Millis(turn + 1);
            let began = Instant::now();
            fleet.on(&used(4), now);
            let plan = fleet.plan(now);
            fleet.issued(&plan.commands, now);
            idle += began.elapsed().as_secs_f64();
            let began = Instant::now();
            fleet.on(&used(3), now);
            let plan = fleet.plan(now);
            fleet.issued(&plan.commands, now);
            busy += began.elapsed().as_secs_f64();
            grants += plan.commands.iter().filter(|c| matches!(c, Command::Grant { .. })).count();
        }
        let micros = |seconds: f64| format!("{:.0} µs", seconds / turns as f64 * 1e6);
        println!(
            "{models:>6} {waiters:>8} {keys:>5} {:>21} {:>16}  ({grants} grants)",
            micros(busy),
            micros(idle)
        );
    }
}
