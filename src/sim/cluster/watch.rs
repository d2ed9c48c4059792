//! What the controller gets to see: what each watch shows in its order, and nothing in the order of two of them; late, and now and
//! then not at all until it lists again.

use std::collections::{BTreeMap, BTreeSet};

use super::{Cluster, Happening, pods::ProviderKey};
use crate::{
    pairing::{
        Pairing,
        event::{Epoch, Event},
        ids::{EngineId, NodeName, RequesterId, Uid},
    },
    units::{Generation, Millis, Tick},
};

#[derive(Clone, Debug, Default)]
pub(super) struct Watch {
    /// The last delivery of each watch: nothing of the same overtakes it.
    last: BTreeMap<Kind, Tick>,
    broken: bool,
    /// Nobody watches.
    unused: bool,
    requesters: BTreeSet<(NodeName, RequesterId)>,
    providers: BTreeSet<(ProviderKey, Uid)>,
    /// Of these it was told that their kubelet is silent.
    silent: BTreeSet<NodeName>,
    /// Engines of launchers whose process was there.
    engines: BTreeSet<(ProviderKey, EngineId, Generation)>,
}

impl Cluster {
    /// The controller will see this.
    fn tell(&mut self, event: Event) {
        if self.watch.broken {
            return;
        }
        let late = if self.calm { (1, 20) } else { self.plot.watch };
        let kind = kind(&event);
        // Who has heard of everything has heard of each, and before who leads nobody hears of anything.
        let barrier = kind == Kind::Leader;
        let before =
            self.watch.last.iter().filter(|(of, _)| barrier || matches!(**of, Kind::Leader) || **of == kind);
        let at = before.map(|(_, at)| *at).max().unwrap_or_default().max(self.now + self.draw(late));
        self.watch.last.insert(kind, at);
        self.agenda.add(at, Happening::Deliver(self.epoch, event));
    }

    pub(super) fn deliver(&mut self, epoch: Epoch, event: &Event) -> bool {
        if epoch != self.epoch {
            return false;
        }
        self.listed |= *event == Event::Listed;
        self.narrate(|| super::scripts::in_words(event));
        self.pairing.on(event, self.now);
        true
    }

    pub(super) fn show_requester(&mut self, id: &RequesterId) {
        let Some(requester) = self.requesters.get(id) else { return };
        let (node, mut seen) = (requester.node.clone(), requester.seen());
        seen.ask.build = seen.ask.build.map(|build| self.current(build));
        if !self.watch.broken {
            self.watch.requesters.insert((node.clone(), id.clone()));
        }
        self.tell(Event::SeenRequester { node, requester: id.clone(), seen });
    }

    pub(super) fn requester_is_gone(&mut self, node: NodeName, id: RequesterId) {
        if !self.watch.broken {
            self.watch.requesters.remove(&(node.clone(), id.clone()));
        }
        self.tell(Event::RequesterGone { node, requester: id });
    }

    /// Told in the order of the Pods: nobody asks for what nobody has heard of.
    pub(super) fn show_builds(&mut self) {
        self.builds().into_iter().for_each(|event| self.tell(event));
    }

    pub(super) fn show_provider(&mut self, key: &ProviderKey) {
        let Some(provider) = self.providers.get(key) else { return };
        let seen = provider.seen();
        if !self.watch.broken {
            self.watch.providers.insert((key.clone(), seen.uid.clone()));
        }
        self.tell(Event::SeenProvider { node: key.0.clone(), provider: key.1.clone(), seen });
    }

    pub(super) fn provider_is_gone(&mut self, key: &ProviderKey, uid: Uid) {
        if !self.watch.broken {
            self.watch.providers.remove(&(key.clone(), uid.clone()));
        }
        self.tell(Event::ProviderGone { node: key.0.clone(), provider: key.1.clone(), uid });
    }

    pub(super) fn provider_vanished(&mut self, key: &ProviderKey, uid: Uid) {
        if !self.watch.broken {
            self.watch.providers.remove(&(key.clone(), uid.clone()));
        }
        self.tell(Event::ProviderVanished { node: key.0.clone(), provider: key.1.clone(), uid });
    }

