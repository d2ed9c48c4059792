use k8s_openapi::api::core::v1::Pod;
use rouse::warmup::ActionHash;

use super::*;
use crate::crd::template::PodTemplateJson;

fn action() -> ActionTemplate {
    let template = json!({
        "metadata": {"labels": {"app": "copy"}, "annotations": {"note": "x"}},
        "spec": {
            "restartPolicy": "OnFailure", "containers": [{"name": "c", "image": "tools:1"}],
            "imagePullSecrets": [{"name": "own"}, {"name": "b"}],
            "tolerations": [{"key": "gpu", "operator": "Exists"}],
        },
    });
    let Value::Object(template) = template else { panic!() };
    ActionTemplate { template: PodTemplateJson::from(template), hash: ActionHash::from("h") }
}

fn built(item: &WarmupItem, mounted_by: Option<&str>) -> Option<Pod> {
    let actions = NodeActions {
        images: BTreeSet::new(),
        pull_secrets: ["a", "b"].map(str::to_owned).into(),
        action: Some(action()),
    };
    let exists = |key: &str| Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        ..Toleration::default()
    };
    let parts = WarmupPodParts {
        warmup: &ObjectName::new("chat", "w"),
        uid: "u",
        node: &NodeName::from("a"),
        item,
        generation: 3,
        items_hash: 7,
        attempt: 2,
        epoch: 5,
        actions: &actions,
        tolerations: &[exists("gpu"), exists("disk")],
        mounted_by,
    };
    pod(&parts).map(|pod| serde_json::from_value(pod).unwrap())
}

#[test]
fn the_pod_of_an_image_is_read_back_as_what_it_was_built_from() {
    let item = WarmupItem::Image(ImageName::from("x:1"));
    let pod = built(&item, None).unwrap();
    let (name, facts) = super::super::pod_facts::pod_facts(&pod).unwrap();
    assert!(name.as_str().starts_with("chat/w-") && name.as_str().ends_with("-2"), "{name}");
    assert_eq!((facts.warmup.as_str(), facts.node.as_str(), &facts.item), ("chat/w", "a", &item));
    assert_eq!((facts.generation, facts.items_hash, facts.attempt), (3, 7, 2));
    let owner = &pod.metadata.owner_references.as_ref().unwrap()[0];
    assert_eq!((owner.uid.as_str(), owner.controller, owner.block_owner_deletion), ("u", Some(true), None));
    let spec = pod.spec.unwrap();
    assert_eq!(spec.automount_service_account_token, Some(false));
    let [container] = &spec.containers[..] else { panic!() };
    assert_eq!((container.image.as_deref(), container.resources.is_none()), (Some("x:1"), true));
    assert_eq!(container.command.as_deref(), Some(&["/rouse-warmup".to_owned()][..]));
    assert_eq!(
        spec.termination_grace_period_seconds,
        Some(1),
        "the Pod exists until its kubelet has ended it"
    );
    let secrets: Vec<_> = spec.image_pull_secrets.into_iter().flatten().map(|secret| secret.name).collect();
    assert_eq!(secrets, ["a", "b"]);
    assert_eq!(spec.tolerations.map(|all| all.len()), Some(2));
}

#[test]
fn a_mounted_image_runs_the_stub_which_ends_at_once() {
    let of = |image: &str| {
        built(&WarmupItem::Image(ImageName::from(image)), Some("stub:1")).unwrap().spec.unwrap()
    };
    let spec = of("x:1");
    let [container] = &spec.containers[..] else { panic!() };
    assert_eq!((container.image.as_deref(), &container.command), (Some("stub:1"), &None));
    assert_eq!(container.args.as_deref(), Some(&["--version".to_owned()][..]));
    let source = spec.volumes.unwrap()[0].image.clone().unwrap();
    assert_eq!(source.reference.as_deref(), Some("x:1"));
    assert!(of("stub:1").volumes.is_none(), "its container pulls the image of the stub");
}

#[test]
fn the_pod_of_an_action_is_the_users_with_what_places_it() {
    let item = WarmupItem::Action(ActionHash::from("h"));
    let pod = built(&item, None).unwrap();
    assert_eq!(super::super::pod_facts::pod_facts(&pod).unwrap().1.item, item);
    let labels = pod.metadata.labels.as_ref().unwrap();
    assert_eq!((labels["app"].as_str(), labels[MANAGED].as_str()), ("copy", ROUSE));
    assert_eq!(pod.metadata.annotations.as_ref().unwrap()["note"], "x");
    let spec = pod.spec.unwrap();
    assert_eq!(spec.restart_policy.as_deref(), Some("OnFailure"));
    let secrets: Vec<_> = spec.image_pull_secrets.into_iter().flatten().map(|secret| secret.name).collect();
    assert_eq!(secrets, ["own", "b", "a"]);
    assert_eq!(spec.tolerations.map(|all| all.len()), Some(2));
    assert!(spec.affinity.is_some());
    assert!(built(&WarmupItem::Action(ActionHash::from("former")), None).is_none());
}

#[test]
fn a_name_is_short_and_valid_and_differs_with_everything_that_it_stands_for() {
    let item = WarmupItem::Image(ImageName::from("x:1"));
    let of = |warmup: &str, uid: &str, node: &str, generation, attempt| {
        name(&ObjectName::new("chat", warmup), uid, &NodeName::from(node), &item, generation, attempt)
    };
    let first = of("w", "u", "a", 1, 0);
    assert_eq!(first, of("w", "u", "a", 1, 0));
    let others =
        [of("w", "v", "a", 1, 0), of("w", "u", "b", 1, 0), of("w", "u", "a", 2, 0), of("w", "u", "a", 1, 1)];
    assert!(others.iter().all(|other| *other != first), "{others:?}");
    let long = format!("{}.{}", "x".repeat(34), "y".repeat(200));
    let cut = of(&long, "u", "a", 1, u32::MAX);
    assert!(cut.len() <= 63 && cut.starts_with(&format!("{}-", "x".repeat(34))), "{cut}");
}

#[test]
fn every_container_of_a_template_has_an_image_to_pull() {
    let template =
        json!({"spec": {"initContainers": [{"image": "a"}], "containers": [{"image": "b"}, {"name": "c"}]}});
    let Value::Object(template) = template else { panic!() };
    assert_eq!(images(&template), BTreeSet::from(["a", "b"].map(ImageName::from)));
}
