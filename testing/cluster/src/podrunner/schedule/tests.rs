use serde_json::{Value, json};

use super::*;

fn node(name: &str, gpus: u32, labels: Value, taints: Value) -> Node {
    let node = json!({
        "metadata": { "name": name, "labels": labels },
        "spec": { "taints": taints },
        "status": { "allocatable": { "nvidia.com/gpu": gpus.to_string(), "memory": "64Gi" } },
    });
    serde_json::from_value(node).unwrap()
}

fn asking(gpus: u32, spec: Value) -> Pod {
    let container =
        json!({ "name": "engine", "resources": { "limits": { "nvidia.com/gpu": gpus.to_string() } } });
    let mut pod = json!({ "metadata": { "name": "p" }, "spec": { "containers": [container] } });
    for (key, value) in spec.as_object().unwrap() {
        pod["spec"][key] = value.clone();
    }
    serde_json::from_value(pod).unwrap()
}

fn placed(gpus: u32, node: &str, phase: &str) -> Pod {
    let mut pod = asking(gpus, json!({ "nodeName": node }));
    pod.status.get_or_insert_default().phase = Some(phase.to_owned());
    pod
}

#[test]
fn a_node_is_full_until_a_pod_on_it_is_terminal() {
    let nodes = [node("a", 2, json!({}), json!([])), node("b", 1, json!({}), json!([]))];
    let chosen = |placed: &[&Pod]| choose_node(&asking(2, json!({})), nodes.iter(), placed);
    assert_eq!(chosen(&[]), Ok("a".to_owned()));
    let refused = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu.";
    assert_eq!(chosen(&[&placed(1, "a", "Running")]), Err(refused.to_owned()));
    // A pending Pod with a node already holds its units.
    assert_eq!(chosen(&[&placed(1, "a", "Pending")]), Err(refused.to_owned()));
    for phase in ["Succeeded", "Failed"] {
        assert_eq!(chosen(&[&placed(1, "a", phase)]), Ok("a".to_owned()));
    }
}

#[test]
fn the_node_with_the_most_room_wins_and_then_the_first() {
    let nodes = ["c", "b", "a"].map(|name| node(name, 4, json!({}), json!([])));
    let chosen = |placed: &[&Pod]| choose_node(&asking(1, json!({})), nodes.iter(), placed).unwrap();
    assert_eq!(chosen(&[]), "a");
    let (one, two) = (placed(1, "a", "Running"), placed(2, "b", "Running"));
    assert_eq!(chosen(&[&one, &two]), "c");
    assert_eq!(chosen(&[&one, &two, &placed(3, "c", "Running")]), "a");
}

#[test]
fn a_pod_goes_where_those_are_that_it_prefers() {
    let nodes = ["a", "b"].map(|name| node(name, 2, json!({}), json!([])));
    let prefer = json!([{ "weight": 50, "podAffinityTerm": {
        "topologyKey": "kubernetes.io/hostname", "labelSelector": { "matchLabels": { "app": "x", "asleep": "true" } } } }]);
    let own = asking(
        1,
        json!({ "affinity": { "podAffinity": { "preferredDuringSchedulingIgnoredDuringExecution": prefer } } }),
    );
    let there = |labels: Value| {
        let mut pod = placed(0, "b", "Running");
        pod.metadata.labels = serde_json::from_value(labels).unwrap();
        pod
    };
    let chosen = |other: Pod| choose_node(&own, nodes.iter(), &[&other]).unwrap();
    assert_eq!(chosen(there(json!({ "app": "x", "asleep": "true" }))), "b");
    assert_eq!(chosen(there(json!({ "app": "x", "asleep": "false" }))), "a");
    let mut stranger = there(json!({ "app": "x", "asleep": "true" }));
    stranger.metadata.namespace = Some("another".to_owned());
    assert_eq!(chosen(stranger), "a");
    // A preference never overrides a requirement.
    let full = [&there(json!({ "app": "x", "asleep": "true" })), &placed(2, "b", "Running")];
    assert_eq!(choose_node(&own, nodes.iter(), &full).unwrap(), "a");
}

