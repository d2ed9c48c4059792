//! Deployments of process Pods: creation, scaling, termination, and their containers' environment.

use std::collections::BTreeSet;

use futures_util::StreamExt as _;
use k8s_openapi::api::{
    apps::v1::Deployment,
    core::v1::{ConfigMap, Pod, Secret},
};
use kube::{
    ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
    runtime::watcher::{self, Event},
};
use rouse_cluster::{PodRunner, TestCluster, podrunner::NodeSpec, wait};
use serde_json::json;

use crate::support::{delete, deployment, gone, is_ready, phase, pod, pods, script, until};

#[tokio::test]
async fn a_deployment_gets_ready_and_scaled_to_zero_its_processes_are_asked_to_end() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("deployment").await.unwrap();
    let runner = PodRunner::builder(&namespace).node(NodeSpec::new("a")).start().await.unwrap();
    let waits = "trap 'echo asked; exit 7' TERM; echo up; while :; do sleep 0.05; done";
    deployment(&namespace, "sleepers", 2, script(waits, json!({}))).await;
    let available = |count: Option<i32>| {
        move |seen: &Option<Deployment>| {
            let status = seen.as_ref().and_then(|seen| seen.status.as_ref());
            status.is_some_and(|status| status.available_replicas == count)
        }
    };
    let deployments = namespace.api::<Deployment>();
    wait::until(&deployments, "sleepers", "two available", available(Some(2))).await.unwrap();
    let running = pods(&namespace).await;
    let addresses: BTreeSet<_> =
        running.iter().map(|pod| pod.status.clone().unwrap().pod_ip.unwrap()).collect();
    assert_eq!((running.len(), addresses.len()), (2, 2), "{addresses:?}");
    for pod in &running {
        // The shell has no trap before it prints this.
        wait_for_log(&runner, pod, "up").await;
        assert!(!runner.processes(pod).is_empty());
        assert!(addresses.iter().all(|ip| ip.starts_with("127.")));
    }

    // A watch shows the outcome: a Pod reaches its last phase before its object is deleted.
    let mut seen = watcher::watcher(namespace.api::<Pod>(), watcher::Config::default()).boxed();
    let zero = json!({ "spec": { "replicas": 0 } });
    deployments.patch_scale("sleepers", &PatchParams::default(), &Patch::Merge(zero)).await.unwrap();
    let mut last = std::collections::BTreeMap::new();
    let mut deleted = 0;
    while deleted < 2 {
        match seen.next().await.unwrap().unwrap() {
            Event::Apply(pod) => drop(last.insert(pod.name_any(), phase(&pod).to_owned())),
            Event::Delete(_) => deleted += 1,
            _ => {}
        }
    }
    assert_eq!(last.values().collect::<Vec<_>>(), ["Failed", "Failed"], "they exit with 7");
    for pod in &running {
        assert_eq!(runner.log(pod, "main", 0).unwrap(), "up\nasked\n");
        assert_eq!(runner.processes(pod), []);
    }
}

#[tokio::test]
async fn a_process_that_does_not_end_is_killed_after_its_grace() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("grace").await.unwrap();
    let runner = PodRunner::builder(&namespace).node(NodeSpec::new("a")).start().await.unwrap();
    // A worker that has left the process group and would outlive its parent.
    let text = "trap 'echo no' TERM; setsid sleep 1000 & echo up; while :; do sleep 0.05; done";
    let mut spec = script(text, json!({}));
    spec["terminationGracePeriodSeconds"] = json!(1);
    let made = pod(&namespace, "stubborn", spec).await;
    let made = until(&namespace, &made.name_any(), "ready", is_ready).await;
    wait_for_log(&runner, &made, "up").await;
    assert!(runner.processes(&made).len() >= 2, "{:?}", runner.processes(&made));
    delete(&namespace, &made).await;
    gone(&namespace, &made).await;
    assert_eq!(runner.processes(&made), []);
    assert!(runner.log(&made, "main", 0).unwrap().contains("no"));
}

