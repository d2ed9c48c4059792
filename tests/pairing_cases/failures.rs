//! The reference's failures, one by one, each with its outcome here.

use rouse::{
    pairing::{
        command::{EngineStep, PairingAction, PairingCommand},
        event::{
            CommandFailure, CommandReply, MemorySizes, PairingEvent, ProviderPhase, QueriedCondition,
            TemplateStatus,
        },
        ids::{EngineFingerprint, ProviderId, ProviderMode},
        node::PairingEngineState,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

#[test]
fn requester_deleted_while_its_provider_starts() {
    let mut case = PairingCase::new(1);
    let id = engine(ProviderMode::Sleep, 1, &["a"]);
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.done(creates(&id));
    case.provider(&ProviderId::direct(&id), ProviderPhase::Running, |_| ());
    case.finalized("one");
    case.delete("one");
    // The engine has never served: its memory is released, and its requester does not wait for its start.
    case.done(ends(&id));
    case.done(unbinds(&id));
    case.finalized("one");
    assert!(!case.has_finalizer("one"));
    case.provider(&ProviderId::direct(&id), ProviderPhase::Terminated, |observed| observed.deleting = true);
    case.provider_gone(&ProviderId::direct(&id));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::ZERO);
}

#[test]
fn provider_deleted_or_evicted() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.provider(&ProviderId::direct(&id), ProviderPhase::Ready, |observed| observed.deleting = true);
    assert!(case.has(deletes("one")), "another requester comes in its place");
    case.done(unbinds(&id));
    assert_eq!(case.known(&id).reserved, Bytes::gib(60), "it is not gone yet");
    case.provider_gone(&ProviderId::direct(&id));
    assert_eq!(case.node().reserved(&"a".into()), Bytes::ZERO);
}

#[test]
fn an_engine_in_a_launcher_dies() {
    let mut case = PairingCase::new(1);
    let id = launched(&mut case, 1);
    let generation = generation(case.known(&id));
    case.on(PairingEvent::EngineDied { node: node(), engine: id.clone(), generation, gone: true });
    assert!(case.has(deletes("one")));
    case.done(ends(&id));
    case.done(forgets(&id));
    assert_eq!(case.state(&id), None);
    assert!(!case.has(deletes_launcher), "the launcher stays");
}

#[test]
fn an_outcome_of_a_life_before_changes_nothing() {
    let mut case = PairingCase::new(1);
    let id = launched(&mut case, 1);
    let before = rouse::units::Generation(generation(case.known(&id)).0 - 1);
    case.on(PairingEvent::EngineDied { node: node(), engine: id.clone(), generation: before, gone: true });
    assert_eq!(case.state(&id), Some(PairingEngineState::Awake));
}

#[test]
fn a_launcher_is_started_anew() {
    let mut case = PairingCase::new(1);
    let id = launched(&mut case, 1);
    let launcher = ProviderId::launcher("a".into());
    case.provider(&launcher, ProviderPhase::Running, |observed| observed.restarts = 1);
    assert!(case.has(deletes("one")));
    // The new container might have launched an engine meanwhile: the engine counts as gone once the launcher reports
    // so.
    assert_eq!(case.known(&id).reserved, Bytes::gib(60));
    case.provider(&launcher, ProviderPhase::Ready, |observed| observed.restarts = 1);
    case.complete(queries(&id), condition(QueriedCondition::Absent));
    assert_eq!(case.known(&id).reserved, Bytes::ZERO);
}

#[test]
fn the_controller_was_down_while_both_were_deleted() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    let record = case.record(&id);
    case.lead(1, 2);
    let now = case.now;
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| {
        (observed.deleting_since, observed.terminated, observed.stub_container, observed.finalizer) =
            (Some(now), true, None, true);
    });
    case.provider(&ProviderId::direct(&id), ProviderPhase::Terminated, |observed| {
        (observed.deleting, observed.records) = (true, vec![record]);
    });
    assert!(!case.has(unbinds(&id)), "nothing is decided before everything was seen");
    case.on(PairingEvent::Listed);
    case.done(unbinds(&id));
    case.done(finalizes("one"));
    assert!(!case.has_finalizer("one"));
}

