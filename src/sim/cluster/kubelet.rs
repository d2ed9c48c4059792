//! Owners, scheduler and kubelets: Pods are created, run, end and are deleted.

use super::{
    ClusterEvent, SimulatedCluster,
    pods::{
        PodProcess, PodProcessPhase, ProviderKey, SimulatedProvider, SimulatedRequester, SimulatedStub,
        VanishedProcess,
    },
};
use crate::{
    model::AcceleratorId,
    pairing::{
        event::{EngineRecord, LeaderEpoch, ProviderPhase},
        ids::{LauncherBuild, NodeName, PairingEngineId, RequesterId, Uid},
    },
    units::{Bytes, Generation, Millis},
};

/// Longest time until the kubelet has stopped a Pod whose object vanished.
const VANISHED_POD_GRACE: Millis = Millis::secs(10);

impl SimulatedCluster {
    /// Creates a requester if its owner wants one, has none that stays, and a node has room.
    pub(super) fn ensure_requester(&mut self, number: usize) {
        let Some(owner) = self.scenario.owners.get(number).cloned() else { return };
        let exists = self
            .requesters
            .values()
            .any(|r| r.owner == number && r.deleting_since.is_none() && !r.terminated);
        if owner.wants_requester && !exists && !self.create_requester(number) {
            self.schedule(Millis(700), ClusterEvent::EnsureRequester(number));
        }
    }

    /// Picks a node and accelerators as scheduler and kubelet do: any node that accepts Pods, any accelerators with a
    /// free slot.
    pub(super) fn create_requester(&mut self, number: usize) -> bool {
        let Some(owner) = self.scenario.owners.get(number).cloned() else { return false };
        let slots = self.scenario.slots;
        let free = |name: &NodeName| {
            let machine = self.nodes.get(name).filter(|m| m.exists && !m.facts.cordoned && !m.cut_off);
            let all = machine.into_iter().flat_map(|m| {
                m.accelerators.iter().filter(move |(a, facts)| facts.healthy && m.slots_used(a) < slots)
            });
            all.map(|(a, _)| a.clone()).collect::<Vec<AcceleratorId>>()
        };
        let nodes =
            self.node_names().into_iter().filter(|n| owner.node.as_ref().is_none_or(|node| node == n));
        let fitting: Vec<_> =
            nodes.map(|n| (free(&n), n)).filter(|(a, _)| a.len() >= owner.accelerator_count).collect();
        let Some((mut accelerators, node)) = self.random.pick(&fitting).cloned() else { return false };
        // Mostly picks the same accelerators again.
        if self.random.chance(0.3) {
            accelerators.rotate_left(1);
        }
        accelerators.truncate(owner.accelerator_count);
        let id = RequesterId::from(self.next_uid("requester"));
        if let Some(machine) = self.nodes.get_mut(&node) {
            for accelerator in &accelerators {
                machine.allocated.entry(accelerator.clone()).or_default().insert(id.clone());
            }
        }
        let requester = SimulatedRequester {
            node,
            owner: number,
            requested: owner.requested,
            created: self.now,
            accelerators,
            stub: None,
            deleting_since: None,
            terminated: false,
            finalizer: false,
            actuated: self.is_shared(),
            wanted: None,
        };
        self.requesters.insert(id.clone(), requester);
        self.count("requesters");
        self.emit_requester(&id);
        self.first_want(&id);
        let after = self.random_duration((20, 400));
        self.schedule(after, ClusterEvent::StubStarts(id));
        true
    }

    pub(super) fn stub_starts(&mut self, id: &RequesterId) {
        let container = Uid::from(self.next_uid("stub"));
        if let Some(requester) = self.requesters.get_mut(id).filter(|r| !r.terminated) {
            requester.stub = Some(SimulatedStub { container, epoch: LeaderEpoch(0), open_to: None });
            self.emit_requester(id);
        }
    }

    /// Ends the requester's containers and frees its accelerators.
    pub(super) fn stub_ends(&mut self, id: &RequesterId) {
        let Some(requester) = self.requesters.get_mut(id).filter(|r| !r.terminated) else { return };
        requester.terminated = true;
        requester.stub = None;
        let owner = requester.owner;
        if let Some(machine) = self.nodes.get_mut(&requester.node) {
            machine.allocated.values_mut().for_each(|holders| {
                holders.remove(id);
            });
        }
        self.emit_requester(id);
        self.collect_requester(id);
        self.settle_wants();
        self.schedule(Millis(300), ClusterEvent::EnsureRequester(owner));
    }

    pub(super) fn delete_requester(&mut self, id: &RequesterId) {
        let Some(requester) = self.requesters.get_mut(id).filter(|r| r.deleting_since.is_none()) else {
            return;
        };
        let hold = self.scenario.settings.max_hold(&requester.requested.sizes);
        requester.deleting_since = Some(self.now);
        let owner = requester.owner;
        self.emit_requester(id);
        // With the hold, the stub waits for its release; without, it ends on its own soon.
        let grace = if self.scenario.stubs_await_release { hold } else { self.random_duration((5, 2000)) };
        self.schedule(grace, ClusterEvent::StubEnds(id.clone()));
        self.collect_requester(id);
        self.settle_wants();
        self.schedule(Millis(50), ClusterEvent::EnsureRequester(owner));
    }

