//! The sockets of a node's kubelet and container runtime.
//!
//! ```text
//!   <kubelet>/device-plugins/kubelet.sock        Register                   (registration)
//!   <kubelet>/device-plugins/rouse-….sock        ListAndWatch, Allocate     (plugin_server), served for the kubelet
//!   <kubelet>/pod-resources/kubelet.sock         List                       (pod_resources)
//!   the container runtime's socket               ListContainers             (containers)
//! ```
//!
//! * [`PluginServer`] offers the devices of one [`DevicePlugin`] as one extended resource. It serves before it
//!   registers, because the kubelet calls back before it answers. A restarted kubelet deletes every socket in its
//!   folder and forgets every plugin, so the server watches for the kubelet's new socket (`socket_watch`), listens on a
//!   new socket of its own, and registers again.
//! * [`KubeletUsage`] lists the devices that containers use: the kubelet's own list ([`PodResourcesClient`]), or the
//!   annotations of containers ([`ContainerRuntimeClient`]) on a node whose kubelet has no such list.
//!
//! The kubelet's messages are in `proto/`, with the fields that Rouse reads. `generated` is made from them, and a test
//! compares the two (`tests/generated.rs`). This crate makes no decisions: its callers decide which device a container
//! gets, and when a device is free again.

// These modules read bytes from outside. Releases abort on a panic, so one out-of-bounds index ends the agent.
#![warn(clippy::indexing_slicing)]

mod containers;
mod device_plugin;
mod error;
mod plugin_server;
mod pod_resources;
mod registration;
mod socket_watch;
mod unix_call;
mod usage_source;

pub use crate::{
    containers::{ContainerAnnotations, ContainerRuntimeClient},
    device_plugin::{
        AllocateError, AllocatedDevice, AllocatedMount, ContainerAllocation, DevicePlugin, PluginDevice,
    },
    error::Error,
    plugin_server::PluginServer,
    pod_resources::{PodDevices, PodResourcesClient},
    usage_source::{KubeletUsage, SlotsInUse},
};

/// The messages, clients and servers that `proto/` gives.
#[allow(clippy::all, clippy::pedantic, clippy::nursery, clippy::restriction, missing_docs, unreachable_pub)]
pub mod generated {
    /// The device plugin API, `v1beta1`.
    pub mod device_plugin {
        include!("generated/v1beta1.rs");
    }
    /// The API of Pods' devices, `v1`.
    pub mod pod_resources {
        include!("generated/v1.rs");
    }
    /// The container runtime's API, `runtime.v1`.
    pub mod container_runtime {
        include!("generated/runtime.v1.rs");
    }
}
