//! A load that is unknown: no target is lowered, and the status says so.

use std::{
    io::Write as _,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::SystemTime,
};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use nix::sys::signal::Signal;
use rouse_controllers::crd::InferenceModel;
use rouse_testing::{sample::size, scripted_engine::scripted};
use serde_json::{Value, json};
use tokio::time::{Duration, Instant};

use super::{
    QUICK, after_readings, awake, awake_pods, condition, metric, report_load, set_faults, state, target,
    targets,
};
use crate::{installation::Installation, prometheus::PrometheusServer};

const PROMETHEUS_READ: &str = "outcome=\"done\",source=\"prometheus\"";
const PROMETHEUS_FAILED: &str = "outcome=\"failed\",source=\"prometheus\"";

/// How long Prometheus does not answer, in the soak and in the gate.
const OUTAGE: Duration = Duration::from_secs(300);
const SAMPLED_OUTAGE: Duration = Duration::from_secs(2);
/// Settings of the soak: the default window, but no stabilisation, which would keep the targets by itself.
const FULL_WINDOW: &str = ", saturation: {interval: 5s, window: 60s, stabilisation: 0s}";

/// Namespace, Pod, use of the KV cache and waiting requests.
type PodLoad = (String, String, f64, u32);

/// Answers every query with the load that a test sets, or not at all.
struct PrometheusApiStub {
    address: SocketAddr,
    /// `None` during an outage.
    loads: Arc<Mutex<Option<Vec<PodLoad>>>>,
}

impl PrometheusApiStub {
    fn start() -> Self {
        let loads: Arc<Mutex<Option<Vec<PodLoad>>>> = Arc::new(Mutex::new(Some(Vec::new())));
        let answered = Arc::clone(&loads);
        let address = scripted(move |mut stream, _| {
            let Some(loads) = answered.lock().unwrap().clone() else { return };
            let result: Vec<Value> = loads.iter().flat_map(series).collect();
            let answer = json!({"status": "success", "data": {"resultType": "vector", "result": result}});
            let body = answer.to_string();
            let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close";
            // A client that has disconnected gets no answer.
            drop(write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len()));
        });
        Self { address, loads }
    }

    fn settings(&self) -> String {
        let settings = size(FULL_WINDOW, QUICK).replace("{interval", "{source: prometheus, interval");
        format!(", prometheus: {{url: 'http://{}'}}{settings}", self.address)
    }

    /// Sets the load of these Pods, beside that of a Pod which does not exist.
    fn set(&self, pods: &[Pod], kv_use: f64, waiting: u32) {
        let load = |pod: &Pod| (pod.namespace().unwrap(), pod.name_any(), kv_use, waiting);
        let ghost = |pod: &Pod| (pod.namespace().unwrap(), "ghost".to_owned(), 1.0, 99);
        let loads = pods.iter().map(load).chain(pods.first().map(ghost));
        *self.loads.lock().unwrap() = Some(loads.collect());
    }

    fn fail(&self) {
        *self.loads.lock().unwrap() = None;
    }
}

/// The series of one Pod, as the gateway's query labels them.
fn series((namespace, pod, kv_use, waiting): &PodLoad) -> [Value; 3] {
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs_f64();
    let one = |kind: &str, value: f64| {
        let labels = json!({"namespace": namespace, "pod": pod, "rouse": kind});
        json!({"metric": labels, "value": [now, value.to_string()]})
    };
    [one("kv", *kv_use), one("waiting", f64::from(*waiting)), one("at", now)]
}

fn metrics_available(model: &InferenceModel) -> (String, String) {
    state(model, "MetricsAvailable")
}

/// Whether as many engines are awake as the target says.
fn all_awake(model: &InferenceModel) -> bool {
    usize::try_from(target(model, "default")).unwrap() == awake(model)
}

