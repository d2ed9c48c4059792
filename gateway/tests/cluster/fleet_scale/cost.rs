//! What one change of a Pod costs the leader.

use futures_util::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client, Resource as _, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
    core,
};
use serde_json::json;
use tokio::time::{Duration, Instant, sleep};

use super::{fleet::FleetInstallation, pods::unless_gone};
use crate::scale::cpu;

/// CPU time of the leader for one Pod event, as promised.
const MAX_COST: Duration = Duration::from_millis(1);
/// What an unoptimised program may take instead.
const MAX_UNOPTIMISED_COST: Duration = Duration::from_millis(10);
/// For how long the CPU time of the idle leader is measured.
const IDLE: Duration = Duration::from_secs(3);
/// The leader sees the last event well within this time.
const DELIVERY: Duration = Duration::from_secs(1);
/// How many Pods are patched at once.
const AT_ONCE: usize = 8;

/// Changes the statuses of Pods, as kubelets do, and returns the leader's CPU time for one change.
pub(super) async fn check_pod_event(fleet: &FleetInstallation<'_>) -> Duration {
    let (_, place) = fleet.leader().await;
    let leader = &fleet.gateways[place].process;
    let pods = pod_names(fleet).await;

    let (used, begun) = (cpu(leader), Instant::now());
    sleep(IDLE).await;
    let idle = (cpu(leader) - used).div_f64(begun.elapsed().as_secs_f64());

    let (used, begun) = (cpu(leader), Instant::now());
    let events = fleet.size.pod_events;
    let (client, namespace) = (&fleet.world.site.admin, fleet.world.name());
    let patches = stream::iter(0..events).map(|n| touch(client, namespace, &pods[n % pods.len()], n));
    patches.buffer_unordered(AT_ONCE).collect::<()>().await;
    sleep(DELIVERY).await;
    let took = begun.elapsed();
    let spent = (cpu(leader) - used).saturating_sub(idle.mul_f64(took.as_secs_f64()));
    let each = spent / u32::try_from(events).unwrap();
    println!(
        "{events} Pod events in {took:.1?}: {each:.0?} of CPU each; {:.1} % of a core while idle",
        idle.as_secs_f64() * 100.0
    );
    let most = if fleet.optimised { MAX_COST } else { MAX_UNOPTIMISED_COST };
    assert!(each <= most, "{each:?} of CPU for each Pod event, {most:?} are allowed");
    each
}

/// The names of all Pods.
pub(super) async fn pod_names(fleet: &FleetInstallation<'_>) -> Vec<String> {
    let client = fleet.world.site.admin.clone();
    let pods: Api<core::PartialObjectMeta<Pod>> = Api::namespaced(client, fleet.world.name());
    let all = pods.list(&ListParams::default()).await.unwrap().items;
    all.iter().map(|pod| pod.name_any()).collect()
}

/// Changes a condition of this Pod, if it is still there. `n` makes the change a new one. The response, a whole Pod, is
/// not parsed.
pub(super) async fn touch(client: &Client, namespace: &str, pod: &str, n: usize) {
    let condition = json!({"type": "example.com/Probed", "status": "True", "message": n.to_string()});
    let patch = Patch::Strategic(json!({"status": {"conditions": [condition]}}));
    let request = core::Request::new(Pod::url_path(&(), Some(namespace)))
        .patch_subresource("status", pod, &PatchParams::default(), &patch)
        .unwrap();
    unless_gone(client.request_text(request).await);
}
