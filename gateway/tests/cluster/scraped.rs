//! How a real Prometheus reads the metrics of gateway and stub, and how the gateway reads accelerators from it.

use std::{
    collections::BTreeSet,
    fs,
    net::{SocketAddr, TcpListener},
    process::{Child, Command, Stdio},
};

use rouse::{
    model::AcceleratorId,
    units::{Bytes, Millis, Tick},
};
use rouse_controllers::{
    crd::Quantity,
    platform::dcgm::{DcgmClient, Error, UntrustedSample, UsageUnknown, trusted_usage},
    prometheus_api::PrometheusError,
};
use rouse_gateway::metrics::Metrics;
use rouse_net::lease::TickClock;
use serde_json::json;
use tokio::time::{Duration, Instant, sleep};

use crate::{
    client::TestClient,
    installation::{Installation, blocking, reason},
    memory::until_metric,
    prometheus::{DcgmExporterStub, PrometheusServer, lint},
    runner::STUB_ARGS_ENV,
    support::repo_path,
};

/// The page's families that have a series only after their first event, or only when configured.
const RARE: [&str; 32] = [
    "fma_actuation_seconds",
    "fma_duality",
    "fma_http_latency_seconds",
    "fma_isc_count",
    "fma_launcher_create_seconds",
    "fma_launcher_pod_count",
    "fma_requester_count",
    "rouse_config_reloads_total",
    "rouse_current_replicas",
    "rouse_desired_ratio",
    "rouse_desired_replicas",
    "rouse_device_instances",
    "rouse_device_slots",
    "rouse_evictions_total",
    "rouse_key_requests_total",
    "rouse_key_tokens_total",
    "rouse_model_last_failure_timestamp_seconds",
    "rouse_replica_kv_use_ratio",
    "rouse_replica_scalings_total",
    "rouse_replica_waiting_requests",
    "rouse_replicas_refused_by_memory",
    "rouse_saturated_replicas",
    "rouse_saturation_decision_timestamp_seconds",
    "rouse_saturation_readings_total",
    "rouse_tls_certificate_expiry_seconds",
    "rouse_warm_nodes",
    "rouse_warmup_attempt_seconds",
    "rouse_warmup_attempts_total",
    "rouse_warmup_nodes",
    "wva_current_replicas",
    "wva_desired_ratio",
    "wva_desired_replicas",
];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prometheus_finds_what_the_page_names_and_the_pools_own_sums() {
    let world = Installation::new("scraped", 2, "128Gi").await;
    world.set_accelerators("large", &[("GPU-a", 60 << 10)]);
    world.model("large", "80Gi", "", json!({"cooldownPeriod": "10m"})).await;
    let gateway = world.gateway("gateway-0", "");
    world.until("large", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let prometheus = PrometheusServer::start(&[("gateway", gateway.admin)]).await;
    let own = world.name().to_owned();
    let budget = |what: &str| format!("inference_budget_{what}_bytes{{node_pool=\"{own}\"}}");
    let is_as_in_status = async || {
        let status = world.get_pool().await.status.unwrap();
        for (what, quantity) in
            [("total", status.total), ("allocated", status.allocated), ("available", status.available)]
        {
            let bytes = quantity.as_ref().map(Quantity::bytes).unwrap().unwrap();
            prometheus.until(&budget(what), bytes.0 as f64).await;
        }
        status.ledger.allocated()
    };
    prometheus.until(&budget("available"), Bytes::gib(128).0 as f64).await;
    assert_eq!(is_as_in_status().await, Bytes::ZERO);

    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("unheard-of", false, 4)).await.status, 404);
    assert_eq!(blocking(move || client.chat("large", false, 4)).await.status, 200);
    prometheus.until(&budget("available"), Bytes::gib(48).0 as f64).await;
    assert_eq!(is_as_in_status().await, Bytes::gib(80));
    let served = "sum(rouse_requests_total{model=\"large\",status=\"2xx\",cold_start=\"cold\"})";
    prometheus.until(served, 1.0).await;
    let ready = format!("inference_model_ready{{model=\"large\",namespace=\"{own}\"}}");
    prometheus.until(&ready, 1.0).await;
    let peak = format!("inference_model_memory_observed_peak_bytes{{model=\"large\",namespace=\"{own}\"}}");
    prometheus.until(&peak, Bytes::gib(60).0 as f64).await;
    assert_eq!(lint(&gateway.metrics()), "");

    let page = fs::read_to_string(repo_path("docs/metrics.md")).unwrap();
    let named: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next()).collect();
    let scraped = prometheus.names("gateway").await;
    let is_there =
        |name: &str| scraped.iter().any(|found| found == name || *found == format!("{name}_bucket"));
    let absent: Vec<&str> = named.iter().copied().filter(|name| !is_there(name)).collect();
    assert_eq!(absent, RARE, "of {scraped:?}");
    let known = |name: &String| {
        let family =
            ["_bucket", "_count", "_sum"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(name);
        let prometheus_s_own = name == "up" || name.starts_with("scrape_") || name.starts_with("process_");
        prometheus_s_own || named.contains(family) || named.contains(name.as_str())
    };
    assert_eq!(scraped.iter().filter(|name| !known(name)).collect::<Vec<_>>(), [""; 0]);

    // The engine ends only after Prometheus has scraped all of that.
    world.edit("large", json!({"cooldownPeriod": "1s"})).await;
    prometheus.until(&budget("allocated"), 0.0).await;
    assert_eq!(is_as_in_status().await, Bytes::ZERO);
}

