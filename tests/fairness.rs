//! Fairness between keys: a flooding key costs the others almost nothing, and equal keys get equal service.

use rouse::{
    fleet::{
        Fleet, Plan,
        command::Command,
        event::{Event, Waiter, WaiterId},
    },
    journal,
    model::{Accelerator, EngineMemory, FleetConfig, FleetSettings, ModelSpec},
    sim::{Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, SplitMix64, simulated_model},
    units::{Bytes, Millis},
};

fn model(name: &str, gib: u64, max_concurrency: Option<u32>) -> ModelSpec {
    ModelSpec {
        max_concurrency,
        ..simulated_model(
            name,
            EngineMemory { awake: Bytes::gib(gib), asleep: Bytes::mib(256), host: Bytes::gib(1) },
        )
    }
}

fn scenario(name: &str, models: Vec<ModelSpec>) -> Scenario {
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.turns.residency = Millis::secs(1);
    settings.turns.max_turn = Millis::secs(10);
    let gpu = Accelerator { metered: true, ..Accelerator::new("gpu-0".into(), Bytes::gib(24)) };
    Scenario::new(name, FleetConfig { settings, accelerators: vec![gpu], models })
}

/// A client that repeats the same request, at once or after a pause.
fn repeating_client(key: &str, exchange: Millis, tokens: u64, pause: Millis) -> ScenarioAction {
    let again = vec![pause];
    ScenarioAction::SendRequest(SimulatedRequest {
        key: key.into(),
        tokens,
        repeat_pauses: again,
        ..SimulatedRequest::stream("m", exchange)
    })
}

fn run(scenario: Scenario, lasts: Millis) -> SimulatedWorld {
    let mut world = SimulatedWorld::new(scenario);
    if let Err(failure) = world.run_until(lasts) {
        panic!("{failure}");
    }
    world
}

#[test]
fn a_quiet_key_beside_a_flood_waits_no_longer_than_one_answer_takes() {
    for (places, seed) in [(1, 1), (4, 2), (4, 3), (16, 4)] {
        let mut random = SplitMix64::new(seed);
        let longest = Millis(2000);
        let mut scenario = scenario("a flood", vec![model("m", 20, Some(places))]);
        scenario.seed = seed;
        for n in 0..100 {
            let exchange = Millis(random.between(200, longest.0));
            let flood = repeating_client("flood", exchange, exchange.0 * random.between(1, 5), Millis::ZERO);
            scenario = scenario.at(Millis(1000 + n), flood);
        }
        let scenario =
            scenario.at(Millis::secs(20), repeating_client("quiet", Millis(500), 600, Millis(3000)));
        let first_byte = scenario.hardware.first_byte.1;
        let world = run(scenario, Millis::secs(300));
        let waits = world.waits("quiet");
        let worst = waits.iter().copied().fold(Millis::ZERO, Millis::max);
        let flood = world.waits("flood");
        let usual = flood.iter().map(|w| w.0).sum::<u64>() / flood.len() as u64;
        println!(
            "{places} places: the quiet key's {} requests waited {worst} at most, the flood's {} {} on average",
            waits.len(),
            flood.len(),
            Millis(usual)
        );
        assert!(waits.len() > 40, "{} requests", waits.len());
        assert!(worst <= longest + first_byte, "{places} places: one waited {worst}");
    }
}

