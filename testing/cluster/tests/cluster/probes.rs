//! Probes run, and their results take effect.

use kube::ResourceExt as _;
use rouse_cluster::{PodRunner, TestCluster, podrunner::NodeSpec};
use serde_json::json;

use crate::{
    program,
    support::{condition, is_ready, merge, pod, restarts, until},
};

#[tokio::test]
async fn readiness_follows_its_probe_and_a_failed_liveness_probe_restarts() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("probes").await.unwrap();
    let runner = PodRunner::builder(&namespace)
        .node(NodeSpec::new("a"))
        .image("rouse/server", program::image())
        .start()
        .await
        .unwrap();
    let mut container = program::container();
    let http = |path: &str| {
        let get = json!({ "port": "http", "path": path });
        json!({ "httpGet": get, "periodSeconds": 1, "failureThreshold": 1, "timeoutSeconds": 5 })
    };
    let probes = json!({
        "startupProbe": { "tcpSocket": { "port": 8080 }, "periodSeconds": 1, "failureThreshold": 100 },
        "readinessProbe": http("/ready"),
        "livenessProbe": http("/alive"),
    });
    merge(&mut container, probes);
    let made = pod(&namespace, "server", json!({ "containers": [container] })).await;
    let name = made.name_any();
    let ready = until(&namespace, &name, "ready", is_ready).await;
    let ip = ready.status.as_ref().unwrap().pod_ip.clone().unwrap();

    program::tell(&ip, "/ready/503");
    let unready = until(&namespace, &name, "unready", |pod| !is_ready(pod)).await;
    let (_, reason, message) = condition(&unready, "Ready").unwrap();
    assert_eq!(reason, "ContainersNotReady");
    assert!(message.contains("[main]"), "{message}");
    program::tell(&ip, "/ready/200");
    let again = until(&namespace, &name, "ready again", is_ready).await;
    assert_eq!(restarts(&again, "main"), 0, "readiness restarts nothing");
    let (_, reason, message) = condition(&again, "Ready").unwrap();
    assert_eq!((reason, message), (String::new(), String::new()));

    let before = runner.processes(&made);
    program::tell(&ip, "/alive/500");
    let restarted =
        until(&namespace, &name, "restarted", |pod| restarts(pod, "main") == 1 && is_ready(pod)).await;
    let status = restarted.status.unwrap().container_statuses.unwrap().pop().unwrap();
    let last = status.last_state.unwrap().terminated.unwrap();
    assert_eq!((last.exit_code, last.reason.as_deref()), (143, Some("Error")));
    assert!(runner.processes(&made).iter().all(|process| !before.contains(process)));
}
