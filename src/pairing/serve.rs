//! What is to be done about requesters: asked, let go, deleted; and who gets an engine next.

use std::collections::BTreeSet;

use super::{
    command::{Dismissal, Farewell, OfProvider, OfRequester, Step, Why},
    decide::Draft,
    event::{Record, Stage},
    ids::{Build, EngineId, Mode, ProviderId, RequesterId},
    node::{Accelerator, Engine, Requester, State},
    room::{Newcomer, Room},
};
use crate::{
    model::{AcceleratorId, LevelPolicy},
    units::Tick,
};

impl Draft<'_> {
    pub(super) fn requesters(&mut self) {
        let ids: Vec<RequesterId> = self.node.requesters.keys().cloned().collect();
        for id in ids {
            let step = self.node.requesters.get(&id).and_then(|requester| self.errand(&id, requester));
            if let Some(step) = step {
                self.of_requester(&id, step);
            }
        }
    }

    fn errand(&self, id: &RequesterId, requester: &Requester) -> Option<OfRequester> {
        let busy = requester.call.as_ref().is_some_and(|call| call.until > self.now());
        if busy || requester.retry.at > self.now() {
            return None;
        }
        let going = requester.seen.deleting.is_some() || requester.seen.ended;
        if let Some(why) = requester.deleted.or_else(|| self.farewell(id, requester)).filter(|_| !going) {
            return Some(OfRequester::Delete { why });
        }
        let wanted = self.is_held(id);
        if requester.seen.finalizer != wanted && (!wanted || requester.seen.deleting.is_none()) {
            return Some(OfRequester::Finalize { wanted });
        }
        if requester.seen.deleting.is_some() && !wanted && requester.speaks() && !requester.released {
            return Some(OfRequester::Release);
        }
        if !requester.speaks() || !requester.stays() {
            return None;
        }
        let has_none = self.node.engine_of(id).is_none();
        if requester.accelerators.is_empty() {
            return Some(OfRequester::Accelerators { gate: has_none });
        }
        (has_none && !requester.is_gated()).then_some(OfRequester::Gate)
    }

    /// Why it must go, so that another one comes elsewhere or anew.
    fn farewell(&self, id: &RequesterId, requester: &Requester) -> Option<Farewell> {
        let faulty =
            |a: &AcceleratorId| self.node.accelerators.get(a).is_some_and(|known| !known.facts.healthy);
        match requester.doomed {
            Some(why) => Some(why),
            None if !self.node.exists => Some(Farewell::NodeGone),
            None if requester.accelerators.iter().any(faulty) => Some(Farewell::AcceleratorFaulty),
            None if self.node.facts.cordoned && self.node.engine_of(id).is_none() => Some(Farewell::Cordoned),
            None => None,
        }
    }

    /// Our finalizer is wanted: an engine is bound to it whose container runs. Not longer than a requester may be held, and not
    /// on a node that is gone. What a sleeper needs is written first: its wake waits for that, and the finalizer is written meanwhile.
    fn is_held(&self, id: &RequesterId) -> bool {
        let unwritten = |engine: &Engine| engine.binding.as_ref().is_some_and(|binding| !binding.written);
        self.node.exists
            && self.node.engine_of(id).is_some_and(|engine| {
                let sleeps = matches!(engine.state, State::Asleep { .. }) && unwritten(engine);
                !sleeps && engine.state != State::Gone && self.is_in_use(engine) && !self.is_overdue(engine)
            })
    }

    /// Who has no engine gets one, in the order in which they came. Who waits for accelerators keeps later ones from them.
    pub(super) fn serve(&mut self) {
        let mut line: Vec<_> =
            self.node.requesters.iter().filter(|(_, requester)| requester.stays()).collect();
        line.sort_by_key(|(id, requester)| (requester.seen.created, (*id).clone()));
        let line: Vec<RequesterId> = line.into_iter().map(|(id, _)| id.clone()).collect();
        let mut taken: BTreeSet<AcceleratorId> = BTreeSet::new();
        for id in line {
            let Some(requester) = self.node.requesters.get(&id).cloned() else { continue };
            let reason = if let Some(engine) = self.node.engine_of(&id) {
                (engine.state != State::Awake).then(|| format!("its engine is {}", engine.state))
            } else if requester.accelerators.is_empty() {
                Some("its stub has not said which accelerators it has".to_owned())
            } else if !self.node.exists || self.node.facts.cordoned {
                Some("its node takes nothing new".to_owned())
            } else if requester.not_before > self.now() {
                let last = requester.failed.map(|why| format!(", the last: {why}")).unwrap_or_default();
                let starts = match requester.failures {
                    1 => "1 start".to_owned(),
                    n => format!("{n} starts"),
                };
                Some(format!("{starts} failed{last}; the next is tried at {}", requester.not_before))
            } else if let Some(a) = requester.accelerators.iter().find(|a| taken.contains(*a)) {
                Some(format!("somebody who came before waits for {a}"))
            } else {
                let reason = self.provide(&id, &requester);
                if reason.is_some() {
                    taken.extend(requester.accelerators.iter().cloned());
                }
                reason
            };
            if let Some(reason) = reason {
                self.reasons.insert(id, reason);
            }
        }
    }

    /// Wakes or launches the engine that it asks for, or says why not yet.
    fn provide(&mut self, id: &RequesterId, requester: &Requester) -> Option<String> {
        let engine = self.node.wanted_by(requester);
        let own = self.node.engines.get(&engine).map(|sleeper| sleeper.provider.clone());
        let starts = own.is_none();
        let provider = own.unwrap_or_else(|| self.node.provider_for(&engine));
        if let Some(reason) = self.is_another_build(&provider, requester.seen.ask.build) {
            return Some(reason);
        }
        if let Some(sleeper) = self.node.engines.get(&engine) {
            if !sleeper.is_free() {
                let why = if let State::Ending { why, .. } = sleeper.state { Some(why) } else { None };
                let why = why.map(|why| format!(": {why}")).unwrap_or_default();
                return Some(format!("the engine that it asks for is {}{why}", sleeper.state));
            }
            if requester.seen.ask.level == LevelPolicy::OnlyOne && sleeper.is_at_level_2() {
                let why = Why::Adapters;
                self.step(&engine, Step::End { why });
                return Some(format!("the engine that it asks for is being ended: {why}"));
            }
        } else if let Some(reason) = self.provider_is_missing(&provider, id) {
            return Some(reason);
        }
        if !requester.speaks() {
            return Some("its stub does not run".to_owned());
        }
        let ask = &requester.seen.ask;
        let sizes = self.node.engines.get(&engine).map_or(ask.sizes, |sleeper| sleeper.sizes);
        let new = Newcomer { engine: &engine, sizes };
        let rooms = self.rooms();
        match if starts { rooms.for_start(&new, &provider) } else { rooms.for_newcomer(&new) } {
            Room::There if !requester.is_gated() => {
                Some("its stub's gate is not known to be closed".to_owned())
            }
            Room::There => {
                self.take(id, requester, engine);
                None
            }
            Room::Evict(sleepers) => {
                let names: Vec<String> = sleepers.iter().map(|(sleeper, _)| sleeper.to_string()).collect();
                for (sleeper, why) in sleepers {
                    self.step(&sleeper, Step::End { why });
                }
                Some(format!("room is made by deleting {}", names.join(" and ")))
            }
            Room::Wait(reason) => Some(reason),
        }
    }

    /// The provider that an engine is launched in must be there if it is a launcher, and must not if it is to be made.
    fn provider_is_missing(&mut self, provider: &ProviderId, asker: &RequesterId) -> Option<String> {
        let asked = self.node.requesters.get(asker).and_then(|asker| asker.seen.ask.build);
        let known = self.node.providers.get(provider);
        if !provider.is_launcher() {
            return known.map(|_| "the Pod before with its name is still there".to_owned());
        }
        match known {
            None => Some(self.launcher_pause(provider, asked).unwrap_or_else(|| {
                self.of_provider(provider, OfProvider::Create { asker: Some(asker.clone()) });
                "its launcher is being created".to_owned()
            })),
            Some(known) if known.deleting => Some("its launcher is being deleted".to_owned()),
            Some(known) if known.stage != Stage::Ready => Some("its launcher is not ready".to_owned()),
            Some(_) => None,
        }
    }

    /// The launcher that is there is not of the build that is asked for: it makes way for one that is, unless somebody is bound to an
    /// engine in it.
    fn is_another_build(&mut self, id: &ProviderId, asked: Option<Build>) -> Option<String> {
        let known = self.node.providers.get(id).filter(|known| !known.deleting)?;
        if known.build? == asked? {
            return None;
        }
        let what = "its launcher is of another LauncherConfig, or of it as it was before";
        if let Some(bound) = self.node.bound_in(id) {
            return Some(format!("{what}, and {} is {} there", bound.id, bound.state));
        }
        let uid = known.uid.clone();
        self.of_provider(id, OfProvider::Delete { uid, why: Dismissal::Replaced });
        Some(format!("{what}, and is replaced"))
    }

    fn take(&mut self, id: &RequesterId, requester: &Requester, engine: EngineId) {
        let ask = &requester.seen.ask;
        let record = if let Some(sleeper) = self.node.engines.get(&engine) {
            // How it sleeps the next time is for who has it now to say.
            let (requester, level, stop_after) = (Some(id.clone()), ask.level, ask.stop_after);
            Record { requester, level, stop_after, ..sleeper.record(sleeper.last_used) }
        } else {
            Record {
                engine: engine.clone(),
                generation: self.next_generation(),
                sizes: ask.sizes,
                level: ask.level,
                stop_after: ask.stop_after,
                requester: Some(id.clone()),
                last_used: self.now(),
            }
        };
        let made = !self.node.engines.contains_key(&engine) && engine.mode != Mode::Launcher;
        self.step(&engine, if made { Step::Create { record } } else { Step::Bind { record } });
    }

    /// Why no launcher is made there yet. What is wrong with one build need not be wrong with another.
    fn launcher_pause(&self, id: &ProviderId, asked: Option<Build>) -> Option<String> {
        let known = id.accelerators.iter().find_map(|a| self.node.accelerators.get(a))?;
        let other = known.crashed.is_some_and(|crashed| {
            asked.is_some_and(|asked| asked != crashed)
                || self.rules.builds.get(&crashed).is_some_and(|terms| terms.obsolete)
        });
        let last = if known.unready { "was never ready" } else { "had an engine that did not end" };
        (known.not_before > self.now() && !other).then(|| {
            let next = known.not_before;
            let failed = match known.crashes {
                1 => "1 launcher failed: it".to_owned(),
                n => format!("{n} launchers failed, of which the last"),
            };
            format!("{failed} {last}; the next is made at {next}")
        })
    }

    /// One launcher for each accelerator that is to have one; none that is of no use.
    pub(super) fn launchers(&mut self) {
        let takes = self.node.exists && !self.node.facts.cordoned;
        let wanted = |known: &Accelerator| takes && known.facts.launcher && known.facts.healthy;
        let missing = self.node.accelerators.iter().filter(|(_, known)| wanted(known));
        let missing = missing.map(|(a, _)| ProviderId::launcher(a.clone()));
        let missing = missing.filter(|id| !self.node.providers.contains_key(id));
        for id in missing.collect::<Vec<_>>() {
            let asker = self.node.asker(&id).cloned();
            let asks = asker.as_ref().and_then(|asker| self.node.requesters.get(asker));
            if self.launcher_pause(&id, asks.and_then(|asker| asker.seen.ask.build)).is_some() {
                continue;
            }
            self.of_provider(&id, OfProvider::Create { asker });
        }
        let launchers = self.node.providers.keys().filter(|id| id.is_launcher());
        for id in launchers.cloned().collect::<Vec<_>>() {
            if let Some(step) = self.launcher(&id) {
                self.of_provider(&id, step);
            }
        }
    }

    fn launcher(&self, id: &ProviderId) -> Option<OfProvider> {
        let known = self.node.providers.get(id)?;
        let busy = known.call.as_ref().is_some_and(|call| call.until > self.now());
        if busy || known.retry.at > self.now() {
            return None;
        }
        if known.deleting {
            // Ordered, and not taken yet. The end of one that nobody has seen may be seen by nobody either: it is asked for again.
            let unseen = known.uid.is_none() && known.retry.at + self.rules.settings.end <= self.now();
            let again = known.retry.failures > 0 || known.call.is_some() || unseen;
            let why = self.dismissal(id).unwrap_or(Dismissal::Useless);
            return again.then(|| OfProvider::Delete { uid: known.uid.clone(), why });
        }
        if known.uid.is_none() && known.retry.failures > 0 {
            return Some(OfProvider::Create { asker: self.node.asker(id).cloned() });
        }
        let why = self.dismissal(id).filter(|_| self.node.bound_in(id).is_none())?;
        Some(OfProvider::Delete { uid: known.uid.clone(), why })
    }

    /// Since when nobody has needed this launcher: no engine is in it, no requester is there that it could be for, and there need
    /// not be one anyway.
    fn idle_since(&self, id: &ProviderId) -> Option<Tick> {
        let asks = |requester: &Requester| {
            requester.stays()
                && requester.seen.ask.mode == Mode::Launcher
                && (requester.accelerators.is_empty()
                    || self.node.provider_for(&self.node.wanted_by(requester)) == *id)
        };
        let wanted = |a: &AcceleratorId| self.node.accelerators.get(a).is_some_and(|own| own.facts.launcher);
        let needed = id.accelerators.iter().any(wanted)
            || self.node.engines_in(id).next().is_some()
            || self.node.requesters.values().any(asks);
        self.node.idle_since(id).filter(|_| !needed)
    }

    /// Why this launcher goes as soon as nobody is bound to an engine in it.
    fn dismissal(&self, id: &ProviderId) -> Option<Dismissal> {
        let known = self.node.providers.get(id)?;
        if self.rules.terms(known).obsolete {
            return Some(Dismissal::Replaced);
        }
        let settings = self.rules.settings;
        let faulty =
            |a: &AcceleratorId| self.node.accelerators.get(a).is_some_and(|known| !known.facts.healthy);
        let unready = known.stage != Stage::Ready && known.since + settings.start <= self.now();
        let mut inside = self.node.engines_in(id);
        let stuck =
            inside.any(|e| matches!(e.state, State::Ending { .. }) && e.since + settings.end <= self.now());
        let goes = unready
            || stuck
            || matches!(known.stage, Stage::Trouble | Stage::Ended)
            || !self.node.exists
            || id.accelerators.iter().any(faulty)
            || self.idle_since(id).is_some_and(|since| since + settings.idle <= self.now());
        goes.then_some(Dismissal::Useless)
    }
}
