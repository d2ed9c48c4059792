//! A metrics adapter: it serves the metrics of one gateway as Kubernetes's external metrics API, as an adapter for
//! Prometheus does.

use std::{net::SocketAddr, time::SystemTime};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::Time, jiff::Timestamp};
use kube::Client;
use rouse_cluster::Namespace;
use serde_json::{Value, json};

use super::metrics_api::{self, VERSION};
use crate::client::TestClient;

const GROUP: &str = "external.metrics.k8s.io";

/// Serves the metrics of the gateway with this admin listener as external metrics of the whole cluster, which must be
/// the test's own.
pub(super) async fn install(client: &Client, namespace: &Namespace, gateway: SocketAddr) {
    metrics_api::install(client, namespace, GROUP, move |below| respond(below, gateway)).await;
}

/// Returns the response to a GET by what follows the version; `None` for a path that the adapter does not have.
fn respond(below: &str, gateway: SocketAddr) -> Option<Value> {
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
