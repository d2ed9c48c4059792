//! What goes wrong, by chance or by a script.

use super::{
    Cluster, Happening,
    pods::{Phase, ProviderKey},
};
use crate::{
    pairing::{
        event::{Event, Stage, Standing},
        ids::{NodeName, RequesterId},
    },
    units::Millis,
};

/// Something that goes wrong, or that somebody does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    DeleteRequester,
    /// Without grace: its containers end at once.
    KillRequester,
    /// Its stub's container is started anew.
    RestartStub,
    DeleteProvider,
    CrashProvider,
    RestartLauncher,
    HangLauncher,
    KillEngine,
    HangEngine,
    Cordon,
    LoseNode,
    CutOff,
    BreakAccelerator,
    LoseLeader,
    BreakWatch,
    Outdate,
    /// A provider's object goes, with its finalizer, and what runs in it goes on.
    Vanish,
    /// A LauncherConfig is edited.
    EditLaunchers,
}

const ALL: [Trouble; 18] = [
    Trouble::DeleteRequester,
    Trouble::KillRequester,
    Trouble::RestartStub,
    Trouble::DeleteProvider,
    Trouble::CrashProvider,
    Trouble::RestartLauncher,
    Trouble::HangLauncher,
    Trouble::KillEngine,
    Trouble::HangEngine,
    Trouble::Cordon,
    Trouble::LoseNode,
    Trouble::CutOff,
    Trouble::BreakAccelerator,
    Trouble::LoseLeader,
    Trouble::BreakWatch,
    Trouble::Outdate,
    Trouble::Vanish,
    Trouble::EditLaunchers,
];

impl Cluster {
    pub(super) fn trouble_by_chance(&mut self) {
        let Some(every) = self.plot.troubles.every.filter(|_| !self.calm) else { return };
        if let Some(trouble) = self.random.pick(&ALL).copied() {
            self.trouble(trouble);
        }
        let after = Millis(self.random.exponential(every.0));
        self.add(after, Happening::Trouble);
    }

    pub(super) fn trouble(&mut self, trouble: Trouble) {
        self.narrate(|| format!("! {trouble:?}"));
        match trouble {
            Trouble::DeleteRequester => self.with_requester(|world, id| world.delete_requester(id)),
            Trouble::KillRequester => self.with_requester(|world, id| {
                world.count("requesters killed");
                world.stub_ends(id);
                world.delete_requester(id);
            }),
            Trouble::RestartStub => self.with_requester(|world, id| world.stub_starts(id)),
            Trouble::DeleteProvider => self.with_provider(|_| true, |world, key| world.delete_provider(key)),
            Trouble::CrashProvider => self.with_provider(
                |p| p.stage != Stage::Ended,
                |world, key| {
                    world.count("providers crashed");
                    let uid = world.providers.get(key).map(|provider| provider.uid.clone());
                    uid.into_iter().for_each(|uid| world.pod_ends(key, &uid));
                },
            ),
            Trouble::RestartLauncher => {
                self.with_provider(|p| p.stage == Stage::Ready, Self::restart_launcher)
            }
            Trouble::HangLauncher => self.with_provider(
                |p| p.stage == Stage::Ready,
                |world, key| {
                    world.providers.get_mut(key).into_iter().for_each(|provider| provider.hung = true)
                },
            ),
            Trouble::KillEngine => self.with_process(|world, key, engine| world.process_stops(key, engine)),
            Trouble::HangEngine => self.with_process(|world, key, engine| {
                let process = world.providers.get_mut(key).and_then(|p| p.processes.get_mut(engine));
                process.into_iter().for_each(|process| process.hung = true);
            }),
            Trouble::Cordon => self.with_node(|world, node| world.cordon(node, true)),
            Trouble::LoseNode => self.with_node(Self::lose_node),
            Trouble::CutOff => self.with_node(Self::cut_off),
            Trouble::BreakAccelerator => self.break_accelerator(),
            Trouble::LoseLeader if self.listed => self.lose_leader(),
            Trouble::LoseLeader => {}
            Trouble::BreakWatch => self.break_watch(),
            Trouble::Outdate => self.outdate(),
            Trouble::Vanish => self.with_provider(|p| p.stage != Stage::Ended, Self::vanish),
            Trouble::EditLaunchers => self.edit_launchers(),
        }
    }

