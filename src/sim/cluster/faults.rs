//! Faults, injected at random or by a script.

use super::{
    ClusterEvent, SimulatedCluster,
    pods::{PodProcessPhase, ProviderKey},
};
use crate::{
    pairing::{
        event::{PairingEvent, ProviderPhase, TemplateStatus},
        ids::{NodeName, RequesterId},
    },
    units::Millis,
};

/// A fault, or a disruptive action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterFault {
    DeleteRequester,
    /// Without a grace period: its containers end at once.
    KillRequester,
    /// Its stub's container restarts.
    RestartStub,
    DeleteProvider,
    CrashProvider,
    RestartLauncher,
    HangLauncher,
    KillEngine,
    HangEngine,
    CordonNode,
    LoseNode,
    CutOffNode,
    BreakAccelerator,
    LoseLeader,
    BreakWatch,
    OutdateTemplate,
    /// A provider's object vanishes with its finalizer, and its processes continue.
    VanishProvider,
    /// A LauncherConfig is edited.
    EditLaunchers,
}

const ALL_FAULTS: [ClusterFault; 18] = [
    ClusterFault::DeleteRequester,
    ClusterFault::KillRequester,
    ClusterFault::RestartStub,
    ClusterFault::DeleteProvider,
    ClusterFault::CrashProvider,
    ClusterFault::RestartLauncher,
    ClusterFault::HangLauncher,
    ClusterFault::KillEngine,
    ClusterFault::HangEngine,
    ClusterFault::CordonNode,
    ClusterFault::LoseNode,
    ClusterFault::CutOffNode,
    ClusterFault::BreakAccelerator,
    ClusterFault::LoseLeader,
    ClusterFault::BreakWatch,
    ClusterFault::OutdateTemplate,
    ClusterFault::VanishProvider,
    ClusterFault::EditLaunchers,
];

impl SimulatedCluster {
    pub(super) fn random_fault(&mut self) {
        let Some(every) = self.scenario.fault_rates.mean_interval.filter(|_| !self.quiescing) else { return };
        if let Some(fault) = self.random.pick(&ALL_FAULTS).copied() {
            self.inject_fault(fault);
        }
        let after = Millis(self.random.exponential(every.0));
        self.schedule(after, ClusterEvent::RandomFault);
    }

    pub(super) fn inject_fault(&mut self, fault: ClusterFault) {
        self.record_line(|| format!("! {fault:?}"));
        match fault {
            ClusterFault::DeleteRequester => self.with_requester(|world, id| world.delete_requester(id)),
            ClusterFault::KillRequester => self.with_requester(|world, id| {
                world.count("requesters killed");
                world.stub_ends(id);
                world.delete_requester(id);
            }),
            ClusterFault::RestartStub => self.with_requester(|world, id| world.stub_starts(id)),
            ClusterFault::DeleteProvider => {
                self.with_provider(|_| true, |world, key| world.delete_provider(key))
            }
            ClusterFault::CrashProvider => self.with_provider(
                |p| p.phase != ProviderPhase::Terminated,
                |world, key| {
                    world.count("providers crashed");
                    let uid = world.providers.get(key).map(|provider| provider.uid.clone());
                    uid.into_iter().for_each(|uid| world.pod_ends(key, &uid));
                },
            ),
            ClusterFault::RestartLauncher => {
                self.with_provider(|p| p.phase == ProviderPhase::Ready, Self::restart_launcher)
            }
            ClusterFault::HangLauncher => self.with_provider(
                |p| p.phase == ProviderPhase::Ready,
                |world, key| {
                    world.providers.get_mut(key).into_iter().for_each(|provider| provider.hung = true)
                },
            ),
            ClusterFault::KillEngine => {
                self.with_process(|world, key, engine| world.process_exits(key, engine))
            }
            ClusterFault::HangEngine => self.with_process(|world, key, engine| {
                let process = world.providers.get_mut(key).and_then(|p| p.processes.get_mut(engine));
                process.into_iter().for_each(|process| process.hung = true);
            }),
            ClusterFault::CordonNode => self.with_node(|world, node| world.set_cordoned(node, true)),
            ClusterFault::LoseNode => self.with_node(Self::lose_node),
            ClusterFault::CutOffNode => self.with_node(Self::cut_off_node),
            ClusterFault::BreakAccelerator => self.break_accelerator(),
            ClusterFault::LoseLeader if self.listed => self.lose_leader(),
            ClusterFault::LoseLeader => {}
            ClusterFault::BreakWatch => self.break_watch(),
            ClusterFault::OutdateTemplate => self.outdate_template(),
            ClusterFault::VanishProvider => {
                self.with_provider(|p| p.phase != ProviderPhase::Terminated, Self::vanish_provider)
            }
            ClusterFault::EditLaunchers => self.edit_launcher_config(),
        }
    }

