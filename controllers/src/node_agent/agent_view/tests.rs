use serde_json::{Value, json};

use super::*;
use crate::node_agent::testing::{instance, view_of};

fn me() -> NodeName {
    "a".into()
}

fn sound() -> SeenDevice {
    SeenDevice { healthy: true, ..SeenDevice::default() }
}

/// A view of the shared device `one`, with two slots in this use.
fn lamps(usage: &Value) -> (AgentView, InstanceName) {
    let mut view = view_of(
        "lamps",
        &json!({
            "discovery": {"static": {"devices": [{"id": "one"}]}}, "capacity": 2,
        }),
    );
    view.devices.insert("lamps".into(), BTreeMap::from([("one".to_owned(), sound())]));
    let name = instance_name(&"lamps".into(), "one", None);
    view.apply_instance(Arc::new(lamp(&name, usage)));
    (view, name)
}

fn lamp(name: &InstanceName, usage: &Value) -> DeviceInstance {
    let usage = usage.as_object().unwrap().iter();
    let usage: BTreeMap<String, Value> =
        usage.map(|(number, text)| (format!("{name}-{number}"), text.clone())).collect();
    let mut lamp = instance("lamps", "one", true, &json!({"deviceUsage": usage, "nodes": ["a"]}));
    lamp.spec.capacity = u32::try_from(usage.len()).unwrap();
    lamp
}

/// The health of each device of a plugin's list, without the instance's name.
fn list(view: &AgentView, key: &PluginKey) -> Vec<(String, bool)> {
    let end = |id: &str| id.rsplit_once('-').unwrap().1.to_owned();
    view.list_of(&me(), key).iter().map(|device| (end(&device.id), device.healthy)).collect()
}

fn pairs(devices: &[(&str, bool)]) -> Vec<(String, bool)> {
    devices.iter().map(|(id, healthy)| ((*id).to_owned(), *healthy)).collect()
}

#[test]
fn free_and_own_slots_are_healthy_and_those_of_other_nodes_and_of_virtual_devices_are_not() {
    let (view, name) = lamps(&json!({"0": "", "1": "a", "2": "b", "3": "C:lamps-0:a"}));
    let instance = PluginKey::Instance(name);
    let expected = pairs(&[("0", true), ("1", true), ("2", false), ("3", false)]);
    assert_eq!(list(&view, &instance), expected);
    let configuration = PluginKey::Configuration("lamps".into());
    assert_eq!(list(&view, &configuration), pairs(&[("0", true), ("1", true)]), "one in use and one free");
}

#[test]
fn no_slot_of_a_device_that_is_gone_faulty_or_in_use_by_another_plugin_is_healthy() {
    let (mut view, name) = lamps(&json!({"0": "", "1": "a"}));
    let (instance, configuration) =
        (PluginKey::Instance(name.clone()), PluginKey::Configuration("lamps".into()));
    let none = pairs(&[("0", false), ("1", false)]);
    let problem = |view: &AgentView| view.problem_of(&view.instances[&name].object);

    view.devices.insert("lamps".into(), BTreeMap::from([("one".to_owned(), SeenDevice::default())]));
    assert_eq!(problem(&view), Some(DeviceProblem::Faulty));
    assert_eq!((list(&view, &instance), list(&view, &configuration)), (none.clone(), Vec::new()));
    view.devices.insert("lamps".into(), BTreeMap::new());
    assert_eq!(problem(&view), Some(DeviceProblem::Gone));
    assert_eq!(list(&view, &instance), none);
    view.devices.insert("lamps".into(), BTreeMap::from([("one".to_owned(), sound())]));
    view.foreign.insert("one".to_owned(), "example.com/lamp".to_owned());
    assert_eq!(problem(&view), Some(DeviceProblem::Foreign("example.com/lamp".to_owned())));
    assert_eq!((list(&view, &instance), list(&view, &configuration)), (none, Vec::new()));
    view.foreign.clear();
    assert_eq!(list(&view, &instance), pairs(&[("0", true), ("1", true)]));
}

#[test]
fn a_plugin_whose_claim_could_not_be_written_offers_nothing_and_the_others_go_on() {
    let (mut view, name) = lamps(&json!({"0": "", "1": "a"}));
    let (instance, configuration) = (PluginKey::Instance(name), PluginKey::Configuration("lamps".into()));
    view.claims_failed.insert(instance.clone(), Tick(1));
    assert_eq!(list(&view, &instance), pairs(&[("0", false), ("1", false)]));
    assert_eq!(list(&view, &configuration), pairs(&[("0", true)]));
    view.claims_failed = BTreeMap::from([(configuration.clone(), Tick(1))]);
    assert_eq!(list(&view, &instance), pairs(&[("0", true), ("1", true)]));
    assert_eq!(list(&view, &configuration), pairs(&[]));
}

