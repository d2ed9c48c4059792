//! The chart, as helm renders it: an API server accepts every object, and a release's accounts have the rights of
//! what is turned on and no others.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use k8s_openapi::api::authorization::v1::ResourceAttributes;
use kube::{
    Client,
    api::{PatchParams, ValidationDirective},
};
use rouse_cluster::TestCluster;
use serde_json::{Value, json};

use crate::{
    rendered::{render, render_rights},
    rights::{
        self, CLUSTER, DUAL, MODELS, NODE_AGENT, OWN, Rights, SATURATION_CONFIG, SLOTS, WARM_LABELS, WARMUPS,
    },
    site::{is_allowed, resource_attributes, until_allowed},
    support::{FIELD_MANAGER, apply_object, cluster, repo_path},
};

/// The kinds of the Prometheus operator, which the cluster does not serve.
const NOT_SERVED: &str = "monitoring.coreos.com/";

/// Returns files of values to install with: those of `charts/values`, and the pages' examples, in this folder.
fn values_files(scratch: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(repo_path("charts/values")).unwrap().map(|entry| entry.unwrap().path());
    let is_accepted = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.ends_with(".yaml") && !name.starts_with("refused-")
    };
    let pages = ["quickstart-cluster", "quickstart-dual-pods", "install"];
    let examples = pages.into_iter().flat_map(|page| {
        let text = fs::read_to_string(repo_path(&format!("docs/{page}.md"))).unwrap();
        let blocks: Vec<String> = text.split("\n```yaml values\n").skip(1).map(str::to_owned).collect();
        assert!(!blocks.is_empty(), "{page} has no example of values");
        let example = |(number, rest): (usize, String)| {
            let path = scratch.join(format!("docs-{page}-{number}.yaml"));
            fs::write(&path, rest.split("```").next().unwrap()).unwrap();
            path
        };
        blocks.into_iter().enumerate().map(example).collect::<Vec<_>>()
    });
    files.filter(is_accepted).chain(examples).collect()
}

#[tokio::test]
async fn an_api_server_accepts_every_object_that_helm_renders() {
    let cluster = cluster().await;
    let (own, models) =
        (cluster.namespace("chart").await.unwrap(), cluster.namespace("chart-models").await.unwrap());
    let client = cluster.client().await.unwrap();
    let mut parameters = PatchParams::apply(FIELD_MANAGER).force();
    parameters.field_validation = Some(ValidationDirective::Strict);
    parameters.dry_run = true;
    let (mut asked, mut kinds) = (BTreeSet::new(), BTreeSet::new());
    let scratch = tempfile::tempdir().unwrap();
    for file in values_files(scratch.path()) {
        let file = file.to_str().unwrap();
        for mut object in render(&own, &["--values", file]) {
            let kind = object["kind"].as_str().unwrap().to_owned();
            // The namespaces in the files do not exist here.
            let namespace = object["metadata"]["namespace"]
                .as_str()
                .map(|namespace| if namespace == own.name() { own.name() } else { models.name() });
            if let Some(namespace) = namespace {
                object["metadata"]["namespace"] = json!(namespace);
            }
            let is_served = !object["apiVersion"].as_str().unwrap().starts_with(NOT_SERVED);
            if is_served && asked.insert(object.to_string()) {
                let name = &object["metadata"]["name"];
                let answer = apply_object(&client, &object, namespace, &parameters).await;
                assert!(answer.is_ok(), "{file}: {kind} {name}: {}", answer.unwrap_err());
            }
            kinds.insert(kind);
        }
    }
    for kind in
        ["CustomResourceDefinition", "DaemonSet", "Deployment", "HorizontalPodAutoscaler", "NetworkPolicy"]
    {
        assert!(kinds.contains(kind), "nothing is rendered of {kind}: {kinds:?}");
    }
}

