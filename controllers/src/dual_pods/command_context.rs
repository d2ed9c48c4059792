//! A command with everything that its execution needs.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    model::{AcceleratorId, SleepLevel},
    pairing::{
        command::{EngineStep, PairingAction, PairingCommand, ProviderStep},
        event::EngineRecord,
        ids::{NodeName, PairingEngineId, ProviderId, ProviderMode},
        node::{HostMemoryShortage, PairingEngineState},
    },
    units::Bytes,
};

use super::{
    PairingController,
    execute::ExecutionError,
    index::{ProviderPod, RequesterPod},
    memory_baseline::AcceleratorUsedMib,
};
use crate::{
    crd::{
        fma::{InferenceServerConfig, LauncherConfig},
        pool::NVIDIA_GPU,
    },
    dual_pods::access::AcceleratorAccess,
    metrics::{CallLatencyObserver, DualPodMetrics},
    workload::EPOCH,
    writer::fence::{Fence, SeenObject},
};

/// A command and the last observed state of what it concerns.
#[derive(Debug)]
pub(super) struct CommandContext {
    pub(super) command: PairingCommand,
    pub(super) requester: Option<RequesterPod>,
    pub(super) provider: Option<ProviderPod>,
    /// Accelerators of the requester, for a requester command.
    pub(super) accelerators: Vec<AcceleratorId>,
    /// Indices of the engine's accelerators on the node, if known.
    pub(super) numbers: Option<Vec<u32>>,
    /// Port that the engine listens on in its Pod.
    pub(super) port: Option<u16>,
    /// The engine's record, without its requester.
    pub(super) record: Option<EngineRecord>,
    /// For each accelerator of an engine, the memory that other engines reserve there.
    pub(super) reserved_by_others: BTreeMap<AcceleratorId, Bytes>,
    /// For an engine that gets a canary, the memory in use before its start.
    pub(super) baseline: Option<AcceleratorUsedMib>,
    /// For an engine that is asleep or falling asleep, its level.
    pub(super) sleep_level: Option<SleepLevel>,
    /// Why the engine's weights do not fit into host RAM; `None` if they do.
    pub(super) host_memory_shortage: Option<HostMemoryShortage>,
    /// Namespace in which the engine's own Pod was ordered.
    pub(super) namespace: Option<String>,
    /// Sources of the engine or launcher to create.
    pub(super) server_config: Option<Arc<InferenceServerConfig>>,
    pub(super) launcher_config: Option<Arc<LauncherConfig>>,
    /// How a new Pod gets access to the node's accelerators.
    pub(super) access: Option<AcceleratorAccess>,
    /// Token for the requester's stub.
    pub(super) token: Option<String>,
    /// Token for the launcher, if the provider is a launcher.
    pub(super) launcher_token: Option<String>,
    metrics: DualPodMetrics,
}

impl CommandContext {
    const fn new(command: PairingCommand, metrics: DualPodMetrics) -> Self {
        Self {
            command,
            requester: None,
            provider: None,
            accelerators: Vec::new(),
            numbers: None,
            port: None,
            record: None,
            reserved_by_others: BTreeMap::new(),
            baseline: None,
            sleep_level: None,
            host_memory_shortage: None,
            namespace: None,
            server_config: None,
            launcher_config: None,
            access: None,
            token: None,
            launcher_token: None,
            metrics,
        }
    }

    /// Returns a context without any observed state.
    #[cfg(test)]
    pub(super) fn for_test(command: PairingCommand) -> Self {
        Self::new(command, crate::metrics::DualPodMetrics::new(&prometheus::Registry::new()))
    }

    /// Returns the observer for calls on behalf of this command.
    pub(super) fn call_metrics(&self) -> Arc<CallLatencyObserver> {
        let pod = self.requester.as_ref().map(|requester| &requester.name);
        let namespace = pod
            .or_else(|| self.provider.as_ref().map(|provider| &provider.name))
            .map_or("", |name| &name.namespace);
        let config = self.requester.as_ref().and_then(RequesterPod::config);
        Arc::new(self.metrics.call_observer(namespace, config.map(|config| config.name.as_str())))
    }

