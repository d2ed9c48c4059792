//! Checks what a container with a slot gets.

use std::collections::{BTreeMap, BTreeSet};

use rouse::variables;

use super::{
    ACCELERATORS_VARIABLE, AcceptedDiscovery, INDEX_PROPERTY, UUID_PROPERTY, VISIBLE_DEVICES_VARIABLE,
    devices::is_property_name,
};
use crate::{
    convert::spec_reader::SpecReader,
    crd::device_configuration::{ContainerDevice, ContainerMount},
};

/// Checks the names of the variables, and that every device has the properties that their values name.
pub(super) fn check_env(
    reader: &mut SpecReader,
    env: &BTreeMap<String, String>,
    discovery: Option<&AcceptedDiscovery>,
) {
    for (name, text) in env {
        if !is_property_name(name) {
            reader.reject_spec(format!(
                "env: '{}' is not the name of a variable: write letters, digits and '_', and no digit at the start",
                name.escape_debug()
            ));
        }
        let is_own = [ACCELERATORS_VARIABLE, VISIBLE_DEVICES_VARIABLE].contains(&name.as_str());
        if is_own && matches!(discovery, Some(AcceptedDiscovery::Accelerators)) {
            reader.reject_spec(format!(
                "env.{name} is set by Rouse to the accelerators of the container: remove it"
            ));
        }
        let Some(discovery) = discovery else { continue };
        for property in references(text) {
            if let Some(device) = device_without(discovery, &property) {
                reader.reject_spec(format!(
                    "env.{} refers to $({}), which {device} does not have: add the property, or write $$ for a $",
                    name.escape_debug(),
                    property.escape_debug()
                ));
            }
        }
    }
}

/// Returns the properties that the text refers to.
fn references(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    // Only the references matter here, not the expanded text.
    drop(variables::expand(text, |name| {
        found.insert(name.to_owned());
        None
    }));
    found
}

/// Names the first device that lacks the property.
fn device_without(discovery: &AcceptedDiscovery, property: &str) -> Option<String> {
    let lacks = |properties: &BTreeMap<String, String>| !properties.contains_key(property);
    match discovery {
        AcceptedDiscovery::Accelerators => {
            let known = [UUID_PROPERTY, INDEX_PROPERTY];
            (!known.contains(&property)).then(|| format!("an accelerator (it has {})", known.join(" and ")))
        }
        AcceptedDiscovery::Static { devices } => {
            let device = devices.iter().find(|device| lacks(&device.properties))?;
            Some(format!("the device '{}'", device.id.escape_debug()))
        }
        AcceptedDiscovery::Http { endpoints, .. } => {
            let endpoint = endpoints.iter().find(|endpoint| lacks(&endpoint.properties))?;
            Some(format!("the device '{}'", endpoint.url.escape_debug()))
        }
    }
}

pub(super) fn check_mounts(reader: &mut SpecReader, mounts: &[ContainerMount]) {
    let paths = mounts.iter().map(|mount| (mount.host_path.as_str(), mount.container_path.as_str()));
    check_paths(reader, "mounts", paths);
}

pub(super) fn check_devices(reader: &mut SpecReader, devices: &[ContainerDevice]) {
    let paths = devices.iter().map(|device| (device.host_path.as_str(), device.container_path.as_str()));
    check_paths(reader, "devices", paths);
    for device in devices {
        let letters: BTreeSet<char> = device.permissions.chars().collect();
        let is_known = letters.iter().all(|letter| "rwm".contains(*letter));
        if letters.is_empty() || !is_known || letters.len() != device.permissions.len() {
            reader.reject_spec(format!(
                "devices '{}': permissions ({}) must be some of the letters r, w and m, each once",
                device.container_path.escape_debug(),
                device.permissions.escape_debug()
            ));
        }
    }
}

/// Checks pairs of a path on the node and a path in the container.
fn check_paths<'a>(reader: &mut SpecReader, field: &str, paths: impl Iterator<Item = (&'a str, &'a str)>) {
    let mut targets = BTreeSet::new();
    for (host, container) in paths {
        for path in [host, container] {
            if !is_absolute(path) {
                reader.reject_spec(format!(
                    "{field}: '{}' must be an absolute path without '..'",
                    path.escape_debug()
                ));
            }
        }
        if container.chars().all(|letter| letter == '/') && !container.is_empty() {
            reader.reject_spec(format!(
                "{field}: '/' cannot be replaced in a container: choose another containerPath"
            ));
        }
        if !targets.insert(container.trim_end_matches('/')) {
            reader.reject_spec(format!(
                "{field}: two of them have the containerPath '{}': keep one",
                container.escape_debug()
            ));
        }
    }
}

fn is_absolute(path: &str) -> bool {
    path.starts_with('/') && path.split('/').all(|part| part != "..") && !path.contains(['\0', ':'])
}
