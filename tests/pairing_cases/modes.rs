//! What differs between the three modes: how an engine is made, and how it is put away.

use rouse::pairing::{
    event::{Event, Stage},
    ids::{Mode, ProviderId},
    node::State,
};

use crate::driver::*;

#[test]
fn plain_a_provider_comes_and_goes_with_its_requester() {
    let mut case = Case::new(1);
    let id = case.cold_start("one", ask(Mode::Plain, 1), &["a"]);
    case.delete("one");
    case.done(gates(&id));
    assert!(!case.has(sleeps(&id)));
    case.done(ends(&id));
    case.done(unbinds(&id));
    case.provider(&ProviderId::direct(&id), Stage::Ended, |seen| seen.deleting = true);
    case.provider_gone(&ProviderId::direct(&id));
    case.finalized("one");
    assert!(case.node().engines.is_empty() && case.node().providers.is_empty());
}

#[test]
fn sleep_the_next_requester_with_the_same_accelerators_wakes_it() {
    let mut case = Case::new(2);
    let id = case.cold_start("one", ask(Mode::Sleep, 1), &["a", "b"]);
    case.put_to_sleep("one", &id);
    // As its stub says them.
    case.requester("two", ask(Mode::Sleep, 1), &["b", "a"], |_| ());
    case.done(binds(&id));
    case.done(wakes(&id));
    case.done(proves(&id));
    case.done(opens(&id));
    assert_eq!(case.node().engine_of(&"two".into()).map(|e| e.state), Some(State::Awake));
    assert_eq!(case.node().providers.len(), 1);
}

#[test]
fn sleep_other_accelerators_are_another_engine() {
    let mut case = Case::new(2);
    let id = case.cold_start("one", ask(Mode::Sleep, 1), &["a"]);
    case.put_to_sleep("one", &id);
    case.requester("two", ask(Mode::Sleep, 1), &["b"], |_| ());
    assert!(!case.has(binds(&id)) && case.has(creates(&engine(Mode::Sleep, 1, &["b"]))));
}

#[test]
fn launcher_the_launcher_of_the_lowest_accelerator_is_asked_and_bound_first() {
    let mut case = Case::new(3);
    let id = engine(Mode::Launcher, 1, &["b", "c"]);
    case.requester("one", ask(Mode::Launcher, 1), &["c", "b"], |_| ());
    assert!(case.has(makes_launcher) && !case.has(binds(&id)));
    let launcher = case.launcher_ready("b");
    assert_eq!(case.known(&id).provider, launcher);
    assert!(!case.has(launches(&id)), "nothing is launched that is not written down");
    case.done(binds(&id));
    case.done(launches(&id));
    assert!(!case.has(proves(&id)));
    let generation = generation(case.known(&id));
    case.on(Event::Answers { node: node(), engine: id.clone(), generation });
    case.done(proves(&id));
    case.done(opens(&id));
    assert_eq!(case.state(&id), Some(State::Awake));
}

#[test]
fn a_requester_that_is_too_large_is_told_so() {
    let mut case = Case::new(1);
    let mut large = ask(Mode::Sleep, 1);
    large.sizes.awake = rouse::units::Bytes::gib(81);
    case.requester("one", large, &["a"], |_| ());
    assert!(!case.has(starts_anything));
    assert_eq!(case.reason("one"), "it needs 81Gi of a, which has 80Gi");
}
