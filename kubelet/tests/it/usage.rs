//! Which devices containers use: the kubelet's list, and the container runtime's in its place.

use std::{
    collections::{BTreeSet, HashMap},
    path::Path,
};

use futures_util::stream;
use rouse_cluster::device_manager::DeviceManager;
use rouse_kubelet::{
    ContainerAnnotations, ContainerRuntimeClient, Error, KubeletUsage, PluginServer, PodDevices,
    PodResourcesClient,
    generated::container_runtime::{
        Container, ContainerState, ListContainersRequest, ListContainersResponse,
        runtime_service_server::{RuntimeService, RuntimeServiceServer},
    },
};
use tokio::{net::UnixListener, task::JoinSet};
use tonic::{Request, Response, Status, transport::Server};

use crate::scripted_plugin::ScriptedPlugin;

const RESOURCE: &str = "rouse.dev/gpu-0a1b2c3d4e";
const SLOT: &str = "gpu-0a1b2c3d4e-0";

/// Serves those of these containers that it is asked for.
struct FakeRuntime(Vec<Container>);

#[tonic::async_trait]
impl RuntimeService for FakeRuntime {
    async fn list_containers(
        &self,
        request: Request<ListContainersRequest>,
    ) -> Result<Response<ListContainersResponse>, Status> {
        let wanted = request.into_inner().filter.and_then(|filter| filter.state).map(|state| state.state);
        let fits = |container: &&Container| wanted.is_none_or(|wanted| wanted == container.state);
        Ok(Response::new(ListContainersResponse {
            containers: self.0.iter().filter(fits).cloned().collect(),
        }))
    }
}

/// Serves until the set is dropped.
fn serve_runtime(socket: &Path, containers: Vec<Container>) -> JoinSet<()> {
    let listener = UnixListener::bind(socket).unwrap();
    let connections = stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(connection, _)| connection);
        Some((accepted, listener))
    });
    let service = RuntimeServiceServer::new(FakeRuntime(containers));
    let mut server = JoinSet::new();
    server.spawn(async move { Server::builder().serve_with_incoming(service, connections).await.unwrap() });
    server
}

fn container(id: &str, state: ContainerState, annotations: &[(&str, &str)]) -> Container {
    let annotations: HashMap<String, String> =
        annotations.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
    Container { id: id.to_owned(), state: state.into(), annotations, ..Container::default() }
}

/// Containers that run, are about to start, and have crashed, each with a slot.
fn containers() -> Vec<Container> {
    let slot = ("slot.rouse.dev/gpu-0a1b2c3d4e-0", "gpu-0a1b2c3d4e node-a");
    let virtual_device = ("slot.rouse.dev/gpu-ffffffffff-1", "gpu-ffffffffff C:gpu-0:node-a");
    let crashed = ("slot.rouse.dev/gpu-0a1b2c3d4e-2", "gpu-0a1b2c3d4e node-a");
    let created = ("slot.rouse.dev/gpu-0a1b2c3d4e-3", "gpu-0a1b2c3d4e node-a");
    vec![
        container("a", ContainerState::ContainerRunning, &[slot, virtual_device, ("other", "value")]),
        container("b", ContainerState::ContainerExited, &[crashed]),
        container("c", ContainerState::ContainerCreated, &[created]),
    ]
}

