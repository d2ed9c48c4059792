//! Engines that sleep and wake while their requesters stay, because the gateway decides about them.

use rouse::{
    model::{
        SleepLevel,
        SleepLevelPolicy::{self, Auto, Never, One, OneOrStop, Two},
    },
    pairing::{
        EngineReport,
        command::{EngineStep, EngineStopReason, PairingAction, PairingCommand},
        event::{
            CommandFailure, CommandReply, PairingEvent, ProviderPhase, QueriedCondition, RequestedEngine,
            TemplateStatus, WantedState,
        },
        ids::{EngineFingerprint, PairingEngineId, ProviderId, ProviderMode, RequesterId},
        node::PairingEngineState,
        settings::PairingSettings,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

pub(crate) const ASLEEP: WantedState = WantedState::Asleep { level: SleepLevel::One };
const SLEEPING_MODES: [ProviderMode; 2] = [ProviderMode::Sleep, ProviderMode::Launcher];

pub(crate) fn want(case: &mut PairingCase, id: &str, wanted: WantedState) {
    case.on(PairingEvent::Want { node: node(), requester: id.into(), wanted });
}

pub(crate) fn report(case: &PairingCase, id: &str) -> Option<EngineReport> {
    case.pairing.engine_report(&node(), &id.into())
}

/// Creates a requester that the gateway actuates, and whose engine it wants awake.
pub(crate) fn wanted(case: &mut PairingCase, id: &str, requested: RequestedEngine, on: &[&str]) {
    case.requester(id, requested, on, |observed| observed.actuated = true);
    want(case, id, WantedState::Awake);
}

/// Starts the engine of a requester that the gateway actuates.
pub(crate) fn actuated(
    case: &mut PairingCase,
    id: &str,
    requested: RequestedEngine,
    on: &[&str],
) -> PairingEngineId {
    wanted(case, id, requested.clone(), on);
    case.started(id, requested, on)
}

/// Has the engine put to sleep, and its requester stays.
pub(crate) fn falls_asleep(case: &mut PairingCase, id: &str, of: &PairingEngineId) {
    want(case, id, ASLEEP);
    case.done(closes_gate(of));
    case.complete(sleeps(of), Ok(CommandReply::Asleep { residue: None }));
    assert!(matches!(case.state(of), Some(PairingEngineState::Asleep { .. })), "{:#?}", case.story);
}

/// Completes a wake that was ordered. The gateway's own first request proves the engine.
pub(crate) fn wakes_up(case: &mut PairingCase, of: &PairingEngineId) {
    case.done(wakes(of));
    assert!(!case.has(sends_canary(of)), "{:#?}", case.story);
    case.done(opens(of));
    assert_eq!(case.state(of), Some(PairingEngineState::Awake));
}

const fn asleep_with(residue: Bytes) -> EngineReport {
    EngineReport::Asleep { level: SleepLevel::One, residue }
}

fn bound_sleeper(mode: ProviderMode) -> (PairingCase, PairingEngineId) {
    let mut case = PairingCase::new(1);
    let id = actuated(&mut case, "one", ask(mode, 1), &["a"]);
    falls_asleep(&mut case, "one", &id);
    (case, id)
}

#[test]
fn an_engine_that_is_wanted_asleep_sleeps_and_stays_bound_to_its_requester() {
    for mode in SLEEPING_MODES {
        let mut case = PairingCase::new(1);
        let id = actuated(&mut case, "one", ask(mode, 1), &["a"]);
        assert_eq!(report(&case, "one"), Some(EngineReport::Awake));
        want(&mut case, "one", ASLEEP);
        let Some(PairingCommand {
            action: PairingAction::Engine { step: EngineStep::CloseGate { deadline, .. }, .. },
            ..
        }) = case.ordered(closes_gate(&id))
        else {
            panic!("the gate stays open: {:#?}", case.story);
        };
        assert_eq!(deadline.since(case.now), PairingSettings::default().drain_timeout);
        assert_eq!(report(&case, "one"), Some(EngineReport::Moving));
        case.done(closes_gate(&id));
        assert!(case.story.last().is_some_and(|step| step.ends_with("at level 1 through one")));
        case.complete(sleeps(&id), Ok(CommandReply::Asleep { residue: None }));
        assert_eq!(report(&case, "one"), Some(asleep_with(Bytes::gib(2))));
        assert_eq!(case.known(&id).requester().map(RequesterId::as_str), Some("one"));
        assert_eq!((case.known(&id).reserved, case.node().reserved_host()), (Bytes::gib(2), Bytes::gib(20)));
        assert!(!case.has(unbinds(&id)) && !case.has(deletes("one")) && case.has_finalizer("one"));
        assert!(!case.known(&id).is_evictable() && case.reason("one").is_empty());
        case.advance(Millis::secs(1000));
        assert!(!case.has(wakes(&id)) && !case.has(ends(&id)), "{:#?}", case.story);
        want(&mut case, "one", WantedState::Awake);
        assert_eq!(case.known(&id).reserved, Bytes::gib(60));
        wakes_up(&mut case, &id);
        assert_eq!(report(&case, "one"), Some(EngineReport::Awake));
        assert!(!case.has(binds(&id)), "the binding was never removed");
    }
}

#[test]
fn the_wanted_level_counts_where_the_policy_allows_it() {
    let cases = [
        (Auto, SleepLevel::One, 1),
        (Auto, SleepLevel::Two, 2),
        (One, SleepLevel::Two, 1),
        (Two, SleepLevel::One, 2),
        (OneOrStop, SleepLevel::Two, 1),
    ];
    for (policy, level, expected) in cases {
        let mut case = PairingCase::new(1);
        let requested = RequestedEngine { level: policy, ..ask(ProviderMode::Sleep, 1) };
        let id = actuated(&mut case, "one", requested, &["a"]);
        want(&mut case, "one", WantedState::Asleep { level });
        case.done(closes_gate(&id));
        assert_eq!(case.ordered(sleeps(&id)).and_then(level_of), Some(expected), "{policy:?} {level:?}");
    }
}

#[test]
fn an_engine_that_cannot_sleep_is_stopped_when_it_is_wanted_asleep_and_reported_as_failed() {
    let engines: [(ProviderMode, SleepLevelPolicy); 3] =
        [(ProviderMode::Plain, One), (ProviderMode::Sleep, Never), (ProviderMode::Launcher, Never)];
    for (mode, level) in engines {
        let mut case = PairingCase::new(1);
        let id = actuated(&mut case, "one", RequestedEngine { level, ..ask(mode, 1) }, &["a"]);
        want(&mut case, "one", ASLEEP);
        case.done(closes_gate(&id));
        assert!(case.has(ends(&id)) && !case.has(sleeps(&id)), "{mode:?}: {:#?}", case.story);
        assert!(case.has(deletes("one")), "its owner creates another");
        let failed = Some(EngineReport::Failed { reason: EngineStopReason::CannotSleep });
        assert_eq!(report(&case, "one"), failed);
        case.done(ends(&id));
        assert_eq!(report(&case, "one"), failed);
    }
}

#[test]
fn a_want_awake_during_the_drain_opens_the_gate_again() {
    let mut case = PairingCase::new(1);
    let id = actuated(&mut case, "one", ask(ProviderMode::Sleep, 1), &["a"]);
    want(&mut case, "one", ASLEEP);
    want(&mut case, "one", WantedState::Awake);
    assert_eq!(
        (case.state(&id), report(&case, "one")),
        (Some(PairingEngineState::Awake), Some(EngineReport::Moving))
    );
    case.done(opens(&id));
    assert_eq!(report(&case, "one"), Some(EngineReport::Awake));
    // The first order may have overtaken the second.
    case.complete(closes_gate(&id), Err(CommandFailure::Unreachable));
    case.done(opens(&id));
    assert_eq!(report(&case, "one"), Some(EngineReport::Awake));
    case.advance(Millis::secs(60));
    assert!(!case.has(opens(&id)) && !case.has(sleeps(&id)), "{:#?}", case.story);
}

#[test]
fn a_gate_is_opened_once_more_after_a_cancelled_close_without_an_outcome() {
    let mut case = PairingCase::new(1);
    let id = actuated(&mut case, "one", ask(ProviderMode::Sleep, 1), &["a"]);
    want(&mut case, "one", ASLEEP);
    want(&mut case, "one", WantedState::Awake);
    case.done(opens(&id));
    case.advance(Millis(PairingSettings::default().drain_timeout.0 - 1));
    assert!(!case.has(opens(&id)));
    case.advance(Millis(1));
    case.done(opens(&id));
    case.advance(Millis::secs(60));
    assert!(!case.has(opens(&id)), "{:#?}", case.story);
}

#[test]
fn an_engine_that_is_wanted_awake_while_it_falls_asleep_is_woken_once_it_sleeps() {
    let mut case = PairingCase::new(1);
    let id = actuated(&mut case, "one", ask(ProviderMode::Sleep, 1), &["a"]);
    want(&mut case, "one", ASLEEP);
    case.done(closes_gate(&id));
    want(&mut case, "one", WantedState::Awake);
    assert!(case.has(sleeps(&id)) && !case.has(wakes(&id)));
    case.complete(sleeps(&id), Ok(CommandReply::Asleep { residue: None }));
    wakes_up(&mut case, &id);
}

#[test]
fn an_engine_that_is_wanted_asleep_while_it_wakes_serves_nobody_and_sleeps_again() {
    let (mut case, id) = bound_sleeper(ProviderMode::Sleep);
    want(&mut case, "one", WantedState::Awake);
    want(&mut case, "one", ASLEEP);
    case.done(wakes(&id));
    assert!(case.has(sleeps(&id)) && !case.has(sends_canary(&id)) && !case.has(opens(&id)));
}

/// A change of leader forgets the wants, and the new leader may receive them late.
#[test]
fn a_new_leader_leaves_a_bound_engine_as_it_finds_it_until_a_want_arrives() {
    for found_asleep in [true, false] {
        let (mut case, id) = bound_sleeper(ProviderMode::Sleep);
        let record = case.record(&id);
        case.lead(1, 2);
        case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| {
            (observed.actuated, observed.finalizer) = (true, true)
        });
        case.provider(&ProviderId::direct(&id), ProviderPhase::Ready, |observed| {
            observed.records = vec![record]
        });
        case.on(PairingEvent::Listed);
        assert_eq!(report(&case, "one"), Some(EngineReport::Moving), "it was not queried yet");
        if found_asleep {
            case.complete(queries(&id), asleep());
            assert_eq!(report(&case, "one"), Some(asleep_with(Bytes::gib(2))));
            assert_eq!(case.known(&id).reserved, Bytes::gib(2));
            assert!(!case.has(wakes(&id)) && !case.has(unbinds(&id)));
            want(&mut case, "one", WantedState::Awake);
            wakes_up(&mut case, &id);
        } else {
            case.complete(queries(&id), condition(QueriedCondition::Awake));
            case.done(opens(&id));
            assert_eq!(report(&case, "one"), Some(EngineReport::Awake));
            assert!(!case.has(closes_gate(&id)));
            falls_asleep(&mut case, "one", &id);
        }
    }
}

#[test]
fn a_want_is_known_before_its_requester_and_forgotten_with_it() {
    let mut case = PairingCase::new(1);
    let id = engine(ProviderMode::Sleep, 1, &["a"]);
    let create = |case: &mut PairingCase| {
        case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| observed.actuated = true)
    };
    want(&mut case, "one", ASLEEP);
    assert_eq!(report(&case, "one"), None);
    create(&mut case);
    assert_eq!(report(&case, "one"), Some(EngineReport::Waiting));
    assert!(!case.has(starts_anything) && case.reason("one").is_empty());
    case.on(PairingEvent::RequesterGone { node: node(), requester: "one".into() });
    create(&mut case);
    case.advance(Millis::secs(1000));
    assert!(!case.has(creates(&id)), "a new requester has no want yet: {:#?}", case.story);
    assert_eq!(report(&case, "one"), Some(EngineReport::Waiting));
    want(&mut case, "one", WantedState::Awake);
    assert!(case.has(creates(&id)));
    assert_eq!(report(&case, "one"), Some(EngineReport::Starting));
}

