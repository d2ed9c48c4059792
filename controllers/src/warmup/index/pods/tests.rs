use serde_json::json;

use super::*;
use crate::warmup::keys;

const NOW: Tick = Tick(1_780_000_000_000);

fn pod(name: &str, owner: &str) -> WatchedObject<Pod> {
    let pod: Pod = serde_json::from_value(json!({
        "metadata": {
            "name": name, "namespace": "chat", "uid": format!("uid of {name}"),
            "labels": {keys::WARMUP: "hash"},
            "annotations": {keys::NAME: "w", keys::NODE: "a", keys::ITEM: "x:1"},
            "ownerReferences": [{"apiVersion": "rouse.dev/v1alpha1", "kind": "Warmup", "name": "w", "uid": owner}],
        },
        "spec": {"nodeName": "a", "containers": [{"name": "image"}]},
    }))
    .unwrap();
    WatchedObject::from(pod)
}

/// Returns the changed Pods, and whether each has the item that its annotations say.
fn changed(pods: &mut WarmupPods) -> Vec<(String, bool)> {
    let image = WarmupItem::Image("x:1".into());
    let all = pods.take_changed().into_iter();
    all.map(|(name, facts)| (name.name, facts.unwrap().item == image)).collect()
}

#[test]
fn a_warmup_that_was_created_again_does_not_inherit_the_pods_of_the_former() {
    let warmup = ObjectName::new("chat", "w");
    let mut pods = WarmupPods::default();
    let objects = vec![pod("old", "u"), pod("new", "v")];
    pods.apply(&Delta::All { namespace: None, objects }, NOW);
    let own = |name: &str| (name.to_owned(), true);
    let surplus = |name: &str| (name.to_owned(), false);
    assert_eq!(changed(&mut pods), [own("new"), own("old")], "which Warmup exists is not known yet");
    pods.set_uid(&warmup, Some("u"));
    assert_eq!(changed(&mut pods), [surplus("new"), own("old")]);
    pods.set_uid(&warmup, Some("u"));
    assert_eq!(changed(&mut pods), []);
    pods.set_uid(&warmup, None);
    pods.set_uid(&warmup, Some("v"));
    assert_eq!(changed(&mut pods), [own("new"), surplus("old")]);
    pods.apply(&Delta::Applied(pod("late", "u")), NOW);
    assert_eq!(changed(&mut pods), [surplus("late")], "a former leader has created it");
}
