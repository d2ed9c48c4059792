//! Slots: devices that several containers share, on one node or on many.
//!
//! A *configuration* describes devices of one kind and how many *slots* each has. An *instance* is one device; its
//! status maps each slot to the node that uses it. A slot is the right to be scheduled, and no more: the kubelet starts
//! a container only with a slot of each device that it requests. A slot permits no engine to wake. Memory of an
//! accelerator is used only under a reservation ([`crate::fleet`]), so more engines than fit may have slots there.
//!
//! ```text
//!   kubelet ──Allocate(slot)──▶ node agent ──claim──▶ status of the instance ◀──free── leader: lost nodes, capacity
//!      ▲                           │   ▲                     │
//!      └──list: Healthy, Unhealthy─┘   └────── watch ────────┘
//! ```
//!
//! The object holds the truth. Every write is a compare-and-set: a claim tests that the slot has the usage that was
//! read, so of two nodes that claim the same slot one gets an error, and no other slot is touched
//! ([`InstanceUsage::claim`]). A change of the set of slots tests the version of the object
//! ([`InstanceUsage::layout`]). Free slots are keys with an empty text, because a test of a missing key proves nothing.
//!
//! The kubelet reports no end of a container. The [`Reclaimer`] compares claims with the slots that containers use, and
//! frees a slot that was unused for some minutes. The object has the moment since which a slot is unused, so the wait
//! goes on over a restart of the agent. A query that fails changes nothing.
//!
//! There are two ways to a slot. The resource of an instance offers its slots. The resource of a configuration offers
//! *virtual devices*: a container that requests two of them gets slots of two instances ([`virtual_devices`]).
//!
//! The leader frees what no agent can ([`SlotsController`]): the slots of lost nodes, and of nodes whose agent is gone.
//! It also keeps the map at the capacity, deletes instances that no node sees any more, and deletes Pods that a kubelet
//! rejected.

pub mod claim;
pub mod command;
pub mod event;
pub mod ids;
pub mod instance;
pub mod names;
pub mod reclaim;
pub mod usage;
pub mod virtual_devices;

mod controller;
mod rejected_pods;
mod slot_node;
mod tracked_instance;

pub use self::{
    claim::{ClaimError, ClaimKind},
    command::{InstanceEnd, NodeLoss, SlotsCommand},
    controller::{SlotsController, SlotsSettings},
    event::{ConfigurationFacts, InstanceFacts, NodeState, RejectedPod, SlotsEvent},
    ids::{ConfigurationName, InstanceName, SlotName, VirtualId},
    instance::{InstanceUsage, LayoutChange, SlotChange, SlotConflict, UnusedChange},
    names::{
        MAX_CAPACITY, RESOURCE_DOMAIN, SLOT_ANNOTATION, configuration_resource, device_resources,
        instance_name, instance_resource, property_suffix, slot_name, slot_number, virtual_id,
    },
    reclaim::Reclaimer,
    usage::{SlotUsage, SlotUsageError},
    virtual_devices::VirtualClaim,
};
