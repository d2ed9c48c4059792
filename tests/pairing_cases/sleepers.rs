//! The sleepers' budget: which sleepers are deleted and when, and which are not.

use rouse::{
    model::SleepLevelPolicy,
    pairing::{
        event::{CommandReply, PairingEvent, RequestedEngine},
        ids::{PairingEngineId, ProviderMode},
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

/// Sleepers with these fingerprints, used in this order, with 3 GiB on each of their accelerators.
fn sleepers(case: &mut PairingCase, all: &[(u64, &[&str])]) -> Vec<PairingEngineId> {
    let mut ids = Vec::new();
    for (fingerprint, on) in all {
        let mut requested = ask(ProviderMode::Sleep, *fingerprint);
        requested.sizes.asleep = Bytes::gib(3);
        let name = format!("of-{fingerprint}");
        let id = case.cold_start(&name, requested, on);
        case.put_to_sleep(&name, &id);
        ids.push(id);
    }
    ids
}

#[test]
fn sleepers_stay_as_long_as_they_are_within_the_budget() {
    let mut case = PairingCase::new(1);
    let ids = sleepers(&mut case, &[(1, &["a"]), (2, &["a"])]);
    let third = case.cold_start("third", ask(ProviderMode::Sleep, 3), &["a"]);
    case.put_to_sleep("third", &third);
    assert!(!ids.iter().any(|id| case.has(ends(id))));
    case.requester("fourth", ask(ProviderMode::Sleep, 4), &["a"], |_| ());
    assert!(!case.has(ends(&ids[0])), "2 + 3 + 3 are 8 GiB, which is the budget");
    assert!(case.has(creates(&engine(ProviderMode::Sleep, 4, &["a"]))));
}

#[test]
fn a_launch_waits_until_what_is_too_much_is_gone() {
    let mut case = PairingCase::new(1);
    let ids = sleepers(&mut case, &[(1, &["a"]), (2, &["a"]), (3, &["a"])]);
    case.requester("new", ask(ProviderMode::Sleep, 4), &["a"], |_| ());
    let new = engine(ProviderMode::Sleep, 4, &["a"]);
    assert!(case.has(ends(&ids[0])) && !case.has(ends(&ids[1])) && !case.has(creates(&new)));
    case.done(ends(&ids[0]));
    assert!(!case.has(creates(&new)));
    case.provider_gone(&rouse::pairing::ids::ProviderId::direct(&ids[0]));
    assert!(case.has(creates(&new)));
}

#[test]
fn nothing_is_deleted_before_the_last_sleep_has_settled() {
    let mut case = PairingCase::new(1);
    let ids = sleepers(&mut case, &[(1, &["a"]), (2, &["a"])]);
    let third = case.cold_start("third", ask(ProviderMode::Sleep, 3), &["a"]);
    case.delete("third");
    case.done(closes_gate(&third));
    case.complete(sleeps(&third), Ok(CommandReply::Asleep { residue: Some(Bytes::gib(3)) }));
    case.done(unbinds(&third));
    case.requester("new", ask(ProviderMode::Sleep, 4), &["a"], |_| ());
    assert!(!ids.iter().any(|id| case.has(ends(id))));
    assert!(case.reason("new").contains("last sleep there is recent"), "{}", case.reason("new"));
    case.advance(Millis::secs(61));
    assert!(case.has(ends(&ids[0])));
}

#[test]
fn the_targets_own_residue_does_not_count_against_its_wake() {
    let mut case = PairingCase::new(1);
    let ids = sleepers(&mut case, &[(1, &["a"]), (2, &["a"]), (3, &["a"])]);
    let mut requested = ask(ProviderMode::Sleep, 1);
    requested.sizes.asleep = Bytes::gib(3);
    case.requester("again", requested, &["a"], |_| ());
    assert!(case.has(binds(&ids[0])), "the other two are within the budget");
    assert!(!ids.iter().any(|id| case.has(ends(id))));
}

#[test]
fn a_reading_from_before_the_last_sleep_settled_does_not_count() {
    let mut case = PairingCase::new(1);
    let ids = sleepers(&mut case, &[(1, &["a"])]);
    // A reading from while the engine was awake, delivered late.
    let at = case.known(&ids[0]).since;
    case.on(PairingEvent::MeterRead { node: node(), accelerator: "a".into(), used: Bytes::gib(63), at });
    case.requester("new", ask(ProviderMode::Sleep, 4), &["a"], |_| ());
    assert!(!case.has(ends(&ids[0])) && case.has(creates(&engine(ProviderMode::Sleep, 4, &["a"]))));
}

#[test]
fn a_reading_that_counts_finds_more_than_was_declared() {
    let mut case = PairingCase::new(1);
    let ids = sleepers(&mut case, &[(1, &["a"]), (2, &["a"])]);
    let at = case.now;
    case.on(PairingEvent::MeterRead { node: node(), accelerator: "a".into(), used: Bytes::gib(11), at });
    case.requester("new", ask(ProviderMode::Sleep, 4), &["a"], |_| ());
    assert!(case.has(ends(&ids[0])) && !case.has(ends(&ids[1])));
    case.done(ends(&ids[0]));
    case.provider_gone(&rouse::pairing::ids::ProviderId::direct(&ids[0]));
    let new = engine(ProviderMode::Sleep, 4, &["a"]);
    assert!(!case.has(creates(&new)), "what is declared is not believed any more: {}", case.reason("new"));
    case.advance(Millis::secs(61));
    let at = case.now;
    case.on(PairingEvent::MeterRead { node: node(), accelerator: "a".into(), used: Bytes::gib(5), at });
    assert!(case.has(creates(&new)));
}

#[test]
fn more_in_use_than_all_sleepers_are_known_to_keep_ends_all_and_is_then_measured_again() {
    let mut case = PairingCase::new(1);
    let ids = sleepers(&mut case, &[(1, &["a"]), (2, &["a"])]);
    let read = |case: &mut PairingCase, gib: u64| {
        let at = case.now;
        case.on(PairingEvent::MeterRead { node: node(), accelerator: "a".into(), used: Bytes::gib(gib), at });
    };
    read(&mut case, 20);
    case.requester("new", ask(ProviderMode::Sleep, 4), &["a"], |_| ());
    assert!(ids.iter().all(|id| case.has(ends(id))), "{}", case.reason("new"));
    for id in &ids {
        case.done(ends(id));
        case.provider_gone(&rouse::pairing::ids::ProviderId::direct(id));
    }
    case.advance(Millis::secs(61));
    // The extra memory was not the sleepers'.
    read(&mut case, 12);
    let new = engine(ProviderMode::Sleep, 4, &["a"]);
    assert!(!case.has(creates(&new)) && case.reason("new").contains("budget"), "{}", case.reason("new"));
    assert_eq!(case.node().engines.len(), 0);
    assert!(case.node().wants_reading_of(&"a".into()), "without a reading the requester waits for ever");
    read(&mut case, 8);
    assert!(case.has(creates(&new)), "{}", case.reason("new"));
}

#[test]
fn one_sleeper_on_both_accelerators_goes_instead_of_one_on_each() {
    let mut case = PairingCase::new(4);
    let on: [(u64, &[&str]); 4] = [(1, &["a", "c"]), (2, &["b", "d"]), (3, &["a", "b"]), (4, &["a", "b"])];
    let ids = sleepers(&mut case, &on);
    case.requester("new", ask(ProviderMode::Sleep, 9), &["a", "b"], |_| ());
    let ended: Vec<_> = ids.iter().map(|id| case.has(ends(id))).collect();
    // 9 GiB on a and on b, of 8 allowed. The oldest sleeper of each also uses an accelerator that is within its budget.
    assert_eq!(ended, [false, false, true, false]);
}

#[test]
fn no_sleeper_goes_in_vain() {
    let mut case = PairingCase::new(1);
    let ids = sleepers(&mut case, &[(1, &["a"])]);
    let mut beside = ask(ProviderMode::Sleep, 2);
    beside.sizes.awake = Bytes::gib(40);
    case.cold_start("stays", beside, &["a"]);
    // 40 GiB are awake and stay, so evicting the sleeper would not make enough room.
    case.requester("new", ask(ProviderMode::Sleep, 3), &["a"], |_| ());
    assert!(!case.has(ends(&ids[0])));
    assert!(case.reason("new").contains("held by 2@a, which is awake"), "{}", case.reason("new"));
}

#[test]
fn a_sleeper_is_ended_once_it_has_slept_for_as_long_as_it_may_and_nobody_wants_it() {
    let mut case = PairingCase::new(1);
    let asked = |fingerprint| RequestedEngine {
        stop_after: Some(Millis::secs(600)),
        ..ask(ProviderMode::Sleep, fingerprint)
    };
    let id = case.cold_start("one", asked(1), &["a"]);
    case.put_to_sleep("one", &id);
    case.advance(Millis::secs(500));
    assert!(!case.has(ends(&id)));
    // A new use restarts its time, and its last requester determines its sleep level.
    case.requester("again", RequestedEngine { level: SleepLevelPolicy::Two, ..asked(1) }, &["a"], |_| ());
    case.done(binds(&id));
    assert_eq!(case.known(&id).level, SleepLevelPolicy::Two);
    case.done(wakes(&id));
    case.done(sends_canary(&id));
    case.done(opens(&id));
    case.finalized("again");
    case.put_to_sleep("again", &id);
    case.advance(Millis::secs(530));
    assert!(!case.has(ends(&id)));
    case.advance(Millis::secs(61));
    assert!(case.has(ends(&id)));
}

/// The engine was put to sleep before its adapters were known.
#[test]
fn a_sleeper_that_has_lost_its_adapters_is_started_anew_and_not_woken() {
    let mut case = PairingCase::new(1);
    let mut requested = ask(ProviderMode::Sleep, 1);
    requested.level = SleepLevelPolicy::Two;
    let id = case.cold_start("one", requested.clone(), &["a"]);
    case.put_to_sleep("one", &id);
    requested.level = SleepLevelPolicy::OneOrStop;
    case.requester("two", requested, &["a"], |_| ());
    assert!(case.has(ends(&id)) && !case.has(binds(&id)), "{:#?}", case.story);
    assert!(case.reason("two").contains("loses its LoRA adapters"), "{}", case.reason("two"));
    case.done(ends(&id));
    case.provider_gone(&rouse::pairing::ids::ProviderId::direct(&id));
    assert!(case.has(creates(&id)) && !case.has(wakes(&id)), "{:#?}", case.story);
    assert_eq!(case.failures("two"), 0, "nothing failed");
}
