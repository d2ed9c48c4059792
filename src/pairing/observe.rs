//! Taking note of what is seen.

use super::{
    Pairing,
    apply::leave,
    command::{Farewell, Why},
    event::{Epoch, Event, Record, SeenProvider, SeenRequester, Stage, Standing, Terms},
    ids::{EngineId, NodeName, ProviderId, RequesterId, Uid},
    node::{Accelerator, Engine, Kind, Node, Provider, Requester, Retry, State},
};
use crate::{
    model::AcceleratorId,
    units::{Bytes, Generation, Tick},
};

impl Pairing {
    pub(super) fn observe(&mut self, event: &Event, now: Tick) {
        match event {
            Event::Led { epoch } => *self = Self { epoch: *epoch, ..Self::new(self.settings) },
            Event::Listed => {
                self.listed = true;
                let names: Vec<_> = self.nodes.keys().cloned().collect();
                names.iter().for_each(|name| self.touch(name).doom_orphans());
            }
            Event::Deposed { epoch } => self.depose(*epoch),
            Event::Template { fingerprint, standing } => {
                // What nobody says is the same: nothing is kept of engines that are no more.
                if *standing == Standing::Current {
                    self.standings.remove(fingerprint);
                } else {
                    self.standings.insert(*fingerprint, *standing);
                }
                let has = |node: &&Node| node.engines.keys().any(|id| id.fingerprint == *fingerprint);
                let names: Vec<_> =
                    self.nodes.values().map(|n| &**n).filter(has).map(|n| n.name.clone()).collect();
                self.touched.extend(names);
            }
            Event::Build { build, terms } => {
                if *terms == Terms::default() {
                    self.builds.remove(build);
                } else {
                    self.builds.insert(*build, *terms);
                }
                let has = |node: &&Node| {
                    node.providers.values().any(|known| known.build == Some(*build))
                        || node.accelerators.values().any(|known| known.crashed == Some(*build))
                };
                let names: Vec<_> =
                    self.nodes.values().map(|n| &**n).filter(has).map(|n| n.name.clone()).collect();
                self.touched.extend(names);
            }
            Event::Node { node, facts } => {
                let known = self.touch(node);
                known.exists = true;
                known.facts = facts.clone();
            }
            Event::NodeGone { node } => self.touch(node).exists = false,
            Event::Accelerator { node, accelerator, facts } => {
                let known = self.touch(node).accelerators.entry(accelerator.clone());
                known.and_modify(|known| known.facts = facts.clone()).or_insert_with(|| Accelerator {
                    facts: facts.clone(),
                    last_sleep: None,
                    last_gone: None,
                    observed: None,
                    crashes: 0,
                    crashed: None,
                    unready: false,
                    not_before: Tick(0),
                    doubted: false,
                });
            }
            Event::Observed { node, accelerator, used, at } => self.observed(node, accelerator, *used, *at),
            Event::SeenRequester { node, requester, seen } => self.touch(node).see_requester(requester, seen),
            Event::RequesterGone { node, requester } => {
                self.touch(node).requesters.remove(requester);
            }
            Event::SeenProvider { node, provider, seen } => {
                self.touch(node).see_provider(provider, seen, now)
            }
            Event::ProviderGone { node, provider, uid } => {
                let known = self.touch(node);
                // Not one of the same name from before, nor one that has not been seen.
                if known.providers.get(provider).is_some_and(|p| p.uid.as_ref() == Some(uid)) {
                    known.provider_gone(provider, now);
                }
                known.elder_gone(provider, uid, now);
                known.ended_after_all(uid, now);
            }
            Event::ProviderVanished { node, provider, uid } => {
                let known = self.touch(node);
                if known.providers.get(provider).is_some_and(|p| p.uid.as_ref() == Some(uid)) {
                    known.provider_vanished(provider, now);
                }
                known.elder_gone(provider, uid, now);
            }
            Event::Heard { node, reports } => {
                let known = self.touch(node);
                if *reports && known.silent {
                    known.heard = now;
                }
                known.silent = !reports;
            }
            Event::Answers { node, engine, generation } => {
                if let Some(engine) = self.life(node, engine, *generation) {
                    engine.answered(now);
                }
            }
            Event::Died { node, engine, generation, gone } => {
                if self.life(node, engine, *generation).is_some() {
                    self.touch(node).died(engine, *gone, now);
                }
            }
            Event::Outcome { node, target, serial, result } => {
                self.touch(node).outcome(target, *serial, result, now);
            }
        }
    }

