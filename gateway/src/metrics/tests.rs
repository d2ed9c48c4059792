use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use http::Method;
use rouse::{
    engine::{last_outcome::LastOutcome, saturation_limit::SaturationLimit},
    fault,
    fleet::report::{AcceleratorView, EngineView, HostView, ModelState, ModelView},
    model::EngineId,
    saturation::ScalingDirection,
    units::{Bytes, Generation, Tick},
};
use rouse_net::http_client::CallObserver as _;

use rouse::units::Millis;
use rouse_config::LoadSource;
use rouse_controllers::{
    crd::ledger::ObjectName,
    metrics::{
        ActuationPath, DeviceSlotGauges, EngineBindingLabels, LauncherPhase, MeterSource, ModelReplicas,
        TakeoverTimes, VariantLoad, VariantReplicas, WarmSetGauge, WarmupNodeGauges,
    },
};

use super::*;
use crate::driver::ColdStart;

const DOCUMENT: &str = include_str!("../../../docs/metrics.md");

#[test]
fn a_scrape_has_every_family_and_the_document_names_them_all_with_their_types_and_labels() {
    let metrics = used();
    let scraped = families(&metrics.encode());
    let documented: BTreeMap<_, _> = DOCUMENT
        .lines()
        .filter_map(|line| {
            let mut cells = line.strip_prefix("| `")?.split('|').map(|cell| cell.trim().trim_matches('`'));
            let (name, kind, labels) = (cells.next()?, cells.next()?, cells.next()?);
            let labels = labels.split(", ").map(|label| label.trim_matches('`').to_owned());
            let labels = labels.filter(|label| !label.is_empty()).collect::<BTreeSet<_>>();
            Some((name.to_owned(), (kind.to_owned(), labels)))
        })
        .collect();
    assert_eq!(scraped, documented);
}

#[test]
fn a_removed_model_leaves_no_series_and_one_that_stays_keeps_its_count() {
    let metrics = Metrics::new();
    let (stays, goes) = (ModelName::from("stays"), ModelName::from("goes"));
    metrics.configure([&stays, &goes]);
    for name in [&stays, &goes] {
        metrics.model(name).request_ended(RouteLabel::Chat, StatusClass::Success, None, Millis(5));
    }
    assert!(metrics.encode().contains("model=\"goes\""));
    metrics.configure([&stays]);
    let text = metrics.encode();
    assert!(!text.contains("model=\"goes\""), "{text}");
    let line = "rouse_requests_total{cold_start=\"none\",model=\"stays\",route=\"chat\",status=\"2xx\"} 1";
    assert!(text.lines().any(|found| found == line), "{text}");
    // The model may return, and then counts from zero.
    metrics.configure([&stays, &goes]);
    assert!(!metrics.encode().contains("model=\"goes\",route"));
}

#[test]
fn what_is_not_configured_counts_as_other() {
    let metrics = Metrics::new();
    metrics.model(&"made-up-by-a-client".into()).request_ended(
        RouteLabel::Chat,
        StatusClass::ClientError,
        None,
        Millis(1),
    );
    let text = metrics.encode();
    assert!(!text.contains("made-up"), "{text}");
    assert!(text.contains("model=\"other\",route=\"chat\",status=\"4xx\"} 1"), "{text}");
}

#[test]
fn a_model_may_be_called_other() {
    let metrics = Metrics::new();
    let name = ModelName::from("other");
    metrics.configure([&name]);
    metrics.model(&name).add_parked(1);
    assert!(metrics.encode().contains("rouse_parked{model=\"other\"} 1"));
    metrics.configure([]);
    metrics.configure([&name]);
    assert!(metrics.encode().contains("rouse_parked{model=\"other\"} 1"));
}

#[test]
fn every_route_is_found_by_its_label() {
    for route in RouteLabel::ALL {
        assert_eq!(RouteLabel::from_label(route.as_str()), route);
    }
    assert_eq!(RouteLabel::from_label("readyz"), RouteLabel::Other);
}

