//! The calls of the kubelet to a plugin, as gRPC.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, stream};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

use crate::{
    AllocateError, AllocatedDevice, AllocatedMount, ContainerAllocation, DevicePlugin, PluginDevice,
    generated::device_plugin::{self as wire, device_plugin_server},
    registration::OPTIONS,
};

/// Serves one plugin on one socket.
pub(super) struct PluginService<P> {
    pub(super) plugin: Arc<P>,
    /// True, or closed, when the lists must end.
    pub(super) ending: watch::Receiver<bool>,
    pub(super) streams: watch::Sender<ListStreams>,
    pub(super) allocate_limit: Duration,
}

/// The streams of lists that the kubelet has opened on one socket.
#[derive(Debug, Default)]
pub(super) struct ListStreams {
    opened: bool,
    open: usize,
}

impl ListStreams {
    const fn opened(&self) -> bool {
        self.opened
    }

    /// Whether the kubelet has ended what it opened, and so takes all devices for unhealthy.
    const fn abandoned(&self) -> bool {
        self.opened && self.open == 0
    }
}

/// Completes when the kubelet has ended its streams, has opened none within the limit, or the server has ended.
///
/// The kubelet opens a stream after it has accepted the registration, and reports no failure to do so.
pub(super) async fn until_abandoned(streams: &mut watch::Receiver<ListStreams>, first_list_limit: Duration) {
    let opening = tokio::time::timeout(first_list_limit, streams.wait_for(ListStreams::opened));
    let is_opened = opening.await.is_ok_and(|opened| opened.is_ok());
    if is_opened {
        // An error means that the server has ended, and the kubelet's stream with it.
        drop(streams.wait_for(ListStreams::abandoned).await);
    }
}

#[tonic::async_trait]
impl<P: DevicePlugin> device_plugin_server::DevicePlugin for PluginService<P> {
    type ListAndWatchStream = Pin<Box<dyn Stream<Item = Result<wire::ListAndWatchResponse, Status>> + Send>>;

    async fn get_device_plugin_options(
        &self,
        _request: Request<wire::Empty>,
    ) -> Result<Response<wire::DevicePluginOptions>, Status> {
        Ok(Response::new(OPTIONS))
    }

    async fn list_and_watch(
        &self,
        _request: Request<wire::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let list = ListStream {
            devices: self.plugin.devices(),
            ending: self.ending.clone(),
            stage: ListStage::First,
            _open: OpenStream::new(&self.streams),
        };
        let stream: Self::ListAndWatchStream = Box::pin(stream::unfold(list, ListStream::next_list));
        Ok(Response::new(stream))
    }

    async fn get_preferred_allocation(
        &self,
        _request: Request<wire::PreferredAllocationRequest>,
    ) -> Result<Response<wire::PreferredAllocationResponse>, Status> {
        Err(Status::unimplemented("this plugin prefers no device to another"))
    }

    /// Answers every container of the request, within one deadline. The kubelet sends one container at a time.
    async fn allocate(
        &self,
        request: Request<wire::AllocateRequest>,
    ) -> Result<Response<wire::AllocateResponse>, Status> {
        let answers = async {
            let mut container_responses = Vec::new();
            for container in request.into_inner().container_requests {
                let allocation = self.plugin.allocate(container.devices_ids).await;
                let allocation =
                    allocation.map_err(|AllocateError(text)| Status::failed_precondition(text))?;
                container_responses.push(allocation.into());
            }
            Ok::<_, Status>(Response::new(wire::AllocateResponse { container_responses }))
        };
        let expired = |_| {
            let limit = self.allocate_limit.as_secs_f64();
            Status::deadline_exceeded(format!(
                "no devices were claimed within {limit} s: create the Pod again"
            ))
        };
        tokio::time::timeout(self.allocate_limit, answers).await.map_err(expired)?
    }

    async fn pre_start_container(
        &self,
        _request: Request<wire::PreStartContainerRequest>,
    ) -> Result<Response<wire::PreStartContainerResponse>, Status> {
        Ok(Response::new(wire::PreStartContainerResponse {}))
    }
}

/// A stream of lists: the list, its changes, and at the end the list with all devices unhealthy.
struct ListStream {
    devices: watch::Receiver<Arc<Vec<PluginDevice>>>,
    ending: watch::Receiver<bool>,
    stage: ListStage,
    _open: OpenStream,
}

#[derive(Clone, Copy)]
enum ListStage {
    First,
    Following,
    Ended,
}

impl ListStream {
    async fn next_list(mut self) -> Option<(Result<wire::ListAndWatchResponse, Status>, Self)> {
        match self.stage {
            ListStage::First => self.stage = ListStage::Following,
            ListStage::Following => {
                let plugin_gone = tokio::select! {
                    biased;
                    _ = self.ending.wait_for(|ending| *ending) => true,
                    changed = self.devices.changed() => changed.is_err(),
                };
                if plugin_gone {
                    self.stage = ListStage::Ended;
                }
            }
            ListStage::Ended => return None,
        }
        let usable = matches!(self.stage, ListStage::Following);
        let list = Arc::clone(&self.devices.borrow_and_update());
        Some((Ok(response(&list, usable)), self))
    }
}