    fn with_requester(&mut self, f: impl FnOnce(&mut Self, &RequesterId)) {
        let ids: Vec<_> =
            self.requesters.iter().filter(|(_, r)| !r.ended).map(|(id, _)| id.clone()).collect();
        if let Some(id) = self.random.pick(&ids).cloned() {
            f(self, &id);
        }
    }

    fn with_provider(
        &mut self,
        which: impl Fn(&super::Provider) -> bool,
        f: impl FnOnce(&mut Self, &ProviderKey),
    ) {
        let keys: Vec<_> =
            self.providers.iter().filter(|(_, p)| which(p)).map(|(key, _)| key.clone()).collect();
        if let Some(key) = self.random.pick(&keys).cloned() {
            f(self, &key);
        }
    }

    fn with_process(&mut self, f: impl FnOnce(&mut Self, &ProviderKey, &crate::pairing::ids::EngineId)) {
        let all = self
            .providers
            .iter()
            .flat_map(|(key, p)| p.processes.keys().map(move |e| (key.clone(), e.clone())));
        let all: Vec<_> = all.collect();
        if let Some((key, engine)) = self.random.pick(&all).cloned() {
            f(self, &key, &engine);
        }
    }

    fn with_node(&mut self, f: impl FnOnce(&mut Self, &NodeName)) {
        let names: Vec<_> = self.set_of_nodes().into_iter().collect();
        if let Some(name) = self.random.pick(&names).cloned() {
            f(self, &name);
        }
    }

    /// The container ends with everything in it, and the kubelet starts it again.
    fn restart_launcher(&mut self, key: &ProviderKey) {
        if !key.1.is_launcher() {
            return;
        }
        self.count("launchers restarted");
        let trouble = self.random.chance(0.5);
        let after = if trouble { (1000, 20_000) } else { (50, 2000) };
        let Some(provider) = self.providers.get_mut(key) else { return };
        provider.restarts += 1;
        // Now and then it is not started at once: the kubelet waits, too.
        provider.stage = if trouble { Stage::Trouble } else { Stage::Running };
        provider.hung = false;
        let uid = provider.uid.clone();
        provider.ended.clear();
        let engines: Vec<_> = provider.processes.keys().cloned().collect();
        let stopped: Vec<_> = provider.stopped.keys().cloned().collect();
        self.show_provider(key);
        for engine in engines {
            self.process_dies(key, &engine);
        }
        for engine in stopped {
            self.put_away(key, &engine);
        }
        let after = self.draw(after);
        self.add(after, Happening::PodIsReady(key.clone(), uid));
    }

    pub(super) fn cordon(&mut self, node: &NodeName, cordoned: bool) {
        if let Some(machine) = self.machines.get_mut(node) {
            machine.facts.cordoned = cordoned;
            self.show_node(node);
            self.add(Millis::secs(40), Happening::Heal(node.clone()));
        }
    }

    fn cut_off(&mut self, node: &NodeName) {
        self.count("nodes cut off");
        if let Some(machine) = self.machines.get_mut(node) {
            machine.cut_off = true;
            self.add(Millis::secs(5), Happening::Silent(node.clone()));
            let after = self.draw((2000, 90_000));
            self.add(after, Happening::Heal(node.clone()));
        }
    }

