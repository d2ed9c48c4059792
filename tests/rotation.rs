//! A full journal file starts over with a snapshot, from which it replays to the same commands.

use rouse::{
    fleet::Fleet,
    journal::{self, JournalLine},
    sim::{Scenario, SimulatedWorld},
};
use rouse_testing::sample::{first_seed, size};

/// Seeds in the soak, and each day in the gate.
const SEEDS: u64 = 60;
const SAMPLED: u64 = 20;

/// Restores a fleet from a snapshot, written and read like in a file.
fn fleet_from_snapshot(fleet: &Fleet, line: &JournalLine) -> Fleet {
    let text = journal::write_turn(line.at(), &fleet.snapshot()).expect("a snapshot is JSON");
    let header = journal::write(&JournalLine::header("test", line.at())).expect("a header is JSON");
    let lines = journal::read(&format!("{header}\n{text}\n")).expect("a snapshot can be read");
    let Some(JournalLine::Turn { at, events }) = lines.last() else { panic!("{lines:?}") };
    let mut fresh = Fleet::new();
    events.iter().for_each(|event| fresh.on(event, *at));
    fresh
}

#[test]
fn a_journal_that_starts_over_anywhere_replays_to_the_same_commands() {
    let (mut turns, mut given) = (0_u64, 0);
    let (first, seeds) = (first_seed(SEEDS, SAMPLED), size(SEEDS, SAMPLED));
    for seed in first..first + seeds {
        let mut world = SimulatedWorld::new(Scenario::from_seed(seed)).with_journal();
        if let Err(failure) = world.run(150) {
            panic!("{failure}");
        }
        let (mut fleet, mut again) = (Fleet::new(), Fleet::new());
        for line in world.journal() {
            let JournalLine::Turn { at, events } = line else {
                (fleet, again) = (Fleet::new(), Fleet::new());
                continue;
            };
            events.iter().for_each(|event| fleet.on(event, *at));
            turns += 1;
            if turns.is_multiple_of(7) {
                again = fleet_from_snapshot(&fleet, line);
            } else {
                events.iter().for_each(|event| again.on(event, *at));
            }
            let (plan, same) = (fleet.plan(*at), again.plan(*at));
            assert_eq!(same.commands, plan.commands, "seed {seed} at {at}");
            fleet.issued(&plan.commands, *at);
            again.issued(&plan.commands, *at);
            let (report, other) = (fleet.report(&plan), again.report(&same));
            assert_eq!(other.to_string(), report.to_string(), "seed {seed} at {at}");
            assert_eq!(again.next_deadline(), fleet.next_deadline(), "seed {seed} at {at}");
            given += plan.commands.len();
        }
    }
    println!("{given} commands of {seeds} worlds from seed {first} on");
    assert!(given as u64 > 16 * seeds, "{given} commands");
}
