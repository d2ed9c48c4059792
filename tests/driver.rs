//! The turn of the driver over a small scripted platform, which finds three faults when each is put back by hand.
//!
//! Each fault is a switch of this platform, and none of the product. Without a fault, the same run has no finding.

#[path = "driver/scripted.rs"]
mod scripted;

use rouse::{
    driver::MAX_REQUESTS_PER_TURN,
    fleet::event::{Event, PublishedEngine, PublishedEngineState},
    model::EngineId,
    units::{Generation, Millis, Tick},
};

use scripted::{GPU, PutBackFault, START, ScriptedLoop, address};

/// Departed requests in each millisecond of the flood: more than a turn takes.
const FLOOD: u64 = 2 * MAX_REQUESTS_PER_TURN as u64;

/// Starts a cold model with or without a flood of requests that arrive and leave. Returns when its waiter was granted.
fn start_time(fault: PutBackFault, is_flooded: bool) -> Result<Tick, String> {
    let mut driver = ScriptedLoop::new(fault, &["cold"]);
    let waiter = driver.park("cold");
    driver.run_until(driver.now + Millis(1))?;
    for _ in 0..1000 {
        if is_flooded {
            (0..FLOOD).for_each(|_| driver.arrive_and_leave("cold"));
        }
        driver.run_until(driver.now + Millis(1))?;
        if let Some(at) = driver.granted_at(waiter) {
            return Ok(at);
        }
    }
    Err(format!("waiter {} was not granted within a second", waiter.0))
}

#[test]
fn a_flood_of_requests_delays_no_outcome_of_an_engine() {
    let quiet = start_time(PutBackFault::None, false).expect("no finding");
    let flooded = start_time(PutBackFault::None, true).expect("no finding");
    assert!(quiet > START, "the start takes time");
    assert_eq!(flooded, quiet);
}

#[test]
fn arrivals_that_are_taken_before_platform_events_are_found() {
    start_time(PutBackFault::ArrivalsFirst, false).expect("without a flood the order makes no difference");
    let finding = start_time(PutBackFault::ArrivalsFirst, true).unwrap_err();
    assert!(finding.contains("cold#0") && finding.contains("behind requests"), "{finding}");
}

/// A model waits for the memory of another one, whose last stream ends after a second. Returns when it was granted.
fn grant_after_last_stream(fault: PutBackFault) -> Result<Tick, String> {
    let mut driver = ScriptedLoop::new(fault, &["holder", "waits"]);
    driver.adopt("holder");
    driver.run_until(driver.now + Millis(10))?;
    driver.enter("holder", Millis::secs(1));
    let waiter = driver.park("waits");
    driver.run_until(START + Millis::secs(10))?;
    driver.granted_at(waiter).ok_or_else(|| format!("waiter {} was not granted within 10 s", waiter.0))
}

#[test]
fn a_waiter_gets_the_memory_of_an_engine_as_soon_as_its_last_stream_ends() {
    let granted = grant_after_last_stream(PutBackFault::None).expect("no finding");
    let after_stream = granted.since(START + Millis::secs(1));
    assert!(Millis::ZERO < after_stream && after_stream < Millis(500), "{after_stream}");
}

#[test]
fn a_waiter_beside_an_idle_engine_whose_last_lease_ended_unheard_is_found() {
    let finding = grant_after_last_stream(PutBackFault::UnheardLeaseEnd).unwrap_err();
    assert!(finding.contains("waits beside holder#0"), "{finding}");
}

/// A follower learns in one turn that an engine has ended and that its next generation serves.
fn replaced_engine(fault: PutBackFault) -> Result<(), String> {
    let mut driver = ScriptedLoop::new(PutBackFault::None, &["served"]);
    let publish = |generation: u64, since: Tick| Event::Published {
        engine: EngineId::new("served".into(), 0),
        generation: Generation(generation),
        published: Some(PublishedEngine {
            state: PublishedEngineState::Awake,
            address: Some(address(u16::try_from(generation).expect("a small number"))),
            fingerprint: 1,
            accelerators: vec![GPU.into()],
            since,
            failure: None,
        }),
    };
    driver.send(Event::LeadershipChanged { leads: false });
    driver.send(publish(1, driver.now));
    driver.run_until(driver.now + Millis::secs(1))?;
    assert_eq!(driver.routed_generation("served"), Some(Generation(1)));
    driver.put_back(fault);
    driver.send(publish(2, driver.now));
    driver.run_until(driver.now + Millis::secs(1))?;
    assert_eq!(driver.routed_generation("served"), Some(Generation(2)));
    Ok(())
}

#[test]
fn the_gate_of_a_new_generation_opens_once_the_routes_have_it() {
    replaced_engine(PutBackFault::None).expect("no finding");
}

#[test]
fn a_gate_that_opens_before_the_route_changes_is_found() {
    let finding = replaced_engine(PutBackFault::OpensBeforeRoutes).unwrap_err();
    assert!(finding.contains("with the routes from before the turn enters served#0"), "{finding}");
}

#[test]
fn turns_that_only_cause_each_other_are_reported_with_model_and_event() {
    // This waiter's grant fails each time, so it returns to the queue for ever.
    let mut driver = ScriptedLoop::new(PutBackFault::NoGrantSucceeds, &["full"]);
    driver.adopt("full");
    driver.park("full");
    let finding = driver.run_until(START + Millis::secs(1)).unwrap_err();
    assert!(finding.contains("models: full") && finding.contains("arrives: a stream for full"), "{finding}");
}
