//! What a device plugin offers to the kubelet, and what it answers.

use std::{collections::BTreeMap, sync::Arc};

use tokio::sync::watch;

/// One device of a plugin's list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PluginDevice {
    /// At most 63 characters, and unique among the devices of the resource.
    pub id: String,
    /// Whether the kubelet may give it to a new container. A running container keeps an unhealthy device.
    pub healthy: bool,
}

/// The devices of one extended resource.
pub trait DevicePlugin: Send + Sync + 'static {
    /// Returns the list. Every change of it is sent to the kubelet.
    fn devices(&self) -> watch::Receiver<Arc<Vec<PluginDevice>>>;

    /// Prepares these devices for one container, which the kubelet is about to admit.
    ///
    /// The kubelet admits no other Pod meanwhile and sets no deadline, so the server drops the future after 5 s. A call
    /// may be repeated: the kubelet forgets devices of a Pod that it rejected for another reason.
    ///
    /// # Errors
    /// The container cannot have them. The kubelet then rejects the Pod for good, with this text in its status.
    fn allocate(
        &self,
        ids: Vec<String>,
    ) -> impl Future<Output = Result<ContainerAllocation, AllocateError>> + Send;
}

/// What a container gets with its devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ContainerAllocation {
    pub env: BTreeMap<String, String>,
    pub mounts: Vec<AllocatedMount>,
    pub devices: Vec<AllocatedDevice>,
    /// Annotations of the container at its runtime, not of the Pod.
    pub annotations: BTreeMap<String, String>,
}

/// A path of the node that is mounted into the container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedMount {
    pub host_path: String,
    pub container_path: String,
    pub read_only: bool,
}

/// A device node of the node that the container can open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AllocatedDevice {
    pub host_path: String,
    pub container_path: String,
    /// Some of `r`, `w` and `m` (mknod).
    pub permissions: String,
}

/// Why a container cannot have its devices, as a sentence for its user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct AllocateError(pub String);
