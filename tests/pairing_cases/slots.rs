//! Several requesters on one accelerator: whose engine gets the memory, and which requesters wait for it.

use rouse::{
    pairing::{
        EngineReport,
        event::{
            CommandReply, LauncherBuildPolicy, PairingEvent, ProviderPhase, RequestedEngine, WantedState,
        },
        ids::{LauncherBuild, PairingEngineId, ProviderId, ProviderMode},
    },
    units::{Bytes, Millis},
};

use crate::{bound_sleepers::*, harness::*};

/// An engine with this memory awake and asleep.
fn sized(fingerprint: u64, awake: u64, asleep: u64) -> RequestedEngine {
    let mut requested = ask(ProviderMode::Sleep, fingerprint);
    (requested.sizes.awake, requested.sizes.asleep) = (Bytes::gib(awake), Bytes::gib(asleep));
    requested
}

fn on_a(fingerprint: u64) -> PairingEngineId {
    engine(ProviderMode::Sleep, fingerprint, &["a"])
}

/// Engines 1 to `count` of 60 GiB in one accelerator of 80: bound sleepers, and the last one is awake.
fn last_awake(count: u64) -> PairingCase {
    let mut case = PairingCase::new(1);
    for fingerprint in 1..=count {
        let id = actuated(&mut case, &format!("of-{fingerprint}"), sized(fingerprint, 60, 2), &["a"]);
        if fingerprint < count {
            falls_asleep(&mut case, &format!("of-{fingerprint}"), &id);
        }
    }
    case
}

#[test]
fn an_engine_starts_and_wakes_beside_the_bound_sleepers_of_its_accelerator() {
    let mut case = last_awake(4);
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(66), "nothing waits for a settled meter");
    for (previous, next) in [(4, 1), (1, 3), (3, 4)] {
        falls_asleep(&mut case, &format!("of-{previous}"), &on_a(previous));
        want(&mut case, &format!("of-{next}"), WantedState::Awake);
        wakes_up(&mut case, &on_a(next));
    }
    assert_eq!((case.node().requesters.len(), case.node().providers.len()), (4, 4), "no Pod comes or goes");
    assert!(!(1..=4).any(|fingerprint| case.has(ends(&on_a(fingerprint)))));
}

#[test]
fn a_wake_waits_until_the_memory_of_its_accelerator_is_released() {
    let mut case = last_awake(2);
    want(&mut case, "of-1", WantedState::Awake);
    assert!(!case.has(wakes(&on_a(1))));
    assert_eq!(report(&case, "of-1"), Some(EngineReport::Waiting));
    assert_eq!(case.reason("of-1"), "60Gi of a is held by 2@a, which is awake");
    want(&mut case, "of-2", ASLEEP);
    case.done(closes_gate(&on_a(2)));
    assert!(!case.has(wakes(&on_a(1))), "it falls asleep, and holds its memory until then");
    case.complete(sleeps(&on_a(2)), Ok(CommandReply::Asleep { residue: None }));
    wakes_up(&mut case, &on_a(1));
}

#[test]
fn after_its_want_was_withdrawn_a_sleeper_gets_no_memory_and_a_sleep_goes_on() {
    let mut case = last_awake(2);
    let withdraw = |case: &mut PairingCase, id: &str| {
        case.on(PairingEvent::WantWithdrawn { node: node(), requester: id.into() });
    };
    want(&mut case, "of-1", WantedState::Awake);
    assert_eq!(report(&case, "of-1"), Some(EngineReport::Waiting));
    withdraw(&mut case, "of-1");
    assert!(matches!(report(&case, "of-1"), Some(EngineReport::Asleep { .. })));
    want(&mut case, "of-2", ASLEEP);
    withdraw(&mut case, "of-2");
    case.done(closes_gate(&on_a(2)));
    case.complete(sleeps(&on_a(2)), Ok(CommandReply::Asleep { residue: None }));
    case.advance(Millis::secs(60));
    let is_woken = [1, 2].map(|fingerprint| case.has(wakes(&on_a(fingerprint))));
    assert_eq!(is_woken, [false; 2], "there is room: {:#?}", case.story);
    // Nothing is left of the first want that would bar another one.
    want(&mut case, "of-1", WantedState::Awake);
    wakes_up(&mut case, &on_a(1));
}