/// A stub with its metrics port. The drop kills it.
struct ScrapedStubProcess(Child);

impl Drop for ScrapedStubProcess {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prometheus_takes_what_a_stub_tells() {
    let metrics = SocketAddr::from(([127, 0, 0, 1], rouse_net::port::claim_for_process().unwrap()));
    let ports: String =
        ["probes", "spi", "relay", "admin", "debug"].map(|port| format!("--{port}-port=0\n")).concat();
    let arguments =
        format!("proxy\n--host=127.0.0.1\n{ports}--proxy-port=0\n--metrics-port={}", metrics.port());
    let stub = Command::new(std::env::current_exe().unwrap())
        .args(["runner::stub", "--exact", "--nocapture"])
        .env(STUB_ARGS_ENV, arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let _stub = ScrapedStubProcess(stub);
    let prometheus = PrometheusServer::start(&[("stub", metrics)]).await;
    prometheus.until("rouse_stub_ready", 0.0).await;
    prometheus.until("rouse_stub_build_info", 1.0).await;
    assert_eq!(lint(&blocking(move || TestClient::new(metrics).get("/metrics").text()).await), "");
}

/// A client of this Prometheus, as a configuration describes it.
fn reader(url: &str, settings: &str) -> DcgmClient {
    let text = format!(
        "platform: kubernetes\nkubernetes: {{stubImage: s, prometheus: {{url: '{url}', interval: 100ms{settings}}}}}"
    );
    let asked = rouse_config::parse(&text, "test").unwrap().kubernetes.unwrap().prometheus.unwrap();
    DcgmClient::new(asked, clock(), Metrics::new().controllers().meter_reads.clone()).unwrap()
}

fn clock() -> TickClock {
    let since = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
    TickClock::new(Instant::now(), Tick(u64::try_from(since.as_millis()).unwrap()))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_exporter_tells_is_known_by_way_of_prometheus_and_believed_while_it_is_young() {
    let exporter = DcgmExporterStub::start();
    let prometheus = PrometheusServer::start(&[("dcgm", exporter.address)]).await;
    let url = format!("http://{}", prometheus.address);
    let dcgm = reader(&url, "");
    assert_eq!(dcgm.samples().await, Err(Error::NoSeries { url: url.clone() }));

    exporter.set(&[("GPU-a", "Hostname=\"n1\"", 61_440), ("GPU-b", "Hostname=\"n1\"", 0)]);
    prometheus.until("count(DCGM_FI_DEV_FB_USED)", 2.0).await;
    sleep(dcgm.interval()).await;
    let (a, meter_lag) = (AcceleratorId::from("GPU-a"), Millis::secs(2));
    assert_eq!(dcgm.used(&a, None, meter_lag).await, Ok(Bytes::gib(60)));
    assert_eq!(dcgm.used(&"GPU-b".into(), None, meter_lag).await, Ok(Bytes::ZERO));
    let absent = AcceleratorId::from("GPU-c");
    assert_eq!(dcgm.used(&absent, None, meter_lag).await, Err(UsageUnknown::NoSample(absent)));
    let sample = dcgm.samples().await.unwrap().used[&a].clone();
    assert_eq!(sample.node.as_deref(), Some("n1"));

    // An engine falls asleep on this accelerator: until the meter lag is over, a sample may be older than the sleep.
    let slept = clock().now();
    exporter.set(&[("GPU-a", "Hostname=\"n1\"", 2_048)]);
    assert_eq!(
        dcgm.used(&a, Some(slept), meter_lag).await,
        Err(UntrustedSample::TooEarly { meter_lag }.into())
    );
    prometheus.until("DCGM_FI_DEV_FB_USED{UUID=\"GPU-a\"}", 2_048.0).await;
    sleep(dcgm.interval()).await;
    assert_eq!(dcgm.used(&a, None, meter_lag).await, Ok(Bytes::gib(2)));
    assert_eq!(
        dcgm.used(&a, Some(slept), meter_lag).await,
        Err(UntrustedSample::TooEarly { meter_lag }.into())
    );
    sleep(meter_lag.duration() + Duration::from_secs(1)).await;
    assert_eq!(dcgm.used(&a, Some(slept), meter_lag).await, Ok(Bytes::gib(2)));

    // No new samples arrive, and the last one grows old.
    let last = dcgm.samples().await.unwrap().used[&a].clone();
    let later = last.at + meter_lag + Millis(1);
    assert!(matches!(trusted_usage(&last, None, meter_lag, later), Err(UntrustedSample::TooOld { .. })));
    exporter.clear();
    prometheus.until("absent(DCGM_FI_DEV_FB_USED)", 1.0).await;
    sleep(dcgm.interval()).await;
    assert_eq!(dcgm.samples().await, Err(Error::NoSeries { url }));
}

/// The field names since dcgm-exporter 4.9, with other units, beside an exporter with the earlier names, as during an
/// update of a cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_names_that_fields_have_since_dcgm_4_7_are_understood_beside_those_before() {
    let exporter = DcgmExporterStub::start();
    let prometheus = PrometheusServer::start(&[("dcgm", exporter.address)]).await;
    let dcgm = reader(&format!("http://{}", prometheus.address), "");
    exporter.set(&[("GPU-a", "Hostname=\"n1\"", 5)]);
    exporter.add("DCGM_FI_DEV_FB_USED_BYTES", "GPU-b", 3 << 30);
    exporter.add("DCGM_FI_DEV_XID_ERROR", "GPU-b", 79);
    exporter.add("DCGM_FI_DEV_XID_ERRORS", "GPU-a", 31);
    exporter.add("DCGM_FI_DEV_ROW_REMAP_FAILED", "GPU-c", 1);
    prometheus.until("DCGM_FI_DEV_ROW_REMAP_FAILED", 1.0).await;
    let samples = dcgm.samples().await.unwrap();
    let used: Vec<_> = samples.used.iter().map(|(id, sample)| (id.as_str(), sample.used)).collect();
    assert_eq!(used, [("GPU-a", Bytes::mib(5)), ("GPU-b", Bytes::gib(3))]);
    let faults: Vec<_> = samples.faults.iter().map(|(id, fault)| (id.as_str(), fault.as_str())).collect();
    assert_eq!(faults, [("GPU-b", "Xid 79"), ("GPU-c", "a memory row could not be remapped")]);
    assert_eq!(samples.with_xid.iter().map(AcceleratorId::as_str).collect::<Vec<_>>(), ["GPU-a", "GPU-b"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_a_prometheus_is_said() {
    let nobody = SocketAddr::from(([127, 0, 0, 1], rouse_net::port::claim_for_process().unwrap()));
    let error = reader(&format!("http://{nobody}"), "").samples().await.unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with(&format!("cannot reach Prometheus at http://{nobody}: ")), "{text}");
    assert!(text.contains("refused"), "{text}");

    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", silent.local_addr().unwrap());
    let error = reader(&url, ", timeout: 200ms").samples().await.unwrap_err();
    assert_eq!(error, PrometheusError::Timeout { url, within: Millis(200) }.into());

    let exporter = DcgmExporterStub::start();
    exporter.set(&[("GPU-a", "Hostname=\"n1\"", 1)]);
    let other = reader(&format!("http://{}", exporter.address), "");
    let text = other.samples().await.unwrap_err().to_string();
    assert!(
        text.starts_with(&format!("the server at http://{} is not Prometheus", exporter.address)),
        "{text}"
    );
}

/// No stub of this cluster sees a driver, and DCGM's exporter names the Pod of each accelerator.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_stubs_cannot_read_an_engine_s_peak_comes_from_prometheus() {
    let world = Installation::new("scraped-peak", 1, "128Gi").await;
    let own = world.name().to_owned();
    let settles = json!({"nodeSelector": {"inference-pool": own}, "memory": "128Gi", "meterLag": "1s"});
    world.pool(&own, settles).await;
    let exporter = DcgmExporterStub::start();
    let prometheus = PrometheusServer::start(&[("dcgm", exporter.address)]).await;
    let address = prometheus.address;
    let settings = format!("{{url: 'http://{address}', interval: 500ms}}");
    world.model("qwen", "80Gi", "--start-time 3s", json!({})).await;
    let gateway = world.gateway_with("gateway-0", &format!(", prometheus: {settings}"));
    world.until("qwen", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let client = gateway.client();
    let asked = tokio::spawn(blocking(move || client.chat("qwen", false, 4)));
    let pod = loop {
        match world.running().await.first() {
            Some(pod) => break pod.metadata.name.clone().unwrap(),
            None => sleep(Duration::from_millis(20)).await,
        }
    };
    let whose = format!("namespace=\"{own}\",pod=\"{pod}\",container=\"engine\"");
    let other = format!("namespace=\"{own}\",pod=\"another\",container=\"engine\"");
    exporter.set(&[("GPU-a", &whose, 70 << 10), ("GPU-b", &other, 99 << 10)]);
    assert_eq!(asked.await.unwrap().status, 200);
    let peak = Some(Quantity::from(Bytes::gib(70)));
    let seen = world.until("qwen", "seen", |model| {
        model.status.as_ref().is_some_and(|status| status.observed_peak_memory == peak)
    });
    assert_eq!(seen.await.status.unwrap().utilization_percent, Some(87));
    until_metric(&gateway, "rouse_accelerator_readings_total{outcome=\"left_out\",source=\"prometheus\"} 1")
        .await;
}