    /// Returns the fence of this command's writes to a Pod.
    pub(super) fn fence(&self, seen: &SeenObject) -> Fence {
        Fence::new(seen.clone(), self.command.epoch.0)
    }

    /// Returns the fence of a write that is computed from this Pod's content.
    pub(super) fn exact_fence(&self, pod: &Pod) -> Fence {
        Fence::exact(SeenObject::of(&pod.metadata), self.command.epoch.0)
    }

    /// Marks a new Pod as made by this leader: its successor recognises it.
    pub(super) fn stamp(&self, pod: &mut Pod) {
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert(EPOCH.to_owned(), self.command.epoch.0.to_string());
    }

    /// Gives a new Pod access to its node's accelerators.
    pub(super) fn grant(&self, pod: &mut Pod) {
        if let (Some(access), Some(spec)) = (&self.access, &mut pod.spec) {
            access.grant(spec);
        }
    }

    pub(super) fn requester(&self) -> Result<&RequesterPod, ExecutionError> {
        self.requester.as_ref().ok_or_else(|| ExecutionError::unknown("the requester"))
    }

    pub(super) fn provider(&self) -> Result<&ProviderPod, ExecutionError> {
        self.provider.as_ref().ok_or_else(|| ExecutionError::unknown("the provider"))
    }

    pub(super) fn record(&self) -> Result<&EngineRecord, ExecutionError> {
        self.record.as_ref().ok_or_else(|| ExecutionError::unknown("the engine"))
    }

    /// Returns the engine's sleep level, as the Pods record it.
    ///
    /// Of an engine that sleeps while it is bound, the requester's Pod has the level, which the gateway records there.
    pub(super) fn recorded_sleep_level(&self, engine: &PairingEngineId) -> Option<SleepLevel> {
        let of_requester = self.requester.as_ref().and_then(|requester| requester.asleep);
        of_requester.or_else(|| self.provider.as_ref()?.engine(engine)?.sleep_level)
    }

    /// Whether the gateway decides about the engine, whose requester stays while the engine sleeps.
    pub(super) fn stays_for_gateway(&self) -> bool {
        self.requester.as_ref().is_some_and(RequesterPod::stays_for_gateway)
    }

    /// Returns the extended resource that Pods request on the node.
    pub(super) fn resource(&self) -> &str {
        self.access.as_ref().map_or(NVIDIA_GPU, AcceleratorAccess::resource)
    }

    /// Returns the engine's residue, given the MiB in use: the largest over its accelerators.
    pub(super) fn residue(&self, memory: &BTreeMap<String, u64>) -> Option<Bytes> {
        let of = |(a, others): (&AcceleratorId, &Bytes)| {
            Some(Bytes::mib(*memory.get(a.as_str())?).saturating_sub(*others))
        };
        self.reserved_by_others.iter().filter_map(of).max()
    }

    /// Returns the engine's address.
    pub(super) fn engine_address(&self) -> Result<SocketAddr, ExecutionError> {
        let provider = self.provider()?;
        let address = self.port.and_then(|port| provider.socket_addr(port));
        address.ok_or_else(|| ExecutionError::unknown("the provider's address"))
    }
}

