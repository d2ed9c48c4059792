//! The rights of the manifests are exactly those that a gateway needs. The chart renders its rights from these
//! manifests, and here they are applied as by kubectl, without helm.

use std::{collections::BTreeSet, fs};

use k8s_openapi::api::authorization::v1::ResourceAttributes;
use kube::Client;
use rouse_cluster::TestCluster;
use rouse_controllers::stub_key::SECRET;
use serde_json::{Value, json};

use crate::{
    site::{GatewayNamespace, LEASE_NAME, is_allowed, resource_attributes, until_allowed},
    support::{cluster, repo_path},
};

/// An API group, a resource of it, and the allowed verbs.
pub(crate) type Rights = (&'static str, &'static str, &'static [&'static str]);

/// Rights on cluster-wide objects, in any namespace of models.
pub(crate) const CLUSTER: [Rights; 5] = [
    ("rouse.dev", "acceleratorpools", &["get", "list", "watch"]),
    ("rouse.dev", "acceleratorpools/status", &["update"]),
    ("rouse.dev", "acceleratornodes", &["get", "list", "watch", "create", "patch"]),
    ("rouse.dev", "acceleratornodes/status", &["patch"]),
    ("", "nodes", &["get", "list", "watch"]),
];

pub(crate) const OWN: [Rights; 4] = [
    // The rights on its one Lease and its one Secret are checked separately.
    ("coordination.k8s.io", "leases", &["create"]),
    ("rouse.dev", "gatewayreplicas", &["list", "watch", "create", "patch", "delete"]),
    ("rouse.dev", "gatewayreplicas/status", &["patch"]),
    ("", "pods", &["get"]),
];

