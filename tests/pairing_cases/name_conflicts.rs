//! The name of a Pod to be created is taken: a previous leader created the Pod, or another engine's Pod still has the
//! name.

use rouse::{
    pairing::{
        event::{CommandFailure, EngineRecord, PairingEvent, ProviderPhase, QueriedCondition},
        ids::{EngineFingerprint, PairingEngineId, ProviderId, ProviderMode},
        node::PairingEngineState,
    },
    units::{Bytes, Generation, Millis},
};

use crate::harness::*;

/// Orders a requester's engine. Returns the record of an engine with the same name that the previous leader created for
/// it.
fn ordered(case: &mut PairingCase, mode: ProviderMode) -> (PairingEngineId, EngineRecord) {
    case.requester("one", ask(mode, 1), &["a"], |_| ());
    let id = engine(mode, 1, &["a"]);
    let before = Generation(generation(case.known(&id)).0 - 1);
    let record = EngineRecord { generation: before, ..case.record(&id) };
    (id, record)
}

fn observe_name_holder(
    case: &mut PairingCase,
    id: &PairingEngineId,
    stage: ProviderPhase,
    record: &EngineRecord,
    deleting: bool,
) {
    case.provider(&ProviderId::direct(id), stage, |observed| {
        (observed.uid, observed.records, observed.deleting) =
            ("elder".into(), vec![record.clone()], deleting);
    });
}

fn name_holder_gone(case: &mut PairingCase, id: &PairingEngineId) {
    let (provider, uid) = (ProviderId::direct(id), "elder".into());
    case.on(PairingEvent::ProviderGone { node: node(), provider, uid });
}

/// Asserts that the engine serves the requester as it is.
fn is_adopted(case: &mut PairingCase, id: &PairingEngineId) {
    case.complete(queries(id), condition(QueriedCondition::Awake));
    case.done(opens(id));
    assert_eq!(case.state(id), Some(PairingEngineState::Awake));
    assert_eq!(case.node().engine_of(&"one".into()).map(|e| e.id.clone()), Some(id.clone()));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60));
    assert_eq!(case.failures("one"), 0, "nothing failed");
}

#[test]
fn what_a_leader_before_made_for_it_is_adopted_when_it_is_seen() {
    let mut case = PairingCase::new(1);
    let (id, record) = ordered(&mut case, ProviderMode::Sleep);
    case.complete(creates(&id), Err(CommandFailure::Conflict));
    observe_name_holder(&mut case, &id, ProviderPhase::Ready, &record, false);
    is_adopted(&mut case, &id);
}

#[test]
fn what_was_seen_before_the_order_was_answered_is_adopted_then() {
    let mut case = PairingCase::new(1);
    let (id, record) = ordered(&mut case, ProviderMode::Sleep);
    observe_name_holder(&mut case, &id, ProviderPhase::Ready, &record, false);
    assert!(!case.has(queries(&id)), "it may be what is known to be gone, seen late");
    case.complete(creates(&id), Err(CommandFailure::Conflict));
    is_adopted(&mut case, &id);
}

#[test]
fn one_that_sleeps_is_bound_and_woken() {
    let mut case = PairingCase::new(1);
    let (id, record) = ordered(&mut case, ProviderMode::Sleep);
    case.complete(creates(&id), Err(CommandFailure::Conflict));
    observe_name_holder(
        &mut case,
        &id,
        ProviderPhase::Ready,
        &EngineRecord { requester: None, ..record },
        false,
    );
    case.complete(queries(&id), asleep());
    case.done(binds(&id));
    case.done(wakes(&id));
    case.done(sends_canary(&id));
    case.done(opens(&id));
}

#[test]
fn one_that_is_being_deleted_is_waited_for_and_then_made_anew_at_once() {
    let mut case = PairingCase::new(1);
    let (id, record) = ordered(&mut case, ProviderMode::Sleep);
    case.complete(creates(&id), Err(CommandFailure::Conflict));
    observe_name_holder(
        &mut case,
        &id,
        ProviderPhase::Ready,
        &EngineRecord { requester: None, ..record },
        true,
    );
    assert!(!case.has(creates(&id)));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(60), "its memory counts");
    name_holder_gone(&mut case, &id);
    case.done(creates(&id));
}

#[test]
fn one_that_went_without_being_seen_is_made_anew_at_once() {
    let mut case = PairingCase::new(1);
    let (id, _) = ordered(&mut case, ProviderMode::Sleep);
    case.complete(creates(&id), Err(CommandFailure::Conflict));
    assert!(!case.has(creates(&id)));
    name_holder_gone(&mut case, &id);
    case.done(creates(&id));
}

#[test]
fn one_that_nobody_tells_of_is_tried_again_soon() {
    let mut case = PairingCase::new(1);
    let (id, _) = ordered(&mut case, ProviderMode::Sleep);
    for _ in 0..3 {
        case.complete(creates(&id), Err(CommandFailure::Conflict));
        case.advance(Millis::secs(1));
    }
    case.done(creates(&id));
}

#[test]
fn what_has_the_name_and_is_another_engine_is_ended_first() {
    let mut case = PairingCase::new(1);
    let (id, record) = ordered(&mut case, ProviderMode::Plain);
    case.complete(creates(&id), Err(CommandFailure::Conflict));
    let other = PairingEngineId { fingerprint: EngineFingerprint(2), ..id.clone() };
    let record = EngineRecord { engine: other.clone(), requester: Some("gone".into()), ..record };
    observe_name_holder(&mut case, &id, ProviderPhase::Ready, &record, false);
    assert_eq!(case.state(&id), None);
    case.complete(queries(&other), condition(QueriedCondition::Awake));
    case.done(ends(&other));
    case.done(unbinds(&other));
    name_holder_gone(&mut case, &id);
    case.done(creates(&id));
}

#[test]
fn what_is_seen_late_of_a_life_that_is_gone_is_not_taken_for_the_next() {
    let mut case = PairingCase::new(1);
    let (id, record) = ordered(&mut case, ProviderMode::Sleep);
    observe_name_holder(&mut case, &id, ProviderPhase::Ready, &record, true);
    name_holder_gone(&mut case, &id);
    case.done(creates(&id));
    assert_eq!(case.state(&id), Some(PairingEngineState::Creating));
    assert!(!case.has(creates(&id)));
}
