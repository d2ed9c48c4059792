//! Owners, scheduler and kubelets: Pods come, run, end and go.

use super::{
    Cluster, Happening,
    pods::{Ghost, Phase, Process, Provider, ProviderKey, Requester, Stub},
};
use crate::{
    model::AcceleratorId,
    pairing::{
        event::{Epoch, Record, Stage},
        ids::{Build, EngineId, NodeName, RequesterId, Uid},
    },
    units::{Bytes, Generation, Millis},
};

/// A kubelet that has heard that a Pod's object is gone has ended it within this.
const GRACE: Millis = Millis::secs(10);

impl Cluster {
    /// Makes a requester if one is wanted, none is there that stays, and a node has room for it.
    pub(super) fn own(&mut self, number: usize) {
        let Some(owner) = self.plot.owners.get(number).cloned() else { return };
        let there = self.requesters.values().any(|r| r.owner == number && r.deleting.is_none() && !r.ended);
        if owner.wants && !there && !self.create_requester(number) {
            self.add(Millis(700), Happening::Own(number));
        }
    }

    /// As scheduler and kubelet do: any node that takes Pods, any accelerators that nobody has.
    pub(super) fn create_requester(&mut self, number: usize) -> bool {
        let Some(owner) = self.plot.owners.get(number).cloned() else { return false };
        let free = |name: &NodeName| {
            let machine = self.machines.get(name).filter(|m| m.exists && !m.facts.cordoned && !m.cut_off);
            let all = machine.into_iter().flat_map(|m| {
                m.accelerators.iter().filter(|(a, facts)| facts.healthy && !m.given.contains_key(*a))
            });
            all.map(|(a, _)| a.clone()).collect::<Vec<AcceleratorId>>()
        };
        let nodes =
            self.set_of_nodes().into_iter().filter(|n| owner.node.as_ref().is_none_or(|own| own == n));
        let fitting: Vec<_> = nodes.map(|n| (free(&n), n)).filter(|(a, _)| a.len() >= owner.count).collect();
        let Some((mut accelerators, node)) = self.random.pick(&fitting).cloned() else { return false };
        // Mostly the same ones again.
        if self.random.chance(0.3) {
            accelerators.rotate_left(1);
        }
        accelerators.truncate(owner.count);
        let id = RequesterId::from(self.uid("requester"));
        if let Some(machine) = self.machines.get_mut(&node) {
            machine.given.extend(accelerators.iter().map(|a| (a.clone(), id.clone())));
        }
        let requester = Requester {
            node,
            owner: number,
            ask: owner.ask,
            created: self.now,
            accelerators,
            stub: None,
            deleting: None,
            ended: false,
            finalizer: false,
        };
        self.requesters.insert(id.clone(), requester);
        self.count("requesters");
        self.show_requester(&id);
        let after = self.draw((20, 400));
        self.add(after, Happening::StubStarts(id));
        true
    }

    pub(super) fn stub_starts(&mut self, id: &RequesterId) {
        let container = Uid::from(self.uid("stub"));
        if let Some(requester) = self.requesters.get_mut(id).filter(|r| !r.ended) {
            requester.stub = Some(Stub { container, epoch: Epoch(0), open: None });
            self.show_requester(id);
        }
    }

    /// Its containers end, and its accelerators are anybody's.
    pub(super) fn stub_ends(&mut self, id: &RequesterId) {
        let Some(requester) = self.requesters.get_mut(id).filter(|r| !r.ended) else { return };
        requester.ended = true;
        requester.stub = None;
        let owner = requester.owner;
        if let Some(machine) = self.machines.get_mut(&requester.node) {
            machine.given.retain(|_, holder| holder != id);
        }
        self.show_requester(id);
        self.collect_requester(id);
        self.add(Millis(300), Happening::Own(owner));
    }

    pub(super) fn delete_requester(&mut self, id: &RequesterId) {
        let Some(requester) = self.requesters.get_mut(id).filter(|r| r.deleting.is_none()) else { return };
        let hold = self.plot.settings.hold(&requester.ask.sizes);
        requester.deleting = Some(self.now);
        let owner = requester.owner;
        self.show_requester(id);
        // With the hold the stub waits to be released; without, it ends on its own soon.
        let grace = if self.plot.stub_holds { hold } else { self.draw((5, 2000)) };
        self.add(grace, Happening::StubEnds(id.clone()));
        self.collect_requester(id);
        self.add(Millis(50), Happening::Own(owner));
    }

