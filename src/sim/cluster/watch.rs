//! The controller's watches. Each delivers its own events in order, but two watches are not ordered with each other.
//! Deliveries lag, and stop now and then until the next list.

use std::collections::{BTreeMap, BTreeSet};

use super::{ClusterEvent, SimulatedCluster, pods::ProviderKey};
use crate::{
    pairing::{
        Pairing,
        event::{LeaderEpoch, PairingEvent},
        ids::{NodeName, PairingEngineId, RequesterId, Uid},
    },
    units::{Generation, Millis, Tick},
};

#[derive(Clone, Debug, Default)]
pub(super) struct SimulatedWatch {
    /// The last delivery of each watch: no event of the same watch overtakes it.
    last_delivery: BTreeMap<WatchKind, Tick>,
    broken: bool,
    /// No leader watches.
    has_no_leader: bool,
    requesters: BTreeSet<(NodeName, RequesterId)>,
    providers: BTreeSet<(ProviderKey, Uid)>,
    /// Nodes whose kubelet was reported silent.
    reported_silent: BTreeSet<NodeName>,
    /// Engines of launchers whose process existed.
    engines: BTreeSet<(ProviderKey, PairingEngineId, Generation)>,
}

impl SimulatedCluster {
    /// Schedules the delivery of an event to the controller.
    pub(super) fn emit(&mut self, event: PairingEvent) {
        let kind = watch_kind(&event);
        // The gateway's wants come by no watch. Without a leader nothing receives them.
        if self.watch.broken && (kind != WatchKind::Wants || self.watch.has_no_leader) {
            return;
        }
        let delay = if self.quiescing { (1, 20) } else { self.scenario.watch_delay };
        // A leader event follows all earlier deliveries, and every event follows the last leader event.
        let barrier = kind == WatchKind::Leader;
        let before = self
            .watch
            .last_delivery
            .iter()
            .filter(|(of, _)| barrier || matches!(**of, WatchKind::Leader) || **of == kind);
        let at =
            before.map(|(_, at)| *at).max().unwrap_or_default().max(self.now + self.random_duration(delay));
        self.watch.last_delivery.insert(kind, at);
        self.event_queue.schedule(at, ClusterEvent::DeliverWatchEvent(self.epoch, event));
    }

    pub(super) fn deliver(&mut self, epoch: LeaderEpoch, event: &PairingEvent) -> bool {
        if epoch != self.epoch {
            return false;
        }
        self.listed |= *event == PairingEvent::Listed;
        self.record_line(|| super::actions::describe_event(event));
        self.audit.record_want(event);
        self.pairing.on(event, self.now);
        self.pass_on_want(event);
        true
    }

    pub(super) fn emit_requester(&mut self, id: &RequesterId) {
        let Some(requester) = self.requesters.get(id) else { return };
        let (node, mut observed) = (requester.node.clone(), requester.observed());
        observed.requested.build = observed.requested.build.map(|build| self.current_build(build));
        if !self.watch.broken {
            self.watch.requesters.insert((node.clone(), id.clone()));
        }
        self.emit(PairingEvent::RequesterObserved { node, requester: id.clone(), observed });
    }

    pub(super) fn emit_requester_gone(&mut self, node: NodeName, id: RequesterId) {
        if !self.watch.broken {
            self.watch.requesters.remove(&(node.clone(), id.clone()));
        }
        self.emit(PairingEvent::RequesterGone { node, requester: id });
    }

    /// Emits the builds through the Pods' watch, so that no requester is observed before its build.
    pub(super) fn emit_builds(&mut self) {
        self.build_events().into_iter().for_each(|event| self.emit(event));
    }

    pub(super) fn emit_provider(&mut self, key: &ProviderKey) {
        let Some(provider) = self.providers.get(key) else { return };
        let observed = provider.observed();
        if !self.watch.broken {
            self.watch.providers.insert((key.clone(), observed.uid.clone()));
        }
        self.emit(PairingEvent::ProviderObserved { node: key.0.clone(), provider: key.1.clone(), observed });
    }

    pub(super) fn emit_provider_gone(&mut self, key: &ProviderKey, uid: Uid) {
        if !self.watch.broken {
            self.watch.providers.remove(&(key.clone(), uid.clone()));
        }
        self.emit(PairingEvent::ProviderGone { node: key.0.clone(), provider: key.1.clone(), uid });
    }

    pub(super) fn emit_provider_vanished(&mut self, key: &ProviderKey, uid: Uid) {
        if !self.watch.broken {
            self.watch.providers.remove(&(key.clone(), uid.clone()));
        }
        self.emit(PairingEvent::ProviderVanished { node: key.0.clone(), provider: key.1.clone(), uid });
    }