    /// Who leads has seen this Pod, and will be told that it went.
    pub(super) fn is_seen(&self, key: &ProviderKey, uid: &Uid) -> bool {
        let node = self.pairing.node(&key.0).filter(|_| !self.watch.unused);
        let known = node.and_then(|node| node.providers.get(&key.1));
        known.is_some_and(|provider| provider.uid.as_ref() == Some(uid))
    }

    /// Whether the node's kubelet reports, as its Node object says.
    pub(super) fn show_silence(&mut self, node: &NodeName) {
        if let Some(machine) = self.machines.get_mut(node) {
            machine.silent = machine.cut_off;
            let reports = !machine.silent;
            if !reports {
                self.watch.silent.insert(node.clone());
            }
            self.tell(Event::Heard { node: node.clone(), reports });
        }
    }

    pub(super) fn show_node(&mut self, name: &NodeName) {
        let Some(machine) = self.machines.get(name) else { return };
        if !machine.exists {
            return self.tell(Event::NodeGone { node: name.clone() });
        }
        let (facts, accelerators) = (machine.facts.clone(), machine.accelerators.clone());
        let silence = machine.silent || self.watch.silent.contains(name);
        self.tell(Event::Node { node: name.clone(), facts });
        if silence {
            self.show_silence(name);
        }
        for (accelerator, facts) in accelerators {
            self.tell(Event::Accelerator { node: name.clone(), accelerator, facts });
        }
    }

    /// A process in a launcher answers, or has stopped, or nothing is left of it, as the launcher's own watch says.
    pub(super) fn show_engine(
        &mut self,
        key: &ProviderKey,
        engine: &EngineId,
        generation: Generation,
        lives: Option<bool>,
    ) {
        if !key.1.is_launcher() {
            return;
        }
        let entry = (key.clone(), engine.clone(), generation);
        let (node, engine) = (key.0.clone(), engine.clone());
        if let Some(answers) = lives {
            if !self.watch.broken {
                self.watch.engines.insert(entry);
            }
            self.tell(if answers {
                Event::Answers { node, engine, generation }
            } else {
                Event::Died { node, engine, generation, gone: false }
            });
        } else {
            if !self.watch.broken {
                self.watch.engines.remove(&entry);
            }
            self.tell(Event::Died { node, engine, generation, gone: true });
        }
    }

    pub(super) fn break_watch(&mut self) {
        if !self.watch.broken {
            self.count("watches broken");
            self.watch.broken = true;
            let after = self.draw((500, 20_000));
            self.add(after, Happening::Relist);
        }
    }

    /// Everything as it is now, and what is no longer there. What happened in between nobody saw.
    pub(super) fn relist(&mut self) {
        if self.watch.unused || !std::mem::take(&mut self.watch.broken) {
            return;
        }
        self.show_everything();
        for (node, id) in self.watch.requesters.clone() {
            if !self.requesters.contains_key(&id) {
                self.requester_is_gone(node, id);
            }
        }
        for (key, uid) in self.watch.providers.clone() {
            if self.providers.get(&key).is_none_or(|provider| provider.uid != uid) {
                // Whose finalizer was taken off by ourselves had ended.
                if self.vanished.contains(&uid) {
                    self.provider_vanished(&key, uid);
                } else {
                    self.provider_is_gone(&key, uid);
                }
            }
        }
        for (key, engine, generation) in self.watch.engines.clone() {
            // Where there is no launcher any more, nobody says of its engines that they died.
            let Some(provider) = self.providers.get(&key) else { continue };
            let life = provider.processes.get(&engine).map(|process| process.generation);
            if life.or_else(|| provider.stopped.get(&engine).copied()) != Some(generation) {
                self.show_engine(&key, &engine, generation, None);
            }
        }
    }

