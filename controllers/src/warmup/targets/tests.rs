use rouse::warmup::ImageName;
use serde_json::json;

use super::*;
use crate::{
    convert::ConversionPolicy,
    crd::{AcceleratorPool, InferenceModel, ledger::ObjectName},
    index::{ClusterIndex, WatchScope},
};

fn with_images(images: &[&str]) -> NodeActions {
    NodeActions { images: images.iter().copied().map(ImageName::from).collect(), ..NodeActions::default() }
}

fn node(labels: &[(&str, &str)]) -> CandidateNode {
    let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    CandidateNode { labels, is_schedulable: true, reserved: Bytes::ZERO }
}

fn cluster() -> BTreeMap<NodeName, CandidateNode> {
    let gpu = |name: &str| (NodeName::from(name), node(&[("inference-pool", "default")]));
    [gpu("a"), gpu("b"), gpu("c"), (NodeName::from("cpu"), node(&[]))].into()
}

fn resolved() -> Arc<Resolved> {
    let policy = ConversionPolicy { any_backend: false, dual_pods: None };
    let mut index = ClusterIndex::new(WatchScope { policy, nodes: true, namespaces: 1 });
    let pool: AcceleratorPool = serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorPool", "metadata": {"name": "default"},
        "spec": {"nodeSelector": {"inference-pool": "default"}, "memory": "640Gi", "taint": "gpu"},
    }))
    .unwrap();
    index.apply(pool);
    for name in ["a", "b", "c"] {
        let node: k8s_openapi::api::core::v1::Node = serde_json::from_value(
            json!({"metadata": {"name": name, "labels": {"inference-pool": "default"}}}),
        )
        .unwrap();
        index.apply(node);
    }
    let model: InferenceModel = serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "InferenceModel",
        "metadata": {"name": "m", "namespace": "chat", "uid": "u"},
        "spec": {"modelName": "org/m", "memory": "40Gi", "containerImage": "vllm:1"},
    }))
    .unwrap();
    index.apply(model);
    index.resolved()
}

struct Inputs {
    nodes: BTreeMap<NodeName, CandidateNode>,
    group_pods: Vec<GroupPod>,
    resolved: Arc<Resolved>,
    former: BTreeSet<NodeName>,
}

impl Inputs {
    fn new() -> Self {
        Self { nodes: cluster(), group_pods: Vec::new(), resolved: Arc::default(), former: BTreeSet::new() }
    }

    fn of(&self, target: &WarmupTarget) -> ResolvedTargets {
        let Self { nodes, group_pods, resolved, former } = self;
        targets(target, TargetInputs { nodes, group_pods, resolved, stub_image: "stub:1", former })
    }

    /// Whether a change of the node concerns the targets that were found before.
    fn concern(&self, target: &WarmupTarget, before: &ResolvedTargets, changed: &str) -> bool {
        let changed = NodeName::from(changed);
        let nodes = self.nodes.get(&changed).map(|node| (changed.clone(), node.clone()));
        let nodes: BTreeMap<_, _> = nodes.into_iter().collect();
        let Self { group_pods, resolved, former, .. } = self;
        let inputs = TargetInputs { nodes: &nodes, group_pods, resolved, stub_image: "stub:1", former };
        concerned(target, &[&changed], before, inputs)
    }
}

fn names(found: &ResolvedTargets) -> Vec<&str> {
    let WarmupTargets::Nodes(nodes) = &found.targets else { panic!("{found:?}") };
    assert!(nodes.keys().eq(found.actions.keys()));
    nodes.keys().map(NodeName::as_str).collect()
}

#[test]
fn names_and_a_selector_are_a_union_and_a_named_node_need_not_exist() {
    let target = |names: &[&str], selector: &[(&str, &str)]| WarmupTarget::Nodes {
        names: names.iter().copied().map(NodeName::from).collect(),
        selector: node(selector).labels,
        actions: with_images(&["x:1"]),
    };
    let inputs = Inputs::new();
    assert_eq!(
        names(&inputs.of(&target(&["gone"], &[("inference-pool", "default")]))),
        ["a", "b", "c", "gone"]
    );
    assert_eq!(names(&inputs.of(&target(&["cpu"], &[]))), ["cpu"]);
    let nowhere = inputs.of(&target(&[], &[("inference-pool", "none")]));
    assert!(matches!(nowhere.targets, WarmupTargets::Pending { .. }), "{nowhere:?}");
}

