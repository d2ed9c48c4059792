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
    crd::fma::{InferenceServerConfig, LauncherConfig},
    dual_pods::access::AcceleratorAccess,
    metrics::{CallLatencyObserver, DualPodMetrics},
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
        let pod = self.requester.as_ref().map(|own| &own.name);
        let namespace =
            pod.or_else(|| self.provider.as_ref().map(|own| &own.name)).map_or("", |own| &own.namespace);
        let config = self.requester.as_ref().and_then(RequesterPod::config);
        Arc::new(self.metrics.call_observer(namespace, config.map(|config| config.name.as_str())))
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

    /// Returns the engine's sleep level, as its Pod records it.
    pub(super) fn recorded_sleep_level(&self, engine: &PairingEngineId) -> Option<SleepLevel> {
        self.provider.as_ref()?.engine(engine)?.sleep_level
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
        let mut job = CommandContext::new(command.clone(), self.executor.metrics.clone());
        let node = &command.node;
        job.access = self.facts.access(node);
        match &command.action {
            PairingAction::Requester { requester, .. } => {
                job.requester = self.index.requester(requester).cloned();
                let known = self.core.node(node).and_then(|known| known.requesters.get(requester));
                job.accelerators = known.map(|known| known.accelerators.clone()).unwrap_or_default();
                let engine = self.core.node(node).and_then(|known| known.engine_of(requester));
                job.provider = engine.and_then(|engine| self.index.provider(node, &engine.provider)).cloned();
            }
            PairingAction::Engine { engine, step, .. } => self.fill_engine(&mut job, node, engine, step),
            PairingAction::Provider { provider, step } => self.fill_launcher(&mut job, node, provider, step),
        }
        let owner = job.requester.as_ref().and_then(|own| own.owner.as_ref());
        let key = &self.executor.settings.key;
        job.token = owner.map(|owner| key.token(owner));
        job.launcher_token = job.provider.as_ref().map(|own| key.launcher_token(&own.name));
        let asked = job.requester.as_ref().and_then(RequesterPod::config);
        job.server_config = asked.and_then(|name| self.facts.configs.server_config(name)).cloned();
        let launcher = asked.and_then(|name| self.facts.configs.launcher_config_of(name));
        job.launcher_config = launcher
            .or_else(|| match &command.action {
                PairingAction::Provider { provider, .. } => self.facts.populated_config(node, provider),
                _ => None,
            })
            .cloned();
        job
    }

    fn fill_engine(
        &mut self,
        job: &mut CommandContext,
        node: &NodeName,
        id: &PairingEngineId,
        step: &EngineStep,
    ) {
        let Some(known) = self.core.node(node).and_then(|known| known.engines.get(id)) else { return };
        job.sleep_level = match known.state {
            PairingEngineState::Asleep { level } | PairingEngineState::FallingAsleep { level } => Some(level),
            _ => None,
        };
        job.record = Some(EngineRecord {
            engine: id.clone(),
            generation: known.generation,
            sizes: known.sizes,
            level: known.level,
            stop_after: known.stop_after,
            requester: None,
            last_used: known.last_used,
        });
        job.host_memory_shortage = self.core.node(node).and_then(|all| all.host_memory_shortage(known));
        let others = |a: &AcceleratorId| {
            self.core.node(node).map(|all| all.reserved(a).saturating_sub(known.reserved))
        };
        job.reserved_by_others =
            id.accelerators.iter().filter_map(|a| Some((a.clone(), others(a)?))).collect();
        let provider = self.index.provider(node, &known.provider);
        job.requester = known.requester().and_then(|id| self.index.requester(id)).cloned();
        job.numbers = self.facts.numbers(node, &id.accelerators);
        job.port = provider.and_then(|own| own.engine(id)).map(|inside| inside.port);
        job.provider = provider.cloned();
        let place = (node.clone(), id.clone());
        if matches!(step, EngineStep::SendCanary) {
            job.baseline = self.baselines.take(&place, known.generation);
        }
        if id.mode != ProviderMode::Launcher {
            job.namespace = match &job.requester {
                Some(own) => {
                    self.provider_namespaces.insert(place, own.name.namespace.clone());
                    Some(own.name.namespace.clone())
                }
                None => self.provider_namespaces.get(&place).cloned(),
            };
            return;
        }
        if let (EngineStep::Bind { .. }, Some(known)) = (step, self.core.node(node)) {
            self.ports.allocate(known, id, self.index.ports(node));
        }
        job.port = self.ports.get(node, id).or(job.port);
    }

    fn fill_launcher(&self, job: &mut CommandContext, node: &NodeName, id: &ProviderId, step: &ProviderStep) {
        job.provider = self.index.provider(node, id).cloned();
        job.requester = match step {
            ProviderStep::Create { requester: asker } => {
                asker.as_ref().and_then(|id| self.index.requester(id))
            }
            ProviderStep::Delete { .. } => {
                let asker = self.core.node(node).and_then(|known| known.first_waiting_requester(id));
                asker.and_then(|id| self.index.requester(id))
            }
        }
        .cloned();
    }
}
