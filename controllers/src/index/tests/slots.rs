//! Tests pools with slots, whose accelerators the decisions pick.

use rouse::{
    model::{AcceleratorId, AcceleratorRequirement},
    pairing::ids::ProviderMode,
    units::Bytes,
};
use rouse_config::SleepApi;

use super::*;

/// A pool `p` with four slots on each accelerator, unless the fields say otherwise.
fn slot_pool(fields: Value) -> IndexedObject {
    pool("p", with(json!({"slots": 4, "resource": "rouse.dev/h100"}), fields))
}

/// A node of the pool `p`. Its allocatable slots are those that no Pod has at present.
fn slot_node(name: &str) -> IndexedObject {
    let mut node = labelled(name, json!({"inference-pool": "p"}), json!(null));
    let IndexedObject::Node(object) = &mut node else { panic!("{node:?}") };
    let status = object.status.as_mut().unwrap();
    let allocatable = serde_json::from_value(json!({"rouse.dev/h100": "1"})).unwrap();
    status.allocatable = Some(allocatable);
    node
}

/// The accelerators that a node's agent lists: UUID, capacity and health, with their indices. An agent of an earlier
/// version does not list their slots.
fn agent(node: &str, accelerators: &[(&str, &str, bool)]) -> IndexedObject {
    let listed = (0..).zip(accelerators).map(|(index, (uuid, capacity, healthy))| {
        json!({"uuid": uuid, "index": index, "capacity": capacity, "healthy": healthy})
    });
    listing(node, listed.collect())
}

/// Two healthy accelerators of 80 GiB, which a node's agent offers by this configuration with so many slots.
fn agent_with_slots(node: &str, configuration: &str, slots: u32) -> IndexedObject {
    let listed = [0, 1].map(|index| {
        json!({
            "uuid": format!("GPU-{node}-{index}"), "index": index, "capacity": "80Gi", "healthy": true,
            "configuration": configuration, "slots": slots,
        })
    });
    listing(node, listed.into())
}

fn listing(node: &str, listed: Vec<Value>) -> IndexedObject {
    let object: AcceleratorNode = serde_json::from_value(json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "AcceleratorNode",
        "metadata": metadata(None, node, 1),
        "spec": {},
        "status": {"accelerators": listed},
    }))
    .unwrap();
    object.into()
}

/// The accelerators as text: UUID, node, and capacity in GiB.
fn accelerators(pool: &ResolvedPool) -> Vec<String> {
    let all = pool.slot_accelerators.iter();
    all.map(|(id, accelerator)| format!("{id} {} {}", accelerator.node, accelerator.capacity.0 >> 30))
        .collect()
}

#[test]
fn the_accelerators_with_slots_are_those_that_node_agents_list() {
    let resolved = settled([
        slot_pool(json!({})),
        slot_node("a"),
        agent("a", &[("GPU-1", "79Gi", true), ("GPU-2", "79Gi", false)]),
        slot_node("b"),
        agent("b", &[("GPU-3", "40Gi", true)]),
        slot_node("c"),
        node("d", "p", json!("8")),
    ]);
    let found = &resolved.pools["p"];
    assert_eq!(found.problem, None);
    assert_eq!(accelerators(found), ["GPU-1 a 79", "GPU-2 a 0", "GPU-3 b 40"]);
    let sums = (found.accelerators, found.total, found.units);
    assert_eq!(sums, (2, Some(Bytes::gib(119)), Some(8)), "not what is allocatable now");
    assert_eq!(found.slots, Some(PoolSlots { configuration: "h100".into(), each: 4 }));
    let unlisted =
        ["c", "d"].map(|node| format!("node {node}: its node agent has not listed its accelerators"));
    assert_eq!(found.warnings, unlisted, "labels do not say which accelerators there are");
    let indices = [("GPU-1", 0), ("GPU-2", 1)].map(|(id, index)| (AcceleratorId::from(id), index));
    assert_eq!(resolved.nodes["a"].indices, BTreeMap::from(indices));
    assert_eq!((resolved.nodes["a"].slots, resolved.nodes["c"].accelerators), (Some(4), 0));
}