    /// Removes the object once it is deleted, has ended, and has no finalizer.
    pub(super) fn collect_requester(&mut self, id: &RequesterId) {
        let over = |r: &SimulatedRequester| r.deleting_since.is_some() && r.terminated && !r.finalizer;
        if self.requesters.get(id).is_some_and(over)
            && let Some(requester) = self.requesters.remove(id)
        {
            self.emit_requester_gone(requester.node, id.clone());
        }
    }

    pub(super) fn create_provider(
        &mut self,
        key: &ProviderKey,
        build: Option<LauncherBuild>,
        records: Vec<EngineRecord>,
        epoch: LeaderEpoch,
    ) {
        let uid = Uid::from(self.next_uid("pod"));
        let provider = SimulatedProvider {
            uid: uid.clone(),
            phase: ProviderPhase::Pending,
            deleting: false,
            restarts: 0,
            build,
            memory_limit: self.scenario.provider_memory_limit,
            epoch,
            hung: false,
            records,
            processes: [].into(),
            exited: [].into(),
            last_stopped: [].into(),
        };
        self.providers.insert(key.clone(), provider);
        self.count("provider Pods");
        self.emit_provider(key);
        let after = self.random_duration(self.scenario.pod_start_time);
        self.schedule(after, ClusterEvent::PodRuns(key.clone(), uid));
    }

    fn live_pod(&mut self, key: &ProviderKey, uid: &Uid) -> Option<&mut SimulatedProvider> {
        if self.is_cut_off(&key.0) {
            return None;
        }
        self.providers
            .get_mut(key)
            .filter(|provider| provider.uid == *uid && provider.phase != ProviderPhase::Terminated)
    }

    pub(super) fn pod_runs(&mut self, key: &ProviderKey, uid: &Uid) {
        let Some(provider) =
            self.live_pod(key, uid).filter(|p| p.phase == ProviderPhase::Pending && !p.deleting)
        else {
            return;
        };
        provider.phase = ProviderPhase::Running;
        let record = provider.records.first().cloned().filter(|_| !key.1.is_launcher());
        self.emit_provider(key);
        if let Some(record) = record {
            self.start_process(key, &record.engine, record.generation);
        } else {
            let after = self.random_duration((50, 2000));
            self.schedule(after, ClusterEvent::PodIsReady(key.clone(), uid.clone()));
        }
    }

    pub(super) fn pod_is_ready(&mut self, key: &ProviderKey, uid: &Uid) {
        if let Some(provider) = self.live_pod(key, uid).filter(|p| p.phase != ProviderPhase::Ready) {
            provider.phase = ProviderPhase::Ready;
            self.emit_provider(key);
        }
    }

    /// Starts a process that loads with its full memory.
    pub(super) fn start_process(
        &mut self,
        key: &ProviderKey,
        engine: &PairingEngineId,
        generation: Generation,
    ) {
        let fat = self.chance(self.scenario.fault_rates.oversized_residue);
        let hung = self.chance(self.scenario.fault_rates.hangs);
        let Some(record) = self.providers.get_mut(key).and_then(|p| p.record(engine).cloned()) else {
            return;
        };
        let sizes = record.sizes;
        let residue = if fat { sizes.asleep + Bytes::mib(700) } else { sizes.asleep };
        let process = PodProcess {
            generation,
            phase: PodProcessPhase::Loading,
            awake_bytes: sizes.awake,
            residue: residue.min(sizes.awake),
            host_bytes: sizes.host,
            hung,
        };
        if let Some(provider) = self.providers.get_mut(key) {
            provider.processes.insert(engine.clone(), process);
        }
        self.check_launcher_capacity(key, engine);
        self.count("processes");
        let after = self.random_duration(self.scenario.load_time);
        self.schedule(after, ClusterEvent::ProcessLoaded(key.clone(), engine.clone(), generation));
    }

    pub(super) fn process_loaded(
        &mut self,
        key: &ProviderKey,
        engine: &PairingEngineId,
        generation: Generation,
    ) {
        let fails = self.chance(self.scenario.fault_rates.start_fails);
        let cut_off = self.is_cut_off(&key.0);
        let Some(provider) = self.providers.get_mut(key) else { return };
        let process = provider.processes.get_mut(engine).filter(|p| p.generation == generation);
        let Some(process) = process.filter(|p| p.phase == PodProcessPhase::Loading && !p.hung) else {
            return;
        };
        process.phase = PodProcessPhase::Awake;
        let uid = provider.uid.clone();
        if fails {
            return self.process_exits(key, engine);
        }
        if key.1.is_launcher() {
            self.emit_engine(key, engine, generation, Some(true));
        } else if cut_off {
            self.schedule(Millis::secs(5), ClusterEvent::PodIsReady(key.clone(), uid));
        } else {
            self.pod_is_ready(key, &uid);
        }
    }

