//! Which callers may send orders to a stub: the Pod network is open to everyone, the tokens' key is not.

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::api::core::v1::{Pod, Secret};
use kube::{
    Api, ResourceExt as _,
    api::{Patch, PatchParams},
};
use nix::sys::signal::Signal;
use rouse_cluster::wait;
use rouse_controllers::{
    crd::ledger::ObjectName,
    stub_key::{SECRET, StubKey},
    workload::{ModelRef, SPI_PORT, STUB},
};
use serde_json::json;

use crate::{
    client::TestClient,
    installation::{Installation, blocking, reason},
    site::GatewayNamespace,
    support::cluster,
};

const CLOSE: &str = r#"{"epoch":9999,"generation":18446744073709551615}"#;
/// Every order of the stub. Each has a leader's epoch that the stub would accept with a token.
const ORDERS: [(&str, &str, &str); 8] = [
    ("POST", "/v1/gate", CLOSE),
    ("DELETE", "/v1/gate", CLOSE),
    ("PUT", "/v1/proxy/config?retarget=true", r#"{"address":"127.0.0.1","port":9}"#),
    ("POST", "/v1/become-unready", ""),
    ("POST", "/v1/readiness-url", r#"{"url":"http://127.0.0.1:9/"}"#),
    ("POST", "/v1/engine/sleep", CLOSE),
    ("POST", "/v1/release", r#"{"epoch":9999}"#),
    ("POST", "/v1/set-log?startPos=0", "words"),
];

/// Sends an order, and returns the status and the body.
async fn order(pod: &Pod, order: (&str, &str, &str), token: Option<&str>) -> (u16, String) {
    let ip: IpAddr = pod.status.as_ref().unwrap().pod_ip.as_ref().unwrap().parse().unwrap();
    let (method, path, body) = order;
    let token = token.map(|token| format!("Authorization: Bearer {token}\r\n")).unwrap_or_default();
    let request = format!(
        "{method} {path} HTTP/1.1\r\nHost: stub\r\nConnection: close\r\nContent-Type: application/json\r\n\
         {token}Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let answer = blocking(move || TestClient::new(SocketAddr::new(ip, SPI_PORT)).raw(&request)).await;
    (answer.status, answer.text())
}

/// Asserts that the stub refuses every order and every read of its state with each of these tokens.
pub(crate) async fn assert_refuses_tokens(pod: &Pod, tokens: &[Option<&str>]) {
    for token in tokens {
        for what in ORDERS {
            assert_eq!(order(pod, what, *token).await.0, 401, "{what:?} with {token:?}");
        }
        let looks = [("GET", "/v1/gate", ""), ("GET", "/v1/proxy/config", "")];
        for what in looks {
            assert_eq!(order(pod, what, *token).await.0, 401, "{what:?} with {token:?}");
        }
    }
}

/// The token hash in the Pod's spec. `stub` is the container.
pub(crate) fn hash_of(pod: &Pod, stub: &str) -> String {
    let stub = pod.spec.as_ref().unwrap().containers.iter().find(|container| container.name == stub).unwrap();
    let mut args = stub.args.iter().flatten();
    args.find_map(|arg| arg.strip_prefix("--token-sha256=")).unwrap().to_owned()
}

fn hash(pod: &Pod) -> String {
    hash_of(pod, STUB)
}

/// Deletes the key: the next gateway that starts creates another.
pub(crate) async fn forget_key<R>(world: &Installation<'_, R>) {
    let secrets: Api<Secret> = world.site.namespace.api();
    let none = Patch::Merge(json!({"data": {"key": null}}));
    secrets.patch(SECRET, &PatchParams::default(), &none).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stub_obeys_nobody_without_its_models_own_token() {
    let world = Installation::new("tokens-orders", 2, "128Gi").await;
    let qwen = world.model("qwen", "40Gi", "", json!({})).await;
    let other = world.model("other", "40Gi", "", json!({})).await;
    let gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    let pod = world.running().await.remove(0);

    let key = StubKey::load_or_create(&world.site.client().await, world.name()).await.unwrap();
    let owner = |model: &rouse_controllers::crd::InferenceModel| ModelRef {
        object: ObjectName::new(world.name(), model.name_any()),
        uid: model.uid().unwrap(),
    };
    let (own, others, hash) = (key.token(&owner(&qwen)), key.token(&owner(&other)), hash(&pod));
    // Tokens that a stranger may know: none, the hash from the Pod's spec, another model's token.
    assert_refuses_tokens(&pod, &[None, Some(""), Some(&hash), Some(&others)]).await;
    let (status, gate) = order(&pod, ("GET", "/v1/gate", ""), Some(&own)).await;
    assert_eq!(status, 200, "{gate}");
    let gate: serde_json::Value = serde_json::from_str(&gate).unwrap();
    assert_eq!(gate["gated"], false);
    let client = gateway.client();
    let answer = blocking(move || client.chat("qwen", true, 4)).await;
    assert!(answer.is_whole_stream() && answer.header("x-rouse-cold-start").is_empty(), "{answer:?}");
}

#[tokio::test]
async fn gateways_that_come_at_once_have_one_key() {
    let site = GatewayNamespace::new(cluster().await, "tokens-key").await;
    let (client, namespace) = (site.client().await, site.namespace.name());
    let empty: Secret = site.namespace.api::<Secret>().get(SECRET).await.unwrap();
    assert_eq!(empty.data, None);
    let each = (0..8).map(|_| StubKey::load_or_create(&client, namespace));
    let keys: Vec<StubKey> = futures_util::future::try_join_all(each).await.unwrap();
    assert!(keys.iter().all(|key| *key == keys[0]));
    // Applying the manifest again keeps the key.
    site.reinstall().await;
    assert_eq!(StubKey::load_or_create(&client, namespace).await.unwrap(), keys[0]);

    let secrets: Api<Secret> = site.namespace.api();
    let set = |key: &str| {
        let patch = Patch::Merge(json!({"data": {"key": key}}));
        let secrets = secrets.clone();
        async move { secrets.patch(SECRET, &PatchParams::default(), &patch).await.unwrap() }
    };
    set("c2hvcnQ=").await;
    let refused = StubKey::load_or_create(&client, namespace).await.unwrap_err();
    assert!(!refused.is_transient() && refused.to_string().contains("remove the entry"), "{refused}");
    secrets.delete(SECRET, &kube::api::DeleteParams::default()).await.unwrap();
    let refused = StubKey::load_or_create(&client, namespace).await.unwrap_err();
    assert!(!refused.is_transient() && refused.to_string().contains("rbac/gateway.yaml"), "{refused}");
    let elsewhere = StubKey::load_or_create(&client, "kube-system").await.unwrap_err();
    assert!(!elsewhere.is_transient() && elsewhere.to_string().contains("may not"), "{elsewhere}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_of_another_key_are_replaced() {
    let world = Installation::new("tokens-changed", 2, "64Gi").await;
    world.model("qwen", "40Gi", "", json!({})).await;
    let first = world.gateway("gateway-0", "");
    let client = first.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    let before = world.running().await.remove(0);
    first.signal(Signal::SIGTERM);
    first.wait_owned().await;
    forget_key(&world).await;

    // The second gateway leads, and finds an engine that refuses its orders.
    let second = world.gateway("gateway-1", "");
    wait::until(&world.pods(), &before.name_any(), "its end", Option::is_none).await.unwrap();
    let client = second.client();
    assert_eq!(blocking(move || client.chat("qwen", false, 4)).await.status, 200);
    world.until("qwen", "ready", |model| reason(model, "Ready") == "Deployed").await;
    let now = world.running().await;
    assert_eq!(now.len(), 1);
    assert_ne!((now[0].uid(), hash(&now[0])), (before.uid(), hash(&before)));
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 40)]);
}