/// What is measured is more than declared: the gateway plans with it, as pairing does.
#[test]
fn the_report_of_a_sleeper_says_what_it_really_keeps() {
    let mut case = PairingCase::new(1);
    let id = actuated(&mut case, "one", ask(ProviderMode::Sleep, 1), &["a"]);
    want(&mut case, "one", ASLEEP);
    case.done(closes_gate(&id));
    case.complete(sleeps(&id), Ok(CommandReply::Asleep { residue: Some(Bytes::gib(5)) }));
    assert_eq!(report(&case, "one"), Some(asleep_with(Bytes::gib(5))));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::gib(5));
}

/// A ReplicaSet makes another requester for one that was deleted, and the gateway has reserved nothing for it.
#[test]
fn a_requester_without_a_want_takes_neither_memory_nor_the_sleeper_of_another() {
    let mut case = PairingCase::new(1);
    let id = actuated(&mut case, "one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.put_to_sleep("one", &id);
    case.requester("two", ask(ProviderMode::Sleep, 1), &["a"], |observed| observed.actuated = true);
    assert!(!case.has(binds(&id)) && case.reason("two").is_empty(), "{:#?}", case.story);
    want(&mut case, "two", WantedState::Awake);
    case.done(binds(&id));
    // It was unbound, so nothing but a canary shows that it still serves.
    case.done(wakes(&id));
    case.done(sends_canary(&id));
    case.done(opens(&id));
    assert_eq!(report(&case, "two"), Some(EngineReport::Awake));
}

#[test]
fn a_requester_with_a_bound_sleeper_is_deleted_as_any_other() {
    for mode in SLEEPING_MODES {
        let (mut case, id) = bound_sleeper(mode);
        case.delete("one");
        case.done(unbinds(&id));
        case.finalized("one");
        assert!(!case.has_finalizer("one") && case.known(&id).is_evictable() && !case.has(wakes(&id)));
        case.on(PairingEvent::RequesterGone { node: node(), requester: "one".into() });
        case.requester("two", ask(mode, 1), &["a"], |_| ());
        case.done(binds(&id));
        case.done(wakes(&id));
        case.done(sends_canary(&id));
        case.done(opens(&id));
    }
}

#[test]
fn a_requester_that_is_deleted_during_its_drain_drains_no_longer_than_its_stub_lives() {
    let mut case = PairingCase::new(1);
    let id = actuated(&mut case, "one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| {
        observed.grace = Some(Millis::secs(15))
    });
    want(&mut case, "one", ASLEEP);
    case.delete("one");
    case.advance(Millis::secs(9));
    assert!(!case.has(sleeps(&id)));
    case.advance(Millis::secs(1));
    assert!(case.has(sleeps(&id)), "the kubelet kills the stub five seconds later");
    case.complete(sleeps(&id), Ok(CommandReply::Asleep { residue: None }));
    case.done(unbinds(&id));
    assert!(case.known(&id).is_evictable());
}

