//! Snapshots of the evicted sleepers.
//!
//! In these cases evicting the oldest of each accelerator one by one would be wrong.

use std::collections::BTreeSet;

use rouse::{
    model::AcceleratorId,
    pairing::{
        event::CommandReply,
        ids::{PairingEngineId, ProviderMode, accelerator_list},
        node::PairingEngine,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

/// The sleepers' budget on each accelerator.
const BUDGET: Bytes = Bytes::gib(8);

/// A node with this many accelerators and these sleepers, used in this order. Each sleeper keeps `gib` on each of its
/// accelerators.
fn asleep(accelerators: usize, all: &[(u64, &[&str])]) -> PairingCase {
    let mut case = PairingCase::new(accelerators);
    for (number, (gib, on)) in (1..).zip(all) {
        let mut requested = ask(ProviderMode::Sleep, number);
        requested.sizes.asleep = Bytes::gib(*gib);
        let name = format!("of-{number}");
        let id = case.cold_start(&name, requested, on);
        case.put_to_sleep(&name, &id);
    }
    case
}

/// An awake engine in the launcher of its lowest accelerator, which is created if it is missing.
fn awake_in_launcher(case: &mut PairingCase, number: u64, gib: u64, on: &[&str]) -> PairingEngineId {
    let mut requested = ask(ProviderMode::Launcher, number);
    requested.sizes.asleep = Bytes::gib(gib);
    let id = engine(ProviderMode::Launcher, number, on);
    case.launcher_ready(on.first().expect("an accelerator"));
    let name = format!("of-{number}");
    case.requester(&name, requested, on, |_| ());
    case.launched(&id);
    case.finalized(&name);
    id
}

/// Like [`asleep`], with one launcher for each accelerator.
fn asleep_in_launchers(accelerators: usize, all: &[(u64, &[&str])]) -> PairingCase {
    let mut case = PairingCase::new(accelerators);
    for (number, (gib, on)) in (1..).zip(all) {
        let id = awake_in_launcher(&mut case, number, *gib, on);
        case.put_to_sleep(&format!("of-{number}"), &id);
    }
    case
}

fn sleepers(case: &PairingCase) -> Vec<PairingEngine> {
    let mut sleepers: Vec<PairingEngine> = case.node().engines.values().cloned().collect();
    sleepers.sort_by_key(|sleeper| sleeper.last_used);
    sleepers
}

/// Lists the memory that each sleeper keeps, and the accelerators over budget.
fn kept(case: &PairingCase) -> Vec<String> {
    let mut lines = vec!["sleepers, the one used longest ago first:".to_owned()];
    for PairingEngine { id, reserved: held, provider, .. } in sleepers(case) {
        let place = if provider.is_launcher() { format!(" in {provider}") } else { String::new() };
        lines.push(format!("  {id}{place} keeps {held} of each"));
    }
    for a in case.node().accelerators.keys() {
        let reserved = case.node().reserved(a);
        let over = reserved.saturating_sub(BUDGET);
        lines.push(format!("{a}: {reserved} of {BUDGET} are kept, {over} too much"));
    }
    lines
}

/// Reports the sleepers that a launch on these accelerators evicts, next to the one-by-one choice.
fn report(case: &mut PairingCase, mode: ProviderMode, on: &[&str]) -> String {
    let (mut lines, sleepers) = (kept(case), sleepers(case));
    let one_by_one = one_by_one(case, &sleepers, on);
    case.requester("new", ask(mode, 99), on, |_| ());
    let evicted: Vec<&PairingEngineId> =
        sleepers.iter().map(|s| &s.id).filter(|id| case.has(ends(id))).collect();
    let words =
        |ids: &[&PairingEngineId]| ids.iter().map(ToString::to_string).collect::<Vec<_>>().join(" and ");
    assert_ne!(evicted, one_by_one, "it is no example");
    let new: Vec<AcceleratorId> = on.iter().map(|a| AcceleratorId::from(*a)).collect();
    lines.push(format!("an engine is to be launched on {}", accelerator_list(&new)));
    lines.push(format!("one by one: {}", words(&one_by_one)));
    lines.push(format!("deleted:    {}", words(&evicted)));
    case.advance(Millis::secs(1));
    lines.push(format!("it waits: {}", case.reason("new")));
    lines.join("\n")
}

/// Evicts the oldest sleepers of each accelerator in turn until it is within its budget.
fn one_by_one<'a>(
    case: &PairingCase,
    sleepers: &'a [PairingEngine],
    on: &[&str],
) -> Vec<&'a PairingEngineId> {
    let mut evicted = BTreeSet::new();
    for a in on.iter().map(|a| AcceleratorId::from(*a)) {
        let mut reserved = case.node().reserved(&a);
        for sleeper in sleepers.iter().filter(|s| s.uses(&a)) {
            if evicted.contains(&sleeper.id) {
                reserved = reserved.saturating_sub(sleeper.reserved);
            }
        }
        for sleeper in sleepers.iter().filter(|s| s.uses(&a)) {
            if reserved > BUDGET && evicted.insert(&sleeper.id) {
                reserved = reserved.saturating_sub(sleeper.reserved);
            }
        }
    }
    sleepers.iter().map(|s| &s.id).filter(|id| evicted.contains(id)).collect()
}

