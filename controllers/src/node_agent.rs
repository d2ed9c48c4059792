//! The node agent: offers the slots of this node's devices to its kubelet.
//!
//! ```text
//!   watches ───┐                      ┌──▶ plugins ◀──ListAndWatch, Allocate── kubelet
//!   discovery ─┼──▶ AgentState ───────┼──▶ instances, accelerator_list ──▶ API server
//!   reclaim ───┘        ▲             └──▶ device_events ──▶ API server
//!                       └── replies to the agent's own writes
//! ```
//!
//! An agent runs on each node and leads nothing. Each of its writes is a compare-and-set of what belongs to its node:
//! its slots, its name in an instance's list, its accelerators. Everything that it decides follows from the objects and
//! from what this node has, so a killed agent goes on where it stopped. The arithmetic of slots is `rouse::slots`, the
//! kubelet's sockets are `rouse-kubelet`.

mod accelerator_list;
mod accelerators;
mod agent_metrics;
mod agent_view;
mod allocator;
mod container_contents;
mod device_events;
mod discovery;
mod http_probe;
mod instance_api;
mod instances;
mod plugins;
mod reclaim;
#[cfg(test)]
mod testing;
mod watches;

use std::{path::PathBuf, sync::Arc};

use anyhow::Context as _;
use futures_util::future::LocalBoxFuture;
use kube::Client;
use prometheus::Registry;
use rouse::{pairing::ids::NodeName, units::Bytes};
use rouse_kubelet::{ContainerRuntimeClient, KubeletUsage, PodResourcesClient};
use rouse_net::lease::TickClock;
use rouse_platform::ReadinessCheck;
use tokio::{sync::Mutex, task::JoinSet};

use self::{
    accelerator_list::AcceleratorLister,
    accelerators::AcceleratorInventory,
    agent_metrics::AgentMetrics,
    agent_view::{AgentState, AgentView},
    allocator::Allocator,
    device_events::DeviceEventRecorder,
    discovery::DeviceDiscovery,
    instance_api::InstanceApi,
    instances::InstanceReconciler,
    plugins::Plugins,
    reclaim::Reclaimers,
};
use crate::watch::InitialLists;

/// Field manager of the fields that agents write.
const MANAGER: &str = "rouse-node-agent";
/// The kubelet's folder of plugin sockets, in its own folder.
const PLUGINS_FOLDER: &str = "device-plugins";
/// The socket on which the kubelet lists the devices of Pods, in its own folder.
const POD_RESOURCES_SOCKET: &str = "pod-resources/kubelet.sock";

/// The surroundings of an agent.
#[derive(Clone, Debug)]
pub struct NodeAgentSettings {
    /// Name of the Node.
    pub node: String,
    /// The kubelet's folder, usually `/var/lib/kubelet`.
    pub kubelet_folder: PathBuf,
    /// Socket of the container runtime, for kubelets that do not list the devices of Pods.
    pub container_runtime: PathBuf,
    /// Lists the accelerators, instead of the driver.
    pub accelerators_file: Option<PathBuf>,
    /// Memory of each accelerator that no engine may reserve.
    pub headroom: Bytes,
}

/// An agent that has started.
pub struct NodeAgentRuntime {
    state: Arc<AgentState>,
    initial_lists: InitialLists,
    plugins: Plugins,
    tasks: JoinSet<()>,
}

impl NodeAgentRuntime {
    /// Starts the agent. Its metrics are in `registry`. The future is boxed for the program's size (ADR 18).
    ///
    /// # Errors
    /// There is no configuration of the Kubernetes API, or it cannot be used.
    pub fn start(
        settings: NodeAgentSettings,
        clock: TickClock,
        registry: &Registry,
    ) -> LocalBoxFuture<'_, anyhow::Result<Self>> {
        Box::pin(Self::start_all(settings, clock, registry))
    }

    async fn start_all(
        settings: NodeAgentSettings,
        clock: TickClock,
        registry: &Registry,
    ) -> anyhow::Result<Self> {
        let client = Client::try_default().await.context(
            "cannot find the Kubernetes API: run in a Pod with a service account, or set KUBECONFIG",
        )?;
        let (metrics, initial_lists) = (AgentMetrics::new(registry), InitialLists::default());
        let state = Arc::new(AgentState::new(NodeName::from(settings.node.as_str())));
        let api = InstanceApi::new(client.clone(), metrics.writes.clone());
        let kubelet = PodResourcesClient::new(settings.kubelet_folder.join(POD_RESOURCES_SOCKET));
        let runtime = ContainerRuntimeClient::new(settings.container_runtime);
        let source = KubeletUsage::new(kubelet, Some(runtime));
        let writes = metrics.writes.clone();
        let allocator = Arc::new(Allocator {
            state: Arc::clone(&state),
            api: api.clone(),
            reclaimers: Mutex::new(Reclaimers::new(state.me.clone())),
            clock,
            metrics,
        });
        let lister = AcceleratorLister {
            state: Arc::clone(&state),
            client: client.clone(),
            headroom: settings.headroom,
            clock,
            writes,
        };
        let accelerators = AcceleratorInventory::new(settings.accelerators_file);
        let mut tasks = JoinSet::new();
        tasks.spawn(watches::run(Arc::clone(&state), client.clone(), initial_lists.clone()));
        tasks.spawn(DeviceDiscovery::new(Arc::clone(&state), accelerators).run());
        tasks.spawn(InstanceReconciler::new(Arc::clone(&state), api, clock).run());
        tasks.spawn(lister.run());
        tasks.spawn(DeviceEventRecorder::new(Arc::clone(&state), client).run());
        tasks.spawn(reclaim::run(Arc::clone(&allocator), source));
        let plugins = Plugins::new(allocator, settings.kubelet_folder.join(PLUGINS_FOLDER));
        tracing::info!(node = %state.me, "node agent started");
        Ok(Self { state, initial_lists, plugins, tasks })
    }

    /// Reports what the kubelet does not know yet; `None` once all plugins are registered.
    #[must_use]
    pub fn not_ready_reason(&self) -> Arc<ReadinessCheck> {
        let (state, lists) = (Arc::clone(&self.state), self.initial_lists.clone());
        let registrations = self.plugins.registrations();
        Arc::new(move || {
            if !state.read(AgentView::is_complete) {
                return Some(format!("waiting for lists from the API server: {lists}"));
            }
            let missing = registrations.missing(state.read(|view| view.plugins(&state.me)));
            (!missing.is_empty())
                .then(|| format!("waiting for the kubelet to register {}", missing.join(", ")))
        })
    }

    /// Runs until `stop` completes. The kubelet then gets lists with all devices unhealthy.
    ///
    /// # Errors
    /// A vital task ended.
    pub fn run(self, stop: LocalBoxFuture<'_, ()>) -> LocalBoxFuture<'_, anyhow::Result<()>> {
        Box::pin(self.run_until(stop))
    }

    async fn run_until(mut self, stop: LocalBoxFuture<'_, ()>) -> anyhow::Result<()> {
        let outcome = tokio::select! {
            () = stop => Ok(()),
            () = self.plugins.run() => Err(anyhow::anyhow!("the device plugins ended")),
            Some(ended) = self.tasks.join_next() => Err(match ended {
                Ok(()) => anyhow::anyhow!("a task of the node agent ended"),
                Err(error) => anyhow::anyhow!("a task of the node agent panicked: {error}"),
            }),
        };
        self.tasks.shutdown().await;
        self.plugins.stop().await;
        outcome
    }
}
