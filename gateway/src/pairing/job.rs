//! An order, with what is known of those whom it is about.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    model::{AcceleratorId, Level},
    pairing::{
        command::{Command, OfProvider, Order, Step},
        event::Record,
        ids::{EngineId, Mode, NodeName, ProviderId},
        node::State,
    },
    units::Bytes,
};

use super::{
    Controller,
    directory::{Provider, Requester},
    hands::Failed,
    proof::Usage,
};
use crate::{
    controllers::{
        crd::fma::{InferenceServerConfig, LauncherConfig},
        dual::access::Access,
    },
    metrics::{Calls, Duals},
};

/// As they were seen last.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) command: Command,
    pub(super) requester: Option<Requester>,
    pub(super) provider: Option<Provider>,
    /// Of a requester.
    pub(super) accelerators: Vec<AcceleratorId>,
    /// The numbers of the engine's accelerators on the node, where there are any.
    pub(super) numbers: Option<Vec<u32>>,
    /// Where the engine listens in its Pod.
    pub(super) port: Option<u16>,
    /// Of an engine: what is to be known of it, with nobody's name.
    pub(super) record: Option<Record>,
    /// Of each accelerator of an engine: what is reserved there for others.
    pub(super) beside: BTreeMap<AcceleratorId, Bytes>,
    /// Of an engine that is to be proved: what was in use before it was started.
    pub(super) before: Option<Usage>,
    /// Of an engine that sleeps: how deeply.
    pub(super) slept: Option<Level>,
    /// Where the engine's own Pod was ordered.
    pub(super) namespace: Option<String>,
    /// What an engine or a launcher is to be made from.
    pub(super) config: Option<Arc<InferenceServerConfig>>,
    pub(super) launcher: Option<Arc<LauncherConfig>>,
    /// How a Pod that is made gets at the node's accelerators.
    pub(super) access: Option<Access>,
    /// What the requester's stub is shown.
    pub(super) token: Option<String>,
    /// What the launcher is shown, where the provider is one.
    pub(super) launcher_token: Option<String>,
    metrics: Duals,
}

impl Job {
    const fn new(command: Command, metrics: Duals) -> Self {
        Self {
            command,
            requester: None,
            provider: None,
            accelerators: Vec::new(),
            numbers: None,
            port: None,
            record: None,
            beside: BTreeMap::new(),
            before: None,
            slept: None,
            namespace: None,
            config: None,
            launcher: None,
            access: None,
            token: None,
            launcher_token: None,
            metrics,
        }
    }

    /// Where calls for it are told.
    pub(super) fn calls(&self) -> Arc<Calls> {
        let pod = self.requester.as_ref().map(|own| &own.name);
        let namespace =
            pod.or_else(|| self.provider.as_ref().map(|own| &own.name)).map_or("", |own| &own.namespace);
        let config = self.requester.as_ref().and_then(Requester::config);
        Arc::new(self.metrics.calls(namespace, config.map(|config| config.name.as_str())))
    }

    /// Gives a Pod that is made for its node what it needs there.
    pub(super) fn grant(&self, pod: &mut Pod) {
        if let (Some(access), Some(spec)) = (&self.access, &mut pod.spec) {
            access.grant(spec);
        }
    }

    pub(super) fn requester(&self) -> Result<&Requester, Failed> {
        self.requester.as_ref().ok_or_else(|| Failed::lost("its requester"))
    }

    pub(super) fn provider(&self) -> Result<&Provider, Failed> {
        self.provider.as_ref().ok_or_else(|| Failed::lost("its provider"))
    }

    pub(super) fn record(&self) -> Result<&Record, Failed> {
        self.record.as_ref().ok_or_else(|| Failed::lost("its engine"))
    }

    /// How deeply this engine sleeps, as its Pod says it.
    pub(super) fn written(&self, engine: &EngineId) -> Option<Level> {
        self.provider.as_ref()?.inside(engine)?.slept
    }

    /// What the engine keeps where so many MiB of its accelerators are in use, of the one of which it keeps most.
    pub(super) fn residue(&self, memory: &BTreeMap<String, u64>) -> Option<Bytes> {
        let of = |(a, others): (&AcceleratorId, &Bytes)| {
            Some(Bytes::mib(*memory.get(a.as_str())?).saturating_sub(*others))
        };
        self.beside.iter().filter_map(of).max()
    }

