//! Names of instances, slots, virtual devices and resources.
//!
//! The kubelet takes ids of at most 63 characters, and so do names of resources and annotations after their domain.
//! Names of configurations may be longer: they are cut, and part of their hash keeps them apart.

use std::iter;

use super::ids::{ConfigurationName, InstanceName, SlotName, VirtualId};
use crate::{pairing::ids::NodeName, stable_hash::fnv1a};

/// Domain of the resources that the node agent offers to the kubelet.
pub const RESOURCE_DOMAIN: &str = "rouse.dev";
/// Prefix of the annotation that a container has for each of its slots; the slot follows.
pub const SLOT_ANNOTATION: &str = "slot.rouse.dev/";
/// Most slots that an instance may have.
pub const MAX_CAPACITY: u32 = 256;

const MAX_NAME_LENGTH: usize = 63;
/// Hexadecimal digits of the digest in an instance's name. Six would collide once in a few thousand devices.
const DIGEST_LENGTH: usize = 10;
const DIGEST_MASK: u64 = (1 << (4 * DIGEST_LENGTH)) - 1;
/// Digits of the largest number of a slot.
const NUMBER_LENGTH: usize = 3;
/// What is left for the configuration in the name of a slot: CONFIGURATION-DIGEST-NUMBER.
const MAX_PREFIX_LENGTH: usize = MAX_NAME_LENGTH - DIGEST_LENGTH - NUMBER_LENGTH - 2;
/// Hexadecimal digits of the hash of a name that is cut.
const CUT_HASH_LENGTH: usize = 4;

/// Returns the name of the instance of a device.
///
/// A device that only one node can reach has an instance of its own on each node: then pass the node.
#[must_use]
pub fn instance_name(
    configuration: &ConfigurationName,
    device_id: &str,
    node: Option<&NodeName>,
) -> InstanceName {
    // No id and no name has a zero byte, so a device "ab" differs from a device "a" on node "b".
    let node = node.into_iter().flat_map(|node| iter::once(0).chain(node.as_str().bytes()));
    let hash = fnv1a(device_id.bytes().chain(node));
    let digest = (hash ^ (hash >> 40)) & DIGEST_MASK;
    InstanceName::from(format!("{}-{digest:010x}", shortened(configuration.as_str(), MAX_PREFIX_LENGTH)))
}

/// Returns the name of a slot: of at most 63 characters for numbers below [`MAX_CAPACITY`].
#[must_use]
pub fn slot_name(instance: &InstanceName, number: u32) -> SlotName {
    SlotName::from(format!("{instance}-{number}"))
}

/// Returns the number of a slot, if it is named like one of this instance.
#[must_use]
pub fn slot_number(instance: &InstanceName, slot: &SlotName) -> Option<u32> {
    let digits = slot.as_str().strip_prefix(instance.as_str())?.strip_prefix('-')?;
    let number: u32 = digits.parse().ok()?;
    // `01` and `+1` are numbers, but no slot is named so.
    (number.to_string() == digits).then_some(number)
}

/// Returns the id of a virtual device of this configuration.
#[must_use]
pub fn virtual_id(configuration: &ConfigurationName, number: u32) -> VirtualId {
    VirtualId::from(format!("{}-{number}", shortened(configuration.as_str(), MAX_PREFIX_LENGTH)))
}

/// Returns the resource that a container requests for a slot of this instance.
#[must_use]
pub fn instance_resource(instance: &InstanceName) -> String {
    format!("{RESOURCE_DOMAIN}/{instance}")
}

/// Returns the resource that a container requests for devices of this configuration, whichever they are.
#[must_use]
pub fn configuration_resource(configuration: &ConfigurationName) -> String {
    format!("{RESOURCE_DOMAIN}/{}", shortened(configuration.as_str(), MAX_NAME_LENGTH))
}

/// Returns the resources by which a container gets a slot of this instance.
#[must_use]
pub fn device_resources(instance: &InstanceName, configuration: &ConfigurationName) -> [String; 2] {
    [instance_resource(instance), configuration_resource(configuration)]
}

/// Returns the digest of an instance in upper case: the suffix of its properties in a container's environment.
#[must_use]
pub fn property_suffix(instance: &InstanceName) -> String {
    let name = instance.as_str();
    name.rsplit_once('-').map_or(name, |(_, digest)| digest).to_ascii_uppercase()
}

/// Returns the name, or its beginning and part of its hash if it is too long.
fn shortened(name: &str, max_length: usize) -> String {
    if name.len() <= max_length {
        return name.to_owned();
    }
    let beginning: String = name.chars().take(max_length - CUT_HASH_LENGTH - 1).collect();
    // No part of an object's name begins or ends with a dash.
    let beginning = beginning.trim_end_matches(['-', '.']);
    let hash = fnv1a(name.bytes());
    format!("{beginning}-{:04x}", (hash ^ (hash >> 16) ^ (hash >> 32)) & 0xffff)
}