#[test]
fn the_controller_is_restarted_and_adopts_what_runs() {
    let mut case = PairingCase::new(2);
    let used = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    let sleeper = case.cold_start("two", ask(ProviderMode::Sleep, 2), &["b"]);
    case.put_to_sleep("two", &sleeper);
    let (record, other) = (case.record(&used), case.record(&sleeper));
    let used_last = other.last_used;
    case.lead(2, 2);
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| observed.finalizer = true);
    case.provider(&ProviderId::direct(&used), ProviderPhase::Ready, |observed| {
        observed.records = vec![record]
    });
    case.provider(&ProviderId::direct(&sleeper), ProviderPhase::Ready, |observed| {
        observed.records = vec![other]
    });
    case.on(PairingEvent::Listed);
    // An engine that has not been queried yet counts as awake.
    assert_eq!(case.node().reserved(&"b".into()), Bytes::gib(60));
    case.complete(queries(&used), condition(QueriedCondition::Awake));
    case.complete(queries(&sleeper), asleep());
    assert_eq!(case.node().reserved(&"b".into()), Bytes::gib(2));
    assert_eq!(case.known(&sleeper).last_used, used_last, "who was used last is known still");
    case.done(opens(&used));
    assert_eq!(case.state(&used), Some(PairingEngineState::Awake));
    assert!(!case.has(deletes("one")));
}

#[test]
fn a_bound_sleeper_found_after_a_restart_counts_as_awake_and_is_woken() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    let record = case.record(&id);
    case.lead(1, 2);
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.provider(&ProviderId::direct(&id), ProviderPhase::Ready, |observed| observed.records = vec![record]);
    case.on(PairingEvent::Listed);
    case.complete(queries(&id), asleep());
    assert_eq!(
        case.node().reserved(&"a".into()),
        Bytes::gib(60),
        "the leader before may have begun to wake it"
    );
    assert!(case.has(wakes(&id)));
}

#[test]
fn a_sleeper_that_does_not_say_how_deeply_keeps_its_host_memory_and_is_woken_as_from_level_two() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.put_to_sleep("one", &id);
    let record = case.record(&id);
    case.lead(1, 2);
    case.provider(&ProviderId::direct(&id), ProviderPhase::Ready, |observed| observed.records = vec![record]);
    case.on(PairingEvent::Listed);
    case.complete(queries(&id), condition(QueriedCondition::AsleepAtUnknownLevel { residue: None }));
    assert_eq!(case.known(&id).reserved, Bytes::gib(2));
    assert_eq!(case.node().reserved_host(), Bytes::gib(20), "it may be at level one");
    case.requester("two", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.done(binds(&id));
    assert_eq!(case.state(&id), Some(PairingEngineState::Waking));
    assert!(case.has(wakes(&id)), "{:?}", case.story.last());
    case.done(wakes(&id));
    assert_eq!(case.node().reserved_host(), Bytes::ZERO);
}

#[test]
fn the_node_is_deleted() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.on(PairingEvent::NodeGone { node: node() });
    assert!(case.has(deletes("one")) || case.has(finalizes("one")));
    case.done(deletes("one"));
    case.finalized("one");
    assert!(!case.has_finalizer("one"), "nobody waits for a node that is gone");
    assert_eq!(case.known(&id).reserved, Bytes::gib(60), "the machine may still run");
    case.on(PairingEvent::RequesterGone { node: node(), requester: "one".into() });
    case.provider_gone(&ProviderId::direct(&id));
    assert!(case.pairing.node(&node()).is_none(), "and nothing of it is kept");
}

#[test]
fn the_node_is_cordoned() {
    let mut case = PairingCase::new(2);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.cordon(true);
    case.requester("two", ask(ProviderMode::Sleep, 2), &["b"], |_| ());
    assert!(case.has(deletes("two")), "it has no engine, and gets none here");
    assert!(!case.has(deletes("one")), "a pair stays");
    assert_eq!(case.state(&id), Some(PairingEngineState::Awake));
}

