//! A release takes over what kubectl applied, and another release what that one leaves, by the blocks of
//! `docs/upgrading.md`. Whose an object is shows in the object itself, so the cluster has no node, and nothing runs.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use kube::{
    Client, ResourceExt as _,
    api::{DynamicObject, PatchParams},
};
use rouse_cluster::TestCluster;
use rouse_controllers::{label, stub_key};
use serde_json::{Value, json};

use super::{
    leftovers::all_objects,
    release::{CHAT, NAMESPACE},
    shell::PageShell,
};
use crate::{
    pages::blocks,
    shared_node::run,
    support::{FIELD_MANAGER, apply_object, repo_path},
};

const PAGE: &str = "docs/upgrading.md";
/// What kubectl calls itself in an object that it has applied: on the server's side, and on its own.
const KUBECTL: [&str; 2] = ["kubectl", "kubectl-client-side-apply"];
/// Helm's annotation with the release of an object.
const RELEASE: &str = "meta.helm.sh/release-name";
/// The model that is there before the releases.
const MODEL: &str = "nomic-embed";
/// What must outlast every change: the model, its engine, and the key of the stubs' tokens.
const KEPT: [&str; 3] =
    ["InferenceModel chat/nomic-embed", "Deployment chat/nomic-embed", "Secret rouse/rouse-stub-key"];

/// Objects by kind, namespace and name: `Service rouse/rouse-gateway`.
type NamedObjects = BTreeMap<String, DynamicObject>;

#[test]
fn a_release_takes_over_what_kubectl_applied_and_the_next_release_what_that_one_leaves() {
    run(async {
        let [upgrade, from_manifests, to_another_release] = &blocks(PAGE, "sh helm")[..] else {
            panic!("{PAGE} has other commands of helm than the tests run")
        };
        let cluster = TestCluster::start().unwrap();
        let client = cluster.client().await.unwrap();
        let shell = PageShell::new(cluster.kubeconfig(cluster.admin()).unwrap());
        shell.pull();
        shell.set_values(json!({}), cluster.api_server());
        shell.run(&blocks("docs/kubernetes.md", "sh kubectl").remove(0));
        shell.run("kubectl wait --for condition=Established --timeout 2m crd --all");
        create_kept(&client).await;
        let before = Box::pin(present(&client)).await;
        let applied = names(&before, is_applied);
        for expected in
            ["CustomResourceDefinition warmups.rouse.dev", "Secret rouse/rouse-stub-key", "RoleBinding chat/"]
        {
            let mut found = applied.iter().filter(|name| name.starts_with(expected));
            assert!(found.next().is_some(), "no {expected} among {applied:?}");
        }

        shell.run(from_manifests);
        assert_eq!(releases(&shell), [["rouse", "1", "deployed"]]);
        let after = Box::pin(present(&client)).await;
        let owned = names(&after, |object| is_of(object, "rouse"));
        let left: Vec<_> = applied.difference(&owned).collect();
        assert!(left.is_empty(), "these belong to no release: {left:?}");
        assert_eq!(kept(&after), kept(&before));
        shell.run(upgrade);
        assert_eq!(releases(&shell), [["rouse", "2", "deployed"]]);

        shell.run(to_another_release);
        assert_eq!(releases(&shell), [["inference", "1", "deployed"]]);
        let after = Box::pin(present(&client)).await;
        let owned = names(&after, |object| is_of(object, "inference"));
        let left: Vec<_> =
            applied.iter().filter(|name| after.contains_key(*name) && !owned.contains(*name)).collect();
        assert!(left.is_empty(), "these do not belong to the new release: {left:?}");
        assert_eq!(names(&after, |object| is_of(object, "rouse")), BTreeSet::new());
        assert_eq!(kept(&after), kept(&before));
        let service = "inference-rouse-gateway";
        assert!(owned.contains(&format!("Service {NAMESPACE}/{service}")), "{owned:?}");
        let page = fs::read_to_string(repo_path(PAGE)).unwrap();
        assert!(page.contains(&format!("`{service}`")), "{PAGE} names another Service");
    });
}

/// Creates a model with the Deployment of its engine, and fills the Secret, as a gateway would.
async fn create_kept(client: &Client) {
    let image = "registry.example.com/nomic-embed:1";
    let labels = json!({"app.kubernetes.io/managed-by": "rouse", (label::MODEL): label::value(MODEL)});
    let model = json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "InferenceModel",
        "metadata": {"name": MODEL},
        "spec": {"modelName": MODEL, "memory": "2Gi", "containerImage": image},
    });
    let engine = json!({
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": MODEL, "labels": labels},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {"containers": [{"name": "engine", "image": image}]},
            },
        },
    });
    let key = json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": stub_key::SECRET},
        "data": {"key": "a2V5"},
    });
    let parameters = PatchParams::apply(FIELD_MANAGER);
    for (object, namespace) in [(model, CHAT), (engine, CHAT), (key, NAMESPACE)] {
        apply_object(client, &object, Some(namespace), &parameters).await.unwrap();
    }
}

/// Returns all objects that no other object owns: those that others own go with their owners.
async fn present(client: &Client) -> NamedObjects {
    let objects = all_objects(client).await.into_iter();
    let without_owner = objects.filter(|(_, object)| object.owner_references().is_empty());
    let named = without_owner.map(|(resource, object)| {
        let place = object.namespace().map_or_else(String::new, |namespace| format!("{namespace}/"));
        (format!("{} {place}{}", resource.kind, object.name_any()), object)
    });
    named.collect()
}

/// Returns the names of these objects.
fn names(present: &NamedObjects, is_wanted: impl Fn(&DynamicObject) -> bool) -> BTreeSet<String> {
    let wanted = present.iter().filter(|entry| is_wanted(entry.1));
    wanted.map(|(name, _)| name.clone()).collect()
}

fn is_applied(object: &DynamicObject) -> bool {
    let mut managers = object.managed_fields().iter().filter_map(|entry| entry.manager.as_deref());
    managers.any(|manager| KUBECTL.contains(&manager))
}

fn is_of(object: &DynamicObject, release: &str) -> bool {
    object.annotations().get(RELEASE).is_some_and(|name| name == release)
}

/// Returns what tells whether the kept objects are the same, with the same content.
fn kept(present: &NamedObjects) -> [Value; 3] {
    KEPT.map(|name| {
        let object = present.get(name).unwrap_or_else(|| panic!("{name} is gone"));
        json!([object.metadata.uid, object.data["spec"], object.data["data"]])
    })
}

/// Returns the name, the revision and the status of each release in the gateways' namespace.
fn releases(shell: &PageShell) -> Vec<[String; 3]> {
    let listed = shell.run(&format!("helm list --namespace {NAMESPACE} --output json"));
    let listed: Vec<Value> = serde_json::from_str(&listed).unwrap();
    let text = |release: &Value, field: &str| release[field].as_str().unwrap().to_owned();
    listed.iter().map(|release| ["name", "revision", "status"].map(|field| text(release, field))).collect()
}
