//! Warmup: images and custom actions that nodes have before the Pods that need them start.
//!
//! The schema is loose: it has no grammars and no lengths of lists. On servers up to Kubernetes 1.32 a rule that is
//! added later freezes the objects that break it. The conversion refuses bad values, and the status says why.

#![expect(clippy::duplicated_attributes, reason = "each column has its name, type and path")]
#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

mod status;

use std::collections::BTreeMap;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::template::PodTemplateJson;

pub use self::status::{
    WarmupItemCounts, WarmupNodeState, WarmupNodeStatus, WarmupRecordGroup, WarmupRecordState, WarmupStatus,
    WarmupStatusPhase,
};

/// What nodes should have before it is needed, and which nodes.
#[derive(CustomResource, KubeSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "rouse.dev",
    version = "v1alpha1",
    kind = "Warmup",
    namespaced,
    shortname = "warm",
    category = "rouse",
    status = "WarmupStatus",
    derive = "PartialEq",
    doc = "Images that nodes pull, and actions that run on nodes, before the Pods that need them start.",
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase"),
    printcolumn(name = "Target", type_ = "string", json_path = ".status.target", priority = 1),
    printcolumn(name = "Desired", type_ = "integer", json_path = ".status.desiredNodeNum"),
    printcolumn(name = "Active", type_ = "integer", json_path = ".status.activeNodeNum"),
    printcolumn(name = "Succeeded", type_ = "integer", json_path = ".status.succeededNodeNum"),
    printcolumn(name = "Failed", type_ = "integer", json_path = ".status.failedNodeNum"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[x_kube(
    validation = Rule::new(
        "[has(self.targetNodes), has(self.targetRoleBasedGroup), has(self.targetModel)].exists_one(set, set)")
        .message("set exactly one of targetNodes, targetRoleBasedGroup and targetModel"),
)]
#[serde(rename_all = "camelCase")]
pub struct WarmupSpec {
    /// Limits of the Warmup: nodes at a time, failures, and times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<WarmupPolicies>,
    /// Whether nothing new begins. Pods that run go on, and the time of timeoutSeconds stands still.
    #[serde(default)]
    pub paused: bool,
    /// Taints that the Pods tolerate, in addition to those that the Pods of the target tolerate. A node with another
    /// taint waits, and the status says so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tolerations: Vec<TolerationSpec>,
    /// Nodes by their names and labels. Excludes the other two targets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_nodes: Option<TargetNodes>,
    /// The nodes on which the Pods of a RoleBasedGroup run. Excludes the other two targets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_role_based_group: Option<TargetGroup>,
    /// The nodes on which the next engine of an InferenceModel may start, with the images of the model. Excludes the
    /// other two targets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_model: Option<TargetModel>,
}

/// Limits of a Warmup.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WarmupPolicies {
    /// Maximum number of nodes that are warmed at a time. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub parallelism: Option<i64>,
    /// Number of failures of one node after which the next failure is final. A missing image and a refused password are
    /// final at once. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub backoff_limit: Option<i64>,
    /// Seconds from the start until the Warmup fails, without the time in which it is paused. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub timeout_seconds: Option<i64>,
    /// Seconds after which a finished Warmup is deleted. Default: it stays.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub ttl_seconds_after_finished: Option<i64>,
    /// Number of nodes that may fail. With one more, the Warmup fails at once, and the Pods that run are deleted.
    /// Default: 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 0))]
    pub max_failed_nodes: Option<i64>,
}

/// A taint that Pods tolerate, as in a Pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TolerationSpec {
    /// Key of the taint. Without a key, operator Exists tolerates every taint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// `Equal` or `Exists`. Default: `Equal`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub operator: Option<String>,
    /// Value of the taint, with operator Equal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// Effect of the taint: `NoSchedule`, `PreferNoSchedule` or `NoExecute`. Default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub effect: Option<String>,
    /// Seconds for which a running Pod stays on a node with the effect NoExecute. Default: no limit.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub toleration_seconds: Option<i64>,
}

/// Nodes by their names and labels, and what they should have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetNodes {
    /// Labels of the nodes. A node that gets these labels later is warmed as well, until the Warmup has finished.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Names of the nodes, in addition to those that nodeSelector matches.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub node_names: Vec<String>,
    /// Images that each of the nodes should have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images_preload: Option<ImagesPreload>,
    /// Pod that runs on each of the nodes once it has all images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub customized_action: Option<CustomizedAction>,
}

/// A RoleBasedGroup, and what the nodes of its roles should have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetGroup {
    /// Name of the group. Its Pods are found by the group's labels.
    pub name: String,
    /// Namespace of the group, which the gateway must serve. Default: the Warmup's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// What the nodes of each role should have, by the role's name. Roles that are not listed are not warmed. A node of
    /// several roles gets what all of them ask for.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub roles: BTreeMap<String, WarmupActions>,
}

/// An InferenceModel whose images are warmed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct TargetModel {
    /// Name of the InferenceModel, in the same namespace.
    pub name: String,
    /// Number of nodes that are kept warm, of those on which the model's next engine may start. Default: all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("minimum" = 1))]
    pub nodes: Option<i64>,
    /// Whether the Warmup never finishes: it warms new nodes, and nodes that have lost an image.
    #[serde(default)]
    pub keep_warm: bool,
}

/// What a node should have.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct WarmupActions {
    /// Images that each of the role's nodes should have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub images_preload: Option<ImagesPreload>,
    /// Pod that runs on each of the role's nodes once it has all images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub customized_action: Option<CustomizedAction>,
}

/// Images that a node should have.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImagesPreload {
    /// References of the images, as in a container.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub items: Vec<String>,
    /// Names of Secrets with the registries' credentials, in the Warmup's namespace.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub pull_secrets: Vec<String>,
}

/// A Pod that runs on each node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct CustomizedAction {
    /// Template of the Pod, as in a Job. The action is done when every container has exited with 0 or is ready by its
    /// readinessProbe.
    #[schemars(schema_with = "action_pods")]
    pub pod_template: PodTemplateJson,
}

fn action_pods(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "type": "object",
        "x-kubernetes-preserve-unknown-fields": true,
        "properties": {
            "metadata": {
                "type": "object",
                "description": "Labels and annotations of the Pod.",
                "x-kubernetes-preserve-unknown-fields": true,
            },
            "restartPolicy": {
                "type": "string",
                "description": "Restart policy of the Pod, instead of the one in `spec`: `Never` or `OnFailure`. \
                                Default: `Never`.",
            },
            "spec": {
                "type": "object",
                "description": "Spec of the Pod, as in a Job. Every field is passed on, but for the node and the \
                                restart policy.",
                "x-kubernetes-preserve-unknown-fields": true,
            },
        },
    })
}
