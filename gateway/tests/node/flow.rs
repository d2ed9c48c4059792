//! From nothing to a stream and back to nothing.

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse_controllers::{
    crd::inference_model::EngineState,
    workload::{PROXY_PORT, STUB},
};

use crate::{
    client::TestClient,
    installation::{blocking, reason},
    pairs::is_ready,
    shared_node::{idle_after, run, shared_node},
};

/// Whether the kubelet has started this container, and whether it is ready.
fn container(pod: &Pod, name: &str) -> Option<(bool, bool)> {
    let all = pod.status.as_ref()?.container_statuses.as_ref()?;
    let found = all.iter().find(|container| container.name == name)?;
    Some((found.started.unwrap_or(false), found.ready))
}

#[test]
fn a_cold_request_starts_a_deployment_and_streams_and_idleness_takes_it_to_zero() {
    run(async {
        let ground = shared_node().await;
        let made = ground.model("cold", "--start-time 2s", idle_after("4s")).await;
        assert!(ground.deployments("cold").await.is_empty(), "nothing is made before somebody asks");

        // While the engine loads, the kubelet probes the stub and finds it not ready.
        let loading = |pod: &Pod| {
            container(pod, "engine").is_some_and(|(started, _)| started)
                && container(pod, STUB).is_some_and(|(started, ready)| started && !ready)
        };
        let (answer, loaded) =
            tokio::join!(ground.chat("cold", true), ground.pod("cold", "loading", loading));
        assert!(!is_ready(&loaded));
        assert!(answer.is_whole_stream(), "{answer:?}");
        // The head went out while the request waited, so only the metric shows the cold start.
        let admin = TestClient::new(ground.gateway.admin);
        let metrics = blocking(move || admin.get("/metrics").text()).await;
        let of_it = |line: &&str| line.starts_with("rouse_requests_total") && line.contains("model=\"cold\"");
        let counted: Vec<&str> = metrics.lines().filter(of_it).collect();
        assert_eq!(counted.len(), 1, "{counted:?}");
        assert!(counted[0].contains("cold_start=\"cold\"") && counted[0].ends_with(" 1"), "{counted:?}");
        let pod = ground.pod("cold", "ready", is_ready).await;
        assert_eq!(pod.uid(), loaded.uid());

        let deployed =
            ground.installation.until("cold", "deployed", |model| reason(model, "Ready") == "Deployed").await;
        let status = deployed.status.unwrap();
        let [engine] = &status.engines[..] else { panic!("{:?}", status.engines) };
        assert_eq!((engine.state, engine.pod.as_str()), (EngineState::Awake, pod.name_any().as_str()));
        let ip = pod.status.as_ref().unwrap().pod_ip.clone().unwrap();
        assert_eq!(engine.address.as_deref(), Some(format!("{ip}:{PROXY_PORT}").as_str()));
        assert_eq!(pod.spec.as_ref().unwrap().node_name.as_deref(), Some(ground.installation.runner.name()));
        assert_eq!(
            ground.installation.runner.processes(&pod).unwrap().len(),
            3,
            "stub, engine, and what holds the network"
        );
        let [deployment] = &ground.deployments("cold").await[..] else { panic!("not one Deployment") };
        assert_eq!(deployment.owner_references()[0].uid, made.uid().unwrap());
        assert_eq!(deployment.spec.as_ref().unwrap().replicas, Some(1));
        assert_eq!(ground.reserved_gib("cold").await, [40]);

        let hot = ground.chat("cold", false).await;
        assert_eq!((hot.status, hot.header("x-rouse-cold-start")), (200, ""), "{}", hot.text());

        ground.installation.until("cold", "idle", |model| reason(model, "Ready") == "ScaledToZero").await;
        ground.until_gone(&pod).await;
        assert_eq!(ground.reserved_gib("cold").await, [0; 0]);
        assert!(ground.pods("cold").await.is_empty());
        let [deployment] = &ground.deployments("cold").await[..] else { panic!("not one Deployment") };
        assert_eq!(deployment.spec.as_ref().unwrap().replicas, Some(0));
    });
}
