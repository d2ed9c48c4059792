//! Launchers of another LauncherConfig, or of an earlier version of it, are replaced.

use rouse::{
    pairing::{
        command::{PairingAction, ProviderStep},
        event::{LauncherBuildPolicy, PairingEvent, ProviderPhase, RequestedEngine},
        ids::{LauncherBuild, PairingEngineId, ProviderId, ProviderMode},
    },
    units::Bytes,
};

use crate::harness::*;

fn of_build(build: u64, fingerprint: u64) -> RequestedEngine {
    let mut requested = ask(ProviderMode::Launcher, fingerprint);
    (requested.sizes.awake, requested.build) = (Bytes::gib(20), Some(LauncherBuild(build)));
    requested
}

fn on_a(fingerprint: u64) -> PairingEngineId {
    engine(ProviderMode::Launcher, fingerprint, &["a"])
}

fn launcher() -> ProviderId {
    ProviderId::launcher("a".into())
}

/// Reports the launcher of `a` as ready, with this build.
fn ready(case: &mut PairingCase, build: u64) {
    case.provider(&launcher(), ProviderPhase::Ready, |observed| observed.build = Some(LauncherBuild(build)));
}

fn edited(case: &mut PairingCase, build: u64) {
    case.on(PairingEvent::LauncherBuild {
        build: LauncherBuild(build),
        policy: LauncherBuildPolicy { obsolete: true, max_engines: None },
    });
}

fn awake(case: &mut PairingCase, requester: &str, requested: RequestedEngine) -> PairingEngineId {
    let id = on_a(requested.fingerprint.0);
    case.requester(requester, requested, &["a"], |_| ());
    case.launched(&id);
    case.finalized(requester);
    id
}

fn makes_launcher_for(id: &str) -> impl Fn(&PairingAction) -> bool + '_ {
    move |order| matches!(order, PairingAction::Provider { step: ProviderStep::Create { requester: Some(asker) }, .. } if asker.as_str() == id)
}

#[test]
fn an_edit_ends_a_launcher_that_nobody_is_bound_in_with_its_sleepers() {
    let mut case = PairingCase::new(1);
    ready(&mut case, 1);
    let id = awake(&mut case, "one", of_build(1, 1));
    case.put_to_sleep("one", &id);
    assert!(!case.has(deletes_launcher));
    edited(&mut case, 2);
    assert!(!case.has(deletes_launcher), "that is another LauncherConfig");
    edited(&mut case, 1);
    case.done(deletes_launcher);
    case.requester("two", of_build(3, 1), &["a"], |_| ());
    assert!(!case.has(starts_anything) && !case.has(makes_launcher));
    case.provider_gone(&launcher());
    assert!(case.node().engines.is_empty());
    assert!(case.has(makes_launcher_for("two")), "nothing failed, so that there is no pause");
}

#[test]
fn an_edited_ones_launcher_that_never_became_ready_makes_way_without_pause() {
    let mut case = PairingCase::new(1);
    case.requester("one", of_build(1, 1), &["a"], |_| ());
    case.done(makes_launcher_for("one"));
    case.provider(&launcher(), ProviderPhase::Pending, |observed| observed.build = Some(LauncherBuild(1)));
    edited(&mut case, 1);
    case.requester("one", of_build(2, 1), &["a"], |_| ());
    case.done(deletes_launcher);
    case.provider_gone(&launcher());
    assert!(case.has(makes_launcher_for("one")));
}

#[test]
fn a_launcher_stays_until_the_last_one_bound_in_it_goes() {
    let mut case = PairingCase::new(1);
    ready(&mut case, 1);
    let first = awake(&mut case, "one", of_build(1, 1));
    let second = awake(&mut case, "two", of_build(1, 2));
    case.requester("two", of_build(2, 2), &["a"], |_| ());
    edited(&mut case, 1);
    assert!(!case.has(deletes_launcher));
    case.delete("one");
    case.done(closes_gate(&first));
    assert!(!case.has(sleeps(&first)), "nobody will wake it there");
    case.done(ends(&first));
    assert!(!case.has(deletes_launcher));
    case.requester("waits", of_build(2, 3), &["a"], |_| ());
    assert!(case.reason("waits").ends_with("and 2@a is awake there"), "{}", case.reason("waits"));
    case.delete("two");
    case.done(closes_gate(&second));
    assert!(case.has(deletes_launcher));
}

#[test]
fn a_launcher_of_another_configuration_makes_way_for_who_asks() {
    let mut case = PairingCase::new(1);
    ready(&mut case, 1);
    let id = awake(&mut case, "one", of_build(1, 1));
    // The same engine, but not from such a launcher.
    case.requester("other", of_build(2, 1), &["a"], |_| ());
    assert!(!case.has(deletes_launcher), "somebody is bound there");
    case.put_to_sleep("one", &id);
    assert!(!case.has(binds(&id)));
    case.done(deletes_launcher);
    let why = "the requested engine is being stopped: the engine's node, Pod or accelerator is going away";
    assert_eq!(case.reason("other"), why);
    case.provider_gone(&launcher());
    case.done(makes_launcher_for("other"));
    ready(&mut case, 2);
    case.launched(&id);
}

/// The launcher is made for the requester that is served next; otherwise two requesters would keep replacing each
/// other's.
#[test]
fn a_launcher_is_made_for_who_is_served_next_and_not_for_who_came_first() {
    let mut case = PairingCase::new(1);
    ready(&mut case, 1);
    case.requester("one", of_build(1, 1), &["a"], |_| ());
    case.requester("two", of_build(2, 2), &["a"], |_| ());
    case.done(binds(&on_a(1)));
    case.refused(launches(&on_a(1)));
    case.done(ends(&on_a(1)));
    assert!(case.failures("one") > 0);
    case.done(deletes_launcher);
    case.provider_gone(&launcher());
    assert!(case.has(makes_launcher_for("two")), "{:#?}", case.story);
}

#[test]
fn where_nothing_is_known_of_a_launcher_it_stays() {
    let mut case = PairingCase::new(1);
    case.launcher_ready("a");
    case.requester("one", of_build(1, 1), &["a"], |_| ());
    edited(&mut case, 1);
    assert!(!case.has(deletes_launcher) && case.has(binds(&on_a(1))));
}
