//! Warmups in a cluster, with any runner of Pods.

use kube::{
    Api,
    api::{Patch, PatchParams},
};
use rouse_cluster::wait;
use rouse_controllers::crd::{
    Warmup, WarmupStatus,
    warmup::{WarmupNodeStatus, WarmupStatusPhase},
};
use serde_json::{Value, json};

use crate::{installation::Installation, rendered::ChartPart, support::FIELD_MANAGER};

/// Settings of a gateway that tries again soon.
pub(crate) const SETTINGS: &str = ", warmup: {imageVolumes: never, retryDelay: 500ms}";

/// Label of each Pod of a Warmup.
pub(crate) const WARMUP_LABEL: &str = "rouse.dev/warmup";
/// Annotation of such a Pod: its node.
pub(crate) const NODE_ANNOTATION: &str = "rouse.dev/warmup-node";
/// Annotation of such a Pod: its image, or [`ACTION`].
pub(crate) const ITEM_ANNOTATION: &str = "rouse.dev/warmup-item";
/// The item of a custom action.
pub(crate) const ACTION: &str = "action";
/// How the label of a warm node begins.
pub(crate) const WARM_PREFIX: &str = "warm.rouse.dev/";

impl<R> Installation<'_, R> {
    pub(crate) fn warmups(&self) -> Api<Warmup> {
        self.site.namespace.api()
    }

    /// Gives the gateways the right to label nodes.
    pub(crate) async fn allow_warm_labels(&self) {
        self.site.turn_on(ChartPart::WarmLabels).await;
    }

    /// Applies a Warmup with this spec. The API server may refuse it.
    pub(crate) async fn try_warmup(&self, name: &str, spec: &Value) -> kube::Result<Warmup> {
        let object = json!({"apiVersion": "rouse.dev/v1alpha1", "kind": "Warmup", "metadata": {"name": name},
            "spec": spec});
        self.warmups().patch(name, &PatchParams::apply(FIELD_MANAGER).force(), &Patch::Apply(&object)).await
    }

    pub(crate) async fn warmup(&self, name: &str, spec: Value) -> Warmup {
        self.try_warmup(name, &spec).await.unwrap()
    }

    /// Changes these fields of a Warmup's spec.
    pub(crate) async fn edit_warmup(&self, name: &str, change: Value) -> Warmup {
        let patch = Patch::Merge(json!({"spec": change}));
        self.warmups().patch(name, &PatchParams::apply(FIELD_MANAGER), &patch).await.unwrap()
    }

    /// Waits until the status describes the present spec and fits, and returns it.
    pub(crate) async fn until_warmup(
        &self,
        name: &str,
        what: &str,
        fits: impl Fn(&WarmupStatus) -> bool,
    ) -> WarmupStatus {
        let fits = |warmup: &Option<Warmup>| {
            let Some(warmup) = warmup else { return false };
            let status = warmup.status.as_ref();
            let current = |status: &&WarmupStatus| status.observed_generation == warmup.metadata.generation;
            status.filter(current).is_some_and(&fits)
        };
        let found = wait::until(&self.warmups(), name, what, fits).await.unwrap();
        found.unwrap().status.unwrap()
    }

    /// Waits until the Warmup is complete.
    pub(crate) async fn until_completed(&self, name: &str) -> WarmupStatus {
        self.until_warmup(name, "completed", |status| is_in(status, WarmupStatusPhase::Completed)).await
    }

    /// Waits until the Warmup has failed.
    pub(crate) async fn until_failed(&self, name: &str) -> WarmupStatus {
        self.until_warmup(name, "failed", |status| is_in(status, WarmupStatusPhase::Failed)).await
    }
}

pub(crate) fn is_in(status: &WarmupStatus, phase: WarmupStatusPhase) -> bool {
    status.phase == Some(phase)
}

/// Desired, active, succeeded and failed nodes.
pub(crate) const fn counts(status: &WarmupStatus) -> (u32, u32, u32, u32) {
    (status.desired_node_num, status.active_node_num, status.succeeded_node_num, status.failed_node_num)
}

/// The listed items of this node.
pub(crate) fn items_of<'a>(status: &'a WarmupStatus, node: &str) -> Vec<&'a WarmupNodeStatus> {
    status.nodes.iter().filter(|own| own.node == node).collect()
}

/// The first cause that is listed for this node; empty without one.
pub(crate) fn cause<'a>(status: &'a WarmupStatus, node: &str) -> &'a str {
    items_of(status, node).into_iter().find_map(|own| own.cause.as_deref()).unwrap_or_default()
}

/// Status, reason and message of a condition; empty without it.
pub(crate) fn condition(status: &WarmupStatus, kind: &str) -> (String, String, String) {
    let found = status.conditions.iter().find(|condition| condition.type_ == kind);
    found.map(|found| (found.status.clone(), found.reason.clone(), found.message.clone())).unwrap_or_default()
}
