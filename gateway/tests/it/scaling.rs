//! A model on one machine grows and shrinks with the load of its engines.

use std::time::Duration;

use crate::{
    live::EngineUnderTest,
    operators::cli,
    support::{GatewayFixture, GatewayProcess, SimModel, read},
};

const SOON: Duration = Duration::from_secs(20);
const SCALED: &str = "saturation: {stabilisation: 1s}";

fn desired(gateway: &GatewayProcess) -> Option<String> {
    let scrape = gateway.admin().get("/metrics").text();
    let mut lines = scrape.lines();
    let series = "rouse_desired_replicas{model=\"m\",namespace=\"local\",variant=\"default\"} ";
    lines.find_map(|line| Some(line.strip_prefix(series)?.to_owned()))
}

fn explained(gateway: &GatewayProcess) -> String {
    let output = cli(gateway, &["explain", "m"]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn a_saturated_model_gets_a_second_engine_and_loses_it_after_the_stabilisation() {
    let keys = format!("replicas: 2\n{SCALED}");
    let gateway = GatewayFixture::new(&["1Gi", "1Gi"])
        .settings("saturation: {interval: 200ms, window: 1s}\ntimeouts: {health: {every: 100ms}}")
        .model(&SimModel { keys: &keys, stub: None, ..SimModel::new("m") })
        .start();
    let is_awake = |engine: &str| gateway.engine(engine)["state"] == "Awake";
    gateway.until("the model has a target", SOON, || desired(&gateway).is_some());
    assert!(gateway.client().chat("m", true, 3).is_whole_stream());
    gateway.until("one engine is enough", SOON, || desired(&gateway).as_deref() == Some("1"));
    assert!(is_awake("m#0") && !is_awake("m#1"), "a scaled model has no spares: {}", gateway.fleet());

    let first = EngineUnderTest::of(&gateway, "m#0");
    first.faults(r#"{"kv-use": 0.95}"#);
    gateway.until("a second engine serves", SOON, || is_awake("m#1"));
    let text = explained(&gateway);
    let both = "engines: 2 running or starting, 2 desired (";
    assert!(text.contains(both) && text.contains("KV cache is spare"), "{text}");
    assert_eq!(desired(&gateway).as_deref(), Some("2"));

    first.faults(r#"{"kv-use": null}"#);
    gateway.until("the second engine sleeps", SOON, || gateway.engine("m#1")["state"] == "Asleep(1)");
    let text = explained(&gateway);
    let one = "engines: 1 running or starting, 1 desired (1 replica less";
    assert!(is_awake("m#0") && text.contains(one), "{text}");

    let file = gateway.dir.join("rouse.yaml");
    std::fs::write(&file, read(&file).replace(SCALED, "saturation: {enabled: false}")).unwrap();
    gateway.until_logged("configuration reloaded: changed m");
    gateway.until("its target is gone", SOON, || desired(&gateway).is_none());
    assert!(!explained(&gateway).contains(" desired ("), "{}", explained(&gateway));
}
