//! Objects and a running gateway: invalid objects harm no other model, and external backends get no forbidden request.

use std::{
    io::{Read as _, Write as _},
    net::TcpListener,
};

use kube::{Api, api::DeleteParams};
use rouse_cluster::wait;
use rouse_controllers::crd::{AcceleratorPool, InferenceModel};
use serde_json::json;

use crate::installation::{Installation, blocking, reason};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_object_says_so_and_harms_no_other() {
    let world = Installation::new("served-bad", 2, "128Gi").await;
    let gateway = world.gateway("gateway-0", "");
    world.model("good", "10Gi", "", json!({})).await;
    world.model("homeless", "10Gi", "", json!({"nodeSelector": {"inference-pool": "nowhere"}})).await;
    world.model("twin", "10Gi", "", json!({"modelName": "good"})).await;
    let external =
        json!({"modelName": "metadata", "mode": "external", "backendUrl": "http://169.254.169.254/"});
    world.apply("metadata", &external).await.unwrap();
    let lost = json!({"modelName": "lost", "mode": "external", "backendUrl": "http://nobody-there:8000"});
    world.apply("lost", &lost).await.unwrap();
    // The schema accepts the model; the API server refuses its Deployment.
    let broken = json!({"template": {"spec": {"containers": [{"name": "engine", "image": "rouse/engine", "ports": [{"containerPort": 99999}]}]}}});
    world.model("broken", "10Gi", "", broken).await;
    for (name, why) in [("homeless", "NoPool"), ("twin", "DuplicateName"), ("metadata", "ForbiddenBackend")] {
        world.until(name, why, |model| reason(model, "Accepted") == why).await;
    }
    let unfound = |model: &InferenceModel| {
        let conditions = model.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let available = conditions.iter().find(|condition| condition.type_ == "Available");
        available.is_some_and(|it| it.status == "False" && it.message.contains("'nobody-there."))
    };
    world.until("lost", "not found, in the resolver's words", unfound).await;
    world.until("broken", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let client = gateway.client();
    let refused = blocking(move || client.chat("broken", false, 4)).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    assert_eq!(refused.json()["error"]["code"], "model_not_ready", "{}", refused.text());
    world.until("broken", "failed", |model| reason(model, "Available") == "Failed").await;
    assert_eq!(blocking(move || client.chat("homeless", false, 4)).await.status, 404);
    assert_eq!(blocking(move || client.chat("good", false, 4)).await.status, 200);
    assert_eq!(world.reserved_gib().await, [("good".to_owned(), 10)], "what failed holds nothing");
}

/// Why a pool is not ready, from its conditions.
fn why(pool: &Option<AcceleratorPool>) -> String {
    let conditions =
        pool.iter().filter_map(|pool| pool.status.as_ref()).flat_map(|status| &status.conditions);
    conditions.map(|condition| format!("{}: {}", condition.reason, condition.message)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pools_that_overlap_and_one_whose_selector_matches_nothing_say_so_and_harm_no_other() {
    let world = Installation::new("served-pools", 2, "128Gi").await;
    let namespace = world.name().to_owned();
    let (first, second, empty) =
        (format!("{namespace}-a"), format!("{namespace}-b"), format!("{namespace}-c"));
    world.pool(&first, json!({"nodeSelector": {"ring": namespace}, "memory": "64Gi"})).await;
    world
        .pool(&second, json!({"nodeSelector": {"ring": namespace, "rack": namespace}, "memory": "64Gi"}))
        .await;
    world.pool(&empty, json!({"nodeSelector": {"nobody-has": namespace}, "memory": "64Gi"})).await;
    world.model("good", "10Gi", "", json!({})).await;
    for (model, label) in [("torn", "ring"), ("lonely", "nobody-has")] {
        let spec = json!({"modelName": model, "memory": "10Gi", "engine": {"kind": "vllm"}, "nodeSelector": {label: namespace},
            "containerImage": "rouse/engine", "queue": {"policy": "reject"}});
        world.apply(model, &spec).await.unwrap();
    }
    let gateway = world.gateway("gateway-0", "");
    let pools: Api<AcceleratorPool> = Api::all(world.site.admin.clone());
    let others = format!("Overlap: the pool shares nodes with '{second}'");
    wait::until(&pools, &first, "an overlap", |pool| why(pool).contains(&others)).await.unwrap();
    wait::until(&pools, &empty, "no nodes", |pool| why(pool).contains("NoNodes")).await.unwrap();
    for model in ["torn", "lonely"] {
        world.until(model, "not available", |model| reason(model, "Available") == "PoolNotReady").await;
        let client = gateway.client();
        let refused = blocking(move || client.chat(model, false, 4)).await;
        assert_eq!(refused.status, 422, "{}", refused.text());
        assert_eq!(refused.json()["error"]["details"]["never"], true, "{}", refused.text());
    }
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("good", false, 4)).await.status, 200);
    for pool in [first, second, empty] {
        pools.delete(&pool, &DeleteParams::default()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_that_grows_lets_in_who_found_no_room() {
    let world = Installation::new("served-grows", 2, "16Gi").await;
    world.model("large", "40Gi", "", json!({"queue": {"policy": "reject"}})).await;
    let gateway = world.gateway("gateway-0", "");
    // The status shows that this gateway leads: a gateway that does not lead refuses as well, and writes no statuses.
    world.until("large", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let client = gateway.client();
    let refused = blocking(move || client.chat("large", false, 4)).await;
    assert_eq!(refused.status, 422, "{}", refused.text());
    world.until("large", "no room", |model| reason(model, "Available") == "Unplaceable").await;
    let name = world.name().to_owned();
    world.pool(&name, json!({"nodeSelector": {"inference-pool": name}, "memory": "64Gi"})).await;
    world.until("large", "room", |model| reason(model, "Available") == "ScaledToZero").await;
    assert_eq!(blocking(move || client.chat("large", false, 4)).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backend_by_an_address_of_this_machine_is_never_asked() {
    let asked = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = asked.local_addr().unwrap().port();
    let world = Installation::new("served-loopback", 1, "16Gi").await;
    let gateway = world.gateway("gateway-0", "");
    let external = |url: String| json!({"modelName": "inside", "mode": "external", "backendUrl": url});
    world.apply("inside", &external(format!("http://127.0.0.1:{port}"))).await.unwrap();
    world.until("inside", "refused", |model| reason(model, "Accepted") == "ForbiddenBackend").await;
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("inside", false, 4)).await.status, 404);
    asked.set_nonblocking(true).unwrap();
    if let Ok((mut stream, from)) = asked.accept() {
        let mut text = String::new();
        stream.read_to_string(&mut text).ok();
        stream.flush().ok();
        panic!("{from} asked: {text}");
    }
}
