//! Another autoscaler sets the number of engines, by the subresource `scale`: Kubernetes's own, as the page shows it,
//! and any program. Kubernetes's own scales gateways as well, as the chart has it.

use std::fs;

use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams, PostParams},
};
use rouse_cluster::{ServerRole, TestCluster, wait};
use rouse_controllers::crd::InferenceModel;
use serde_json::json;

use super::{
    QUICK, after_readings, awake, awake_pods, chart_autoscaler, external_metrics, metric, report_load, target,
};
use crate::{
    installation::{Installation, blocking},
    support::{FIELD_MANAGER, own_cluster, repo_path},
};

/// The object of this kind on the page about saturation.
fn object_on_page(kind: &str) -> String {
    let page = fs::read_to_string(repo_path("docs/saturation.md")).unwrap();
    let mut blocks = page.split("\n```").skip(1).step_by(2).filter_map(|block| block.split_once('\n'));
    let found = blocks.find(|(_, text)| text.lines().any(|line| line == format!("kind: {kind}")));
    found.unwrap_or_else(|| panic!("the page shows no {kind}")).1.to_owned()
}

/// Waits until the autoscaler has asked for this number.
async fn until_asked(autoscalers: &Api<HorizontalPodAutoscaler>, name: &str, number: i32) {
    let asks = |autoscaler: &Option<HorizontalPodAutoscaler>| {
        let status = autoscaler.as_ref().and_then(|autoscaler| autoscaler.status.as_ref());
        status.is_some_and(|status| status.desired_replicas == number)
    };
    wait::until(autoscalers, name, &format!("it to ask for {number}"), asks).await.unwrap();
}

async fn write_scale(world: &Installation<'_>, model: &str, number: u32) {
    let number = Patch::Merge(json!({"spec": {"replicas": number}}));
    world.models().patch_scale(model, &PatchParams::apply(FIELD_MANAGER), &number).await.unwrap();
}

/// A registration of metrics is for a whole cluster, so this test has its own, and both uses share it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubernetes_s_autoscaler_scales_engines_by_the_load_that_rouse_reports_and_gateways_by_their_cpu() {
    let cluster = own_cluster().await;
    // Its list of kinds is up to 30 seconds old otherwise.
    cluster.kill_server(ServerRole::ControllerManager).await;
    cluster.start_server(ServerRole::ControllerManager).await.unwrap();
    tokio::join!(
        Box::pin(engines_are_scaled_by_their_load(&cluster)),
        Box::pin(chart_autoscaler::gateways_are_scaled_by_their_cpu(&cluster))
    );
}

async fn engines_are_scaled_by_their_load(cluster: &TestCluster) {
    let world = Installation::new_in(cluster, "autoscaled", 2, "128Gi").await;
    let (name, saturation) = ("llama-70b", json!({"actuation": "external"}));
    let settings = json!({"minReplicas": 1, "replicas": 1, "maxReplicas": 2, "saturation": saturation});
    world.model(name, "40Gi", "", settings).await;
    let gateway = world.gateway_with("gateway-0", QUICK);
    let one = awake_pods(&world, name, 1).await;
    external_metrics::install(&world.site.admin, &world.site.namespace, gateway.admin).await;

    let autoscalers: Api<HorizontalPodAutoscaler> = world.site.namespace.api();
    let mut shown: HorizontalPodAutoscaler =
        serde_saphyr::from_str(&object_on_page("HorizontalPodAutoscaler")).unwrap();
    shown.metadata.namespace = None;
    assert_eq!(shown.name_any(), name);
    autoscalers.create(&PostParams::default(), &shown).await.unwrap();
    until_asked(&autoscalers, name, 1).await;

    report_load(&one, 0.95, 0).await;
    until_asked(&autoscalers, name, 2).await;
    let two = awake_pods(&world, name, 2).await;
    let model = world.models().get(name).await.unwrap();
    assert_eq!(model.spec.replicas, Some(2));
    let mut writers = model.managed_fields().iter().filter_map(|fields| fields.manager.as_deref());
    assert!(writers.any(|writer| writer == "kube-controller-manager"), "{:?}", model.managed_fields());

    report_load(&two, 0.0, 0).await;
    until_asked(&autoscalers, name, 1).await;
    world.until(name, "one engine", |model| awake(model) == 1).await;
    assert_eq!(world.models().get(name).await.unwrap().spec.replicas, Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_number_in_scale_starts_and_ends_engines_within_the_bounds_but_never_the_last() {
    let world = Installation::new("saturation-scale", 3, "256Gi").await;
    let settings = json!({"replicas": 1, "maxReplicas": 3, "saturation": {"actuation": "external"}});
    world.model("qwen", "40Gi", "", settings).await;
    let gateway = world.gateway_with("gateway-0", QUICK);
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    awake_pods(&world, "qwen", 1).await;

    write_scale(&world, "qwen", 9).await;
    awake_pods(&world, "qwen", 3).await;
    let scale = world.models().get_scale("qwen").await.unwrap();
    assert_eq!((scale.spec.unwrap().replicas, scale.status.unwrap().replicas), (Some(9), 3));
    // The load needs fewer, and what it needs is only reported.
    let own = world.name();
    let desired = format!("rouse_desired_replicas{{model=\"qwen\",namespace=\"{own}\",variant=\"default\"}}");
    world.until("qwen", "fewer by the load", |model| target(model, "default") < 3).await;
    after_readings(&gateway, "outcome=\"done\",source=\"engines\"", 10.0).await;
    assert!(metric(&gateway, &desired).is_some_and(|desired| desired < 3.0));
    assert_eq!(awake(&world.models().get("qwen").await.unwrap()), 3);

    write_scale(&world, "qwen", 1).await;
    let is_one = |model: &InferenceModel| awake(model) == 1;
    world.until("qwen", "one engine", is_one).await;
    world.until_reserved("that of one", |booked| booked == [("qwen".to_owned(), 40)]).await;
    write_scale(&world, "qwen", 0).await;
    after_readings(&gateway, "outcome=\"done\",source=\"engines\"", 10.0).await;
    assert!(is_one(&world.models().get("qwen").await.unwrap()), "idleness ends the last one");
}
