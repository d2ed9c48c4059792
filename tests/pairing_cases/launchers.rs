//! When a launcher is recreated, and when it is ended.

use rouse::{
    pairing::{
        event::{
            AcceleratorFacts, LauncherBuildPolicy, PairingEvent, ProviderPhase, QueriedCondition,
            RequestedEngine,
        },
        ids::{LauncherBuild, ProviderId, ProviderMode},
        settings::PairingSettings,
    },
    units::{Bytes, Millis},
};

use crate::harness::*;

/// Crashes the launcher of `a`, which is then deleted.
fn crash(case: &mut PairingCase) {
    let launcher = ProviderId::launcher("a".into());
    case.done(makes_launcher);
    case.provider(&launcher, ProviderPhase::Crashed, |_| ());
    case.done(deletes_launcher);
    case.provider(&launcher, ProviderPhase::Terminated, |observed| observed.deleting = true);
    case.provider_gone(&launcher);
}

fn pause(case: &mut PairingCase) -> Millis {
    let from = case.now;
    while !case.has(makes_launcher) {
        case.advance(Millis::secs(1));
    }
    case.now.since(from)
}

fn waits(case: &mut PairingCase, id: &str) {
    case.requester(id, ask(ProviderMode::Launcher, 1), &["a"], |_| ());
}

fn leaves(case: &mut PairingCase, id: &str) {
    case.kill(id);
    case.on(PairingEvent::RequesterGone { node: node(), requester: id.into() });
}

fn policy(case: &mut PairingCase, launcher: bool) {
    let facts = AcceleratorFacts { wants_launcher: launcher, ..accelerator(0) };
    case.on(PairingEvent::Accelerator { node: node(), accelerator: "a".into(), facts });
}

#[test]
fn a_launcher_that_crashes_is_made_anew_later_each_time() {
    let mut case = PairingCase::new(1);
    waits(&mut case, "one");
    let mut pauses = Vec::new();
    for _ in 0..8 {
        crash(&mut case);
        assert!(case.reason("one").contains("failed") && case.reason("one").contains("never ready"));
        pauses.push(pause(&mut case));
    }
    assert_eq!(pauses, [10, 20, 40, 80, 160, 320, 320, 320].map(Millis::secs));
}

#[test]
fn by_policy_it_is_made_anew_no_sooner() {
    let mut case = PairingCase::new(1);
    policy(&mut case, true);
    crash(&mut case);
    assert_eq!(pause(&mut case), Millis::secs(10));
}

/// The pause after a third launcher whose engine lived for `lives`.
fn pause_after(lives: Millis) -> Millis {
    let mut case = PairingCase::new(1);
    waits(&mut case, "one");
    for _ in 0..2 {
        crash(&mut case);
        pause(&mut case);
    }
    case.done(makes_launcher);
    let launcher = case.launcher_ready("a");
    let id = engine(ProviderMode::Launcher, 1, &["a"]);
    case.done(binds(&id));
    case.done(launches(&id));
    let generation = generation(case.known(&id));
    case.on(PairingEvent::EngineReady { node: node(), engine: id.clone(), generation });
    case.done(sends_canary(&id));
    case.done(opens(&id));
    case.advance(lives);
    case.provider(&launcher, ProviderPhase::Terminated, |_| ());
    case.done(deletes_launcher);
    case.provider_gone(&launcher);
    leaves(&mut case, "one");
    waits(&mut case, "two");
    pause(&mut case)
}

#[test]
fn after_an_engine_has_lived_in_one_the_pauses_begin_anew() {
    assert_eq!(pause_after(PairingSettings::default().launcher_proven_after), Millis::secs(10));
    assert_eq!(pause_after(Millis::secs(1)), Millis::secs(40));
}

/// Launchers of the first build have crashed twice, and the next is not created yet.
fn pauses() -> PairingCase {
    let mut case = PairingCase::new(1);
    of_build(&mut case, 1);
    for again in [false, true] {
        if again {
            pause(&mut case);
        }
        case.done(makes_launcher);
        let launcher = ProviderId::launcher("a".into());
        case.provider(&launcher, ProviderPhase::Crashed, |observed| observed.build = Some(LauncherBuild(1)));
        case.done(deletes_launcher);
        case.provider_gone(&launcher);
        assert!(case.reason("one").contains("failed") && case.reason("one").contains("never ready"));
    }
    case
}

fn of_build(case: &mut PairingCase, build: u64) {
    let asked = RequestedEngine { build: Some(LauncherBuild(build)), ..ask(ProviderMode::Launcher, 1) };
    case.requester("one", asked, &["a"], |_| ());
}