    /// Nothing is due any more, and what was under way has no outcome here.
    fn depose(&mut self, epoch: Epoch) {
        if epoch == self.epoch {
            self.deposed = true;
            self.due.clear();
            self.due_of.clear();
            self.touched.clear();
        }
    }

    /// The engine, if it is this life of it that is meant.
    fn life(&mut self, node: &NodeName, engine: &EngineId, generation: Generation) -> Option<&mut Engine> {
        let known = self.touch(node).engines.get_mut(engine);
        known.filter(|engine| engine.generation == generation)
    }

    fn observed(&mut self, node: &NodeName, accelerator: &AcceleratorId, used: Bytes, at: Tick) {
        let settings = self.settings;
        let settle = settings.settle;
        let known = self.touch(node);
        known.remains_measured(accelerator, used, at, &settings);
        let ending = known.engines_on(accelerator).any(|e| matches!(e.state, State::Ending { .. }));
        let Some(known) = known.accelerators.get_mut(accelerator) else { return };
        // Readings may come out of order.
        if known.observed.is_none_or(|(_, before)| before <= at) {
            known.observed = Some((used, at));
        }
        let settled = known.last_sleep.max(known.last_gone).map_or(Tick(0), |moment| moment + settle);
        if at >= settled && !ending {
            known.doubted = false;
        }
    }
}

impl Engine {
    /// Its process is there, whatever became of the order to start it.
    fn runs(&mut self) {
        let since = self.since;
        self.enter(State::Starting, since);
        self.call = None;
    }

    /// Only a start is over with that: of one that sleeps or wakes it says nothing.
    fn answered(&mut self, now: Tick) {
        let launched = self.call.as_ref().is_some_and(|call| call.kind == Kind::Launch);
        if self.state == State::Creating && (launched || self.may_start_until > now) {
            self.runs();
        }
        if self.state == State::Starting {
            self.answers = true;
        }
    }
}

impl Node {
    fn see_requester(&mut self, id: &RequesterId, seen: &SeenRequester) {
        let known = self.requesters.entry(id.clone()).or_insert_with(|| Requester {
            seen: seen.clone(),
            accelerators: Vec::new(),
            doomed: None,
            deleted: None,
            gated: None,
            released: false,
            failures: 0,
            failed: None,
            not_before: Tick(0),
            call: None,
            retry: Retry::default(),
        });
        let deleting = known.seen.deleting.or(seen.deleting);
        known.seen = SeenRequester { deleting, ..seen.clone() };
        if known.accelerators.is_empty() {
            known.accelerators.clone_from(&seen.accelerators);
            known.accelerators.sort();
        }
        self.rest_as_asked(id);
    }

    /// An engine is put away as its requester says now, which need not be what it said when it was given the engine. A requester
    /// that asks for another engine by now says nothing of this one.
    fn rest_as_asked(&mut self, id: &RequesterId) {
        let Some(requester) = self.requesters.get(id) else { return };
        let (engine, ask) = (self.wanted_by(requester), &requester.seen.ask);
        let (level, stop_after) = (ask.level, ask.stop_after);
        if let Some(own) = self.engines.get_mut(&engine).filter(|own| own.requester() == Some(id)) {
            (own.level, own.stop_after) = (level, stop_after);
        }
    }

