//! Models that do not fit beside each other take turns, and nobody sees an error.

use std::time::Duration;

use crate::support::{Fixture, Sim};

const TURNS: &str = "turns: {residency: 200ms, maxTurn: 1s, drain: {deadline: 2s, onDeadline: cut}}";

#[test]
fn a_cold_model_is_launched_and_a_second_one_takes_its_place_and_back() {
    let gateway = Fixture::new(&["1200Mi"])
        .settings(TURNS)
        .model(&Sim::new("first"))
        .model(&Sim::new("second"))
        .start();
    let cold = gateway.client().chat("first", true, 4);
    assert!(cold.is_whole_stream(), "{}", cold.text());
    assert_eq!(cold.header("x-rouse-cold-start"), "cold");
    assert!(gateway.client().chat("second", true, 4).is_whole_stream());
    assert_eq!(gateway.engine("first#0")["state"], "Asleep(1)");
    let hot = gateway.client().chat("first", false, 4);
    assert_eq!((hot.status, hot.header("x-rouse-cold-start")), (200, "hot"), "{}", hot.text());
    let explained: serde_json::Value = gateway.admin().get("/admin/v1/models/second/explain").json();
    assert_eq!(explained["state"], "asleep", "{explained}");
    gateway.until("idle", Duration::from_secs(5), || gateway.engine("first#0")["leases"] == 0);
    assert_eq!(gateway.terminate(), Some(0));
}
