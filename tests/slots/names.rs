//! Names and the grammar of usages.

use std::collections::BTreeSet;

use proptest::prelude::*;
use rouse::{
    pairing::ids::NodeName,
    slots::{
        ConfigurationName, InstanceName, MAX_CAPACITY, SlotUsage, VirtualId, configuration_resource,
        instance_name, instance_resource, property_suffix, slot_name, slot_number, virtual_id,
    },
};

/// A label of an object's name.
const LABEL: &str = "[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?";

/// Whether Kubernetes takes it as an object's name.
fn is_object_name(name: &str) -> bool {
    let is_word = |label: &str| {
        let is_end = |end: Option<char>| end.is_some_and(|letter| letter.is_ascii_alphanumeric());
        is_end(label.chars().next()) && is_end(label.chars().last())
    };
    name.split('.').all(is_word) && !name.contains(|letter: char| letter.is_ascii_uppercase())
}

#[test]
fn an_instance_is_named_by_its_configuration_and_the_digest_of_its_device() {
    let cameras = ConfigurationName::from("cameras");
    // They never change: other versions of the agent and the gateway must find the same instances.
    let shared = instance_name(&cameras, "http://10.0.0.7:8000/", None);
    let on_a = instance_name(&cameras, "GPU-1", Some(&"node-a".into()));
    assert_eq!(shared.as_str(), "cameras-185aca91c2");
    assert_eq!(on_a.as_str(), "cameras-d2eb6b857f");
    // A device of one node has an instance of its own on each node.
    let names = [
        instance_name(&cameras, "GPU-1", None),
        on_a,
        instance_name(&cameras, "GPU-1", Some(&"node-b".into())),
        instance_name(&cameras, "GPU-1node-a", None),
        instance_name(&cameras, "GPU-1n", Some(&"ode-a".into())),
    ];
    assert_eq!(names.into_iter().collect::<BTreeSet<_>>().len(), 5);
}

#[test]
fn many_devices_have_different_instances() {
    let configuration = ConfigurationName::from("a100");
    let mut names = BTreeSet::new();
    for node in 0..5_000 {
        let node = NodeName::from(format!("node-{node}"));
        names.extend((0..8).map(|gpu| instance_name(&configuration, &format!("GPU-{gpu}"), Some(&node))));
    }
    assert_eq!(names.len(), 40_000);
}

#[test]
fn long_names_that_begin_alike_stay_different() {
    let long = "inference-appliances-of-the-laboratory.in-the-third-floor";
    let configurations = [0, 1, 2].map(|number| ConfigurationName::from(format!("{long}-{number}")));
    let instances = configurations.each_ref().map(|name| instance_name(name, "GPU-0", None));
    for instance in &instances {
        assert!(instance.as_str().starts_with("inference-appliances-of-the-laboratory.in-t-"), "{instance}");
    }
    assert_eq!(instances.into_iter().collect::<BTreeSet<_>>().len(), 3);
    let ids = configurations.each_ref().map(|name| virtual_id(name, 0));
    assert_eq!(ids.into_iter().collect::<BTreeSet<_>>().len(), 3);
    // A name that is cut behind a dot has none before the hash.
    let cut = instance_name(&format!("{}.{}", "a".repeat(42), "b".repeat(42)).into(), "GPU-0", None);
    assert!(
        cut.as_str().starts_with(&format!("{}-", "a".repeat(42))) && is_object_name(cut.as_str()),
        "{cut}"
    );
}

#[test]
fn a_resource_has_the_name_of_the_instance_or_of_the_configuration() {
    assert_eq!(instance_resource(&"cameras-0123456789".into()), "rouse.dev/cameras-0123456789");
    assert_eq!(configuration_resource(&"cameras".into()), "rouse.dev/cameras");
    let longest = "c".repeat(63);
    assert_eq!(configuration_resource(&longest.as_str().into()), format!("rouse.dev/{longest}"));
    let too_long = configuration_resource(&"c".repeat(64).into());
    assert_eq!(too_long.len(), "rouse.dev/".len() + 63, "{too_long}");
}

