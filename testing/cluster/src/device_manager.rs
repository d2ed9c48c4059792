//! A kubelet's device manager without the kubelet: it follows device plugins, allocates, and lists what Pods have.
//!
//! It does what a kubelet does on the sockets, and in its order. At its start it deletes every socket of its folder,
//! then listens. `Register` connects to the plugin before it answers. A stream of lists that ends makes the devices
//! unhealthy. Allocations survive a restart, as in the kubelet's checkpoint, and a plugin's error fails the Pod.
//!
//! One oddity of the kubelet is kept, because plugins have to live with it: the end of any stream of a resource ends
//! the newest registration of that resource.

use std::{
    collections::BTreeMap,
    fs,
    future::pending,
    io::ErrorKind,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, Result, anyhow};
use futures_util::{Stream, stream};
use rouse_kubelet::{
    ContainerAllocation,
    generated::{
        device_plugin::{
            AllocateRequest, ContainerAllocateRequest, device_plugin_client::DevicePluginClient,
            registration_server::RegistrationServer,
        },
        pod_resources::pod_resources_lister_server::PodResourcesListerServer,
    },
};
use tokio::{
    net::{UnixListener, UnixStream},
    task::JoinSet,
    time,
};
use tonic::transport::{Channel, Server};

use self::{
    services::{DeviceManagerService, allocation},
    state::DeviceManagerState,
};
use crate::wait::WAIT_TIMEOUT;

mod services;
mod state;

/// Device ids of a resource, each with whether it is healthy.
pub type DeviceHealth = BTreeMap<String, bool>;

/// Numbers of devices by resource: all, and the healthy ones.
pub type DeviceCounts = BTreeMap<String, (usize, usize)>;

/// A device manager on the sockets of a folder. Dropping it is the end of the kubelet's process: its sockets stay.
pub struct DeviceManager {
    root: PathBuf,
    service: Arc<DeviceManagerService>,
    servers: JoinSet<()>,
}

/// The devices of a container, and what it gets with them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GrantedDevices {
    pub ids: Vec<String>,
    pub allocation: ContainerAllocation,
}

impl DeviceManager {
    /// Starts one in this folder, the kubelet's root.
    ///
    /// # Errors
    /// The sockets cannot be created.
    pub async fn start(root: &Path) -> Result<Self> {
        let service = Arc::new(DeviceManagerService::new(root.join("device-plugins")));
        let mut manager = Self { root: root.to_owned(), service, servers: JoinSet::new() };
        manager.resume().await?;
        Ok(manager)
    }

    /// Where plugins have their sockets.
    pub fn plugin_folder(&self) -> &Path {
        self.service.folder()
    }

