use serde_json::json;

use super::*;

fn facts() -> WarmupNodeFacts {
    let node = json!({
        "metadata": {"name": "a", "uid": "u1", "labels": {
            "warm.rouse.dev/0123456789abcdef": "rouse", "warm.rouse.dev/fedcba9876543210": "other", "disk": "rouse",
        }},
        "spec": {"unschedulable": true, "taints": [
            {"key": "gpu", "effect": "NoSchedule"}, {"key": "x", "value": "y", "effect": "Later"},
        ]},
        "status": {
            "conditions": [
                {"type": "Ready", "status": "True"}, {"type": "DiskPressure", "status": "False"},
            ],
        },
    });
    node_facts(&serde_json::from_value(node).unwrap(), "rouse")
}

#[test]
fn the_state_of_a_node_is_read_and_labels_of_other_installations_do_not_count() {
    let facts = facts();
    assert_eq!((facts.ready, facts.cordoned, facts.disk_pressure), (true, true, false));
    let taint = NodeTaint { key: "gpu".into(), value: String::new(), effect: TaintEffect::NoSchedule };
    assert_eq!(facts.taints, [taint]);
    assert_eq!(facts.uid, NodeUidKey::new("u1"));
    assert_eq!(facts.labels_warm, BTreeSet::from([WarmSet::from("0123456789abcdef")]));
    let nothing_known = node_facts(&Node::default(), "rouse");
    assert_eq!(nothing_known, WarmupNodeFacts::default());
}

#[test]
fn a_node_mounts_images_from_certain_versions_of_its_kubelet_and_its_runtime_on() {
    let mounts = |kubelet: &str, runtime: &str| {
        let system = NodeSystemInfo {
            kubelet_version: kubelet.to_owned(),
            container_runtime_version: runtime.to_owned(),
            kernel_version: "6.1".to_owned(),
            ..NodeSystemInfo::default()
        };
        let mut node = Node::default();
        node.status.get_or_insert_default().node_info = Some(slim_system(system));
        mounts_images(&node)
    };
    for (kubelet, runtime, expected) in [
        ("v1.36.0", "containerd://2.1.0", true),
        ("v1.37.1-gke.1", "containerd://3.0", true),
        ("v1.36.0", "cri-o://1.36.0", true),
        ("v1.35.9", "containerd://2.1.0", false),
        ("v1.36.0", "containerd://2.0.5", false),
        ("v1.36.0", "containerd://1.7.27-k3s1", false),
        ("v1.36.0", "docker://29.0.0", false),
        ("", "", false),
    ] {
        assert_eq!(mounts(kubelet, runtime), expected, "{kubelet} {runtime}");
    }
    assert!(!mounts_images(&Node::default()), "no kubelet has reported");
}
