//! A provider's object vanishes before anybody saw its containers end: what it held stays reserved until that is known.

use rouse::{
    pairing::{
        event::{Event, Stage},
        ids::{EngineId, Mode, ProviderId},
        settings::Settings,
    },
    units::{Bytes, Millis},
};

use crate::driver::*;

/// An engine of 60 of 80 GiB whose Pod vanishes; another requester waits for its accelerator.
fn vanished(case: &mut Case) -> (EngineId, EngineId) {
    let old = case.cold_start("one", ask(Mode::Sleep, 1), &["a"]);
    case.provider_vanished(&ProviderId::direct(&old));
    assert!(case.has(deletes("one")), "its engine is lost to it");
    case.kill("one");
    case.on(Event::RequesterGone { node: node(), requester: "one".into() });
    case.requester("two", ask(Mode::Sleep, 2), &["a"], |_| ());
    (old, engine(Mode::Sleep, 2, &["a"]))
}

#[test]
fn deleted_by_force_it_counts_until_its_kubelet_must_have_ended_it() {
    let mut case = Case::new(1);
    let (old, new) = vanished(&mut case);
    assert_eq!(case.state(&old), None, "its life is over");
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60), "its process may go on");
    assert!(!case.has(creates(&new)));
    assert!(
        case.reason("two").contains("may still be held by a Pod that vanished"),
        "{}",
        case.reason("two")
    );
    case.after(Settings::default().remains);
    assert!(case.has(creates(&new)));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60), "which is the newcomer's");
}

#[test]
fn the_next_pod_of_its_name_waits_as_well() {
    let mut case = Case::new(1);
    let (old, _) = vanished(&mut case);
    case.delete("two");
    case.on(Event::RequesterGone { node: node(), requester: "two".into() });
    case.requester("three", ask(Mode::Sleep, 1), &["a"], |_| ());
    assert!(!case.has(creates(&old)));
    assert!(case.reason("three").contains("may still be held"), "{}", case.reason("three"));
}

#[test]
fn seen_ended_after_all_it_is_free_at_once() {
    let mut case = Case::new(1);
    let (old, new) = vanished(&mut case);
    case.provider_gone(&ProviderId::direct(&old));
    assert!(case.has(creates(&new)));
}

#[test]
fn seen_ended_before_its_object_went_nothing_of_it_is_left() {
    let mut case = Case::new(1);
    let old = case.cold_start("one", ask(Mode::Sleep, 1), &["a"]);
    case.provider(&ProviderId::direct(&old), Stage::Ended, |_| ());
    case.provider_vanished(&ProviderId::direct(&old));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::ZERO);
}

#[test]
fn a_reading_that_counts_says_what_can_be_left_of_it() {
    let mut case = Case::new(1);
    let (_, new) = vanished(&mut case);
    let at = case.now;
    case.on(Event::Observed { node: node(), accelerator: "a".into(), used: Bytes::ZERO, at });
    assert!(!case.has(creates(&new)), "the meter lags");
    case.after(Settings::default().settle);
    let at = case.now;
    case.on(Event::Observed { node: node(), accelerator: "a".into(), used: Bytes::gib(30), at });
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(30), "half of it is gone");
    case.on(Event::Observed { node: node(), accelerator: "a".into(), used: Bytes::gib(1), at });
    assert!(case.has(creates(&new)), "60 and 1 are less than 80");
}

#[test]
fn while_its_kubelet_is_silent_nobody_ends_it() {
    let mut case = Case::new(1);
    let (_, new) = vanished(&mut case);
    case.on(Event::Heard { node: node(), reports: false });
    case.after(Millis::secs(7200));
    assert!(!case.has(creates(&new)), "a node that is cut off goes on");
    case.on(Event::Heard { node: node(), reports: true });
    case.after(Millis(Settings::default().remains.0 - 1));
    assert!(!case.has(creates(&new)));
    case.after(Millis(1));
    assert!(case.has(creates(&new)));
}

#[test]
fn what_a_node_that_is_gone_left_is_forgotten_in_the_end() {
    let mut case = Case::new(1);
    let old = case.cold_start("one", ask(Mode::Sleep, 1), &["a"]);
    case.on(Event::Heard { node: node(), reports: false });
    case.on(Event::NodeGone { node: node() });
    case.provider_vanished(&ProviderId::direct(&old));
    case.on(Event::RequesterGone { node: node(), requester: "one".into() });
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60), "it may come back as it was");
    case.after(Settings::default().remains);
    assert!(case.pairing.node(&node()).is_none(), "and nothing of it is kept");
}

#[test]
fn all_engines_of_a_launcher_leave_what_they_held() {
    let mut case = Case::new(1);
    let launcher = case.launcher_ready("a");
    let id = engine(Mode::Launcher, 1, &["a"]);
    case.requester("one", ask(Mode::Launcher, 1), &["a"], |_| ());
    case.done(binds(&id));
    case.done(launches(&id));
    case.provider_vanished(&launcher);
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60));
    assert!(case.node().engines.is_empty());
}

#[test]
fn gone_before_it_was_seen_it_may_have_left_something() {
    let mut case = Case::new(1);
    let id = engine(Mode::Sleep, 1, &["a"]);
    case.requester("one", ask(Mode::Sleep, 1), &["a"], |_| ());
    case.done(creates(&id));
    case.delete("one");
    case.settle(ends(&id), condition(rouse::pairing::event::Condition::Absent));
    assert_eq!(case.state(&id), None);
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60));
    case.after(Settings::default().remains);
    assert_eq!(case.node().reserved(&"a".into()), Bytes::ZERO, "{:#?}", case.story);
}

#[test]
fn ordered_twice_it_is_not_believed_dead_while_the_second_order_may_arrive() {
    let mut case = Case::new(1);
    let id = engine(Mode::Launcher, 1, &["a"]);
    case.launcher_ready("a");
    case.requester("one", ask(Mode::Launcher, 1), &["a"], |_| ());
    case.done(binds(&id));
    let settings = Settings::default();
    case.after(settings.call);
    assert!(case.has(launches(&id)));
    let generation = generation(case.known(&id));
    case.delete("one");
    case.after(settings.call);
    case.done(ends(&id));
    case.on(Event::Died { node: node(), engine: id.clone(), generation, gone: true });
    assert_eq!(case.known(&id).held, Bytes::gib(60));
    case.after(settings.call);
    case.done(ends(&id));
    assert_eq!(case.known(&id).held, Bytes::ZERO);
}