    /// Whether the present leader has observed this Pod, and so will learn that it vanished.
    pub(super) fn is_observed(&self, key: &ProviderKey, uid: &Uid) -> bool {
        let node = self.pairing.node(&key.0).filter(|_| !self.watch.has_no_leader);
        let provider = node.and_then(|node| node.providers.get(&key.1));
        provider.is_some_and(|provider| provider.uid.as_ref() == Some(uid))
    }

    /// Updates the Node object, and emits whether its kubelet reports.
    pub(super) fn emit_kubelet_silence(&mut self, node: &NodeName) {
        if let Some(machine) = self.nodes.get_mut(node) {
            machine.kubelet_silent = machine.cut_off;
            let reports = !machine.kubelet_silent;
            if !reports {
                self.watch.reported_silent.insert(node.clone());
            }
            self.emit(PairingEvent::KubeletReporting { node: node.clone(), reports });
        }
    }

    pub(super) fn emit_node(&mut self, name: &NodeName) {
        let Some(machine) = self.nodes.get(name) else { return };
        if !machine.exists {
            return self.emit(PairingEvent::NodeGone { node: name.clone() });
        }
        let (facts, accelerators) = (machine.facts.clone(), machine.accelerators.clone());
        let silence = machine.kubelet_silent || self.watch.reported_silent.contains(name);
        self.emit(PairingEvent::Node { node: name.clone(), facts });
        if silence {
            self.emit_kubelet_silence(name);
        }
        for (accelerator, facts) in accelerators {
            self.emit(PairingEvent::Accelerator { node: name.clone(), accelerator, facts });
        }
    }

    /// Emits what the launcher's own watch reports of an engine: it answers, has stopped, or is gone.
    pub(super) fn emit_engine(
        &mut self,
        key: &ProviderKey,
        engine: &PairingEngineId,
        generation: Generation,
        answers: Option<bool>,
    ) {
        if !key.1.is_launcher() {
            return;
        }
        let entry = (key.clone(), engine.clone(), generation);
        let (node, engine) = (key.0.clone(), engine.clone());
        if let Some(answers) = answers {
            if !self.watch.broken {
                self.watch.engines.insert(entry);
            }
            self.emit(if answers {
                PairingEvent::EngineReady { node, engine, generation }
            } else {
                PairingEvent::EngineDied { node, engine, generation, gone: false }
            });
        } else {
            if !self.watch.broken {
                self.watch.engines.remove(&entry);
            }
            self.emit(PairingEvent::EngineDied { node, engine, generation, gone: true });
        }
    }

    pub(super) fn break_watch(&mut self) {
        if !self.watch.broken {
            self.count("watches broken");
            self.watch.broken = true;
            let after = self.random_duration((500, 20_000));
            self.schedule(after, ClusterEvent::Relist);
        }
    }

    /// Emits everything as it is now, and what no longer exists. Events in between are lost.
    pub(super) fn relist(&mut self) {
        if self.watch.has_no_leader || !std::mem::take(&mut self.watch.broken) {
            return;
        }
        self.emit_all();
        for (node, id) in self.watch.requesters.clone() {
            if !self.requesters.contains_key(&id) {
                self.emit_requester_gone(node, id);
            }
        }
        for (key, uid) in self.watch.providers.clone() {
            if self.providers.get(&key).is_none_or(|provider| provider.uid != uid) {
                // A Pod that did not vanish had ended before the controller removed its finalizer.
                if self.vanished_pods.contains(&uid) {
                    self.emit_provider_vanished(&key, uid);
                } else {
                    self.emit_provider_gone(&key, uid);
                }
            }
        }
        for (key, engine, generation) in self.watch.engines.clone() {
            // If the launcher no longer exists, no watch reports the end of its engines.
            let Some(provider) = self.providers.get(&key) else { continue };
            let running_generation = provider.processes.get(&engine).map(|process| process.generation);
            if running_generation.or_else(|| provider.exited.get(&engine).copied()) != Some(generation) {
                self.emit_engine(&key, &engine, generation, None);
            }
        }
    }

    fn emit_all(&mut self) {
        self.emit_builds();
        for name in self.node_names() {
            self.emit_node(&name);
        }
        for id in self.requesters.keys().cloned().collect::<Vec<_>>() {
            self.emit_requester(&id);
        }
        for key in self.providers.keys().cloned().collect::<Vec<_>>() {
            self.emit_provider(&key);
            let answering = self.providers.get(&key).map(|provider| {
                let loaded = provider
                    .processes
                    .iter()
                    .filter(|(_, p)| p.phase != super::pods::PodProcessPhase::Loading);
                let loaded = loaded.map(|(engine, process)| (engine.clone(), process.generation, true));
                let stopped =
                    provider.exited.iter().map(|(engine, generation)| (engine.clone(), *generation, false));
                loaded.chain(stopped).collect::<Vec<_>>()
            });
            for (engine, generation, answers) in answering.unwrap_or_default() {
                self.emit_engine(&key, &engine, generation, Some(answers));
            }
        }
    }

