//! When a launcher is made anew, and when it is ended.

use rouse::{
    pairing::{
        event::{AcceleratorFacts, Ask, Condition, Event, Stage, Terms},
        ids::{Build, Mode, ProviderId},
        settings::Settings,
    },
    units::{Bytes, Millis},
};

use crate::driver::*;

/// The launcher of `a` crashes; it is deleted and gone.
fn crash(case: &mut Case) {
    let launcher = ProviderId::launcher("a".into());
    case.done(makes_launcher);
    case.provider(&launcher, Stage::Trouble, |_| ());
    case.done(deletes_launcher);
    case.provider(&launcher, Stage::Ended, |seen| seen.deleting = true);
    case.provider_gone(&launcher);
}

fn pause(case: &mut Case) -> Millis {
    let from = case.now;
    while !case.has(makes_launcher) {
        case.after(Millis::secs(1));
    }
    case.now.since(from)
}

fn waits(case: &mut Case, id: &str) {
    case.requester(id, ask(Mode::Launcher, 1), &["a"], |_| ());
}

fn leaves(case: &mut Case, id: &str) {
    case.kill(id);
    case.on(Event::RequesterGone { node: node(), requester: id.into() });
}

fn policy(case: &mut Case, launcher: bool) {
    let facts = AcceleratorFacts { launcher, ..accelerator(0) };
    case.on(Event::Accelerator { node: node(), accelerator: "a".into(), facts });
}

#[test]
fn a_launcher_that_crashes_is_made_anew_later_each_time() {
    let mut case = Case::new(1);
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
    let mut case = Case::new(1);
    policy(&mut case, true);
    crash(&mut case);
    assert_eq!(pause(&mut case), Millis::secs(10));
}

/// The pause after a third launcher in which an engine lived for so long.
fn pause_after(lives: Millis) -> Millis {
    let mut case = Case::new(1);
    waits(&mut case, "one");
    for _ in 0..2 {
        crash(&mut case);
        pause(&mut case);
    }
    case.done(makes_launcher);
    let launcher = case.launcher_ready("a");
    let id = engine(Mode::Launcher, 1, &["a"]);
    case.done(binds(&id));
    case.done(launches(&id));
    let generation = generation(case.known(&id));
    case.on(Event::Answers { node: node(), engine: id.clone(), generation });
    case.done(proves(&id));
    case.done(opens(&id));
    case.after(lives);
    case.provider(&launcher, Stage::Ended, |_| ());
    case.done(deletes_launcher);
    case.provider_gone(&launcher);
    leaves(&mut case, "one");
    waits(&mut case, "two");
    pause(&mut case)
}

#[test]
fn after_an_engine_has_lived_in_one_the_pauses_begin_anew() {
    assert_eq!(pause_after(Settings::default().lived), Millis::secs(10));
    assert_eq!(pause_after(Millis::secs(1)), Millis::secs(40));
}

/// Launchers of the first build have crashed twice, and the next is not made yet.
fn pauses() -> Case {
    let mut case = Case::new(1);
    of_build(&mut case, 1);
    for again in [false, true] {
        if again {
            pause(&mut case);
        }
        case.done(makes_launcher);
        let launcher = ProviderId::launcher("a".into());
        case.provider(&launcher, Stage::Trouble, |seen| seen.build = Some(Build(1)));
        case.done(deletes_launcher);
        case.provider_gone(&launcher);
        assert!(case.reason("one").contains("failed") && case.reason("one").contains("never ready"));
    }
    case
}

fn of_build(case: &mut Case, build: u64) {
    let asked = Ask { build: Some(Build(build)), ..ask(Mode::Launcher, 1) };
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
    case.provider(&launcher, Stage::Trouble, |seen| seen.build = Some(Build(2)));
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
    case.on(Event::Build { build: Build(1), terms: Terms { obsolete: true, most: None } });
    assert!(case.has(makes_launcher));
}

#[test]
fn another_accelerators_launcher_is_made_at_once() {
    let mut case = Case::new(2);
    waits(&mut case, "one");
    crash(&mut case);
    case.requester("two", ask(Mode::Launcher, 1), &["b"], |_| ());
    assert!(case.has(makes_launcher));
}

#[test]
fn a_launcher_that_nobody_needs_is_ended_after_a_while_and_made_again_at_once() {
    let mut case = Case::new(1);
    waits(&mut case, "one");
    case.done(makes_launcher);
    leaves(&mut case, "one");
    let launcher = case.launcher_ready("a");
    case.after(Millis(Settings::default().idle.0 - 1));
    assert!(!case.has(deletes_launcher));
    case.after(Millis(1));
    case.done(deletes_launcher);
    case.provider_gone(&launcher);
    waits(&mut case, "two");
    assert!(case.has(makes_launcher), "it did not fail");
}

#[test]
fn a_launcher_stays_by_policy_and_for_who_waits() {
    let idle = Settings::default().idle + Millis::secs(1);
    let mut case = Case::new(1);
    policy(&mut case, true);
    case.done(makes_launcher);
    case.launcher_ready("a");
    case.after(idle);
    assert!(!case.has(deletes_launcher), "the policy says so");
    let mut large = ask(Mode::Launcher, 1);
    large.sizes.awake = Bytes::gib(81);
    case.requester("waits", large, &["a"], |_| ());
    policy(&mut case, false);
    case.after(idle);
    assert!(!case.has(deletes_launcher), "somebody waits for it");
    leaves(&mut case, "waits");
    assert!(case.has(deletes_launcher));
}

#[test]
fn of_two_accelerators_only_that_has_a_launcher_for_which_the_policy_wants_one() {
    let mut case = Case::new(2);
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

/// It came and went while the watch was broken.
#[test]
fn a_launcher_that_nobody_has_seen_is_found_to_be_gone() {
    let Settings { idle, end, .. } = Settings::default();
    let mut case = Case::new(1);
    waits(&mut case, "one");
    case.done(makes_launcher);
    leaves(&mut case, "one");
    case.after(idle + Millis::secs(1));
    case.done(deletes_launcher);
    waits(&mut case, "two");
    assert_eq!(case.reason("two"), "its launcher is being deleted");
    assert!(!case.has(deletes_launcher) && !case.has(makes_launcher));
    case.after(end);
    case.settle(deletes_launcher, condition(Condition::Absent));
    assert!(case.has(makes_launcher));
}

#[test]
fn a_launcher_with_a_sleeper_stays() {
    let mut case = Case::new(1);
    case.launcher_ready("a");
    waits(&mut case, "one");
    let id = engine(Mode::Launcher, 1, &["a"]);
    case.done(binds(&id));
    case.done(launches(&id));
    let generation = generation(case.known(&id));
    case.on(Event::Answers { node: node(), engine: id.clone(), generation });
    case.done(proves(&id));
    case.done(opens(&id));
    case.finalized("one");
    case.put_to_sleep("one", &id);
    case.after(Settings::default().idle + Millis::secs(1));
    assert!(!case.has(deletes_launcher));
}
