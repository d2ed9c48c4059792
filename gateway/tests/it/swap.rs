//! Models that do not fit beside each other take turns, and no client sees an error.

use std::time::Duration;

use tokio::time::Instant;

use crate::support::{GatewayFixture, SimModel, client::chat_body, read};

const TURNS: &str = "turns: {residency: 200ms, maxTurn: 1s, drain: {deadline: 2s, onDeadline: cut}}";

#[test]
fn a_cold_model_is_launched_and_a_second_one_takes_its_place_and_back() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings(TURNS)
        .model(&SimModel::new("first"))
        .model(&SimModel::new("second"))
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

#[test]
fn a_model_gives_up_its_place_as_soon_as_its_last_stream_ends() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings("turns: {residency: 200ms, maxTurn: 60s}")
        .model(&SimModel::new("first"))
        .model(&SimModel::new("second"))
        .start();
    assert!(gateway.client().chat("first", true, 1).is_whole_stream());
    // The stream ends only after the other request waits.
    gateway.stall("first#0", true);
    let client = gateway.client();
    let stream = std::thread::spawn(move || client.chat("first", true, 300));
    gateway.until("first is in use", Duration::from_secs(5), || gateway.engine("first#0")["leases"] == 1);
    let second = gateway.client().open_chat("second", true, 1);
    let waits = || gateway.fleet()["models"].as_array().unwrap().iter().any(|model| model["waiting"] == 1);
    gateway.until("second waits", Duration::from_secs(5), waits);
    let began = Instant::now();
    gateway.stall("first#0", false);
    assert!(second.rest().is_whole_stream());
    assert!(began.elapsed() < Duration::from_secs(20), "it waited for the turn's end: {:?}", began.elapsed());
    assert!(stream.join().unwrap().is_whole_stream(), "nobody was cut for it");
}

#[test]
fn a_drain_that_passes_its_deadline_is_logged_and_counted_and_cuts_nobody() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .settings("turns: {residency: 200ms, maxTurn: 500ms, drain: {deadline: 300ms, onDeadline: wait}}")
        .model(&SimModel { flags: "--itl 20ms", ..SimModel::new("first") })
        .model(&SimModel::new("second"))
        .start();
    assert!(gateway.client().chat("first", true, 1).is_whole_stream());
    let stream = gateway.client().open_stream("first", 150);
    let second = gateway.client().open_chat("second", true, 1);
    gateway.until_logged("the drain has passed its deadline");
    assert!(stream.rest().is_whole_stream() && second.rest().is_whole_stream());
    let metrics = gateway.admin().get("/metrics").text();
    assert!(metrics.contains("rouse_drain_deadlines_passed_total{model=\"first\"} 1\n"), "{metrics}");
}

#[test]
fn a_sleeper_that_is_stopped_for_another_model_is_counted_as_evicted() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .model(&SimModel { asleep: "512Mi", ..SimModel::new("first") })
        .model(&SimModel::new("second"))
        .start();
    assert!(gateway.client().chat("first", true, 1).is_whole_stream());
    assert_eq!(gateway.admin().post("/admin/v1/models/first/sleep?level=1", "").status, 202);
    gateway.until("asleep", Duration::from_secs(10), || gateway.engine("first#0")["state"] == "Asleep(1)");
    assert!(gateway.client().chat("second", true, 1).is_whole_stream());
    let metrics = gateway.admin().get("/metrics").text();
    for counted in [
        "rouse_evictions_total{model=\"first\",transition=\"stop\"} 1\n",
        "rouse_swaps_total 1\n",
        "cause=\"operator\",model=\"first\",outcome=\"done\",transition=\"sleep\"} 1\n",
        "cause=\"swap\",model=\"first\",outcome=\"done\",transition=\"stop\"} 1\n",
    ] {
        assert!(metrics.contains(counted), "{counted}{metrics}");
    }
}

#[test]
fn a_client_who_alternates_between_two_models_waits_for_the_engines_alone() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .model(&SimModel::new("first"))
        .model(&SimModel::new("second"))
        .start();
    let began = Instant::now();
    for model in ["first", "second"].repeat(3) {
        assert!(gateway.client().chat(model, true, 1).is_whole_stream(), "{model}");
    }
    assert!(began.elapsed() < Duration::from_secs(20), "a pause beside the swaps: {:?}", began.elapsed());
}

#[test]
fn another_limit_on_concurrency_holds_from_the_reload_on() {
    let gateway = GatewayFixture::new(&["1200Mi"])
        .model(&SimModel { keys: "maxConcurrency: 1", ..SimModel::new("small") })
        .start();
    assert!(gateway.client().chat("small", true, 1).is_whole_stream());
    // This stream outlasts any test: a request that is served before its end has a place beside it.
    let long = gateway.client().open_stream("small", 100_000);
    let file = gateway.dir.join("rouse.yaml");
    let yaml = read(&file).replace("maxConcurrency: 1", "maxConcurrency: 2");
    std::fs::write(&file, yaml).unwrap();
    gateway.until("reloaded", Duration::from_secs(5), || gateway.log().contains("reloaded"));
    let headers = "x-request-timeout: 60\r\n";
    let beside = gateway.client().post_with("/v1/chat/completions", headers, &chat_body("small", true, 1));
    assert!(beside.is_whole_stream(), "{}", beside.text());
    drop(long);
}
