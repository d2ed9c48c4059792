//! The definitions as the program prints them: an API server accepts them without a warning.

use std::process::Command;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, ResourceExt as _,
    runtime::wait::{await_condition, conditions},
};
use rouse_cluster::{TestCluster, wait::WAIT_TIMEOUT};
use serde_json::Value;
use tokio::time::timeout;

use crate::support::apply_definition;

fn printed() -> Vec<Value> {
    let output = Command::new(env!("CARGO_BIN_EXE_rouse-gateway")).args(["crds", "--fma"]).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.split("---\n").skip(1).map(|text| serde_saphyr::from_str(text).unwrap()).collect()
}

#[tokio::test]
async fn what_is_printed_is_applied_without_a_warning_and_again_without_a_change() {
    let cluster = TestCluster::start().unwrap();
    let client = cluster.client().await.unwrap();
    let kinds: Api<CustomResourceDefinition> = Api::all(client.clone());
    let printed = printed();
    assert_eq!(printed.len(), 10);
    let mut versions = Vec::new();
    for round in 0..2 {
        for definition in &printed {
            let name = definition["metadata"]["name"].as_str().unwrap();
            let answer = apply_definition(&client, definition).await;
            let warnings: Vec<_> = answer.headers().get_all("warning").iter().collect();
            assert!(answer.status().is_success() && warnings.is_empty(), "{name}: {answer:?}");
            let served = await_condition(kinds.clone(), name, conditions::is_crd_established());
            timeout(WAIT_TIMEOUT, Box::pin(served))
                .await
                .unwrap_or_else(|_| panic!("{name} is not served"))
                .unwrap();
            let there = kinds.get(name).await.unwrap();
            let stated: Vec<_> =
                there.status.iter().flat_map(|status| status.conditions.iter().flatten()).collect();
            let is = |kind: &str| stated.iter().find(|one| one.type_ == kind).map(|one| one.status.as_str());
            assert_eq!((is("NamesAccepted"), is("NonStructuralSchema")), (Some("True"), None), "{stated:?}");
            match round {
                0 => versions.push(there.resource_version()),
                _ => assert!(versions.contains(&there.resource_version()), "{name} was written again"),
            }
        }
    }
}
