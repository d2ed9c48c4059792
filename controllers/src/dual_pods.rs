//! The controller of dual pods: feeds cluster state to [`rouse::pairing`] and executes its commands.
//!
//! ```text
//!   Pods ──▶ index ──▶ events ──────▶ Pairing ──▶ commands ──▶ executor: one task each
//!   nodes, pools, gpu-map ──▶ facts ──▶ │                         │ Pods, stubs, engines
//!                                       ◀──────── outcomes ───────┘
//! ```
//!
//! Only the leader decides. Its watch may lag behind the former leader's last writes, so a new leader lists the Pods
//! before it decides anything. The Pods hold the truth, and a leader's memory begins empty.

pub mod access;
mod actuation_timer;
pub mod admission_denial;
mod base;
mod command_context;
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

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::Client;
use rouse::{
    pairing::{
        Pairing,
        event::{LeaderEpoch, PairingEvent},
        ids::{NodeName, PairingEngineId, ProviderMode, RequesterId},
        settings::PairingSettings as Core,
    },
    units::Tick,
};
use rouse_net::lease::TickClock;
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time,
};

pub use self::facts::NODE_READY_CONDITION;
use self::{
    actuation_timer::ActuationTimer,
    execute::{ExecutionResult, Executor},
    facts::ClusterFacts,
    fma_configs::FmaConfigs,
    index::PodIndex,
    launcher_watches::{EnginePorts, LauncherWatches},
    memory_baseline::MemoryBaselines,
    pairing_metrics::{MetricsInputs, PairingMetrics},
    pod_events::PodEvents,
    requester_status::RequesterStatusWriter,
};
use crate::{
    crd::fma::{InferenceServerConfig, LauncherConfig, LauncherPopulationPolicy},
    dual_pods::provider::ProviderSettings,
    election::Leadership,
    index::Resolved,
    metrics::DualPodMetrics,
    platform::dcgm::{DcgmClient, DcgmSamples},
    recorder::{EventRequest, EventSender},
    stub_key::StubKey,
    watch::{self as watched, Delta, InitialLists, WatchTarget},
    writer::ObjectWriter,
};

/// ConfigMap in the gateways' namespace that maps the accelerators of nodes to their indices.
pub const GPU_MAP: &str = "gpu-map";
/// Delay before a policy's status is written again after a failure: the right to do so may be missing.
const POLICY_STATUS_RETRY_DELAY: Duration = Duration::from_secs(10);
/// Delay before a new leader repeats a failed list of Pods.
const LIST_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Settings that all requesters share.
#[derive(Clone, Debug)]
pub struct PairingControllerSettings {
    pub core: Core,
    /// Mode for requesters that do not set one.
    pub mode: ProviderMode,
    pub make: ProviderSettings,
    /// Key for the tokens of models' requesters and of launchers.
    pub key: StubKey,
}

/// Inputs of the controller.
pub struct PairingControllerParts {
    pub client: Client,
    pub writer: ObjectWriter,
    pub claim: watch::Receiver<Option<Leadership>>,
    pub clock: TickClock,
    pub settings: PairingControllerSettings,
    pub watches: PairingWatches,
    pub resolved: watch::Receiver<Option<Arc<Resolved>>>,
    pub metrics: DualPodMetrics,
    pub events: EventSender,
    /// Source of accelerator memory use and faults, if configured.
    pub meter: Option<Arc<DcgmClient>>,
}

/// Watches that feed the controller.
pub struct PairingWatches {
    /// Pods of any kind.
    pub pods: mpsc::Receiver<Delta<Pod>>,
    /// Targets for listing the Pods.
    pub pod_lists: Vec<WatchTarget<Pod>>,
    /// The initial lists, and which of them are skipped.
    pub awaited: InitialLists,
    pub nodes: mpsc::Receiver<Delta<Node>>,
    /// The ConfigMap [`GPU_MAP`].
    pub gpu_map: mpsc::Receiver<Delta<ConfigMap>>,
    /// Sources of launchers and their engines; silent if the API server lacks these kinds.
    pub server_configs: mpsc::Receiver<Delta<InferenceServerConfig>>,
    pub launcher_configs: mpsc::Receiver<Delta<LauncherConfig>>,
    /// Policies that place launchers before any requester needs them.
    pub policies: mpsc::Receiver<Delta<LauncherPopulationPolicy>>,
}

