//! What a device manager serves: `Register` for plugins, `List` for readers of the devices that Pods have.

use std::{
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use rouse_kubelet::{
    AllocatedDevice, AllocatedMount, ContainerAllocation,
    generated::{
        device_plugin::{
            ContainerAllocateResponse, DeviceSpec, Empty, Mount, RegisterRequest,
            device_plugin_client::DevicePluginClient, registration_server::Registration,
        },
        pod_resources::{
            ContainerDevices, ContainerResources, ListPodResourcesRequest, ListPodResourcesResponse,
            PodResources, pod_resources_lister_server::PodResourcesLister,
        },
    },
};
use tokio::{sync::watch, task::JoinSet};
use tonic::{
    Request, Response, Status,
    transport::{Channel, Endpoint},
};

use super::state::DeviceManagerState;

/// Namespace of a Pod that is named without one.
const DEFAULT_NAMESPACE: &str = "default";

pub(super) struct DeviceManagerService {
    folder: PathBuf,
    state: watch::Sender<DeviceManagerState>,
    /// One task for each stream of lists, aborted with the manager.
    followers: Mutex<JoinSet<()>>,
}

impl DeviceManagerService {
    pub(super) fn new(folder: PathBuf) -> Self {
        Self { folder, state: watch::Sender::default(), followers: Mutex::default() }
    }

    pub(super) fn folder(&self) -> &Path {
        &self.folder
    }

    pub(super) fn states(&self) -> &watch::Sender<DeviceManagerState> {
        &self.state
    }

    pub(super) fn forget_plugins(&self) {
        self.state.send_modify(DeviceManagerState::forget_plugins);
    }

    pub(super) fn disconnect(&self, resource: &str) {
        self.state.send_modify(|state| state.disconnected(resource));
    }

    pub(super) fn reserve(
        &self,
        pod: &str,
        resource: &str,
        count: usize,
    ) -> Result<(Channel, Vec<String>), String> {
        let mut reserved = Err(String::new());
        self.state.send_modify(|state| reserved = state.reserve(pod, resource, count));
        reserved
    }

    pub(super) fn reserve_ids(&self, pod: &str, resource: &str, ids: &[String]) -> Result<Channel, String> {
        let mut reserved = Err(String::new());
        self.state.send_modify(|state| reserved = state.reserve_ids(pod, resource, ids));
        reserved
    }

    pub(super) fn set_listed(&self, pod: &str, listed: bool) {
        self.state.send_modify(|state| state.set_listed(pod, listed));
    }

    pub(super) fn record(&self, pod: &str, resource: &str) {
        self.state.send_modify(|state| state.record(pod, resource));
    }

    pub(super) fn release(&self, pod: &str, resource: &str, ids: &[String]) {
        self.state.send_modify(|state| state.release(pod, resource, ids));
    }

    pub(super) fn release_pod(&self, pod: &str) {
        self.state.send_modify(|state| state.release_pod(pod));
    }

    /// Records a registration, and follows its lists.
    fn connected(&self, resource: String, channel: Channel) {
        // The lock is held until the plugin is known, so its first list finds it.
        self.state.send_modify(|state| {
            let follow =
                follow(self.state.clone(), resource.clone(), DevicePluginClient::new(channel.clone()));
            let follower = self.followers.lock().unwrap_or_else(PoisonError::into_inner).spawn(follow);
            state.connected(&resource, channel, follower);
        });
    }
}

/// Follows the lists of one registration until its stream ends.
async fn follow(
    states: watch::Sender<DeviceManagerState>,
    resource: String,
    mut client: DevicePluginClient<Channel>,
) {
    if let Ok(stream) = client.list_and_watch(Empty {}).await {
        let mut stream = stream.into_inner();
        while let Ok(Some(list)) = stream.message().await {
            let health =
                list.devices.into_iter().map(|device| (device.id, device.health == "Healthy")).collect();
            states.send_modify(|state| state.listed(&resource, health));
        }
    }
    states.send_modify(|state| state.disconnected(&resource));
}

#[tonic::async_trait]
impl Registration for DeviceManagerService {
    async fn register(&self, request: Request<RegisterRequest>) -> Result<Response<Empty>, Status> {
        let RegisterRequest { version, endpoint, resource_name, .. } = request.into_inner();
        if version != "v1beta1" {
            return Err(Status::invalid_argument(format!("unsupported version {version}")));
        }
        if !resource_name.contains('/') {
            return Err(Status::invalid_argument(format!("'{resource_name}' is no extended resource")));
        }
        let failed = |error: tonic::transport::Error| Status::unavailable(error.to_string());
        let path = format!("unix://{}", self.folder.join(endpoint).display());
        let channel = Endpoint::from_shared(path).map_err(failed)?.connect().await.map_err(failed)?;
        DevicePluginClient::new(channel.clone()).get_device_plugin_options(Empty {}).await?;
        self.connected(resource_name, channel);
        Ok(Response::new(Empty {}))
    }
}

#[tonic::async_trait]
impl PodResourcesLister for DeviceManagerService {
    async fn list(
        &self,
        _request: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let state = self.state.borrow();
        let pod_resources = state.recorded().map(|(pod, resource, ids)| {
            let (namespace, name) = pod.split_once('/').unwrap_or((DEFAULT_NAMESPACE, pod));
            let devices = ContainerDevices { resource_name: resource.to_owned(), device_ids: ids.to_vec() };
            let container = ContainerResources { name: "main".to_owned(), devices: vec![devices] };
            PodResources {
                name: name.to_owned(),
                namespace: namespace.to_owned(),
                containers: vec![container],
            }
        });
        Ok(Response::new(ListPodResourcesResponse { pod_resources: pod_resources.collect() }))
    }
}

/// What the container of this response gets.
pub(super) fn allocation(response: ContainerAllocateResponse) -> ContainerAllocation {
    let ContainerAllocateResponse { envs, mounts, devices, annotations, .. } = response;
    let mount = |mount: Mount| AllocatedMount {
        host_path: mount.host_path,
        container_path: mount.container_path,
        read_only: mount.read_only,
    };
    let device = |device: DeviceSpec| AllocatedDevice {
        host_path: device.host_path,
        container_path: device.container_path,
        permissions: device.permissions,
    };
    ContainerAllocation {
        env: envs.into_iter().collect(),
        mounts: mounts.into_iter().map(mount).collect(),
        devices: devices.into_iter().map(device).collect(),
        annotations: annotations.into_iter().collect(),
    }
}
