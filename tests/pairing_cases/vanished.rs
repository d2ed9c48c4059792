//! A provider's object vanishes before its containers are seen to end: its memory stays reserved until their end is
//! known.

use rouse::{
    pairing::{
        event::{PairingEvent, ProviderPhase},
        ids::{PairingEngineId, ProviderId, ProviderMode},
        settings::PairingSettings,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

/// An engine with 60 of 80 GiB whose Pod vanishes; another requester waits for its accelerator.
fn vanished(case: &mut PairingCase) -> (PairingEngineId, PairingEngineId) {
    let old = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.provider_vanished(&ProviderId::direct(&old));
    assert!(case.has(deletes("one")), "its engine is lost to it");
    case.kill("one");
    case.on(PairingEvent::RequesterGone { node: node(), requester: "one".into() });
    case.requester("two", ask(ProviderMode::Sleep, 2), &["a"], |_| ());
    (old, engine(ProviderMode::Sleep, 2, &["a"]))
}

#[test]
fn deleted_by_force_it_counts_until_its_kubelet_must_have_ended_it() {
    let mut case = PairingCase::new(1);
    let (old, new) = vanished(&mut case);
    assert_eq!(case.state(&old), None, "its life is over");
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60), "its process may go on");
    assert!(!case.has(creates(&new)));
    assert!(
        case.reason("two").contains("may still be held by a Pod that vanished"),
        "{}",
        case.reason("two")
    );
    case.advance(PairingSettings::default().vanished_retention);
    assert!(case.has(creates(&new)));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60), "which is the newcomer's");
}

#[test]
fn the_next_pod_of_its_name_waits_as_well() {
    let mut case = PairingCase::new(1);
    let (old, _) = vanished(&mut case);
    case.delete("two");
    case.on(PairingEvent::RequesterGone { node: node(), requester: "two".into() });
    case.requester("three", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    assert!(!case.has(creates(&old)));
    assert!(case.reason("three").contains("may still be held"), "{}", case.reason("three"));
}

#[test]
fn seen_ended_after_all_it_is_free_at_once() {
    let mut case = PairingCase::new(1);
    let (old, new) = vanished(&mut case);
    case.provider_gone(&ProviderId::direct(&old));
    assert!(case.has(creates(&new)));
}

#[test]
fn seen_ended_before_its_object_went_nothing_of_it_is_left() {
    let mut case = PairingCase::new(1);
    let old = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.provider(&ProviderId::direct(&old), ProviderPhase::Terminated, |_| ());
    case.provider_vanished(&ProviderId::direct(&old));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::ZERO);
}

#[test]
fn a_reading_that_counts_says_what_can_be_left_of_it() {
    let mut case = PairingCase::new(1);
    let (_, new) = vanished(&mut case);
    let at = case.now;
    case.on(PairingEvent::MeterRead { node: node(), accelerator: "a".into(), used: Bytes::ZERO, at });
    assert!(!case.has(creates(&new)), "the meter lags");
    case.advance(PairingSettings::default().meter_lag);
    let at = case.now;
    case.on(PairingEvent::MeterRead { node: node(), accelerator: "a".into(), used: Bytes::gib(30), at });
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(30), "half of it is gone");
    case.on(PairingEvent::MeterRead { node: node(), accelerator: "a".into(), used: Bytes::gib(1), at });
    assert!(case.has(creates(&new)), "60 and 1 are less than 80");
}

#[test]
fn while_its_kubelet_is_silent_nobody_ends_it() {
    let mut case = PairingCase::new(1);
    let (_, new) = vanished(&mut case);
    case.on(PairingEvent::KubeletReporting { node: node(), reports: false });
    case.advance(Millis::secs(7200));
    assert!(!case.has(creates(&new)), "a node that is cut off goes on");
    case.on(PairingEvent::KubeletReporting { node: node(), reports: true });
    case.advance(Millis(PairingSettings::default().vanished_retention.0 - 1));
    assert!(!case.has(creates(&new)));
    case.advance(Millis(1));
    assert!(case.has(creates(&new)));
}

#[test]
fn what_a_node_that_is_gone_left_is_forgotten_in_the_end() {
    let mut case = PairingCase::new(1);
    let old = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.on(PairingEvent::KubeletReporting { node: node(), reports: false });
    case.on(PairingEvent::NodeGone { node: node() });
    case.provider_vanished(&ProviderId::direct(&old));
    case.on(PairingEvent::RequesterGone { node: node(), requester: "one".into() });
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60), "it may come back as it was");
    case.advance(PairingSettings::default().vanished_retention);
    assert!(case.pairing.node(&node()).is_none(), "and nothing of it is kept");
}

#[test]
fn all_engines_of_a_launcher_leave_what_they_held() {
    let mut case = PairingCase::new(1);
    let launcher = case.launcher_ready("a");
    let id = engine(ProviderMode::Launcher, 1, &["a"]);
    case.requester("one", ask(ProviderMode::Launcher, 1), &["a"], |_| ());
    case.done(binds(&id));
    case.done(launches(&id));
    case.provider_vanished(&launcher);
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60));
    assert!(case.node().engines.is_empty());
}

#[test]
fn gone_before_it_was_seen_it_may_have_left_something() {
    let mut case = PairingCase::new(1);
    let id = engine(ProviderMode::Sleep, 1, &["a"]);
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.done(creates(&id));
    case.delete("one");
    case.complete(ends(&id), condition(rouse::pairing::event::QueriedCondition::Absent));
    assert_eq!(case.state(&id), None);
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60));
    case.advance(PairingSettings::default().vanished_retention);
    assert_eq!(case.node().reserved(&"a".into()), Bytes::ZERO, "{:#?}", case.story);
}

#[test]
fn ordered_twice_it_is_not_believed_dead_while_the_second_order_may_arrive() {
    let mut case = PairingCase::new(1);
    let id = engine(ProviderMode::Launcher, 1, &["a"]);
    case.launcher_ready("a");
    case.requester("one", ask(ProviderMode::Launcher, 1), &["a"], |_| ());
    case.done(binds(&id));
    let settings = PairingSettings::default();
    case.advance(settings.call_timeout);
    assert!(case.has(launches(&id)));
    let generation = generation(case.known(&id));
    case.delete("one");
    case.advance(settings.call_timeout);
    case.done(ends(&id));
    case.on(PairingEvent::EngineDied { node: node(), engine: id.clone(), generation, gone: true });
    assert_eq!(case.known(&id).reserved, Bytes::gib(60));
    case.advance(settings.call_timeout);
    case.done(ends(&id));
    assert_eq!(case.known(&id).reserved, Bytes::ZERO);
}
