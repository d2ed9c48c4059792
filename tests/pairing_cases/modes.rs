//! The differences between the three modes: how an engine is created, and how it is put to sleep or stopped.

use rouse::{
    model::SleepLevelPolicy::{self, Auto, Never, One, Two},
    pairing::{
        event::{PairingEvent, ProviderPhase, QueriedCondition, RequestedEngine},
        ids::{PairingEngineId, ProviderId, ProviderMode},
        node::PairingEngineState,
    },
    units::Millis,
};

use crate::harness::*;

#[test]
fn plain_a_provider_comes_and_goes_with_its_requester() {
    let mut case = PairingCase::new(1);
    let id = case.cold_start("one", ask(ProviderMode::Plain, 1), &["a"]);
    case.delete("one");
    case.done(closes_gate(&id));
    assert!(!case.has(sleeps(&id)));
    case.done(ends(&id));
    case.done(unbinds(&id));
    case.provider(&ProviderId::direct(&id), ProviderPhase::Terminated, |observed| observed.deleting = true);
    case.provider_gone(&ProviderId::direct(&id));
    case.finalized("one");
    assert!(case.node().engines.is_empty() && case.node().providers.is_empty());
}

#[test]
fn sleep_the_next_requester_with_the_same_accelerators_wakes_it() {
    let mut case = PairingCase::new(2);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a", "b"]);
    case.put_to_sleep("one", &id);
    // The stub's order of the accelerators.
    case.requester("two", ask(ProviderMode::Sleep, 1), &["b", "a"], |_| ());
    case.done(binds(&id));
    case.done(wakes(&id));
    case.done(sends_canary(&id));
    case.done(opens(&id));
    assert_eq!(case.node().engine_of(&"two".into()).map(|e| e.state), Some(PairingEngineState::Awake));
    assert_eq!(case.node().providers.len(), 1);
}

#[test]
fn sleep_other_accelerators_are_another_engine() {
    let mut case = PairingCase::new(2);
    let id = case.cold_start("one", ask(ProviderMode::Sleep, 1), &["a"]);
    case.put_to_sleep("one", &id);
    case.requester("two", ask(ProviderMode::Sleep, 1), &["b"], |_| ());
    assert!(!case.has(binds(&id)) && case.has(creates(&engine(ProviderMode::Sleep, 1, &["b"]))));
}

#[test]
fn launcher_the_launcher_of_the_lowest_accelerator_is_asked_and_bound_first() {
    let mut case = PairingCase::new(3);
    let id = engine(ProviderMode::Launcher, 1, &["b", "c"]);
    case.requester("one", ask(ProviderMode::Launcher, 1), &["c", "b"], |_| ());
    assert!(case.has(makes_launcher) && !case.has(binds(&id)));
    let launcher = case.launcher_ready("b");
    assert_eq!(case.known(&id).provider, launcher);
    assert!(!case.has(launches(&id)), "nothing is launched that is not written down");
    case.done(binds(&id));
    case.done(launches(&id));
    assert!(!case.has(sends_canary(&id)));
    let generation = generation(case.known(&id));
    case.on(PairingEvent::EngineReady { node: node(), engine: id.clone(), generation });
    case.done(sends_canary(&id));
    case.done(opens(&id));
    assert_eq!(case.state(&id), Some(PairingEngineState::Awake));
}

#[test]
fn a_requester_that_is_too_large_is_told_so() {
    let mut case = PairingCase::new(1);
    let mut large = ask(ProviderMode::Sleep, 1);
    large.sizes.awake = rouse::units::Bytes::gib(81);
    case.requester("one", large, &["a"], |_| ());
    assert!(!case.has(starts_anything));
    assert_eq!(case.reason("one"), "the engine needs 81Gi of a, which has 80Gi");
}

const MODES: [ProviderMode; 3] = [ProviderMode::Plain, ProviderMode::Sleep, ProviderMode::Launcher];