    /// Where the engine listens.
    pub(super) fn engine(&self) -> Result<SocketAddr, Failed> {
        let provider = self.provider()?;
        let address = self.port.and_then(|port| provider.at(port));
        address.ok_or_else(|| Failed::lost("the provider's address"))
    }
}

impl Controller {
    pub(super) fn job(&mut self, command: Command) -> Job {
        let mut job = Job::new(command.clone(), self.hands.metrics.clone());
        let node = &command.node;
        job.access = self.facts.access(node);
        match &command.order {
            Order::Requester { requester, .. } => {
                job.requester = self.directory.requester(requester).cloned();
                let known = self.core.node(node).and_then(|known| known.requesters.get(requester));
                job.accelerators = known.map(|known| known.accelerators.clone()).unwrap_or_default();
                let engine = self.core.node(node).and_then(|known| known.engine_of(requester));
                job.provider =
                    engine.and_then(|engine| self.directory.provider(node, &engine.provider)).cloned();
            }
            Order::Engine { engine, step, .. } => self.of_engine(&mut job, node, engine, step),
            Order::Provider { provider, step } => self.of_launcher(&mut job, node, provider, step),
        }
        let owner = job.requester.as_ref().and_then(|own| own.owner.as_ref());
        let key = &self.hands.settings.key;
        job.token = owner.map(|owner| key.token(owner));
        job.launcher_token = job.provider.as_ref().map(|own| key.launcher_token(&own.name));
        let asked = job.requester.as_ref().and_then(Requester::config);
        job.config = asked.and_then(|name| self.facts.configs.engine(name)).cloned();
        let launcher = asked.and_then(|name| self.facts.configs.launcher(name));
        job.launcher = launcher
            .or_else(|| match &command.order {
                Order::Provider { provider, .. } => self.facts.populated(node, provider),
                _ => None,
            })
            .cloned();
        job
    }

    fn of_engine(&mut self, job: &mut Job, node: &NodeName, id: &EngineId, step: &Step) {
        let Some(known) = self.core.node(node).and_then(|known| known.engines.get(id)) else { return };
        job.slept = match known.state {
            State::Asleep { level } | State::FallingAsleep { level } => Some(level),
            _ => None,
        };
        job.record = Some(Record {
            engine: id.clone(),
            generation: known.generation,
            sizes: known.sizes,
            level: known.level,
            stop_after: known.stop_after,
            requester: None,
            last_used: known.last_used,
        });
        let others =
            |a: &AcceleratorId| self.core.node(node).map(|all| all.reserved(a).saturating_sub(known.held));
        job.beside = id.accelerators.iter().filter_map(|a| Some((a.clone(), others(a)?))).collect();
        let provider = self.directory.provider(node, &known.provider);
        job.requester = known.requester().and_then(|id| self.directory.requester(id)).cloned();
        job.numbers = self.facts.numbers(node, &id.accelerators);
        job.port = provider.and_then(|own| own.inside(id)).map(|inside| inside.port);
        job.provider = provider.cloned();
        let place = (node.clone(), id.clone());
        if matches!(step, Step::Prove) {
            job.before = self.proofs.take(&place, known.generation);
        }
        if id.mode != Mode::Launcher {
            job.namespace = match &job.requester {
                Some(own) => {
                    self.ordered.insert(place, own.name.namespace.clone());
                    Some(own.name.namespace.clone())
                }
                None => self.ordered.get(&place).cloned(),
            };
            return;
        }
        if let (Step::Bind { .. }, Some(known)) = (step, self.core.node(node)) {
            self.ports.give(known, id, self.directory.ports(node));
        }
        job.port = self.ports.get(node, id).or(job.port);
    }

    fn of_launcher(&self, job: &mut Job, node: &NodeName, id: &ProviderId, step: &OfProvider) {
        job.provider = self.directory.provider(node, id).cloned();
        job.requester = match step {
            OfProvider::Create { asker } => asker.as_ref().and_then(|id| self.directory.requester(id)),
            OfProvider::Delete { .. } => {
                let asker = self.core.node(node).and_then(|known| known.asker(id));
                asker.and_then(|id| self.directory.requester(id))
            }
        }
        .cloned();
    }
}
