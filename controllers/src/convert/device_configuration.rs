//! Converts a DeviceConfiguration into what node agents and the leader need.
//!
//! The conversion does not trust the object, as with a model: it collects everything that is wrong. No node offers the
//! devices of a configuration that is refused.

mod container;
mod devices;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use kube::ResourceExt as _;
use rouse::{
    slots::{ConfigurationName, names::MAX_CAPACITY},
    units::{Millis, Tick},
};

use super::{Rejections, names, spec_reader::SpecReader};
use crate::{
    condition,
    crd::{
        DeviceConfiguration, DeviceConfigurationSpec,
        device_configuration::{ContainerDevice, ContainerMount, HttpEndpoint, StaticDevice},
    },
};

/// Longest name: that of a resource, after its domain.
const MAX_NAME_CHARS: usize = 63;
/// Length of the digest in the names of instances.
const DIGEST_CHARS: usize = 10;

/// One converted DeviceConfiguration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcceptedConfiguration {
    pub name: ConfigurationName,
    /// When the object was created.
    pub created: Tick,
    pub discovery: AcceptedDiscovery,
    /// Slots of each device.
    pub capacity: u32,
    /// Whether nodes share a device. Otherwise each node has an instance of its own.
    pub shared: bool,
    /// Labels of the nodes that take part. Empty: all.
    pub node_selector: BTreeMap<String, String>,
    /// Variables of a container. `$(NAME)` stands for a property of the device ([`rouse::variables::expand`]).
    pub env: BTreeMap<String, String>,
    pub mounts: Vec<ContainerMount>,
    pub devices: Vec<ContainerDevice>,
    /// How long a claimed slot may be without a container.
    pub unused_after: Millis,
}

impl AcceptedConfiguration {
    /// Returns the order of configurations of one node's accelerators: the lowest one offers them, and no other.
    ///
    /// The oldest is first, and of those created in the same second the first by name.
    #[must_use]
    pub const fn precedence(&self) -> (Tick, &ConfigurationName) {
        (self.created, &self.name)
    }

    /// Whether it is of the accelerators of nodes.
    #[must_use]
    pub fn is_of_accelerators(&self) -> bool {
        self.discovery == AcceptedDiscovery::Accelerators
    }

    /// Whether a node may have the labels of both selectors.
    #[must_use]
    pub fn may_share_nodes(&self, other: &Self) -> bool {
        let fits = |(key, value): (&String, &String)| {
            other.node_selector.get(key).is_none_or(|wanted| wanted == value)
        };
        self.node_selector.iter().all(fits)
    }
}

/// How devices are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AcceptedDiscovery {
    /// The accelerators of each node.
    Accelerators,
    /// Devices with the property [`ID_PROPERTY`].
    Static { devices: Vec<StaticDevice> },
    Http {
        /// Endpoints with the property [`URL_PROPERTY`]. Each URL is http or https, and has a host and no password.
        endpoints: Vec<HttpEndpoint>,
        /// Time between two probes of an endpoint.
        interval: Millis,
        /// Time limit of a probe.
        timeout: Millis,
    },
}

/// Property of a listed device: its id.
pub const ID_PROPERTY: &str = "id";
/// Property of an endpoint: its URL.
pub const URL_PROPERTY: &str = "url";
/// Property of an accelerator: its UUID.
pub const UUID_PROPERTY: &str = "uuid";
/// Property of an accelerator: its index on the node.
pub const INDEX_PROPERTY: &str = "index";

/// Variable with the UUIDs of a container's accelerators.
pub const ACCELERATORS_VARIABLE: &str = "ROUSE_ACCELERATORS";
/// The same for NVIDIA's container runtime.
pub const VISIBLE_DEVICES_VARIABLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// Converts one DeviceConfiguration.
///
/// # Errors
/// Returns everything that is wrong with the object.
pub fn accept(object: &DeviceConfiguration) -> Result<AcceptedConfiguration, Rejections> {
    let (name, spec) = (object.name_any(), &object.spec);
    let mut reader = SpecReader::default();
    check_name(&mut reader, &name);
    let discovery = devices::discovery(&mut reader, &spec.discovery);
    let shared = shared(&mut reader, spec);
    if !(1..=MAX_CAPACITY).contains(&spec.capacity) {
        reader.reject_spec(format!("capacity ({}) must be between 1 and {MAX_CAPACITY}", spec.capacity));
    }
    if spec.unused_seconds == 0 {
        reader.reject_spec("unusedSeconds must be at least 1");
    }
    for (key, value) in &spec.node_selector {
        if !names::is_label_key(key) {
            reader.reject_spec(format!("nodeSelector: '{}' is not the key of a label", key.escape_debug()));
        }
        if !names::is_label_value(value) {
            reader
                .reject_spec(format!("nodeSelector: '{}' is not the value of a label", value.escape_debug()));
        }
    }
    container::check_env(&mut reader, &spec.env, discovery.as_ref());
    container::check_mounts(&mut reader, &spec.mounts);
    container::check_devices(&mut reader, &spec.devices);
    let discovery = reader.finish(discovery)?;
    Ok(AcceptedConfiguration {
        name: ConfigurationName::from(name),
        created: object.metadata.creation_timestamp.as_ref().map(condition::tick).unwrap_or_default(),
        discovery,
        capacity: spec.capacity,
        shared,
        node_selector: spec.node_selector.clone(),
        env: spec.env.clone(),
        mounts: spec.mounts.clone(),
        devices: spec.devices.clone(),
        unused_after: Millis::secs(u64::from(spec.unused_seconds)),
    })
}

fn check_name(reader: &mut SpecReader, name: &str) {
    if name.len() > MAX_NAME_CHARS {
        reader.reject_spec(format!(
            "the name has {} characters: rouse.dev/{name} is a resource, so use at most {MAX_NAME_CHARS}",
            name.len()
        ));
    }
    let is_digest = |end: &str| end.len() == DIGEST_CHARS && end.bytes().all(|byte| byte.is_ascii_hexdigit());
    if name.rsplit_once('-').is_some_and(|(_, end)| is_digest(end)) {
        reader.reject_spec(format!(
            "the name '{name}' ends like that of a DeviceInstance, whose resource it could have: choose another name"
        ));
    }
}

fn shared(reader: &mut SpecReader, spec: &DeviceConfigurationSpec) -> bool {
    let accelerators = spec.discovery.accelerators.is_some();
    if accelerators && spec.shared == Some(true) {
        reader.reject_spec(
            "nodes cannot share accelerators: remove shared, and set capacity for several Pods on one accelerator",
        );
    }
    spec.shared.unwrap_or(!accelerators)
}