/// Responses cost much less than the estimate before the first response. What the fleet learns later must not put a
/// client that arrived before then behind a flood.
#[test]
fn a_key_that_comes_before_anything_is_known_of_answers_waits_no_longer_than_one() {
    let longest = Millis(600);
    let mut met = 0;
    for places in [1, 2, 4, 8] {
        for comes in (20_100..22_100).step_by(100) {
            let mut random = SplitMix64::new(comes);
            let mut scenario = scenario("a first flood", vec![model("m", 20, Some(places))]);
            // The first request starts the engine before the flood begins. By then its usage is forgotten.
            let first =
                SimulatedRequest { key: "first".into(), ..SimulatedRequest::stream("m", Millis(200)) };
            scenario = scenario.at(Millis::ZERO, ScenarioAction::SendRequest(first));
            for n in 0..100 {
                let exchange = Millis(random.between(200, longest.0));
                scenario = scenario.at(
                    Millis(20_000 + n / 10),
                    repeating_client("flood", exchange, exchange.0 / 5, Millis::ZERO),
                );
            }
            let scenario =
                scenario.at(Millis(comes), repeating_client("early", Millis(200), 30, Millis(2000)));
            let first_byte = scenario.hardware.first_byte.1;
            let world = run(scenario, Millis::secs(40));
            let worst = world.waits("early").iter().copied().fold(Millis::ZERO, Millis::max);
            assert!(worst <= longest + first_byte, "{places} places, {comes}: it waited {worst}");
            met += usize::from(worst > Millis::ZERO);
        }
    }
    assert!(met > 60, "it had to wait in {met} of 80 worlds only");
}

/// Jain's fairness index of these shares: 1 if all are equal, 1/n if one has everything.
fn jain_index(shares: &[u64]) -> f64 {
    let sum: f64 = shares.iter().map(|s| *s as f64).sum();
    let squares: f64 = shares.iter().map(|s| (*s as f64).powi(2)).sum();
    sum * sum / (shares.len() as f64 * squares)
}

/// Eight keys with 4 to 32 clients each. Response lengths differ by a factor of 16 between keys and of 4 within a key.
#[test]
fn equal_keys_are_served_alike_under_overload() {
    for (places, seed) in [(1, 1), (4, 2), (8, 3), (16, 4)] {
        let mut random = SplitMix64::new(seed);
        let mut scenario = scenario("eight keys", vec![model("m", 20, Some(places))]);
        scenario.seed = seed;
        for key in 0..8_u64 {
            let size = 100 << (key % 5);
            for n in 0..(4 + key * 4) {
                let tokens = random.between(size / 2, size * 2);
                // Some engines' time depends on the response's length, others' hardly does.
                let exchange = Millis(if seed % 2 == 0 { tokens } else { 200 + tokens / 10 });
                let ask = repeating_client(&format!("key-{key}"), exchange, tokens, Millis::ZERO);
                scenario = scenario.at(Millis(1000 + n * 10 + key), ask);
            }
        }
        let world = run(scenario, Millis::secs(600));
        let shares: Vec<u64> = world.tokens().values().copied().collect();
        let index = jain_index(&shares);
        println!("{places} places: Jain's index {index:.4} of {shares:?}");
        assert_eq!(shares.len(), 8);
        assert!(index >= 0.95, "{places} places: {index} of {shares:?}");
    }
}

#[test]
fn a_full_queue_has_room_for_a_key_that_has_less_of_it() {
    let mut scenario = scenario("a full queue", vec![model("m", 20, Some(1))]);
    scenario.configuration.settings.queue.max_waiting = 20;
    for n in 0..100 {
        scenario = scenario.at(Millis(1000 + n), repeating_client("flood", Millis(500), 100, Millis(50)));
    }
    let scenario = scenario.at(Millis::secs(20), repeating_client("quiet", Millis(500), 100, Millis(1000)));
    let world = run(scenario, Millis::secs(120));
    assert!(world.tally().count("refused: queue full") > 1000, "the queue was full");
    assert!(world.waits("quiet").len() > 30, "{} of its requests", world.waits("quiet").len());
}

/// A hundred clients wait for one model, one client for another: its turn comes as if each side had one client.
#[test]
fn a_flood_for_one_model_does_not_keep_another_from_its_turn() {
    let models = vec![model("m", 20, Some(4)), model("other", 20, None)];
    let mut scenario = scenario("a flood for one of two", models);
    for n in 0..100 {
        scenario = scenario.at(Millis(1000 + n), repeating_client("flood", Millis(1000), 100, Millis::ZERO));
    }
    let quiet = SimulatedRequest { key: "quiet".into(), ..SimulatedRequest::stream("other", Millis(500)) };
    let scenario = scenario.at(Millis::secs(40), ScenarioAction::SendRequest(quiet));
    let world = run(scenario, Millis::secs(120));
    let waits = world.waits("quiet");
    println!("waited {waits:?}");
    // A turn of at most ten seconds, the last responses, a sleep, a start.
    assert!(waits.len() == 1 && waits[0] <= Millis::secs(10 + 2 + 1 + 9), "{waits:?}");
}