#[test]
fn a_pod_goes_to_the_node_with_the_labels_that_it_prefers() {
    let labels = [json!({}), json!({ "warm": "true" }), json!({ "warm": "true", "fast": "true" })];
    let names = ["a", "b", "c"];
    let nodes: Vec<Node> =
        names.iter().zip(labels).map(|(name, labels)| node(name, 2, labels, json!([]))).collect();
    let prefers = |terms: &[(i32, &str)]| {
        let term = |(weight, key): &(i32, &str)| {
            let labels = json!([{ "key": key, "operator": "In", "values": ["true"] }]);
            json!({ "weight": weight, "preference": { "matchExpressions": labels } })
        };
        let terms: Vec<Value> = terms.iter().map(term).collect();
        let affinity = json!({ "preferredDuringSchedulingIgnoredDuringExecution": terms });
        asking(1, json!({ "affinity": { "nodeAffinity": affinity } }))
    };
    let chosen = |pod: &Pod, placed: &[&Pod]| choose_node(pod, nodes.iter(), placed).unwrap();
    assert_eq!(chosen(&prefers(&[(1, "absent")]), &[]), "a");
    assert_eq!(chosen(&prefers(&[(1, "warm")]), &[]), "b");
    assert_eq!(chosen(&prefers(&[(1, "warm"), (1, "fast")]), &[]), "c");
    // A preference outweighs free units, and never overrides a requirement.
    assert_eq!(chosen(&prefers(&[(1, "fast")]), &[&placed(1, "c", "Running")]), "c");
    assert_eq!(chosen(&prefers(&[(1, "fast")]), &[&placed(2, "c", "Running")]), "a");
}

#[test]
fn selectors_affinity_and_taints_keep_a_pod_away_and_say_so() {
    let gpu = node("gpu", 1, json!({ "pool": "x", "rank": "7" }), json!([]));
    let tainted =
        [node("t", 1, json!({}), json!([{ "key": "gpu", "value": "yes", "effect": "NoSchedule" }]))];
    let nodes = [gpu];
    let fits = |spec: Value| choose_node(&asking(1, spec), nodes.iter(), &[]);
    assert!(fits(json!({ "nodeSelector": { "pool": "x" } })).is_ok());
    let refused = fits(json!({ "nodeSelector": { "pool": "y" } })).unwrap_err();
    assert_eq!(refused, "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.");
    let affinity = |kind: &str, key: &str, operator: &str, values: &[&str]| {
        let wanted = json!([{ "key": key, "operator": operator, "values": values }]);
        let required = json!({ "nodeSelectorTerms": [{ kind: wanted }] });
        json!({ "affinity": { "nodeAffinity": { "requiredDuringSchedulingIgnoredDuringExecution": required } } })
    };
    for (kind, key, operator, values, expected) in [
        ("matchExpressions", "pool", "In", &["x", "z"][..], true),
        ("matchExpressions", "pool", "NotIn", &["x"], false),
        ("matchExpressions", "pool", "Exists", &[], true),
        ("matchExpressions", "absent", "DoesNotExist", &[], true),
        ("matchExpressions", "rank", "Gt", &["6"], true),
        ("matchExpressions", "rank", "Lt", &["7"], false),
        ("matchFields", "metadata.name", "In", &["gpu"], true),
        ("matchFields", "metadata.name", "In", &["other"], false),
    ] {
        let chosen = fits(affinity(kind, key, operator, values));
        assert_eq!(chosen.is_ok(), expected, "{key} {operator} {values:?}: {chosen:?}");
    }

    let fits = |spec: Value| choose_node(&asking(1, spec), tainted.iter(), &[]);
    assert_eq!(
        fits(json!({})).unwrap_err(),
        "0/1 nodes are available: 1 node(s) had untolerated taint {gpu: yes}."
    );
    for toleration in [
        json!({ "key": "gpu", "value": "yes" }),
        json!({ "key": "gpu", "operator": "Exists", "effect": "NoSchedule" }),
        json!({ "operator": "Exists" }),
    ] {
        assert!(fits(json!({ "tolerations": [toleration] })).is_ok(), "{toleration}");
    }
    assert!(fits(json!({ "tolerations": [{ "key": "gpu", "value": "no" }] })).is_err());
}

#[test]
fn init_containers_share_what_the_others_hold() {
    let limits = |count: u32| json!({ "limits": { "nvidia.com/gpu": count.to_string() } });
    let spec = |once: u32, sidecar: u32, main: u32| {
        let spec = json!({
            "initContainers": [
                { "name": "once", "resources": limits(once) },
                { "name": "sidecar", "restartPolicy": "Always", "resources": limits(sidecar) },
            ],
            "containers": [{ "name": "main", "resources": limits(main) }],
        });
        demand(&serde_json::from_value(spec).unwrap()).get("nvidia.com/gpu").copied().unwrap_or_default()
    };
    assert_eq!((spec(1, 1, 2), spec(5, 1, 2), spec(0, 0, 0)), (3, 5, 0));
}