#[test]
fn the_view_becomes_gauges_under_the_names_of_the_seed() {
    let metrics = used();
    let text = metrics.encode();
    for line in [
        "inference_budget_total_bytes{node_pool=\"local\"} 1000",
        "inference_budget_allocated_bytes{node_pool=\"local\"} 400",
        "inference_budget_available_bytes{node_pool=\"local\"} 600",
        "inference_model_memory_declared_bytes{model=\"m\",namespace=\"local\"} 400",
        "inference_model_memory_observed_peak_bytes{model=\"m\",namespace=\"local\"} 300",
        "inference_model_memory_utilization_ratio{model=\"m\",namespace=\"local\"} 0.75",
        "inference_model_ready{model=\"m\",namespace=\"local\"} 0",
        "inference_model_replicas{model=\"m\",namespace=\"local\"} 1",
        "rouse_model_state{model=\"m\",state=\"asleep\"} 1",
        "rouse_model_state{model=\"m\",state=\"awake\"} 0",
        "rouse_engine_state{model=\"m\",replica=\"0\",state=\"asleep\"} 1",
        "rouse_engine_saturated{engine=\"m#0\",model=\"m\"} 1",
        "rouse_accelerator_memory_bytes{accelerator=\"gpu-0\",kind=\"observed\"} 390",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    metrics.observe_fleet(&FleetView::default());
    assert!(!metrics.encode().contains("gpu-0"), "an accelerator that is gone");
}

#[test]
fn in_a_cluster_budgets_are_those_of_pools_and_models_have_their_namespaces() {
    let metrics = Metrics::new();
    let name = ModelName::from("m");
    let (mut seen, mut other) = (view(&name), view(&name).accelerators.remove(0));
    (other.id, other.capacity, other.reserved) = ("pool-b".into(), Bytes(70), Bytes(80));
    seen.accelerators[0].id = "pool-a".into();
    seen.accelerators.push(other);
    let show = |namespace: &str| {
        metrics.set_namespaces(BTreeMap::from([(name.clone(), namespace.to_owned())]));
        metrics.configure([&name]);
        metrics.observe_fleet(&seen);
        metrics.encode()
    };
    let text = show("chat");
    for line in [
        "inference_budget_total_bytes{node_pool=\"pool-a\"} 1000",
        "inference_budget_allocated_bytes{node_pool=\"pool-a\"} 400",
        "inference_budget_available_bytes{node_pool=\"pool-a\"} 600",
        "inference_budget_total_bytes{node_pool=\"pool-b\"} 70",
        "inference_budget_available_bytes{node_pool=\"pool-b\"} 0",
        "inference_model_memory_declared_bytes{model=\"m\",namespace=\"chat\"} 400",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
    }
    assert!(
        !text.contains("node_pool=\"local\"") && !text.contains("model=\"m\",namespace=\"local\""),
        "{text}"
    );
    // An object of the same model in another namespace has replaced it.
    let text = show("search");
    assert!(text.contains("namespace=\"search\"") && !text.contains("namespace=\"chat\""), "{text}");
    metrics.observe_fleet(&FleetView::default());
    assert!(!metrics.encode().contains("pool-a"), "a pool that is gone");
}

/// Returns metrics with every counter used once.
fn used() -> Metrics {
    let metrics = Metrics::new();
    let name = ModelName::from("m");
    metrics.configure([&name]);
    metrics.observe_fleet(&view(&name));
    metrics.request_refused("shutting_down");
    metrics.client_left(DisconnectPhase::Parked);
    metrics.observe_added_latency(120);
    metrics.add_connections(1);
    metrics.swapped();
    metrics.reloaded(OutcomeLabel::Done);
    metrics.set_certificate_expiry(Some(2_000_000_000));
    metrics.controllers().writes.with_label_values(&["Pod", "done"]).inc();
    metrics.controllers().meter_reads.read_succeeded(MeterSource::Stub, Tick(1_000));
    let saturation = &metrics.controllers().saturation;
    saturation.count_readings(LoadSource::Engines, 1, 0);
    saturation.scaled(&name, "chat", "default", ScalingDirection::Up);
    let variant = VariantReplicas {
        variant: "default".to_owned(),
        public_name: "m".to_owned(),
        accelerator: None,
        current: 1,
        desired: 2,
    };
    let (namespace, decided) = ("chat".to_owned(), Some(Tick(1_000)));
    saturation.set_model(&name, ModelReplicas { namespace, variants: vec![variant], decided });
    let load = VariantLoad { saturated: 1, kv_use: 0.9, waiting: 2.0 };
    saturation.set_load(&name, BTreeMap::from([("default".into(), load)]), BTreeSet::new());
    let warmup = &metrics.controllers().warmup;
    warmup.set_warmup(&ObjectName::new("chat", "w"), WarmupNodeGauges::default());
    let (namespace, target) = ("chat".to_owned(), "warmup/w".to_owned());
    let set = WarmSetGauge { namespace, target, nodes: 1 };
    warmup.set_sets(BTreeMap::from([("0123456789abcdef".into(), set)]));
    warmup.attempt_ended(None, Millis(1_200));
    let slots = DeviceSlotGauges { devices: 1, free: 2, used: 1, unused: 0 };
    metrics.controllers().slots.set(&"camera".into(), slots);
    let times = TakeoverTimes::new(Tick(1_000), Tick(2_000), Tick(1_500), Tick(2_500));
    metrics.controllers().takeover.set(times);
    let duals = &metrics.controllers().dual_pods;
    duals.observe_actuation("chat", ActuationPath::Hot, Some("m"), Millis(120));
    duals.observe_launcher_creation("chat", "l", true, Millis(20));
    duals.call_observer("chat", Some("m")).call_ended(&Method::POST, "/sleep", None, Duration::from_secs(1));
    duals.set_requesters("m", 1);
    duals.set_configs("l", 1);
    duals.set_launchers("l", LauncherPhase::Bound, 1);
    duals.set_bound(&EngineBindingLabels {
        namespace: "chat".to_owned(),
        requester: "r".to_owned(),
        provider: "p".to_owned(),
        container: "inference-server",
        instance: "i".to_owned(),
        accelerator: "GPU-a".to_owned(),
        node: "n".to_owned(),
    });
    // The key's series last as long as its metrics are held.
    let key = metrics.key_metrics("k");
    key.count_request(KeyOutcome::Admitted);
    key.count_tokens(rouse_net::openai::sse::TokenUsage { prompt: 1, completion: 2 }, true);
    std::mem::forget(key);
    let model = metrics.model(&name);
    model.add_in_flight(1);
    model.add_parked(1);
    model.observe_wait(Millis(300));
    model.observe_first_byte(Millis(400));
    model.request_ended(RouteLabel::Chat, StatusClass::from_code(200), Some(ColdStart::Cold), Millis(900));
    model.add_bytes_in(10);
    model.add_bytes_out(20);
    model.add_retries(1);
    model.record_transition(TransitionKind::Wake, TransitionCause::Demand, OutcomeLabel::Done, Millis(50));
    model.evicted(TransitionKind::Sleep);
    model.drain_deadline_passed();
    metrics
}

fn view(name: &ModelName) -> FleetView {
    let engine = EngineId::new(name.clone(), 0);
    FleetView {
        accelerators: vec![AcceleratorView {
            id: "gpu-0".into(),
            capacity: Bytes(1000),
            reserved: Bytes(400),
            units: None,
            units_taken: None,
            pool: None,
            node: None,
            observed: Some(Bytes(390)),
            healthy: true,
        }],
        host: HostView { capacity: Bytes(64), reserved: Bytes(16) },
        models: vec![ModelView {
            name: name.clone(),
            state: ModelState::Asleep,
            waiting: 0,
            leases: 0,
            pinned: false,
            expected_wait: None,
            reason: String::new(),
            last_outcome: Some(LastOutcome::failed_start(
                Tick(1_000),
                Generation(1),
                fault::FailureCause::Hung,
                1,
            )),
            declared: Bytes(400),
            learned: rouse::fleet::event::LearnedMeasurements {
                peak: Some(Bytes(300)),
                ..Default::default()
            },
        }],
        engines: vec![EngineView {
            engine,
            generation: Generation(1),
            state: "Asleep(1)".to_owned(),
            since: Tick(0),
            leases: 0,
            saturation: Some(SaturationLimit {
                leases: Some(1),
                until: Tick(9),
                kv_percent: Some(91),
                waiting: None,
            }),
            accelerators: vec!["gpu-0".into()],
            reserved: Bytes(400),
            host: Bytes(16),
        }],
    }
}

type ScrapedFamilies = BTreeMap<String, (String, BTreeSet<String>)>;

/// Maps the names of our metrics in a scrape to types and labels.
fn families(text: &str) -> ScrapedFamilies {
    let mut families = ScrapedFamilies::new();
    let mut current = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').unwrap();
            name.clone_into(&mut current);
            families.insert(current.clone(), (kind.to_owned(), BTreeSet::new()));
        } else if let Some((_, labels)) = line.split_once('{').filter(|_| !line.starts_with('#')) {
            let names = labels.split("=\"").filter_map(|part| part.rsplit(['{', ',', '"']).next());
            let names =
                names.filter(|name| !name.is_empty() && !name.starts_with(['}', ' ']) && *name != "le");
            families.get_mut(&current).unwrap().1.extend(names.map(str::to_owned));
        }
    }
    families.retain(|name, _| !name.starts_with("process_"));
    families
}