#[test]
fn no_accelerator_has_more_slots_than_its_nodes_agent_offers_and_the_pool_says_what_to_change() {
    let mut index = ClusterIndex::new(SCOPE);
    for object in [
        slot_pool(json!({})),
        slot_node("few"),
        agent_with_slots("few", "h100", 2),
        slot_node("more"),
        agent_with_slots("more", "h100", 9),
        slot_node("other"),
        agent_with_slots("other", "gpu", 4),
        slot_node("silent"),
        agent("silent", &[("GPU-silent-0", "80Gi", true)]),
    ] {
        index.apply(object);
    }
    let slots = |pool: &ResolvedPool| {
        let all = pool.slot_accelerators.values();
        all.map(|accelerator| (accelerator.node.clone(), accelerator.slots)).collect::<BTreeMap<_, _>>()
    };
    let of = |few: u32, other: u32| {
        let all = [("few", few), ("more", 4), ("other", other), ("silent", 4)];
        BTreeMap::from(all.map(|(node, slots)| (node.to_owned(), slots)))
    };
    let resolved = index.resolved();
    let found = &resolved.pools["p"];
    assert_eq!(slots(found), of(2, 0));
    assert_eq!((found.units, found.total), (Some(16), Some(Bytes::gib(560))));
    let [few, other] = found.warnings.as_slice() else { panic!("{:?}", found.warnings) };
    let raise =
        "node few: its accelerators have 2 of 4 slots each: raise the capacity of the DeviceConfiguration";
    assert!(few.starts_with(raise), "{few}");
    let correct =
        "node other: its accelerators are offered by the DeviceConfiguration 'gpu', and the pool's resource";
    assert!(other.starts_with(correct), "{other}");
    assert!(resolved.nodes["few"].warning.as_ref().is_some_and(|warning| warning.contains("2 of 4 slots")));

    index.apply(agent_with_slots("few", "h100", 4));
    index.apply(agent_with_slots("other", "h100", 3));
    let resolved = index.resolved();
    assert_eq!(slots(&resolved.pools["p"]), of(4, 3));
    assert_eq!(resolved.pools["p"].warnings.len(), 1);
}

#[test]
fn an_accelerator_says_whether_its_node_takes_pods() {
    let takes_pods = |spec: Value, conditions: Value| {
        let IndexedObject::Node(mut node) = slot_node("a") else { panic!("a node is a Node") };
        node.spec = serde_json::from_value(spec).unwrap();
        node.status.as_mut().unwrap().conditions = serde_json::from_value(conditions).unwrap();
        let resolved = settled([
            slot_pool(json!({})),
            IndexedObject::Node(node),
            agent("a", &[("GPU-1", "79Gi", true)]),
        ]);
        resolved.pools["p"].slot_accelerators[&AcceleratorId::from("GPU-1")].takes_pods
    };
    let ready = |status: &str| json!([{"type": "Ready", "status": status}]);
    assert!(takes_pods(json!({}), json!(null)) && takes_pods(json!({}), ready("True")));
    assert!(!takes_pods(json!({"unschedulable": true}), ready("True")));
    assert!(!takes_pods(json!({}), ready("Unknown")) && !takes_pods(json!({}), ready("False")));
}

#[test]
fn a_pool_with_slots_waits_until_a_node_agent_lists_accelerators() {
    for fields in [json!({}), json!({"memory": "80Gi"})] {
        let resolved = settled([slot_pool(fields.clone()), node("a", "p", json!("8"))]);
        let (reason, text) = trouble(&resolved, "p");
        assert_eq!(reason, "NoAccelerators");
        assert!(text.contains("run the node agent"), "{text}");
        let resolved =
            settled([slot_pool(fields.clone()), slot_node("a"), agent("a", &[("GPU-1", "80Gi", false)])]);
        assert_eq!(trouble(&resolved, "p").0, "NoAccelerators", "it is faulty");
        assert_eq!(accelerators(&resolved.pools["p"]), ["GPU-1 a 0"]);
        assert_eq!(trouble(&settled([slot_pool(fields)]), "p").0, "NoNodes");
    }
}

#[test]
fn a_cap_on_the_memory_of_all_accelerators_with_slots_is_a_cap_on_each() {
    let capped = |memory: &str| {
        let listed = agent("a", &[("GPU-1", "80Gi", true), ("GPU-2", "40Gi", true)]);
        let resolved = settled([slot_pool(json!({"memory": memory})), slot_node("a"), listed]);
        (resolved.pools["p"].total, accelerators(&resolved.pools["p"]))
    };
    let each = |first: u64, second: u64| vec![format!("GPU-1 a {first}"), format!("GPU-2 a {second}")];
    assert_eq!(capped("60Gi"), (Some(Bytes::gib(60)), each(40, 20)));
    assert_eq!(capped("1Ti"), (Some(Bytes::gib(120)), each(80, 40)));
}

#[test]
fn an_accelerator_that_two_nodes_list_counts_once() {
    let lists = [agent("a", &[("GPU-1", "80Gi", true)]), agent("b", &[("GPU-1", "80Gi", true)])];
    let objects = [slot_pool(json!({})), slot_node("a"), slot_node("b")];
    let resolved = settled(objects.into_iter().chain(lists));
    assert_eq!(accelerators(&resolved.pools["p"]), ["GPU-1 a 80"]);
    assert_eq!(resolved.pools["p"].warnings, ["node b: GPU-1, which node a lists, too"]);
}

