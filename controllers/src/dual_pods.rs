//! The controller of dual pods: feeds cluster state to [`rouse::pairing`] and executes its commands.
//!
//! ```text
//!   Pods ──▶ index ──▶ events ──────▶ Pairing ──▶ commands ──▶ executor: one task each
//!   nodes, pools, gpu-map ──▶ facts ──▶ │ ▲                       │ Pods, stubs, engines
//!   fleet ◀──▶ engine_orders ◀──────────┘ └────── outcomes ───────┘
//! ```
//!
//! Only the leader decides. A watch may lag behind the former leader's last writes, so the watch of the Pods begins with
//! each term, and nothing is decided before its first lists have arrived. The Pods hold the truth, and a leader's memory
//! begins empty.

pub mod access;
mod actuation_timer;
pub mod admission_denial;
mod base;
mod command_context;
pub(crate) mod engine_orders;
mod event_handlers;
mod execute;
mod facts;
mod fma_configs;
mod host_memory;
mod index;
pub mod keys;
pub mod launcher_engines;
mod launcher_watches;
mod memory_baseline;
mod pairing_metrics;
pub mod patched_launcher;
mod per_engine;
mod pod_events;
mod population;
pub mod provider;
mod readiness;
pub mod record;
mod requester_spec;
mod requester_status;
pub mod template;
pub mod template_revision;
mod template_revisions;
#[cfg(test)]
mod testing;

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::{
    Stream, StreamExt as _,
    stream::{self, BoxStream},
};
use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::{Client, Resource};
use rouse::{
    pairing::{
        Pairing, PairingPlan,
        command::PairingCommand,
        event::{LeaderEpoch, PairingEvent},
        ids::{NodeName, PairingEngineId, ProviderMode, RequesterId},
        settings::PairingSettings as Core,
    },
    units::Tick,
};
use rouse_net::lease::TickClock;
use tokio::sync::{mpsc, watch};

pub use self::facts::{NODE_READY_CONDITION, takes_pods};
use self::{
    actuation_timer::ActuationTimer,
    engine_orders::{EngineOrder, EngineOrderReceiver, EngineOrders},
    execute::{ExecutionResult, Executor},
    facts::ClusterFacts,
    fma_configs::FmaConfigs,
    index::PairingPodIndex,
    launcher_watches::{EnginePorts, LauncherEvent, LauncherWatches},
    memory_baseline::MemoryBaselines,
    pairing_metrics::{MetricsInputs, PairingMetrics},
    per_engine::PerEngine,
    pod_events::PodEvents,
    requester_status::RequesterStatusWriter,
};
use crate::{
    cache::{Subscription, TermDelta},
    crd::fma::{InferenceServerConfig, LauncherConfig, LauncherPopulationPolicy},
    index::Resolved,
    kit::{self, Component},
    metrics::DualPodMetrics,
    platform::dcgm::{DcgmClient, DcgmSamples},
    recorder::{EventRequest, EventSender},
    stub_key::StubKey,
    watch::Delta,
    writer::ObjectWriter,
};

/// ConfigMap in the gateways' namespace that maps the accelerators of nodes to their indices.
pub const GPU_MAP: &str = "gpu-map";
/// Delay before a policy's status is written again after a failure: the right to do so may be missing.
const POLICY_STATUS_RETRY_DELAY: Duration = Duration::from_secs(10);

/// Settings that all requesters share.
#[derive(Clone, Debug)]
pub(crate) struct PairingControllerSettings {
    pub core: Core,
    /// Mode for requesters that do not set one.
    pub mode: ProviderMode,
    /// Key for the tokens of models' requesters and of launchers.
    pub key: StubKey,
}

/// Parts of the controller.
pub(crate) struct PairingControllerParts {
    pub client: Client,
    pub writer: ObjectWriter,
    pub clock: TickClock,
    pub settings: PairingControllerSettings,
    pub metrics: DualPodMetrics,
    pub events: EventSender,
    /// Source of accelerator memory use and faults, if configured.
    pub meter: Option<Arc<DcgmClient>>,
    /// The namespaces whose Pods are watched; `None` is the whole cluster.
    pub namespaces: BTreeSet<Option<String>>,
    /// The fleet's orders that stand, and the reports to it.
    pub orders: EngineOrders,
}