    fn with_requester(&mut self, f: impl FnOnce(&mut Self, &RequesterId)) {
        let ids: Vec<_> =
            self.requesters.iter().filter(|(_, r)| !r.terminated).map(|(id, _)| id.clone()).collect();
        if let Some(id) = self.random.pick(&ids).cloned() {
            f(self, &id);
        }
    }

    fn with_provider(
        &mut self,
        which: impl Fn(&super::SimulatedProvider) -> bool,
        f: impl FnOnce(&mut Self, &ProviderKey),
    ) {
        let keys: Vec<_> =
            self.providers.iter().filter(|(_, p)| which(p)).map(|(key, _)| key.clone()).collect();
        if let Some(key) = self.random.pick(&keys).cloned() {
            f(self, &key);
        }
    }

    fn with_process(
        &mut self,
        f: impl FnOnce(&mut Self, &ProviderKey, &crate::pairing::ids::PairingEngineId),
    ) {
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
        let names: Vec<_> = self.node_names().into_iter().collect();
        if let Some(name) = self.random.pick(&names).cloned() {
            f(self, &name);
        }
    }

    /// The container ends with all its processes, and the kubelet restarts it.
    fn restart_launcher(&mut self, key: &ProviderKey) {
        if !key.1.is_launcher() {
            return;
        }
        self.count("launchers restarted");
        let crashed = self.random.chance(0.5);
        let after = if crashed { (1000, 20_000) } else { (50, 2000) };
        let Some(provider) = self.providers.get_mut(key) else { return };
        provider.restarts += 1;
        // In half of the restarts the container is slow: the kubelet backs off.
        provider.phase = if crashed { ProviderPhase::Crashed } else { ProviderPhase::Running };
        provider.hung = false;
        let uid = provider.uid.clone();
        provider.last_stopped.clear();
        let engines: Vec<_> = provider.processes.keys().cloned().collect();
        let stopped: Vec<_> = provider.exited.keys().cloned().collect();
        self.emit_provider(key);
        for engine in engines {
            self.remove_process(key, &engine);
        }
        for engine in stopped {
            self.remove_exited(key, &engine);
        }
        let after = self.random_duration(after);
        self.schedule(after, ClusterEvent::PodIsReady(key.clone(), uid));
    }

    pub(super) fn set_cordoned(&mut self, node: &NodeName, cordoned: bool) {
        if let Some(machine) = self.nodes.get_mut(node) {
            machine.facts.cordoned = cordoned;
            self.emit_node(node);
            self.schedule(Millis::secs(40), ClusterEvent::HealNode(node.clone()));
        }
    }

    fn cut_off_node(&mut self, node: &NodeName) {
        self.count("nodes cut off");
        if let Some(machine) = self.nodes.get_mut(node) {
            machine.cut_off = true;
            self.schedule(Millis::secs(5), ClusterEvent::CheckKubeletSilence(node.clone()));
            let after = self.random_duration((2000, 90_000));
            self.schedule(after, ClusterEvent::HealNode(node.clone()));
        }
    }

