//! An operation that changes an accelerator's memory never runs beside another whose measurement it would spoil.

use rouse::{
    pairing::{
        event::{CommandReply, PairingEvent, ProviderPhase, RequestedEngine},
        ids::{PairingEngineId, ProviderId, ProviderMode},
        node::PairingEngineState,
        settings::PairingSettings,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

/// An engine of which three fit on an accelerator.
fn small(fingerprint: u64) -> RequestedEngine {
    let mut requested = ask(ProviderMode::Sleep, fingerprint);
    requested.sizes.awake = Bytes::gib(20);
    requested
}

fn on_a(fingerprint: u64) -> PairingEngineId {
    engine(ProviderMode::Sleep, fingerprint, &["a"])
}

/// An awake, open engine whose requester shares the accelerator.
fn awake(case: &mut PairingCase, fingerprint: u64) -> PairingEngineId {
    case.cold_start(&format!("of-{fingerprint}"), small(fingerprint), &["a"])
}

fn sleeper(case: &mut PairingCase, fingerprint: u64) -> PairingEngineId {
    let id = awake(case, fingerprint);
    case.put_to_sleep(&format!("of-{fingerprint}"), &id);
    id
}

#[test]
fn a_launch_waits_until_the_one_before_has_taken_its_memory() {
    let mut case = PairingCase::new(1);
    case.requester("one", small(1), &["a"], |_| ());
    case.requester("two", small(2), &["a"], |_| ());
    case.done(creates(&on_a(1)));
    case.provider(&ProviderId::direct(&on_a(1)), ProviderPhase::Running, |_| ());
    assert!(!case.has(creates(&on_a(2))));
    assert_eq!(case.reason("two"), "1@a is starting on a");
    case.provider(&ProviderId::direct(&on_a(1)), ProviderPhase::Ready, |_| ());
    assert!(case.has(creates(&on_a(2))), "which it has when it answers");
}

#[test]
fn on_other_accelerators_launches_go_on_side_by_side() {
    let mut case = PairingCase::new(2);
    case.requester("one", small(1), &["a"], |_| ());
    case.requester("two", small(2), &["b"], |_| ());
    assert!(case.has(creates(&on_a(1))) && case.has(creates(&engine(ProviderMode::Sleep, 2, &["b"]))));
}

#[test]
fn a_wake_waits_for_a_launch_and_a_launch_for_a_wake() {
    let mut case = PairingCase::new(1);
    let woken = sleeper(&mut case, 1);
    case.requester("launched", small(2), &["a"], |_| ());
    case.requester("woken", small(1), &["a"], |_| ());
    assert!(case.has(creates(&on_a(2))) && !case.has(binds(&woken)));
    case.done(creates(&on_a(2)));
    case.provider(&ProviderId::direct(&on_a(2)), ProviderPhase::Ready, |_| ());
    case.done(binds(&woken));
    case.requester("later", small(3), &["a"], |_| ());
    assert!(!case.has(creates(&on_a(3))), "it is about to be woken");
    case.done(wakes(&woken));
    assert!(case.has(creates(&on_a(3))), "and is: {}", case.reason("later"));
}

#[test]
fn wakes_go_on_side_by_side() {
    let mut case = PairingCase::new(1);
    let (one, two) = (sleeper(&mut case, 1), sleeper(&mut case, 2));
    case.requester("one", small(1), &["a"], |_| ());
    case.requester("two", small(2), &["a"], |_| ());
    case.done(binds(&one));
    case.done(binds(&two));
    assert!(case.has(wakes(&one)) && case.has(wakes(&two)));
}

#[test]
fn nothing_is_launched_or_woken_beside_one_that_falls_asleep() {
    let mut case = PairingCase::new(1);
    let woken = sleeper(&mut case, 1);
    let goes = awake(&mut case, 2);
    case.kill("of-2");
    case.requester("woken", small(1), &["a"], |_| ());
    assert!(case.has(sleeps(&goes)) && !case.has(binds(&woken)));
    assert_eq!(case.reason("woken"), "2@a is falling asleep on a");
    case.complete(sleeps(&goes), Ok(CommandReply::Asleep { residue: Some(Bytes::gib(3)) }));
    assert_eq!(case.known(&goes).residue(), Bytes::gib(3), "it was measured alone");
    assert!(case.has(binds(&woken)));
}

#[test]
fn a_sleep_waits_for_a_launch_beside_it() {
    let mut case = PairingCase::new(1);
    let goes = awake(&mut case, 1);
    case.requester("new", small(2), &["a"], |_| ());
    case.done(creates(&on_a(2)));
    case.delete("of-1");
    case.done(closes_gate(&goes));
    assert!(!case.has(sleeps(&goes)), "what becomes free meanwhile would spoil what the newcomer measures");
    assert!(case.has_finalizer("of-1"));
    case.provider(&ProviderId::direct(&on_a(2)), ProviderPhase::Ready, |_| ());
    assert!(case.has(sleeps(&goes)));
}

#[test]
fn a_sleep_does_not_wait_until_it_is_too_late_for_it() {
    let mut case = PairingCase::new(1);
    let goes = awake(&mut case, 1);
    case.requester("new", small(2), &["a"], |_| ());
    case.done(creates(&on_a(2)));
    case.delete("of-1");
    case.done(closes_gate(&goes));
    case.advance(PairingSettings::default().drain_timeout);
    assert!(case.has(sleeps(&goes)));
    case.complete(sleeps(&goes), Ok(CommandReply::Asleep { residue: Some(Bytes::gib(9)) }));
    assert_eq!(
        case.known(&goes).reserved,
        Bytes::gib(9),
        "more than its own may be in that: no less is reserved"
    );
}

#[test]
fn two_fall_asleep_one_after_the_other() {
    let mut case = PairingCase::new(1);
    let (one, two) = (awake(&mut case, 1), awake(&mut case, 2));
    case.kill("of-1");
    case.kill("of-2");
    assert!(case.has(sleeps(&one)) && !case.has(sleeps(&two)));
    case.complete(sleeps(&one), Ok(CommandReply::Asleep { residue: None }));
    assert!(case.has(sleeps(&two)));
}

#[test]
fn one_that_does_not_end_keeps_nobody_from_a_launch_that_fits_for_ever() {
    let mut case = PairingCase::new(1);
    let id = on_a(1);
    case.requester("one", small(1), &["a"], |_| ());
    case.done(creates(&id));
    case.provider(&ProviderId::direct(&id), ProviderPhase::Running, |_| ());
    case.kill("one");
    case.on(PairingEvent::RequesterGone { node: node(), requester: "one".into() });
    assert!(matches!(case.state(&id), Some(PairingEngineState::Stopping { .. })));
    case.requester("two", small(2), &["a"], |_| ());
    assert!(!case.has(creates(&on_a(2))));
    case.advance(PairingSettings::default().stop_timeout + Millis(1));
    assert!(case.has(creates(&on_a(2))), "{}", case.reason("two"));
}
