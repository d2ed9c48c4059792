//! An engine that ends cuts no stream.

use kube::ResourceExt as _;
use rouse_controllers::crd::inference_model::EngineState;

use crate::shared_node::{idle_after, run, shared_node};

/// Another template makes another Deployment, and the former engine drains while a stream runs on it. A stream that is
/// longer than the cooldown keeps its engine from being idle.
#[test]
fn a_stream_that_is_open_when_its_deployment_is_scaled_down_is_not_cut() {
    run(async {
        let ground = shared_node().await;
        ground.model("drained", "--itl 50ms", idle_after("2s")).await;
        let stream = ground.stream("drained", 120).await;
        let pod = ground.pods("drained").await.remove(0);
        ground.model("drained", "--itl 10ms", idle_after("2s")).await;
        let drains = ground.installation.until("drained", "draining", |model| {
            let engines = model.status.iter().flat_map(|status| &status.engines);
            engines
                .into_iter()
                .any(|engine| engine.pod == pod.name_any() && engine.state == EngineState::Draining)
        });
        drains.await;
        assert_eq!(ground.pods("drained").await[0].metadata.deletion_timestamp, None);
        let whole = stream.ended().await;
        assert!(whole.is_whole_stream(), "{whole:?}");
        ground.until_gone(&pod).await;
        let replicas = |deployments: Vec<k8s_openapi::api::apps::v1::Deployment>| {
            deployments.iter().map(|d| d.spec.as_ref().unwrap().replicas.unwrap()).sum::<i32>()
        };
        assert_eq!(replicas(ground.deployments("drained").await), 0);

        // A stream's head may go out while the stream waits, and then does not name the kind of start.
        let next = ground.chat("drained", false).await;
        assert_eq!((next.status, next.header("x-rouse-cold-start")), (200, "cold"), "{}", next.text());
        assert_eq!(ground.deployments("drained").await.len(), 2);
    });
}