impl PairingController {
    pub(super) fn command_context(&mut self, command: PairingCommand) -> CommandContext {
        let mut context = CommandContext::new(command.clone(), self.executor.metrics.clone());
        let node = &command.node;
        context.access = self.facts.access(node);
        match &command.action {
            PairingAction::Requester { requester, .. } => {
                context.requester = self.index.requester(requester).cloned();
                let requester_state =
                    self.core.node(node).and_then(|pairing_node| pairing_node.requesters.get(requester));
                context.accelerators = requester_state
                    .map(|requester_state| requester_state.accelerators.to_vec())
                    .unwrap_or_default();
                let engine = self.core.node(node).and_then(|pairing_node| pairing_node.engine_of(requester));
                context.provider =
                    engine.and_then(|engine| self.index.provider(node, &engine.provider)).cloned();
            }
            PairingAction::Engine { engine, step, .. } => self.fill_engine(&mut context, node, engine, step),
            PairingAction::Provider { provider, step } => {
                self.fill_launcher(&mut context, node, provider, step)
            }
        }
        let owner = context.requester.as_ref().and_then(|requester_pod| requester_pod.owner.as_ref());
        let key = &self.executor.settings.key;
        context.token = owner.map(|owner| key.token(owner));
        context.launcher_token =
            context.provider.as_ref().map(|provider_pod| key.launcher_token(&provider_pod.name));
        let config = context.requester.as_ref().and_then(RequesterPod::config);
        context.server_config = config.and_then(|name| self.facts.configs.server_config(name)).cloned();
        let launcher = config.and_then(|name| self.facts.configs.launcher_config_of(name));
        context.launcher_config = launcher
            .or_else(|| match &command.action {
                PairingAction::Provider { provider, .. } => self.facts.populated_config(node, provider),
                _ => None,
            })
            .cloned();
        context
    }

    fn fill_engine(
        &mut self,
        context: &mut CommandContext,
        node: &NodeName,
        id: &PairingEngineId,
        step: &EngineStep,
    ) {
        let Some(engine_state) = self.core.node(node).and_then(|pairing_node| pairing_node.engines.get(id))
        else {
            return;
        };
        context.sleep_level = match engine_state.state {
            PairingEngineState::Asleep { level } | PairingEngineState::FallingAsleep { level } => Some(level),
            _ => None,
        };
        context.record = Some(EngineRecord {
            engine: id.clone(),
            generation: engine_state.generation,
            sizes: engine_state.sizes,
            level: engine_state.level,
            stop_after: engine_state.stop_after,
            requester: None,
            last_used: engine_state.last_used,
        });
        context.host_memory_shortage =
            self.core.node(node).and_then(|all| all.host_memory_shortage(engine_state));
        let others = |a: &AcceleratorId| {
            self.core.node(node).map(|all| all.reserved(a).saturating_sub(engine_state.reserved))
        };
        context.reserved_by_others =
            id.accelerators.iter().filter_map(|a| Some((a.clone(), others(a)?))).collect();
        let provider = self.index.provider(node, &engine_state.provider);
        context.requester = engine_state.requester().and_then(|id| self.index.requester(id)).cloned();
        context.numbers = self.facts.numbers(node, &id.accelerators);
        context.port = provider
            .and_then(|provider_pod| provider_pod.engine(id))
            .map(|launcher_engine| launcher_engine.port);
        context.provider = provider.cloned();
        if matches!(step, EngineStep::SendCanary) {
            let location = (node.clone(), id.clone());
            context.baseline = self.baselines.take(&location, engine_state.generation);
        }
        if id.mode != ProviderMode::Launcher {
            context.namespace = match &context.requester {
                Some(requester_pod) => {
                    let namespace = requester_pod.name.namespace.clone();
                    self.provider_namespaces.insert(node, id.clone(), namespace);
                    Some(requester_pod.name.namespace.clone())
                }
                None => self.provider_namespaces.get(node, id).cloned(),
            };
            return;
        }
        if let (EngineStep::Bind { .. }, Some(pairing_node)) = (step, self.core.node(node)) {
            self.ports.allocate(pairing_node, id, self.index.ports(node));
        }
        context.port = self.ports.get(node, id).or(context.port);
    }

    fn fill_launcher(
        &self,
        context: &mut CommandContext,
        node: &NodeName,
        id: &ProviderId,
        step: &ProviderStep,
    ) {
        context.provider = self.index.provider(node, id).cloned();
        context.requester = match step {
            ProviderStep::Create { requester: asker } => {
                asker.as_ref().and_then(|id| self.index.requester(id))
            }
            ProviderStep::Delete { .. } => {
                let asker =
                    self.core.node(node).and_then(|pairing_node| pairing_node.first_waiting_requester(id));
                asker.and_then(|id| self.index.requester(id))
            }
        }
        .cloned();
    }
}
