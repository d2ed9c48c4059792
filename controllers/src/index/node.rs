//! Capacity of a node, from its Node and its AcceleratorNode.
//!
//! An AcceleratorNode that lists all accelerators comes from a program that queried the driver, so it takes precedence.
//! Otherwise the capacity comes from the labels of NVIDIA's feature discovery and from what the device plugin offers. A
//! partial list is Rouse's own and derives from those labels, so it is ignored here: an accelerator missing from it may
//! still exist.
//!
//! In a pool with slots only the full list counts, because the decisions pick accelerators by UUID.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use rouse::{model::AcceleratorId, units::Bytes};

use super::resolved::{AcceleratorCapacities, PoolSlots};
use crate::{crd::AcceleratorNode, dual_pods::takes_pods, label};

/// Label: memory of each accelerator, in MiB.
const MEMORY: &str = "nvidia.com/gpu.memory";
/// Label: number of physical accelerators. A device plugin that shares them offers more units.
const COUNT: &str = "nvidia.com/gpu.count";

/// The relevant part of a Node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct IndexedNode {
    pub(super) uid: Option<String>,
    /// Without those of warm nodes: a Warmup of thousands of nodes must not resolve all objects thousands of times.
    pub(super) labels: BTreeMap<String, String>,
    /// The node takes new Pods.
    pub(super) takes_pods: bool,
    /// Allocatable extended resources; `Err` holds a text that is not a number.
    extended_resources: BTreeMap<String, Result<u32, String>>,
}

/// The relevant part of an AcceleratorNode.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ListedAccelerators {
    /// Capacity of each accelerator; zero for an unhealthy one.
    capacities: BTreeMap<AcceleratorId, Bytes>,
    /// Index of each accelerator that has one.
    indices: BTreeMap<AcceleratorId, u32>,
    /// Slots of each accelerator that an agent offers. Agents of earlier versions do not list them.
    slots: BTreeMap<AcceleratorId, ListedSlots>,
    healthy: u32,
    /// What was left out, and why.
    warning: Option<String>,
}

/// The slots of one accelerator, as its node's agent offers them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ListedSlots {
    /// Name of the DeviceConfiguration.
    configuration: String,
    count: u32,
}

/// A node's contribution to its pool. `None` means unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct NodeCapacity {
    pub(super) bytes: Option<Bytes>,
    /// Number of healthy accelerators.
    pub(super) accelerators: u32,
    pub(super) capacities: AcceleratorCapacities,
    pub(super) indices: BTreeMap<AcceleratorId, u32>,
    pub(super) units: Option<u32>,
    /// Slots that engines may take on each accelerator, in a pool with slots.
    pub(super) slots: BTreeMap<AcceleratorId, u32>,
    pub(super) warning: Option<String>,
}

impl IndexedNode {
    pub(super) fn of(node: Node) -> Self {
        let takes_pods = takes_pods(&node);
        let allocatable = node.status.and_then(|status| status.allocatable).unwrap_or_default();
        let extended = allocatable.into_iter().filter(|(name, _)| name.contains('/'));
        let offers = extended.map(|(name, quantity)| (name, whole(&quantity.0).ok_or(quantity.0))).collect();
        let mut labels = node.metadata.labels.unwrap_or_default();
        labels.retain(|key, _| !key.starts_with(label::WARM_PREFIX));
        Self { uid: node.metadata.uid, labels, takes_pods, extended_resources: offers }
    }
}

impl ListedAccelerators {
    /// Reads the list; `None` if it is empty or partial.
    pub(super) fn of(node: &AcceleratorNode) -> Option<Self> {
        let whole = node.status.as_ref().filter(|status| !status.partial);
        let listed = whole.map(|status| status.accelerators.as_slice()).unwrap_or_default();
        let mut seen = Self::default();
        let mut doubts = Vec::new();
        for accelerator in listed {
            let id = AcceleratorId::from(accelerator.uuid.as_str());
            if seen.capacities.contains_key(&id) {
                doubts.push(format!("{} is listed twice", accelerator.uuid));
                continue;
            }
            let capacity = match accelerator.capacity.bytes() {
                Ok(capacity) if accelerator.healthy => {
                    seen.healthy += 1;
                    capacity
                }
                Ok(_) => Bytes::ZERO,
                Err(error) => {
                    doubts.push(format!("{}: capacity: {error}", accelerator.uuid));
                    Bytes::ZERO
                }
            };
            if let Some(index) = accelerator.index {
                seen.indices.insert(id.clone(), index);
            }
            if let (Some(configuration), Some(count)) = (&accelerator.configuration, accelerator.slots) {
                let configuration = configuration.clone();
                seen.slots.insert(id.clone(), ListedSlots { configuration, count });
            }
            seen.capacities.insert(id, capacity);
        }
        seen.warning = (!doubts.is_empty()).then(|| doubts.join("; "));
        (!listed.is_empty()).then_some(seen)
    }

    /// The node's capacity by this list alone.
    fn capacity(&self, units: Option<u32>, warning: Option<String>) -> NodeCapacity {
        NodeCapacity {
            bytes: Some(self.capacities.values().copied().sum()),
            accelerators: self.healthy,
            capacities: AcceleratorCapacities { unlisted_each: None, by_uuid: self.capacities.clone() },
            indices: self.indices.clone(),
            units,
            slots: BTreeMap::new(),
            warning: join(warning, self.warning.clone()),
        }
    }

