//! Dual pods in twelve thousand random simulated clusters.
//!
//! `ROUSE_SIM_SEEDS` and `ROUSE_SIM_FIRST` set how many and where to begin; `ROUSE_SIM_SEED` runs a single seed and
//! prints its story.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use rouse::{
    sim::cluster::{ClusterInvariantViolation, ClusterScenario, SimulatedCluster},
    units::Millis,
};

const RUN_DURATION: Millis = Millis::secs(150);

type ClusterTally = BTreeMap<&'static str, u64>;

#[test]
fn no_cluster_breaks_a_promise() {
    if let Ok(seed) = std::env::var("ROUSE_SIM_SEED") {
        let mut cluster = SimulatedCluster::new(ClusterScenario::from_seed(seed.parse().expect("a number")))
            .with_transcript();
        let outcome = cluster.run(RUN_DURATION);
        println!("{}\n{:?}", cluster.transcript(), cluster.tally());
        return outcome.unwrap_or_else(|broken| panic!("{broken}"));
    }
    let first = setting("ROUSE_SIM_FIRST", 0);
    let seeds = first + setting("ROUSE_SIM_SEEDS", 12_000);
    let next = AtomicU64::new(first);
    let threads = std::thread::available_parallelism().map_or(1, Into::into);
    let (mut tally, mut failed) = (ClusterTally::new(), Vec::new());
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(|| run_seeds(&next, seeds))).collect();
        for worker in workers {
            let (counts, failures) = worker.join().expect("a worker panicked");
            counts.into_iter().for_each(|(what, n)| *tally.entry(what).or_default() += n);
            failed.extend(failures);
        }
    });
    println!("{} clusters: {tally:?}", seeds - first);
    failed.iter().for_each(|broken| println!("{broken}"));
    if let Some(broken) = failed.first() {
        let mut cluster = SimulatedCluster::new(ClusterScenario::from_seed(broken.seed)).with_transcript();
        drop(cluster.run(RUN_DURATION));
        let story = cluster.transcript();
        let lines: Vec<&str> = story.lines().collect();
        let tail = &lines[lines.len().saturating_sub(60)..];
        panic!("{broken}{}\nROUSE_SIM_SEED={} tells it all", tail.join("\n"), broken.seed);
    }
    for what in [
        "wakes",
        "sleeps",
        "sleeps denied",
        "requesters killed",
        "leaders lost",
        "leaders continued",
        "watches broken",
        "hangs",
        "nodes lost",
        "Pods vanished",
        "launchers edited",
        "engines displaced",
        "outdated engines evicted",
        "wants",
        "wants withdrawn",
        "bound sleepers",
        "bound sleepers woken",
    ] {
        assert!(tally.get(what).is_some_and(|n| *n > 100), "hardly any {what}: {tally:?}");
    }
}

fn run_seeds(next: &AtomicU64, seeds: u64) -> (ClusterTally, Vec<ClusterInvariantViolation>) {
    let (mut tally, mut failed) = (ClusterTally::new(), Vec::new());
    loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= seeds || failed.len() > 4 {
            return (tally, failed);
        }
        let mut cluster = SimulatedCluster::new(ClusterScenario::from_seed(seed));
        if let Err(broken) = cluster.run(RUN_DURATION) {
            failed.push(broken);
        }
        cluster.tally().iter().for_each(|(what, n)| *tally.entry(what).or_default() += n);
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}