#[test]
fn the_stub_cannot_be_reached() {
    let mut case = PairingCase::new(1);
    let id = engine(ProviderMode::Sleep, 1, &["a"]);
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.done(creates(&id));
    case.provider(&ProviderId::direct(&id), ProviderPhase::Ready, |_| ());
    case.done(sends_canary(&id));
    case.complete(opens(&id), Err(CommandFailure::Unreachable));
    assert!(!case.has(opens(&id)), "not at once again");
    case.advance(Millis(150));
    case.done(opens(&id));
    // The stub's container is a new one: gated, and without a target.
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| {
        observed.stub_container = Some("other".into())
    });
    case.done(opens(&id));
}

#[test]
fn the_node_is_not_reached_while_the_requester_is_deleted() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.delete("one");
    let settings = rouse::pairing::settings::PairingSettings::default();
    case.advance(settings.max_hold(&case.known(&id).sizes) + Millis(1));
    // The gate, the sleep and every other command are without an outcome.
    assert!(case.has(ends(&id)), "it is fenced: {:#?}", case.story);
    case.finalized("one");
    assert!(!case.has_finalizer("one"), "its requester is let go");
    assert_eq!(case.known(&id).reserved, Bytes::gib(60), "its memory is not");
}

#[test]
fn a_wake_that_fails_is_followed_by_a_cold_start() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.put_to_sleep("one", &id);
    case.requester("two", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.done(binds(&id));
    case.refused(wakes(&id));
    cold_start_follows(&mut case, &id, "1 start failed, the last: the engine did not wake");
}

#[test]
fn a_canary_that_fails_is_followed_by_a_cold_start() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.put_to_sleep("one", &id);
    case.requester("two", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.done(binds(&id));
    case.done(wakes(&id));
    case.refused(sends_canary(&id));
    cold_start_follows(&mut case, &id, "the last: the engine answered but could not serve");
}

fn cold_start_follows(case: &mut PairingCase, id: &rouse::pairing::ids::PairingEngineId, reason: &str) {
    let before = generation(case.known(id));
    case.done(ends(id));
    case.done(unbinds(id));
    assert!(!case.has(deletes("two")), "the requester stays");
    case.provider_gone(&ProviderId::direct(id));
    assert_eq!(case.failures("two"), 1, "it is counted");
    assert!(case.reason("two").contains(reason), "{}", case.reason("two"));
    case.advance(Millis::secs(1));
    assert!(case.has(creates(id)));
    assert!(generation(case.known(id)) > before);
}

#[test]
fn a_hung_wake_delays_nobody_on_another_accelerator() {
    let mut case = PairingCase::new(2);
    let hung = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.put_to_sleep("one", &hung);
    case.requester("two", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.done(binds(&hung));
    assert!(case.has(wakes(&hung)), "and has no outcome");
    case.cold_start("three", ask(ProviderMode::Sleep, 3), &["b"]);
    let settings = rouse::pairing::settings::PairingSettings::default();
    let within = settings.wake_timeout_for(&case.known(&hung).sizes);
    assert_eq!(within, Millis::secs(70), "60 GiB, and 10 seconds");
    case.advance(Millis(within.0 - 1));
    assert!(!case.has(ends(&hung)));
    case.advance(Millis(1));
    assert!(case.has(ends(&hung)), "nor does it wait for ever");
}

#[test]
fn a_large_engine_is_given_the_time_that_its_bytes_take_and_a_small_one_what_is_configured() {
    let settings = rouse::pairing::settings::PairingSettings::default();
    let sizes =
        |awake, host| MemorySizes { awake: Bytes::gib(awake), asleep: Bytes::ZERO, host: Bytes::gib(host) };
    assert_eq!(settings.sleep_timeout_for(&sizes(16, 16)), settings.sleep_timeout);
    assert_eq!(settings.wake_timeout_for(&sizes(16, 16)), settings.wake_timeout);
    assert_eq!(settings.sleep_timeout_for(&sizes(70, 140)), Millis::secs(150));
    assert_eq!(settings.wake_timeout_for(&sizes(70, 140)), Millis::secs(150));
    // The requester is held while its engine falls asleep.
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.delete("one");
    case.done(closes_gate(&id));
    case.advance(Millis::secs(69));
    assert!(case.has_finalizer("one") && !case.has(ends(&id)), "70 seconds are not too long for 60 GiB");
    case.advance(Millis::secs(1));
    assert!(case.has(ends(&id)));
}

#[test]
fn a_drain_ends_before_the_kubelet_kills_the_stub() {
    for (grace, expected) in [(None, 30), (Some(110), 30), (Some(30), 25), (Some(5), 1), (Some(0), 1)] {
        let mut case = PairingCase::new(1);
        let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
        case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| {
            observed.grace = grace.map(Millis::secs)
        });
        case.delete("one");
        let Some(PairingCommand {
            action: PairingAction::Engine { step: EngineStep::CloseGate { deadline, .. }, .. },
            ..
        }) = case.ordered(closes_gate(&id))
        else {
            panic!("its gate stays open");
        };
        assert_eq!(deadline.since(case.now), Millis::secs(expected), "{grace:?}");
    }
}

