//! Several engines of one model.

use std::time::Duration;

use crate::support::{Fixture, Sim};

const SOON: Duration = Duration::from_secs(20);

#[test]
fn two_engines_serve_a_model_and_one_of_them_makes_room_for_another() {
    let twice = Sim { keys: "replicas: 2\nmaxConcurrency: 1", ..Sim::new("twice") };
    let gateway = Fixture::new(&["1Gi", "1Gi"])
        .settings("turns: {residency: 60s, maxTurn: 120s}")
        .model(&twice)
        .model(&Sim { awake: "900Mi", ..Sim::new("other") })
        .start();
    assert!(gateway.client().chat("twice", true, 3).is_whole_stream());
    let awake = |engine: &str| gateway.engine(engine)["state"] == "Awake";
    gateway.until("both are awake", SOON, || awake("twice#0") && awake("twice#1"));
    assert_ne!(gateway.engine("twice#0")["accelerators"], gateway.engine("twice#1")["accelerators"]);

    // Each takes one at a time, and two are answered at once.
    let client = gateway.client();
    std::thread::scope(|scope| {
        let long = || client.chat("twice", true, 100).is_whole_stream();
        let both = [scope.spawn(long), scope.spawn(long)];
        let in_use = |engine: &str| gateway.engine(engine)["leases"] == 1;
        gateway.until("both are in use", SOON, || in_use("twice#0") && in_use("twice#1"));
        assert!(both.into_iter().all(|request| request.join().unwrap()));
    });

    // Residency protects the first; the second is spare.
    assert!(client.chat("other", true, 3).is_whole_stream());
    assert!(awake("twice#0") && awake("other#0") && !awake("twice#1"), "{}", gateway.fleet());
    assert!(client.chat("twice", true, 3).is_whole_stream());
}
