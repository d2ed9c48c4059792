//! The real state: machines, Pods, processes, and the memory they hold.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    model::{AcceleratorId, SleepLevel},
    pairing::{
        event::{
            AcceleratorFacts, EngineRecord, LeaderEpoch, ObservedProvider, ObservedRequester,
            PairingNodeFacts, ProviderPhase, RequestedEngine, WantedState,
        },
        ids::{LauncherBuild, NodeName, PairingEngineId, ProviderId, RequesterId, Uid},
    },
    units::{Bytes, Generation, Tick},
};

/// A node, its accelerators, and the kubelet's allocation of them.
#[derive(Clone, Debug)]
pub(super) struct SimulatedNode {
    pub(super) facts: PairingNodeFacts,
    pub(super) exists: bool,
    /// The node is unreachable, and its kubelet reports nothing.
    pub(super) cut_off: bool,
    /// The Node object shows the kubelet as silent.
    pub(super) kubelet_silent: bool,
    pub(super) accelerators: BTreeMap<AcceleratorId, AcceleratorFacts>,
    pub(super) allocated: BTreeMap<AcceleratorId, BTreeSet<RequesterId>>,
}

impl SimulatedNode {
    /// How many requesters have this accelerator.
    pub(super) fn slots_used(&self, accelerator: &AcceleratorId) -> usize {
        self.allocated.get(accelerator).map_or(0, BTreeSet::len)
    }
}

/// A requester Pod.
#[derive(Clone, Debug)]
pub(super) struct SimulatedRequester {
    pub(super) node: NodeName,
    pub(super) owner: usize,
    pub(super) requested: RequestedEngine,
    pub(super) created: Tick,
    pub(super) accelerators: Vec<AcceleratorId>,
    pub(super) stub: Option<SimulatedStub>,
    pub(super) deleting_since: Option<Tick>,
    pub(super) terminated: bool,
    pub(super) finalizer: bool,
    /// The gateway decides when its engine sleeps.
    pub(super) actuated: bool,
    /// What the gateway wants of its engine.
    pub(super) wanted: Option<WantedState>,
}

/// The stub in a requester.
#[derive(Clone, Debug)]
pub(super) struct SimulatedStub {
    pub(super) container: Uid,
    pub(super) epoch: LeaderEpoch,
    /// The engine and Pod that the gate is open to. In a launcher the engine's next generation has the same address.
    pub(super) open_to: Option<(PairingEngineId, Uid)>,
}

/// A provider Pod.
#[derive(Clone, Debug)]
pub(super) struct SimulatedProvider {
    pub(super) uid: Uid,
    pub(super) phase: ProviderPhase,
    pub(super) deleting: bool,
    pub(super) restarts: u32,
    /// Launchers only.
    pub(super) build: Option<LauncherBuild>,
    /// The memory limit of its Pod.
    pub(super) memory_limit: Option<Bytes>,
    pub(super) epoch: LeaderEpoch,
    /// A launcher that answers no call.
    pub(super) hung: bool,
    pub(super) records: Vec<EngineRecord>,
    pub(super) processes: BTreeMap<PairingEngineId, PodProcess>,
    /// Launchers only: engines that ended by themselves, until they are removed.
    pub(super) exited: BTreeMap<PairingEngineId, Generation>,
    /// Launchers only: the last generation of each engine that it was ordered to stop. The launcher refuses to start
    /// that generation or an older one.
    pub(super) last_stopped: BTreeMap<PairingEngineId, Generation>,
}

/// An engine whose Pod's object vanished and which still runs.
#[derive(Clone, Debug)]
pub(super) struct VanishedProcess {
    pub(super) number: u64,
    pub(super) node: NodeName,
    pub(super) engine: PairingEngineId,
    pub(super) pod: Uid,
    pub(super) process: PodProcess,
    /// The leader that will learn that the object vanished. No other leader can know of it.
    pub(super) observed_by: Option<LeaderEpoch>,
}

/// A running engine.
#[derive(Clone, Debug)]
pub(super) struct PodProcess {
    pub(super) generation: Generation,
    pub(super) phase: PodProcessPhase,
    pub(super) awake_bytes: Bytes,
    /// Memory that it keeps asleep, which may be more than declared.
    pub(super) residue: Bytes,
    pub(super) host_bytes: Bytes,
    pub(super) hung: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PodProcessPhase {
    Loading,
    Awake,
    /// To this level.
    FallingAsleep(SleepLevel),
    Asleep(SleepLevel),
    /// From this level.
    Waking(SleepLevel),
}

impl PodProcess {
    pub(super) const fn has_full_memory(&self) -> bool {
        !matches!(self.phase, PodProcessPhase::Asleep(_))
    }

    /// Memory that it holds on each of its accelerators.
    pub(super) const fn memory_held(&self) -> Bytes {
        if self.has_full_memory() { self.awake_bytes } else { self.residue }
    }

    /// Host RAM that it holds, from the start of its sleep until it is awake again.
    pub(super) const fn host_memory_held(&self) -> Bytes {
        match self.phase {
            PodProcessPhase::FallingAsleep(SleepLevel::One)
            | PodProcessPhase::Asleep(SleepLevel::One)
            | PodProcessPhase::Waking(SleepLevel::One) => self.host_bytes,
            _ => Bytes::ZERO,
        }
    }
}

impl SimulatedRequester {
    pub(super) fn observed(&self) -> ObservedRequester {
        ObservedRequester {
            requested: self.requested.clone(),
            created: self.created,
            stub_container: self.stub.as_ref().map(|stub| stub.container.clone()),
            accelerators: Vec::new(),
            deleting_since: self.deleting_since,
            grace: None,
            terminated: self.terminated,
            finalizer: self.finalizer,
            actuated: self.actuated,
        }
    }
}

impl SimulatedProvider {
    pub(super) fn observed(&self) -> ObservedProvider {
        ObservedProvider {
            uid: self.uid.clone(),
            phase: self.phase,
            deleting: self.deleting,
            restarts: self.restarts,
            build: self.build,
            memory_limit: self.memory_limit,
            records: self.records.clone(),
        }
    }

    /// Whether our finalizer is on it.
    pub(super) fn has_finalizer(&self) -> bool {
        self.records.iter().any(|record| record.requester.is_some())
    }

    pub(super) fn record(&mut self, engine: &PairingEngineId) -> Option<&mut EngineRecord> {
        self.records.iter_mut().find(|record| record.engine == *engine)
    }
}

pub(super) type ProviderKey = (NodeName, ProviderId);
