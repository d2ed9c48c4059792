//! Nodes with taints.

use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::json;

use super::DualPodsFixture;
use crate::pairs::annotation;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_requester_waits_for_the_taint_of_its_nodes_pool_and_its_provider_tolerates_that() {
    let duo = DualPodsFixture::new("dual-taint", 1, "8Gi", "").await;
    let own = duo.world.name().to_owned();
    let pool = json!({"nodeSelector": {"inference-pool": own}, "sleepingMemory": "8Gi", "meterLag": "1s", "taint": "inference"});
    duo.world.pool(&own, pool).await;
    duo.ask("one", 1, 1, "").await;
    let told = |requesters: &[Pod], _: &[Pod]| {
        let status = requesters.first().and_then(|pod| annotation(pod, "status"));
        status.is_some_and(|status| status.contains("lacks the taint inference of its AcceleratorPool"))
    };
    duo.until("one", "why it waits", told).await;
    let nodes: Api<Node> = Api::all(duo.world.site.admin.clone());
    let taint = json!({"spec": {"taints": [{"key": "inference", "effect": "NoSchedule"}]}});
    let node = duo.world.runner.node(&format!("{own}-a"));
    nodes.patch(node.name(), &PatchParams::default(), &Patch::Merge(&taint)).await.unwrap();
    let (requester, provider) = duo.until_served("one").await;
    assert_eq!(annotation(&requester, "status"), Some("{\"Errors\":null}"));
    let spec = provider.spec.unwrap();
    let tolerates = |key: &str| spec.tolerations.iter().flatten().any(|own| own.key.as_deref() == Some(key));
    assert!(tolerates("inference"), "{:?}", spec.tolerations);
    let env = spec.containers[0].env.iter().flatten();
    assert!(
        env.into_iter()
            .any(|env| env.name == "NVIDIA_VISIBLE_DEVICES" && env.value.as_deref() == Some("all"))
    );
}