#[test]
fn a_model_takes_slots_where_its_pool_has_a_device_configuration_and_several_slots() {
    let of = |fields: Value| {
        let model = model("m", json!({"nodeSelector": {"inference-pool": "p"}, "accelerators": 2}));
        let resolved = settled([slot_pool(fields), slot_node("a"), model]);
        let configuration = resolved.pools["p"].terms.as_ref().and_then(|terms| terms.slot_configuration());
        let requirement = resolved.served[&object("m")].spec.accelerators.clone();
        (requirement, configuration.map(|name| name.to_string()))
    };
    let slots = AcceleratorRequirement::Slots { pool: "p".into(), count: 2 };
    let whole = AcceleratorRequirement::InPool { pool: "p".into(), count: 2 };
    assert_eq!(of(json!({})), (slots.clone(), Some("h100".to_owned())));
    assert_eq!(of(json!({"slots": 1})), (whole.clone(), None));
    assert_eq!(of(json!({"resource": "nvidia.com/gpu"})), (whole.clone(), None), "its plugin shares them");
    assert_eq!(of(json!({"resource": "rouse.dev/"})), (whole, None));
    assert_eq!(of(json!({"meterLag": "soon"})), (slots, None), "a mistake elsewhere moves no engine");
}

#[test]
fn a_pool_that_cannot_be_read_still_has_slots() {
    let mut index = ClusterIndex::new(SCOPE);
    let model = model("m", json!({"nodeSelector": {"inference-pool": "p"}}));
    for object in [slot_pool(json!({})), slot_node("a"), agent("a", &[("GPU-1", "80Gi", true)]), model] {
        index.apply(object);
    }
    let before = index.resolved().served[&object("m")].spec.clone();
    let metadata = ObjectMeta { name: Some("p".into()), ..ObjectMeta::default() };
    index.unreadable(ObjectKind::Pool, &metadata, "slots is no number");
    let resolved = index.resolved();
    assert!(resolved.pools["p"].problem.is_some());
    assert_eq!(resolved.served[&object("m")].spec, before, "its engines stay");
}

#[test]
fn the_decisions_put_engines_of_mode_dual_pods_to_sleep_only_with_slots() {
    let containers = json!([{"name": "vllm", "command": ["vllm", "serve"], "args": ["--enable-sleep-mode"]}]);
    let in_pool = |name: &str, pool: &str| {
        let spec = json!({
            "mode": "dualPods",
            "nodeSelector": {"inference-pool": pool},
            "containerImage": null,
            "template": {"spec": {"containers": containers}},
            "engine": {"kind": "vllm", "container": "vllm"},
        });
        model(name, spec)
    };
    for (mode, slots_sleep) in [
        (ProviderMode::Sleep, true),
        (ProviderMode::Launcher, true),
        // Pairing deletes such an engine with its requester.
        (ProviderMode::Plain, false),
    ] {
        let policy = ConversionPolicy { dual_pods: Some(mode), ..SCOPE.policy };
        let mut index = ClusterIndex::new(WatchScope { policy, ..SCOPE });
        let objects = [
            slot_pool(json!({})),
            slot_node("a"),
            pool("default", json!({})),
            node("n1", "default", json!("8")),
            in_pool("shared", "p"),
            in_pool("alone", "default"),
        ];
        objects.into_iter().for_each(|object| index.apply(object));
        let resolved = index.resolved();
        for (name, sleeps) in [("shared", slots_sleep), ("alone", false)] {
            let served = &resolved.served[&object(name)];
            let api = if sleeps { SleepApi::Vllm } else { SleepApi::None };
            assert_eq!(
                (served.spec.can_sleep, served.variants[0].engine.sleep),
                (sleeps, api),
                "{mode:?}: {name}"
            );
        }
    }
}

#[test]
fn a_start_of_dual_pods_has_its_accelerators_to_itself_for_pairing_executes_nothing_beside_it() {
    let explicit = |mode: &str, pool: &str| {
        let containers = json!([{
            "name": "vllm",
            "command": ["vllm", "serve"],
            "args": ["--enable-sleep-mode", "--kv-cache-memory-bytes=8000000000"],
        }]);
        let spec = json!({
            "mode": mode,
            "nodeSelector": {"inference-pool": pool},
            "containerImage": null,
            "template": {"spec": {"containers": containers}},
            "engine": {"kind": "vllm", "container": "vllm"},
        });
        let policy = ConversionPolicy { dual_pods: Some(ProviderMode::Sleep), ..SCOPE.policy };
        let mut index = ClusterIndex::new(WatchScope { policy, ..SCOPE });
        let objects = [
            slot_pool(json!({})),
            slot_node("a"),
            super::pool("default", json!({})),
            node("n1", "default", json!("8")),
            model("m", spec),
        ];
        objects.into_iter().for_each(|object| index.apply(object));
        index.resolved().served[&object("m")].spec.explicit_memory
    };
    assert!(!explicit("dualPods", "p"));
    assert!(explicit("dualPods", "default") && explicit("deployment", "p"));
}
