//! The Pod that is to be made has a name that is taken: a leader before made one, or another engine's is still there.

use rouse::{
    pairing::{
        event::{Cause, Condition, Event, Record, Stage},
        ids::{EngineId, Fingerprint, Mode, ProviderId},
        node::State,
    },
    units::{Bytes, Generation, Millis},
};

use crate::driver::*;

/// A requester's engine is ordered; the record of one with the same name that the leader before made for it.
fn ordered(case: &mut Case, mode: Mode) -> (EngineId, Record) {
    case.requester("one", ask(mode, 1), &["a"], |_| ());
    let id = engine(mode, 1, &["a"]);
    let before = Generation(generation(case.known(&id)).0 - 1);
    let record = Record { generation: before, ..case.record(&id) };
    (id, record)
}

fn elder(case: &mut Case, id: &EngineId, stage: Stage, record: &Record, deleting: bool) {
    case.provider(&ProviderId::direct(id), stage, |seen| {
        (seen.uid, seen.records, seen.deleting) = ("elder".into(), vec![record.clone()], deleting);
    });
}

fn elder_gone(case: &mut Case, id: &EngineId) {
    let (provider, uid) = (ProviderId::direct(id), "elder".into());
    case.on(Event::ProviderGone { node: node(), provider, uid });
}

/// It serves the requester as it is.
fn is_adopted(case: &mut Case, id: &EngineId) {
    case.settle(queries(id), condition(Condition::Awake));
    case.done(opens(id));
    assert_eq!(case.state(id), Some(State::Awake));
    assert_eq!(case.node().engine_of(&"one".into()).map(|e| e.id.clone()), Some(id.clone()));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60));
    assert_eq!(case.failures("one"), 0, "nothing failed");
}

#[test]
fn what_a_leader_before_made_for_it_is_adopted_when_it_is_seen() {
    let mut case = Case::new(1);
    let (id, record) = ordered(&mut case, Mode::Sleep);
    case.settle(creates(&id), Err(Cause::Conflict));
    elder(&mut case, &id, Stage::Ready, &record, false);
    is_adopted(&mut case, &id);
}

#[test]
fn what_was_seen_before_the_order_was_answered_is_adopted_then() {
    let mut case = Case::new(1);
    let (id, record) = ordered(&mut case, Mode::Sleep);
    elder(&mut case, &id, Stage::Ready, &record, false);
    assert!(!case.has(queries(&id)), "it may be what is known to be gone, seen late");
    case.settle(creates(&id), Err(Cause::Conflict));
    is_adopted(&mut case, &id);
}

#[test]
fn one_that_sleeps_is_bound_and_woken() {
    let mut case = Case::new(1);
    let (id, record) = ordered(&mut case, Mode::Sleep);
    case.settle(creates(&id), Err(Cause::Conflict));
    elder(&mut case, &id, Stage::Ready, &Record { requester: None, ..record }, false);
    case.settle(queries(&id), asleep());
    case.done(binds(&id));
    case.done(wakes(&id));
    case.done(proves(&id));
    case.done(opens(&id));
}

#[test]
fn one_that_is_being_deleted_is_waited_for_and_then_made_anew_at_once() {
    let mut case = Case::new(1);
    let (id, record) = ordered(&mut case, Mode::Sleep);
    case.settle(creates(&id), Err(Cause::Conflict));
    elder(&mut case, &id, Stage::Ready, &Record { requester: None, ..record }, true);
    assert!(!case.has(creates(&id)));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60), "its memory counts");
    elder_gone(&mut case, &id);
    case.done(creates(&id));
}

#[test]
fn one_that_went_without_being_seen_is_made_anew_at_once() {
    let mut case = Case::new(1);
    let (id, _) = ordered(&mut case, Mode::Sleep);
    case.settle(creates(&id), Err(Cause::Conflict));
    assert!(!case.has(creates(&id)));
    elder_gone(&mut case, &id);
    case.done(creates(&id));
}

#[test]
fn one_that_nobody_tells_of_is_tried_again_soon() {
    let mut case = Case::new(1);
    let (id, _) = ordered(&mut case, Mode::Sleep);
    for _ in 0..3 {
        case.settle(creates(&id), Err(Cause::Conflict));
        case.after(Millis::secs(1));
    }
    case.done(creates(&id));
}

#[test]
fn what_has_the_name_and_is_another_engine_is_ended_first() {
    let mut case = Case::new(1);
    let (id, record) = ordered(&mut case, Mode::Plain);
    case.settle(creates(&id), Err(Cause::Conflict));
    let other = EngineId { fingerprint: Fingerprint(2), ..id.clone() };
    let record = Record { engine: other.clone(), requester: Some("gone".into()), ..record };
    elder(&mut case, &id, Stage::Ready, &record, false);
    assert_eq!(case.state(&id), None);
    case.settle(queries(&other), condition(Condition::Awake));
    case.done(ends(&other));
    case.done(unbinds(&other));
    elder_gone(&mut case, &id);
    case.done(creates(&id));
}

#[test]
fn what_is_seen_late_of_a_life_that_is_gone_is_not_taken_for_the_next() {
    let mut case = Case::new(1);
    let (id, record) = ordered(&mut case, Mode::Sleep);
    elder(&mut case, &id, Stage::Ready, &record, true);
    elder_gone(&mut case, &id);
    case.done(creates(&id));
    assert_eq!(case.state(&id), Some(State::Creating));
    assert!(!case.has(creates(&id)));
}
