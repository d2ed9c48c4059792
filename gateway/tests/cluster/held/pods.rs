//! Writes to Pods: bindings, engines, statuses, deletions and creations.

use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams},
};
use rouse::{
    model::SleepLevelPolicy,
    pairing::{
        event::{EngineRecord, MemorySizes},
        ids::{EngineFingerprint, PairingEngineId, ProviderMode, RequesterId},
    },
    units::{Bytes, Generation, Tick},
};
use rouse_controllers::{
    dual_pods::{keys, record},
    workload::{ASLEEP, DELETION_COST, EPOCH, GENERATION, REPLICA},
    writer::Error,
};
use serde_json::{Value, json};

use super::{LeaderHandover, fence, pod, writer};
use crate::{site::GatewayNamespace, support::cluster};

/// The patch that binds an engine to this requester, or to none.
fn binding(requester: Option<&str>) -> Value {
    let record = EngineRecord {
        engine: PairingEngineId {
            mode: ProviderMode::Sleep,
            accelerators: ["GPU-a".into()].into(),
            fingerprint: EngineFingerprint(1),
        },
        generation: Generation(1),
        sizes: MemorySizes { awake: Bytes::gib(40), asleep: Bytes::gib(1), host: Bytes::ZERO },
        level: SleepLevelPolicy::Auto,
        stop_after: None,
        requester: requester.map(RequesterId::from),
        last_used: Tick(0),
    };
    let mut metadata = json!({
        "labels": {keys::DUAL: requester, keys::SLEEPING: requester.is_none().to_string()},
        "annotations": record::annotations(&"node".into(), &record, requester, None),
    });
    match requester {
        Some(_) => metadata["finalizers"] = json!([keys::PROVIDER_FINALIZER]),
        None => metadata["$deleteFromPrimitiveList/finalizers"] = json!([keys::PROVIDER_FINALIZER]),
    }
    json!({"metadata": metadata})
}

fn engine(replica: u32) -> Value {
    json!({"metadata": {"annotations": {
        REPLICA: replica.to_string(),
        GENERATION: "7",
        ASLEEP: null,
        DELETION_COST: "100",
    }}})
}

fn status(text: &str) -> Value {
    json!({"metadata": {"annotations": {keys::STATUS: text}}})
}

impl LeaderHandover<'_> {
    /// Holds one patch of a Pod until the other was applied.
    async fn holds_patch(&self, name: &str, metadata: Value, former: Value, next: Value) {
        let before = &self.pod(name, metadata).await;
        self.holds(
            name,
            name,
            async |writer, pods: Api<Pod>| {
                writer.patch_fenced(&pods, name, &fence(&writer, before), &former).await
            },
            async |writer, pods: Api<Pod>| {
                writer.patch_fenced(&pods, name, &fence(&writer, before), &next).await
            },
        )
        .await;
        let after = self.api::<Pod>(self.site.admin.clone()).get(name).await.unwrap();
        let epoch = self.next.leadership().unwrap().epoch.to_string();
        assert_eq!(after.annotations().get(EPOCH), Some(&epoch), "{name}");
    }

    async fn holds_delete(&self) {
        let before = &self.pod("deleted", json!({})).await;
        let bind = binding(Some("next"));
        self.holds(
            "a deletion",
            "deleted",
            async |writer, pods: Api<Pod>| {
                writer.delete_fenced(&pods, "deleted", &fence(&writer, before)).await
            },
            async |writer, pods: Api<Pod>| {
                writer.patch_fenced(&pods, "deleted", &fence(&writer, before), &bind).await
            },
        )
        .await;
    }

    /// Names of providers and launchers follow from what they are for, so the later creation is refused.
    async fn holds_create(&self) {
        let made = |who: &str| pod("created", json!({"labels": {keys::DUAL: who}}));
        let (former, next) = (made("former"), made("next"));
        self.holds(
            "a creation",
            "created",
            async |writer, pods: Api<Pod>| writer.create(&pods, &former).await.map(drop),
            async |writer, pods: Api<Pod>| writer.create(&pods, &next).await.map(drop),
        )
        .await;
    }
}