#[test]
fn the_suffix_of_properties_is_the_digest() {
    let instance = instance_name(&"web-cam".into(), "/dev/video0", Some(&"node-a".into()));
    let digest = instance.as_str().strip_prefix("web-cam-").unwrap().to_uppercase();
    assert_eq!(property_suffix(&instance), digest);
    assert!(digest.len() == 10 && digest.chars().all(|digit| digit.is_ascii_hexdigit()), "{digest}");
}

#[test]
fn a_slot_has_the_number_of_its_name() {
    let instance = InstanceName::from("cameras-0123456789");
    for number in [0, 7, 10, MAX_CAPACITY - 1] {
        assert_eq!(slot_number(&instance, &slot_name(&instance, number)), Some(number));
    }
    for slot in [
        "cameras-0123456789",
        "cameras-0123456789-",
        "cameras-0123456789-x",
        "cameras-0123456789-01",
        "cameras-0123456789-+1",
        "cameras-0123456789--1",
        "cameras-01234567891",
        "cameras-0123456789-4294967296",
        "lamps-0123456789-1",
    ] {
        assert_eq!(slot_number(&instance, &slot.into()), None, "{slot}");
    }
}

#[test]
fn a_usage_has_the_text_of_the_grammar() {
    let node = NodeName::from("node-a");
    let by_configuration =
        SlotUsage::Configuration { virtual_id: VirtualId::from("cameras-2"), node: node.clone() };
    let cases = [
        ("", SlotUsage::Free),
        ("node-a", SlotUsage::Instance { node: node.clone() }),
        ("C:cameras-2:node-a", by_configuration),
    ];
    for (text, usage) in cases {
        assert_eq!(text.parse::<SlotUsage>(), Ok(usage.clone()));
        assert_eq!(usage.to_string(), text);
        assert_eq!(usage.node(), (!text.is_empty()).then_some(&node));
    }
    for text in
        ["C:", "C::", "C::node-a", "C:cameras-2:", "C:cameras-2", "D:cameras-2:node-a", "a:b:c:d", ":"]
    {
        let error = text.parse::<SlotUsage>().unwrap_err();
        assert!(error.to_string().starts_with(&format!("'{text}' is not the usage of a slot")), "{error}");
    }
}

proptest! {
    #[test]
    fn a_usage_survives_being_written(node in LABEL, virtual_id in prop::option::of(LABEL)) {
        let node = NodeName::from(node);
        let usage = match virtual_id {
            Some(id) => SlotUsage::Configuration { virtual_id: VirtualId::from(id), node },
            None => SlotUsage::Instance { node },
        };
        prop_assert_eq!(usage.to_string().parse::<SlotUsage>(), Ok(usage));
    }

    /// The kubelet takes ids of 63 characters, and Kubernetes names of resources and annotations.
    #[test]
    fn names_are_short_and_valid_whatever_the_configuration_is_called(
        labels in prop::collection::vec(LABEL, 1..11),
        number in 0..MAX_CAPACITY,
    ) {
        let configuration = ConfigurationName::from(labels.join("."));
        let instance = instance_name(&configuration, "GPU-0", None);
        prop_assert!(is_object_name(instance.as_str()), "{}", instance);
        let slot = slot_name(&instance, number);
        prop_assert!(slot.as_str().len() <= 63, "{}", slot);
        prop_assert_eq!(slot_number(&instance, &slot), Some(number));
        let virtual_device = virtual_id(&configuration, u32::MAX);
        prop_assert!(virtual_device.as_str().len() <= 63, "{}", virtual_device);
        let resource = configuration_resource(&configuration);
        prop_assert!(resource.strip_prefix("rouse.dev/").is_some_and(|name| name.len() <= 63), "{}", resource);
    }
}