#[test]
fn one_of_another_build_is_made_at_once() {
    let mut case = pauses();
    assert!(!case.has(makes_launcher));
    of_build(&mut case, 2);
    assert!(case.has(makes_launcher), "{}", case.reason("one"));
    let launcher = ProviderId::launcher("a".into());
    case.done(makes_launcher);
    case.provider(&launcher, ProviderPhase::Crashed, |observed| observed.build = Some(LauncherBuild(2)));
    case.done(deletes_launcher);
    case.provider_gone(&launcher);
    assert_eq!(pause(&mut case), Millis::secs(10), "it is the first of its build that crashed");
}

#[test]
fn by_policy_as_well_once_what_crashed_is_obsolete() {
    let mut case = pauses();
    leaves(&mut case, "one");
    policy(&mut case, true);
    assert!(!case.has(makes_launcher));
    case.on(PairingEvent::LauncherBuild {
        build: LauncherBuild(1),
        policy: LauncherBuildPolicy { obsolete: true, max_engines: None },
    });
    assert!(case.has(makes_launcher));
}

#[test]
fn another_accelerators_launcher_is_made_at_once() {
    let mut case = PairingCase::new(2);
    waits(&mut case, "one");
    crash(&mut case);
    case.requester("two", ask(ProviderMode::Launcher, 1), &["b"], |_| ());
    assert!(case.has(makes_launcher));
}

#[test]
fn a_launcher_that_nobody_needs_is_ended_after_a_while_and_made_again_at_once() {
    let mut case = PairingCase::new(1);
    waits(&mut case, "one");
    case.done(makes_launcher);
    leaves(&mut case, "one");
    let launcher = case.launcher_ready("a");
    case.advance(Millis(PairingSettings::default().launcher_idle_timeout.0 - 1));
    assert!(!case.has(deletes_launcher));
    case.advance(Millis(1));
    case.done(deletes_launcher);
    case.provider_gone(&launcher);
    waits(&mut case, "two");
    assert!(case.has(makes_launcher), "it did not fail");
}

#[test]
fn a_launcher_stays_by_policy_and_for_who_waits() {
    let idle = PairingSettings::default().launcher_idle_timeout + Millis::secs(1);
    let mut case = PairingCase::new(1);
    policy(&mut case, true);
    case.done(makes_launcher);
    case.launcher_ready("a");
    case.advance(idle);
    assert!(!case.has(deletes_launcher), "the policy says so");
    let mut large = ask(ProviderMode::Launcher, 1);
    large.sizes.awake = Bytes::gib(81);
    case.requester("waits", large, &["a"], |_| ());
    policy(&mut case, false);
    case.advance(idle);
    assert!(!case.has(deletes_launcher), "somebody waits for it");
    leaves(&mut case, "waits");
    assert!(case.has(deletes_launcher));
}

#[test]
fn of_two_accelerators_only_that_has_a_launcher_for_which_the_policy_wants_one() {
    let mut case = PairingCase::new(2);
    policy(&mut case, true);
    case.done(makes_launcher);
    assert!(!case.has(makes_launcher), "nobody wants another");
    let launcher = case.launcher_ready("a");
    case.cordon(true);
    case.provider_gone(&launcher);
    assert!(!case.has(makes_launcher), "its node takes nothing new");
    case.cordon(false);
    assert!(case.has(makes_launcher));
}

/// The launcher came and went while the watch was broken.
#[test]
fn a_launcher_that_nobody_has_seen_is_found_to_be_gone() {
    let PairingSettings { launcher_idle_timeout: idle, stop_timeout: end, .. } = PairingSettings::default();
    let mut case = PairingCase::new(1);
    waits(&mut case, "one");
    case.done(makes_launcher);
    leaves(&mut case, "one");
    case.advance(idle + Millis::secs(1));
    case.done(deletes_launcher);
    waits(&mut case, "two");
    assert_eq!(case.reason("two"), "the launcher is being deleted");
    assert!(!case.has(deletes_launcher) && !case.has(makes_launcher));
    case.advance(end);
    case.complete(deletes_launcher, condition(QueriedCondition::Absent));
    assert!(case.has(makes_launcher));
}

#[test]
fn a_launcher_with_a_sleeper_stays() {
    let mut case = PairingCase::new(1);
    case.launcher_ready("a");
    waits(&mut case, "one");
    let id = engine(ProviderMode::Launcher, 1, &["a"]);
    case.done(binds(&id));
    case.done(launches(&id));
    let generation = generation(case.known(&id));
    case.on(PairingEvent::EngineReady { node: node(), engine: id.clone(), generation });
    case.done(sends_canary(&id));
    case.done(opens(&id));
    case.finalized("one");
    case.put_to_sleep("one", &id);
    case.advance(PairingSettings::default().launcher_idle_timeout + Millis::secs(1));
    assert!(!case.has(deletes_launcher));
}
