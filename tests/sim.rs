//! The real fleet in ten thousand random simulated worlds; the gate runs the day's part of them.
//!
//! `ROUSE_SIM_SEEDS` and `ROUSE_SIM_STEPS` set the number of worlds and steps, `ROUSE_SIM_FIRST` where to begin (a soak
//! continues where an earlier one stopped). `ROUSE_SIM_SEED` runs a single seed and shows its events. A failure prints
//! its seed, the end of its journal, and the path of the whole journal.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};

use rouse::sim::{
    InvariantViolation, Scenario, SimulatedWorld, Tally, journal, transcript::render_transcript,
};
use rouse_testing::sample::{first_seed, size};

/// Seeds in the soak, and each day in the gate.
const SOAK_SEEDS: u64 = 10_000;
const GATE_SEEDS: u64 = 2_000;

#[test]
fn no_world_breaks_an_invariant() {
    let steps = env_or("ROUSE_SIM_STEPS", 500);
    if let Ok(seed) = std::env::var("ROUSE_SIM_SEED") {
        return run_one_seed(seed.parse().expect("a number"), steps);
    }
    let first = env_or("ROUSE_SIM_FIRST", first_seed(SOAK_SEEDS, GATE_SEEDS));
    let seeds = first + env_or("ROUSE_SIM_SEEDS", size(SOAK_SEEDS, GATE_SEEDS));
    let next = AtomicU64::new(first);
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    let (mut tally, mut failed) = (Tally::default(), Vec::new());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| run_seeds(&next, seeds, steps))).collect();
        for worker in workers {
            let (counts, failures) = worker.join().expect("a worker panicked");
            tally.merge(&counts);
            failed.extend(failures);
        }
    });
    println!("{} worlds from seed {first} on, of at least {steps} steps\n{tally}", seeds - first);
    if let Some((seed, failure)) = failed.first() {
        for (_, failure) in &failed {
            println!("{failure}");
        }
        panic!("{}", failure_report(*seed, steps, failure));
    }
    assert_not_vacuous(&tally);
}

fn run_seeds(next: &AtomicU64, seeds: u64, steps: u64) -> (Tally, Vec<(u64, InvariantViolation)>) {
    let (mut tally, mut failed) = (Tally::default(), Vec::new());
    loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        // A handful of failures is enough; further seeds would only take time.
        if seed >= seeds || failed.len() > 4 {
            return (tally, failed);
        }
        let mut world = SimulatedWorld::new(Scenario::from_seed(seed));
        if let Err(failure) = world.run(steps) {
            failed.push((seed, failure));
        }
        tally.merge(world.tally());
    }
}

fn run_one_seed(seed: u64, steps: u64) {
    let mut world = SimulatedWorld::new(Scenario::from_seed(seed));
    let outcome = world.run(steps);
    println!("{}", world.tally());
    if let Err(failure) = outcome {
        panic!("{}", failure_report(seed, steps, &failure));
    }
}

fn env_or(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

/// Runs the seed again with its journal.
fn failure_report(seed: u64, steps: u64, failure: &InvariantViolation) -> String {
    let mut world = SimulatedWorld::new(Scenario::from_seed(seed)).with_journal();
    let again = world.run(steps).err().is_some_and(|again| again.step == failure.step);
    let lines: Vec<_> =
        world.journal().iter().map(|line| journal::write(line).expect("a journal line is JSON")).collect();
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("seed-{seed}.journal"));
    std::fs::write(&path, lines.join("\n") + "\n").expect("the journal is written");
    let story = render_transcript(world.journal());
    std::fs::write(path.with_extension("txt"), &story).expect("the story is written");
    let tail: Vec<&str> = story.lines().collect();
    let tail = &tail[tail.len().saturating_sub(40)..];
    format!(
        "{failure}{}journal: {}\n{}\nROUSE_SIM_SEED={seed} ROUSE_SIM_STEPS={steps} runs it alone",
        if again { "" } else { "it did not fail the same way again: the fleet is not pure\n" },
        path.display(),
        tail.join("\n")
    )
}

/// A world without any attempts proves nothing.
fn assert_not_vacuous(tally: &Tally) {
    for what in [
        "launches",
        "wakes",
        "sleeps",
        "stops",
        "grants",
        "requests served",
        "revocations",
        "swaps",
        "shutdowns",
        "reloads",
        "operations done",
        "gateway restarts",
        "engines adopted",
        "fault: late memory",
        "fault: engine died",
        "fault: engine hung",
        "fault: wake refused",
        "fault: sleep refused",
        "fault: sleep denied",
        "called back from a sleep that was denied",
        "fault: accelerator lost",
        "fault: conflict",
        "fault: a stub's gate closed",
        "holds",
        "requests turned away by a stub",
        "pools resized",
        "reservations of slots",
        "accelerators with slots that changed their health",
        "starts of what needs others",
    ] {
        assert!(tally.count(what) > 0, "nothing was tried: {what}");
    }
}