#[test]
fn a_sleeper_that_was_bound_for_a_want_that_is_withdrawn_is_not_woken() {
    let mut case = PairingCase::new(1);
    let id = actuated(&mut case, "one", sized(1, 60, 2), &["a"]);
    case.put_to_sleep("one", &id);
    wanted(&mut case, "two", sized(1, 60, 2), &["a"]);
    assert_eq!(case.known(&id).reserved, Bytes::gib(60));
    case.on(PairingEvent::WantWithdrawn { node: node(), requester: "two".into() });
    case.done(binds(&id));
    assert!(!case.has(wakes(&id)), "{:#?}", case.story);
    assert_eq!(case.known(&id).reserved, Bytes::gib(2), "others may have the memory");
    want(&mut case, "two", WantedState::Awake);
    wakes_up(&mut case, &id);
}

#[test]
fn wakes_are_served_in_the_order_of_their_wants() {
    let mut case = last_awake(3);
    want(&mut case, "of-2", WantedState::Awake);
    case.advance(Millis::secs(1));
    want(&mut case, "of-1", WantedState::Awake);
    case.advance(Millis::secs(1));
    want(&mut case, "of-2", WantedState::Awake);
    assert_eq!(case.reason("of-1"), "an older requester waits for a");
    falls_asleep(&mut case, "of-3", &on_a(3));
    assert!(!case.has(wakes(&on_a(1))));
    wakes_up(&mut case, &on_a(2));
    falls_asleep(&mut case, "of-2", &on_a(2));
    wakes_up(&mut case, &on_a(1));
}

#[test]
fn a_small_engine_does_not_pass_a_large_one_that_waits_for_memory() {
    let mut case = last_awake(2);
    let id = actuated(&mut case, "small", sized(3, 10, 1), &["a"]);
    falls_asleep(&mut case, "small", &id);
    want(&mut case, "of-1", WantedState::Awake);
    want(&mut case, "small", WantedState::Awake);
    assert!(!case.has(wakes(&id)), "60 and 10 and 2 GiB would fit");
    assert_eq!(case.reason("small"), "an older requester waits for a");
    want(&mut case, "of-1", ASLEEP);
    wakes_up(&mut case, &id);
}

#[test]
fn a_bound_sleeper_stays_and_unbound_ones_make_room_for_a_wake() {
    let mut case = PairingCase::new(1);
    let unbound = case.cold_start("old", sized(9, 20, 8), &["a"]);
    case.put_to_sleep("old", &unbound);
    let one = actuated(&mut case, "one", sized(1, 70, 2), &["a"]);
    falls_asleep(&mut case, "one", &one);
    let two = actuated(&mut case, "two", sized(2, 70, 4), &["a"]);
    falls_asleep(&mut case, "two", &two);
    assert!(!case.has(ends(&unbound)), "2 and 70 and 8 GiB fit");
    want(&mut case, "one", WantedState::Awake);
    assert!(case.has(ends(&unbound)) && !case.has(ends(&two)), "{:#?}", case.story);
    assert_eq!(case.reason("one"), "8Gi of a is held by 9@a, which is being stopped");
    case.done(ends(&unbound));
    case.provider_gone(&ProviderId::direct(&unbound));
    wakes_up(&mut case, &one);
}

