//! Init containers, sidecars and restarts follow a kubelet's order and policy.

use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse_cluster::{
    PodRunner, TestCluster,
    podrunner::{NodeSpec, RestartBackoff},
};
use serde_json::{Value, json};

use crate::support::{delete, gone, is, is_ready, phase, pod, restarts, script, until};

fn container(name: &str, text: &str, more: Value) -> Value {
    let mut spec = script(text, more);
    let mut container = spec["containers"][0].take();
    container["name"] = json!(name);
    container["volumeMounts"] = json!([{ "name": "shared", "mountPath": "/shared" }]);
    container
}

#[tokio::test]
async fn init_containers_run_first_and_sidecars_end_last() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("order").await.unwrap();
    let runner = PodRunner::builder(&namespace).node(NodeSpec::new("a")).start().await.unwrap();
    let lives = |name: &str| {
        format!(
            "trap 'echo {name} ends >> /shared/order; exit 0' TERM
            echo {name} begins >> /shared/order; while :; do sleep 0.05; done"
        )
    };
    // A container counts as started when its process runs, which may be before its first write. So each probe waits for
    // the text.
    let wrote = |test: &str| {
        let command = ["sh", "-c", test];
        json!({ "exec": { "command": command }, "periodSeconds": 1, "failureThreshold": 60 })
    };
    let sidecar = |name: &str| {
        let probe = wrote(&format!("grep -q '{name} begins' /shared/order"));
        json!({ "restartPolicy": "Always", "startupProbe": probe })
    };
    let both = json!({ "readinessProbe": wrote("test $(grep -c 'main begins' /shared/order) -eq 2") });
    // The container that lives longest prints the file.
    let tells = lives("one").replace("exit 0", "cat /shared/order; exit 0");
    let spec = json!({
        "initContainers": [
            container("first", "echo first >> /shared/order", json!({})),
            container("one", &tells, sidecar("one")),
            container("two", &lives("two"), sidecar("two")),
            container("last", "echo last >> /shared/order", json!({})),
        ],
        "containers": [container("main", &lives("main"), both.clone()), container("beside", &lives("main"), both)],
        "volumes": [{ "name": "shared", "emptyDir": {} }, { "name": "out", "hostPath": { "path": "/tmp" } }],
    });
    let made = pod(&namespace, "order", spec).await;
    let ready = until(&namespace, &made.name_any(), "ready", is_ready).await;
    assert!(is(&ready, "Initialized", "True"));
    let statuses = ready.status.as_ref().unwrap().init_container_statuses.as_ref().unwrap();
    let started: Vec<_> = statuses.iter().map(|status| (status.name.as_str(), status.ready)).collect();
    assert_eq!(started, [("first", true), ("one", true), ("two", true), ("last", true)]);
    delete(&namespace, &made).await;
    gone(&namespace, &made).await;
    assert_eq!(
        runner.log(&made, "one", 0).unwrap().lines().collect::<Vec<_>>(),
        [
            "first",
            "one begins",
            "two begins",
            "last",
            "main begins",
            "main begins",
            "main ends",
            "main ends",
            "two ends",
            "one ends",
        ]
    );
}

#[tokio::test]
async fn containers_come_back_as_their_policy_says_and_later_each_time() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("restarts").await.unwrap();
    let pauses = RestartBackoff { first: Duration::from_millis(300), longest: Duration::from_secs(2) };
    let runner = PodRunner::builder(&namespace)
        .node(NodeSpec::new("a"))
        .restart_backoff(pauses)
        .start()
        .await
        .unwrap();

    let with = |policy: &str, text: &str| {
        let mut spec = json!({ "containers": [container("main", text, json!({}))] });
        spec["volumes"] = json!([{ "name": "shared", "emptyDir": {} }]);
        spec["restartPolicy"] = json!(policy);
        spec
    };
    let third_time = "echo x >> /shared/runs; test $(wc -l < /shared/runs) -ge 3";
    pod(&namespace, "on-failure", with("OnFailure", third_time)).await;
    pod(&namespace, "never", with("Never", "exit 3")).await;
    pod(&namespace, "always", with("Always", "true")).await;

    let done = until(&namespace, "on-failure", "its end", |pod| phase(pod) == "Succeeded").await;
    assert_eq!(restarts(&done, "main"), 2);
    assert!(runner.log(&done, "main", 2).is_ok() && runner.log(&done, "main", 3).is_err());

    let failed = until(&namespace, "never", "its end", |pod| phase(pod) == "Failed").await;
    assert_eq!(restarts(&failed, "main"), 0);
    let terminated = |pod: &Pod| {
        let status = pod.status.clone()?.container_statuses?.pop()?;
        status.state?.terminated
    };
    let end = terminated(&failed).unwrap();
    assert_eq!((end.exit_code, end.reason.as_deref()), (3, Some("Error")));

    let backs_off = |pod: &Pod| {
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        let mut waiting = statuses.filter_map(|status| status.state.as_ref()?.waiting.as_ref());
        waiting.any(|waiting| waiting.reason.as_deref() == Some("CrashLoopBackOff"))
    };
    let waits = until(&namespace, "always", "CrashLoopBackOff", backs_off).await;
    assert_eq!((phase(&waits), is_ready(&waits)), ("Running", false));
    until(&namespace, "always", "three restarts", |pod| restarts(pod, "main") >= 3).await;
}
