use rouse::variables;
use serde_json::{Value, json};

use super::*;

fn named(name: &str, spec: &Value) -> DeviceConfiguration {
    let whole = json!({
        "apiVersion": "rouse.dev/v1alpha1", "kind": "DeviceConfiguration", "metadata": {"name": name}, "spec": spec,
    });
    serde_json::from_value(whole).unwrap()
}

fn accepted(spec: &Value) -> AcceptedConfiguration {
    accept(&named("gpu", spec)).unwrap_or_else(|refused| panic!("{refused}"))
}

/// Asserts that each spec is refused with these words, and that this is the only error.
fn assert_refused<const N: usize>(cases: [(Value, &str); N]) {
    for (spec, words) in cases {
        let refused = accept(&named("gpu", &spec)).expect_err(&spec.to_string());
        assert_eq!(refused.all().len(), 1, "{spec}: {refused}");
        assert!(refused.to_string().contains(words), "{spec}: '{words}' is not in: {refused}");
        assert_eq!(refused.reason(), "InvalidSpec");
    }
}

/// The spec of accelerators, with these fields on top.
fn accelerators(fields: Value) -> Value {
    with(json!({"discovery": {"accelerators": {}}}), fields)
}

/// The spec of one listed device, with these fields of the device.
fn listed(fields: Value) -> Value {
    json!({"discovery": {"static": {"devices": [with(json!({"id": "a"}), fields)]}}})
}

/// The spec of one server, with these fields of `discovery.http`.
fn http(fields: Value) -> Value {
    json!({"discovery": {"http": with(json!({"endpoints": [{"url": "http://box:80/"}]}), fields)}})
}

fn with(mut value: Value, fields: Value) -> Value {
    let fields: serde_json::Map<String, Value> = serde_json::from_value(fields).unwrap();
    value.as_object_mut().unwrap().extend(fields);
    value
}