/// What feeds the controller.
pub(crate) struct PairingWatches {
    /// Pods of any kind, while this gateway leads.
    pub pods: Subscription<Pod>,
    pub nodes: Subscription<Node>,
    /// The ConfigMap [`GPU_MAP`].
    pub gpu_map: Subscription<ConfigMap>,
    /// Sources of launchers and their engines; silent if the API server lacks these kinds.
    pub server_configs: Subscription<InferenceServerConfig>,
    pub launcher_configs: Subscription<LauncherConfig>,
    /// Policies that place launchers before any requester needs them.
    pub policies: Subscription<LauncherPopulationPolicy>,
    pub resolved: watch::Receiver<Option<Arc<Resolved>>>,
    /// The fleet's orders about engines, while this gateway leads.
    pub orders: EngineOrderReceiver,
}

/// Pairs requesters with engines.
pub(crate) struct PairingController {
    core: Pairing,
    index: PairingPodIndex,
    facts: ClusterFacts,
    requester_status: RequesterStatusWriter,
    actuation_timer: ActuationTimer,
    pod_events: PodEvents,
    pairing_metrics: PairingMetrics,
    launcher_watches: LauncherWatches,
    /// Launchers' events, until [`Self::inputs`] takes them.
    launcher_events: Option<mpsc::Receiver<LauncherEvent>>,
    ports: EnginePorts,
    meter: Option<Arc<DcgmClient>>,
    executor: Arc<Executor>,
    namespaces: BTreeSet<Option<String>>,
    orders: EngineOrders,
    /// Epoch of the term, while this gateway leads.
    term: Option<u64>,
    /// Namespaces whose Pods were listed in this term.
    listed_namespaces: BTreeSet<Option<String>>,
    /// This leader's epoch, once it has seen everything.
    epoch: Option<u64>,
    /// Namespace in which each provider's Pod was ordered.
    provider_namespaces: PerEngine<String>,
    baselines: MemoryBaselines,
}

/// Background tasks of the controller.
type PairingTasks = kit::Tasks<FinishedTask>;

/// A change of what the controller observes.
pub(crate) enum PairingInput {
    Pods(TermDelta<Pod>),
    Nodes(Delta<Node>),
    GpuMap(Delta<ConfigMap>),
    ServerConfigs(Delta<InferenceServerConfig>),
    LauncherConfigs(Delta<LauncherConfig>),
    Policies(Delta<LauncherPopulationPolicy>),
    Launcher(LauncherEvent),
    Pools(Arc<Resolved>),
    Order(EngineOrder),
}

/// Result of a background task.
pub(crate) enum FinishedTask {
    /// A command's result, with the Events to send.
    Command(Box<(ExecutionResult, Vec<EventRequest>)>),
    /// An engine missing from a launcher's list was queried, or a task without a result ended.
    EngineVerified(Option<PairingEvent>),
    /// The requester's status was written.
    StatusWritten(RequesterId),
    /// The requester's status may be written again.
    StatusDue(RequesterId),
    /// The meter is to be read.
    MeterDue,
    /// The meter was read; `None` if it did not answer.
    MeterRead(Option<Arc<DcgmSamples>>),
    /// A requester has waited for one reporting interval. `wait` numbers its waits.
    WaitElapsed { requester: RequesterId, wait: u64 },
    /// A policy's status was written, or needs a retry.
    PolicyStatusWritten { retry: bool },
    /// Policies' statuses are to be compared again.
    PolicyStatusDue,
}

impl PairingController {
    #[must_use]
    pub(crate) fn new(parts: PairingControllerParts) -> Self {
        let PairingControllerParts {
            client,
            writer,
            clock,
            settings,
            metrics,
            events,
            meter,
            namespaces,
            orders,
        } = parts;
        let (launcher_watches, launcher_events) = LauncherWatches::new();
        Self {
            core: Pairing::new(settings.core),
            index: PairingPodIndex::new(settings.mode),
            facts: ClusterFacts::new(FmaConfigs::new(namespaces.len())),
            requester_status: RequesterStatusWriter::default(),
            actuation_timer: ActuationTimer::new(metrics.clone()),
            pod_events: PodEvents::new(events),
            pairing_metrics: PairingMetrics::new(metrics.clone()),
            launcher_watches,
            launcher_events: Some(launcher_events),
            ports: EnginePorts::default(),
            meter,
            executor: Arc::new(Executor { client, writer, clock, settings, metrics }),
            namespaces,
            orders,
            term: None,
            listed_namespaces: BTreeSet::new(),
            epoch: None,
            provider_namespaces: PerEngine::default(),
            baselines: MemoryBaselines::default(),
        }
    }

