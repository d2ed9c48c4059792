//! What is really there: machines, Pods, processes and what they hold.

use std::collections::BTreeMap;

use crate::{
    model::{AcceleratorId, SleepLevel},
    pairing::{
        event::{
            AcceleratorFacts, EngineRecord, Epoch, ObservedProvider, ObservedRequester, PairingNodeFacts,
            ProviderPhase, RequestedEngine,
        },
        ids::{LauncherBuild, NodeName, PairingEngineId, ProviderId, RequesterId, Uid},
    },
    units::{Bytes, Generation, Tick},
};

/// A node, its accelerators, and the kubelet's book of who has them.
#[derive(Clone, Debug)]
pub(super) struct SimulatedNode {
    pub(super) facts: PairingNodeFacts,
    pub(super) exists: bool,
    /// Nobody reaches it, and its kubelet reports nothing.
    pub(super) cut_off: bool,
    /// Its Node object says so by now.
    pub(super) kubelet_silent: bool,
    pub(super) accelerators: BTreeMap<AcceleratorId, AcceleratorFacts>,
    pub(super) allocated: BTreeMap<AcceleratorId, RequesterId>,
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
}

/// The proxy in it.
#[derive(Clone, Debug)]
pub(super) struct SimulatedStub {
    pub(super) container: Uid,
    pub(super) epoch: Epoch,
    /// The gate is open to this engine in this Pod: in a launcher its next life has the same address.
    pub(super) open_to: Option<(PairingEngineId, Uid)>,
}

/// A provider Pod.
#[derive(Clone, Debug)]
pub(super) struct SimulatedProvider {
    pub(super) uid: Uid,
    pub(super) phase: ProviderPhase,
    pub(super) deleting: bool,
    pub(super) restarts: u32,
    /// Of a launcher.
    pub(super) build: Option<LauncherBuild>,
    /// The memory limit of its Pod.
    pub(super) memory_limit: Option<Bytes>,
    pub(super) epoch: Epoch,
    /// A launcher that answers nobody.
    pub(super) hung: bool,
    pub(super) records: Vec<EngineRecord>,
    pub(super) processes: BTreeMap<PairingEngineId, PodProcess>,
    /// Of a launcher: engines that ended by themselves, which are there until they are put away.
    pub(super) exited: BTreeMap<PairingEngineId, Generation>,
    /// Of a launcher: the last life of each engine that it was told to end, which it starts no more.
    pub(super) last_stopped: BTreeMap<PairingEngineId, Generation>,
}

/// An engine whose Pod's object vanished, and which has not been ended yet.
#[derive(Clone, Debug)]
pub(super) struct VanishedProcess {
    pub(super) number: u64,
    pub(super) node: NodeName,
    pub(super) engine: PairingEngineId,
    pub(super) pod: Uid,
    pub(super) process: PodProcess,
    /// The leader that sees, sooner or later, that the object went. Another one cannot know of it.
    pub(super) observed_by: Option<Epoch>,
}

/// An engine that really runs.
#[derive(Clone, Debug)]
pub(super) struct PodProcess {
    pub(super) generation: Generation,
    pub(super) phase: PodProcessPhase,
    pub(super) awake_bytes: Bytes,
    /// What it keeps asleep, which may be more than was declared.
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

    /// What it holds of each of its accelerators.
    pub(super) const fn memory_held(&self) -> Bytes {
        if self.has_full_memory() { self.awake_bytes } else { self.residue }
    }

    /// What it keeps of host RAM: from when it begins to fall asleep until it is awake again.
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

    /// Our finalizer is on it.
    pub(super) fn has_finalizer(&self) -> bool {
        self.records.iter().any(|record| record.requester.is_some())
    }

    pub(super) fn record(&mut self, engine: &PairingEngineId) -> Option<&mut EngineRecord> {
        self.records.iter_mut().find(|record| record.engine == *engine)
    }
}

pub(super) type ProviderKey = (NodeName, ProviderId);
