use rouse::units::Millis;

use super::*;
use crate::node_agent::testing::{instance, view_of};

const NOW: Tick = Tick(1_780_000_000_000);

fn gpu(index: u32, gib: u64) -> SeenDevice {
    SeenDevice { healthy: true, index: Some(index), memory: Some(Bytes::gib(gib)), ..SeenDevice::default() }
}

/// A node with these accelerators, whose AcceleratorNode has this status.
fn gpus(devices: &[(&str, SeenDevice)], status: &Value) -> AgentView {
    let mut view = view_of("gpus", &json!({"discovery": {"accelerators": {}}, "capacity": 2}));
    let devices = devices.iter().map(|(uuid, device)| ((*uuid).to_owned(), device.clone()));
    view.devices.insert("gpus".into(), devices.collect());
    view.accelerator_node = Some(Arc::new(node(status)));
    view
}

fn node(status: &Value) -> AcceleratorNode {
    let object = json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "AcceleratorNode", "metadata": {"name": "a"}, "spec": {},
        "status": status,
    });
    serde_json::from_value(object).unwrap()
}

fn wanted(view: &AgentView, now: Tick) -> Option<Value> {
    wanted_status(view, &"a".into(), Bytes::gib(1), &LastSeen::new(), now)
}

#[test]
fn accelerators_are_listed_in_the_order_of_their_indices_less_the_headroom_and_written_once() {
    let mut view = gpus(&[("GPU-a", gpu(1, 80)), ("GPU-b", gpu(0, 40))], &json!({}));
    let status = wanted(&view, NOW).unwrap();
    let seen = "2026-05-28T20:26:40Z";
    let expected = json!({"partial": false, "accelerators": [
        {
            "uuid": "GPU-b", "index": 0, "capacity": "39Gi", "healthy": true, "configuration": "gpus", "slots": 2,
            "lastSeen": seen,
        },
        {
            "uuid": "GPU-a", "index": 1, "capacity": "79Gi", "healthy": true, "configuration": "gpus", "slots": 2,
            "lastSeen": seen,
        },
    ]});
    assert_eq!(status, expected);
    view.accelerator_node = Some(Arc::new(node(&status)));
    assert_eq!(wanted(&view, NOW + Millis::secs(86_400)), None, "a fleet at rest writes nothing");
    let mut reversed = status;
    reversed["accelerators"].as_array_mut().unwrap().reverse();
    view.accelerator_node = Some(Arc::new(node(&reversed)));
    assert_eq!(wanted(&view, NOW), None, "the API server may keep another order");

    view.accelerator_node = Some(Arc::new(node(&Value::Null)));
    assert_eq!(wanted(&view, NOW), None, "the leader has not written the status");
    view.accelerator_node = None;
    assert_eq!(wanted(&view, NOW), None, "the leader has not created the object");
}

#[test]
fn a_list_of_what_stubs_reported_is_replaced() {
    let partial = json!({"partial": true, "accelerators": [
        {"uuid": "GPU-a", "capacity": "79Gi", "healthy": true},
    ]});
    let view = gpus(&[("GPU-a", gpu(0, 80))], &partial);
    assert_eq!(wanted(&view, NOW).unwrap()["partial"], false);
}

