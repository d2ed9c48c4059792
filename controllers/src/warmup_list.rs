//! Lists Warmups for people, with their progress.
//!
//! Any gateway can answer, whether or not it leads: the answer is in the statuses of the objects.

use std::{collections::BTreeSet, time::Duration};

use futures_util::future::BoxFuture;
use kube::{Api, Client, ResourceExt as _, api::ListParams};
use serde::{Deserialize, Serialize};
use tokio::time;

use crate::{
    api_error::api_error_message,
    condition::ACCEPTED,
    crd::{
        Warmup, WarmupStatus,
        warmup::{WarmupItemCounts, WarmupNodeStatus, WarmupStatusPhase},
    },
};

/// Timeout of the list of one namespace.
const LIST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum number of nodes that a summary lists. The object has more of them.
const MAX_NODES: usize = 20;
/// Conditions whose messages say what keeps a Warmup from its end, the most important first.
const CONDITIONS: [&str; 3] = [ACCEPTED, "TargetsFound", "Complete"];

/// Reads the Warmups of the watched namespaces.
#[derive(Clone)]
pub struct WarmupLister {
    client: Client,
    /// `None` is the whole cluster.
    namespaces: BTreeSet<Option<String>>,
}

/// Progress of one Warmup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct WarmupSummary {
    pub namespace: String,
    pub name: String,
    /// What is warmed, in a few words.
    pub target: String,
    /// `None` until the Warmup has begun.
    pub phase: Option<WarmupStatusPhase>,
    /// Number of nodes that should be warm.
    pub desired: u32,
    /// Number of nodes on which a Pod of the Warmup runs or waits for its image.
    pub active: u32,
    pub succeeded: u32,
    pub failed: u32,
    /// Number of images and actions over all nodes, by state.
    pub items: WarmupItemCounts,
    /// What the Warmup waits for or why it failed; `None` if it has nothing to say.
    pub message: Option<String>,
    /// Nodes that are not done or have failed, 20 at most.
    pub nodes: Vec<WarmupNodeStatus>,
    /// Number of such nodes that are not listed.
    pub more_nodes: u32,
}

impl WarmupLister {
    #[must_use]
    pub(crate) const fn new(client: Client, namespaces: BTreeSet<Option<String>>) -> Self {
        Self { client, namespaces }
    }

    /// Returns all Warmups, by namespace and name. The future is boxed for the program's size (ADR 18).
    ///
    /// # Errors
    /// Returns why the API server did not list them, and what to do.
    pub fn list(&self) -> BoxFuture<'_, Result<Vec<WarmupSummary>, String>> {
        Box::pin(self.list_all())
    }

    async fn list_all(&self) -> Result<Vec<WarmupSummary>, String> {
        // The API server answers from its cache, since people may ask every second.
        let parameters = ListParams::default().match_any();
        let mut summaries = Vec::new();
        for namespace in &self.namespaces {
            let api: Api<Warmup> = match namespace {
                Some(namespace) => Api::namespaced(self.client.clone(), namespace),
                None => Api::all(self.client.clone()),
            };
            let listed = time::timeout(LIST_TIMEOUT, api.list(&parameters)).await;
            let listed = listed.map_err(|_| "the API server did not answer within 5 s".to_owned())?;
            let listed = listed.map_err(|error| message(&error))?;
            summaries.extend(listed.items.iter().map(WarmupSummary::of));
        }
        summaries.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
        Ok(summaries)
    }
}

impl WarmupSummary {
    /// Summarizes a Warmup's status.
    #[must_use]
    pub fn of(warmup: &Warmup) -> Self {
        let status = warmup.status.clone().unwrap_or_default();
        let message = reason(&status);
        let WarmupStatus { target, phase, items, mut nodes, more_nodes, .. } = status;
        let cut = nodes.len().saturating_sub(MAX_NODES);
        nodes.truncate(MAX_NODES);
        Self {
            namespace: warmup.namespace().unwrap_or_default(),
            name: warmup.name_any(),
            target: target.unwrap_or_default(),
            phase,
            desired: status.desired_node_num,
            active: status.active_node_num,
            succeeded: status.succeeded_node_num,
            failed: status.failed_node_num,
            items: items.unwrap_or_default(),
            message,
            nodes,
            more_nodes: more_nodes.saturating_add(u32::try_from(cut).unwrap_or(u32::MAX)),
        }
    }

    /// Whether the Warmup has completed or failed.
    #[must_use]
    pub const fn is_finished(&self) -> bool {
        matches!(self.phase, Some(WarmupStatusPhase::Completed | WarmupStatusPhase::Failed))
    }
}

/// Returns the message of the first condition that is not true.
fn reason(status: &WarmupStatus) -> Option<String> {
    let untrue = |kind: &&str| {
        let mut conditions = status.conditions.iter();
        conditions.find(|condition| condition.type_ == **kind && condition.status != "True")
    };
    let found = CONDITIONS.iter().find_map(untrue)?;
    Some(found.message.clone()).filter(|message| !message.is_empty())
}

fn message(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) if status.code == 404 => {
            "the cluster does not have the kind Warmup: apply charts/rouse/definitions/warmups.yaml"
                .to_owned()
        }
        kube::Error::Api(status) if status.code == 403 => format!(
            "this gateway may not list Warmups: apply the rights in charts/rouse/rbac again ({})",
            status.message
        ),
        error => api_error_message(error),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn summary(status: &Value) -> WarmupSummary {
        let warmup = json!({
            "apiVersion": "rouse.dev/v1alpha1", "kind": "Warmup",
            "metadata": {"name": "w", "namespace": "chat"}, "spec": {"targetModel": {"name": "qwen"}},
            "status": status,
        });
        WarmupSummary::of(&serde_json::from_value(warmup).unwrap())
    }

    fn condition(kind: &str, status: &str, message: &str) -> Value {
        json!({"type": kind, "status": status, "reason": "R", "message": message,
            "lastTransitionTime": "2026-11-01T00:00:00Z"})
    }

    #[test]
    fn a_summary_has_the_counts_and_the_message_of_what_is_not_as_it_should_be() {
        let found = summary(&json!({
            "phase": "InProgress", "target": "model qwen", "desiredNodeNum": 4, "activeNodeNum": 2,
            "succeededNodeNum": 1, "failedNodeNum": 1,
            "conditions": [
                condition("Accepted", "True", "valid"),
                condition("Complete", "False", "2 nodes left"),
                condition("TargetsFound", "False", "no node"),
            ],
        }));
        assert_eq!((found.namespace.as_str(), found.name.as_str()), ("chat", "w"));
        assert_eq!((found.desired, found.active, found.succeeded, found.failed), (4, 2, 1, 1));
        assert_eq!(found.message.as_deref(), Some("no node"));
        assert!(!found.is_finished());
        let new = summary(&Value::Null);
        assert_eq!((new.phase, new.message, new.target.as_str()), (None, None, ""));
        for (phase, finished) in [("Completed", true), ("Failed", true), ("Paused", false)] {
            assert_eq!(summary(&json!({"phase": phase})).is_finished(), finished, "{phase}");
        }
    }

    #[test]
    fn a_summary_lists_twenty_nodes_and_counts_the_others() {
        let node = |number: usize| json!({"node": format!("n{number}"), "state": "Pending"});
        let nodes: Vec<Value> = (0..23).map(node).collect();
        let found = summary(&json!({"nodes": nodes, "moreNodes": 4800}));
        assert_eq!((found.nodes.len(), found.more_nodes), (20, 4803));
        assert_eq!(serde_json::from_value::<WarmupSummary>(json!(found)).unwrap(), found);
    }
}
