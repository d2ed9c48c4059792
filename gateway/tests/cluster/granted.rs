//! Waits until the API server grants what bindings give to an account.

use std::collections::BTreeMap;

use k8s_openapi::api::authorization::v1::{SelfSubjectRulesReview, SelfSubjectRulesReviewSpec};
use kube::{Api, Client, api::PostParams};
use rouse_cluster::wait::WAIT_TIMEOUT;
use serde_json::{Value, json};
use tokio::time::{Duration, sleep, timeout};

/// Waits until the client has all that these roles and bindings give to its user. `own` is the namespace
/// in which it asks for the rights on the whole cluster.
pub(crate) async fn until_granted(client: &Client, user: &str, own: &str, objects: &[Value]) {
    for (namespace, rules) in bound_rules(objects, user, own) {
        until_has(client, namespace, &rules).await;
    }
}

/// Returns the rules that these objects bind to a user, by namespace. Rules for the whole cluster are under `own`.
fn bound_rules<'a>(objects: &'a [Value], user: &str, own: &'a str) -> BTreeMap<&'a str, Vec<&'a Value>> {
    let is_bound = |object: &&Value| {
        let subject = &object["subjects"][0];
        let [namespace, name] =
            ["namespace", "name"].map(|field| subject[field].as_str().unwrap_or_default());
        format!("system:serviceaccount:{namespace}:{name}") == user
    };
    let mut rules = BTreeMap::<&str, Vec<&Value>>::new();
    for binding in objects.iter().filter(is_bound) {
        let reference = &binding["roleRef"];
        let is_its_role = |object: &&Value| {
            object["kind"] == reference["kind"] && object["metadata"]["name"] == reference["name"]
        };
        let role = objects.iter().find(is_its_role).expect("a binding has its role beside it");
        let namespace = binding["metadata"]["namespace"].as_str().unwrap_or(own);
        rules.entry(namespace).or_default().extend(role["rules"].as_array().unwrap());
    }
    rules
}

/// Waits until the API server grants all these rules to the client. Its authoriser watches roles and bindings
/// separately, so none of them follows from another.
async fn until_has(client: &Client, namespace: &str, rules: &[&Value]) {
    let spec = SelfSubjectRulesReviewSpec { namespace: Some(namespace.to_owned()) };
    let review = SelfSubjectRulesReview { spec, ..SelfSubjectRulesReview::default() };
    let granted = async {
        loop {
            let answered = Api::all(client.clone()).create(&PostParams::default(), &review).await.unwrap();
            let has: Vec<Value> =
                answered.status.unwrap().resource_rules.iter().map(|rule| json!(rule)).collect();
            if rules.iter().all(|rule| has.contains(rule)) {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(WAIT_TIMEOUT, granted)
        .await
        .unwrap_or_else(|_| panic!("in '{namespace}' it was never given all of {rules:?}"));
}