#[tokio::test]
async fn no_held_write_to_a_pod_changes_what_the_next_leader_wrote() {
    let (succession, leader) = Box::pin(LeaderHandover::new("held-pods", 6)).await;
    let bound = binding(Some("before"))["metadata"].clone();
    let (former, next) = (binding(Some("former")), binding(Some("next")));
    tokio::join!(
        Box::pin(succession.hand_over(leader)),
        Box::pin(succession.holds_patch("bound", json!({}), former, next.clone())),
        Box::pin(succession.holds_patch("unbound", bound, binding(None), next)),
        Box::pin(succession.holds_patch("engine", json!({}), engine(0), engine(1))),
        Box::pin(succession.holds_patch("status", json!({}), status("former"), status("next"))),
        Box::pin(succession.holds_delete()),
        Box::pin(succession.holds_create()),
    );
}

/// The former leader's write arrives before its successor's, which was decided without it; and what other writers do
/// in between.
#[tokio::test]
async fn a_decision_stands_unless_another_leader_has_changed_what_it_saw() {
    let site = GatewayNamespace::new(cluster().await, "held-retried").await;
    let (election, claim) = site.leader("next").await;
    let (writer, pods) = (writer(&election), Api::<Pod>::namespaced(site.client().await, &site.namespace));
    let all: Api<Pod> = site.namespace.api();
    let edit = async |change: Value| {
        all.patch("one", &PatchParams::default(), &Patch::Merge(change)).await.unwrap();
    };
    let create = async || {
        let made: Pod = serde_json::from_value(pod("one", json!({}))).unwrap();
        all.create(&Default::default(), &made).await.unwrap()
    };
    let before = create().await;
    let fenced = fence(&writer, &before);

    let condition = json!({"status": {"conditions": [{"type": "Ready", "status": "True"}]}});
    let patch = Patch::Strategic(condition);
    all.patch_status("one", &PatchParams::default(), &patch).await.unwrap();
    let (bind, told) = (binding(Some("one")), status("told"));
    let (bound, told) = tokio::join!(
        writer.patch_fenced(&pods, "one", &fenced, &bind),
        writer.patch_fenced(&pods, "one", &fenced, &told),
    );
    bound.unwrap();
    told.unwrap();
    let own = all.get("one").await.unwrap();
    assert_eq!(own.annotations()[keys::STATUS], "told");
    assert_eq!(own.annotations()[keys::REQUESTER], "one one");
    assert_eq!(own.annotations()[EPOCH], claim.epoch.to_string());

    let mut late = binding(Some("former"));
    late["metadata"]["annotations"][EPOCH] = json!((claim.epoch - 1).to_string());
    edit(late).await;
    let fenced = fence(&writer, &own);
    for outcome in [
        writer.patch_fenced(&pods, "one", &fenced, &binding(None)).await,
        writer.delete_fenced(&pods, "one", &fenced).await,
    ] {
        assert!(matches!(outcome, Err(Error::Conflict)), "{outcome:?}");
    }
    let now = all.get("one").await.unwrap();
    assert_eq!(now.annotations()[keys::REQUESTER], "former former", "it is decided on first");
    writer.patch_fenced(&pods, "one", &fence(&writer, &now), &binding(None)).await.unwrap();

    // A user can write any epoch. It stops no leader.
    let now = all.get("one").await.unwrap();
    edit(json!({"metadata": {"annotations": {EPOCH: (claim.epoch + 5).to_string()}}})).await;
    writer.patch_fenced(&pods, "one", &fence(&writer, &now), &status("again")).await.unwrap();
    let now = all.get("one").await.unwrap();
    assert_eq!(now.annotations()[EPOCH], claim.epoch.to_string());

    all.delete("one", &DeleteParams::default().grace_period(0)).await.unwrap();
    let other = create().await;
    let outcome = writer.patch_fenced(&pods, "one", &fence(&writer, &now), &status("late")).await;
    assert!(matches!(outcome, Err(Error::Gone)), "{outcome:?}");
    writer.delete_fenced(&pods, "one", &fence(&writer, &now)).await.unwrap();
    assert_eq!(all.get("one").await.unwrap().uid(), other.uid());
}
