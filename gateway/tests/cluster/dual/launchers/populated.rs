//! LauncherPopulationPolicies: launchers that exist before any requester.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt as _, core::DynamicObject, runtime::wait::await_condition};
use rouse_cluster::wait::WAIT_TIMEOUT;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::{
    dual::DualPodsFixture,
    pairs::{annotation, is_ready, label},
};

/// A LauncherPopulationPolicy has launchers created before any requester asks, and unused ones deleted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn basic_launcher_pod_creation() {
    let duo = DualPodsFixture::with_launchers_of("dual-launcher-basic", 2, ", idle: 1s", "").await;
    let own = duo.world.name().to_owned();
    let node = duo.world.runner.node(&format!("{own}-a"));
    let numbers: BTreeMap<_, _> = (0..).zip(node.devices()).map(|(at, (id, _))| (id, at)).collect();
    let map = BTreeMap::from([(node.name().to_owned(), serde_json::to_string(&numbers).unwrap())]);
    duo.map(&map).await;
    let populate = async |gpus: Value, count: u32| {
        let selector = json!({"labelSelector": {"matchLabels": {"inference-pool": own}},
            "allocatableResources": {"nvidia.com/gpu": gpus}});
        let counts = json!([{"launcherConfigName": "launchers", "launcherCount": count}]);
        let spec = json!({"enhancedNodeSelector": selector, "countForLauncher": counts});
        duo.world.object("LauncherPopulationPolicy", "all", spec).await;
    };
    let launchers = async |count: usize| {
        let ready = |_: &[Pod], launchers: &[Pod]| {
            launchers.len() == count
                && launchers.iter().all(|own| is_ready(own) && own.metadata.deletion_timestamp.is_none())
        };
        duo.until_launchers("one", "launchers", ready).await.1
    };
    duo.config("one", "").await;
    populate(json!({"min": "2"}), 2).await;
    let both = launchers(2).await;
    duo.request("one", 1, 1).await;
    let bound = |requesters: &[Pod], launchers: &[Pod]| {
        let [requester] = requesters else { return false };
        let names = |own: &&Pod| label(requester, "dual") == Some(&*own.name_any());
        is_ready(requester)
            && launchers.iter().find(names).is_some_and(|own| label(own, "sleeping") == Some("false"))
    };
    let (requesters, all) = duo.until_launchers("one", "a ready requester", bound).await;
    assert!(annotation(&requesters[0], "accelerators").is_some());
    let uids = |all: &[Pod]| all.iter().map(|own| own.uid().unwrap()).collect::<BTreeSet<_>>();
    assert_eq!(uids(&all), uids(&both), "nobody made another one");
    duo.counted("warm", "one", 1).await;
    let serves = all.iter().find(|own| label(own, "dual").is_some()).unwrap();
    assert_eq!(serves.labels()["serves"], "one");
    assert_eq!(serves.annotations()["example.com/about"], "one");
    assert!(all.iter().all(|own| own.labels()["of"] == "template"));
    populate(json!({"min": "2"}), 1).await;
    assert_eq!(launchers(1).await[0].uid(), serves.uid(), "the one with an engine stays");
    duo.scale("one", 0).await;
    let sleeper = duo.until_unbound("one", 1).await;
    assert_eq!(sleeper.uid(), serves.uid());
    // An invalid policy reports its error, and its launchers stay as they were.
    let policies = duo.objects("LauncherPopulationPolicy");
    let said = async |text: &str| {
        let says = |found: Option<&DynamicObject>| {
            found.is_some_and(|own| {
                own.data["status"]["errors"][0].as_str().unwrap_or_default().contains(text)
            })
        };
        timeout(WAIT_TIMEOUT, await_condition(policies.clone(), "all", says)).await.unwrap().unwrap();
    };
    populate(json!({"min": "3", "max": "2"}), 2).await;
    said("min is greater than max, so no node matches").await;
    assert_eq!(launchers(1).await[0].uid(), serves.uid());
    // No node has this many accelerators, so the policy creates no launcher in place of the deleted one.
    populate(json!({"min": "3"}), 2).await;
    duo.delete(&sleeper).await;
    launchers(0).await;
}