/// Installs the accounts and the rights of a release with these values, and returns the client of an account.
///
/// `account`: the end of the account's name. Tests share a cluster, so all names begin with the namespace's.
async fn install(cluster: &TestCluster, own: &str, values: &Value, account: &str) -> Client {
    let admin = cluster.client().await.unwrap();
    let mut values = values.clone();
    values["nameOverride"] = json!(own);
    let objects = render_rights(own, &values);
    for object in &objects {
        let namespace = object["metadata"]["namespace"].as_str();
        let parameters = PatchParams::apply(FIELD_MANAGER).force();
        apply_object(&admin, object, namespace, &parameters).await.unwrap();
    }
    let name = format!("{own}-{account}");
    let is_it = |object: &Value| object["kind"] == "ServiceAccount" && object["metadata"]["name"] == name;
    assert!(objects.iter().any(is_it), "the release has no account {name}");
    cluster.client_as(&cluster.service_account(own, &name).await.unwrap()).await.unwrap()
}

/// Waits until the client has these rights, and asserts that it has no others.
async fn until_exactly(client: &Client, namespace: &str, expected: &[&[Rights]]) {
    for (group, resource, verb) in expected.iter().flat_map(|rights| rights::of(rights)) {
        until_allowed(client, resource_attributes(group, resource, verb, namespace)).await;
    }
    rights::exactly_as(client, namespace, expected).await;
}

/// The right to read the thresholds of saturation.
fn thresholds(namespace: &str) -> ResourceAttributes {
    let name = Some(SATURATION_CONFIG.to_owned());
    ResourceAttributes { name, ..resource_attributes("", "configmaps", "get", namespace) }
}

#[tokio::test]
async fn a_release_with_every_part_turned_off_has_the_rights_of_models_and_no_others() {
    let cluster = cluster().await;
    let elsewhere = cluster.namespace("elsewhere").await.unwrap();
    let own = cluster.namespace("chart-off").await.unwrap();
    let client = install(cluster, &own, &json!({}), "gateway").await;
    until_exactly(&client, &own, &[&CLUSTER, &OWN, &MODELS]).await;
    until_exactly(&client, &elsewhere, &[&CLUSTER]).await;
    assert!(!is_allowed(&client, thresholds(&own)).await);

    let own = cluster.namespace("chart-off").await.unwrap();
    let client = install(cluster, &own, &json!({"models": {"namespaces": ["*"]}}), "gateway").await;
    until_exactly(&client, &own, &[&CLUSTER, &OWN, &MODELS]).await;
    until_exactly(&client, &elsewhere, &[&CLUSTER, &MODELS]).await;
}

#[tokio::test]
async fn a_release_with_every_part_turned_on_has_the_rights_of_each_part_and_no_others() {
    let cluster = cluster().await;
    let elsewhere = cluster.namespace("elsewhere").await.unwrap();
    let own = cluster.namespace("chart-on").await.unwrap();
    let on = json!({"enabled": true});
    let mut values = json!({"saturation": on, "warmup": on, "slots": on, "dualPods": on});
    let client = install(cluster, &own, &values, "gateway").await;
    let all: [&[Rights]; 7] = [&CLUSTER, &OWN, &MODELS, &WARMUPS, &WARM_LABELS, &SLOTS, &DUAL];
    until_exactly(&client, &own, &all).await;
    until_exactly(&client, &elsewhere, &[&CLUSTER, &WARM_LABELS, &SLOTS]).await;
    until_allowed(&client, thresholds(&own)).await;
    let agent = install(cluster, &own, &values, "node").await;
    for namespace in [own.name(), elsewhere.name()] {
        until_exactly(&agent, namespace, &[&NODE_AGENT]).await;
    }

    let own = cluster.namespace("chart-on").await.unwrap();
    values["models"] = json!({"namespaces": ["*"]});
    let client = install(cluster, &own, &values, "gateway").await;
    until_exactly(&client, &own, &all).await;
    let everywhere: [&[Rights]; 6] = [&CLUSTER, &MODELS, &WARMUPS, &WARM_LABELS, &SLOTS, &DUAL];
    until_exactly(&client, &elsewhere, &everywhere).await;
}
