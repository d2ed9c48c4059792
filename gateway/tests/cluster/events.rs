//! Events of models and of Pods, as a description of the object shows them.

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Event;
use kube::{
    Api, Resource, ResourceExt as _,
    api::{DeleteParams, ListParams},
    runtime::{WatchStreamExt as _, watcher},
};
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::crd::InferenceModel;
use serde_json::json;
use tokio::time::timeout;

use crate::installation::{Installation, blocking, reason};

/// The field selector of the Events that a description of this object lists.
fn of<K: Resource<DynamicType = ()>>(object: &K) -> String {
    let (kind, name, uid) = (K::kind(&()), object.name_any(), object.uid().unwrap());
    format!("involvedObject.kind={kind},involvedObject.name={name},involvedObject.uid={uid}")
}

/// Waits for the first Event with this reason.
pub(crate) async fn until_event<K, R>(world: &Installation<'_, R>, object: &K, reason: &str) -> Event
where
    K: Resource<DynamicType = ()>,
{
    until_event_with(world, object, reason, "").await
}

/// Waits for the first Event with this reason whose note contains this text.
pub(crate) async fn until_event_with<K, R>(
    world: &Installation<'_, R>,
    object: &K,
    reason: &str,
    says: &str,
) -> Event
where
    K: Resource<DynamicType = ()>,
{
    let api: Api<Event> = world.site.namespace.api();
    let events = watcher(api, watcher::Config::default().fields(&of(object)));
    let mut events = std::pin::pin!(events.default_backoff().applied_objects());
    let found = async {
        loop {
            let event = events.next().await.unwrap().unwrap();
            let note = event.message.as_deref().unwrap_or_default();
            if event.reason.as_deref() == Some(reason) && note.contains(says) {
                return event;
            }
        }
    };
    timeout(WAIT_TIMEOUT, found)
        .await
        .unwrap_or_else(|_| panic!("{} was never told to be {reason}, '{says}'", object.name_any()))
}

/// All reasons so far, in their order, with their counts.
async fn all(world: &Installation<'_>, model: &InferenceModel) -> Vec<(String, i32)> {
    let api: Api<Event> = world.site.namespace.api();
    let mut events = api.list(&ListParams::default().fields(&of(model))).await.unwrap().items;
    events.sort_by_key(|event| event.event_time.clone().map(|at| at.0));
    let times = |event: &Event| event.series.as_ref().and_then(|series| series.count).unwrap_or(1);
    events.iter().map(|event| (event.reason.clone().unwrap(), times(event))).collect()
}

fn names(told: &[(String, i32)]) -> Vec<&str> {
    told.iter().map(|(reason, _)| reason.as_str()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_models_life_is_told_by_whoever_decides_and_by_nobody_else() {
    let world = Installation::new("events", 2, "128Gi").await;
    let policy = json!({"cooldownPeriod": "10m", "eviction": "cooldown", "queue": {"policy": "reject"}});
    let large = world.model("large", "80Gi", "", policy.clone()).await;
    let other = world.model("other", "60Gi", "", policy.clone()).await;
    let leader = world.gateway("gateway-0", "");
    let created = until_event(&world, &large, "Created").await;
    assert_eq!(created.message.as_deref(), Some("the model is served"));
    assert_eq!(created.reporting_component.as_deref(), Some("rouse.dev/gateway"));
    let second = world.gateway("gateway-1", "");

    let client = leader.client();
    assert_eq!(blocking(move || client.chat("large", false, 4)).await.status, 200);
    until_event(&world, &large, "ScaledUp").await;
    // Twenty refusals at each gateway make one Event.
    for gateway in [&leader, &second] {
        for _ in 0..20 {
            let client = gateway.client();
            assert_eq!(blocking(move || client.chat("other", false, 4)).await.status, 429);
        }
    }
    let refused = until_event(&world, &other, "InsufficientMemory").await;
    assert_eq!(refused.type_.as_deref(), Some("Warning"));
    assert!(refused.message.as_ref().unwrap().contains("large"), "{refused:?}");
    // The model stays awake through all refusals, and scales down after the change.
    let changed = json!({"cooldownPeriod": "1s"});
    let mut spec = policy;
    crate::installation::merge(&mut spec, changed);
    world.model("large", "80Gi", "", spec).await;
    until_event(&world, &large, "Updated").await;
    until_event(&world, &large, "ScaledToZero").await;
    world.models().delete("other", &DeleteParams::default()).await.unwrap();
    until_event(&world, &other, "Deleted").await;

    assert_eq!(names(&all(&world, &large).await), ["Created", "ScaledUp", "Updated", "ScaledToZero"]);
    assert_eq!(names(&all(&world, &other).await), ["Created", "InsufficientMemory", "Deleted"]);
    let calls = world.site.cluster.calls(&world.site.account).unwrap();
    let written =
        calls.iter().filter(|call| call.resource == "events" && call.name.starts_with("other.insuff"));
    assert_eq!(written.count(), 1, "refusals are counted, and not written one by one");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_that_fails_says_why() {
    let world = Installation::new("events-fail", 2, "128Gi").await;
    // The schema accepts the model; the API server refuses its Deployment.
    let broken = json!({"template": {"spec": {"containers": [{"name": "engine", "image": "rouse/engine", "ports": [{"containerPort": 99999}]}]}}});
    let broken = world.model("broken", "10Gi", "", broken).await;
    let twin = world.model("twin", "10Gi", "", json!({"modelName": "broken"})).await;
    let gateway = world.gateway("gateway-0", "");
    let created = until_event(&world, &twin, "Created").await;
    let note = created.message.unwrap();
    assert!(note.starts_with("the model is not served: the name 'broken' belongs to"), "{note}");
    world.until("broken", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("broken", false, 4)).await.status, 503);
    let failed = until_event(&world, &broken, "FailedCreate").await;
    assert_eq!(failed.type_.as_deref(), Some("Warning"));
    let note = failed.message.unwrap();
    // The cause, and the API server's own message.
    assert!(note.starts_with("engine 0 failed to start: the engine's Pod cannot run (unrunnable)"), "{note}");
    assert!(note.contains("99999"), "{note}");
    world.until("broken", "failed", |model| reason(model, "Available") == "Failed").await;
}
