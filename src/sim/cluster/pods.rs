//! What is really there: machines, Pods, processes and what they hold.

use std::collections::BTreeMap;

use crate::{
    model::{AcceleratorId, Level},
    pairing::{
        event::{AcceleratorFacts, Ask, Epoch, NodeFacts, Record, SeenProvider, SeenRequester, Stage},
        ids::{Build, EngineId, NodeName, ProviderId, RequesterId, Uid},
    },
    units::{Bytes, Generation, Tick},
};

/// A node, its accelerators, and the kubelet's book of who has them.
#[derive(Clone, Debug)]
pub(super) struct Machine {
    pub(super) facts: NodeFacts,
    pub(super) exists: bool,
    /// Nobody reaches it, and its kubelet reports nothing.
    pub(super) cut_off: bool,
    /// Its Node object says so by now.
    pub(super) silent: bool,
    pub(super) accelerators: BTreeMap<AcceleratorId, AcceleratorFacts>,
    pub(super) given: BTreeMap<AcceleratorId, RequesterId>,
}

/// A requester Pod.
#[derive(Clone, Debug)]
pub(super) struct Requester {
    pub(super) node: NodeName,
    pub(super) owner: usize,
    pub(super) ask: Ask,
    pub(super) created: Tick,
    pub(super) accelerators: Vec<AcceleratorId>,
    pub(super) stub: Option<Stub>,
    pub(super) deleting: Option<Tick>,
    pub(super) ended: bool,
    pub(super) finalizer: bool,
}

/// The proxy in it.
#[derive(Clone, Debug)]
pub(super) struct Stub {
    pub(super) container: Uid,
    pub(super) epoch: Epoch,
    /// The gate is open to this engine in this Pod: in a launcher its next life has the same address.
    pub(super) open: Option<(EngineId, Uid)>,
}

/// A provider Pod.
#[derive(Clone, Debug)]
pub(super) struct Provider {
    pub(super) uid: Uid,
    pub(super) stage: Stage,
    pub(super) deleting: bool,
    pub(super) restarts: u32,
    /// Of a launcher.
    pub(super) build: Option<Build>,
    /// The memory limit of its Pod.
    pub(super) host: Option<Bytes>,
    pub(super) epoch: Epoch,
    /// A launcher that answers nobody.
    pub(super) hung: bool,
    pub(super) records: Vec<Record>,
    pub(super) processes: BTreeMap<EngineId, Process>,
    /// Of a launcher: engines that ended by themselves, which are there until they are put away.
    pub(super) stopped: BTreeMap<EngineId, Generation>,
    /// Of a launcher: the last life of each engine that it was told to end, which it starts no more.
    pub(super) ended: BTreeMap<EngineId, Generation>,
}

/// An engine whose Pod's object vanished, and which has not been ended yet.
#[derive(Clone, Debug)]
pub(super) struct Ghost {
    pub(super) number: u64,
    pub(super) node: NodeName,
    pub(super) engine: EngineId,
    pub(super) pod: Uid,
    pub(super) process: Process,
    /// The leader that sees, sooner or later, that the object went. Another one cannot know of it.
    pub(super) seen_by: Option<Epoch>,
}

/// An engine that really runs.
#[derive(Clone, Debug)]
pub(super) struct Process {
    pub(super) generation: Generation,
    pub(super) phase: Phase,
    pub(super) awake: Bytes,
    /// What it keeps asleep, which may be more than was declared.
    pub(super) residue: Bytes,
    pub(super) host: Bytes,
    pub(super) hung: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Loading,
    Awake,
    /// To this level.
    FallingAsleep(Level),
    Asleep(Level),
    /// From this level.
    Waking(Level),
}

impl Process {
    pub(super) const fn is_big(&self) -> bool {
        !matches!(self.phase, Phase::Asleep(_))
    }

    /// What it holds of each of its accelerators.
    pub(super) const fn holds(&self) -> Bytes {
        if self.is_big() { self.awake } else { self.residue }
    }

    /// What it keeps of host RAM: from when it begins to fall asleep until it is awake again.
    pub(super) const fn holds_of_host(&self) -> Bytes {
        match self.phase {
            Phase::FallingAsleep(Level::One) | Phase::Asleep(Level::One) | Phase::Waking(Level::One) => {
                self.host
            }
            _ => Bytes::ZERO,
        }
    }
}

impl Requester {
    pub(super) fn seen(&self) -> SeenRequester {
        SeenRequester {
            ask: self.ask.clone(),
            created: self.created,
            stub: self.stub.as_ref().map(|stub| stub.container.clone()),
            accelerators: Vec::new(),
            deleting: self.deleting,
            grace: None,
            ended: self.ended,
            finalizer: self.finalizer,
        }
    }
}

impl Provider {
    pub(super) fn seen(&self) -> SeenProvider {
        SeenProvider {
            uid: self.uid.clone(),
            stage: self.stage,
            deleting: self.deleting,
            restarts: self.restarts,
            build: self.build,
            host: self.host,
            records: self.records.clone(),
        }
    }

    /// Our finalizer is on it.
    pub(super) fn is_held(&self) -> bool {
        self.records.iter().any(|record| record.requester.is_some())
    }

    pub(super) fn record(&mut self, engine: &EngineId) -> Option<&mut Record> {
        self.records.iter_mut().find(|record| record.engine == *engine)
    }
}

pub(super) type ProviderKey = (NodeName, ProviderId);
