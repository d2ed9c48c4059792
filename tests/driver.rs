//! The driver's turn in simulated worlds, whose own checks find each of four defects that are put back by hand.
//!
//! Each defect is a switch of the simulated gateway; the product has none. Without it, the same world breaks no
//! invariant. A follower stands on a platform of its own, because no simulated world has two gateways.

#[path = "driver/follower.rs"]
mod follower;

use rouse::{
    driver::MAX_REQUESTS_PER_TURN,
    model::{Accelerator, FleetConfig, FleetSettings, ModelSpec, ProtectionPolicy},
    sim::{PlatformDefect, Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, scenario::scripts},
    units::{Bytes, Generation, Millis},
};

use follower::ScriptedFollower;

/// Requests that arrive at one moment: more than a turn takes.
const FLOOD: usize = 2 * MAX_REQUESTS_PER_TURN;
const RANDOM_WORLDS: u64 = 16;
const STEPS: u64 = 200;

/// One accelerator that holds one of these models at a time.
fn scenario(name: &str, models: Vec<ModelSpec>) -> Scenario {
    let mut settings = FleetSettings { host_memory: Bytes::gib(64), ..FleetSettings::default() };
    settings.turns.protection = ProtectionPolicy::Never;
    let gpu = Accelerator { metered: true, ..Accelerator::new("gpu-0".into(), Bytes::gib(24)) };
    Scenario::new(name, FleetConfig { settings, accelerators: vec![gpu], models })
}

fn with_stream(scenario: Scenario, after: Millis, model: &str, exchange: Millis) -> Scenario {
    scenario.at(after, ScenarioAction::SendRequest(SimulatedRequest::stream(model, exchange)))
}

/// Adds requests for a model that all arrive at this moment, and leave at once if they have to wait.
fn with_flood(scenario: Scenario, after: Millis, model: &str) -> Scenario {
    let stream = SimulatedRequest::stream(model, Millis::secs(1));
    let request = SimulatedRequest { max_park_time: Some(Millis::ZERO), ..stream };
    let send =
        |scenario: Scenario, _: usize| scenario.at(after, ScenarioAction::SendRequest(request.clone()));
    (0..FLOOD).fold(scenario, send)
}

fn world(scenario: Scenario, defect: Option<PlatformDefect>) -> SimulatedWorld {
    let world = SimulatedWorld::new(scenario);
    match defect {
        Some(defect) => world.with_defect(defect),
        None => world,
    }
}

/// Runs a world without a defect until all its requests are served.
fn served(scenario: Scenario, requests: u64) -> SimulatedWorld {
    let mut world = world(scenario, None);
    world.run_until(Millis::secs(60)).unwrap_or_else(|violation| panic!("{violation}"));
    assert_eq!(world.tally().count("requests served"), requests, "{}", world.tally());
    world
}

/// The first violation that a world with this defect reports.
fn finding(scenario: Scenario, defect: PlatformDefect) -> String {
    let outcome = world(scenario, Some(defect)).run_until(Millis::secs(60));
    outcome.expect_err("the defect is found").to_string()
}

/// A request that waits for a cold model arrives, with or without a flood of impatient ones.
fn cold_model(is_flooded: bool) -> Scenario {
    let arrival = Millis::secs(1);
    let patient = with_stream(
        scenario("cold model", vec![scripts::model("cold", 20)]),
        arrival,
        "cold",
        Millis::secs(1),
    );
    if is_flooded { with_flood(patient, arrival, "cold") } else { patient }
}

#[test]
fn a_flood_of_requests_delays_no_outcome_of_an_engine() {
    let (quiet, flooded) = (served(cold_model(false), 1), served(cold_model(true), 1));
    assert_eq!(flooded.tally().count("clients left while parked"), FLOOD as u64);
    assert!(quiet.longest_wait() > Millis::ZERO, "the start takes time");
    assert_eq!(flooded.longest_wait(), quiet.longest_wait());
}

#[test]
fn requests_that_are_taken_before_platform_events_are_found() {
    world(cold_model(false), Some(PlatformDefect::RequestsFirst))
        .run_until(Millis::secs(60))
        .expect("without a flood the order makes no difference");
    let finding = finding(cold_model(true), PlatformDefect::RequestsFirst);
    assert!(finding.contains("platform events behind requests; the first: gpu-0"), "{finding}");
}

/// A model waits for the memory of another one, whose only stream ends seven seconds later.
fn waiter_beside_a_stream() -> Scenario {
    let models = vec![scripts::model("holder", 20), scripts::model("waits", 20)];
    let holder = with_stream(scenario("two models", models), Millis::secs(1), "holder", Millis::secs(10));
    with_stream(holder, Millis::secs(12), "waits", Millis::secs(1))
}

