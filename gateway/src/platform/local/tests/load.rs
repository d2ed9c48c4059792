//! The load that an engine reports while it serves.

use std::sync::Arc;

use rouse_net::{engine_load::EngineLoad, lease::Gate};

use super::*;

/// The health watch reads the load, too, but here its first probe is an hour away.
#[tokio::test]
async fn the_load_of_an_engine_that_serves_is_read_between_two_health_probes() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    let mut rare = harness.config.clone();
    rare.timeouts.health_every = Millis::secs(3600);
    harness.local.reconfigure(Arc::new(rare));
    harness.adopted().await;
    harness.run("m").await;
    let activity = harness.local.engine_activity(&engine("m"), FIRST);
    let clock = TickClock::new(time::Instant::now(), Tick(1));
    let gate = Gate::new(None, clock, Arc::default());
    gate.open();
    activity.set_gate(&gate);
    assert!(!activity.has_requests());
    let _lease = gate.take().unwrap();
    assert!(activity.has_requests());
    let reading = time::timeout(Duration::from_secs(20), async {
        loop {
            if let Some((load, _)) = activity.load().latest() {
                return load;
            }
            time::sleep(Duration::from_millis(10)).await;
        }
    });
    let idle = EngineLoad { kv_use: Some(0.0), waiting: Some(0.0), running: Some(0.0) };
    assert_eq!(reading.await.expect("a reading"), idle);
    harness.stop("m", Millis::secs(5));
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
    assert_eq!(activity.load().latest(), None, "an engine that is gone has no load");
}