#[tokio::test]
async fn the_kubelet_lists_what_it_allocated_also_after_a_restart() {
    let root = tempfile::tempdir().unwrap();
    let mut manager = DeviceManager::start(root.path()).await.unwrap();
    let client = PodResourcesClient::new(manager.pod_resources_socket());
    assert!(client.list().await.unwrap().is_empty());
    let plugin = ScriptedPlugin::new(&[SLOT]);
    let folder = manager.plugin_folder().to_owned();
    let _server = PluginServer::serve(&folder, RESOURCE.to_owned(), plugin).await.unwrap();
    manager
        .until_devices(RESOURCE, "a healthy slot", |found| found.values().any(|healthy| *healthy))
        .await
        .unwrap();
    manager.allocate("team/engine", RESOURCE, 1).await.unwrap();
    let expected = PodDevices {
        namespace: "team".to_owned(),
        pod: "engine".to_owned(),
        container: "main".to_owned(),
        resource: RESOURCE.to_owned(),
        ids: vec![SLOT.to_owned()],
    };
    assert_eq!(client.list().await.unwrap(), std::slice::from_ref(&expected));
    manager.stop().await;
    let error = client.list().await.unwrap_err();
    assert!(matches!(error, Error::Connect { .. }), "{error}");
    manager.resume().await.unwrap();
    assert_eq!(client.list().await.unwrap(), [expected], "the same client, and the kubelet's new socket");
    manager.release("team/engine");
    assert!(client.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn containers_of_all_states_are_listed_with_their_annotations() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("containerd.sock");
    let _server = serve_runtime(&socket, containers());
    let listed = ContainerRuntimeClient::new(socket).list().await.unwrap();
    let ids: Vec<&str> = listed.iter().map(|container| container.id.as_str()).collect();
    assert_eq!(ids, ["a", "b", "c"]);
    let [ContainerAnnotations { annotations, .. }, ..] = listed.as_slice() else { panic!("{listed:?}") };
    assert_eq!(annotations.len(), 3);
    assert_eq!(annotations.get("other").map(String::as_str), Some("value"));
}

#[tokio::test]
async fn the_kubelets_list_goes_before_that_of_the_runtime() {
    let root = tempfile::tempdir().unwrap();
    let socket = root.path().join("containerd.sock");
    let _server = serve_runtime(&socket, containers());
    let mut manager = DeviceManager::start(root.path()).await.unwrap();
    let kubelet = PodResourcesClient::new(manager.pod_resources_socket());
    let usage = KubeletUsage::new(kubelet, Some(ContainerRuntimeClient::new(socket)));
    assert!(usage.in_use().await.unwrap().ids.is_empty(), "the runtime was not asked");
    manager.stop().await;
    // The socket of a kubelet that restarts is still there, and the runtime knows less than the kubelet.
    assert!(matches!(usage.in_use().await.unwrap_err(), Error::Connect { .. }));
}

#[tokio::test]
async fn the_runtime_is_asked_where_the_kubelet_has_no_list_and_a_crashed_container_keeps_its_slot() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("containerd.sock");
    let _server = serve_runtime(&socket, containers());
    let kubelet = PodResourcesClient::new(folder.path().join("kubelet.sock"));
    let usage = KubeletUsage::new(kubelet.clone(), Some(ContainerRuntimeClient::new(socket)));
    let found = usage.in_use().await.unwrap();
    let in_use = [SLOT, "gpu-0", "gpu-0a1b2c3d4e-2", "gpu-0a1b2c3d4e-3"];
    assert_eq!(found.ids, BTreeSet::from(in_use.map(str::to_owned)));
    assert_eq!(found.foreign, None, "the runtime does not know other plugins' devices");
    let alone = KubeletUsage::new(kubelet, None);
    assert!(matches!(alone.in_use().await.unwrap_err(), Error::NoSocket(_)));
}

#[tokio::test]
async fn no_list_at_all_is_an_error_that_names_both() {
    let folder = tempfile::tempdir().unwrap();
    let kubelet = PodResourcesClient::new(folder.path().join("kubelet.sock"));
    let runtime = ContainerRuntimeClient::new(folder.path().join("containerd.sock"));
    let error = KubeletUsage::new(kubelet, Some(runtime)).in_use().await.unwrap_err();
    assert!(matches!(error, Error::NoUsage { .. }));
    let text = error.to_string();
    assert!(text.contains("kubelet.sock") && text.contains("containerd.sock"), "{text}");
}