    /// The object goes once it is deleted, has ended, and nobody's finalizer is on it.
    pub(super) fn collect_requester(&mut self, id: &RequesterId) {
        let over = |r: &Requester| r.deleting.is_some() && r.ended && !r.finalizer;
        if self.requesters.get(id).is_some_and(over)
            && let Some(requester) = self.requesters.remove(id)
        {
            self.requester_is_gone(requester.node, id.clone());
        }
    }

    pub(super) fn create_provider(
        &mut self,
        key: &ProviderKey,
        build: Option<Build>,
        records: Vec<Record>,
        epoch: Epoch,
    ) {
        let uid = Uid::from(self.uid("pod"));
        let provider = Provider {
            uid: uid.clone(),
            stage: Stage::Pending,
            deleting: false,
            restarts: 0,
            build,
            host: self.plot.provider_host,
            epoch,
            hung: false,
            records,
            processes: [].into(),
            stopped: [].into(),
            ended: [].into(),
        };
        self.providers.insert(key.clone(), provider);
        self.count("provider Pods");
        self.show_provider(key);
        let after = self.draw(self.plot.pod_start);
        self.add(after, Happening::PodRuns(key.clone(), uid));
    }

    fn pod(&mut self, key: &ProviderKey, uid: &Uid) -> Option<&mut Provider> {
        if self.is_cut_off(&key.0) {
            return None;
        }
        self.providers.get_mut(key).filter(|provider| provider.uid == *uid && provider.stage != Stage::Ended)
    }

    pub(super) fn pod_runs(&mut self, key: &ProviderKey, uid: &Uid) {
        let Some(provider) = self.pod(key, uid).filter(|p| p.stage == Stage::Pending && !p.deleting) else {
            return;
        };
        provider.stage = Stage::Running;
        let record = provider.records.first().cloned().filter(|_| !key.1.is_launcher());
        self.show_provider(key);
        if let Some(record) = record {
            self.start_process(key, &record.engine, record.generation);
        } else {
            let after = self.draw((50, 2000));
            self.add(after, Happening::PodIsReady(key.clone(), uid.clone()));
        }
    }

    pub(super) fn pod_is_ready(&mut self, key: &ProviderKey, uid: &Uid) {
        if let Some(provider) = self.pod(key, uid).filter(|p| p.stage != Stage::Ready) {
            provider.stage = Stage::Ready;
            self.show_provider(key);
        }
    }

    /// A process begins to load, with all the memory that it is to have.
    pub(super) fn start_process(&mut self, key: &ProviderKey, engine: &EngineId, generation: Generation) {
        let fat = self.chance(self.plot.troubles.fat_residue);
        let hung = self.chance(self.plot.troubles.hangs);
        let Some(record) = self.providers.get_mut(key).and_then(|p| p.record(engine).cloned()) else {
            return;
        };
        let sizes = record.sizes;
        let residue = if fat { sizes.asleep + Bytes::mib(700) } else { sizes.asleep };
        let process = Process {
            generation,
            phase: Phase::Loading,
            awake: sizes.awake,
            residue: residue.min(sizes.awake),
            host: sizes.host,
            hung,
        };
        if let Some(provider) = self.providers.get_mut(key) {
            provider.processes.insert(engine.clone(), process);
        }
        self.check_places(key, engine);
        self.count("processes");
        let after = self.draw(self.plot.load);
        self.add(after, Happening::Loaded(key.clone(), engine.clone(), generation));
    }

    pub(super) fn loaded(&mut self, key: &ProviderKey, engine: &EngineId, generation: Generation) {
        let fails = self.chance(self.plot.troubles.start_fails);
        let cut_off = self.is_cut_off(&key.0);
        let Some(provider) = self.providers.get_mut(key) else { return };
        let process = provider.processes.get_mut(engine).filter(|p| p.generation == generation);
        let Some(process) = process.filter(|p| p.phase == Phase::Loading && !p.hung) else { return };
        process.phase = Phase::Awake;
        let uid = provider.uid.clone();
        if fails {
            return self.process_stops(key, engine);
        }
        if key.1.is_launcher() {
            self.show_engine(key, engine, generation, Some(true));
        } else if cut_off {
            self.add(Millis::secs(5), Happening::PodIsReady(key.clone(), uid));
        } else {
            self.pod_is_ready(key, &uid);
        }
    }

