//! State of one node. No decision spans two nodes.
//!
//! This file has the node and its accelerators, `engine` an engine, `pods` its requesters and providers.

mod engine;
mod pending_command;
mod pods;

use std::collections::BTreeMap;

pub use self::{
    engine::{Binding, PairingEngine, PairingEngineState},
    pending_command::{PendingCommand, PendingCommandKind, RetryState},
    pods::{PairingProvider, PairingRequester},
};
use super::{
    actuation::EngineWant,
    event::{AcceleratorFacts, PairingNodeFacts},
    ids::{LauncherBuild, NodeName, PairingEngineId, ProviderId, ProviderMode, RequesterId},
    settings::PairingSettings,
    vanished::VanishedEngine,
};
use crate::{
    model::AcceleratorId,
    units::{Bytes, Tick},
};

#[derive(Clone, Debug)]
pub struct PairingNode {
    pub name: NodeName,
    pub facts: PairingNodeFacts,
    /// The Node object exists and has been observed.
    pub exists: bool,
    /// The kubelet has stopped reporting. `reporting_since` is when it last resumed.
    pub kubelet_silent: bool,
    pub reporting_since: Tick,
    pub accelerators: BTreeMap<AcceleratorId, PairingAccelerator>,
    pub requesters: BTreeMap<RequesterId, PairingRequester>,
    /// The last want for each requester, observed or not.
    pub wants: BTreeMap<RequesterId, EngineWant>,
    pub providers: BTreeMap<ProviderId, PairingProvider>,
    pub engines: BTreeMap<PairingEngineId, PairingEngine>,
    /// Engines of Pods whose objects vanished.
    pub vanished: Vec<VanishedEngine>,
}

impl PairingNode {
    #[must_use]
    pub fn new(name: NodeName) -> Self {
        Self {
            name,
            facts: PairingNodeFacts::default(),
            exists: false,
            kubelet_silent: false,
            reporting_since: Tick(0),
            accelerators: BTreeMap::new(),
            requesters: BTreeMap::new(),
            wants: BTreeMap::new(),
            providers: BTreeMap::new(),
            engines: BTreeMap::new(),
            vanished: Vec::new(),
        }
    }

