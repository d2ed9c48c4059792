//! Serves a device plugin to the kubelet, and keeps it registered.

use std::{path::Path, sync::Arc, time::Duration};

use futures_util::{Stream, stream};
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{oneshot, watch},
    task::{JoinHandle, JoinSet},
};
use tonic::transport::Server;

use self::{
    service::{ListStreams, PluginService, until_abandoned},
    socket::PluginSocket,
};
use crate::{
    DevicePlugin, Error,
    generated::device_plugin::device_plugin_server::DevicePluginServer,
    registration::{PluginTerms, RegistrationLoop},
    socket_watch::KubeletSocketWatch,
};

mod service;
mod socket;

/// The kubelet admits no other Pod while it waits for an answer, and sets no deadline of its own.
const ALLOCATE_LIMIT: Duration = Duration::from_secs(5);
/// How long the kubelet may take to ask for the first list, once it has accepted a registration.
const FIRST_LIST_LIMIT: Duration = Duration::from_secs(30);
/// How long the kubelet may take for the last list.
const STOP_LIMIT: Duration = Duration::from_secs(1);
/// Pause after a connection could not be accepted, for want of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A device plugin that is served and kept registered until the server is stopped or dropped.
///
/// At its end the kubelet gets a last list, with all devices unhealthy, and the plugin's socket is removed. A dropped
/// server does this in the background, within a second.
#[derive(Debug)]
pub struct PluginServer {
    registered: watch::Receiver<bool>,
    /// Dropping it ends the task.
    stop_tx: oneshot::Sender<()>,
    task: JoinHandle<()>,
}

impl PluginServer {
    /// Listens in the kubelet's folder `device-plugins`, and begins to register the plugin for this resource.
    ///
    /// A kubelet that is down is no error: the plugin registers when it is back.
    ///
    /// # Errors
    /// No socket can be created in the folder, or the folder cannot be watched.
    pub async fn serve(
        folder: &Path,
        resource: String,
        plugin: Arc<impl DevicePlugin>,
    ) -> Result<Self, Error> {
        // Watched before anything is in the folder, so that no restart of the kubelet is missed.
        let kubelet_socket = KubeletSocketWatch::new(folder)
            .map_err(|source| Error::Watch { folder: folder.to_owned(), source })?;
        let terms = PluginTerms { folder: folder.to_owned(), resource, plugin };
        let serving = ServingPlugin::start(&terms).await?;
        let (registered_tx, registered) = watch::channel(false);
        let (stop_tx, stop_rx) = oneshot::channel();
        let registration = RegistrationLoop { terms, kubelet_socket, registered_tx, stop_rx };
        let task = tokio::spawn(registration.run(serving));
        Ok(Self { registered, stop_tx, task })
    }

    /// Reports whether the kubelet has the plugin, now and after each change.
    #[must_use]
    pub fn is_registered(&self) -> watch::Receiver<bool> {
        self.registered.clone()
    }

    /// Ends the plugin, and returns when the kubelet has the last list and the socket is removed, within a second.
    pub async fn stop(self) {
        let Self { stop_tx, task, .. } = self;
        drop(stop_tx);
        if let Err(error) = task.await {
            tracing::error!(%error, "the device plugin ended in an error");
        }
    }
}

/// A plugin on a socket of its own, registered or not.
///
/// Dropping it ends it: the task that accepts connections is aborted, and the streams of lists end by themselves.
pub(crate) struct ServingPlugin {
    socket: PluginSocket,
    ending_tx: watch::Sender<bool>,
    streams: watch::Receiver<ListStreams>,
    /// The one task that accepts connections.
    server: JoinSet<()>,
}

impl ServingPlugin {
    /// Listens on a new socket.
    pub(crate) async fn start<P: DevicePlugin>(terms: &PluginTerms<P>) -> Result<Self, Error> {
        let (socket, listener) = PluginSocket::bind(&terms.folder, &terms.resource).await?;
        let (ending_tx, mut ending) = watch::channel(false);
        let (streams_tx, streams) = watch::channel(ListStreams::default());
        // Kubelets since 1.26 send `localhost` as the authority. Older ones send the path of the socket, which is no
        // authority, and the HTTP/2 library resets such calls.
        let service = DevicePluginServer::new(PluginService {
            plugin: Arc::clone(&terms.plugin),
            ending: ending.clone(),
            streams: streams_tx,
            allocate_limit: ALLOCATE_LIMIT,
        });
        let serve =
            Server::builder().serve_with_incoming_shutdown(service, connections(listener), async move {
                drop(ending.wait_for(|ending| *ending).await);
            });
        let mut server = JoinSet::new();
        server.spawn(async move {
            if let Err(error) = serve.await {
                tracing::error!(%error, "the device plugin's server failed");
            }
        });
        Ok(Self { socket, ending_tx, streams, server })
    }

    /// The file name of the socket.
    pub(crate) fn endpoint(&self) -> &str {
        self.socket.endpoint()
    }

    /// Completes when the kubelet has ended its stream of lists, or has never opened one. It then takes all devices for
    /// unhealthy.
    pub(crate) async fn abandoned(&mut self) {
        until_abandoned(&mut self.streams, FIRST_LIST_LIMIT).await;
    }

    /// Sends the last list to the kubelet and removes the socket.
    pub(crate) async fn stop(mut self) {
        self.ending_tx.send_replace(true);
        if tokio::time::timeout(STOP_LIMIT, self.server.join_next()).await.is_err() {
            tracing::warn!(endpoint = self.endpoint(), "the kubelet did not take the last list in time");
        }
    }
}

/// The connections to a socket.
fn connections(listener: UnixListener) -> impl Stream<Item = std::io::Result<UnixStream>> + Send {
    stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await.map(|(connection, _)| connection);
        if accepted.is_err() {
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
        Some((accepted, listener))
    })
}