    /// A process ends by itself. A launcher keeps that in mind until it is told to put it away.
    pub(super) fn process_stops(&mut self, key: &ProviderKey, engine: &EngineId) {
        if !key.1.is_launcher() {
            return self.process_dies(key, engine);
        }
        let Some(provider) = self.providers.get_mut(key) else { return };
        let Some(process) = provider.processes.remove(engine) else { return };
        provider.stopped.insert(engine.clone(), process.generation);
        self.show_engine(key, engine, process.generation, Some(false));
    }

    /// What stopped is put away.
    pub(super) fn put_away(&mut self, key: &ProviderKey, engine: &EngineId) {
        let stopped = self.providers.get_mut(key).and_then(|provider| provider.stopped.remove(engine));
        stopped.into_iter().for_each(|life| self.show_engine(key, engine, life, None));
    }

    /// A process ends, and nothing is left of it. That of a direct provider takes its Pod along.
    pub(super) fn process_dies(&mut self, key: &ProviderKey, engine: &EngineId) {
        let Some(provider) = self.providers.get_mut(key) else { return };
        let Some(process) = provider.processes.remove(engine) else { return };
        if key.1.is_launcher() {
            self.show_engine(key, engine, process.generation, None);
        } else {
            let uid = provider.uid.clone();
            self.pod_ends(key, &uid);
        }
    }

    pub(super) fn delete_provider(&mut self, key: &ProviderKey) {
        let Some(provider) = self.providers.get_mut(key).filter(|p| !p.deleting) else { return };
        provider.deleting = true;
        let uid = provider.uid.clone();
        self.show_provider(key);
        let grace = self.draw((50, 8000));
        self.add(grace, Happening::PodEnds(key.clone(), uid));
        self.collect_provider(key);
    }

    pub(super) fn pod_ends(&mut self, key: &ProviderKey, uid: &Uid) {
        // Where there is no node any more, the object is not waited for.
        let silent = self.machines.get(&key.0).is_some_and(|machine| machine.exists && machine.cut_off);
        let same = |p: &&mut Provider| p.uid == *uid && p.stage != Stage::Ended;
        if silent && self.providers.get_mut(key).filter(same).is_some() {
            return self.add(Millis::secs(3), Happening::PodEnds(key.clone(), uid.clone()));
        }
        if let Some(provider) = self.providers.get_mut(key).filter(same) {
            provider.stage = Stage::Ended;
            provider.processes.clear();
            self.show_provider(key);
        }
        self.collect_provider(key);
    }

    /// Its object goes, finalizer and all; the kubelet ends what ran in it when it comes to it.
    pub(super) fn vanish(&mut self, key: &ProviderKey) {
        let Some(provider) = self.providers.remove(key) else { return };
        self.count("Pods vanished");
        let seen_by = self.is_seen(key, &provider.uid).then_some(self.epoch);
        for (engine, process) in provider.processes {
            self.made += 1;
            let (number, pod) = (self.made, provider.uid.clone());
            self.ghosts.push(Ghost { number, node: key.0.clone(), engine, pod, process, seen_by });
            let after = self.draw((50, GRACE.0));
            self.add(after, Happening::GhostEnds(number));
        }
        self.vanished.insert(provider.uid.clone());
        self.provider_vanished(key, provider.uid);
    }

    /// A kubelet that is cut off has not heard of it yet.
    pub(super) fn ghost_ends(&mut self, number: u64) {
        let node = self.ghosts.iter().find(|ghost| ghost.number == number).map(|ghost| ghost.node.clone());
        let silent = |node| self.machines.get(node).is_some_and(|machine| machine.exists && machine.cut_off);
        if node.as_ref().is_some_and(silent) {
            return self.add(Millis::secs(3), Happening::GhostEnds(number));
        }
        self.ghosts.retain(|ghost| ghost.number != number);
    }

    pub(super) fn collect_provider(&mut self, key: &ProviderKey) {
        let over = |p: &Provider| p.deleting && p.stage == Stage::Ended && !p.is_held();
        if self.providers.get(key).is_some_and(over)
            && let Some(provider) = self.providers.remove(key)
        {
            self.provider_is_gone(key, provider.uid);
        }
    }
}