    /// The same for a pool with slots: no accelerator has more of them than its agent offers.
    fn slot_capacity(&self, pool: &PoolSlots) -> NodeCapacity {
        let usable = |id: &AcceleratorId| self.slots.get(id).map_or(pool.each, |listed| listed.usable(pool));
        let slots: BTreeMap<AcceleratorId, u32> =
            self.capacities.keys().map(|id| (id.clone(), usable(id))).collect();
        let healthy = self.capacities.iter().filter(|(_, capacity)| **capacity > Bytes::ZERO);
        let units = healthy.map(|(id, _)| usable(id)).fold(0, u32::saturating_add);
        let short = self.slots.values().find(|listed| listed.usable(pool) < pool.each);
        let capacity = self.capacity(Some(units), short.map(|listed| listed.shortfall(pool)));
        NodeCapacity { slots, ..capacity }
    }
}

impl ListedSlots {
    /// The slots that engines of this pool may take.
    fn usable(&self, pool: &PoolSlots) -> u32 {
        if self.configuration == pool.configuration.as_str() { self.count.min(pool.each) } else { 0 }
    }

    /// Text on why those are fewer than the pool's, and what to change.
    fn shortfall(&self, pool: &PoolSlots) -> String {
        let Self { configuration, count } = self;
        let PoolSlots { configuration: wanted, each } = pool;
        if configuration == wanted.as_str() {
            return format!(
                "its accelerators have {count} of {each} slots each: raise the capacity of the DeviceConfiguration \
                 '{wanted}', or lower the pool's slots"
            );
        }
        format!(
            "its accelerators are offered by the DeviceConfiguration '{configuration}', and the pool's resource is of \
             '{wanted}': correct the resource, or let '{wanted}' alone select the node"
        )
    }
}

/// Returns a node's capacity for a pool whose Pods request `resource`.
pub(super) fn node_capacity(
    node: &IndexedNode,
    accelerators: Option<&Result<ListedAccelerators, String>>,
    resource: &str,
) -> NodeCapacity {
    let (units, odd) = match node.extended_resources.get(resource) {
        None => (None, None),
        Some(Ok(units)) => (Some(*units), None),
        Some(Err(text)) => (None, Some(format!("allocatable {resource} is '{text}', which is not a number"))),
    };
    match accelerators {
        Some(Ok(found)) => found.capacity(units, odd),
        // The node's AcceleratorNode is unreadable, so the health of its accelerators is unknown.
        Some(Err(why)) => NodeCapacity {
            bytes: Some(Bytes::ZERO),
            units,
            warning: join(odd, Some(why.clone())),
            ..NodeCapacity::default()
        },
        None => by_labels(node, units, odd),
    }
}

fn by_labels(node: &IndexedNode, units: Option<u32>, odd: Option<String>) -> NodeCapacity {
    let number = |label: &str| {
        let text = node.labels.get(label)?;
        Some(text.parse::<u64>().map_err(|_| format!("the label {label} is '{text}', which is not a number")))
    };
    let (each, count) = match (number(MEMORY).transpose(), number(COUNT).transpose()) {
        (Ok(each), Ok(count)) => (each, count),
        (each, count) => {
            let warning = join(odd, join(each.err(), count.err()));
            return NodeCapacity { units, warning, ..NodeCapacity::default() };
        }
    };
    let accelerators = units.map(|units| match count {
        Some(count) => units.min(u32::try_from(count).unwrap_or(u32::MAX)),
        None => units,
    });
    let each = each.map(|mib| Bytes(mib.saturating_mul(1 << 20)));
    let bytes =
        each.zip(accelerators).map(|(Bytes(each), count)| Bytes(each.saturating_mul(u64::from(count))));
    let capacities = AcceleratorCapacities { unlisted_each: each, ..AcceleratorCapacities::default() };
    NodeCapacity {
        bytes,
        accelerators: accelerators.unwrap_or_default(),
        capacities,
        units,
        warning: odd,
        ..NodeCapacity::default()
    }
}

/// Returns a node's capacity for a pool with these slots on each accelerator.
///
/// The node's allocatable units do not count: a slot in use elsewhere lowers them.
pub(super) fn slot_capacity(
    accelerators: Option<&Result<ListedAccelerators, String>>,
    slots: &PoolSlots,
) -> NodeCapacity {
    match accelerators {
        Some(Ok(found)) => found.slot_capacity(slots),
        Some(Err(why)) => NodeCapacity { warning: Some(why.clone()), ..NodeCapacity::default() },
        None => {
            let warning = Some("its node agent has not listed its accelerators".to_owned());
            NodeCapacity { warning, ..NodeCapacity::default() }
        }
    }
}

fn join(one: Option<String>, other: Option<String>) -> Option<String> {
    match (one, other) {
        (Some(one), Some(other)) => Some(format!("{one}; {other}")),
        (one, other) => one.or(other),
    }
}

/// Parses a whole number of units. An API server writes a thousand as `1k`.
fn whole(text: &str) -> Option<u32> {
    let (digits, factor) = match text.strip_suffix('k') {
        Some(digits) => (digits, 1000),
        None => (text, 1),
    };
    if !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    digits.parse::<u32>().ok()?.checked_mul(factor)
}
