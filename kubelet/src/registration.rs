//! Registers a plugin at the kubelet, again and again.
//!
//! A kubelet forgets its plugins when it restarts, and when the stream of lists ends. A new registration always has a
//! new socket, and the old one is closed first: the kubelet takes the end of any stream of a resource for the end of
//! the newest registration.

use std::{ops::ControlFlow, path::PathBuf, sync::Arc, time::Duration};

use rouse::error_chain::one_line;
use tokio::{
    sync::{oneshot, watch},
    time::{Instant, sleep},
};
use tonic::transport::Channel;

use crate::{
    DevicePlugin, Error,
    generated::device_plugin::{
        DevicePluginOptions, RegisterRequest, registration_client::RegistrationClient,
    },
    plugin_server::ServingPlugin,
    socket_watch::{KUBELET_SOCKET, KubeletSocketWatch},
    unix_call,
};

/// The version of the API that Rouse and every kubelet since 1.10 speak.
const API_VERSION: &str = "v1beta1";
/// Rouse's plugins do without the kubelet's optional calls.
pub(crate) const OPTIONS: DevicePluginOptions =
    DevicePluginOptions { pre_start_required: false, get_preferred_allocation_available: false };
/// The kubelet connects to the plugin before it answers, for up to 10 s.
const REGISTER_LIMIT: Duration = Duration::from_secs(12);
/// The pause after the first failure. It doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// A plugin, with its resource and the kubelet's folder.
pub(crate) struct PluginTerms<P> {
    pub(crate) folder: PathBuf,
    pub(crate) resource: String,
    pub(crate) plugin: Arc<P>,
}

impl<P: DevicePlugin> PluginTerms<P> {
    /// Registers `serving`, or else a plugin on a new socket.
    async fn register(&self, serving: Option<ServingPlugin>) -> Result<ServingPlugin, Error> {
        let serving = match serving {
            Some(serving) => serving,
            None => ServingPlugin::start(self).await?,
        };
        let request = RegisterRequest {
            version: API_VERSION.to_owned(),
            endpoint: serving.endpoint().to_owned(),
            resource_name: self.resource.clone(),
            options: Some(OPTIONS),
        };
        let register =
            |channel: Channel| async move { RegistrationClient::new(channel).register(request).await };
        let socket = self.folder.join(KUBELET_SOCKET);
        unix_call::call(&socket, "Register", REGISTER_LIMIT, register).await?;
        Ok(serving)
    }
}

/// Keeps one plugin registered until `stop_rx` ends.
pub(crate) struct RegistrationLoop<P> {
    pub(crate) terms: PluginTerms<P>,
    pub(crate) kubelet_socket: KubeletSocketWatch,
    pub(crate) registered_tx: watch::Sender<bool>,
    pub(crate) stop_rx: oneshot::Receiver<()>,
}

/// Why a registration ended.
enum RegistrationEnd {
    Stopped,
    /// The kubelet has a new socket, and its folder none of the old ones.
    KubeletRestarted,
    /// The kubelet has ended its stream of lists.
    Abandoned,
}

impl<P: DevicePlugin> RegistrationLoop<P> {
    pub(crate) async fn run(mut self, serving: ServingPlugin) {
        let mut serving = Some(serving);
        let mut pause = FIRST_PAUSE;
        loop {
            let attempt = tokio::select! {
                biased;
                _ = &mut self.stop_rx => return,
                // This attempt's socket may be among those that the kubelet deleted before it created its own.
                () = self.kubelet_socket.created() => {
                    pause = FIRST_PAUSE;
                    continue;
                }
                attempt = self.terms.register(serving.take()) => attempt,
            };
            match attempt {
                Ok(plugin) => {
                    let since = Instant::now();
                    match self.follow(plugin).await {
                        RegistrationEnd::Stopped => return,
                        RegistrationEnd::KubeletRestarted => {
                            pause = FIRST_PAUSE;
                            continue;
                        }
                        RegistrationEnd::Abandoned if since.elapsed() >= LONGEST_PAUSE => pause = FIRST_PAUSE,
                        RegistrationEnd::Abandoned => {}
                    }
                }
                Err(error) => {
                    let (resource, error) = (&self.terms.resource, one_line(&error));
                    tracing::warn!(%resource, %error, ?pause, "the device plugin was not registered, retrying");
                }
            }
            if self.wait(&mut pause).await.is_break() {
                return;
            }
        }
    }

    /// Waits while the plugin is registered, and ends its socket then.
    async fn follow(&mut self, mut plugin: ServingPlugin) -> RegistrationEnd {
        tracing::info!(resource = %self.terms.resource, endpoint = plugin.endpoint(), "device plugin registered");
        self.registered_tx.send_replace(true);
        let end = tokio::select! {
            biased;
            _ = &mut self.stop_rx => RegistrationEnd::Stopped,
            () = self.kubelet_socket.created() => RegistrationEnd::KubeletRestarted,
            () = plugin.abandoned() => RegistrationEnd::Abandoned,
        };
        self.registered_tx.send_replace(false);
        plugin.stop().await;
        end
    }

    /// Waits before the next attempt: for the pause, or until the kubelet has a new socket.
    async fn wait(&mut self, pause: &mut Duration) -> ControlFlow<()> {
        tokio::select! {
            biased;
            _ = &mut self.stop_rx => return ControlFlow::Break(()),
            // The first attempt may still come too early: a socket exists before its owner listens on it.
            () = self.kubelet_socket.created() => *pause = FIRST_PAUSE,
            () = sleep(*pause) => *pause = LONGEST_PAUSE.min(*pause * 2),
        }
        ControlFlow::Continue(())
    }
}
