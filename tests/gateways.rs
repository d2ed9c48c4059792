//! Several gateways of one fleet, one of them the leader, in small random worlds: published state arrives late and
//! incompletely, leaders change, gateways and engines die. The gate runs the day's part of the worlds.
//!
//! `ROUSE_GATEWAY_SEEDS` sets the number of worlds; `ROUSE_GATEWAY_SEED` runs a single one.

use std::collections::BTreeMap;

use rouse_testing::sample::{first_seed, size};

#[path = "gateways/world.rs"]
mod world;

use world::MultiGatewayHarness;

const STEPS: u64 = 300;
/// Worlds in the soak, and each day in the gate.
const SEEDS: u64 = 200;
const SAMPLED: u64 = 50;

#[test]
fn every_request_ends_whoever_leads() {
    if let Ok(seed) = std::env::var("ROUSE_GATEWAY_SEED") {
        let mut world = MultiGatewayHarness::new(seed.parse().expect("a number"));
        world.transcript = Some(Vec::new());
        let outcome = world.run(STEPS);
        world.transcript.iter().flatten().for_each(|line| println!("{line}"));
        return outcome.unwrap_or_else(|broken| panic!("{broken}"));
    }
    let (first, seeds) = match std::env::var("ROUSE_GATEWAY_SEEDS") {
        Ok(seeds) => (0, seeds.parse().expect("a number")),
        Err(_) => (first_seed(SEEDS, SAMPLED), size(SEEDS, SAMPLED)),
    };
    let mut tally: BTreeMap<&str, u64> = BTreeMap::new();
    for seed in first..first + seeds {
        let mut world = MultiGatewayHarness::new(seed);
        if let Err(broken) = world.run(STEPS) {
            panic!("seed {seed}: {broken}");
        }
        for (what, count) in &world.tally {
            *tally.entry(what).or_default() += count;
        }
    }
    println!("{seeds} worlds from seed {first} on: {tally:?}");
    // An event that never happened was not tested.
    for what in [
        "grants by followers",
        "gates closed by followers",
        "turned away",
        "leaders changed",
        "engines that kept their gate",
        "gateways restarted",
        "processes died",
        "wakes",
        "sleeps",
        "launches",
    ] {
        assert!(tally.get(what).is_some_and(|count| *count >= seeds / 4), "{what}: {tally:?}");
    }
}
