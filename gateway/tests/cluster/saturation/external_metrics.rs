//! A metrics adapter: it serves the metrics of one gateway as Kubernetes's external metrics API, as an adapter for
//! Prometheus does.

use std::{
    io::Write as _,
    net::{SocketAddr, TcpStream},
    sync::Arc,
    thread,
    time::SystemTime,
};

use k8s_openapi::{
    api::core::v1::Service,
    apimachinery::pkg::apis::meta::v1::Time,
    jiff::Timestamp,
    kube_aggregator::pkg::apis::apiregistration::v1::{APIService, APIServiceCondition},
};
use kube::{Api, Client, api::PostParams};
use rouse_cluster::{Namespace, wait};
use rouse_testing::{
    scripted_engine::{read_head, serve},
    tls,
};
use rustls::{ServerConfig, ServerConnection, StreamOwned};
use serde_json::{Value, json};

use crate::client::TestClient;

const GROUP: &str = "external.metrics.k8s.io";
const VERSION: &str = "v1beta1";
const API_PATH: &str = "/apis/external.metrics.k8s.io/v1beta1";

/// Serves the metrics of the gateway with this admin listener as external metrics of the whole cluster, and returns
/// once the API server passes requests on to them. The cluster must be the test's own.
pub(super) async fn install(client: &Client, namespace: &Namespace, gateway: SocketAddr) {
    let adapter = start(gateway);
    // Endpoints cannot have a loopback address. The API server resolves this Service itself.
    let service = json!({
        "metadata": {"name": "metrics-adapter"},
        "spec": {"type": "ExternalName", "externalName": adapter.ip().to_string()},
    });
    let services: Api<Service> = namespace.api();
    services.create(&PostParams::default(), &serde_json::from_value(service).unwrap()).await.unwrap();
    let name = format!("{VERSION}.{GROUP}");
    let registration = json!({
        "metadata": {"name": name},
        "spec": {
            "group": GROUP, "version": VERSION, "groupPriorityMinimum": 100, "versionPriority": 100,
            "service": {"namespace": namespace.name(), "name": "metrics-adapter", "port": adapter.port()},
            "insecureSkipTLSVerify": true,
        },
    });
    let registrations: Api<APIService> = Api::all(client.clone());
    let registration = serde_json::from_value(registration).unwrap();
    registrations.create(&PostParams::default(), &registration).await.unwrap();
    let is_true =
        |condition: &APIServiceCondition| condition.type_ == "Available" && condition.status == "True";
    let is_available = |registration: &Option<APIService>| {
        let status = registration.as_ref().and_then(|registration| registration.status.as_ref());
        status.and_then(|status| status.conditions.as_ref()).is_some_and(|all| all.iter().any(is_true))
    };
    wait::until(&registrations, &name, "available", is_available).await.unwrap();
}

/// Starts the adapter. It listens until the process ends.
fn start(gateway: SocketAddr) -> SocketAddr {
    let (config, _) = tls::server(&["localhost"]);
    serve(move |stream| {
        let config = Arc::clone(&config);
        thread::spawn(move || answer(stream, config, gateway));
    })
}

/// Answers one request, and closes the connection.
fn answer(stream: TcpStream, config: Arc<ServerConfig>, gateway: SocketAddr) {
    let mut stream = StreamOwned::new(ServerConnection::new(config).unwrap(), stream);
    // A client may connect and send nothing.
    let Some(head) = read_head(&mut stream) else { return };
    let head = String::from_utf8_lossy(&head).into_owned();
    let target = head.split(' ').nth(1).unwrap_or_default();
    let (status, body) = match respond(target, gateway) {
        Some(body) => ("200 OK", body.to_string()),
        None => ("404 Not Found", String::new()),
    };
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close");
    // A client that has disconnected gets no answer.
    drop(write!(stream, "{head}\r\nContent-Length: {length}\r\n\r\n{body}"));
    stream.conn.send_close_notify();
    drop(stream.flush());
}

/// Returns the response to a GET; `None` for a path that the adapter does not have.
fn respond(target: &str, gateway: SocketAddr) -> Option<Value> {
    let below = target.strip_prefix(API_PATH)?;
    if below.is_empty() {
        let group = format!("{GROUP}/{VERSION}");
        return Some(json!({
            "kind": "APIResourceList", "apiVersion": "v1", "groupVersion": group, "resources": [],
        }));
    }
    let (path, query) = below.split_once('?').unwrap_or((below, ""));
    let (namespace, metric) = path.strip_prefix("/namespaces/")?.split_once('/')?;
    let selector = query.split('&').find_map(|pair| pair.strip_prefix("labelSelector=")).unwrap_or_default();
    let page = TestClient::new(gateway).get("/metrics").text();
    let items = items(&page, namespace, metric, &selector.replace("%3D", "=").replace("%2C", ","));
    Some(json!({
        "kind": "ExternalMetricValueList", "apiVersion": format!("{GROUP}/{VERSION}"), "metadata": {}, "items": items,
    }))
}

/// The series of this metric in one namespace whose labels have the values in the selector.
fn items(page: &str, namespace: &str, metric: &str, selector: &str) -> Vec<Value> {
    let wanted = selector.split(',').filter_map(|one| one.split_once('='));
    let wanted =
        wanted.chain([("namespace", namespace)]).map(|(label, value)| format!("{label}=\"{value}\""));
    let wanted: Vec<String> = wanted.collect();
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_secs();
    let now = Time(Timestamp::from_second(i64::try_from(now).unwrap()).unwrap());
    let item = |line: &str| {
        let (labels, value) = line.strip_prefix(metric)?.strip_prefix('{')?.split_once("} ")?;
        let labels: Vec<&str> = labels.split(',').collect();
        let is_wanted = wanted.iter().all(|label| labels.contains(&label.as_str()));
        is_wanted.then(|| json!({"metricName": metric, "metricLabels": {}, "timestamp": now, "value": value}))
    };
    page.lines().filter_map(item).collect()
}

#[test]
fn the_adapter_selects_series_by_their_labels() {
    let series = [("a", "x", 2), ("b", "x", 3), ("a", "y", 4)];
    let line =
        |(model, namespace, value)| format!("d{{model=\"{model}\",namespace=\"{namespace}\"}} {value}\n");
    let page = format!("# TYPE d gauge\n{}", series.map(line).concat());
    let values = |selector| {
        let found = items(&page, "x", "d", selector);
        found.iter().map(|item| item["value"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(values("model=a"), ["2"]);
    assert_eq!(values(""), ["2", "3"]);
    assert!(values("model=c").is_empty());
}