#[test]
fn engines_of_one_accelerator() {
    let mut case = asleep(1, &[(1, &["a"]), (4, &["a"]), (7, &["a"])]);
    insta::assert_snapshot!(report(&mut case, ProviderMode::Sleep, &["a"]));
}

#[test]
fn engines_of_one_accelerator_that_free_more_than_is_needed() {
    let mut case = asleep(1, &[(5, &["a"]), (3, &["a"]), (1, &["a"])]);
    insta::assert_snapshot!(report(&mut case, ProviderMode::Sleep, &["a"]));
}

#[test]
fn engines_of_two_accelerators() {
    let mut case = asleep(4, &[(3, &["a", "c"]), (3, &["b", "d"]), (3, &["a", "b"]), (3, &["a", "b"])]);
    insta::assert_snapshot!(report(&mut case, ProviderMode::Sleep, &["a", "b"]));
}

#[test]
fn engines_of_four_accelerators() {
    let (left, right) = (["a", "b", "e", "f"], ["c", "d", "g", "h"]);
    let first = ["a", "b", "c", "d"];
    let mut case = asleep(8, &[(3, &left), (3, &right), (3, &first), (3, &first)]);
    insta::assert_snapshot!(report(&mut case, ProviderMode::Sleep, &first));
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
    let mut case = asleep(4, &all);
    insta::assert_snapshot!(report(&mut case, ProviderMode::Sleep, &["a", "b", "c", "d"]));
}

#[test]
fn engines_of_several_launchers_of_a_node() {
    let all: [(u64, &[&str]); 4] =
        [(3, &["a", "c"]), (3, &["b", "d"]), (3, &["b", "c", "d"]), (3, &["a", "c", "d"])];
    let mut case = asleep_in_launchers(4, &all);
    let launcher = case.launcher_ready("c");
    assert_eq!(case.node().engines_in(&launcher).count(), 0, "what is too much is in other launchers");
    insta::assert_snapshot!(report(&mut case, ProviderMode::Launcher, &["c", "d"]));
    let (gone, new) = (
        engine(ProviderMode::Launcher, 3, &["b", "c", "d"]),
        engine(ProviderMode::Launcher, 99, &["c", "d"]),
    );
    assert!(!case.has(binds(&new)));
    case.done(ends(&gone));
    case.done(forgets(&gone));
    assert!(case.has(binds(&new)), "{}", case.reason("new"));
}

/// Three launchers, each with a sleeper on `c`; the last sleeper has just fallen asleep.
#[test]
fn nothing_goes_before_the_last_sleep_of_any_launcher_has_settled() {
    let mut case = asleep_in_launchers(3, &[(3, &["a", "c"]), (3, &["b", "c"])]);
    let third = awake_in_launcher(&mut case, 3, 3, &["c"]);
    case.delete("of-3");
    case.done(closes_gate(&third));
    case.complete(sleeps(&third), Ok(CommandReply::Asleep { residue: None }));
    case.done(unbinds(&third));
    let mut lines = kept(&case);
    case.requester("new", ask(ProviderMode::Launcher, 99), &["c"], |_| ());
    let from = case.now;
    for step in [Millis::ZERO, Millis::secs(59), Millis(999), Millis(1)] {
        case.advance(step);
        let evicted = sleepers(&case).into_iter().filter(|s| case.has(ends(&s.id))).map(|s| s.id.to_string());
        let gone: Vec<String> = evicted.collect();
        let evicted_text = if gone.is_empty() { "nothing".to_owned() } else { gone.join(" and ") };
        let reason = case.reason("new");
        lines.push(format!(
            "{} after the last sleep: {evicted_text} is deleted; {reason}",
            case.now.since(from)
        ));
    }
    insta::assert_snapshot!(lines.join("\n"));
}
