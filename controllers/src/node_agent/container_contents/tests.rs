use serde_json::{Value, json};

use super::*;
use crate::{convert::device_configuration::accept, crd::DeviceConfiguration};

fn configuration(name: &str, spec: &Value) -> AcceptedConfiguration {
    let object = json!({
        "apiVersion": "rouse.dev/v1alpha1",
        "kind": "DeviceConfiguration",
        "metadata": {"name": name},
        "spec": spec,
    });
    let object: DeviceConfiguration = serde_json::from_value(object).unwrap();
    accept(&object).unwrap()
}

fn granted(
    instance: &str,
    number: u32,
    usage: &str,
    device_id: &str,
    properties: &[(&str, &str)],
) -> GrantedSlot {
    let properties = properties.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned()));
    GrantedSlot {
        configuration: "any".into(),
        instance: instance.into(),
        slot: format!("{instance}-{number}").into(),
        usage: usage.parse().unwrap(),
        device_id: device_id.to_owned(),
        properties: properties.collect(),
    }
}

fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect()
}

#[test]
fn a_container_gets_variables_mounts_device_files_and_an_annotation_for_its_slot() {
    let endpoint = json!({"url": "http://ocr.example:8080/health", "properties": {"zone": "b"}});
    let configuration = configuration(
        "ocr",
        &json!({
            "discovery": {"http": {"endpoints": [endpoint]}},
            "env": {"OCR_URL": "$(url)?zone=$(zone)", "PRICE": "$$5", "PLAIN": "x"},
            "mounts": [{"hostPath": "/etc/ocr", "containerPath": "/ocr", "readOnly": true}],
            "devices": [{"hostPath": "/dev/ocr0", "containerPath": "/dev/ocr", "permissions": "rw"}],
        }),
    );
    let url = "http://ocr.example:8080/health";
    let slot = granted("ocr-0a1b2c3d4e", 3, "node-a", url, &[("url", url), ("zone", "b")]);
    let allocation = container_allocation(&configuration, &[slot]);
    let env = [
        ("OCR_URL", "http://ocr.example:8080/health?zone=b"),
        ("PLAIN", "x"),
        ("PRICE", "$5"),
        ("URL_0A1B2C3D4E", url),
        ("ZONE_0A1B2C3D4E", "b"),
    ];
    assert_eq!(allocation.env, map(&env));
    let [mount] = allocation.mounts.as_slice() else { panic!("{:?}", allocation.mounts) };
    assert_eq!((mount.host_path.as_str(), mount.container_path.as_str()), ("/etc/ocr", "/ocr"));
    assert!(mount.read_only);
    let [device] = allocation.devices.as_slice() else { panic!("{:?}", allocation.devices) };
    assert_eq!((device.host_path.as_str(), device.container_path.as_str()), ("/dev/ocr0", "/dev/ocr"));
    assert_eq!(device.permissions, "rw");
    let annotation = ("slot.rouse.dev/ocr-0a1b2c3d4e-3", "ocr-0a1b2c3d4e node-a");
    assert_eq!(allocation.annotations, map(&[annotation]));
}

#[test]
fn the_uuids_of_all_accelerators_of_a_container_are_in_one_variable_in_order() {
    let configuration = configuration(
        "gpus",
        &json!({
            "discovery": {"accelerators": {}}, "capacity": 4, "env": {"FIRST": "$(index)"},
        }),
    );
    let slots = [
        granted("gpus-00000000bb", 0, "C:gpus-0:n", "GPU-b", &[("index", "1"), ("uuid", "GPU-b")]),
        granted("gpus-00000000aa", 2, "C:gpus-4:n", "GPU-a", &[("index", "0"), ("uuid", "GPU-a")]),
    ];
    let allocation = container_allocation(&configuration, &slots);
    let env = [
        ("FIRST", "1"),
        ("INDEX_00000000AA", "0"),
        ("INDEX_00000000BB", "1"),
        ("NVIDIA_VISIBLE_DEVICES", "GPU-b,GPU-a"),
        ("ROUSE_ACCELERATORS", "GPU-b,GPU-a"),
        ("UUID_00000000AA", "GPU-a"),
        ("UUID_00000000BB", "GPU-b"),
    ];
    assert_eq!(allocation.env, map(&env));
    let annotations = [
        ("slot.rouse.dev/gpus-00000000aa-2", "gpus-00000000aa C:gpus-4:n"),
        ("slot.rouse.dev/gpus-00000000bb-0", "gpus-00000000bb C:gpus-0:n"),
    ];
    assert_eq!(allocation.annotations, map(&annotations));
    assert!(allocation.mounts.is_empty() && allocation.devices.is_empty());
}
