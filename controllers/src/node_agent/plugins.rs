//! Runs the device plugins: one for each configuration that takes part, and one for each of its instances.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures_util::future::join_all;
use rouse_kubelet::{AllocateError, ContainerAllocation, DevicePlugin, PluginServer};
use rouse_net::timer::sleep_until_some;
use tokio::{sync::watch, time::Instant};

use super::{
    agent_view::{AgentView, PluginKey, PluginList},
    allocator::Allocator,
};

/// Delay before a retry after a plugin could not be served.
const RETRY_DELAY: Duration = Duration::from_secs(1);

/// The running plugins.
pub(super) struct Plugins {
    allocator: Arc<Allocator>,
    folder: PathBuf,
    servers: BTreeMap<PluginKey, PluginServer>,
    registrations: Registrations,
}

/// Whether each running plugin is registered with the kubelet.
#[derive(Clone, Debug, Default)]
pub(super) struct Registrations(Arc<Mutex<BTreeMap<PluginKey, watch::Receiver<bool>>>>);

/// One plugin.
struct SlotPlugin {
    allocator: Arc<Allocator>,
    key: PluginKey,
    list: watch::Receiver<PluginList>,
}

impl DevicePlugin for SlotPlugin {
    fn devices(&self) -> watch::Receiver<PluginList> {
        self.list.clone()
    }

    async fn allocate(&self, ids: Vec<String>) -> Result<ContainerAllocation, AllocateError> {
        self.allocator.allocate(&self.key, &ids).await
    }
}

impl Registrations {
    /// Returns the resources of these plugins that the kubelet does not know yet.
    pub(super) fn missing(&self, keys: impl IntoIterator<Item = PluginKey>) -> Vec<String> {
        let known = self.lock();
        let is_missing = |key: &PluginKey| known.get(key).is_none_or(|registered| !*registered.borrow());
        keys.into_iter().filter(is_missing).map(|key| key.resource()).collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PluginKey, watch::Receiver<bool>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Plugins {
    /// `folder`: the kubelet's folder of plugin sockets.
    pub(super) fn new(allocator: Arc<Allocator>, folder: PathBuf) -> Self {
        Self { allocator, folder, servers: BTreeMap::new(), registrations: Registrations::default() }
    }

    pub(super) fn registrations(&self) -> Registrations {
        self.registrations.clone()
    }

    /// Starts and ends plugins as the view demands, until it is dropped.
    pub(super) async fn run(&mut self) {
        let state = Arc::clone(&self.allocator.state);
        let mut changed = state.subscribe();
        loop {
            changed.mark_unchanged();
            let retry_at = (!self.reconcile().await).then(|| Instant::now() + RETRY_DELAY);
            tokio::select! {
                // The state holds the sender, so this cannot fail.
                _ = changed.changed() => {}
                () = sleep_until_some(retry_at) => {}
            }
        }
    }

    /// Ends all plugins: the kubelet gets their last lists, with every device unhealthy.
    pub(super) async fn stop(self) {
        join_all(self.servers.into_values().map(PluginServer::stop)).await;
    }

    /// Returns false if a plugin could not be served.
    async fn reconcile(&mut self) -> bool {
        let state = Arc::clone(&self.allocator.state);
        // Before the lists are complete, no plugin is known to be obsolete.
        if !state.read(AgentView::is_listed) {
            return true;
        }
        let wanted = state.read(|view| view.plugins(&state.me));
        let obsolete: Vec<PluginKey> =
            self.servers.keys().filter(|key| !wanted.contains(*key)).cloned().collect();
        for key in obsolete {
            self.end(&key).await;
        }
        let mut all_served = true;
        for key in wanted {
            if !self.servers.contains_key(&key) {
                all_served &= self.serve(key).await;
            }
        }
        all_served
    }

    async fn serve(&mut self, key: PluginKey) -> bool {
        let allocator = Arc::clone(&self.allocator);
        let list = allocator.state.open_list(&key);
        let plugin = Arc::new(SlotPlugin { allocator, key: key.clone(), list });
        match PluginServer::serve(&self.folder, key.resource(), plugin).await {
            Ok(server) => {
                tracing::info!(resource = key.resource(), "device plugin serves");
                self.registrations.lock().insert(key.clone(), server.is_registered());
                self.servers.insert(key, server);
                true
            }
            Err(error) => {
                tracing::warn!(resource = key.resource(), %error, "device plugin cannot be served, retrying");
                self.allocator.state.close_list(&key);
                false
            }
        }
    }

    async fn end(&mut self, key: &PluginKey) {
        let Some(server) = self.servers.remove(key) else { return };
        self.registrations.lock().remove(key);
        server.stop().await;
        self.allocator.state.close_list(key);
        tracing::info!(resource = key.resource(), "device plugin ended");
    }
}