    /// Ends a process by itself. A launcher keeps the exited instance until it is ordered to remove it.
    pub(super) fn process_exits(&mut self, key: &ProviderKey, engine: &PairingEngineId) {
        if !key.1.is_launcher() {
            return self.remove_process(key, engine);
        }
        let Some(provider) = self.providers.get_mut(key) else { return };
        let Some(process) = provider.processes.remove(engine) else { return };
        provider.exited.insert(engine.clone(), process.generation);
        self.emit_engine(key, engine, process.generation, Some(false));
    }

    /// Removes an exited instance from its launcher.
    pub(super) fn remove_exited(&mut self, key: &ProviderKey, engine: &PairingEngineId) {
        let stopped = self.providers.get_mut(key).and_then(|provider| provider.exited.remove(engine));
        stopped.into_iter().for_each(|generation| self.emit_engine(key, engine, generation, None));
    }

    /// Ends a process completely. A direct provider's Pod ends with it.
    pub(super) fn remove_process(&mut self, key: &ProviderKey, engine: &PairingEngineId) {
        let Some(provider) = self.providers.get_mut(key) else { return };
        let Some(process) = provider.processes.remove(engine) else { return };
        if key.1.is_launcher() {
            self.emit_engine(key, engine, process.generation, None);
        } else {
            let uid = provider.uid.clone();
            self.pod_ends(key, &uid);
        }
    }

    pub(super) fn delete_provider(&mut self, key: &ProviderKey) {
        let Some(provider) = self.providers.get_mut(key).filter(|p| !p.deleting) else { return };
        provider.deleting = true;
        let uid = provider.uid.clone();
        self.emit_provider(key);
        let grace = self.random_duration((50, 8000));
        self.schedule(grace, ClusterEvent::PodEnds(key.clone(), uid));
        self.collect_provider(key);
    }

    pub(super) fn pod_ends(&mut self, key: &ProviderKey, uid: &Uid) {
        // On a lost node the Pod ends at once: no kubelet has to report it.
        let silent = self.nodes.get(&key.0).is_some_and(|machine| machine.exists && machine.cut_off);
        let same = |p: &&mut SimulatedProvider| p.uid == *uid && p.phase != ProviderPhase::Terminated;
        if silent && self.providers.get_mut(key).filter(same).is_some() {
            return self.schedule(Millis::secs(3), ClusterEvent::PodEnds(key.clone(), uid.clone()));
        }
        if let Some(provider) = self.providers.get_mut(key).filter(same) {
            provider.phase = ProviderPhase::Terminated;
            provider.processes.clear();
            self.emit_provider(key);
        }
        self.collect_provider(key);
    }

    /// Removes the provider's object with its finalizer. The kubelet stops its processes later.
    pub(super) fn vanish_provider(&mut self, key: &ProviderKey) {
        let Some(provider) = self.providers.remove(key) else { return };
        self.count("Pods vanished");
        let seen_by = self.is_observed(key, &provider.uid).then_some(self.epoch);
        for (engine, process) in provider.processes {
            self.last_number += 1;
            let (number, pod) = (self.last_number, provider.uid.clone());
            self.vanished_processes.push(VanishedProcess {
                number,
                node: key.0.clone(),
                engine,
                pod,
                process,
                observed_by: seen_by,
            });
            let after = self.random_duration((50, VANISHED_POD_GRACE.0));
            self.schedule(after, ClusterEvent::VanishedProcessEnds(number));
        }
        self.vanished_pods.insert(provider.uid.clone());
        self.emit_provider_vanished(key, provider.uid);
    }

    /// Ends a process of a vanished Pod. A kubelet that is cut off does not know of the deletion yet.
    pub(super) fn vanished_process_ends(&mut self, number: u64) {
        let node = self
            .vanished_processes
            .iter()
            .find(|vanished| vanished.number == number)
            .map(|vanished| vanished.node.clone());
        let silent = |node| self.nodes.get(node).is_some_and(|machine| machine.exists && machine.cut_off);
        if node.as_ref().is_some_and(silent) {
            return self.schedule(Millis::secs(3), ClusterEvent::VanishedProcessEnds(number));
        }
        self.vanished_processes.retain(|vanished| vanished.number != number);
    }

    pub(super) fn collect_provider(&mut self, key: &ProviderKey) {
        let over =
            |p: &SimulatedProvider| p.deleting && p.phase == ProviderPhase::Terminated && !p.has_finalizer();
        if self.providers.get(key).is_some_and(over)
            && let Some(provider) = self.providers.remove(key)
        {
            self.emit_provider_gone(key, provider.uid);
        }
    }
}