    /// Returns everything that the controller observes as one stream.
    pub(crate) fn inputs(&mut self, watches: PairingWatches) -> impl Stream<Item = PairingInput> + use<> {
        let PairingWatches {
            pods,
            nodes,
            gpu_map,
            server_configs,
            launcher_configs,
            policies,
            resolved,
            orders,
        } = watches;
        let orders = stream::unfold(orders, async |mut orders| {
            let order = orders.recv().await;
            Some((PairingInput::Order(order), orders))
        });
        let launchers = stream::unfold(self.launcher_events.take(), async |events| {
            let mut events = events?;
            Some((PairingInput::Launcher(events.recv().await?), Some(events)))
        });
        let pools = stream::unfold(resolved, async |mut resolved| {
            resolved.changed().await.ok()?;
            let pools = resolved.borrow_and_update().clone().unwrap_or_default();
            Some((PairingInput::Pools(pools), resolved))
        });
        stream::select_all([
            pods.map(PairingInput::Pods).boxed(),
            deltas(nodes, PairingInput::Nodes),
            deltas(gpu_map, PairingInput::GpuMap),
            deltas(server_configs, PairingInput::ServerConfigs),
            deltas(launcher_configs, PairingInput::LauncherConfigs),
            deltas(policies, PairingInput::Policies),
            launchers.boxed(),
            pools.boxed(),
            orders.boxed(),
        ])
    }

    fn start_leading(&mut self, epoch: u64, tasks: &mut PairingTasks) {
        self.epoch = Some(epoch);
        self.apply_events(vec![PairingEvent::LeadershipGained { epoch: LeaderEpoch(epoch) }]);
        self.facts.reset_last_sent();
        self.apply_facts(tasks);
        // Orders may have come before this controller had seen everything.
        let mut orders = self.orders.all();
        orders.retain(|order| self.index.requester(&order.requester).is_some());
        self.apply_events(orders.into_iter().map(event_handlers::order_event).collect());
        self.apply_events(vec![PairingEvent::Listed]);
        self.actuation_timer.listed();
        let inputs = MetricsInputs { index: &self.index, facts: &self.facts, now: self.executor.clock.now() };
        self.pairing_metrics.begin(inputs);
        self.schedule_meter_read(Duration::ZERO, tasks);
    }

    /// Whether everything was seen: deciding earlier would take unseen Pods and nodes for gone.
    fn has_synced(&self) -> bool {
        self.facts.are_complete()
            && self.namespaces.iter().all(|namespace| self.listed_namespaces.contains(namespace))
    }
}

impl Component for PairingController {
    type Input = PairingInput;
    type Outcome = FinishedTask;

    fn apply(&mut self, input: PairingInput, tasks: &mut PairingTasks) {
        match input {
            PairingInput::Pods(TermDelta { epoch, delta }) => {
                if self.term == Some(epoch) {
                    self.handle_pods(delta);
                }
            }
            PairingInput::Nodes(delta) => self.facts.apply_nodes(delta),
            PairingInput::GpuMap(delta) => self.facts.apply_gpu_map(delta),
            PairingInput::ServerConfigs(delta) => self.facts.configs.apply_server_configs(delta),
            PairingInput::LauncherConfigs(delta) => self.facts.configs.apply_launcher_configs(delta),
            PairingInput::Policies(delta) => self.facts.configs.apply_policies(delta),
            PairingInput::Launcher(event) => self.handle_launcher_event(&event, tasks),
            PairingInput::Pools(resolved) => self.facts.set_resolved_pools(resolved),
            PairingInput::Order(order) => self.handle_order(order),
        }
    }

    fn finished(&mut self, outcome: FinishedTask, tasks: &mut PairingTasks) {
        self.handle_finished(outcome, tasks);
    }

    fn term_changed(&mut self, epoch: Option<u64>, _tasks: &mut PairingTasks) {
        (self.term, self.epoch) = (epoch, None);
        self.listed_namespaces.clear();
        self.provider_namespaces.clear();
        self.baselines.clear();
        self.requester_status = RequesterStatusWriter::default();
        self.actuation_timer.forget();
        self.pod_events.forget();
        self.pairing_metrics.clear();
        self.launcher_watches.clear();
        self.ports = EnginePorts::default();
        self.core = Pairing::new(self.executor.settings.core);
        self.index = PairingPodIndex::new(self.executor.settings.mode);
    }

    fn next_deadline(&self) -> Option<Tick> {
        self.core.next_deadline().into_iter().chain(self.pairing_metrics.due()).min()
    }