#[test]
fn each_change_of_the_view_is_in_the_plugins_lists_when_the_change_returns() {
    let (view, name) = lamps(&json!({"0": "", "1": ""}));
    let state = AgentState { view: Mutex::new(view), ..AgentState::new(me()) };
    let mut offered = state.open_list(&PluginKey::Instance(name.clone()));
    assert!(offered.borrow_and_update().iter().all(|device| device.healthy));
    let mut taken = lamp(&name, &json!({"0": "b", "1": ""}));
    taken.metadata.resource_version = Some("2".to_owned());
    state.observe_instance(taken);
    assert!(offered.has_changed().unwrap());
    let health: Vec<bool> = offered.borrow_and_update().iter().map(|device| device.healthy).collect();
    assert_eq!(health, [false, true]);
    state.update(|_| ());
    assert!(!offered.has_changed().unwrap(), "nothing changed");
}

#[test]
fn an_older_version_from_the_watch_does_not_replace_the_reply_to_a_write() {
    let (mut view, name) = lamps(&json!({"0": "a"}));
    let (mut newer, older) = (lamp(&name, &json!({"0": "b"})), lamp(&name, &json!({"0": "a"})));
    newer.metadata.resource_version = Some("10".to_owned());
    view.apply_instance(Arc::new(newer));
    view.apply_instance(Arc::new(older.clone()));
    let usage = |view: &AgentView| view.instances[&name].usage.slots.values().next().unwrap().to_string();
    assert_eq!(usage(&view), "b");
    // Another object of the same name starts anew.
    let replaced = DeviceInstance {
        metadata: kube::api::ObjectMeta { uid: Some("other".to_owned()), ..older.metadata.clone() },
        ..older
    };
    view.apply_instance(Arc::new(replaced));
    assert_eq!(usage(&view), "a");
}

#[test]
fn plugins_run_for_configurations_that_take_part_and_for_instances_with_slots_that_list_this_node() {
    let (mut view, name) = lamps(&json!({"0": ""}));
    let both = BTreeSet::from([PluginKey::Configuration("lamps".into()), PluginKey::Instance(name.clone())]);
    assert_eq!(view.plugins(&me()), both);
    assert_eq!(view.plugins(&"b".into()), BTreeSet::from([PluginKey::Configuration("lamps".into())]));
    view.own_node = None;
    assert_eq!(view.plugins(&me()), BTreeSet::new(), "the labels of the node are not known");
    let resources: Vec<String> = both.iter().map(PluginKey::resource).collect();
    assert_eq!(resources, [format!("rouse.dev/{name}"), "rouse.dev/lamps".to_owned()]);
}

#[test]
fn an_instance_of_the_time_before_shared_was_changed_has_no_device() {
    let (view, name) = lamps(&json!({"0": ""}));
    let before = instance("lamps", "one", false, &json!({"nodes": ["a"], "deviceUsage": {"x-0": ""}}));
    assert_eq!(view.problem_of(&before), Some(DeviceProblem::Gone));
    assert_eq!(view.problem_of(&view.instances[&name].object), None);
}

#[test]
fn a_slot_above_a_lowered_capacity_is_for_no_new_container() {
    let (mut view, name) = lamps(&json!({"0": "", "1": "a"}));
    let mut lowered = lamp(&name, &json!({"0": "", "1": "a"}));
    lowered.spec.capacity = 1;
    view.apply_instance(Arc::new(lowered));
    assert_eq!(list(&view, &PluginKey::Instance(name)), pairs(&[("0", true), ("1", false)]));
}

#[test]
fn of_two_configurations_with_the_accelerators_of_this_node_the_older_one_offers_them() {
    let spec = json!({"discovery": {"accelerators": {}}});
    let mut view = view_of("gpus", &spec);
    let other = view_of("cards", &spec).configurations.remove("cards").unwrap();
    view.configurations.insert("cards".into(), other);
    for name in ["gpus", "cards"] {
        view.devices.insert(name.into(), BTreeMap::from([("GPU-a".to_owned(), sound())]));
    }
    let problem = |view: &AgentView, configuration: &str| {
        view.problem_of(&instance(configuration, "GPU-a", false, &json!({"nodes": ["a"]})))
    };
    let duplicate_of = |name: &str| Some(DeviceProblem::Duplicate(name.into()));
    assert_eq!(problem(&view, "cards"), None, "both are as old, and its name is the first");
    assert_eq!(problem(&view, "gpus"), duplicate_of("cards"));

    let cards = view.configurations.get_mut("cards").unwrap();
    let newer = AcceptedConfiguration { created: Tick(1), ..(*cards.accepted).clone() };
    cards.accepted = Arc::new(newer);
    assert_eq!((problem(&view, "gpus"), problem(&view, "cards")), (None, duplicate_of("gpus")));

    // A configuration that does not select this node offers nothing here.
    let node_selector = BTreeMap::from([("pool".to_owned(), "other".to_owned())]);
    let gpus = view.configurations.get_mut("gpus").unwrap();
    gpus.accepted = Arc::new(AcceptedConfiguration { node_selector, ..(*gpus.accepted).clone() });
    assert_eq!(problem(&view, "cards"), None);
}
