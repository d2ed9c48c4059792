//! The kubelet's list of the devices that Pods have (PodResources API, v1).
//!
//! A device is in the list from its container's admission on, so also while the image is pulled. Kubelets before 1.34
//! list finished Pods, too, until they are deleted.

use std::{path::PathBuf, time::Duration};

use tonic::transport::Channel;

use crate::{
    Error,
    generated::pod_resources::{
        ListPodResourcesRequest, ListPodResourcesResponse, PodResources,
        pod_resources_lister_client::PodResourcesListerClient,
    },
    unix_call,
};

/// The kubelet answers from memory, but limits how many calls it answers in a second.
const DEADLINE: Duration = Duration::from_secs(2);
/// In bytes. A node with many Pods and devices exceeds the library's limit of 4 MB.
pub(crate) const LONGEST_LIST: usize = 16 << 20;

/// The devices of one resource that one container has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodDevices {
    pub namespace: String,
    pub pod: String,
    pub container: String,
    /// Name of the extended resource, for example `rouse.dev/gpu`.
    pub resource: String,
    pub ids: Vec<String>,
}

/// Reads the kubelet's list.
#[derive(Clone, Debug)]
pub struct PodResourcesClient {
    socket: PathBuf,
}

impl PodResourcesClient {
    /// `socket`: `<kubelet>/pod-resources/kubelet.sock`. Its folder has to be mounted, not the socket itself, which a
    /// restarted kubelet creates anew.
    #[must_use]
    pub const fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// Returns the devices of all Pods of the node.
    ///
    /// # Errors
    /// The kubelet cannot be reached, or does not answer within 2 s.
    pub async fn list(&self) -> Result<Vec<PodDevices>, Error> {
        let list = |channel: Channel| async move {
            let client = PodResourcesListerClient::new(channel);
            client.max_decoding_message_size(LONGEST_LIST).list(ListPodResourcesRequest {}).await
        };
        let ListPodResourcesResponse { pod_resources } =
            unix_call::call(&self.socket, "List", DEADLINE, list).await?;
        Ok(pod_resources.into_iter().flat_map(devices).collect())
    }
}

fn devices(pod: PodResources) -> Vec<PodDevices> {
    let PodResources { name, namespace, containers } = pod;
    let of_container = containers.into_iter().flat_map(|container| {
        let name = container.name;
        container.devices.into_iter().map(move |devices| (name.clone(), devices))
    });
    of_container
        .map(|(container, devices)| PodDevices {
            namespace: namespace.clone(),
            pod: name.clone(),
            container,
            resource: devices.resource_name,
            ids: devices.device_ids,
        })
        .collect()
}