/// The budget is about unbound sleepers, and a switch waits neither for a meter nor for a sleep to settle.
#[test]
fn a_bound_sleeper_wakes_at_once_whatever_unbound_ones_keep() {
    let mut case = PairingCase::new(1);
    let one = actuated(&mut case, "one", sized(1, 20, 2), &["a"]);
    falls_asleep(&mut case, "one", &one);
    let first = case.cold_start("first", sized(8, 20, 5), &["a"]);
    case.put_to_sleep("first", &first);
    let second = case.cold_start("second", sized(9, 20, 5), &["a"]);
    case.delete("second");
    case.done(closes_gate(&second));
    case.complete(sleeps(&second), Ok(CommandReply::Asleep { residue: None }));
    case.done(unbinds(&second));
    // They keep 10 GiB of the 8 allowed, and the last sleep is recent.
    want(&mut case, "one", WantedState::Awake);
    wakes_up(&mut case, &one);
    assert!(!case.has(ends(&first)) && !case.has(ends(&second)), "{:#?}", case.story);
    case.advance(Millis::secs(61));
    assert!(case.has(ends(&first)), "{:#?}", case.story);
}

#[test]
fn no_bound_sleeper_is_evicted_or_expires() {
    let mut case = PairingCase::new(1);
    let requested = RequestedEngine { stop_after: Some(Millis::secs(60)), ..sized(1, 60, 2) };
    let id = actuated(&mut case, "one", requested, &["a"]);
    falls_asleep(&mut case, "one", &id);
    wanted(&mut case, "two", sized(2, 79, 2), &["a"]);
    case.advance(Millis::secs(1000));
    assert!(!case.has(ends(&id)) && !case.has(creates(&on_a(2))), "{:#?}", case.story);
    assert_eq!(case.reason("two"), "2Gi of a is held by 1@a, which is asleep");
}

#[test]
fn a_requester_that_is_too_large_for_its_accelerator_keeps_nobody_waiting() {
    let mut case = PairingCase::new(1);
    wanted(&mut case, "large", sized(1, 81, 2), &["a"]);
    actuated(&mut case, "two", sized(2, 60, 2), &["a"]);
    assert_eq!(case.reason("large"), "the engine needs 81Gi of a, which has 80Gi");
}

#[test]
fn a_launcher_that_is_full_of_bound_engines_keeps_only_its_own_requesters_waiting() {
    let mut case = PairingCase::new(1);
    let build = LauncherBuild(1);
    let policy = LauncherBuildPolicy { obsolete: false, max_engines: Some(1) };
    case.on(PairingEvent::LauncherBuild { build, policy });
    let launcher = ProviderId::launcher("a".into());
    case.provider(&launcher, ProviderPhase::Ready, |observed| observed.build = Some(build));
    let launched =
        |fingerprint| RequestedEngine { build: Some(build), ..ask(ProviderMode::Launcher, fingerprint) };
    let id = engine(ProviderMode::Launcher, 1, &["a"]);
    wanted(&mut case, "one", launched(1), &["a"]);
    case.launched(&id);
    case.finalized("one");
    falls_asleep(&mut case, "one", &id);
    wanted(&mut case, "two", launched(2), &["a"]);
    assert_eq!(case.reason("two"), "the launcher's limit of 1 is reached: 1@a is asleep");
    actuated(&mut case, "three", sized(3, 60, 2), &["a"]);
    falls_asleep(&mut case, "three", &on_a(3));
    want(&mut case, "one", WantedState::Awake);
    wakes_up(&mut case, &id);
}

#[test]
fn a_requester_that_waits_for_its_launcher_keeps_nobody_from_the_memory() {
    let mut case = PairingCase::new(1);
    let of_build = |fingerprint, build| RequestedEngine {
        build: Some(LauncherBuild(build)),
        ..ask(ProviderMode::Launcher, fingerprint)
    };
    wanted(&mut case, "one", of_build(1, 1), &["a"]);
    case.provider(&ProviderId::launcher("a".into()), ProviderPhase::Running, |observed| {
        observed.build = Some(LauncherBuild(1))
    });
    assert_eq!(case.reason("one"), "the launcher is not ready");
    actuated(&mut case, "two", sized(2, 60, 2), &["a"]);
    wanted(&mut case, "three", of_build(3, 2), &["a"]);
    assert_eq!(case.reason("three"), "an older requester waits for launcher@a");
    assert!(!case.has(deletes_launcher), "two builds would replace each other by turns");
}