#[tokio::test]
async fn a_container_is_told_of_its_pod_and_its_volumes() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("told").await.unwrap();
    let runner = PodRunner::builder(&namespace).node(NodeSpec::new("a")).start().await.unwrap();
    let map =
        json!({ "metadata": { "name": "map" }, "data": { "color": "blue", "file.txt": "from the map\n" } });
    let map: ConfigMap = serde_json::from_value(map).unwrap();
    namespace.api().create(&PostParams::default(), &map).await.unwrap();
    let secret = json!({ "metadata": { "name": "secret" }, "stringData": { "key": "s3cret" } });
    let secret: Secret = serde_json::from_value(secret).unwrap();
    namespace.api().create(&PostParams::default(), &secret).await.unwrap();

    let field = |path: &str| json!({ "fieldRef": { "fieldPath": path } });
    let text = r#"echo "$NAME $SPACE $COLOR $ALL_color $KEY $(JOINED)"; test "$IP" = "$POD_IP" && echo same
        cat /etc/map/file.txt /etc/secret/renamed; echo kept > /scratch/x; cat /scratch/x
        cat /etc/pod/labels; grep -q '"namespace":"'"$SPACE"'"' "$KUBECONFIG" && echo kubeconfig"#;
    let more = json!({
        "env": [
            { "name": "NAME", "valueFrom": field("metadata.name") },
            { "name": "SPACE", "valueFrom": field("metadata.namespace") },
            { "name": "IP", "valueFrom": field("status.podIP") },
            { "name": "COLOR", "valueFrom": { "configMapKeyRef": { "name": "map", "key": "color" } } },
            { "name": "KEY", "valueFrom": { "secretKeyRef": { "name": "secret", "key": "key" } } },
            { "name": "NONE", "valueFrom": { "secretKeyRef": { "name": "no", "key": "x", "optional": true } } },
            { "name": "JOINED", "value": "$(NAME)-$(COLOR)" },
        ],
        "envFrom": [{ "prefix": "ALL_", "configMapRef": { "name": "map" } }],
        "volumeMounts": [
            { "name": "map", "mountPath": "/etc/map" },
            { "name": "secret", "mountPath": "/etc/secret" },
            { "name": "scratch", "mountPath": "/scratch" },
            { "name": "pod", "mountPath": "/etc/pod" },
        ],
    });
    let mut spec = script(text, more);
    spec["restartPolicy"] = json!("Never");
    spec["volumes"] = json!([
        { "name": "map", "configMap": { "name": "map" } },
        { "name": "secret", "secret": { "secretName": "secret", "items": [{ "key": "key", "path": "renamed" }] } },
        { "name": "scratch", "emptyDir": {} },
        { "name": "pod", "downwardAPI": { "items": [{ "path": "labels", "fieldRef": { "fieldPath": "metadata.labels['x']" } }] } },
    ]);
    let made = pod(&namespace, "told", spec).await;
    let made = until(&namespace, &made.name_any(), "its end", |pod| phase(pod) == "Succeeded").await;
    let expected = format!(
        "told {} blue blue s3cret told-blue\nsame\nfrom the map\ns3cretkept\nkubeconfig\n",
        namespace.name()
    );
    assert_eq!(runner.log(&made, "main", 0).unwrap(), expected);
}

#[tokio::test]
async fn what_a_pod_lacks_is_said_and_it_starts_when_that_is_there() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("lacks").await.unwrap();
    let _runner = PodRunner::builder(&namespace).node(NodeSpec::new("a")).start().await.unwrap();
    let mut spec = script("sleep 1000", json!({ "envFrom": [{ "configMapRef": { "name": "late" } }] }));
    spec["terminationGracePeriodSeconds"] = json!(1);
    let made = pod(&namespace, "lacks", spec).await;
    let lacking = |pod: &Pod| {
        let statuses = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
        let mut waiting = statuses.filter_map(|status| status.state.as_ref()?.waiting.as_ref());
        waiting.any(|waiting| waiting.reason.as_deref() == Some("CreateContainerConfigError"))
    };
    let seen = until(&namespace, &made.name_any(), "CreateContainerConfigError", lacking).await;
    assert_eq!(phase(&seen), "Pending");
    let map: ConfigMap = serde_json::from_value(json!({ "metadata": { "name": "late" } })).unwrap();
    namespace.api().create(&PostParams::default(), &map).await.unwrap();
    until(&namespace, &made.name_any(), "ready", is_ready).await;
}

/// Polls the log file, since no event reports its growth.
pub(crate) async fn wait_for_log(runner: &PodRunner, pod: &Pod, words: &str) {
    let said = async {
        while !runner.log(pod, "main", 0).is_ok_and(|log| log.contains(words)) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(wait::WAIT_TIMEOUT, said)
        .await
        .unwrap_or_else(|_| panic!("it never said {words:?}"));
}