#[test]
fn a_faulty_accelerator_is_left() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.facts("a", 0, false);
    case.done(deletes("one"));
    case.delete("one");
    case.done(closes_gate(&id));
    assert!(case.has(ends(&id)), "it is not put to sleep there");
}

#[test]
fn a_faulty_accelerator_stays_taken_until_the_replacement_has_been_scheduled() {
    let mut case = PairingCase::new(2);
    case.facts("a", 0, false);
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.done(deletes("one"));
    case.delete("one");
    assert!(!case.has(releases("one")), "its stub would end, and the replacement get the same accelerator");
    case.advance(Millis::secs(9));
    assert!(!case.has(releases("one")));
    case.advance(Millis::secs(1));
    case.done(releases("one"));
}

#[test]
fn an_obsolete_template_ends_sleepers_at_once_and_others_when_they_are_let_go() {
    let mut case = PairingCase::new(2);
    let used = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    let sleeper = case.cold_start("two", ask(ProviderMode::Sleep, 1), &["b"]);
    case.put_to_sleep("two", &sleeper);
    case.on(PairingEvent::Template { fingerprint: EngineFingerprint(1), status: TemplateStatus::Obsolete });
    assert!(case.has(ends(&sleeper)) && !case.has(ends(&used)));
    case.delete("one");
    case.done(closes_gate(&used));
    assert!(case.has(ends(&used)) && !case.has(sleeps(&used)));
}

#[test]
fn an_order_to_launch_that_was_given_up_may_arrive_and_is_not_believed_gone_before() {
    let mut case = PairingCase::new(1);
    let id = engine(ProviderMode::Launcher, 1, &["a"]);
    case.launcher_ready("a");
    case.requester("one", ask(ProviderMode::Launcher, 1), &["a"], |_| ());
    case.done(binds(&id));
    case.complete(launches(&id), Err(CommandFailure::Unreachable));
    case.done(ends(&id));
    assert_eq!(case.known(&id).reserved, Bytes::gib(60), "there was nothing to end yet");
    case.advance(Millis::secs(21));
    case.done(ends(&id));
    assert_eq!(case.known(&id).reserved, Bytes::ZERO);
}

/// An engine in the launcher of `a`, open to requester `one`.
fn launched(case: &mut PairingCase, fingerprint: u64) -> rouse::pairing::ids::PairingEngineId {
    let id = engine(ProviderMode::Launcher, fingerprint, &["a"]);
    case.launcher_ready("a");
    case.requester("one", ask(ProviderMode::Launcher, fingerprint), &["a"], |_| ());
    case.done(binds(&id));
    case.done(launches(&id));
    let generation = generation(case.known(&id));
    case.on(PairingEvent::EngineReady { node: node(), engine: id.clone(), generation });
    case.done(sends_canary(&id));
    case.done(opens(&id));
    case.finalized("one");
    id
}