    fn show_everything(&mut self) {
        self.show_builds();
        for name in self.set_of_nodes() {
            self.show_node(&name);
        }
        for id in self.requesters.keys().cloned().collect::<Vec<_>>() {
            self.show_requester(&id);
        }
        for key in self.providers.keys().cloned().collect::<Vec<_>>() {
            self.show_provider(&key);
            let answering = self.providers.get(&key).map(|provider| {
                let loaded =
                    provider.processes.iter().filter(|(_, p)| p.phase != super::pods::Phase::Loading);
                let loaded = loaded.map(|(engine, process)| (engine.clone(), process.generation, true));
                let stopped = provider.stopped.iter().map(|(engine, life)| (engine.clone(), *life, false));
                loaded.chain(stopped).collect::<Vec<_>>()
            });
            for (engine, generation, answers) in answering.unwrap_or_default() {
                self.show_engine(&key, &engine, generation, Some(answers));
            }
        }
    }

    /// The controller is gone; after a while another one leads.
    pub(super) fn lose_leader(&mut self) {
        self.count("leaders lost");
        self.listed = false;
        let before = std::mem::replace(&mut self.pairing, Pairing::new(self.plot.settings));
        self.paused = self.random.chance(0.5).then_some((self.epoch, before));
        self.epoch = Epoch(self.epoch.0 + 1);
        self.flush_writes();
        let goes_on = self.draw((10, 30_000));
        self.add(goes_on, Happening::Continue);
        self.reasons.clear();
        let last = std::mem::take(&mut self.watch.last);
        self.watch = Watch { broken: true, unused: true, last, ..Watch::default() };
        let gap = self.draw((10, 20_000));
        self.add(gap, Happening::Lead);
    }

    /// It does what it would have done then, beside the one that leads now. Writes that nobody can refuse it does not begin: its claim
    /// is too old. Stubs and launchers that have heard of the younger leader refuse it, and it freezes at the first that does.
    pub(super) fn continue_paused(&mut self) {
        let Some((epoch, mut pairing)) = self.paused.take() else { return };
        self.count("leaders continued");
        let plan = pairing.plan(self.now);
        pairing.issued(&plan, self.now);
        self.narrate(|| format!("! leader {} goes on", epoch.0));
        for command in plan.commands {
            self.narrate(|| format!("  {} (leader {}): {}", command.node, epoch.0, command.order));
            self.leave_late(command);
        }
        pairing.on(&Event::Deposed { epoch }, self.now);
        let later = self.now + Millis::secs(3600);
        if pairing.next_deadline().is_some() || !pairing.plan_everywhere(later).commands.is_empty() {
            self.violation(format!("leader {} is deposed and goes on", epoch.0));
        }
    }

    pub(super) fn lead(&mut self) {
        self.watch = Watch { last: std::mem::take(&mut self.watch.last), ..Watch::default() };
        self.books.forgive(self.now);
        self.tell(Event::Led { epoch: self.epoch });
        for (fingerprint, standing) in self.standings.clone() {
            self.tell(Event::Template { fingerprint, standing });
        }
        self.show_everything();
        self.tell(Event::Listed);
    }

    pub(super) fn read_meters(&mut self) {
        let lag = self.plot.meter_lag;
        for (node, accelerator) in self.all_accelerators() {
            let used = self.holds(&node, &accelerator);
            if self.is_cut_off(&node) || self.watch.broken {
                continue;
            }
            let after = self.draw(lag);
            let event = Event::Observed { node, accelerator, used, at: self.now };
            self.add(after, Happening::Deliver(self.epoch, event));
        }
        // While nothing happens there is little to read.
        self.add(Millis::secs(if self.calm { 60 } else { 10 }), Happening::Meter);
    }
}

/// Each of these is watched by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Not watched: who leads begins, and has listed everything.
    Leader,
    Pods,
    Nodes,
    /// What launchers say of their engines.
    Launchers,
    Templates,
}

const fn kind(event: &Event) -> Kind {
    match event {
        Event::Node { .. } | Event::NodeGone { .. } | Event::Accelerator { .. } | Event::Heard { .. } => {
            Kind::Nodes
        }
        Event::Answers { .. } | Event::Died { .. } => Kind::Launchers,
        Event::Template { .. } => Kind::Templates,
        Event::Led { .. } | Event::Listed => Kind::Leader,
        _ => Kind::Pods,
    }
}
