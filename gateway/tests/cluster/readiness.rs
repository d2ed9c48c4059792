//! A gateway reports ready once it has seen everything that it serves by.

use std::{fs, net::SocketAddr};

use k8s_openapi::api::rbac::v1::{Role, RoleBinding};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, ListParams, PostParams},
};
use nix::sys::signal::Signal;
use rouse_cluster::{
    Namespace,
    wait::{self, WAIT_TIMEOUT},
};
use rouse_controllers::crd::GatewayReplica;
use serde_json::json;
use tokio::time::{Duration, sleep, timeout};

use crate::{
    client::{TestClient, TestResponse},
    installation::{Installation, StartingGateway, blocking},
    runner::plain_node,
    site::{GatewayNamespace, ModelScope, is_allowed, resource_attributes},
    support::cluster,
};

/// A free address for the admin listener, so that the test knows it before the start.
fn free() -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], rouse_net::port::claim_for_process().unwrap()))
}

/// Waits until the answer of `/readyz` on the admin listener fits, and returns it.
async fn says(operators: SocketAddr, what: &str, fits: impl Fn(&TestResponse) -> bool) -> TestResponse {
    let heard = async {
        loop {
            // No port is open until the process has come so far.
            if std::net::TcpStream::connect(operators).is_ok() {
                let answer = blocking(move || TestClient::new(operators).get("/readyz")).await;
                if fits(&answer) {
                    return answer;
                }
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(WAIT_TIMEOUT, heard).await.unwrap_or_else(|_| panic!("it never says {what}"))
}

/// An installation with rights in its own namespace only, also where others have the rights for every namespace.
async fn installation(name: &str) -> Installation<'static> {
    let cluster = cluster().await;
    let namespace = cluster.namespace(name).await.unwrap();
    let own = namespace.name().to_owned();
    let site = GatewayNamespace::with(cluster, namespace, ModelScope::Namespaces(&[&own])).await;
    Installation::with_node(site, "16Gi", |own| plain_node(own, 1)).await
}

/// Gives the gateways of this installation the rights to read models and to write Deployments there, and no other.
async fn allow_models(namespace: &Namespace, world: &Installation<'_>) {
    let role = json!({"metadata": {"name": "models"}, "rules": [
        {"apiGroups": ["rouse.dev"], "resources": ["inferencemodels"], "verbs": ["get", "list", "watch"]},
        {"apiGroups": ["apps"], "resources": ["deployments"], "verbs": ["get", "create", "patch", "delete"]}]});
    let binding = json!({"metadata": {"name": "models"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "models"},
        "subjects": [{"kind": "ServiceAccount", "name": "rouse-gateway", "namespace": world.name()}]});
    let (role, binding): (Role, RoleBinding) =
        (serde_json::from_value(role).unwrap(), serde_json::from_value(binding).unwrap());
    namespace.api::<Role>().create(&PostParams::default(), &role).await.unwrap();
    namespace.api::<RoleBinding>().create(&PostParams::default(), &binding).await.unwrap();
}

/// Starts a gateway that watches these namespaces.
fn start(world: &Installation<'_>, watched: &str, api: SocketAddr, operators: SocketAddr) -> StartingGateway {
    let file = world.file("gateway-0", "", "");
    let text = fs::read_to_string(&file).unwrap();
    let text = text.replace(&format!("namespaces: [{}]", world.name()), &format!("namespaces: [{watched}]"));
    let text = text.replace("api: 127.0.0.1:0", &format!("api: {api}"));
    fs::write(&file, text.replace("admin: 127.0.0.1:0", &format!("admin: {operators}"))).unwrap();
    let kubeconfig = world.site.cluster.kubeconfig(&world.site.account).unwrap();
    StartingGateway::new(&file, &kubeconfig, &[])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_may_see_nothing_is_not_ready_and_reports_what_is_missing() {
    let world = installation("ready").await;
    let elsewhere = world.site.cluster.namespace("ready-elsewhere").await.unwrap();
    let other = elsewhere.name().to_owned();
    let (operators, api) = (free(), free());
    let starting = start(&world, &other, api, operators);
    let missing = format!("inferencemodels in {other}");
    // Each watch takes its own time: the allowed ones deliver some time after the API server refuses the others.
    let all_but_refused = |answer: &TestResponse| {
        let text = answer.text();
        text.contains("forbidden") && text.contains(&missing) && !text.contains("nodes")
    };
    let answer = says(operators, "what it may not see, and nothing else", all_but_refused).await;
    assert_eq!(answer.status, 503, "{}", answer.text());
    assert_eq!(blocking(move || TestClient::new(operators).get("/healthz")).await.status, 200);
    assert!(
        blocking(move || TestClient::new(operators).get("/metrics"))
            .await
            .text()
            .contains("rouse_build_info")
    );
    // The gateway must not answer 404 for a model that it has not seen yet.
    assert!(std::net::TcpStream::connect(api).is_err(), "requests are taken");

    world.site.serve_too(&other).await;
    assert_eq!(says(operators, "ok", |answer| answer.text().contains("ok")).await.status, 200);
    blocking(move || starting.wait_until_listening()).await;
}

/// Only a leader watches Pods, but this gateway may have to lead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_may_see_models_and_no_pods_is_not_ready_and_reports_it() {
    let world = installation("ready-podless").await;
    let elsewhere = world.site.cluster.namespace("ready-models").await.unwrap();
    let other = elsewhere.name().to_owned();
    allow_models(&elsewhere, &world).await;

    let (operators, api) = (free(), free());
    let starting = start(&world, &other, api, operators);
    let missing = format!("pods in {other}");
    let only_pods = |answer: &TestResponse| {
        let text = answer.text();
        text.contains("forbidden") && text.contains(&missing) && !text.contains("inferencemodels")
    };
    says(operators, "that it may not list Pods, and nothing else", only_pods).await;
    // Long enough for a gateway that waits for the other lists only.
    sleep(Duration::from_millis(500)).await;
    let answer = says(operators, "the same", |_| true).await;
    assert!(answer.status == 503 && only_pods(&answer), "{}", answer.text());
    assert!(std::net::TcpStream::connect(api).is_err(), "requests are taken");

    world.site.serve_too(&other).await;
    assert_eq!(says(operators, "ok", |answer| answer.text().contains("ok")).await.status, 200);
    blocking(move || starting.wait_until_listening()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_may_not_see_one_namespace_serves_the_others_and_reports_which() {
    let world = installation("ready-others").await;
    let elsewhere = world.site.cluster.namespace("ready-forbidden").await.unwrap();
    let (own, other) = (world.name().to_owned(), elsewhere.name().to_owned());
    world.model("qwen", "10Gi", "", json!({})).await;
    let (operators, api) = (free(), free());
    let starting = start(&world, &format!("{own}, {other}"), api, operators);
    let gateway = blocking(move || starting.wait_until_listening()).await;
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);

    let answer = says(operators, "that it is ready", |answer| answer.status == 200).await;
    let text = answer.text();
    assert!(
        text.starts_with("ok\ndegraded: this gateway may not read ")
            && text.contains(&format!("inferencemodels in {other}")),
        "{text}"
    );
    assert!(!text.contains(&format!("in {own}")), "{text}");
    let replicas: Api<GatewayReplica> = world.site.namespace.api();
    let condition = |found: &Option<GatewayReplica>| {
        let conditions = found.as_ref()?.status.as_ref()?.conditions.iter();
        conditions.clone().find(|condition| condition.type_ == "SeesAll").cloned()
    };
    let told = |found: &Option<GatewayReplica>| condition(found).is_some_and(|own| own.status == "False");
    let found = wait::until(&replicas, "gateway-0", "its condition", told).await.unwrap();
    let message = condition(&found).unwrap().message;
    assert!(message.contains(&other) && message.contains("namespace.yaml"), "{message}");

    world.site.serve_too(&other).await;
    says(operators, "that it lacks nothing", |answer| answer.text() == "ok\n").await;
}

/// The role of a namespace may be away for a moment, while an installation is upgraded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_that_may_not_see_the_pods_of_a_namespace_leaves_its_engines_alone() {
    let cluster = cluster().await;
    let far = Installation::new("ready-far", 1, "64Gi").await;
    let namespace = cluster.namespace("ready-near").await.unwrap();
    let own = namespace.name().to_owned();
    let site = GatewayNamespace::with(cluster, namespace, ModelScope::Namespaces(&[&own, far.name()])).await;
    let mut near = Installation::with_node(site, "64Gi", |own| plain_node(own, 1)).await;
    near.watched = format!("{own}, {}", far.name());
    near.model("near", "40Gi", "", json!({})).await;
    far.model("far", "40Gi", "", json!({})).await;
    let gateway = near.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("far", false, 4)).await.status, 200);
    let before = far.running().await;
    gateway.signal(Signal::SIGTERM);
    gateway.wait_owned().await;

    let bindings: Api<RoleBinding> = far.site.namespace.api();
    let is_own = |binding: &RoleBinding| {
        binding.subjects.iter().flatten().any(|subject| subject.namespace.as_deref() == Some(near.name()))
    };
    for binding in bindings.list(&ListParams::default()).await.unwrap().items.into_iter().filter(is_own) {
        bindings.delete(&binding.name_any(), &DeleteParams::default()).await.unwrap();
    }
    allow_models(&far.site.namespace, &near).await;
    let (client, right) = (near.site.client().await, resource_attributes("", "pods", "list", far.name()));
    let revoked = async {
        while is_allowed(&client, right.clone()).await {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(WAIT_TIMEOUT, revoked).await.expect("the right is never revoked");
    let gateway = near.gateway("gateway-1", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("near", false, 4)).await.status, 200, "it leads");
    let admin = TestClient::new(gateway.admin);
    let ready = blocking(move || admin.get("/readyz").text()).await;
    assert!(ready.contains(&format!("pods in {}", far.name())), "{ready}");
    assert_eq!(far.reserved_gib().await, [("far".to_owned(), 40)]);
    let now = far.running().await;
    assert_eq!(now.iter().map(|pod| &pod.metadata.uid).collect::<Vec<_>>(), [&before[0].metadata.uid]);
    let deployments = far.deployments().list(&ListParams::default()).await.unwrap();
    let wanted = deployments.iter().map(|found| found.spec.as_ref().and_then(|spec| spec.replicas));
    assert_eq!(wanted.collect::<Vec<_>>(), [Some(1)]);
}