#[test]
fn a_sleep_that_fails_ends_the_engine_and_keeps_its_memory_until_then() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.delete("one");
    case.done(closes_gate(&id));
    case.complete(sleeps(&id), Err(CommandFailure::Refused));
    assert!(case.has(ends(&id)));
    assert_eq!(case.known(&id).reserved, Bytes::gib(60));
}

#[test]
fn a_requester_that_was_served_before_a_restart_is_replaced_when_its_engine_is_no_longer_there() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.lead(1, 2);
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| observed.finalizer = true);
    case.on(PairingEvent::Listed);
    // The requester's gate is open to a vanished engine, so another engine must not start behind it.
    assert!(case.has(deletes("one")) && !case.has(creates(&id)));
}

#[test]
fn a_requester_whose_engine_never_answers_after_a_restart_is_replaced() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    let record = case.record(&id);
    case.lead(1, 2);
    case.requester("one", ask(ProviderMode::Sleep, 1), &["a"], |observed| observed.finalizer = true);
    case.provider(&ProviderId::direct(&id), ProviderPhase::Ready, |observed| observed.records = vec![record]);
    case.on(PairingEvent::Listed);
    case.advance(rouse::pairing::settings::PairingSettings::default().start_timeout);
    assert!(case.has(ends(&id)) && case.has(deletes("one")));
}

/// A previous leader gave the requester an engine, which died. That leader removed the engine's record, and failed
/// before it deleted the requester.
#[test]
fn nothing_is_made_behind_a_gate_that_a_leader_before_may_have_left_open() {
    for mode in [ProviderMode::Sleep, ProviderMode::Launcher] {
        let mut case = PairingCase::new(1);
        case.auto_close_gates = false;
        case.lead(1, 2);
        case.launcher_ready("a");
        case.requester("r", ask(mode, 1), &["a"], |_| ());
        case.on(PairingEvent::Listed);
        let id = engine(mode, 1, &["a"]);
        let has_started = |case: &PairingCase| case.has(creates(&id)) || case.has(binds(&id));
        assert!(case.has(closes_requester_gate("r")) && !has_started(&case));
        assert_eq!(case.reason("r"), "the stub's gate is not confirmed closed");
        case.refused(closes_requester_gate("r"));
        assert!(!has_started(&case));
        case.advance(Millis(20));
        case.done(closes_requester_gate("r"));
        assert!(has_started(&case));
    }
}

#[test]
fn a_gate_that_was_closed_in_one_container_may_be_open_in_the_next() {
    let mut case = PairingCase::new(1);
    case.auto_close_gates = false;
    case.lead(1, 2);
    case.requester("r", ask(ProviderMode::Sleep, 1), &["a"], |_| ());
    case.on(PairingEvent::Listed);
    case.requester("r", ask(ProviderMode::Sleep, 1), &["a"], |observed| {
        observed.stub_container = Some("anew".into())
    });
    case.done(closes_requester_gate("r"));
    assert!(!case.has(creates(&engine(ProviderMode::Sleep, 1, &["a"]))));
    case.done(closes_requester_gate("r"));
    assert!(case.has(creates(&engine(ProviderMode::Sleep, 1, &["a"]))));
}

#[test]
fn a_stub_closes_its_gate_while_it_says_which_accelerators_it_has_and_a_serving_one_does_not() {
    let mut case = PairingCase::new(1);
    case.requester("r", ask(ProviderMode::Sleep, 1), &[], |_| ());
    assert!(case.has(asks("r", true)), "at once: it costs no time");
    case.complete(asks("r", true), Ok(CommandReply::Accelerators(vec!["a".into()])));
    let id = engine(ProviderMode::Sleep, 1, &["a"]);
    assert!(case.has(creates(&id)) && !case.has(closes_requester_gate("r")));
    case.done(creates(&id));
    let record = case.record(&id);
    case.lead(1, 2);
    case.requester("r", ask(ProviderMode::Sleep, 1), &[], |_| ());
    case.provider(&ProviderId::direct(&id), ProviderPhase::Ready, |observed| observed.records = vec![record]);
    case.on(PairingEvent::Listed);
    case.done(finalizes("r"));
    assert!(case.has(asks("r", false)), "its engine may be serving: {:#?}", case.story);
}