    fn decide(&mut self, tasks: &mut PairingTasks) {
        if self.epoch.is_none()
            && let Some(epoch) = self.term.filter(|_| self.has_synced())
        {
            self.start_leading(epoch, tasks);
        }
        let Some(epoch) = self.epoch else { return };
        self.apply_facts(tasks);
        let Executor { settings, metrics, .. } = &*self.executor;
        self.launcher_watches.sync(&mut self.index, LeaderEpoch(epoch), &settings.key, metrics);
        let now = self.executor.clock.now();
        self.pairing_metrics.recount_due(MetricsInputs { index: &self.index, facts: &self.facts, now });
        let mut plan = self.core.plan(now);
        self.core.issued(&plan, now);
        self.publish_reports(&plan.planned_nodes);
        self.forget_unused(&plan.planned_nodes);
        for command in std::mem::take(&mut plan.commands) {
            self.start_command(command, tasks);
        }
        self.report_waiting(plan, tasks);
        self.requester_status.write(&self.index, &self.facts, &self.executor, &self.pod_events, tasks);
    }
}

impl PairingController {
    fn start_command(&mut self, command: PairingCommand, tasks: &mut PairingTasks) {
        let context = self.command_context(command);
        if let Some(requester) = &context.requester {
            self.actuation_timer.command_issued(&requester.id, &context.command.action);
        }
        let executor = Arc::clone(&self.executor);
        tasks.spawn(async move {
            let notices = pod_events::completion_events(&context);
            let done = Box::pin(executor.execute(context)).await;
            let notices = if done.is_success() { notices } else { Vec::new() };
            FinishedTask::Command(Box::new((done, notices)))
        });
    }

    /// Reports to the fleet what became of its orders on these nodes.
    fn publish_reports(&self, planned: &[NodeName]) {
        for node in planned {
            self.orders.publish(node, |requester| self.core.engine_report(node, requester));
        }
    }

    /// Reports why requesters wait: in their Events, their statuses and the log.
    fn report_waiting(&mut self, mut plan: PairingPlan, tasks: &mut PairingTasks) {
        for ((node, requester), reason) in &mut plan.reasons {
            for more in [self.requester_status.error_of(requester), self.provider_failure(node, requester)]
                .into_iter()
                .flatten()
            {
                *reason = format!("{reason}; {more}");
            }
        }
        self.pod_events.update_waiting(&plan.planned_nodes, &plan.reasons, tasks);
        for ((node, requester), reason) in plan.reasons {
            tracing::debug!(%requester, reason, "requester waits");
            let pairing_node =
                self.core.node(&node).filter(|pairing_node| pairing_node.engine_of(&requester).is_none());
            let waiting = pairing_node.and_then(|pairing_node| pairing_node.requesters.get(&requester));
            if let (Some(waiting), Some(requester_pod)) = (waiting, self.index.requester(&requester)) {
                self.requester_status.write_accelerators(
                    requester_pod,
                    &waiting.accelerators,
                    &self.executor,
                    tasks,
                );
                if waiting.accelerators.is_empty() {
                    self.requester_status.report_unresponsive_stub(requester_pod, waiting.retry.failures);
                }
            }
        }
    }

    /// Forgets engines of these nodes that no longer exist.
    fn forget_unused(&mut self, planned: &[NodeName]) {
        for name in planned {
            let node = self.core.node(name);
            let exists =
                |engine: &PairingEngineId| node.is_some_and(|node| node.engines.contains_key(engine));
            self.provider_namespaces.retain_on(name, exists);
            self.baselines.retain_on(name, exists);
            self.ports.retain_on(name, exists);
        }
        if !planned.is_empty() {
            self.facts.forget_unused(&self.core);
        }
    }

    /// Returns the kubelet's reason why this requester's last provider, or the launcher there, failed.
    fn provider_failure(&self, node: &NodeName, requester: &RequesterId) -> Option<&str> {
        let pairing_node = self.core.node(node)?;
        let requester_state = pairing_node.requesters.get(requester)?;
        let crashed = requester_state
            .accelerators
            .iter()
            .filter_map(|on| pairing_node.accelerators.get(on))
            .any(|on| on.crashes > 0);
        if requester_state.failures == 0 && !crashed {
            return None;
        }
        self.index.container_failure(node, &requester_state.accelerators)
    }
}

/// The changes of a kind that is watched at any time.
fn deltas<K>(
    changes: Subscription<K>,
    input: impl Fn(Delta<K>) -> PairingInput + Send + 'static,
) -> BoxStream<'static, PairingInput>
where
    K: Resource<DynamicType = ()> + Send + Sync + 'static,
{
    changes.map(move |TermDelta { delta, .. }| input(delta)).boxed()
}