/// Pairs requesters with engines; runs until dropped.
pub struct PairingController {
    core: Pairing,
    index: PodIndex,
    facts: ClusterFacts,
    requester_status: RequesterStatusWriter,
    actuation_timer: ActuationTimer,
    pod_events: PodEvents,
    pairing_metrics: PairingMetrics,
    launcher_watches: LauncherWatches,
    ports: EnginePorts,
    meter: Option<Arc<DcgmClient>>,
    executor: Arc<Executor>,
    pod_lists: Arc<Vec<WatchTarget<Pod>>>,
    awaited: InitialLists,
    /// This leader's epoch, once it has listed everything.
    epoch: Option<u64>,
    /// Listed Pods, which wait until all nodes have been seen, too.
    pending_list: Option<(u64, Vec<Delta<Pod>>)>,
    /// Namespace in which each provider's Pod was ordered.
    provider_namespaces: BTreeMap<(NodeName, PairingEngineId), String>,
    baselines: MemoryBaselines,
    /// Commands under way, and other background tasks.
    tasks: JoinSet<FinishedTask>,
}

/// Result of a background task.
enum FinishedTask {
    /// A command's result, with the Events to send.
    Command(Box<(ExecutionResult, Vec<EventRequest>)>),
    /// All Pods, listed for the leader of this epoch.
    Listed(u64, Vec<Delta<Pod>>),
    /// An engine missing from a launcher's list was queried, or a task without a result ended.
    EngineVerified(Option<PairingEvent>),
    /// The requester's status may be written again.
    StatusWritten(RequesterId),
    /// The meter was read; `None` if it did not answer.
    MeterRead(Option<Arc<DcgmSamples>>),
    /// A requester has waited for one reporting interval.
    WaitElapsed(RequesterId),
    /// A policy's status was written, or needs a retry.
    PolicyStatusWritten { retry: bool },
}