/// Deletes the requester, and returns the level at which its engine is put to sleep; `None` if it is ended instead.
fn delete_and_sleep(case: &mut PairingCase, id: &PairingEngineId) -> Option<u8> {
    case.delete("one");
    case.done(closes_gate(id));
    let level = case.ordered(sleeps(id)).and_then(level_of);
    assert_eq!(case.has(ends(id)), level.is_none(), "{:#?}", case.story);
    level
}

/// The expected sleep level of an engine with this policy, whose weights fit into host RAM.
fn level(mode: ProviderMode, policy: SleepLevelPolicy) -> Option<u8> {
    match policy {
        _ if mode == ProviderMode::Plain => None,
        One | Auto => Some(1),
        Two => Some(2),
        _ => None,
    }
}

#[test]
fn an_engine_is_put_away_in_each_mode_as_its_requester_says_last() {
    for mode in MODES {
        for policy in [One, Two, Auto, Never] {
            let asked = |level| RequestedEngine { level, ..ask(mode, 1) };
            let mut case = PairingCase::new(1);
            let id = case.started("one", asked(policy), &["a"]);
            assert_eq!(delete_and_sleep(&mut case, &id), level(mode, policy), "{mode:?} {policy:?}");
            for before in [One, Two, Auto, Never] {
                let mut case = PairingCase::new(1);
                let id = case.started("one", asked(before), &["a"]);
                case.requester("one", asked(policy), &["a"], |_| ());
                let now = delete_and_sleep(&mut case, &id);
                assert_eq!(now, level(mode, policy), "{mode:?}: {before:?}, and {policy:?} while it serves");
            }
        }
    }
}

/// The provider's record dates from the engine's binding.
#[test]
fn a_leader_that_comes_meanwhile_goes_by_what_the_requester_says_now() {
    for requester_first in [true, false] {
        let mut case = PairingCase::new(1);
        let id = case.started("one", RequestedEngine { level: One, ..ask(ProviderMode::Sleep, 1) }, &["a"]);
        let record = case.record(&id);
        case.lead(1, 2);
        let says = |case: &mut PairingCase| {
            let now = RequestedEngine { level: Two, ..ask(ProviderMode::Sleep, 1) };
            case.requester("one", now, &["a"], |observed| observed.finalizer = true);
        };
        if requester_first {
            says(&mut case);
        }
        case.provider(&ProviderId::direct(&id), ProviderPhase::Ready, |observed| {
            observed.records = vec![record]
        });
        if !requester_first {
            says(&mut case);
        }
        case.on(PairingEvent::Listed);
        case.complete(queries(&id), condition(QueriedCondition::Awake));
        case.done(opens(&id));
        assert_eq!(delete_and_sleep(&mut case, &id), Some(2));
    }
}

/// The requester's annotations are now invalid, or name another engine.
#[test]
fn a_requester_that_asks_for_another_engine_by_now_says_nothing_of_the_one_it_has() {
    let mut case = PairingCase::new(1);
    let id = case.started("one", RequestedEngine { level: One, ..ask(ProviderMode::Sleep, 1) }, &["a"]);
    case.requester("one", RequestedEngine { level: Never, ..ask(ProviderMode::Sleep, 2) }, &["a"], |_| ());
    assert_eq!(delete_and_sleep(&mut case, &id), Some(1));
}

#[test]
fn a_sleeper_stays_for_as_long_as_its_requester_said_last() {
    let ten = Some(Millis::secs(600));
    for mode in [ProviderMode::Sleep, ProviderMode::Launcher] {
        for (before, last) in [(ten, None), (None, ten), (Some(Millis::secs(60_000)), ten)] {
            let asked = |stop_after| RequestedEngine { stop_after, ..ask(mode, 1) };
            let mut case = PairingCase::new(1);
            let id = case.started("one", asked(before), &["a"]);
            case.requester("one", asked(last), &["a"], |_| ());
            case.put_to_sleep("one", &id);
            case.advance(Millis::secs(530));
            assert!(!case.has(ends(&id)), "{mode:?}: {before:?}, then {last:?}");
            case.advance(Millis::secs(61));
            assert_eq!(case.has(ends(&id)), last.is_some(), "{mode:?}: {before:?}, then {last:?}");
        }
    }
}