pub(crate) const MODELS: [Rights; 5] = [
    ("rouse.dev", "inferencemodels", &["get", "list", "watch"]),
    ("rouse.dev", "inferencemodels/status", &["patch"]),
    ("apps", "deployments", &["get", "list", "watch", "create", "patch", "delete"]),
    ("", "pods", &["get", "list", "watch", "patch", "delete"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// The further rights where models are, with Warmups. The manifests bind them together with those of models.
pub(crate) const WARMUPS: [Rights; 3] = [
    ("rouse.dev", "warmups", &["get", "list", "watch", "create", "patch", "delete"]),
    ("rouse.dev", "warmups/status", &["patch"]),
    ("", "pods", &["create"]),
];

/// The ConfigMap with the thresholds of saturation.
pub(crate) const SATURATION_CONFIG: &str = "rouse-saturation-config";

const VERBS: [&str; 8] = ["get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"];

/// Resources that the gateway must have no right to.
const OTHERS: [(&str, &str); 17] = [
    ("rouse.dev", "inferencemodels/finalizers"),
    ("rouse.dev", "warmups/finalizers"),
    ("rouse.dev", "deviceconfigurations/finalizers"),
    ("", "events"),
    ("", "pods/exec"),
    ("", "pods/log"),
    ("", "pods/status"),
    ("", "secrets"),
    ("", "configmaps"),
    ("", "services"),
    ("", "serviceaccounts/token"),
    ("", "namespaces"),
    ("", "nodes/proxy"),
    ("apps", "deployments/scale"),
    ("apps", "daemonsets"),
    ("rbac.authorization.k8s.io", "clusterroles"),
    ("apiextensions.k8s.io", "customresourcedefinitions"),
];

pub(crate) fn of(rights: &[Rights]) -> BTreeSet<(&'static str, &'static str, &'static str)> {
    let each = |(group, resource, verbs): &Rights| {
        verbs.iter().map(move |verb| (*group, *resource, *verb)).collect()
    };
    rights.iter().flat_map(|rights| -> Vec<_> { each(rights) }).collect()
}

/// The further rights where requesters are.
pub(crate) const DUAL: [Rights; 2] = [("apps", "replicasets", &["get"]), ("", "pods", &["create"])];

/// The further right of a gateway that labels warm nodes.
pub(crate) const WARM_LABELS: [Rights; 1] = [("", "nodes", &["patch"])];

/// The further rights of a gateway that keeps slots, in all namespaces.
pub(crate) const SLOTS: [Rights; 6] = [
    ("rouse.dev", "deviceconfigurations", &["get", "list", "watch"]),
    ("rouse.dev", "deviceconfigurations/status", &["patch"]),
    ("rouse.dev", "deviceinstances", &["get", "list", "watch", "patch", "delete"]),
    ("rouse.dev", "deviceinstances/status", &["patch"]),
    ("", "pods", &["list"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// All rights of the account of node agents. A policy confines each agent to its own node.
pub(crate) const NODE_AGENT: [Rights; 7] = [
    ("rouse.dev", "deviceconfigurations", &["get", "list", "watch"]),
    ("rouse.dev", "deviceinstances", &["get", "list", "watch", "create"]),
    ("rouse.dev", "deviceinstances/status", &["patch"]),
    ("rouse.dev", "acceleratornodes", &["get", "list", "watch"]),
    ("rouse.dev", "acceleratornodes/status", &["patch"]),
    ("", "nodes", &["get", "list", "watch"]),
    ("events.k8s.io", "events", &["create", "patch"]),
];

/// Returns the objects of these manifests. `models` is the namespace that kubectl gives to those without one.
fn manifests(files: &[&str], models: &str) -> Vec<Value> {
    let mut objects = Vec::new();
    for file in files {
        let text = fs::read_to_string(repo_path("charts/rouse/rbac").join(file)).unwrap();
        for document in text.split("---\n") {
            let mut object: Value = serde_saphyr::from_str(document).unwrap();
            if object["kind"] == "RoleBinding" && object["metadata"]["namespace"].is_null() {
                object["metadata"]["namespace"] = json!(models);
            }
            objects.push(object);
        }
    }
    objects
}

/// Applies the manifests for a gateway that runs the models of its own namespace.
async fn site<'a>(cluster: &'a TestCluster, name: &str) -> GatewayNamespace<'a> {
    let namespace = cluster.namespace(name).await.unwrap();
    let objects = manifests(&["gateway.yaml", "namespace.yaml"], &namespace);
    GatewayNamespace::with_objects(cluster, namespace, objects).await
}

/// Checks every verb of every resource there against these rights of the gateway.
async fn exactly(site: &GatewayNamespace<'_>, namespace: &str, rights: &[&[Rights]]) {
    exactly_as(&site.client().await, namespace, rights).await;
}

/// Checks every verb of every resource there against these rights of the client's account.
pub(crate) async fn exactly_as(client: &Client, namespace: &str, rights: &[&[Rights]]) {
    let known = CLUSTER.iter().chain(&OWN).chain(&MODELS).chain(&WARMUPS);
    let known = known.chain(&DUAL).chain(&SLOTS).chain(&NODE_AGENT);
    let known: BTreeSet<_> = known.map(|(group, resource, _)| (*group, *resource)).chain(OTHERS).collect();
    let mut given = BTreeSet::new();
    for (group, resource) in known {
        for verb in VERBS {
            if is_allowed(client, resource_attributes(group, resource, verb, namespace)).await {
                given.insert((group, resource, verb));
            }
        }
    }
    let wanted: BTreeSet<_> = rights.iter().flat_map(|rights| of(rights)).collect();
    let all =
        |set: &BTreeSet<_>, other: &BTreeSet<_>| format!("{:?}", set.difference(other).collect::<Vec<_>>());
    assert!(
        given == wanted,
        "in '{namespace}' it lacks {} and has beside that {}",
        all(&wanted, &given),
        all(&given, &wanted)
    );
}

#[tokio::test]
async fn a_gateway_of_one_namespace_may_do_what_it_needs_and_nothing_else() {
    let cluster = cluster().await;
    let (elsewhere, site) = (cluster.namespace("elsewhere").await.unwrap(), site(cluster, "rights").await);
    exactly(&site, site.namespace.name(), &[&CLUSTER, &OWN, &MODELS, &WARMUPS]).await;
    exactly(&site, &elsewhere, &[&CLUSTER]).await;

    // The one Lease, Secret and ConfigMap have their names in the rights; others are denied.
    let client = site.client().await;
    for (group, resource, own, other) in [
        ("coordination.k8s.io", "leases", LEASE_NAME, "kube-scheduler"),
        ("", "secrets", SECRET, "somebodys"),
        ("", "configmaps", SATURATION_CONFIG, "somebodys"),
    ] {
        for (name, verb) in [own, other].iter().flat_map(|name| VERBS.map(|verb| (*name, verb))) {
            // A right to create leases covers leases of any name.
            let given = match verb {
                "get" => name == own,
                "update" => name == own && resource != "configmaps",
                "list" | "watch" => name == own && resource == "configmaps",
                "create" => resource == "leases",
                _ => false,
            };
            let named = ResourceAttributes {
                name: Some(name.to_owned()),
                ..resource_attributes(group, resource, verb, site.namespace.name())
            };
            assert_eq!(is_allowed(&client, named).await, given, "{verb} {name}");
        }
    }
}

#[tokio::test]
async fn a_gateway_with_dual_pods_may_read_replica_sets_and_one_map_as_well() {
    let cluster = cluster().await;
    let site = site(cluster, "rights-dual").await;
    let namespace = site.namespace.name();
    site.install(manifests(&["dual-pods.yaml", "dual-pods-namespace.yaml"], namespace)).await;
    let client = site.client().await;
    let map = |name: &str| ResourceAttributes {
        name: Some(name.to_owned()),
        ..resource_attributes("", "configmaps", "get", namespace)
    };
    assert!(is_allowed(&client, map("gpu-map")).await);
    assert!(!is_allowed(&client, map("another-map")).await);
    exactly(&site, namespace, &[&CLUSTER, &OWN, &MODELS, &WARMUPS, &DUAL]).await;
}

#[tokio::test]
async fn a_gateway_that_labels_warm_nodes_may_patch_nodes_as_well() {
    let cluster = cluster().await;
    let site = site(cluster, "rights-warm").await;
    let namespace = site.namespace.name();
    exactly(&site, namespace, &[&CLUSTER, &OWN, &MODELS, &WARMUPS]).await;
    site.install(manifests(&["warm-labels.yaml"], namespace)).await;
    exactly(&site, namespace, &[&CLUSTER, &OWN, &MODELS, &WARMUPS, &WARM_LABELS]).await;
}

#[tokio::test]
async fn a_gateway_that_keeps_slots_may_write_their_objects_and_list_the_pods_of_all_namespaces() {
    let cluster = cluster().await;
    let elsewhere = cluster.namespace("elsewhere").await.unwrap();
    let site = site(cluster, "rights-slots").await;
    let namespace = site.namespace.name();
    site.install(manifests(&["slots.yaml"], namespace)).await;
    exactly(&site, namespace, &[&CLUSTER, &OWN, &MODELS, &WARMUPS, &SLOTS]).await;
    exactly(&site, &elsewhere, &[&CLUSTER, &SLOTS]).await;
}

#[tokio::test]
async fn a_node_agent_may_read_devices_and_write_their_statuses_and_nothing_else() {
    let cluster = cluster().await;
    let site = site(cluster, "rights-agent").await;
    let namespace = site.namespace.name();
    let account = cluster.service_account(namespace, "rouse-node").await.unwrap();
    site.install(manifests(&["node-agent.yaml"], namespace)).await;
    let client = cluster.client_as(&account).await.unwrap();
    until_allowed(&client, resource_attributes("rouse.dev", "deviceinstances", "create", namespace)).await;
    for namespace in [namespace, "kube-system", ""] {
        exactly_as(&client, namespace, &[&NODE_AGENT]).await;
    }
}

#[tokio::test]
async fn a_gateway_of_several_namespaces_has_its_models_in_each_of_them() {
    let cluster = cluster().await;
    let own = cluster.namespace("gateway").await.unwrap();
    let (one, two) = (cluster.namespace("models").await.unwrap(), cluster.namespace("models").await.unwrap());
    let elsewhere = cluster.namespace("elsewhere").await.unwrap();
    let mut objects = manifests(&["gateway.yaml", "namespace.yaml"], &one);
    objects.extend(manifests(&["namespace.yaml"], &two));
    let site = GatewayNamespace::with_objects(cluster, own, objects).await;
    exactly(&site, site.namespace.name(), &[&CLUSTER, &OWN]).await;
    exactly(&site, &one, &[&CLUSTER, &MODELS, &WARMUPS]).await;
    exactly(&site, &two, &[&CLUSTER, &MODELS, &WARMUPS]).await;
    exactly(&site, &elsewhere, &[&CLUSTER]).await;
    exactly(&site, "", &[&CLUSTER]).await;
}

#[tokio::test]
async fn a_gateway_of_all_namespaces_has_its_models_everywhere() {
    let cluster = cluster().await;
    let own = cluster.namespace("gateway").await.unwrap();
    let elsewhere = cluster.namespace("elsewhere").await.unwrap();
    let objects = manifests(&["gateway.yaml", "all-namespaces.yaml"], &own);
    let site = GatewayNamespace::with_objects(cluster, own, objects).await;
    exactly(&site, site.namespace.name(), &[&CLUSTER, &OWN, &MODELS, &WARMUPS]).await;
    exactly(&site, &elsewhere, &[&CLUSTER, &MODELS, &WARMUPS]).await;
    exactly(&site, "", &[&CLUSTER, &MODELS, &WARMUPS]).await;
}
