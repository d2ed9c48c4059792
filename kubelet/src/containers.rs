//! The container runtime's list of containers (CRI, v1), with the annotations that a device plugin gave them.
//!
//! Containers of all states are in it, because the kubelet may wait for minutes before it starts a container that has
//! crashed again, with the same devices. The kubelet keeps the last ended container until its Pod is deleted. So a
//! finished Pod counts until then, as in the list of kubelets before 1.34.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use tonic::transport::Channel;

use crate::{
    Error,
    generated::container_runtime::{
        Container, ListContainersRequest, runtime_service_client::RuntimeServiceClient,
    },
    pod_resources::LONGEST_LIST,
    unix_call,
};

/// A runtime that is busy starting containers answers slowly.
const DEADLINE: Duration = Duration::from_secs(2);

/// The annotations of one container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerAnnotations {
    pub id: String,
    pub annotations: BTreeMap<String, String>,
}

/// Reads the runtime's list.
#[derive(Clone, Debug)]
pub struct ContainerRuntimeClient {
    socket: PathBuf,
}

impl ContainerRuntimeClient {
    /// `socket`: the runtime's, for example `/run/containerd/containerd.sock`.
    #[must_use]
    pub const fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Returns all containers of the node, those that have ended, too.
    ///
    /// # Errors
    /// The runtime cannot be reached, or does not answer within 2 s.
    pub async fn list(&self) -> Result<Vec<ContainerAnnotations>, Error> {
        let list = |channel: Channel| async move {
            let client = RuntimeServiceClient::new(channel);
            let request = ListContainersRequest { filter: None };
            client.max_decoding_message_size(LONGEST_LIST).list_containers(request).await
        };
        let listed = unix_call::call(&self.socket, "ListContainers", DEADLINE, list).await?;
        let annotations = |Container { id, annotations, .. }| ContainerAnnotations {
            id,
            annotations: annotations.into_iter().collect(),
        };
        Ok(listed.containers.into_iter().map(annotations).collect())
    }
}
