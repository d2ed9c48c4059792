//! Models on one accelerator of a pool with slots take the same turns as on one machine.

use std::path::PathBuf;

use rouse::{
    fleet::{
        Fleet,
        command::{CloseReason, Command},
        event::Event,
    },
    journal,
    model::{AcceleratorRequirement, FleetConfig},
    sim::{Scenario, SimulatedWorld, scenario::scripts},
    units::Millis,
};

const SCENARIO: &str = "two-models-on-one-gpu";
/// First to the other model, then back.
const SWAPS: usize = 2;

/// Makes the machine's accelerators a pool with two slots on each, and all models its models.
fn with_slots(configuration: &mut FleetConfig) {
    for accelerator in &mut configuration.accelerators {
        accelerator.metered = false;
        accelerator.units = Some(2);
        accelerator.pool = Some("pool-a".into());
        accelerator.node = Some("node-a".to_owned());
    }
    for spec in &mut configuration.models {
        let (pool, count) = ("pool-a".into(), spec.accelerators.count());
        spec.accelerators = AcceleratorRequirement::Slots { pool, count };
    }
}

/// Returns how often a turn passed to another model in the recorded scenario, with this change of its configuration.
fn swaps_in_journal(change: fn(&mut FleetConfig)) -> usize {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("gateway/tests/scenarios");
    let text = std::fs::read_to_string(folder.join(format!("{SCENARIO}.journal"))).unwrap();
    let (mut fleet, mut swaps) = (Fleet::new(), 0);
    for line in journal::read(&text).unwrap() {
        let journal::JournalLine::Turn { at, mut events } = line else { continue };
        for event in &mut events {
            if let Event::Configured { configuration } = event {
                change(configuration);
            }
            fleet.on(event, at);
        }
        let plan = fleet.plan(at);
        fleet.issued(&plan.commands, at);
        assert_eq!(fleet.broken_invariants(), [""; 0]);
        let is_swap =
            |command: &&Command| matches!(command, Command::CloseGate { reason: CloseReason::Turn, .. });
        swaps += plan.commands.iter().filter(is_swap).count();
    }
    swaps
}

#[test]
fn the_recorded_swaps_are_the_same_on_a_slot_as_on_one_machine() {
    assert_eq!(swaps_in_journal(|_| {}), SWAPS);
    assert_eq!(swaps_in_journal(with_slots), SWAPS);
}

/// Runs a scenario, and returns its counts of swaps, sleeps, wakes and launches.
fn counts(scenario: Scenario, lasts: Millis) -> [u64; 4] {
    let mut world = SimulatedWorld::new(scenario);
    world.run_until(lasts).unwrap_or_else(|failure| panic!("{failure}"));
    ["swaps", "sleeps", "wakes", "launches"].map(|what| world.tally().count(what))
}

#[test]
fn a_world_with_slots_swaps_as_often_as_a_machine() {
    for name in [SCENARIO, "alternating-bursts", "a-busy-model-gives-up-its-turn"] {
        let (scenario, lasts) =
            scripts::all().into_iter().find(|(scenario, _)| scenario.name == name).unwrap();
        let mut slots = scenario.clone();
        with_slots(&mut slots.configuration);
        let (machine, slots) = (counts(scenario, lasts), counts(slots, lasts));
        assert_eq!(machine, slots, "{name}: swaps, sleeps, wakes, launches");
        assert!(machine[0] > 0, "{name}");
    }
}
