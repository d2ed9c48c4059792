//! Virtual devices: what the resource of a configuration offers to the kubelet of a node.
//!
//! The kubelet picks ids without knowing which device each one becomes, and a container that requests two devices must
//! get two different ones. So an id stands for no instance until it is allocated. Then it stands for one slot until the
//! node frees that slot.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use super::{
    claim::ClaimError,
    ids::{ConfigurationName, InstanceName, SlotName, VirtualId},
    instance::{InstanceUsage, SlotChange},
    names::virtual_id,
    usage::SlotUsage,
};
use crate::pairing::ids::NodeName;

/// The slot that a virtual device becomes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VirtualClaim {
    pub virtual_id: VirtualId,
    pub instance: InstanceName,
    pub slot: SlotName,
    /// The change to write first. `None` if the node has this slot under this id.
    pub change: Option<SlotChange>,
    /// Changes that free other slots which the node has under this id, to be written after all claims. If one fails,
    /// the reclaim frees that slot, but only once no container has the virtual device.
    pub releases: Vec<(InstanceName, SlotChange)>,
}

/// An instance whose slot a node has under some virtual id.
type Holding<'a> = (&'a InstanceName, &'a InstanceUsage, &'a SlotName);

/// Returns the virtual devices that a node offers: those that it uses, and one for each instance with a free slot.
///
/// All of them are healthy: devices that are faulty or that the node does not see are left out, as are slots above the
/// capacity, and their ids stay reserved. `healthy` are the instances whose device the node finds healthy.
#[must_use]
pub fn offered(
    configuration: &ConfigurationName,
    instances: &BTreeMap<InstanceName, InstanceUsage>,
    me: &NodeName,
    healthy: &BTreeSet<InstanceName>,
) -> BTreeSet<VirtualId> {
    let mut reserved = BTreeSet::new();
    let mut offered = BTreeSet::new();
    let mut free = 0;
    for (name, usage) in instances {
        let is_usable = is_usable(name, usage, me, healthy);
        for (slot, slot_usage) in &usage.slots {
            let Some(id) = held_id(slot_usage, me) else { continue };
            reserved.insert(id);
            if is_usable && !usage.is_surplus(name, slot) {
                offered.insert(id.clone());
            }
        }
        free += usize::from(is_usable && usage.open_slots(name).next().is_some());
    }
    let unused =
        (0_u32..).map(|number| virtual_id(configuration, number)).filter(|id| !reserved.contains(id));
    offered.extend(unused.take(free));
    offered
}

/// Chooses a slot of a different instance for each virtual device.
///
/// An id under which the node has a slot keeps it, unless another id of this container is on the same instance. All
/// others get the instances with the most free slots. The claims are in the order of the ids.
pub fn choose(
    ids: &[VirtualId],
    instances: &BTreeMap<InstanceName, InstanceUsage>,
    me: &NodeName,
    healthy: &BTreeSet<InstanceName>,
) -> Result<Vec<VirtualClaim>, ClaimError> {
    let ids: BTreeSet<&VirtualId> = ids.iter().collect();
    let mut claims = Vec::new();
    let mut picked: BTreeSet<&InstanceName> = BTreeSet::new();
    let mut open = Vec::new();
    for id in &ids {
        let holdings = holdings(id, instances, me);
        let kept = holdings
            .iter()
            .find(|(name, usage, _)| is_usable(name, usage, me, healthy) && !picked.contains(name))
            .copied();
        match kept {
            Some(holding) => {
                picked.insert(holding.0);
                claims.push(claim(id, holding, &holdings, me));
            }
            None => open.push((*id, holdings)),
        }
    }
    let is_candidate = |name: &InstanceName, usage: &InstanceUsage| {
        is_usable(name, usage, me, healthy) && !picked.contains(name)
    };
    let candidates = instances.iter().filter(|(name, usage)| is_candidate(name, usage));
    let mut candidates: Vec<Holding<'_>> = candidates
        .filter_map(|(name, usage)| usage.open_slots(name).next().map(|slot| (name, usage, slot)))
        .collect();
    if candidates.len() < open.len() {
        let free = claims.len() + candidates.len();
        return Err(ClaimError::Insufficient { wanted: ids.len(), free });
    }
    // The sort is stable: instances with as many free slots stay in the order of their names.
    candidates.sort_by_key(|(name, usage, _)| Reverse(usage.open_slots(name).count()));
    for ((id, holdings), candidate) in open.into_iter().zip(candidates) {
        claims.push(claim(id, candidate, &holdings, me));
    }
    claims.sort_by(|one, other| one.virtual_id.cmp(&other.virtual_id));
    Ok(claims)
}

fn claim(
    id: &VirtualId,
    (instance, usage, slot): Holding<'_>,
    holdings: &[Holding<'_>],
    me: &NodeName,
) -> VirtualClaim {
    let wanted = SlotUsage::Configuration { virtual_id: id.clone(), node: me.clone() };
    let others = holdings.iter().filter(|(_, _, held)| *held != slot);
    let releases = others.filter_map(|(name, usage, held)| {
        let change = usage.change(held, SlotUsage::Free)?;
        Some(((*name).clone(), change))
    });
    VirtualClaim {
        virtual_id: id.clone(),
        instance: instance.clone(),
        slot: slot.clone(),
        change: usage.change(slot, wanted),
        releases: releases.collect(),
    }
}

/// The slots that the node has under this id: one, unless a release has failed.
fn holdings<'a>(
    id: &VirtualId,
    instances: &'a BTreeMap<InstanceName, InstanceUsage>,
    me: &NodeName,
) -> Vec<Holding<'a>> {
    let mut holdings = Vec::new();
    for (name, usage) in instances {
        let held = usage.slots.iter().filter(|(_, slot)| held_id(slot, me) == Some(id));
        holdings.extend(held.map(|(slot, _)| (name, usage, slot)));
    }
    holdings
}

/// The virtual device under which the node uses a slot.
fn held_id<'a>(usage: &'a SlotUsage, me: &NodeName) -> Option<&'a VirtualId> {
    usage.virtual_id().filter(|_| usage.node() == Some(me))
}

fn is_usable(
    name: &InstanceName,
    usage: &InstanceUsage,
    me: &NodeName,
    healthy: &BTreeSet<InstanceName>,
) -> bool {
    healthy.contains(name) && usage.nodes.contains(me)
}
