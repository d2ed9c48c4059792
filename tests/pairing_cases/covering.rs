//! Whole reports on file of which sleepers go, where taking the oldest of each accelerator one by one would be wrong.

use std::collections::BTreeSet;

use rouse::{
    model::AcceleratorId,
    pairing::{
        ids::{EngineId, Mode, names},
        node::Engine,
    },
    units::{Bytes, Millis},
};

use crate::driver::*;

/// What sleepers may keep of each accelerator.
const BUDGET: Bytes = Bytes::gib(8);

/// A node of so many accelerators with these sleepers, used in this order: what each keeps of each of its accelerators.
fn asleep(accelerators: usize, all: &[(u64, &[&str])]) -> Case {
    let mut case = Case::new(accelerators);
    for (number, (gib, on)) in (1..).zip(all) {
        let mut asked = ask(Mode::Sleep, number);
        asked.sizes.asleep = Bytes::gib(*gib);
        let name = format!("of-{number}");
        let id = case.cold_start(&name, asked, on);
        case.put_to_sleep(&name, &id);
    }
    case
}

/// What goes when an engine is to be launched on these, told beside what would go one by one.
fn report(mut case: Case, on: &[&str]) -> String {
    let mut lines = vec!["sleepers, the one used longest ago first:".to_owned()];
    let mut sleepers: Vec<Engine> = case.node().engines.values().cloned().collect();
    sleepers.sort_by_key(|sleeper| sleeper.last_used);
    for Engine { id, held, .. } in &sleepers {
        lines.push(format!("  {id} keeps {held} of each"));
    }
    for a in case.node().accelerators.keys() {
        let kept = case.node().reserved(a);
        let over = kept.saturating_sub(BUDGET);
        lines.push(format!("{a}: {kept} of {BUDGET} are kept, {over} too much"));
    }
    let one_by_one = one_by_one(&case, &sleepers, on);
    case.requester("new", ask(Mode::Sleep, 99), on, |_| ());
    let gone: Vec<&EngineId> = sleepers.iter().map(|s| &s.id).filter(|id| case.has(ends(id))).collect();
    let words = |ids: &[&EngineId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    assert_ne!(gone, one_by_one, "it is no example");
    let new: Vec<AcceleratorId> = on.iter().map(|a| AcceleratorId::from(*a)).collect();
    lines.push(format!("an engine is to be launched on {}", names(&new)));
    lines.push(format!("one by one: {}", words(&one_by_one)));
    lines.push(format!("deleted:    {}", words(&gone)));
    case.after(Millis::secs(1));
    lines.push(format!("it waits: {}", case.reason("new")));
    lines.join("\n")
}

/// Accelerator by accelerator the oldest, until it is enough there.
fn one_by_one<'a>(case: &Case, sleepers: &'a [Engine], on: &[&str]) -> Vec<&'a EngineId> {
    let mut gone = BTreeSet::new();
    for a in on.iter().map(|a| AcceleratorId::from(*a)) {
        let mut kept = case.node().reserved(&a);
        for sleeper in sleepers.iter().filter(|s| s.uses(&a)) {
            if gone.contains(&sleeper.id) {
                kept = kept.saturating_sub(sleeper.held);
            }
        }
        for sleeper in sleepers.iter().filter(|s| s.uses(&a)) {
            if kept > BUDGET && gone.insert(&sleeper.id) {
                kept = kept.saturating_sub(sleeper.held);
            }
        }
    }
    sleepers.iter().map(|s| &s.id).filter(|id| gone.contains(id)).collect()
}

#[test]
fn engines_of_one_accelerator() {
    let case = asleep(1, &[(1, &["a"]), (4, &["a"]), (7, &["a"])]);
    insta::assert_snapshot!(report(case, &["a"]));
}

#[test]
fn engines_of_one_accelerator_that_free_more_than_is_needed() {
    let case = asleep(1, &[(5, &["a"]), (3, &["a"]), (1, &["a"])]);
    insta::assert_snapshot!(report(case, &["a"]));
}

#[test]
fn engines_of_two_accelerators() {
    let case = asleep(4, &[(3, &["a", "c"]), (3, &["b", "d"]), (3, &["a", "b"]), (3, &["a", "b"])]);
    insta::assert_snapshot!(report(case, &["a", "b"]));
}

#[test]
fn engines_of_four_accelerators() {
    let (left, right) = (["a", "b", "e", "f"], ["c", "d", "g", "h"]);
    let first = ["a", "b", "c", "d"];
    let case = asleep(8, &[(3, &left), (3, &right), (3, &first), (3, &first)]);
    insta::assert_snapshot!(report(case, &first));
}

#[test]
fn engines_of_one_two_and_four_accelerators_together() {
    let all: [(u64, &[&str]); 6] = [
        (3, &["a"]),
        (3, &["b"]),
        (3, &["c", "d"]),
        (2, &["a", "b", "c", "d"]),
        (4, &["a", "b"]),
        (4, &["c", "d"]),
    ];
    insta::assert_snapshot!(report(asleep(4, &all), &["a", "b", "c", "d"]));
}
