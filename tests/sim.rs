//! The real fleet in ten thousand random simulated worlds; the gate runs the day's part of them.
//!
//! `ROUSE_SIM_SEEDS` and `ROUSE_SIM_STEPS` set the number of worlds and steps, `ROUSE_SIM_FIRST` where to begin (a soak
//! continues where an earlier one stopped). `ROUSE_SIM_SEED` runs a single seed and shows its events. A failure prints
//! its seed, the end of its journal, and the path of the whole journal.

use std::{
    path::PathBuf,
    sync::atomic::{AtomicU64, Ordering},
};

use rouse::{
    journal::{self, transcript::render_transcript},
    sim::{InvariantViolation, QuoteSample, Scenario, SimulatedWorld, Tally},
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
    let (mut tally, mut quotes, mut failed) = (Tally::default(), Vec::new(), Vec::new());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| run_seeds(&next, seeds, steps))).collect();
        for worker in workers {
            let (counts, samples, failures) = worker.join().expect("a worker panicked");
            tally.merge(&counts);
            quotes.extend(samples);
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
    assert_quotes_hold(&quotes);
}

/// What a worker's worlds did, their quotes, and those that failed.
type SeedResults = (Tally, Vec<QuoteSample>, Vec<(u64, InvariantViolation)>);

fn run_seeds(next: &AtomicU64, seeds: u64, steps: u64) -> SeedResults {
    let (mut tally, mut quotes, mut failed) = (Tally::default(), Vec::new(), Vec::new());
    loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        // A handful of failures is enough; further seeds would only take time.
        if seed >= seeds || failed.len() > 4 {
            return (tally, quotes, failed);
        }
        let mut world = SimulatedWorld::new(Scenario::from_seed(seed));
        if let Err(failure) = world.run(steps) {
            failed.push((seed, failure));
        }
        tally.merge(world.tally());
        quotes.extend_from_slice(world.quotes());
    }
}

/// At least four of five quoted waits end inside their range, and the ranges say something.
fn assert_quotes_hold(quotes: &[QuoteSample]) {
    /// The largest median of a range's width, as a multiple of the wait.
    const MAX_MEDIAN_WIDTH: f64 = 3.0;
    /// Shorter waits count as this long: nobody plans by less.
    const SHORTEST_WAIT_MILLIS: u64 = 100;
    let early = quotes.iter().filter(|quote| quote.waited < quote.quoted.low).count();
    let late = quotes.iter().filter(|quote| quote.waited > quote.quoted.high).count();
    let width = |QuoteSample { quoted, waited }: &QuoteSample| {
        quoted.high.saturating_sub(quoted.low).0 as f64 / waited.0.max(SHORTEST_WAIT_MILLIS) as f64
    };
    let mut widths: Vec<f64> = quotes.iter().map(width).collect();
    widths.sort_by(f64::total_cmp);
    let median = widths.get(widths.len() / 2).copied().expect("waits were quoted");
    let share = |count: usize| 100.0 * count as f64 / quotes.len() as f64;
    let (early, late) = (share(early), share(late));
    println!(
        "{} quotes: {early:.1} % ended before the range and {late:.1} % after it; median width {median:.2} waits",
        quotes.len()
    );
    assert!(early + late <= 20.0, "{:.1} % of the quoted waits ended inside the range", 100.0 - early - late);
    assert!(median <= MAX_MEDIAN_WIDTH, "a range is {median:.2} times as wide as its wait");
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
        "rehearsals",
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
        "waits quoted",
    ] {
        assert!(tally.count(what) > 0, "nothing was tried: {what}");
    }
}