    fn see_provider(&mut self, id: &ProviderId, seen: &SeenProvider, now: Tick) {
        if self.is_anothers(id, seen) {
            let Some(known) = self.providers.get_mut(id) else { return };
            if !known.taken {
                known.elder = Some(seen.clone());
                return;
            }
            self.give_way(id);
        }
        let other = |known: &Provider| known.uid.as_ref().is_some_and(|uid| *uid != seen.uid);
        if self.providers.get(id).is_some_and(other) {
            self.provider_vanished(id, now);
        }
        let known = self.providers.entry(id.clone()).or_insert_with(|| Provider::ordered(now));
        if known.uid.is_none() {
            known.restarts = seen.restarts;
        }
        let (anew, deleted) = (seen.restarts > known.restarts, seen.deleting && !known.deleting);
        if known.stage != seen.stage {
            known.since = now;
        }
        known.uid = Some(Uid::clone(&seen.uid));
        known.stage = seen.stage;
        known.restarts = seen.restarts;
        known.build = seen.build;
        known.host = seen.host;
        known.deleting |= seen.deleting;
        if anew {
            self.container_anew(id, now);
        }
        for record in &seen.records {
            self.adopt(id, record, now);
        }
        if deleted {
            self.deleted_by_others(id, now);
        }
        self.follow_stage(id, seen.stage, now);
    }

    /// Not the Pod that was ordered: one of its name from before, or one that another leader made. Whether it is there still is
    /// known when the order is answered.
    fn is_anothers(&self, id: &ProviderId, seen: &SeenProvider) -> bool {
        let unseen = self.providers.get(id).is_some_and(|known| known.uid.is_none());
        let own = |e: &Engine| {
            seen.records.iter().any(|record| record.engine == e.id && record.generation == e.generation)
        };
        let fresh = unseen && !id.is_launcher() && !seen.records.is_empty();
        fresh && self.engines_in(id).next().is_some() && !self.engines_in(id).any(own)
    }

    /// The name of the Pod that was ordered is taken: what has it is taken over, and the life that was to be never was. Its
    /// requester is served by what is there, if that fits, and else by another order once that is gone.
    pub(super) fn name_taken(&mut self, id: &ProviderId, now: Tick) {
        let Some(known) = self.providers.get_mut(id).filter(|known| known.uid.is_none()) else { return };
        known.taken = true;
        if let Some(elder) = known.elder.take() {
            self.see_provider(id, &elder, now);
        }
    }

    fn give_way(&mut self, id: &ProviderId) {
        self.engines.retain(|_, engine| engine.provider != *id);
    }

    /// A Pod is gone that was not the one that was ordered: its name may be free.
    fn elder_gone(&mut self, id: &ProviderId, uid: &Uid, now: Tick) {
        let Some(known) = self.providers.get_mut(id).filter(|known| known.uid.is_none()) else { return };
        if known.elder.as_ref().is_some_and(|elder| elder.uid == *uid) {
            known.elder = None;
        }
        if known.taken {
            let waits = self.engines.values_mut().filter(|engine| engine.provider == *id);
            waits.for_each(|engine| engine.retry.at = now);
        }
    }

    /// An engine of which nothing is known here: from before a restart, or from a leader before. It may be anything.
    fn adopt(&mut self, provider: &ProviderId, record: &Record, now: Tick) {
        if !self.engines.contains_key(&record.engine) {
            let engine = Engine::of(record, provider.clone(), State::Unknown, now);
            self.engines.insert(record.engine.clone(), engine);
            record.requester.iter().for_each(|requester| self.rest_as_asked(requester));
        }
    }

    /// Requesters that a leader before put our finalizer on had an engine whose container ran. Where there is none any more, their
    /// gates may be open to what is gone, and they cannot be given another engine behind these.
    fn doom_orphans(&mut self) {
        let orphans: Vec<_> = self
            .requesters
            .iter()
            .filter(|(id, requester)| requester.seen.finalizer && self.engine_of(id).is_none())
            .map(|(id, _)| id.clone())
            .collect();
        for id in orphans {
            if let Some(requester) = self.requesters.get_mut(&id) {
                requester.doomed.get_or_insert(Farewell::EngineGone);
            }
        }
    }

    fn deleted_by_others(&mut self, id: &ProviderId, now: Tick) {
        let alive: Vec<_> =
            self.engines_in(id).filter(|e| !e.state.is_over()).map(|e| e.id.clone()).collect();
        for engine in alive {
            self.doom(&engine, Farewell::ProviderDeleted);
        }
        leave(self, id, now);
    }