fn properties(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn accelerators_belong_to_their_node_and_have_one_slot_for_five_minutes_unless_said_otherwise() {
    let own = accepted(&accelerators(json!({})));
    assert_eq!(own.name.as_str(), "gpu");
    assert_eq!(own.discovery, AcceptedDiscovery::Accelerators);
    assert_eq!((own.capacity, own.shared, own.unused_after), (1, false, Millis::secs(300)));
    assert!(
        own.node_selector.is_empty() && own.env.is_empty() && own.mounts.is_empty() && own.devices.is_empty()
    );

    let eight = accepted(&accelerators(json!({
        "capacity": 8, "shared": false, "unusedSeconds": 60, "nodeSelector": {"inference-pool": "shared"},
        "env": {"CUDA_DEVICE": "$(uuid)/$(index)"},
    })));
    assert_eq!((eight.capacity, eight.shared, eight.unused_after), (8, false, Millis::secs(60)));
    assert_eq!(eight.node_selector, properties(&[("inference-pool", "shared")]));
}

#[test]
fn listed_devices_are_shared_and_have_their_ids_as_a_property() {
    let spec = json!({
        "discovery": {"static": {"devices": [
            {"id": "a", "properties": {"PORT": "1"}, "nodes": ["node-1", "node-2"]},
            {"id": "b", "properties": {"PORT": "2"}},
        ]}},
        "env": {"TARGET": "$(id):$(PORT), not $$(HOME)"},
    });
    let own = accepted(&spec);
    assert!(own.shared);
    let AcceptedDiscovery::Static { devices } = &own.discovery else { panic!("{own:?}") };
    let [a, b] = &devices[..] else { panic!("{devices:?}") };
    assert_eq!((a.id.as_str(), &a.properties), ("a", &properties(&[("PORT", "1"), ("id", "a")])));
    assert_eq!(a.nodes, ["node-1", "node-2"]);
    assert!(b.nodes.is_empty());
    let text = variables::expand(&own.env["TARGET"], |name| b.properties.get(name).cloned());
    assert_eq!(text, "b:2, not $(HOME)");
    // The same device on each node, once for each.
    let apart = with(spec, json!({"shared": false}));
    assert!(!accepted(&apart).shared);
}

#[test]
fn servers_are_devices_with_their_urls_as_ids() {
    let spec = json!({"discovery": {"http": {"endpoints": [
        {"url": "http://box-1.example:9000/health"},
        {"url": "https://[fd00::1]/", "properties": {"rack": "7"}},
    ]}}});
    let own = accepted(&spec);
    assert!(own.shared);
    let AcceptedDiscovery::Http { endpoints, interval, timeout } = &own.discovery else { panic!("{own:?}") };
    assert_eq!((*interval, *timeout), (Millis::secs(10), Millis::secs(2)));
    let [one, two] = &endpoints[..] else { panic!("{endpoints:?}") };
    assert_eq!(one.url, "http://box-1.example:9000/health");
    assert_eq!(one.properties, properties(&[("url", "http://box-1.example:9000/health")]));
    assert_eq!(two.properties, properties(&[("rack", "7"), ("url", "https://[fd00::1]/")]));
}

#[test]
fn a_container_may_get_files_and_devices() {
    let own = accepted(&accelerators(json!({
        "mounts": [{"hostPath": "/var/models", "containerPath": "/models", "readOnly": true}],
        "devices": [
            {"hostPath": "/dev/kfd", "containerPath": "/dev/kfd"},
            {"hostPath": "/dev/x", "containerPath": "/dev/y", "permissions": "rw"},
        ],
    })));
    assert!(own.mounts[0].read_only);
    assert_eq!([&own.devices[0].permissions, &own.devices[1].permissions], ["rwm", "rw"]);
}

#[test]
fn there_is_one_discovery() {
    let endpoints = json!({"endpoints": [{"url": "http://box/"}]});
    assert_refused([
        (json!({"discovery": {}}), "discovery is empty: set accelerators, static or http"),
        (json!({"discovery": {"accelerators": {}, "http": endpoints}}), "exclude each other"),
        (json!({"discovery": {"static": {"devices": []}}}), "discovery.static.devices is empty"),
        (json!({"discovery": {"http": {"endpoints": []}}}), "discovery.http.endpoints is empty"),
        (accelerators(json!({"shared": true})), "nodes cannot share accelerators: remove shared"),
    ]);
}

#[test]
fn devices_with_junk_are_refused() {
    let twice = json!({"discovery": {"static": {"devices": [{"id": "a"}, {"id": "a"}]}}});
    let urls = json!({"endpoints": [{"url": "http://box/"}, {"url": "http://box/"}]});
    assert_refused([
        (twice, "discovery.static.devices 'a' is listed twice"),
        (json!({"discovery": {"static": {"devices": [{"id": ""}]}}}), "the id is empty"),
        (listed(json!({"nodes": ["Node 1"]})), "'Node 1' is not the name of a node"),
        (listed(json!({"properties": {"1st": "x"}})), "'1st' is not the name of a property"),
        (listed(json!({"properties": {"id": "x"}})), "the property 'id' is set by Rouse: remove it"),
        (listed(json!({"properties": {"ID": "x"}})), "but for the case of letters"),
        (listed(json!({"properties": {"port": "1", "Port": "2"}})), "but for the case of letters"),
        (http(urls), "discovery.http.endpoints 'http://box/' is listed twice"),
        (http(json!({"timeoutSeconds": 11})), "timeoutSeconds (11) must be at least 1 and at most"),
        (http(json!({"timeoutSeconds": 0})), "timeoutSeconds (0)"),
    ]);
    for url in
        ["", "box", "/health", "ftp://box/", "http://me:secret@box/", "http://box/#top", "http://two words/"]
    {
        assert_refused([(
            http(json!({"endpoints": [{"url": url}]})),
            "is not a URL: write http://HOST:PORT/PATH",
        )]);
    }
}

#[test]
fn what_a_container_cannot_get_is_refused() {
    let mounts = |mounts: Value| accelerators(json!({"mounts": mounts}));
    let device = |permissions: &str| {
        let device = json!({"hostPath": "/dev/a", "containerPath": "/dev/a", "permissions": permissions});
        accelerators(json!({"devices": [device]}))
    };
    assert_refused([
        (accelerators(json!({"capacity": 0})), "capacity (0) must be between 1 and 256"),
        (accelerators(json!({"capacity": 257})), "capacity (257) must be between 1 and 256"),
        (accelerators(json!({"unusedSeconds": 0})), "unusedSeconds must be at least 1"),
        (accelerators(json!({"nodeSelector": {"two words": "a"}})), "'two words' is not the key of a label"),
        (accelerators(json!({"nodeSelector": {"a": "b/c"}})), "'b/c' is not the value of a label"),
        (accelerators(json!({"env": {"A-B": "1"}})), "'A-B' is not the name of a variable"),
        (
            accelerators(json!({"env": {"NVIDIA_VISIBLE_DEVICES": "all"}})),
            "env.NVIDIA_VISIBLE_DEVICES is set by Rouse",
        ),
        (
            accelerators(json!({"env": {"A": "$(url)"}})),
            "which an accelerator (it has uuid and index) does not",
        ),
        (
            with(listed(json!({})), json!({"env": {"A": "$(port)"}})),
            "$(port), which the device 'a' does not have",
        ),
        (
            with(http(json!({})), json!({"env": {"A": "$(id)"}})),
            "$(id), which the device 'http://box:80/' does not",
        ),
        (
            mounts(json!([{"hostPath": "models", "containerPath": "/models"}])),
            "'models' must be an absolute path",
        ),
        (
            mounts(json!([{"hostPath": "/a/../b", "containerPath": "/models"}])),
            "'/a/../b' must be an absolute path",
        ),
        (mounts(json!([{"hostPath": "/a", "containerPath": "/"}])), "'/' cannot be replaced"),
        (
            mounts(
                json!([{"hostPath": "/a", "containerPath": "/m"}, {"hostPath": "/b", "containerPath": "/m/"}]),
            ),
            "two of them have the containerPath '/m/'",
        ),
        (device(""), "permissions () must be some of the letters"),
        (device("rr"), "permissions (rr)"),
        (device("rx"), "permissions (rx)"),
    ]);
    // Listed devices set no variables of their own.
    let named = with(listed(json!({})), json!({"env": {"NVIDIA_VISIBLE_DEVICES": "$(id)"}}));
    assert_eq!(accepted(&named).env.len(), 1);
}

#[test]
fn the_name_is_that_of_a_resource_and_of_no_instance() {
    let spec = accelerators(json!({}));
    for name in ["gpu", "a.b", "gpu-0123456", "gpu-0123456789x", &"x".repeat(63)] {
        assert_eq!(accept(&named(name, &spec)).unwrap().name.as_str(), name);
    }
    for (name, words) in [
        (&*"x".repeat(64), "has 64 characters"),
        ("gpu-0123456789", "ends like that of a DeviceInstance"),
        ("a-abcdef0123", "ends like that of a DeviceInstance"),
    ] {
        let refused = accept(&named(name, &spec)).unwrap_err().to_string();
        assert!(refused.contains(words), "{name}: {refused}");
    }
}

#[test]
fn everything_that_is_wrong_with_a_configuration_is_said_at_once() {
    let spec = json!({
        "discovery": {"static": {"devices": [{"id": "a", "nodes": ["A"]}]}},
        "capacity": 0, "env": {"1": "$(b)"}, "mounts": [{"hostPath": "x", "containerPath": "/x"}],
        "devices": [{"hostPath": "/dev/a", "containerPath": "/dev/a", "permissions": "z"}],
    });
    let refused = accept(&named("gpu", &spec)).unwrap_err();
    assert_eq!(refused.all().len(), 6, "{refused}");
}

#[test]
fn the_oldest_configuration_goes_first_and_of_two_of_one_second_the_first_by_name() {
    let named = |name: &str, created: &str| {
        let mut object = named(name, &accelerators(json!({})));
        object.metadata.creation_timestamp = serde_json::from_value(json!(created)).unwrap();
        accept(&object).unwrap()
    };
    let old = named("z", "2026-01-01T00:00:00Z");
    let [first, second] = ["a", "b"].map(|name| named(name, "2026-01-01T00:00:01Z"));
    assert!(old.precedence() < first.precedence() && first.precedence() < second.precedence());
}

#[test]
fn two_configurations_may_share_nodes_unless_they_want_different_values_of_a_label() {
    let selecting = |labels: Value| accepted(&accelerators(json!({"nodeSelector": labels})));
    let (all, shared) = (selecting(json!({})), selecting(json!({"pool": "shared"})));
    let (zone, own) = (selecting(json!({"zone": "a"})), selecting(json!({"pool": "own", "zone": "a"})));
    for other in [&all, &zone, &shared] {
        assert!(shared.may_share_nodes(other) && other.may_share_nodes(&shared), "{other:?}");
    }
    assert!(!shared.may_share_nodes(&own) && !own.may_share_nodes(&shared));
}