    /// The machine is switched off and its Node object deleted; the Pods' objects go later.
    pub(super) fn lose_node(&mut self, node: &NodeName) {
        let Some(machine) = self.machines.get_mut(node).filter(|machine| machine.exists) else { return };
        machine.exists = false;
        machine.cut_off = true;
        machine.given.clear();
        self.ghosts.retain(|ghost| ghost.node != *node);
        self.count("nodes lost");
        for (key, provider) in &mut self.providers {
            if key.0 == *node {
                provider.processes.clear();
            }
        }
        self.show_node(node);
        let after = self.draw((500, 20_000));
        self.add(after, Happening::Sweep(node.clone()));
        self.add(Millis::secs(60), Happening::Heal(node.clone()));
    }

    /// What was on a lost node is seen ended and is deleted.
    pub(super) fn sweep(&mut self, node: &NodeName) {
        let keys: Vec<_> = self.providers.keys().filter(|key| key.0 == *node).cloned().collect();
        for key in keys {
            self.delete_provider(&key);
            let Some(provider) = self.providers.get_mut(&key) else { continue };
            provider.stage = Stage::Ended;
            provider.processes.clear();
            self.show_provider(&key);
            self.collect_provider(&key);
        }
        let ids: Vec<_> =
            self.requesters.iter().filter(|(_, r)| r.node == *node).map(|(id, _)| id.clone()).collect();
        for id in ids {
            self.delete_requester(&id);
            self.stub_ends(&id);
        }
    }

    /// Whatever was wrong with the node is over.
    pub(super) fn heal(&mut self, node: &NodeName) {
        let Some(machine) = self.machines.get_mut(node) else { return };
        if !machine.exists
            && (self.providers.keys().any(|key| key.0 == *node)
                || self.requesters.values().any(|r| r.node == *node))
        {
            // The name comes back once nothing of before is left.
            return self.add(Millis::secs(5), Happening::Heal(node.clone()));
        }
        machine.exists = true;
        machine.cut_off = false;
        machine.silent = false;
        machine.facts.cordoned = false;
        machine.accelerators.values_mut().for_each(|facts| facts.healthy = true);
        self.show_node(node);
    }

    fn break_accelerator(&mut self) {
        let all: Vec<_> = self.all_accelerators();
        let Some((node, accelerator)) = self.random.pick(&all).cloned() else { return };
        let facts =
            self.machines.get_mut(&node).and_then(|machine| machine.accelerators.get_mut(&accelerator));
        facts.into_iter().for_each(|facts| facts.healthy = false);
        self.show_node(&node);
        self.add(Millis::secs(50), Happening::Heal(node));
    }

    fn outdate(&mut self) {
        let fingerprints: Vec<_> = self.plot.owners.iter().map(|owner| owner.ask.fingerprint).collect();
        // Of an obsolete one no sleeper is left that could go before others.
        let outdated = [Standing::Outdated; 3];
        let standings: Vec<_> = outdated.into_iter().chain([Standing::Current, Standing::Obsolete]).collect();
        let pair = (self.random.pick(&fingerprints).copied(), self.random.pick(&standings).copied());
        if let (Some(fingerprint), Some(standing)) = pair {
            self.standings.insert(fingerprint, standing);
            let event = Event::Template { fingerprint, standing };
            self.add(Millis(1), Happening::Deliver(self.epoch, event));
        }
    }

    /// No troubles from here on, and those there are are over soon.
    pub(super) fn calm_down(&mut self) {
        self.calm = true;
        self.narrate(|| "! calm".to_owned());
        for node in self.set_of_nodes() {
            self.heal(&node);
        }
        let hung = self.providers.values_mut().flat_map(|provider| {
            provider.hung = false;
            provider.processes.values_mut().filter(|process| process.hung)
        });
        // A process that hangs stays so; one that hangs at its start never answers.
        let stuck = hung.filter(|process| process.phase == Phase::Awake).count();
        if stuck > 0 {
            self.count("hung to the end");
        }
        let owners = 0..self.plot.owners.len();
        owners.for_each(|owner| self.add(Millis(10), Happening::Own(owner)));
    }
}
