//! A backend in a Pod that another party made and maintains.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    ResourceExt as _,
    api::{DeleteParams, PostParams},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_cluster::{node::image, wait};
use serde_json::{Value, json};

use crate::{
    installation::reason,
    pairs::is_ready,
    shared_node::{NodeInstallation, run, shared_node, simulator_pid},
};

/// The kubelet restarts the container in place; the gateway finds the backend there and takes no part in the restart.
#[test]
fn a_backend_of_somebody_else_is_forwarded_to_and_watched_and_never_touched() {
    run(async {
        let ground = shared_node().await;
        let pod = backend(ground, "theirs").await;
        let url = format!("http://{}:8000/v1", pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap());
        let spec = json!({"modelName": "theirs", "mode": "external", "backendUrl": url});
        ground.installation.apply("theirs", &spec).await.unwrap();
        ground.installation.until("theirs", "served", |model| reason(model, "Ready") == "Deployed").await;

        assert!(ground.chat("theirs", true).await.is_whole_stream());
        let whole = ground.chat("theirs", false).await;
        assert_eq!((whole.status, whole.header("x-rouse-cold-start")), (200, ""), "{}", whole.text());
        assert_eq!(whole.json()["model"], "theirs");
        assert_eq!(ground.reserved_gib("theirs").await, [0; 0], "its memory is nobody's here");

        let stream = ground.stream("theirs", 2000).await;
        kill(
            Pid::from_raw(simulator_pid(&ground.installation.runner.processes(&pod).unwrap())),
            Signal::SIGKILL,
        )
        .unwrap();
        let cut = stream.ended().await;
        assert!(
            !cut.is_whole_stream() && cut.events().iter().any(|event| event.contains("\"error\"")),
            "{cut:?}"
        );
        let again = |pod: &Option<Pod>| pod.as_ref().is_some_and(|pod| restarts(pod) > 0 && is_ready(pod));
        wait::until(&ground.installation.pods(), "theirs", "started again", again).await.unwrap();
        ground
            .installation
            .until("theirs", "served again", |model| reason(model, "Ready") == "Deployed")
            .await;
        let whole = ground.chat("theirs", true).await;
        assert!(whole.is_whole_stream(), "{whole:?}");

        ground.installation.models().delete("theirs", &DeleteParams::default()).await.unwrap();
        wait::until(&ground.installation.models(), "theirs", "its end", Option::is_none).await.unwrap();
        let left = ground.installation.pods().get("theirs").await.unwrap();
        assert_eq!((left.uid(), restarts(&left)), (pod.uid(), 1));
        assert_eq!(left.metadata.deletion_timestamp, None);
        assert!(ground.deployments("theirs").await.is_empty());
    });
}

/// Creates a Pod with an engine and without Rouse's parts, and waits until it serves.
async fn backend(ground: &NodeInstallation<'_>, name: &str) -> Pod {
    let args =
        format!("--host=$(POD_IP) --port=8000 --model={name} --start-time=100ms --ttft=5ms --itl=50ms");
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": {
        "terminationGracePeriodSeconds": 1,
        "containers": [{
            "name": "server",
            "image": image("engine-sim"),
            "args": args.split(' ').collect::<Value>(),
            "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 1},
            "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        }],
    }});
    let pods = ground.installation.pods();
    pods.create(&PostParams::default(), &serde_json::from_value(pod).unwrap()).await.unwrap();
    let serves = |pod: &Option<Pod>| pod.as_ref().is_some_and(is_ready);
    wait::until(&pods, name, "ready", serves).await.unwrap().unwrap()
}

fn restarts(pod: &Pod) -> i32 {
    let containers = pod.status.iter().flat_map(|status| status.container_statuses.iter().flatten());
    containers.map(|container| container.restart_count).sum()
}