    /// Whether nothing is known of the node any more.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        let pods = self.requesters.is_empty() && self.wants.is_empty() && self.providers.is_empty();
        !self.exists && pods && self.engines.is_empty() && self.vanished.is_empty()
    }

    pub fn engines_on<'a>(
        &'a self,
        accelerator: &'a AcceleratorId,
    ) -> impl Iterator<Item = &'a PairingEngine> {
        self.engines.values().filter(|engine| engine.uses(accelerator))
    }

    /// Whether a reading of this accelerator can change a decision: an engine or a vanished Pod may hold memory there,
    /// or a requester waits for it.
    #[must_use]
    pub fn wants_reading_of(&self, accelerator: &AcceleratorId) -> bool {
        let asks = |requester: &PairingRequester| requester.accelerators.contains(accelerator);
        !self.vanished.is_empty()
            || self.engines_on(accelerator).next().is_some()
            || self.requesters.values().any(asks)
    }

    /// The other engines that use any of its accelerators.
    pub fn engines_sharing<'a>(
        &'a self,
        engine: &'a PairingEngineId,
    ) -> impl Iterator<Item = &'a PairingEngine> {
        let shares =
            |other: &&PairingEngine| other.id.accelerators.iter().any(|a| engine.accelerators.contains(a));
        self.engines.values().filter(move |other| other.id != *engine).filter(shares)
    }

    pub fn engines_in<'a>(&'a self, provider: &'a ProviderId) -> impl Iterator<Item = &'a PairingEngine> {
        self.engines.values().filter(move |engine| engine.provider == *provider)
    }

    /// A bound engine in this launcher that is not stopping. The launcher must stay for it.
    #[must_use]
    pub fn bound_in<'a>(&'a self, launcher: &'a ProviderId) -> Option<&'a PairingEngine> {
        self.engines_in(launcher)
            .find(|engine| engine.binding.is_some() && !engine.state.is_stopping_or_gone())
    }

    /// Since when neither this launcher nor its accelerator has changed.
    #[must_use]
    pub fn idle_since(&self, launcher: &ProviderId) -> Option<Tick> {
        let last_gone =
            launcher.accelerators.iter().filter_map(|a| self.accelerators.get(a)?.last_engine_gone).max();
        Some(self.providers.get(launcher)?.since.max(last_gone.unwrap_or_default()))
    }

    /// The engine bound to this requester.
    #[must_use]
    pub fn engine_of(&self, requester: &RequesterId) -> Option<&PairingEngine> {
        self.engines.values().find(|engine| engine.requester() == Some(requester))
    }

    /// The total memory reserved on an accelerator.
    #[must_use]
    pub fn reserved(&self, accelerator: &AcceleratorId) -> Bytes {
        self.engines_on(accelerator).map(|engine| engine.reserved).sum::<Bytes>()
            + self.vanished_on(accelerator)
    }

    /// The memory reserved on an accelerator for vanished Pods.
    #[must_use]
    pub fn vanished_on(&self, accelerator: &AcceleratorId) -> Bytes {
        self.vanished.iter().filter_map(|vanished| vanished.reserved.get(accelerator)).copied().sum()
    }

    #[must_use]
    pub fn reserved_host(&self) -> Bytes {
        self.engines.values().map(|engine| engine.reserved_host).sum::<Bytes>() + self.vanished_host()
    }

    #[must_use]
    pub fn vanished_host(&self) -> Bytes {
        self.vanished.iter().map(|vanished| vanished.reserved_host).sum()
    }

    /// Why this engine's weights do not fit into host RAM; `None` if they do. They must fit into the node's budget for
    /// sleepers, and into the memory limit of the engine's Pod, which all engines of the Pod share. The kernel kills an
    /// engine beyond the limit, so a Pod not observed yet has no room.
    #[must_use]
    pub fn host_memory_shortage(&self, engine: &PairingEngine) -> Option<HostMemoryShortage> {
        let weights = engine.sizes.host;
        let budget = self.facts.host_sleep_memory;
        let others = self.reserved_host().saturating_sub(engine.reserved_host);
        if others + weights > budget {
            return Some(HostMemoryShortage::Node { budget, left: budget.saturating_sub(others) });
        }
        let provider = self.providers.get(&engine.provider).filter(|provider| provider.uid.is_some());
        let Some(provider) = provider else { return Some(HostMemoryShortage::UnobservedPod) };
        let limit = provider.memory_limit?;
        let other_engines = self.engines_in(&engine.provider).filter(|other| other.id != engine.id);
        let others = other_engines.map(|other| other.reserved_host).sum::<Bytes>();
        (others + weights > limit)
            .then(|| HostMemoryShortage::Pod { limit, left: limit.saturating_sub(others) })
    }

    /// The requester of this engine, unless it is gone or about to go.
    #[must_use]
    pub fn staying_requester(&self, engine: &PairingEngine) -> Option<&PairingRequester> {
        self.requesters.get(engine.requester()?).filter(|requester| requester.stays())
    }

    /// The id of the engine that this requester requests, whether or not that engine exists.
    #[must_use]
    pub fn requested_engine_id(&self, requester: &PairingRequester) -> PairingEngineId {
        PairingEngineId {
            mode: requester.observed.requested.mode,
            accelerators: requester.accelerators.clone(),
            fingerprint: requester.observed.requested.fingerprint,
        }
    }

    /// The provider that this engine must run in.
    #[must_use]
    pub fn provider_for(&self, engine: &PairingEngineId) -> ProviderId {
        if engine.mode != ProviderMode::Launcher {
            return ProviderId::direct(engine);
        }
        let index = |a: &AcceleratorId| {
            self.accelerators.get(a).map_or(u32::MAX, |accelerator| accelerator.facts.index)
        };
        let lowest = engine.accelerators.iter().min_by_key(|a| (index(a), (*a).clone()));
        lowest.map_or_else(|| ProviderId::direct(engine), |lowest| ProviderId::launcher(lowest.clone()))
    }

    /// The requester that has waited longest for an engine in this launcher.
    #[must_use]
    pub fn first_waiting_requester(&self, launcher: &ProviderId) -> Option<&RequesterId> {
        let is_waiting_for = |(id, requester): &(&RequesterId, &PairingRequester)| {
            requester.stays()
                && requester.observed.requested.mode == ProviderMode::Launcher
                && self.provider_for(&self.requested_engine_id(requester)) == *launcher
                && self.engine_of(id).is_none()
                && self.may_take_memory(id, requester)
        };
        let waiting = self.requesters.iter().filter(is_waiting_for);
        waiting.min_by_key(|(id, requester)| (self.waiting_since(id, requester), *id)).map(|(id, _)| id)
    }
}

#[derive(Clone, Debug)]
pub struct PairingAccelerator {
    pub facts: AcceleratorFacts,
    /// When an engine last fell asleep here.
    pub last_sleep: Option<Tick>,
    /// When an engine was last seen gone from here.
    pub last_engine_gone: Option<Tick>,
    /// The last reading of the meter, and its moment.
    pub last_reading: Option<(Bytes, Tick)>,
    /// Number of launchers of one build that failed in a row on this accelerator. `crashed_build` is that build, and
    /// `not_before` the earliest moment for its next launcher.
    pub crashes: u32,
    pub crashed_build: Option<LauncherBuild>,
    /// The last failed launcher was never ready; otherwise it had engines that did not stop.
    pub never_ready: bool,
    pub not_before: Tick,
    /// The meter found more than the known residues, and engines were deleted for that. Until the next valid reading
    /// the known residues are not enough to decide.
    pub needs_reading: bool,
}

impl PairingAccelerator {
    /// Counts a failed launcher and sets the pause before the next. The pause grows with each failure. A failure of
    /// another build, or of a launcher with an engine proven for `launcher_proven_after`, starts the count anew.
    pub(super) fn launcher_crashed(
        &mut self,
        build: Option<LauncherBuild>,
        proved: Option<Tick>,
        settings: &PairingSettings,
        now: Tick,
    ) {
        if self.crashed_build != build || proved.is_some_and(|at| at + settings.launcher_proven_after <= now)
        {
            self.crashes = 0;
        }
        self.crashes += 1;
        self.crashed_build = build;
        self.not_before = now + settings.launcher_backoff_for(self.crashes);
    }
}

/// Why an engine's weights do not fit into host RAM. `left`: what the other sleepers leave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostMemoryShortage {
    /// The node's budget for sleepers has too little left.
    Node { budget: Bytes, left: Bytes },
    /// The memory limit of the engine's Pod has too little left.
    Pod { limit: Bytes, left: Bytes },
    /// The Pod was not observed yet, so its memory limit is unknown.
    UnobservedPod,
}
