//! The API server is a real one.

use k8s_openapi::{
    api::{
        core::v1::{ConfigMap, Pod},
        rbac::v1::{Role as Rights, RoleBinding},
    },
    apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition,
};
use kube::{
    Api, Client, CustomResource, CustomResourceExt as _,
    api::{ListParams, PostParams},
    runtime::wait::{await_condition, conditions},
};
use rouse_cluster::{ServerRole, TestCluster};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::support::refusal;

#[derive(CustomResource, Clone, Debug, Deserialize, Serialize, JsonSchema)]
#[kube(group = "test.rouse.dev", version = "v1", kind = "Thing", namespaced)]
struct ThingSpec {
    #[schemars(range(min = 1))]
    size: i32,
}

async fn define(client: &Client) {
    let kinds: Api<CustomResourceDefinition> = Api::all(client.clone());
    kinds.create(&PostParams::default(), &Thing::crd()).await.unwrap();
    await_condition(kinds, Thing::crd_name(), conditions::is_crd_established()).await.unwrap();
}

#[tokio::test]
async fn a_custom_resource_is_checked_and_outlives_its_api_server() {
    let cluster = TestCluster::start().unwrap();
    let client = cluster.client().await.unwrap();
    let version = client.apiserver_version().await.unwrap();
    assert!(version.git_version.starts_with("v1.34."), "{version:?}");

    define(&client).await;
    let namespace = cluster.namespace("things").await.unwrap();
    let things: Api<Thing> = namespace.api();
    let made =
        things.create(&PostParams::default(), &Thing::new("good", ThingSpec { size: 3 })).await.unwrap();
    let refused =
        refusal(things.create(&PostParams::default(), &Thing::new("bad", ThingSpec { size: 0 })).await);
    assert_eq!(refused.code, Some(422), "{refused:?}");

    let first = cluster.pid(ServerRole::ApiServer).await;
    cluster.stop_server(ServerRole::ApiServer).await;
    assert!(things.get("good").await.is_err(), "it answers although it was stopped");
    cluster.start_server(ServerRole::ApiServer).await.unwrap();
    assert_eq!(things.get("good").await.unwrap().metadata, made.metadata);

    cluster.kill_server(ServerRole::ApiServer).await;
    cluster.kill_server(ServerRole::Etcd).await;
    cluster.start_server(ServerRole::Etcd).await.unwrap();
    cluster.start_server(ServerRole::ApiServer).await.unwrap();
    assert_eq!(things.get("good").await.unwrap().metadata, made.metadata);
    assert_ne!(cluster.pid(ServerRole::ApiServer).await, first);
}

#[tokio::test]
async fn who_has_no_rights_is_refused_until_it_gets_them() {
    let cluster = TestCluster::shared();
    let namespace = cluster.namespace("rights").await.unwrap();
    let user = cluster.user("eve", Some("testers")).unwrap();
    let account = cluster.service_account(&namespace, "reader").await.unwrap();
    let mut clients = Vec::new();
    for user in [&user, &account] {
        let client = cluster.client_as(user).await.unwrap();
        let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        let refused = refusal(pods.list(&ListParams::default()).await);
        assert_eq!(refused.code, Some(403));
        let message = refused.message.unwrap();
        assert!(message.contains(user.name()), "{message}");
        clients.push(client);
    }

    let role = json!({
        "metadata": { "name": "read" },
        "rules": [{ "apiGroups": [""], "resources": ["pods"], "verbs": ["list"] }],
    });
    let role: Rights = serde_json::from_value(role).unwrap();
    namespace.api().create(&PostParams::default(), &role).await.unwrap();
    let binding = json!({
        "metadata": { "name": "read" },
        "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "read" },
        "subjects": [
            { "apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "testers" },
            { "kind": "ServiceAccount", "name": "reader", "namespace": namespace.name() },
        ],
    });
    let binding: RoleBinding = serde_json::from_value(binding).unwrap();
    namespace.api().create(&PostParams::default(), &binding).await.unwrap();
    for client in clients {
        let pods: Api<Pod> = Api::namespaced(client.clone(), &namespace);
        // The authorizer watches its rules asynchronously.
        let allowed = async {
            while pods.list(&ListParams::default()).await.is_err() {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
            }
        };
        tokio::time::timeout(rouse_cluster::wait::WAIT_TIMEOUT, allowed).await.expect("the role is not seen");
        let maps: Api<ConfigMap> = Api::namespaced(client, &namespace);
        assert_eq!(refusal(maps.list(&ListParams::default()).await).code, Some(403));
    }

    // Audited calls include their outcome. The API server writes its audit log after its responses.
    let told = async {
        loop {
            let calls = cluster.calls(&account).unwrap();
            let told: Vec<_> = calls.into_iter().map(|call| (call.verb, call.resource, call.code)).collect();
            if told.last().is_some_and(|(_, resource, _)| resource == "configmaps") {
                return told;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        }
    };
    let told =
        tokio::time::timeout(rouse_cluster::wait::WAIT_TIMEOUT, told).await.expect("its last call is logged");
    let told: Vec<_> =
        told.iter().map(|(verb, resource, code)| (verb.as_str(), resource.as_str(), *code)).collect();
    assert_eq!(told.first(), Some(&("list", "pods", 403)));
    assert_eq!(told[told.len() - 2..], [("list", "pods", 200), ("list", "configmaps", 403)]);
}

#[tokio::test]
async fn a_kubeconfig_file_opens_the_door_for_another_process() {
    let cluster = TestCluster::shared();
    let path = cluster.kubeconfig(cluster.admin()).unwrap();
    let kubeconfig = kube::config::Kubeconfig::read_from(&path).unwrap();
    let config = kube::Config::from_custom_kubeconfig(kubeconfig, &Default::default()).await.unwrap();
    let client = Client::try_from(config).unwrap();
    assert!(client.apiserver_version().await.is_ok());
}