#[test]
fn a_sleep_that_fails_stops_the_engine_and_costs_its_requester() {
    let mut case = PairingCase::new(1);
    let id = actuated(&mut case, "one", ask(ProviderMode::Sleep, 1), &["a"]);
    want(&mut case, "one", ASLEEP);
    case.done(closes_gate(&id));
    case.refused(sleeps(&id));
    assert!(case.has(ends(&id)) && case.has(deletes("one")), "{:#?}", case.story);
    assert_eq!(report(&case, "one"), Some(EngineReport::Failed { reason: EngineStopReason::SleepFailed }));
}

#[test]
fn a_wake_that_fails_is_reported_until_the_start_that_follows_it() {
    let (mut case, id) = bound_sleeper(ProviderMode::Sleep);
    want(&mut case, "one", WantedState::Awake);
    case.refused(wakes(&id));
    let failed = Some(EngineReport::Failed { reason: EngineStopReason::WakeFailed });
    assert_eq!(report(&case, "one"), failed);
    case.done(ends(&id));
    case.done(unbinds(&id));
    case.provider_gone(&ProviderId::direct(&id));
    assert_eq!((report(&case, "one"), case.has(deletes("one"))), (failed, false));
    case.advance(Millis::secs(1));
    assert!(case.has(creates(&id)), "{}", case.reason("one"));
    assert_eq!(report(&case, "one"), Some(EngineReport::Starting));
}