#[test]
fn a_waiter_gets_the_memory_of_an_engine_as_soon_as_its_last_stream_ends() {
    let world = served(waiter_beside_a_stream(), 2);
    // The stream's rest takes 7.1 s, the sleep 0.4 s and the start 8 s. The next health probe is 5 s after the stream.
    assert!(world.longest_wait() > Millis::secs(15), "{}", world.longest_wait());
    assert!(world.longest_wait() < Millis::secs(16), "{}", world.longest_wait());
}

#[test]
fn a_waiter_beside_an_idle_engine_whose_last_lease_ended_unnoticed_is_found() {
    let finding = finding(waiter_beside_a_stream(), PlatformDefect::MissedLeaseEnd);
    assert!(
        finding.contains("holder#0 1 is idle since") && finding.contains("waiters beside it: 1"),
        "{finding}"
    );
}

#[test]
fn a_gate_that_opens_before_the_routes_lead_to_it_is_found() {
    let finding = finding(cold_model(false), PlatformDefect::OpensBeforeRoutes);
    assert!(finding.contains("the gate of cold#0 1 opens before the routes lead to it"), "{finding}");
}

/// A pinned engine with one place receives two requests.
fn full_engine() -> Scenario {
    let model = ModelSpec { pinned: true, max_concurrency: Some(1), ..scripts::model("full", 20) };
    let first = with_stream(scenario("full", vec![model]), Millis::secs(20), "full", Millis::secs(2));
    with_stream(first, Millis::secs(21), "full", Millis::secs(2))
}

#[test]
fn turns_that_only_cause_each_other_are_reported_with_model_and_event() {
    served(full_engine(), 2);
    // The second request's grant fails each time, so it returns to the queue for ever.
    let finding = finding(full_engine(), PlatformDefect::NoGrantSucceeds);
    assert!(finding.contains("models: full") && finding.contains("arrives: a stream for full"), "{finding}");
}

/// A random world, whose gateway starts under a flood of requests.
fn flooded_world(seed: u64) -> Scenario {
    let scenario = Scenario::from_seed(seed);
    let model = scenario.configuration.models[0].name.as_str().to_owned();
    with_flood(scenario, Millis::ZERO, &model)
}

/// Number of the random worlds that report this defect, each by a message with this text.
fn random_worlds_that_find(defect: PlatformDefect, expected: &str) -> u64 {
    let finds = |seed: &u64| match world(flooded_world(*seed), Some(defect)).run(STEPS) {
        Ok(()) => false,
        Err(violation) => {
            assert!(violation.messages.iter().any(|message| message.contains(expected)), "{violation}");
            true
        }
    };
    (0..RANDOM_WORLDS).filter(finds).count() as u64
}

#[test]
fn random_worlds_find_the_defects_and_break_no_invariant_without_them() {
    for seed in 0..RANDOM_WORLDS {
        let outcome = world(flooded_world(seed), None).run(STEPS);
        outcome.unwrap_or_else(|violation| panic!("{violation}"));
    }
    let requests_first = random_worlds_that_find(PlatformDefect::RequestsFirst, "behind requests");
    assert_eq!(requests_first, RANDOM_WORLDS, "each world has a flood");
    // In some worlds no engine ever serves.
    let unheard = random_worlds_that_find(PlatformDefect::MissedLeaseEnd, "but the driver counts");
    assert!(unheard > RANDOM_WORLDS / 2, "{unheard} worlds find the unheard end of a lease");
    let opens = random_worlds_that_find(PlatformDefect::OpensBeforeRoutes, "before the routes lead to it");
    assert!(opens > RANDOM_WORLDS / 2, "{opens} worlds find the gate that opens too early");
}

/// A follower learns in one turn that an engine has ended and that its next generation serves.
fn replaced_engine(opens_before_routes: bool) -> Result<(), String> {
    let mut follower = ScriptedFollower::new();
    follower.receive_published(1)?;
    assert_eq!(follower.routed_generation(), Some(Generation(1)));
    if opens_before_routes {
        follower.open_before_routes();
    }
    follower.receive_published(2)?;
    assert_eq!(follower.routed_generation(), Some(Generation(2)));
    Ok(())
}

#[test]
fn the_gate_of_a_new_generation_opens_once_the_routes_have_it() {
    replaced_engine(false).expect("no finding");
}

#[test]
fn a_gate_that_opens_before_the_route_changes_is_found() {
    let finding = replaced_engine(true).unwrap_err();
    assert!(finding.contains("with the routes from before the turn enters served#0"), "{finding}");
}