    /// The socket that lists the devices of Pods.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.root.join("pod-resources/kubelet.sock")
    }

    /// Ends all connections, as the end of the kubelet's process does. Allocations are kept.
    pub async fn stop(&mut self) {
        self.servers.shutdown().await;
        self.service.forget_plugins();
    }

    /// Starts it after [`Self::stop`]: deletes all sockets in the folder of plugins, then listens on new ones.
    ///
    /// # Errors
    /// The sockets cannot be created.
    pub async fn resume(&mut self) -> Result<()> {
        self.stop().await;
        let folder = self.service.folder().to_owned();
        fs::create_dir_all(&folder)?;
        for entry in fs::read_dir(&folder)? {
            let entry = entry?;
            if entry.file_type()?.is_socket() {
                fs::remove_file(entry.path())?;
            }
        }
        let registration = RegistrationServer::from_arc(Arc::clone(&self.service));
        // A signal, even one that never comes, makes connections end with the server.
        let serve = Server::builder().serve_with_incoming_shutdown(
            registration,
            connections(&folder.join("kubelet.sock"))?,
            pending(),
        );
        self.servers.spawn(async move { drop(serve.await) });
        let lister = PodResourcesListerServer::from_arc(Arc::clone(&self.service));
        let serve = Server::builder().serve_with_incoming_shutdown(
            lister,
            connections(&self.pod_resources_socket())?,
            pending(),
        );
        self.servers.spawn(async move { drop(serve.await) });
        Ok(())
    }

    /// Ends all connections, deletes all sockets and forgets all plugins. Allocations are kept.
    ///
    /// # Errors
    /// The sockets cannot be created.
    pub async fn restart(&mut self) -> Result<()> {
        self.resume().await
    }

    /// Ends the stream of this resource's lists, as after an error of the connection.
    pub fn disconnect(&self, resource: &str) {
        self.service.disconnect(resource);
    }

    /// The devices of a resource. All are unhealthy while no plugin is connected.
    pub fn devices(&self, resource: &str) -> DeviceHealth {
        self.service.states().borrow().devices(resource)
    }

    /// The last list that a plugin of this resource sent.
    pub fn last_list(&self, resource: &str) -> DeviceHealth {
        self.service.states().borrow().last_list(resource)
    }

    /// How often a plugin of this resource has registered, over restarts.
    pub fn registrations(&self, resource: &str) -> u32 {
        self.service.states().borrow().registrations(resource)
    }

    /// Waits until `fits` accepts the devices of a resource, and returns them.
    ///
    /// # Errors
    /// [`WAIT_TIMEOUT`] passed; the error holds `condition` and the last devices.
    pub async fn until_devices(
        &self,
        resource: &str,
        condition: &str,
        mut fits: impl FnMut(&DeviceHealth) -> bool,
    ) -> Result<DeviceHealth> {
        let mut states = self.service.states().subscribe();
        let found = states.wait_for(|state: &DeviceManagerState| fits(&state.devices(resource)));
        match time::timeout(WAIT_TIMEOUT, found).await {
            Ok(state) => Ok(state.context("the device manager has ended")?.devices(resource)),
            Err(_) => {
                let last = self.devices(resource);
                Err(anyhow!("waited {} s for {condition} of {resource}: {last:?}", WAIT_TIMEOUT.as_secs()))
            }
        }
    }

    /// Waits until the numbers of devices differ from these, and returns them: a node's capacity and allocatable
    /// resources.
    ///
    /// # Errors
    /// The device manager has ended.
    pub async fn until_counts_differ(&self, last: &DeviceCounts) -> Result<DeviceCounts> {
        let mut states = self.service.states().subscribe();
        let changed = states.wait_for(|state: &DeviceManagerState| state.counts() != *last).await;
        Ok(changed.context("the device manager has ended")?.counts())
    }

    /// Allocates `count` devices that are healthy and that no Pod has to the container `main` of this Pod: `name`, or
    /// `namespace/name`.
    ///
    /// # Errors
    /// The text with which a kubelet fails the Pod.
    pub async fn allocate(&self, pod: &str, resource: &str, count: usize) -> Result<GrantedDevices, String> {
        let (channel, ids) = self.service.reserve(pod, resource, count)?;
        self.ask_plugin(channel, pod, resource, ids).await
    }

    /// Allocates these devices, healthy or not: a kubelet does that while a change of their health is on its way.
    ///
    /// # Errors
    /// The text with which a kubelet fails the Pod.
    pub async fn allocate_ids(
        &self,
        pod: &str,
        resource: &str,
        ids: &[String],
    ) -> Result<GrantedDevices, String> {
        let channel = self.service.reserve_ids(pod, resource, ids)?;
        self.ask_plugin(channel, pod, resource, ids.to_vec()).await
    }

    async fn ask_plugin(
        &self,
        channel: Channel,
        pod: &str,
        resource: &str,
        ids: Vec<String>,
    ) -> Result<GrantedDevices, String> {
        let container = ContainerAllocateRequest { devices_ids: ids.clone() };
        let request = AllocateRequest { container_requests: vec![container] };
        let response = match DevicePluginClient::new(channel).allocate(request).await {
            Ok(response) => response.into_inner().container_responses.into_iter().next(),
            Err(status) => {
                self.service.release(pod, resource, &ids);
                return Err(format!("rpc error: code = {:?} desc = {}", status.code(), status.message()));
            }
        };
        let Some(response) = response else {
            self.service.release(pod, resource, &ids);
            return Err("the plugin answered for no container".to_owned());
        };
        self.service.record(pod, resource);
        Ok(GrantedDevices { ids, allocation: allocation(response) })
    }

    /// Sets whether the list of Pods' devices has this Pod. A container that is made anew may be missing for a while.
    pub fn set_listed(&self, pod: &str, listed: bool) {
        self.service.set_listed(pod, listed);
    }

    /// Frees all devices of this Pod, which has ended. The plugin is not told.
    pub fn release(&self, pod: &str) {
        self.service.release_pod(pod);
    }
}

impl Drop for DeviceManager {
    fn drop(&mut self) {
        self.service.forget_plugins();
    }
}

/// The connections to a new socket at this path.
fn connections(socket: &Path) -> Result<impl Stream<Item = std::io::Result<UnixStream>> + Send + use<>> {
    match fs::remove_file(socket) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    fs::create_dir_all(socket.parent().context("a socket is in a folder")?)?;
    let listener =
        UnixListener::bind(socket).with_context(|| format!("cannot listen on {}", socket.display()))?;
    Ok(stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(connection, _)| connection);
        Some((accepted, listener))
    }))
}