fn is(status: &str, reason: &str) -> (String, String) {
    (status.to_owned(), reason.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_of_prometheus_lowers_no_target_and_is_a_condition() {
    let world = Installation::new("saturation-outage", 4, "256Gi").await;
    let prometheus = PrometheusApiStub::start();
    world.model("qwen", "40Gi", "", json!({"minReplicas": 1, "maxReplicas": 4, "saturation": {}})).await;
    let gateway = world.gateway_with("gateway-0", &prometheus.settings());
    let one = awake_pods(&world, "qwen", 1).await;

    // The series of a Pod that does not exist scales nothing.
    prometheus.set(&one, 0.1, 0);
    world.until("qwen", "known", |model| metrics_available(model) == is("True", "MetricsFound")).await;
    after_readings(&gateway, PROMETHEUS_READ, 5.0).await;
    assert_eq!(targets(&world.models().get("qwen").await.unwrap()), [("default", 1)]);

    prometheus.set(&one, 0.95, 0);
    world.until("qwen", "more", |model| target(model, "default") >= 2).await;
    // Enough for no further one, and too much for one less.
    prometheus.set(&one, 0.6, 0);
    world.until("qwen", "all of them awake", all_awake).await;
    prometheus.set(&world.running().await, 0.6, 0);
    after_readings(&gateway, PROMETHEUS_READ, 5.0).await;
    let settled = target(&world.models().get("qwen").await.unwrap(), "default");
    assert!(settled >= 2);

    prometheus.fail();
    let began = Instant::now();
    let failed = |model: &InferenceModel| metrics_available(model) == is("False", "PrometheusError");
    let model = world.until("qwen", "the outage to be seen", failed).await;
    let message = &condition(&model, "MetricsAvailable").unwrap().message;
    assert!(message.contains("no target is lowered"), "{message}");
    loop {
        after_readings(&gateway, PROMETHEUS_FAILED, 10.0).await;
        let model = world.models().get("qwen").await.unwrap();
        assert!(failed(&model) && target(&model, "default") >= settled, "{:?}", targets(&model));
        assert!(world.running().await.len() >= usize::try_from(settled).unwrap());
        if began.elapsed() >= size(OUTAGE, SAMPLED_OUTAGE) {
            break;
        }
    }
    let own = world.name();
    let desired = format!("rouse_desired_replicas{{model=\"qwen\",namespace=\"{own}\",variant=\"default\"}}");
    assert!(metric(&gateway, &desired).is_some_and(|desired| desired >= f64::from(settled)));

    prometheus.set(&world.running().await, 0.0, 0);
    world.until("qwen", "known again", |model| metrics_available(model) == is("True", "MetricsFound")).await;
    world.until("qwen", "one engine", |model| targets(model) == [("default", 1)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_report_nothing_keep_their_targets_and_so_does_the_next_leader() {
    let world = Installation::new("saturation-silent", 4, "256Gi").await;
    world.model("qwen", "40Gi", "", json!({"minReplicas": 1, "maxReplicas": 4, "saturation": {}})).await;
    let leads = world.gateway_with("gateway-0", QUICK);
    let one = awake_pods(&world, "qwen", 1).await;
    report_load(&one, 0.95, 0).await;
    world.until("qwen", "more", |model| target(model, "default") >= 2 && all_awake(model)).await;
    set_faults(&world.running().await, r#"{"no-metrics": true}"#).await;
    let silent = |model: &InferenceModel| metrics_available(model).0 == "False";
    let model = world.until("qwen", "unknown", silent).await;
    let reason = metrics_available(&model).1;
    assert!(["MetricsMissing", "MetricsStale"].contains(&reason.as_str()), "{reason}");
    after_readings(&leads, "outcome=\"failed\",source=\"engines\"", 20.0).await;
    let kept = target(&world.models().get("qwen").await.unwrap(), "default");
    assert!(kept >= 2);

    let follows = world.gateway_with("gateway-1", QUICK);
    follows.until_ready().await;
    let desired = "rouse_desired_replicas{";
    assert_eq!(metric(&follows, desired), None, "a follower exports no targets");
    leads.signal(Signal::SIGKILL);
    leads.wait_owned().await;
    after_readings(&follows, "outcome=\"failed\",source=\"engines\"", 20.0).await;
    assert_eq!(metric(&follows, desired), Some(f64::from(kept)));
    assert_eq!(target(&world.models().get("qwen").await.unwrap(), "default"), kept);
    assert_eq!(world.running().await.len(), usize::try_from(kept).unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_prometheus_that_scrapes_the_engines_scales_the_model() {
    let world = Installation::new("saturation-scraped", 3, "256Gi").await;
    let prometheus = PrometheusServer::start_discovering().await;
    let quick = QUICK.replace("{interval", "{source: prometheus, interval").replace("1s", "2s");
    let settings = format!(", prometheus: {{url: 'http://{}'}}{quick}", prometheus.address);
    world.model("qwen", "40Gi", "", json!({"minReplicas": 1, "maxReplicas": 3, "saturation": {}})).await;
    let gateway = world.gateway_with("gateway-0", &settings);
    let pods = awake_pods(&world, "qwen", 1).await;
    world.until("qwen", "unknown", |model| metrics_available(model) == is("False", "MetricsMissing")).await;
    let labels = |pod: &Pod| json!({"namespace": pod.namespace(), "pod": pod.name_any()});
    let engine = |pod: &Pod| (SocketAddr::new(crate::pairs::address(pod), 8000), labels(pod));
    prometheus.discover(&pods.iter().map(engine).collect::<Vec<_>>());
    world.until("qwen", "known", |model| metrics_available(model) == is("True", "MetricsFound")).await;
    assert_eq!(target(&world.models().get("qwen").await.unwrap(), "default"), 1);
    report_load(&pods, 0.1, 9).await;
    world.until("qwen", "more", |model| target(model, "default") >= 2).await;
    drop(gateway);
}
