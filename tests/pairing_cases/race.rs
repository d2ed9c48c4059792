//! The race for an accelerator whose previous engine is still awake.
//!
//! A requester is killed without grace, and the kubelet reassigns its accelerator at once.

use rouse::{
    pairing::{
        event::{CommandFailure, CommandReply, PairingEvent, ProviderPhase, RequestedEngine},
        ids::{ProviderId, ProviderMode},
        node::PairingEngineState,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

#[test]
fn the_newcomer_waits_until_the_engine_before_is_confirmed_asleep() {
    let mut case = PairingCase::new(1);
    let old = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.kill("one");
    let new = engine(ProviderMode::Sleep, 2, &["a"]);
    case.requester("two", ask(ProviderMode::Sleep, 2), &["a"], |_| ());
    assert!(!case.has(starts_anything_of_two), "nothing starts beside an engine that is awake");
    assert!(case.reason("two").contains("held by 1@a"), "{}", case.reason("two"));
    // No request can reach the engine any more, so it is put to sleep at once, without the stub.
    case.complete(sleeps(&old), Ok(CommandReply::Asleep { residue: None }));
    assert_eq!(case.known(&old).reserved, Bytes::gib(2));
    case.done(creates(&new));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(62));
}

fn starts_anything_of_two(order: &rouse::pairing::command::PairingAction) -> bool {
    creates(&engine(ProviderMode::Sleep, 2, &["a"]))(order)
}

#[test]
fn the_newcomer_that_asks_for_the_same_wakes_it_after_it_fell_asleep() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.kill("one");
    case.requester("two", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    assert!(!case.has(wakes(&id)) && !case.has(binds(&id)));
    case.complete(sleeps(&id), Ok(CommandReply::Asleep { residue: None }));
    case.done(unbinds(&id));
    assert!(!case.has(wakes(&id)), "it is bound first");
    case.done(binds(&id));
    case.done(wakes(&id));
    case.done(sends_canary(&id));
    case.done(opens(&id));
    assert_eq!(case.state(&id), Some(PairingEngineState::Awake));
}

#[test]
fn the_newcomer_waits_when_the_engine_before_does_not_answer_until_its_pod_is_seen_gone() {
    let mut case = PairingCase::new(1);
    let old = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.kill("one");
    case.requester("two", ask(ProviderMode::Sleep, 2), &["a"], |_| ());
    case.complete(sleeps(&old), Err(CommandFailure::Unreachable));
    case.done(ends(&old));
    case.done(unbinds(&old));
    case.advance(Millis::secs(300));
    let new = engine(ProviderMode::Sleep, 2, &["a"]);
    assert!(!case.has(creates(&new)), "a reservation does not shrink because an order was given");
    assert_eq!(case.known(&old).reserved, Bytes::gib(60));
    case.on(PairingEvent::RequesterGone { node: node(), requester: "one".into() });
    case.provider(&ProviderId::direct(&old), ProviderPhase::Terminated, |observed| observed.deleting = true);
    assert!(case.has(creates(&new)));
}

#[test]
fn small_engines_may_be_awake_together_where_both_fit() {
    let mut case = PairingCase::new(1);
    let mut small = ask(ProviderMode::Sleep, 1);
    small.sizes.awake = Bytes::gib(25);
    case.cold_start("one", small.clone(), &["a"]);
    let beside = RequestedEngine { fingerprint: rouse::pairing::ids::EngineFingerprint(3), ..small };
    let beside = case.cold_start("beside", beside, &["a"]);
    assert_eq!(case.state(&beside), Some(PairingEngineState::Awake), "they share it");
    case.kill("one");
    small.fingerprint = rouse::pairing::ids::EngineFingerprint(2);
    case.requester("two", small, &["a"], |_| ());
    assert!(!case.has(creates(&engine(ProviderMode::Sleep, 2, &["a"]))), "not while the other falls asleep");
    case.complete(
        sleeps(&engine(ProviderMode::Sleep, 1, &["a"])),
        Ok(CommandReply::Asleep { residue: None }),
    );
    assert!(case.has(creates(&engine(ProviderMode::Sleep, 2, &["a"]))));
}
