//! Who starts: models that are wanted, in the order of their turns.
//!
//! A model that cannot start yet claims the memory it will take, so that nobody behind it in line can take that away,
//! and nobody can be starved by a stream of smaller ones.

use std::{collections::BTreeSet, sync::Arc};

use super::{
    command::{Command, Then, Why},
    eviction::Victim,
    explain::Reason,
    placement::{Candidate, Room},
    plan::Draft,
    portion::Portion,
};
use crate::{
    engine::state::State,
    fault::Cause,
    model::{AcceleratorId, EngineId, ModelSpec, QueuePolicy},
    units::{Bytes, Millis, Tick},
};

/// What came of an engine's turn in line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Outcome {
    /// Its memory is being reserved, or could be.
    Placed,
    /// It will have room without anybody else's turn: that is looked for, or being made.
    Coming,
    Stuck,
}

/// Failures in a row, none of which came after it had served, after which those who wait are told, instead of trying on
/// for them. One that served and then died, or did not wake, has a start of its own coming, however often that happened.
const TRIES: u32 = 2;

impl Draft<'_> {
    pub(super) fn admit(&mut self) {
        self.line = self.wanted_in_order();
        self.places = self.places_in(&self.line);
        let (first, spare): (Vec<_>, Vec<_>) =
            self.line.clone().into_iter().partition(|id| self.planner.goes_first(id));
        for id in &first {
            self.bring_up(id, true);
        }
        for id in &first {
            self.keep_place(id);
        }
        for id in &spare {
            self.bring_up(id, false);
        }
    }

    /// Somebody waits for it, and it is left alone for a while: others in line may have its place in the meantime, but no
    /// spare, whose start would take longer than that.
    fn keep_place(&mut self, id: &EngineId) {
        let Some(spec) = self.planner.shared_spec(&id.model) else { return };
        let left_alone = self.engine(id).is_some_and(|e| matches!(e.state, State::Backoff { .. }));
        if !left_alone || self.waiting(&id.model) == 0 {
            return;
        }
        let candidates = self.candidates(id, &spec, true);
        let places = candidates.iter().filter(|c| self.in_reach(id, c));
        if let Some(place) = places.min_by_key(|c| self.room(id, &spec, c) == Room::No).cloned() {
            self.claim(id, &place);
        }
    }

    pub(super) fn bring_up(&mut self, id: &EngineId, may_evict: bool) -> Outcome {
        let Some(spec) = self.planner.shared_spec(&id.model) else {
            return Outcome::Stuck;
        };
        self.take_own_turn(id);
        let Some(e) = self.engine(id) else { return Outcome::Stuck };
        if e.placing.is_some() {
            self.because(id, self.reserved(id));
            return Outcome::Placed;
        }
        match e.state.clone() {
            State::Cold | State::Asleep { .. } if e.shrinking.is_none() => self.start(id, &spec, may_evict),
            State::Backoff { until, cause } => {
                self.because(id, self.backing_off(id, &spec, until, cause));
                Outcome::Stuck
            }
            state if state.is_starting() => {
                self.because(id, self.under_way(id, &spec));
                Outcome::Placed
            }
            State::Awake if e.gated => {
                self.because(id, Reason::gated(id));
                Outcome::Stuck
            }
            state => {
                // On its way down while it is wanted: it comes back in its turn, and its place is kept for it.
                let text = format!("it is {state}, and starts again afterwards");
                let candidate = self.candidates(id, &spec, true).into_iter().next();
                self.because(id, Reason::starting(&text));
                let keeps = |c: &Candidate| may_evict && state != State::Awake && self.in_reach(id, c);
                if let Some(candidate) = candidate.filter(keeps) {
                    self.claim(id, &candidate);
                }
                Outcome::Coming
            }
        }
    }

    fn start(&mut self, id: &EngineId, spec: &ModelSpec, may_evict: bool) -> Outcome {
        if let Some(outcome) = self.with_what_it_needs(id, may_evict) {
            return outcome;
        }
        let candidates = self.candidates(id, spec, true);
        if candidates.is_empty() {
            let reason = self.fits_nowhere(id, spec);
            self.because(id, reason);
            return Outcome::Stuck;
        }
        let rooms: Vec<Room> = candidates.iter().map(|c| self.room(id, spec, c)).collect();
        let at = |wanted: fn(&Room) -> bool| rooms.iter().position(wanted).and_then(|i| candidates.get(i));
        if let Some(candidate) = at(|r| *r == Room::Yes) {
            return match self.better_unread(candidates.iter().zip(&rooms)) {
                Some(better) => self.await_room(id, better, &self.room(id, spec, better)),
                None => self.take(id, spec, candidate),
            };
        }
        let awaited: [fn(&Room) -> bool; 4] = [
            |r| matches!(r, Room::Unread { .. }),
            |r| matches!(r, Room::Excluded { .. }),
            |r| matches!(r, Room::Unseen { .. }),
            |r| *r == Room::Coming,
        ];
        // What others give up is not for a spare.
        let awaited = awaited.into_iter().take(if may_evict { 4 } else { 3 });
        if let Some(candidate) = awaited.into_iter().find_map(at) {
            let room = self.room(id, spec, candidate);
            return self.await_room(id, candidate, &room);
        }
        self.look_again(&candidates);
        if !may_evict {
            self.because(id, Reason::starting("waiting for memory that nobody else has or wants"));
            return Outcome::Stuck;
        }
        let victims = self.victims(id, &candidates);
        let gentle = victims.as_ref().is_some_and(|(_, set)| !set.iter().any(Victim::is_busy));
        if !gentle && self.moves(id, spec, &candidates) {
            return Outcome::Coming;
        }
        match victims {
            Some((candidate, _)) if self.refuses_to_wait(&candidates, id) => {
                let candidate = candidate.clone();
                self.wait_for_turn(id, &candidate);
            }
            Some((candidate, victims)) => {
                self.evict(id, candidate, &victims);
                return Outcome::Coming;
            }
            None => {
                let best = candidates
                    .iter()
                    .min_by_key(|c| (!self.in_reach(id, c), self.earliest(id, c)))
                    .or_else(|| candidates.first());
                if let Some(candidate) = best.cloned() {
                    self.wait_for_turn(id, &candidate);
                }
            }
        }
        Outcome::Stuck
    }

    /// A candidate with more room than the first that is known to have it, which only was not looked at for a while.
    /// Taking the one that happens to have been read would crowd all models onto it. Not when its meter is silent.
    fn better_unread<'c>(
        &self,
        mut candidates: impl Iterator<Item = (&'c Candidate, &'c Room)>,
    ) -> Option<&'c Candidate> {
        let answers = |a: &AcceleratorId| {
            self.planner.ledger.accelerators.get(a).is_some_and(|account| account.answers(self.now))
        };
        let (first, room) = candidates.find(|(_, room)| matches!(room, Room::Yes | Room::Unread { .. }))?;
        (*room != Room::Yes && first.accelerators.iter().all(answers)).then_some(first)
    }

    /// `queue.policy: reject`, and only engines in use could make room: that would be waiting.
    fn refuses_to_wait(&self, candidates: &[Candidate], id: &EngineId) -> bool {
        self.rejects(id)
            && self.victims(id, candidates).is_some_and(|(_, set)| set.iter().any(Victim::is_busy))
    }

    fn rejects(&self, id: &EngineId) -> bool {
        let settings = &self.planner.settings;
        let policy =
            self.planner.spec(&self.asker(id).model).map_or(settings.queue.policy, |s| settings.policy_of(s));
        policy == QueuePolicy::Reject
    }

    /// There is room for it.
    fn take(&mut self, id: &EngineId, spec: &ModelSpec, candidate: &Candidate) -> Outcome {
        if self.only_claims() {
            self.claim(id, candidate);
            let root = self.asker(id).model.clone();
            let text = format!("there is room for it, and it is reserved for along with '{root}'");
            self.because(id, Reason::starting(&text).naming(&root));
            return Outcome::Placed;
        }
        let asleep = self.engine(id).is_some_and(|e| e.state.has_process());
        // Those that are reserved together wait for the wakes beside them later on.
        if !asleep && spec.measures() && self.together.is_none() && self.wake_first(id, candidate) {
            self.because(id, Reason::starting("a waiting wake on its accelerator goes first"));
            return Outcome::Coming;
        }
        self.reserve(id, candidate);
        Outcome::Placed
    }

    fn reserve(&mut self, id: &EngineId, candidate: &Candidate) {
        let asleep = self.engine(id).is_some_and(|e| e.state.has_process());
        let generation = self.generation(id);
        self.emit(Command::Reserve {
            engine: id.clone(),
            generation: if asleep { generation } else { generation.next() },
            accelerators: candidate.accelerators.clone(),
            bytes: candidate.need.bytes,
            host: Bytes::ZERO,
        });
        self.because(id, Reason::starting("its memory is being reserved"));
    }

    /// A launch keeps its accelerators to itself for long; a wake that fits beside it takes a moment. Starts those.
    fn wake_first(&mut self, id: &EngineId, candidate: &Candidate) -> bool {
        let near = self.planner.engines.near(&candidate.accelerators).into_iter();
        let sleepers = near.filter(|e| {
            e.id != *id
                && matches!(e.state, State::Asleep { .. })
                && e.placing.is_none()
                && e.shrinking.is_none()
                && e.accelerators.iter().any(|a| candidate.accelerators.contains(a))
                && self.is_alone(&e.id)
        });
        let mut behind: Vec<(usize, EngineId)> =
            sleepers.filter_map(|e| Some((*self.places.get(&e.id)?, e.id.clone()))).collect();
        behind.sort_unstable();
        let claims = self.claims.clone();
        self.claim(id, candidate);
        let mut first = false;
        for (_, sleeper) in behind {
            let Some(spec) = self.planner.shared_spec(&sleeper.model) else {
                continue;
            };
            let Some(own) = self.candidates(&sleeper, &spec, true).into_iter().next() else {
                continue;
            };
            match self.room(&sleeper, &spec, &own) {
                Room::Yes => {
                    self.reserve(&sleeper, &own);
                    first = true;
                }
                Room::Unread { .. } => {
                    let room = self.room(&sleeper, &spec, &own);
                    self.await_room(&sleeper, &own, &room);
                    first = true;
                }
                _ => {}
            }
        }
        if !first {
            self.claims = claims;
        }
        first
    }

    /// An asleep engine whose accelerators will not have room for longer than a cold start takes is stopped, and started
    /// where there is room now.
    fn moves(&mut self, id: &EngineId, spec: &ModelSpec, candidates: &[Candidate]) -> bool {
        if !self.engine(id).is_some_and(|e| matches!(e.state, State::Asleep { .. })) {
            return false;
        }
        let by = self.now + self.planner.start_of(&id.model);
        if candidates.iter().any(|c| self.in_reach(id, c) && self.earliest(id, c) <= by) {
            return false;
        }
        let places = self.elsewhere(id, spec);
        let at = |wanted: fn(&Room) -> bool| {
            places.iter().map(|c| (c, self.room(id, spec, c))).find(|(_, room)| wanted(room))
        };
        if let Some((place, _)) = at(|room| *room == Room::Yes) {
            let text = format!("moving to {}, which has room: it is stopped first", list(place));
            let place = place.clone();
            self.claim(id, &place);
            self.stop(id);
            self.because(id, Reason::starting(&text));
            return true;
        }
        if let Some((place, room)) = at(|room| matches!(room, Room::Unread { .. })) {
            let place = place.clone();
            self.await_room(id, &place, &room);
            return true;
        }
        false
    }

    /// What the meter shows for somebody's memory may end at any time, and nothing but the meter tells.
    fn look_again(&mut self, candidates: &[Candidate]) {
        let accounts = &self.planner.ledger.accelerators;
        let settled = |a: &AcceleratorId| accounts.get(a).is_some_and(super::budget::Account::is_settled);
        let wanted: BTreeSet<AcceleratorId> =
            candidates.iter().flat_map(|c| &c.accelerators).filter(|a| settled(a)).cloned().collect();
        for accelerator in wanted {
            self.meter(&accelerator, Millis::secs(1));
        }
    }

    /// Room is there or coming, and nothing needs to be decided but to look.
    fn await_room(&mut self, id: &EngineId, candidate: &Candidate, room: &Room) -> Outcome {
        self.claim(id, candidate);
        match room {
            Room::Unread { accelerator } => {
                for accelerator in &candidate.accelerators {
                    let fresh = self
                        .planner
                        .ledger
                        .accelerators
                        .get(accelerator)
                        .is_none_or(|a| a.is_fresh(self.now));
                    if !fresh {
                        self.meter(accelerator, Millis::ZERO);
                    }
                }
                let text = format!("reading how much of {accelerator} is in use");
                self.because_of_memory(id, candidate, text);
            }
            Room::Unseen { accelerator, after, short } => {
                self.meter(accelerator, *after);
                let text =
                    format!("waiting for memory on {accelerator} to come back: {short} not seen free yet");
                self.because_of_memory(id, candidate, text);
            }
            Room::Excluded { by } => {
                let text = format!("waiting for {by} to finish taking its memory on the same accelerator");
                self.because(id, Reason::starting(&text).naming(&by.model));
            }
            _ => {
                self.insist(id, candidate);
                let reason = self.held_reason(id, candidate);
                self.because(id, reason);
            }
        }
        Outcome::Coming
    }

    /// Idle drains that this model counts on can no longer be cancelled.
    fn insist(&mut self, id: &EngineId, candidate: &Candidate) {
        let near = self.planner.engines.near(&candidate.accelerators);
        let idle = near.into_iter().filter(|e| {
            e.id != *id
                && matches!(e.state, State::Draining { why: Why::Idle, .. })
                && e.accelerators.iter().any(|a| candidate.accelerators.contains(a))
        });
        let drains: Vec<(EngineId, Then)> = idle
            .filter_map(|e| match e.state {
                State::Draining { then, .. } => Some((e.id.clone(), then)),
                _ => None,
            })
            .collect();
        for (engine, then) in drains {
            self.close_for(&engine, then, id);
        }
    }

    fn evict(&mut self, id: &EngineId, candidate: &Candidate, victims: &[Victim]) {
        for victim in victims {
            // It goes once those who need it are asleep or gone.
            if self.engine(&victim.engine).is_some_and(|e| self.planner.keeper(e).is_some()) {
                continue;
            }
            if victim.goes_at_once() {
                self.stop_for(&victim.engine, id);
            } else {
                self.close_for(&victim.engine, victim.then, id);
            }
        }
        self.insist(id, candidate);
        self.claim(id, candidate);
        let names: Vec<String> = victims.iter().map(|v| format!("{} is {}", v.name(), v.fate())).collect();
        let text = format!("making room on {}: {}", list(candidate), names.join(", "));
        self.because_of_memory(id, candidate, text);
    }

    /// Nobody may be put away yet: it keeps its place in line for the candidate that comes free first.
    fn wait_for_turn(&mut self, id: &EngineId, candidate: &Candidate) {
        let mut reason = self.held_reason(id, candidate);
        if self.rejects(id) {
            reason.refuse = true;
        } else if self.in_reach(id, candidate) {
            self.claim(id, candidate);
        }
        self.because(id, reason);
    }

    /// When the engines in the way of a candidate may first be put away.
    fn earliest(&self, id: &EngineId, candidate: &Candidate) -> Tick {
        let near = self.planner.engines.near(&candidate.accelerators);
        let in_the_way = near.into_iter().filter(|e| {
            e.id != *id
                && e.state.has_process()
                && e.accelerators.iter().any(|a| candidate.accelerators.contains(a))
        });
        in_the_way.filter_map(|e| self.may_go_at(e)).min().unwrap_or(Tick(u64::MAX))
    }

    /// Books nothing, but keeps others behind in line from taking it.
    fn claim(&mut self, id: &EngineId, candidate: &Candidate) {
        for accelerator in &candidate.accelerators {
            let account = self.planner.ledger.accelerators.get(accelerator);
            let has = account.map_or_else(Portion::default, |account| account.part_of(id));
            let claim = self.claims.entry(accelerator.clone()).or_default();
            *claim = *claim + candidate.need.less(has);
        }
        if let Some(together) = &mut self.together {
            together.claimed.insert(id.clone(), candidate.clone());
        }
    }

    pub(super) fn because(&mut self, id: &EngineId, reason: Reason) {
        let awake = self.planner.engines_of(&id.model).filter(|e| e.serves()).count();
        let reason = match self.planner.spec(&id.model) {
            Some(spec) if awake > 0 => reason.beside(awake, spec.replicas, self.waiting(&id.model) > 0),
            _ => reason,
        };
        Arc::make_mut(&mut self.reasons).entry(id.model.clone()).or_insert(reason);
    }

    /// It waits for memory of which more can be said than who holds it.
    fn because_of_memory(&mut self, id: &EngineId, candidate: &Candidate, text: String) {
        let mut reason = self.held_reason(id, candidate);
        reason.text = text;
        reason.named.clear();
        self.because(id, reason);
    }

    fn backing_off(&self, id: &EngineId, spec: &ModelSpec, until: Tick, cause: Cause) -> Reason {
        let Some(e) = self.engine(id) else { return Reason::default() };
        let others_serve = self.planner.engines_of(&id.model).any(crate::engine::Engine::serves);
        let refuse = (e.fruitless >= TRIES || cause.is_permanent()) && !others_serve;
        Reason::failed(e, spec, cause, until, refuse)
    }
}

fn list(candidate: &Candidate) -> String {
    let names: Vec<&str> = candidate.accelerators.iter().map(crate::model::AcceleratorId::as_str).collect();
    names.join(", ")
}
