//! Accelerators that the kubelet assigns to Pods, as with NVIDIA's device plugin.

use std::sync::Arc;

use anyhow::Result;
use k8s_openapi::api::core::v1::Node as Object;
use kube::Api;
use rouse_kubelet::{AllocateError, ContainerAllocation, DevicePlugin, PluginDevice, PluginServer};
use tokio::sync::watch;

use super::{ACCELERATOR_RESOURCE, KubeletNode, until_counted};

/// The variable by which a container knows its accelerators.
const VISIBLE: &str = "NVIDIA_VISIBLE_DEVICES";

/// A device plugin for accelerators. Dropping it ends it, and the kubelet assigns none any more.
pub struct AcceleratorPlugin {
    _server: PluginServer,
}

/// Lists accelerators, and sets the variable in containers that get some.
struct VisibleAccelerators(watch::Sender<Arc<Vec<PluginDevice>>>);

impl KubeletNode {
    /// Offers accelerators with these UUIDs as `nvidia.com/gpu`. Returns once the scheduler can count them.
    ///
    /// # Errors
    /// The plugin cannot be served, or the kubelet does not take it.
    pub async fn assign_accelerators(&self, ids: &[&str]) -> Result<AcceleratorPlugin> {
        let device = |id: &&str| PluginDevice { id: (*id).to_owned(), healthy: true };
        let devices = watch::Sender::new(Arc::new(ids.iter().map(device).collect()));
        let plugin = Arc::new(VisibleAccelerators(devices));
        let folder = self.kubelet_folder().join("device-plugins");
        let server = PluginServer::serve(&folder, ACCELERATOR_RESOURCE.to_owned(), plugin).await?;
        let users = &self.inner.users;
        let nodes: Api<Object> = Api::all(users.client(users.admin(), self.inner.api_server).await?);
        until_counted(&nodes, &self.name, &ids.len().to_string()).await?;
        Ok(AcceleratorPlugin { _server: server })
    }
}

impl DevicePlugin for VisibleAccelerators {
    fn devices(&self) -> watch::Receiver<Arc<Vec<PluginDevice>>> {
        self.0.subscribe()
    }

    async fn allocate(&self, ids: Vec<String>) -> Result<ContainerAllocation, AllocateError> {
        let env = [(VISIBLE.to_owned(), ids.join(","))].into();
        Ok(ContainerAllocation { env, ..ContainerAllocation::default() })
    }
}
