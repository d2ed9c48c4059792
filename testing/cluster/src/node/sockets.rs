//! The sockets of a node's kubelet and container runtime, for agents and tests on this machine.

use std::path::PathBuf;

use anyhow::Result;
use rouse_kubelet::{ContainerAnnotations, ContainerRuntimeClient, PodDevices, PodResourcesClient};

use super::{KubeletNode, runtime::CONTAINERD_SOCKET};

impl KubeletNode {
    /// The kubelet's folder, by a path of this machine that leaves room for the names of sockets.
    #[must_use]
    pub fn kubelet_folder(&self) -> PathBuf {
        self.machine.path("/var/lib/kubelet")
    }

    /// The container runtime's socket, by a path of this machine.
    #[must_use]
    pub fn runtime_socket(&self) -> PathBuf {
        self.machine.path(CONTAINERD_SOCKET)
    }

    /// Returns the devices of all Pods, as the kubelet lists them.
    ///
    /// # Errors
    /// The kubelet does not answer.
    pub async fn pod_devices(&self) -> Result<Vec<PodDevices>> {
        let socket = self.kubelet_folder().join("pod-resources/kubelet.sock");
        Ok(PodResourcesClient::new(socket).list().await?)
    }

    /// Returns the containers with their annotations, those that have ended, too, as the container runtime lists them.
    ///
    /// # Errors
    /// The container runtime does not answer.
    pub async fn containers(&self) -> Result<Vec<ContainerAnnotations>> {
        Ok(ContainerRuntimeClient::new(self.runtime_socket()).list().await?)
    }
}