#[test]
fn a_bound_sleeper_that_is_lost_costs_its_requester() {
    let (mut case, id) = bound_sleeper(ProviderMode::Launcher);
    let generation = generation(case.known(&id));
    case.on(PairingEvent::EngineDied { node: node(), engine: id.clone(), generation, gone: true });
    assert!(case.has(deletes("one")), "the gateway counts on it: {:#?}", case.story);
    assert_eq!(report(&case, "one"), Some(EngineReport::Failed { reason: EngineStopReason::Lost }));
    case.done(ends(&id));
    case.done(forgets(&id));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::ZERO);
}

#[test]
fn a_bound_sleeper_of_an_obsolete_template_is_stopped() {
    let (mut case, id) = bound_sleeper(ProviderMode::Sleep);
    case.on(PairingEvent::Template { fingerprint: EngineFingerprint(1), status: TemplateStatus::Obsolete });
    assert!(case.has(ends(&id)) && case.has(deletes("one")), "{:#?}", case.story);
    assert_eq!(report(&case, "one"), Some(EngineReport::Failed { reason: EngineStopReason::Obsolete }));
}

/// A new container of the stub knows no leader, so it would obey an earlier one.
#[test]
fn a_restarted_stub_hears_of_the_leader_before_its_engine_is_woken() {
    let (mut case, id) = bound_sleeper(ProviderMode::Sleep);
    case.auto_close_gates = false;
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| {
        observed.stub_container = Some("anew".into())
    });
    want(&mut case, "one", WantedState::Awake);
    assert!(!case.has(wakes(&id)), "{}", case.reason("one"));
    case.done(closes_requester_gate("one"));
    wakes_up(&mut case, &id);
}