    /// What ran in the container is gone with it. Something may have been launched in the new one since, so that they are asked.
    fn container_anew(&mut self, id: &ProviderId, now: Tick) {
        let alive: Vec<_> =
            self.engines_in(id).filter(|e| !e.state.is_over()).map(|e| e.id.clone()).collect();
        for id in alive {
            self.lost(&id, now);
            let Some(engine) = self.engines.get_mut(&id) else { continue };
            if engine.provider.is_launcher() {
                engine.held = engine.sizes.awake;
                engine.enter(State::Unknown, now);
                engine.call = None;
            } else {
                // Nobody asked for the memory that it takes now.
                engine.held = engine.sizes.awake;
                engine.failed = Some(Why::Lost);
            }
        }
    }

    fn follow_stage(&mut self, id: &ProviderId, stage: Stage, now: Tick) {
        let engines: Vec<_> = self.engines_in(id).map(|e| e.id.clone()).collect();
        for engine_id in engines {
            if stage == Stage::Ended {
                self.lost(&engine_id, now);
                self.process_gone(&engine_id, now);
                continue;
            }
            let Some(engine) = self.engines.get_mut(&engine_id).filter(|_| !id.is_launcher()) else {
                continue;
            };
            match (engine.state, stage) {
                (State::Unknown, Stage::Pending) => engine.enter(State::Creating, now),
                (State::Creating, Stage::Running | Stage::Ready) => {
                    // With the Pod its binding is written.
                    if let Some(binding) = &mut engine.binding {
                        binding.written = true;
                    }
                    engine.runs();
                    engine.answers = stage == Stage::Ready;
                }
                (State::Starting, Stage::Ready) => engine.answered(now),
                _ => {}
            }
        }
    }

    /// The Pod is seen gone, with everything in it.
    pub(super) fn provider_gone(&mut self, id: &ProviderId, now: Tick) {
        let engines: Vec<_> = self.engines_in(id).map(|e| e.id.clone()).collect();
        for engine in engines {
            self.lost(&engine, now);
            self.process_gone(&engine, now);
            self.engines.remove(&engine);
        }
        self.providers.remove(id);
    }

    fn died(&mut self, id: &EngineId, gone: bool, now: Tick) {
        self.lost(id, now);
        let Some(engine) = self.engines.get_mut(id) else { return };
        if gone && !engine.relaunched && now >= engine.may_start_until {
            return self.process_gone(id, now);
        }
        engine.failed = Some(Why::Lost);
        if matches!(engine.state, State::Ending { .. }) {
            // Another order to start it may have been obeyed since, or be yet: it is ended again then.
            engine.ended = false;
            engine.retry.at = engine.may_start_until;
        }
    }

    /// Its memory is free.
    pub(super) fn process_gone(&mut self, id: &EngineId, now: Tick) {
        let Some(engine) = self.engines.get_mut(id).filter(|engine| engine.state != State::Gone) else {
            return;
        };
        engine.enter(State::Gone, now);
        (engine.held, engine.held_host) = (Bytes::ZERO, Bytes::ZERO);
        engine.call = None;
        for accelerator in id.accelerators.iter() {
            if let Some(known) = self.accelerators.get_mut(accelerator) {
                known.last_gone = Some(now);
            }
        }
    }

    /// The engine is lost to its requester: one that served asks for another requester, one that was starting for another start.
    pub(super) fn lost(&mut self, id: &EngineId, now: Tick) {
        let Some(engine) = self.engines.get(id) else { return };
        match engine.state {
            // A requester that was served before a restart is ready still, and its gate open: it cannot be given another engine.
            State::Unknown | State::Awake | State::Draining { .. } | State::FallingAsleep { .. } => {
                self.doom(id, Farewell::EngineGone);
            }
            State::Creating | State::Starting | State::Waking => {
                let requester = engine.requester().cloned().and_then(|r| self.requesters.get_mut(&r));
                if let Some(requester) = requester {
                    requester.start_failed(Why::Lost, now);
                }
            }
            _ => {}
        }
    }

    fn doom(&mut self, id: &EngineId, why: Farewell) {
        let requester = self.engines.get(id).and_then(|e| e.requester().cloned());
        if let Some(requester) = requester.and_then(|r| self.requesters.get_mut(&r)) {
            requester.doomed.get_or_insert(why);
        }
    }
}
