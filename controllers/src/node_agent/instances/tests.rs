use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::*;
use crate::node_agent::testing::{instance, view_of};

const NOW: Tick = Tick(1_780_000_000_000);

/// The steps of node `a` at this moment, by instance.
fn steps(view: &AgentView, out_of_sight: &mut BTreeMap<InstanceName, Tick>, now: Tick) -> Vec<InstanceStep> {
    let me = NodeName::from("a");
    update_out_of_sight(out_of_sight, view, &me, now);
    next_steps(view, &me, out_of_sight, now).into_iter().map(|(_, step)| step).collect()
}

/// A view of a shared device `one` of the configuration `lamps`, whose instance has this status.
fn lamps(status: Option<&Value>) -> AgentView {
    let mut view = view_of(
        "lamps",
        &json!({
            "discovery": {"static": {"devices": [{"id": "one"}]}}, "capacity": 2,
        }),
    );
    view.devices.insert("lamps".into(), BTreeMap::from([("one".to_owned(), sound())]));
    if let Some(status) = status {
        view.apply_instance(Arc::new(instance("lamps", "one", true, status)));
    }
    view
}

fn sound() -> SeenDevice {
    SeenDevice { healthy: true, ..SeenDevice::default() }
}

#[test]
fn a_device_gets_its_object_then_its_slots_then_this_nodes_name_and_each_step_follows_from_the_object() {
    let mut none = BTreeMap::new();
    let mut first = steps(&lamps(None), &mut none, NOW);
    let Some(InstanceStep::Create(object)) = first.pop() else { panic!("{first:?}") };
    assert_eq!(first, []);
    assert_eq!((object.spec.configuration.as_str(), object.spec.device_id.as_str()), ("lamps", "one"));
    assert!(object.spec.shared);
    assert_eq!(object.spec.capacity, 2);
    assert_eq!(object.metadata.owner_references, None, "claims outlive the configuration");

    let mut after = |status: Value| steps(&lamps(Some(&status)), &mut none, NOW);
    assert_eq!(after(Value::Null), [InstanceStep::LayOut { capacity: 2 }]);
    let usage = json!({"lamps-x-0": ""});
    assert_eq!(after(json!({"deviceUsage": usage})), [InstanceStep::Join]);
    assert_eq!(after(json!({"deviceUsage": usage, "nodes": ["b"]})), [InstanceStep::Join]);
    assert_eq!(after(json!({"deviceUsage": usage, "nodes": ["a", "b"]})), []);
}

#[test]
fn a_node_leaves_after_five_minutes_without_the_device_and_not_if_it_was_back_between() {
    let status = json!({"deviceUsage": {"lamps-x-0": "a"}, "nodes": ["a"]});
    let seen = lamps(Some(&status));
    let mut unseen = lamps(Some(&status));
    unseen.devices.insert("lamps".into(), BTreeMap::new());
    let mut since = BTreeMap::new();
    let almost = NOW + Millis::secs(299);
    assert_eq!(steps(&unseen, &mut since, NOW), []);
    assert_eq!(steps(&unseen, &mut since, almost), []);
    assert_eq!(steps(&seen, &mut since, almost), []);
    assert_eq!(steps(&unseen, &mut since, NOW + Millis::secs(301)), [], "the wait began anew");
    assert_eq!(steps(&unseen, &mut since, NOW + Millis::secs(600)), []);
    assert_eq!(steps(&unseen, &mut since, NOW + Millis::secs(601)), [InstanceStep::Leave]);
}

#[test]
fn a_configuration_that_was_not_searched_yet_makes_no_node_leave_and_one_that_is_gone_does() {
    let status = json!({"deviceUsage": {"lamps-x-0": ""}, "nodes": ["a"]});
    let mut view = lamps(Some(&status));
    view.devices.clear();
    let mut since = BTreeMap::new();
    assert_eq!(steps(&view, &mut since, NOW), []);
    assert_eq!(steps(&view, &mut since, NOW + Millis::secs(1000)), []);
    view.configurations.clear();
    assert_eq!(steps(&view, &mut since, NOW + Millis::secs(1000)), []);
    assert_eq!(steps(&view, &mut since, NOW + Millis::secs(1300)), [InstanceStep::Leave]);
}

#[test]
fn a_node_without_the_labels_of_the_selector_creates_nothing() {
    let spec = json!({
        "discovery": {"static": {"devices": [{"id": "one"}]}}, "nodeSelector": {"lit": "yes"},
    });
    let mut view = view_of("lamps", &spec);
    view.devices.insert("lamps".into(), BTreeMap::from([("one".to_owned(), sound())]));
    assert_eq!(steps(&view, &mut BTreeMap::new(), NOW), []);
    let node = view.own_node.as_mut().unwrap();
    node.labels.insert("lit".to_owned(), "yes".to_owned());
    assert_eq!(steps(&view, &mut BTreeMap::new(), NOW).len(), 1);
}

#[test]
fn nodes_that_join_one_instance_retry_at_different_times_and_later_after_each_conflict() {
    let delays = |conflicts: u32| -> BTreeSet<Duration> {
        (0..100).map(|node| conflict_delay(&format!("node-{node}").into(), conflicts)).collect()
    };
    let (first, seventh) = (delays(0), delays(6));
    assert!(first.iter().all(|delay| (25..75).contains(&delay.as_millis())), "{first:?}");
    assert!(seventh.last().is_some_and(|delay| *delay > Duration::from_secs(2)), "{seventh:?}");
    assert!(seventh.len() > 80, "{seventh:?}");
    assert!(delays(u32::MAX).iter().all(|delay| *delay < Duration::from_secs(4)), "no delay grows for ever");
}

#[test]
fn a_device_whose_digest_is_that_of_another_device_is_left_alone() {
    let mut view = lamps(Some(&json!({"deviceUsage": {"lamps-x-0": ""}, "nodes": []})));
    let known = view.instances.values_mut().next().unwrap();
    Arc::make_mut(&mut known.object).spec.device_id = "two".to_owned();
    assert_eq!(steps(&view, &mut BTreeMap::new(), NOW), []);
}