fn response(list: &[PluginDevice], usable: bool) -> wire::ListAndWatchResponse {
    let device = |PluginDevice { id, healthy }: &PluginDevice| {
        let health = if *healthy && usable { "Healthy" } else { "Unhealthy" };
        wire::Device { id: id.clone(), health: health.to_owned(), topology: None }
    };
    wire::ListAndWatchResponse { devices: list.iter().map(device).collect() }
}

/// Counts a stream while it is open.
struct OpenStream(watch::Sender<ListStreams>);

impl OpenStream {
    fn new(streams: &watch::Sender<ListStreams>) -> Self {
        streams.send_modify(|streams| {
            streams.opened = true;
            streams.open += 1;
        });
        Self(streams.clone())
    }
}

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.send_modify(|streams| streams.open -= 1);
    }
}

impl From<ContainerAllocation> for wire::ContainerAllocateResponse {
    fn from(allocation: ContainerAllocation) -> Self {
        let ContainerAllocation { env, mounts, devices, annotations } = allocation;
        let mount = |mount: AllocatedMount| wire::Mount {
            container_path: mount.container_path,
            host_path: mount.host_path,
            read_only: mount.read_only,
        };
        let device = |device: AllocatedDevice| wire::DeviceSpec {
            container_path: device.container_path,
            host_path: device.host_path,
            permissions: device.permissions,
        };
        Self {
            envs: env.into_iter().collect(),
            mounts: mounts.into_iter().map(mount).collect(),
            devices: devices.into_iter().map(device).collect(),
            annotations: annotations.into_iter().collect(),
            cdi_devices: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future;

    use futures_util::FutureExt as _;
    use tonic::Code;

    use super::{device_plugin_server::DevicePlugin as _, *};

    /// Grants the first container its devices, and never decides about the device `stuck`.
    struct HesitantPlugin;

    impl DevicePlugin for HesitantPlugin {
        fn devices(&self) -> watch::Receiver<Arc<Vec<PluginDevice>>> {
            watch::channel(Arc::default()).1
        }

        async fn allocate(&self, ids: Vec<String>) -> Result<ContainerAllocation, AllocateError> {
            match ids.concat().as_str() {
                "stuck" => future::pending().await,
                "taken" => Err(AllocateError("node-b has taken the device".to_owned())),
                id => {
                    let env = [("ID".to_owned(), id.to_owned())].into();
                    Ok(ContainerAllocation { env, ..ContainerAllocation::default() })
                }
            }
        }
    }

    async fn allocate(containers: &[&str]) -> Result<Vec<String>, Status> {
        let service = PluginService {
            plugin: Arc::new(HesitantPlugin),
            ending: watch::channel(false).1,
            streams: watch::Sender::default(),
            allocate_limit: Duration::from_millis(20),
        };
        let container = |id: &&str| wire::ContainerAllocateRequest { devices_ids: vec![(*id).to_owned()] };
        let container_requests = containers.iter().map(container).collect();
        let granted = service.allocate(Request::new(wire::AllocateRequest { container_requests })).await?;
        let id = |response: wire::ContainerAllocateResponse| response.envs.values().cloned().collect();
        Ok(granted.into_inner().container_responses.into_iter().map(id).collect())
    }

    #[tokio::test]
    async fn a_plugin_is_abandoned_once_its_streams_have_ended_or_if_none_is_opened_in_time() {
        let (streams_tx, mut streams) = watch::channel(ListStreams::default());
        until_abandoned(&mut streams, Duration::from_millis(1)).await;
        let limit = Duration::from_secs(60);
        assert!(until_abandoned(&mut streams, limit).now_or_never().is_none(), "there still is time");
        let open = OpenStream::new(&streams_tx);
        assert!(until_abandoned(&mut streams, limit).now_or_never().is_none(), "it is open");
        drop(open);
        until_abandoned(&mut streams, limit).await;
    }

    #[tokio::test]
    async fn every_container_of_a_request_gets_its_response() {
        assert_eq!(allocate(&["a", "b"]).await.unwrap(), ["a", "b"]);
    }

    #[tokio::test]
    async fn a_refusal_is_a_status_with_the_plugins_sentence() {
        let refused = allocate(&["a", "taken"]).await.unwrap_err();
        assert_eq!(
            (refused.code(), refused.message()),
            (Code::FailedPrecondition, "node-b has taken the device")
        );
    }

    #[tokio::test]
    async fn an_undecided_request_ends_at_its_deadline() {
        let expired = allocate(&["stuck"]).await.unwrap_err();
        assert_eq!(expired.code(), Code::DeadlineExceeded);
        assert!(expired.message().contains("within 0.02 s"), "{expired}");
    }
}
