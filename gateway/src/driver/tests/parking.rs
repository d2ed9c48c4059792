//! Tests requests that park: their places in the queue, and the waits that they are quoted.

use futures_util::FutureExt as _;
use rouse::{
    fault::Fault,
    fleet::{
        event::{LearnedMeasurements, OperatorAction},
        quote::{LearnedTimes, TimeEstimate, WaitRange},
    },
};

use super::*;
use crate::driver::handle::{MAX_IN_TRANSIT, REQUEST_QUEUE_CAPACITY};

/// Parks a request. A granted lease is dropped at once.
fn park_briefly(harness: &DriverHarness) -> tokio::task::JoinHandle<Result<(), Fault>> {
    let (handle, request) = (harness.handle.clone(), harness.request(0));
    tokio::spawn(async move { handle.park(request).await.map(drop) })
}

#[tokio::test]
async fn what_waits_for_a_driver_that_is_held_up_is_bounded_and_none_of_it_is_lost() {
    let mut harness = DriverHarness::new(1, 1);
    let places = harness.driver.core.fleet().max_waiting() + MAX_IN_TRANSIT;
    let mut parked: Vec<_> = (0..places + 5).map(|_| park_briefly(&harness)).collect();
    while !parked[places..].iter().all(|request| request.is_finished()) {
        tokio::task::yield_now().await;
    }
    for refused in parked.drain(places..) {
        assert!(matches!(refused.await.unwrap(), Err(Fault::QueueFull { .. })));
    }
    assert_eq!(harness.driver.requests.len(), REQUEST_QUEUE_CAPACITY, "the others wait for room");
    assert!(!parked.iter().any(|request| request.is_finished()));

    // Of those that leave, the driver receives the ones that are in the channel.
    let mut staying = parked.split_off(places / 2);
    for request in &mut parked {
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
    }
    let (mut arrived, mut left) = (0, 0);
    while arrived < REQUEST_QUEUE_CAPACITY + staying.len() {
        let counts = harness.receive().await;
        (arrived, left) = (arrived + counts.0, left + counts.1);
    }
    assert_eq!((arrived, left), (REQUEST_QUEUE_CAPACITY + staying.len(), REQUEST_QUEUE_CAPACITY));

    // Those that the driver knows keep their places until it has received that they left.
    for request in &mut staying {
        request.abort();
        assert!(request.await.unwrap_err().is_cancelled());
    }
    let free = places - staying.len();
    let next: Vec<_> = (0..=free).map(|_| park_briefly(&harness)).collect();
    while !next[free].is_finished() {
        tokio::task::yield_now().await;
    }
    assert!(!next[..free].iter().any(|request| request.is_finished()));
    while left < REQUEST_QUEUE_CAPACITY + staying.len() {
        left += harness.receive().await.1;
    }
    assert_eq!(left, REQUEST_QUEUE_CAPACITY + staying.len());
    let request = harness.request(0);
    assert!(harness.handle.park(request).now_or_never().is_none(), "there are places again");
}

#[tokio::test]
async fn the_places_of_a_crowd_that_has_its_answers_are_all_released_without_a_turn() {
    const CROWD: usize = 3 * MAX_REQUESTS_PER_TURN;
    let mut harness = DriverHarness::new(1, 1);
    let parked: Vec<_> = (0..CROWD).map(|_| park_briefly(&harness)).collect();
    while harness.driver.requests.len() < CROWD {
        tokio::task::yield_now().await;
    }
    while !harness.driver.requests.is_empty() {
        harness.step().await;
    }
    harness.turn([Event::Shutdown { stop_engines: false }]);
    for request in parked {
        drop(request.await.unwrap());
    }
    harness.batch.clear();
    assert!(!harness.driver.take_reports(&mut harness.batch), "nothing is left to decide");
    let rest = harness.driver.shared.reports.take(&mut harness.batch, usize::MAX);
    assert!(rest.is_empty(), "{} places are still taken", rest.len());
}

#[tokio::test]
async fn what_waits_for_a_driver_that_has_ended_is_refused() {
    let harness = DriverHarness::new(1, 1);
    let parked: Vec<_> = (0..REQUEST_QUEUE_CAPACITY + 5).map(|_| park_briefly(&harness)).collect();
    while harness.driver.requests.len() < REQUEST_QUEUE_CAPACITY {
        tokio::task::yield_now().await;
    }
    let request = harness.request(0);
    let DriverHarness { handle, driver, .. } = harness;
    drop(driver);
    for request in parked {
        assert_eq!(request.await.unwrap(), Err(Fault::ShuttingDown));
    }
    assert_eq!(handle.park(request).await.map(drop), Err(Fault::ShuttingDown));
    handle.send_event(Event::ApiServerChanged { answers: true });
    handle.refresh().await;
    let refused = handle.submit_order(name(0), OperatorAction::Stop).await.unwrap_err();
    assert!(refused.contains("shutting down"), "{refused}");
}

#[tokio::test]
async fn a_request_that_waits_is_quoted_once_and_requests_read_its_wait_without_the_driver() {
    let mut harness = DriverHarness::new(2, 1);
    // The second model gets an accelerator of its own.
    harness.turn([configured(2, 2, 0)]);
    let known = TimeEstimate { mean: Millis::secs(40), deviation: Millis::secs(2) };
    let times = LearnedTimes { start: Some(known), ..LearnedTimes::default() };
    let learned = LearnedMeasurements { times, ..LearnedMeasurements::default() };
    harness.turn([Event::MeasurementsRestored { model: name(1), variant: Default::default(), learned }]);
    assert_eq!(harness.handle.expected_wait(&name(1)), None, "no request waits");
    let (handle, request) = (harness.handle.clone(), harness.request(1));
    let quoted = Arc::clone(&request.quoted);
    let waiting = tokio::spawn(async move { drop(handle.park(request).await) });
    tokio::task::yield_now().await;
    harness.step().await;
    let quote = quoted.get().copied().expect("a quote");
    assert_eq!(quote.likely, Millis::secs(40));
    let left = harness.handle.expected_wait(&name(1)).expect("it waits");
    assert!(left.high <= quote.high && left.likely > Millis::secs(30), "{left:?}");
    let handle = harness.handle.clone();
    let listed = tokio::spawn(async move { handle.expected_waits().await });
    tokio::task::yield_now().await;
    assert!(harness.driver.receive(&mut harness.batch).now_or_never().is_none(), "it takes no turn");
    let listed = listed.await.unwrap();
    assert_eq!(listed.get(&name(0)).map(|forecast| forecast.range), Some(WaitRange::ZERO));
    assert_eq!(listed.get(&name(1)).map(|forecast| forecast.range.likely), Some(Millis::secs(40)));
    waiting.abort();
}