#[test]
fn an_accelerator_that_is_faulty_in_use_by_another_plugin_or_gone_is_listed_as_not_healthy() {
    let healthy =
        |view: &AgentView| wanted(view, NOW).map(|status| status["accelerators"][0]["healthy"].clone());
    let listed = wanted(&gpus(&[("GPU-a", gpu(0, 80))], &json!({})), NOW).unwrap();
    let sound = gpus(&[("GPU-a", gpu(0, 80))], &listed);
    assert_eq!(healthy(&sound), None, "nothing differs");

    let faulty = gpus(&[("GPU-a", SeenDevice { healthy: false, ..gpu(0, 80) })], &listed);
    assert_eq!(healthy(&faulty), Some(json!(false)));
    let mut foreign = gpus(&[("GPU-a", gpu(0, 80))], &listed);
    foreign.foreign.insert("GPU-a".to_owned(), "nvidia.com/gpu".to_owned());
    assert_eq!(healthy(&foreign), Some(json!(false)));

    let mut gone = gpus(&[], &listed);
    let status = json!({"nodes": ["a"], "deviceUsage": {"gpus-x-0": ""}});
    gone.apply_instance(Arc::new(instance("gpus", "GPU-a", false, &status)));
    let unhealthy = wanted(&gone, NOW + Millis::secs(400)).unwrap();
    let entry = json!({
        "uuid": "GPU-a", "index": 0, "capacity": "79Gi", "healthy": false, "configuration": "gpus", "slots": 2,
        "lastSeen": "2026-05-28T20:26:40Z",
    });
    assert_eq!(unhealthy["accelerators"], json!([entry]));
    let noted = LastSeen::from([("GPU-a".to_owned(), NOW + Millis::secs(390))]);
    let late = NOW + Millis::secs(400);
    let at_last = wanted_status(&gone, &"a".into(), Bytes::gib(1), &noted, late).unwrap();
    assert_eq!(at_last["accelerators"][0]["lastSeen"], "2026-05-28T20:33:10Z");
    gone.accelerator_node = Some(Arc::new(node(&unhealthy)));
    assert_eq!(wanted(&gone, NOW + Millis::secs(9999)), None, "it is listed as out of sight");
}

#[test]
fn the_list_is_given_back_only_by_the_agent_that_wrote_it_and_once_no_configuration_has_accelerators() {
    let listed = wanted(&gpus(&[("GPU-a", gpu(0, 80))], &json!({})), NOW).unwrap();
    let mut view = gpus(&[], &listed);
    assert_eq!(wanted(&view, NOW), None, "the driver may be back soon");
    view.configurations.clear();
    assert_eq!(wanted(&view, NOW), Some(json!({})));
    let of_another = json!({"accelerators": [{"uuid": "GPU-a", "capacity": "79Gi", "healthy": true}]});
    view.accelerator_node = Some(Arc::new(node(&of_another)));
    assert_eq!(wanted(&view, NOW), None);
}

#[test]
fn an_accelerator_whose_memory_is_not_known_is_not_listed_unless_it_was_before() {
    let unknown = SeenDevice { memory: None, ..gpu(0, 1) };
    assert_eq!(wanted(&gpus(&[("GPU-a", unknown.clone())], &json!({})), NOW), None);
    let before =
        json!({"partial": true, "accelerators": [{"uuid": "GPU-a", "capacity": "7Gi", "healthy": true}]});
    let status = wanted(&gpus(&[("GPU-a", unknown)], &before), NOW).unwrap();
    assert_eq!(status["accelerators"][0]["capacity"], "7Gi");
}

#[test]
fn another_capacity_and_an_older_configuration_of_the_same_accelerators_are_written() {
    let slots = |status: &Value| {
        let listed = &status["accelerators"][0];
        (listed["configuration"].as_str().unwrap().to_owned(), listed["slots"].as_u64().unwrap())
    };
    let mut view = gpus(&[("GPU-a", gpu(0, 80))], &json!({}));
    let listed = wanted(&view, NOW).unwrap();
    assert_eq!(slots(&listed), ("gpus".to_owned(), 2));
    view.accelerator_node = Some(Arc::new(node(&listed)));
    let raised = view_of("gpus", &json!({"discovery": {"accelerators": {}}, "capacity": 5}));
    view.configurations.extend(raised.configurations);
    let listed = wanted(&view, NOW).unwrap();
    assert_eq!(slots(&listed), ("gpus".to_owned(), 5));

    // Neither has a time of creation here, so the first by name offers the accelerators.
    view.accelerator_node = Some(Arc::new(node(&listed)));
    let older = view_of("all", &json!({"discovery": {"accelerators": {}}, "capacity": 3}));
    view.configurations.extend(older.configurations);
    assert_eq!(slots(&wanted(&view, NOW).unwrap()), ("all".to_owned(), 3));
}
