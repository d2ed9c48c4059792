//! What it costs the leader to scale models by their load: it reads the metrics of each of their engines.

use kube::api::{Patch, PatchParams};
use rouse_controllers::crd::InferenceModel;
use serde_json::json;
use tokio::time::Duration;

use super::{cost::core_share, fleet::FleetInstallation, objects::ENGINES, stub};
use crate::{crowd, installation::ClusterGateway, support::FIELD_MANAGER};

/// Engines whose load is read.
const READ_ENGINES: usize = 100;
/// Share of a core that this takes, as promised.
const MAX_SHARE: f64 = 0.2;
/// Two decisions of the default interval, with three readings of each engine before each.
const WINDOW: Duration = Duration::from_secs(30);
const READINGS: f64 = 6.0;

/// Scales some of the models by their load, and asserts what that costs the leader.
pub(super) async fn check(fleet: &FleetInstallation<'_>) {
    let (_, place) = fleet.leader().await;
    let leader = &fleet.gateways[place].process;
    stub::serve_metrics();
    let idle = core_share(leader, WINDOW).await;
    let models = READ_ENGINES / ENGINES as usize;
    let scaled = Patch::Merge(json!({"spec": {"saturation": {}}}));
    for model in (0..models).map(crowd::model) {
        fleet.world.models().patch(&model, &PatchParams::apply(FIELD_MANAGER), &scaled).await.unwrap();
    }
    for model in (0..models).map(crowd::model) {
        fleet.world.until(&model, "its load to be known", is_load_known).await;
    }
    let before = readings(leader);
    let cost = core_share(leader, WINDOW).await - idle;
    let read = readings(leader) - before;
    println!(
        "{read} readings of {READ_ENGINES} engines: {:.1} % of a core beside the {:.1} % of an idle leader",
        cost * 100.0,
        idle * 100.0
    );
    assert!(read >= READINGS * READ_ENGINES as f64 * 0.8, "{read} readings");
    assert!(cost <= MAX_SHARE, "{cost} of a core");
}

/// Engines that were read so far.
fn readings(gateway: &ClusterGateway) -> f64 {
    let page = gateway.metrics();
    let series = "rouse_saturation_readings_total{outcome=\"done\",source=\"engines\"} ";
    let count = page.lines().find_map(|line| line.strip_prefix(series));
    count.map_or(0.0, |count| count.parse().unwrap())
}

fn is_load_known(model: &InferenceModel) -> bool {
    let mut conditions = model.status.iter().flat_map(|status| &status.conditions);
    conditions.any(|condition| condition.type_ == "MetricsAvailable" && condition.status == "True")
}