impl PairingController {
    /// Runs until the leadership channel closes.
    pub async fn run(parts: PairingControllerParts) {
        let PairingControllerParts {
            client,
            writer,
            mut claim,
            clock,
            settings,
            watches,
            mut resolved,
            metrics,
            events: event_sender,
            meter,
        } = parts;
        let PairingWatches {
            mut pods,
            pod_lists: listed,
            awaited,
            mut nodes,
            gpu_map: mut map,
            server_configs: mut engines,
            launcher_configs: mut launchers,
            mut policies,
        } = watches;
        let mut controller = Self {
            core: Pairing::new(settings.core),
            index: PodIndex::new(settings.mode),
            facts: ClusterFacts::new(FmaConfigs::new(namespace_count(&listed))),
            requester_status: RequesterStatusWriter::default(),
            actuation_timer: ActuationTimer::new(metrics.clone()),
            pod_events: PodEvents::new(event_sender),
            pairing_metrics: PairingMetrics::new(metrics.clone()),
            launcher_watches: LauncherWatches::new(),
            ports: EnginePorts::default(),
            meter,
            executor: Arc::new(Executor { client, writer, clock, settings, metrics }),
            pod_lists: Arc::new(listed),
            awaited,
            epoch: None,
            pending_list: None,
            provider_namespaces: BTreeMap::new(),
            baselines: MemoryBaselines::default(),
            tasks: JoinSet::new(),
        };
        let mut leads = None;
        loop {
            let next_deadline =
                controller.core.next_deadline().into_iter().chain(controller.pairing_metrics.due()).min();
            tokio::select! {
                changed = claim.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let now = claim.borrow_and_update().filter(Leadership::is_valid).map(|claim| claim.epoch);
                    if now != leads {
                        leads = now;
                        controller.change_leadership(now);
                    }
                }
                Some(change) = pods.recv() => controller.handle_pods(change),
                Some(change) = nodes.recv() => controller.facts.apply_nodes(change),
                Some(change) = map.recv() => controller.facts.apply_gpu_map(change),
                Some(change) = engines.recv() => controller.facts.configs.apply_server_configs(change),
                Some(change) = launchers.recv() => controller.facts.configs.apply_launcher_configs(change),
                Some(change) = policies.recv() => controller.facts.configs.apply_policies(change),
                Some(heard) = controller.launcher_watches.rx.recv() => controller.handle_launcher_event(&heard),
                Ok(()) = resolved.changed() => {
                    controller.facts.set_resolved_pools(resolved.borrow_and_update().clone().unwrap_or_default());
                }
                Some(finished) = controller.tasks.join_next() => controller.handle_finished(finished),
                () = until(next_deadline, clock) => {}
            }
            controller.decide();
        }
    }

    /// Starts or ends leading. Drops the state and commands of an earlier term; a new leader lists what exists.
    fn change_leadership(&mut self, epoch: Option<u64>) {
        (self.epoch, self.pending_list) = (None, None);
        self.provider_namespaces.clear();
        self.baselines.clear();
        self.tasks = JoinSet::new();
        self.requester_status = RequesterStatusWriter::default();
        self.actuation_timer.forget();
        self.pod_events.forget();
        self.pairing_metrics.clear();
        self.launcher_watches.clear();
        self.ports = EnginePorts::default();
        self.core = Pairing::new(self.executor.settings.core);
        self.index.apply_deferred(&self.facts);
        if let Some(epoch) = epoch {
            self.index.defer_changes();
            let (listed, awaited) = (Arc::clone(&self.pod_lists), self.awaited.clone());
            self.tasks.spawn(async move { FinishedTask::Listed(epoch, list(&listed, &awaited).await) });
        }
    }

    fn start_leading(&mut self, epoch: u64, all: Vec<Delta<Pod>>) {
        self.index.apply_lists(all, &self.facts);
        self.epoch = Some(epoch);
        self.apply_events(vec![PairingEvent::LeadershipGained { epoch: LeaderEpoch(epoch) }]);
        self.facts.reset_last_sent();
        self.apply_facts();
        self.apply_events(vec![PairingEvent::Listed]);
        self.actuation_timer.listed();
        let inputs = MetricsInputs { index: &self.index, facts: &self.facts, now: self.executor.clock.now() };
        self.pairing_metrics.begin(inputs);
        self.schedule_meter_read(Duration::ZERO);
    }

    fn decide(&mut self) {
        if self.facts.are_complete()
            && let Some((epoch, all)) = self.pending_list.take()
        {
            self.start_leading(epoch, all);
        }
        let Some(epoch) = self.epoch else { return };
        self.apply_facts();
        let Executor { settings, metrics, .. } = &*self.executor;
        self.launcher_watches.sync(&self.index, LeaderEpoch(epoch), &settings.key, metrics);
        let now = self.executor.clock.now();
        self.pairing_metrics.recount_due(MetricsInputs { index: &self.index, facts: &self.facts, now });
        let mut plan = self.core.plan(now);
        self.core.issued(&plan, now);
        if !plan.planned_nodes.is_empty() {
            let core = &self.core;
            let lives = |(node, engine): &memory_baseline::EngineLocation| {
                core.node(node).is_some_and(|node| node.engines.contains_key(engine))
            };
            self.provider_namespaces.retain(|location, _| lives(location));
            self.baselines.retain(lives);
            self.facts.forget_unused(&self.core);
        }
        for command in plan.commands {
            let context = self.command_context(command);
            if let Some(requester) = &context.requester {
                self.actuation_timer.command_issued(&requester.id, &context.command.action);
            }
            let executor = Arc::clone(&self.executor);
            self.tasks.spawn(async move {
                let notices = pod_events::completion_events(&context);
                let done = Box::pin(executor.execute(context)).await;
                let notices = if done.is_success() { notices } else { Vec::new() };
                FinishedTask::Command(Box::new((done, notices)))
            });
        }
        for ((node, requester), reason) in &mut plan.reasons {
            for more in [self.requester_status.error_of(requester), self.provider_failure(node, requester)]
                .into_iter()
                .flatten()
            {
                *reason = format!("{reason}; {more}");
            }
        }
        self.pod_events.update_waiting(&plan.planned_nodes, &plan.reasons, &mut self.tasks);
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
                    &mut self.tasks,
                );
                if waiting.accelerators.is_empty() {
                    self.requester_status.report_unresponsive_stub(requester_pod, waiting.retry.failures);
                }
            }
        }
        self.requester_status.write(
            &self.index,
            &self.facts,
            &self.executor,
            &self.pod_events,
            &mut self.tasks,
        );
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

/// Lists all visible Pods. Retries until the API server answers, except for namespaces whose list is skipped.
async fn list(all: &[WatchTarget<Pod>], awaited: &InitialLists) -> Vec<Delta<Pod>> {
    let mut found = Vec::new();
    for watched in all {
        loop {
            match watched::list(watched).await {
                Ok(change) => break found.push(change),
                Err(_)
                    if watched.namespace.as_ref().is_some_and(|namespace| awaited.is_skipped(namespace)) =>
                {
                    break;
                }
                Err(error) => {
                    tracing::warn!(%error, "Pod list failed, retrying");
                    time::sleep(LIST_RETRY_DELAY).await;
                }
            }
        }
    }
    found
}

/// Returns the number of lists of each kind: one per namespace.
fn namespace_count(all: &[WatchTarget<Pod>]) -> usize {
    all.iter().map(|watched| &watched.namespace).collect::<BTreeSet<_>>().len()
}

async fn until(deadline: Option<Tick>, clock: TickClock) {
    match deadline {
        Some(deadline) => time::sleep(deadline.since(clock.now()).duration()).await,
        None => std::future::pending().await,
    }
}