#[test]
fn a_node_of_several_roles_has_what_all_of_them_ask_for() {
    let roles = [("prefill", with_images(&["x:1"])), ("decode", with_images(&["y:1"]))];
    let roles = roles.into_iter().map(|(role, actions)| (role.to_owned(), actions)).collect();
    let target = WarmupTarget::Group { group: ObjectName::new("chat", "g"), roles };
    let mut inputs = Inputs::new();
    assert!(matches!(inputs.of(&target).targets, WarmupTargets::Pending { .. }));
    let toleration = |key: &str, seconds| Toleration {
        key: Some(key.to_owned()),
        operator: Some("Exists".to_owned()),
        toleration_seconds: seconds,
        ..Toleration::default()
    };
    let pod = |node: &str, role: &str| GroupPod {
        node: node.into(),
        role: role.to_owned(),
        tolerations: vec![toleration("gpu", None), toleration("node.kubernetes.io/not-ready", Some(300))],
    };
    inputs.group_pods = vec![
        pod("a", "prefill"),
        pod("b", "prefill"),
        pod("b", "decode"),
        pod("c", "router"),
        pod("gone", "decode"),
    ];
    let found = inputs.of(&target);
    assert_eq!(names(&found), ["a", "b"]);
    assert_eq!(found.actions["b"].images, with_images(&["x:1", "y:1"]).images);
    assert_eq!(found.tolerations, [toleration("gpu", None)]);
    assert_eq!(seen_tolerations(&found.tolerations)[0].key.as_deref(), Some("gpu"));
}

#[test]
fn a_model_has_the_nodes_of_its_pool_with_the_images_of_its_engines_and_of_the_stub() {
    let mut inputs = Inputs::new();
    let target = |nodes| WarmupTarget::Model { model: ObjectName::new("chat", "m"), nodes };
    assert!(matches!(inputs.of(&target(None)).targets, WarmupTargets::Pending { .. }));
    inputs.resolved = resolved();
    let found = inputs.of(&target(None));
    assert_eq!(names(&found), ["a", "b", "c"]);
    assert_eq!(found.actions["a"].images, with_images(&["vllm:1", "stub:1"]).images);
    let keys: Vec<_> = found.tolerations.iter().filter_map(|toleration| toleration.key.as_deref()).collect();
    assert_eq!(keys, ["nvidia.com/gpu", "gpu"]);
    // Nodes that take Pods come first, and of those the ones that were chosen before.
    assert_eq!(names(&inputs.of(&target(Some(1)))), ["a"]);
    inputs.former = BTreeSet::from(["c".into()]);
    assert_eq!(names(&inputs.of(&target(Some(2)))), ["a", "c"]);
    inputs.nodes.get_mut("c").unwrap().is_schedulable = false;
    assert_eq!(names(&inputs.of(&target(Some(2)))), ["a", "b"]);
}

#[test]
fn a_node_concerns_a_model_if_an_engine_may_start_there_or_might_before() {
    let mut inputs = Inputs::new();
    inputs.resolved = resolved();
    let target = |nodes| WarmupTarget::Model { model: ObjectName::new("chat", "m"), nodes };
    let (all, one) = (target(None), target(Some(1)));
    let (all_before, one_before) = (inputs.of(&all), inputs.of(&one));
    assert!(!inputs.concern(&all, &all_before, "a") && !inputs.concern(&all, &all_before, "cpu"));
    assert!(inputs.concern(&one, &one_before, "b"), "it may be the better one");
    assert!(!inputs.concern(&one, &one_before, "cpu"));
    inputs.nodes.remove("a");
    assert!(inputs.concern(&all, &all_before, "a") && inputs.concern(&one, &one_before, "a"));
}

#[test]
fn a_node_concerns_a_group_if_it_comes_or_goes_with_one_of_its_pods() {
    let mut inputs = Inputs::new();
    let pod = |node: &str, role: &str| GroupPod {
        node: node.into(),
        role: role.to_owned(),
        tolerations: Vec::new(),
    };
    inputs.group_pods = vec![pod("a", "prefill"), pod("b", "router"), pod("late", "prefill")];
    let roles = [("prefill".to_owned(), with_images(&["x:1"]))].into();
    let target = WarmupTarget::Group { group: ObjectName::new("chat", "g"), roles };
    let before = inputs.of(&target);
    assert_eq!(names(&before), ["a"]);
    assert!(["a", "b", "late"].iter().all(|name| !inputs.concern(&target, &before, name)));
    inputs.nodes.insert("late".into(), node(&[]));
    inputs.nodes.remove("a");
    assert!(["a", "late"].iter().all(|name| inputs.concern(&target, &before, name)));
    let refused = ResolvedTargets::refused("two volumes have one name");
    assert!(inputs.concern(&target, &refused, "b"), "it may have been the node with the conflict");
}
