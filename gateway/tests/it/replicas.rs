//! Several replicas of one model.

use std::time::Duration;

use crate::{
    live::EngineUnderTest,
    support::{GatewayFixture, SimModel},
};

const SOON: Duration = Duration::from_secs(20);

#[test]
fn two_engines_serve_a_model_and_one_of_them_makes_room_for_another() {
    let twice = SimModel { keys: "replicas: 2\nmaxConcurrency: 1", ..SimModel::new("twice") };
    let gateway = GatewayFixture::new(&["1Gi", "1Gi"])
        .settings("turns: {protect: always, residency: 60s, maxTurn: 120s}")
        .model(&twice)
        .model(&SimModel { awake: "900Mi", ..SimModel::new("other") })
        .start();
    assert!(gateway.client().chat("twice", true, 3).is_whole_stream());
    let awake = |engine: &str| gateway.engine(engine)["state"] == "Awake";
    gateway.until("both are awake", SOON, || awake("twice#0") && awake("twice#1"));
    assert_ne!(gateway.engine("twice#0")["accelerators"], gateway.engine("twice#1")["accelerators"]);

    // Each engine takes one request at a time, and two requests run at once.
    let client = gateway.client();
    let stall = |still| ["twice#0", "twice#1"].iter().for_each(|engine| gateway.stall(engine, still));
    stall(true);
    std::thread::scope(|scope| {
        let long = || client.chat("twice", true, 100).is_whole_stream();
        let both = [scope.spawn(long), scope.spawn(long)];
        let in_use = |engine: &str| gateway.engine(engine)["leases"] == 1;
        gateway.until("both are in use", SOON, || in_use("twice#0") && in_use("twice#1"));
        stall(false);
        assert!(both.into_iter().all(|request| request.join().unwrap()));
    });

    // The first engine is protected; the second is spare.
    assert!(client.chat("other", true, 3).is_whole_stream());
    assert!(awake("twice#0") && awake("other#0") && !awake("twice#1"), "{}", gateway.fleet());
    assert!(client.chat("twice", true, 3).is_whole_stream());
}

/// An engine that fails at once always has the least load, and every request that it gets from a queue is lost.
#[test]
fn an_engine_that_fails_at_once_does_not_eat_the_queue() {
    let sim = SimModel { keys: "replicas: 2\nmaxConcurrency: 1", flags: "--itl 20ms", ..SimModel::new("m") };
    let gateway = GatewayFixture::new(&["1Gi", "1Gi"])
        .settings("timeouts: {health: {every: 200ms, timeout: 500ms}}")
        .model(&sim)
        .start();
    let client = gateway.client();
    assert!(client.chat("m", true, 1).is_whole_stream());
    gateway.until("both are awake", SOON, || {
        ["m#0", "m#1"].iter().all(|engine| gateway.engine(engine)["state"] == "Awake")
    });
    EngineUnderTest::of(&gateway, "m#0").faults(r#"{"status": 500}"#);
    let ask = || client.chat("m", true, 5).status;
    let statuses: Vec<u16> = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..50).map(|_| scope.spawn(ask)).collect();
        asked.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    let failed = statuses.iter().filter(|status| **status == 500).count();
    assert!((5..=10).contains(&failed), "{failed} failed");
    assert_eq!(statuses.iter().filter(|status| **status == 200).count(), 50 - failed);
}