#[test]
fn a_journal_that_starts_over_gives_the_same_order() {
    let mut scenario = scenario("journal", vec![model("m", 20, Some(2))]);
    for n in 0..60 {
        let key = format!("key-{}", n % 5 + n % 3);
        scenario = scenario
            .at(Millis(1000 + n * 20), repeating_client(&key, Millis(300 + n * 7), 40 + n * 9, Millis(10)));
    }
    let mut world = SimulatedWorld::new(scenario).with_journal();
    if let Err(failure) = world.run_until(Millis::secs(60)) {
        panic!("{failure}");
    }
    let lines = world.journal();
    let half = lines.len() / 2;
    let mut after: Option<Fleet> = None;
    let (mut turn, mut grants) = (0, 0);
    journal::replay(lines, |at, events, plan, fleet| {
        turn += 1;
        if let Some(after) = &mut after {
            events.iter().for_each(|event| after.on(event, at));
            let again = after.plan(at);
            after.issued(&again.commands, at);
            assert_eq!(non_reading_commands(&again), non_reading_commands(plan), "at {at}");
            grants += non_reading_commands(plan).len();
        }
        if turn == half {
            let mut fresh = Fleet::new();
            fleet.snapshot().iter().for_each(|event| fresh.on(event, at));
            assert_eq!(fresh.snapshot(), fleet.snapshot());
            after = Some(fresh);
        }
    });
    assert!(grants > 20, "{grants} grants");
}

fn non_reading_commands(plan: &Plan) -> Vec<&Command> {
    plan.commands.iter().filter(|c| matches!(c, Command::Grant { .. } | Command::Refuse { .. })).collect()
}

/// The key with the least service goes next: a waiting key is passed over only a few times, however large the other
/// keys' demand.
#[test]
fn no_key_that_waits_is_passed_over_for_long() {
    for seed in 0..50 {
        let mut random = SplitMix64::new(seed);
        let mut scenario = scenario("least served", vec![model("m", 20, Some(random.between(1, 6) as u32))]);
        scenario.seed = seed;
        let keys = random.between(2, 8);
        for n in 0..random.between(20, 80) {
            let (key, tokens) = (random.between(0, keys - 1), random.between(1, 2000));
            let pause = Millis(random.between(0, 4000));
            let ask =
                repeating_client(&format!("key-{key}"), Millis(random.between(50, 1500)), tokens, pause);
            scenario = scenario.at(Millis(1000 + n * 15), ask);
        }
        let mut world = SimulatedWorld::new(scenario).with_journal();
        if let Err(failure) = world.run_until(Millis::secs(120)) {
            panic!("{failure}");
        }
        let passed = longest_passed_over(world.journal());
        assert!(passed <= 8 * keys, "seed {seed}: a key was passed over {passed} times by {keys} keys");
    }
}

/// The most consecutive grants to other keys while a key had a waiter.
fn longest_passed_over(lines: &[journal::JournalLine]) -> u64 {
    use std::collections::BTreeMap;
    let mut waiters: BTreeMap<WaiterId, Waiter> = BTreeMap::new();
    let (mut passed, mut longest) = (BTreeMap::<String, u64>::new(), 0);
    journal::replay(lines, |_, events, plan, _| {
        for event in events {
            if let Event::Arrived { waiter } = event {
                passed.entry(waiter.key.clone()).or_default();
                waiters.insert(waiter.id, waiter.clone());
            }
        }
        for command in &plan.commands {
            let Command::Grant { waiter, .. } = command else { continue };
            let Some(waiter) = waiters.remove(waiter) else { continue };
            passed.remove(&waiter.key);
            let mut waiting: Vec<&str> = waiters.values().map(|w| w.key.as_str()).collect();
            waiting.sort_unstable();
            waiting.dedup();
            for key in waiting {
                let times = passed.entry(key.to_owned()).or_default();
                *times += 1;
                longest = longest.max(*times);
            }
        }
    });
    longest
}
