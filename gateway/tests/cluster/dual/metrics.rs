//! The leading gateway's metrics of dual pods, under the public project's names.

use kube::{ResourceExt as _, api::DeleteParams};

use super::DualPodsFixture;
use crate::{installation::ClusterGateway, memory::until_metric, pairs::annotation};

/// Returns the metric lines of this family.
fn lines(gateway: &ClusterGateway, family: &str) -> Vec<String> {
    let page = gateway.metrics();
    page.lines().filter(|line| line.starts_with(&format!("{family}{{"))).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_leader_counts_requesters_and_shows_which_engine_each_has() {
    let mut duo = DualPodsFixture::with_launchers("dual-counted", 1).await;
    duo.config("one", "").await;
    duo.config("two", "").await;
    duo.request("one", 1, 1).await;
    let (requester, launcher) = duo.until_launched("one").await;
    let own = duo.world.name().to_owned();
    let (key, _) =
        launcher.annotations().iter().find(|(key, _)| key.starts_with("engines.rouse.dev/")).unwrap();
    let pair = format!(
        "fma_duality{{UUID=\"{}\",exported_container=\"inference-server\",exported_namespace=\"{own}\",exported_pod=\"{}\",\
         instance_id=\"{}\",node=\"{}\",requester_name=\"{}\"}} 1",
        annotation(&requester, "accelerators").unwrap(),
        launcher.name_any(),
        key.split_once('/').unwrap().1,
        launcher.spec.as_ref().unwrap().node_name.as_ref().unwrap(),
        requester.name_any(),
    );
    let bound = "fma_launcher_pod_count{lcfg_name=\"launchers\",phase=\"bound\"} 1";
    let as_it_is = [
        &pair,
        "fma_requester_count{isc_name=\"one\"} 1",
        "fma_isc_count{launcher_config_name=\"launchers\"} 2",
        bound,
    ];
    for line in as_it_is {
        until_metric(&duo.gateway, line).await;
    }
    let created = format!(
        "fma_launcher_create_seconds_count{{exported_namespace=\"{own}\",lcfg_name=\"launchers\",success=\"true\"}} 1"
    );
    until_metric(&duo.gateway, &created).await;
    let called = |config: &str, method: &str, purpose: &str, status: u16| {
        format!(
            "fma_http_latency_seconds_count{{exported_namespace=\"{own}\",isc_name=\"{config}\",method=\"{method}\",purpose=\"{purpose}\",\
             status_code=\"{status}\"}} 1"
        )
    };
    until_metric(&duo.gateway, &called("one", "PUT", "create_instance", 201)).await;
    until_metric(&duo.gateway, &called("one", "POST", "relay_ready", 200)).await;

    // A follower exports none of these lines, and exports all of them once it leads.
    let second = duo.world.gateway_with("gateway-1", &duo.more);
    second.until_ready().await;
    for family in ["fma_duality", "fma_requester_count", "fma_isc_count", "fma_launcher_pod_count"] {
        assert_eq!(lines(&second, family), [""; 0]);
    }
    duo.kill().await;
    duo.gateway = second;
    for line in as_it_is {
        until_metric(&duo.gateway, line).await;
    }

    duo.scale("one", 0).await;
    duo.until_unbound("one", 1).await;
    until_metric(&duo.gateway, "fma_launcher_pod_count{lcfg_name=\"launchers\",phase=\"unbound\"} 1").await;
    until_metric(&duo.gateway, &called("one", "POST", "sleep", 200)).await;
    let left = ["fma_duality", "fma_requester_count", "fma_launcher_pod_count"]
        .map(|family| lines(&duo.gateway, family).len());
    assert_eq!(left, [0, 0, 1], "{}", duo.gateway.metrics());
    duo.objects("InferenceServerConfig").delete("two", &DeleteParams::default()).await.unwrap();
    until_metric(&duo.gateway, "fma_isc_count{launcher_config_name=\"launchers\"} 1").await;
}
