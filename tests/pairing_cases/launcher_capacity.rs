//! How many engines a launcher holds.

use rouse::{
    pairing::{
        event::{CommandReply, LauncherBuildPolicy, PairingEvent, ProviderPhase, RequestedEngine},
        ids::{LauncherBuild, PairingEngineId, ProviderId, ProviderMode},
        node::PairingEngineState,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

/// An engine of which many fit on an accelerator, asleep and awake.
fn small(fingerprint: u64) -> RequestedEngine {
    let mut requested = ask(ProviderMode::Launcher, fingerprint);
    (requested.sizes.awake, requested.sizes.asleep, requested.build) =
        (Bytes::gib(10), Bytes::gib(1), Some(LauncherBuild(1)));
    requested
}

fn on_a(fingerprint: u64) -> PairingEngineId {
    engine(ProviderMode::Launcher, fingerprint, &["a"])
}

fn holds(case: &mut PairingCase, most: u32) {
    case.on(PairingEvent::LauncherBuild {
        build: LauncherBuild(1),
        policy: LauncherBuildPolicy { obsolete: false, max_engines: Some(most) },
    });
}

/// One accelerator with a ready launcher that holds this many engines.
fn launcher_of(most: u32) -> PairingCase {
    let mut case = PairingCase::new(1);
    holds(&mut case, most);
    let launcher = ProviderId::launcher("a".into());
    case.provider(&launcher, ProviderPhase::Ready, |observed| observed.build = Some(LauncherBuild(1)));
    case
}

fn awake(case: &mut PairingCase, fingerprint: u64) -> PairingEngineId {
    let (id, requester) = (on_a(fingerprint), format!("of-{fingerprint}"));
    case.requester(&requester, small(fingerprint), &["a"], |_| ());
    case.launched(&id);
    case.finalized(&requester);
    id
}

fn sleeper(case: &mut PairingCase, fingerprint: u64) -> PairingEngineId {
    let id = awake(case, fingerprint);
    case.put_to_sleep(&format!("of-{fingerprint}"), &id);
    id
}

/// Completes the engine's ordered end.
fn goes(case: &mut PairingCase, id: &PairingEngineId) {
    case.done(ends(id));
    case.done(forgets(id));
}

#[test]
fn the_sleeper_used_longest_ago_makes_place_for_a_further_engine() {
    let mut case = launcher_of(2);
    let (first, second) = (sleeper(&mut case, 1), sleeper(&mut case, 2));
    // Last use counts, not creation.
    case.requester("again", small(1), &["a"], |_| ());
    case.done(binds(&first));
    case.done(wakes(&first));
    case.done(sends_canary(&first));
    case.done(opens(&first));
    case.finalized("again");
    case.put_to_sleep("again", &first);
    case.requester("third", small(3), &["a"], |_| ());
    assert!(case.has(ends(&second)) && !case.has(ends(&first)), "{:#?}", case.story);
    assert_eq!(case.reason("third"), "2@a is being stopped on a");
    assert!(!case.has(binds(&on_a(3))), "nothing is begun before it is gone");
    goes(&mut case, &second);
    case.launched(&on_a(3));
    assert_eq!(case.state(&first), Some(PairingEngineState::Asleep { level: rouse::model::SleepLevel::One }));
}

#[test]
fn as_many_go_as_need_be_and_no_more() {
    let mut case = launcher_of(3);
    let all = [sleeper(&mut case, 1), sleeper(&mut case, 2), sleeper(&mut case, 3)];
    holds(&mut case, 2);
    assert!(!all.iter().any(|id| case.has(ends(id))), "what is there may stay until somebody comes");
    case.requester("fourth", small(4), &["a"], |_| ());
    assert_eq!(all.iter().map(|id| case.has(ends(id))).collect::<Vec<_>>(), [true, true, false]);
}

#[test]
fn where_all_are_bound_the_next_one_waits_and_is_told_why() {
    let mut case = launcher_of(1);
    let id = awake(&mut case, 1);
    case.requester("waits", small(2), &["a"], |_| ());
    assert!(!case.has(ends(&id)) && !case.has(starts_anything));
    assert_eq!(case.reason("waits"), "the launcher's limit of 1 is reached: 1@a is awake");
    case.delete("of-1");
    case.done(closes_gate(&id));
    case.complete(sleeps(&id), Ok(CommandReply::Asleep { residue: None }));
    assert!(!case.has(ends(&id)), "it is bound still");
    case.done(unbinds(&id));
    goes(&mut case, &id);
    case.launched(&on_a(2));
}

#[test]
fn no_sleeper_goes_where_that_is_not_enough() {
    let mut case = launcher_of(3);
    let sleeper = sleeper(&mut case, 1);
    let (_, _) = (awake(&mut case, 2), awake(&mut case, 3));
    holds(&mut case, 2);
    case.requester("waits", small(4), &["a"], |_| ());
    assert!(!case.has(ends(&sleeper)));
    assert!(case.reason("waits").contains("1@a is asleep, 2@a is awake, 3@a is awake"));
    holds(&mut case, 3);
    assert!(case.has(ends(&sleeper)), "a higher limit is looked at");
}

#[test]
fn a_sleeper_that_goes_for_memory_makes_place_as_well() {
    let mut case = launcher_of(2);
    let (first, second) = (sleeper(&mut case, 1), sleeper(&mut case, 2));
    let mut large = small(3);
    large.sizes.awake = Bytes::gib(79);
    case.requester("third", large, &["a"], |_| ());
    assert!(case.has(ends(&first)) && !case.has(ends(&second)), "{:#?}", case.story);
}

#[test]
fn a_full_launcher_wakes_what_it_has() {
    let mut case = launcher_of(2);
    let (first, second) = (sleeper(&mut case, 1), sleeper(&mut case, 2));
    case.requester("again", small(1), &["a"], |_| ());
    assert!(case.has(binds(&first)) && !case.has(ends(&second)));
}

#[test]
fn a_launcher_without_a_limit_holds_what_there_is_memory_for() {
    let mut case = launcher_of(1);
    case.on(PairingEvent::LauncherBuild { build: LauncherBuild(1), policy: LauncherBuildPolicy::default() });
    let all: Vec<PairingEngineId> = (1..=5).map(|fingerprint| sleeper(&mut case, fingerprint)).collect();
    case.advance(Millis::secs(1));
    assert!(!all.iter().any(|id| case.has(ends(id))));
}