    /// Switches the machine off and deletes its Node object. The Pods' objects are deleted later.
    pub(super) fn lose_node(&mut self, node: &NodeName) {
        let Some(machine) = self.nodes.get_mut(node).filter(|machine| machine.exists) else { return };
        machine.exists = false;
        machine.cut_off = true;
        machine.allocated.clear();
        self.vanished_processes.retain(|vanished| vanished.node != *node);
        self.count("nodes lost");
        for (key, provider) in &mut self.providers {
            if key.0 == *node {
                provider.processes.clear();
            }
        }
        self.emit_node(node);
        let after = self.random_duration((500, 20_000));
        self.schedule(after, ClusterEvent::DeleteLostPods(node.clone()));
        self.schedule(Millis::secs(60), ClusterEvent::HealNode(node.clone()));
    }

    /// Deletes the Pods of a lost node, and reports them terminated.
    pub(super) fn delete_lost_pods(&mut self, node: &NodeName) {
        let keys: Vec<_> = self.providers.keys().filter(|key| key.0 == *node).cloned().collect();
        for key in keys {
            self.delete_provider(&key);
            let Some(provider) = self.providers.get_mut(&key) else { continue };
            provider.phase = ProviderPhase::Terminated;
            provider.processes.clear();
            self.emit_provider(&key);
            self.collect_provider(&key);
        }
        let ids: Vec<_> =
            self.requesters.iter().filter(|(_, r)| r.node == *node).map(|(id, _)| id.clone()).collect();
        for id in ids {
            self.delete_requester(&id);
            self.stub_ends(&id);
        }
    }

    /// Ends all faults of the node.
    pub(super) fn heal_node(&mut self, node: &NodeName) {
        let Some(machine) = self.nodes.get_mut(node) else { return };
        if !machine.exists
            && (self.providers.keys().any(|key| key.0 == *node)
                || self.requesters.values().any(|r| r.node == *node))
        {
            // The node name returns once no Pod of the old node is left.
            return self.schedule(Millis::secs(5), ClusterEvent::HealNode(node.clone()));
        }
        machine.exists = true;
        machine.cut_off = false;
        machine.kubelet_silent = false;
        machine.facts.cordoned = false;
        machine.accelerators.values_mut().for_each(|facts| facts.healthy = true);
        self.emit_node(node);
    }

    fn break_accelerator(&mut self) {
        let all: Vec<_> = self.all_accelerators();
        let Some((node, accelerator)) = self.random.pick(&all).cloned() else { return };
        let facts = self.nodes.get_mut(&node).and_then(|machine| machine.accelerators.get_mut(&accelerator));
        facts.into_iter().for_each(|facts| facts.healthy = false);
        self.emit_node(&node);
        self.schedule(Millis::secs(50), ClusterEvent::HealNode(node));
    }

    fn outdate_template(&mut self) {
        let fingerprints: Vec<_> =
            self.scenario.owners.iter().map(|owner| owner.requested.fingerprint).collect();
        // Weighted towards `Outdated`: an obsolete template has no sleeper left that could be evicted before others.
        let outdated = [TemplateStatus::Outdated; 3];
        let statuses: Vec<_> =
            outdated.into_iter().chain([TemplateStatus::Current, TemplateStatus::Obsolete]).collect();
        let pair = (self.random.pick(&fingerprints).copied(), self.random.pick(&statuses).copied());
        if let (Some(fingerprint), Some(status)) = pair {
            self.template_statuses.insert(fingerprint, status);
            let event = PairingEvent::Template { fingerprint, status };
            self.schedule(Millis(1), ClusterEvent::DeliverWatchEvent(self.epoch, event));
        }
    }

    /// Stops further faults; the present ones end soon.
    pub(super) fn stop_faults(&mut self) {
        self.quiescing = true;
        self.record_line(|| "! calm".to_owned());
        for node in self.node_names() {
            self.heal_node(&node);
        }
        let hung = self.providers.values_mut().flat_map(|provider| {
            provider.hung = false;
            provider.processes.values_mut().filter(|process| process.hung)
        });
        // A hung process stays hung, and a process that hangs at its start never answers.
        let stuck = hung.filter(|process| process.phase == PodProcessPhase::Awake).count();
        if stuck > 0 {
            self.count("hung to the end");
        }
        let owners = 0..self.scenario.owners.len();
        owners.for_each(|owner| self.schedule(Millis(10), ClusterEvent::EnsureRequester(owner)));
        self.settle_wants();
    }
}