    /// The leader fails; another one starts after a while.
    pub(super) fn lose_leader(&mut self) {
        self.count("leaders lost");
        self.listed = false;
        let before = std::mem::replace(&mut self.pairing, Pairing::new(self.scenario.settings));
        self.paused_leader = self.random.chance(0.5).then_some((self.epoch, before));
        self.epoch = LeaderEpoch(self.epoch.0 + 1);
        self.flush_writes();
        let goes_on = self.random_duration((10, 30_000));
        self.schedule(goes_on, ClusterEvent::PausedLeaderResumes);
        self.reasons.clear();
        let last = std::mem::take(&mut self.watch.last_delivery);
        self.watch = SimulatedWatch {
            broken: true,
            has_no_leader: true,
            last_delivery: last,
            ..SimulatedWatch::default()
        };
        let gap = self.random_duration((10, 20_000));
        self.schedule(gap, ClusterEvent::LeaderStarts);
    }

    /// Executes what the paused leader would have done, beside the present leader. The paused leader starts no write
    /// that cannot be refused: its claim is too old. Stubs and launchers that know the newer leader refuse it, and it
    /// stops at the first refusal.
    pub(super) fn resume_paused_leader(&mut self) {
        let Some((epoch, mut pairing)) = self.paused_leader.take() else { return };
        self.count("leaders continued");
        let plan = pairing.plan(self.now);
        pairing.issued(&plan, self.now);
        self.record_line(|| format!("! leader {} goes on", epoch.0));
        for command in plan.commands {
            self.record_line(|| format!("  {} (leader {}): {}", command.node, epoch.0, command.action));
            self.send_from_old_leader(command);
        }
        pairing.on(&PairingEvent::Superseded { epoch }, self.now);
        let later = self.now + Millis::secs(3600);
        if pairing.next_deadline().is_some() || !pairing.plan_everywhere(later).commands.is_empty() {
            self.record_violation(format!("leader {} is superseded but continues", epoch.0));
        }
    }

    pub(super) fn leader_starts(&mut self) {
        self.watch = SimulatedWatch {
            last_delivery: std::mem::take(&mut self.watch.last_delivery),
            ..SimulatedWatch::default()
        };
        self.audit.reset_for_leader(self.now);
        self.emit(PairingEvent::LeadershipGained { epoch: self.epoch });
        for (fingerprint, status) in self.template_statuses.clone() {
            self.emit(PairingEvent::Template { fingerprint, status });
        }
        self.emit_all();
        self.emit(PairingEvent::Listed);
        self.repeat_wants();
    }

    pub(super) fn read_meters(&mut self) {
        let lag = self.scenario.meter_lag;
        for (node, accelerator) in self.all_accelerators() {
            let used = self.memory_in_use(&node, &accelerator);
            if self.is_cut_off(&node) || self.watch.broken {
                continue;
            }
            let after = self.random_duration(lag);
            let event = PairingEvent::MeterRead { node, accelerator, used, at: self.now };
            self.schedule(after, ClusterEvent::DeliverWatchEvent(self.epoch, event));
        }
        // An idle cluster needs few readings.
        self.schedule(Millis::secs(if self.quiescing { 60 } else { 10 }), ClusterEvent::ReadMeters);
    }
}

/// Kinds of events that share one watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum WatchKind {
    /// Not a watch: the leader starts, or has listed everything.
    Leader,
    Pods,
    Nodes,
    /// Reports of launchers about their engines.
    Launchers,
    Templates,
    /// Not a watch: the gateway's wants, which no relist repeats.
    Wants,
}

const fn watch_kind(event: &PairingEvent) -> WatchKind {
    match event {
        PairingEvent::Node { .. }
        | PairingEvent::NodeGone { .. }
        | PairingEvent::Accelerator { .. }
        | PairingEvent::KubeletReporting { .. } => WatchKind::Nodes,
        PairingEvent::EngineReady { .. } | PairingEvent::EngineDied { .. } => WatchKind::Launchers,
        PairingEvent::Template { .. } => WatchKind::Templates,
        PairingEvent::Want { .. } | PairingEvent::WantWithdrawn { .. } => WatchKind::Wants,
        PairingEvent::LeadershipGained { .. } | PairingEvent::Listed => WatchKind::Leader,
        _ => WatchKind::Pods,
    }
}
