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
use crate::{installation::ClusterGateway, scale::cpu};

/// CPU time of the leader for one Pod event, as promised.
const MAX_COST: Duration = Duration::from_millis(1);
/// What an unoptimised program may take instead.
const MAX_UNOPTIMISED_COST: Duration = Duration::from_millis(10);
/// For how long the CPU time of the idle leader is measured, before the changes and after them.
const IDLE: Duration = Duration::from_secs(3);
/// CPU time is counted in steps of this length.
const CLOCK_STEP: Duration = Duration::from_millis(10);
/// The leader sees the last event well within this time.
const DELIVERY: Duration = Duration::from_secs(1);
/// How many Pods are patched at once.
const AT_ONCE: usize = 8;

/// Changes the statuses of Pods, as kubelets do, and returns the leader's CPU time for one change, unless that cannot
/// be told apart from what the leader uses while idle.
pub(super) async fn check_pod_event(fleet: &FleetInstallation<'_>) -> Option<Duration> {
    let (_, place) = fleet.leader().await;
    let leader = &fleet.gateways[place].process;
    let pods = pod_names(fleet).await;

    let idle_before = core_share(leader, IDLE).await;
    let (used, begun) = (cpu(leader), Instant::now());
    let events = fleet.size.pod_events;
    let (client, namespace) = (&fleet.world.site.admin, fleet.world.name());
    let patches = stream::iter(0..events).map(|n| touch(client, namespace, &pods[n % pods.len()], n));
    patches.buffer_unordered(AT_ONCE).collect::<()>().await;
    sleep(DELIVERY).await;
    let (spent, took) = (cpu(leader) - used, begun.elapsed());
    // Other work that comes and goes would hide the cost: the smaller share has less of it.
    let idle = idle_before.min(core_share(leader, IDLE).await);
    let own = spent.saturating_sub(took.mul_f64(idle));
    let each = own / u32::try_from(events).unwrap();
    let cost = is_measurable(own, took).then_some(each);
    let told = cost.map_or_else(
        || format!("not measurable, with {spent:.1?} of CPU for them and all else"),
        |each| format!("{each:.1?} of CPU each"),
    );
    println!("{events} Pod events in {took:.1?}: {told}; {:.1} % of a core while idle", idle * 100.0);
    let most = if fleet.optimised { MAX_COST } else { MAX_UNOPTIMISED_COST };
    assert!(each <= most, "{each:?} of CPU for each Pod event, {most:?} are allowed");
    cost
}

/// The share of a core that this gateway takes now.
pub(super) async fn core_share(gateway: &ClusterGateway, window: Duration) -> f64 {
    let (used, begun) = (cpu(gateway), Instant::now());
    sleep(window).await;
    (cpu(gateway) - used).as_secs_f64() / begun.elapsed().as_secs_f64()
}

/// Whether this difference between the CPU time of the changes and that of an idle leader is more than the steps of
/// both measurements: one step of the first, and one of the second for each [`IDLE`] in the time that the changes took.
fn is_measurable(difference: Duration, took: Duration) -> bool {
    difference > CLOCK_STEP.mul_f64(1.0 + took.as_secs_f64() / IDLE.as_secs_f64())
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
