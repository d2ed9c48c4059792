//! LauncherPopulationPolicy: which nodes have launchers before a requester asks for one.

#![expect(unreachable_pub, reason = "KubeSchema repeats its struct, with its `pub`, inside a function")]

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::apimachinery::pkg::{api::resource::Quantity as Amount, apis::meta::v1::LabelSelector};
use kube::{
    CustomResource, KubeSchema,
    core::{Selector, SelectorExt as _},
};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use super::{super::scalar::Quantity, FmaStatus, amount::amount};

/// Launchers for the nodes that one selector matches.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "fma.llm-d.ai",
    version = "v1alpha1",
    kind = "LauncherPopulationPolicy",
    namespaced,
    shortname = "lpp",
    status = "FmaStatus",
    derive = "PartialEq",
    doc = "The minimum number of launchers on each node that one selector matches, with or without demand."
)]
#[serde(rename_all = "camelCase")]
pub struct LauncherPopulationPolicySpec {
    /// Selects the nodes.
    pub enhanced_node_selector: EnhancedNodeSelector,
    /// Number of launchers on each of these nodes. If several policies cover a node and a LauncherConfig, the largest
    /// count applies.
    #[serde(default)]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["launcherConfigName".into()]))]
    pub count_for_launcher: Vec<CountForLauncher>,
}

/// Selects nodes by their labels and their allocatable resources.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EnhancedNodeSelector {
    /// Selects nodes by their labels. An empty selector matches every node.
    pub label_selector: LabelSelector,
    /// Bounds of the node's allocatable resources, by the name of the resource. A node without the resource is not
    /// selected.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub allocatable_resources: BTreeMap<String, ResourceRange>,
}

/// Bounds of a quantity, both inclusive.
#[derive(JsonSchema, Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResourceRange {
    /// Lower bound. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_amount")]
    pub min: Option<Quantity>,
    /// Upper bound. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "any_amount")]
    pub max: Option<Quantity>,
}

/// Number of launchers of one LauncherConfig.
#[derive(JsonSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CountForLauncher {
    /// Name of the LauncherConfig, in the same namespace.
    pub launcher_config_name: String,
    /// Number of launchers on each node.
    pub launcher_count: i32,
}

/// Of any resource: `8`, `500m`, `128Gi`; as Kubernetes writes them.
fn any_amount(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"x-kubernetes-int-or-string": true, "pattern": AMOUNT})
}

const AMOUNT: &str =
    "^[+-]?([0-9]+([.][0-9]*)?|[.][0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?([0-9]+([.][0-9]*)?|[.][0-9]+))?$";

impl LauncherPopulationPolicySpec {
    /// Why it cannot be followed; nothing, when it can.
    #[must_use]
    pub fn problems(&self) -> Vec<String> {
        let nodes = &self.enhanced_node_selector;
        let mut problems = Vec::new();
        if let Err(error) = Selector::try_from(nodes.label_selector.clone()) {
            problems.push(format!("enhancedNodeSelector.labelSelector: {error}"));
        }
        for (resource, range) in &nodes.allocatable_resources {
            let at = format!("enhancedNodeSelector.allocatableResources.{resource}");
            let bounds = [&range.min, &range.max];
            for text in bounds.into_iter().flatten().filter(|text| amount(text.as_str()).is_none()) {
                problems.push(format!("{at}: '{text}' is not a quantity"));
            }
            let [min, max] = bounds.map(|text| text.as_ref().and_then(|text| amount(text.as_str())));
            if min.zip(max).is_some_and(|(min, max)| min > max) {
                problems.push(format!("{at}: min is greater than max, so no node matches"));
            }
        }
        let mut named = BTreeSet::new();
        for CountForLauncher { launcher_config_name: name, launcher_count: count } in &self.count_for_launcher
        {
            if *count < 0 {
                problems.push(format!(
                    "countForLauncher: {count} launchers of '{name}' are impossible: set 0 or more"
                ));
            }
            if !named.insert(name) {
                problems.push(format!("countForLauncher: '{name}' is listed twice: remove one of the two"));
            }
        }
        problems
    }
}

impl EnhancedNodeSelector {
    /// Whether a node with these labels, which has so much to give, is one of those that are meant. None is, by a selector that
    /// cannot be understood.
    #[must_use]
    pub fn matches(&self, labels: &BTreeMap<String, String>, allocatable: &BTreeMap<String, Amount>) -> bool {
        let selected = Selector::try_from(self.label_selector.clone());
        selected.is_ok_and(|selector| selector.matches(labels))
            && self.allocatable_resources.iter().all(|(resource, range)| {
                let has = allocatable.get(resource).and_then(|quantity| amount(&quantity.0));
                has.is_some_and(|has| range.contains(has) == Some(true))
            })
    }
}

impl ResourceRange {
    /// None, when a bound is no quantity.
    fn contains(&self, has: i128) -> Option<bool> {
        let least = self.min.as_ref().map_or(Some(i128::MIN), |min| amount(min.as_str()))?;
        let most = self.max.as_ref().map_or(Some(i128::MAX), |max| amount(max.as_str()))?;
        Some((least..=most).contains(&has))
    }
}
