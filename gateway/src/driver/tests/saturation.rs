//! Tests the limits of saturated engines.

use futures_util::FutureExt as _;
use rouse::engine::saturation_limit::MAX_LIMIT_AGE;
use rouse_net::engine_load::EngineLoad;

use super::*;

#[tokio::test]
async fn a_report_of_a_saturated_engine_holds_requests_here_and_a_lower_one_lets_them_go() {
    let mut harness = DriverHarness::new(1, 1);
    let Event::Configured { mut configuration } = configured(1, 1, 0) else { unreachable!() };
    configuration.models[0].max_concurrency = Some(9);
    harness.turn([Event::Configured { configuration }]);
    let endpoint = harness.routes().models.get(&name(0)).unwrap().endpoints[0].clone();
    let clock = harness.handle.clock();
    let report = |kv_use, waiting| {
        let load = EngineLoad { kv_use: Some(kv_use), waiting: Some(waiting), running: None };
        endpoint.activity.record_load(&load, clock.now());
    };
    let [first, _second] = [harness.lease(0), harness.lease(0)];
    report(0.9, 1.0);
    let _parked = [harness.park(0), harness.park(0)];
    while harness.driver.core.fleet().waiting(&name(0)) < 2 {
        harness.step().await;
    }
    harness.turn([]);
    assert_eq!(
        harness.driver.core.fleet().waiting(&name(0)),
        2,
        "the engine has as many requests as it may have"
    );
    drop(first);
    harness.step().await;
    assert_eq!(harness.driver.core.fleet().waiting(&name(0)), 1, "one has ended");
    report(0.1, 0.0);
    harness.step().await;
    assert_eq!(harness.driver.core.fleet().waiting(&name(0)), 0);
}

#[tokio::test]
async fn of_the_reports_of_a_saturated_engine_the_driver_takes_those_that_change_or_renew_its_limit() {
    let mut harness = DriverHarness::new(1, 1);
    let Event::Configured { mut configuration } = configured(1, 1, 0) else { unreachable!() };
    configuration.models[0].max_concurrency = Some(9);
    harness.turn([Event::Configured { configuration }]);
    let endpoint = harness.routes().models.get(&name(0)).unwrap().endpoints[0].clone();
    let _held = harness.lease(0);
    harness.turn([]);
    let begin = harness.handle.clock().now();
    let report = |kv_use, waiting, now| {
        let load = EngineLoad { kv_use: Some(kv_use), waiting: Some(waiting), running: None };
        endpoint.activity.record_load(&load, now);
    };
    let is_woken = |harness: &DriverHarness| harness.driver.platform.gates.changed().now_or_never().is_some();
    let event = |harness: &mut DriverHarness, now| {
        let mut batch = Vec::new();
        harness.driver.platform.gates.sample(&mut batch, true, now);
        batch.into_iter().find_map(|event| match event {
            Event::SaturationChanged { limit, .. } => Some(limit.map(|limit| (limit.leases, limit.until))),
            _ => None,
        })
    };
    is_woken(&harness);
    report(0.9, 1.0, begin);
    assert!(is_woken(&harness));
    let until = begin + MAX_LIMIT_AGE;
    assert_eq!(event(&mut harness, begin), Some(Some((Some(1), until))));

    let second = begin + Millis::secs(2);
    report(0.97, 2.0, second);
    assert!(!is_woken(&harness), "the limit is as before");
    assert_eq!(event(&mut harness, second), None);
    let renewed = second + MAX_LIMIT_AGE;
    assert_eq!(event(&mut harness, until), Some(Some((Some(1), renewed))), "the fleet's copy ends now");

    let third = until + Millis(1);
    report(0.97, 0.0, third);
    assert!(is_woken(&harness), "the engine may have more");
    assert_eq!(event(&mut harness, third), Some(Some((Some(6), third + MAX_LIMIT_AGE))));
    report(0.1, 0.0, third);
    assert!(is_woken(&harness));
    assert_eq!(event(&mut harness, third), Some(None));
}

#[tokio::test]
async fn an_engine_is_saturated_by_the_thresholds_of_its_model_also_after_a_reload() {
    let mut harness = DriverHarness::new(1, 1);
    let endpoint = harness.routes().models.get(&name(0)).unwrap().endpoints[0].clone();
    let clock = harness.handle.clock();
    let is_saturated = |kv_use| {
        endpoint.activity.clear_load();
        let load = EngineLoad { kv_use: Some(kv_use), waiting: Some(0.0), running: None };
        endpoint.activity.record_load(&load, clock.now());
        endpoint.activity.saturation().is_saturated(|| clock.now())
    };
    assert!(is_saturated(0.85) && !is_saturated(0.75));
    let Event::Configured { mut configuration } = configured(1, 1, 0) else { unreachable!() };
    configuration.models[0].saturation_thresholds.kv_cache = 0.95;
    harness.turn([Event::Configured { configuration }]);
    assert!(is_saturated(0.96) && !is_saturated(0.85));
}
