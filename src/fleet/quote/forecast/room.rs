//! How long until there is memory for an engine: the turns ahead in line, and the engines that must leave first.
//!
//! Apart from the forecast, because these parts look at other models' engines.

use super::{WaitForecaster, cache::Rival};
use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{
        command::AfterDrain,
        plan::place::{PlacementCandidate, PlacementStatus, candidate_sets::AcceleratorSets},
        quote::WaitRange,
        state::ledger::amount::ResourceAmount,
    },
    model::{AcceleratorId, DrainDeadlinePolicy, EvictionPolicy, ModelSpec},
    units::{Bytes, Millis},
};

/// Candidates that a forecast looks at: those with the most free memory.
const MAX_CANDIDATES: usize = 8;

impl WaitForecaster<'_> {
    /// The time until the engine's memory could be reserved.
    pub(super) fn time_to_room(&self, e: &Engine, depth: u8) -> Option<WaitRange> {
        let down = if e.state.is_winding_down() { self.way_down(e) } else { WaitRange::ZERO };
        // A model that was evicted stands behind its successor until that has served.
        let successor = e.yielded_to.as_ref().and_then(|id| self.builder.engine(id));
        if let Some(successor) = successor.filter(|other| self.is_coming(other)) {
            let served = self.time_until_up(successor, depth)?;
            let turn = self.turn(successor).then(self.leaving(successor));
            return Some(down.both(served).then(turn));
        }
        let spec = self.planner().engine_spec(&e.id)?;
        let need = self.builder.needed_amount(&e.id, spec)?;
        let candidates = self.builder.candidate_sets(&e.id, spec);
        let nearest = candidates.iter().take(MAX_CANDIDATES);
        let times = nearest.filter_map(|accelerators| {
            let candidate = PlacementCandidate { accelerators: accelerators.clone(), need };
            self.time_to_place(e, spec, &candidate, depth)
        });
        let room = times.min_by_key(|time| (time.likely, time.high))?;
        let turns = self.turns_ahead(e, &candidates);
        Some(down.both(turns.then(room)))
    }

    /// Whether the engine starts, or stands in line to start.
    fn is_coming(&self, e: &Engine) -> bool {
        !e.serves() && (e.state.is_starting() || e.pending_reservation.is_some() || self.is_in_line(e))
    }

    /// The turns of the models ahead in line that could take one of these candidates, as many as there are rounds.
    ///
    /// With several candidates, as many models have their turns at the same time.
    fn turns_ahead(&self, e: &Engine, candidates: &AcceleratorSets) -> WaitRange {
        let competes = |rival: &&Rival| rival.id.model != e.id.model && rival.candidates.overlaps(candidates);
        let rivals: Vec<&Rival> = self.rivals_ahead(&e.id).filter(competes).collect();
        let rounds = rivals.chunks(candidates.len().max(1)).filter_map(|round| {
            // A round that does not fill the candidates leaves one for this engine.
            round.get(candidates.len().max(1) - 1)
        });
        rounds.flat_map(|rival| rival.turn).fold(WaitRange::ZERO, WaitRange::then)
    }

    /// The time until the candidate has room for the engine; `None` if nothing makes any.
    fn time_to_place(
        &self,
        e: &Engine,
        spec: &ModelSpec,
        candidate: &PlacementCandidate,
        depth: u8,
    ) -> Option<WaitRange> {
        let lacks_room = candidate.accelerators.iter().any(|on| {
            let (_, later) = self.shortfalls(e, candidate, on);
            !later.is_zero()
        });
        if lacks_room {
            return self.time_to_evict(e, candidate, depth);
        }
        match self.builder.placement_status(&e.id, spec, candidate) {
            PlacementStatus::Ready | PlacementStatus::MeterStale { .. } => Some(WaitRange::ZERO),
            PlacementStatus::AwaitingRelease { after, .. } => {
                let high = self.planner().settings.timeouts.meter_lag.max(after);
                Some(WaitRange { low: Millis::ZERO, likely: after, high })
            }
            PlacementStatus::Blocked { by } => {
                let other = self.builder.engine(&by)?;
                if other.state.is_winding_down() {
                    return Some(self.way_down(other));
                }
                // It measures its memory at some time before it serves.
                let served = self.time_until_up(other, depth)?;
                Some(WaitRange { low: Millis::ZERO, likely: Millis(served.likely.0 / 2), ..served })
            }
            PlacementStatus::Freeing => Some(self.time_to_release(e, candidate)),
            PlacementStatus::NoRoom => self.time_to_evict(e, candidate, depth),
        }
    }

    /// The shortfalls on one accelerator: beyond the free amount, and beyond what will be free.
    fn shortfalls(
        &self,
        e: &Engine,
        candidate: &PlacementCandidate,
        on: &AcceleratorId,
    ) -> (ResourceAmount, ResourceAmount) {
        if releases_memory(e) {
            // What it releases itself is in the common sum.
            self.builder.shortfalls(&e.id, candidate, on)
        } else {
            self.builder.shortfalls_with(&e.id, candidate, on, self.release_on(on).coming)
        }
    }

    /// The time until all other engines on their way out have released their memory.
    fn time_to_release(&self, e: &Engine, candidate: &PlacementCandidate) -> WaitRange {
        if !releases_memory(e) {
            let times = candidate.accelerators.iter().map(|on| self.release_on(on).time);
            return times.fold(WaitRange::ZERO, WaitRange::both);
        }
        let leaving = self.planner().engines.winding_down_on_any(&candidate.accelerators);
        let others = leaving.into_iter().filter(|other| other.id != e.id);
        others.fold(WaitRange::ZERO, |freed, other| freed.both(self.way_down(other)))
    }

    /// The time until enough engines have left the candidate; `None` if that is never.
    fn time_to_evict(&self, e: &Engine, candidate: &PlacementCandidate, depth: u8) -> Option<WaitRange> {
        let accelerators = candidate.accelerators.iter();
        let time = accelerators
            .map(|on| self.time_to_free(e, candidate, on, depth))
            .try_fold(WaitRange::ZERO, |freed, next| Some(freed.both(next?)))?;
        self.is_reachable(e, candidate).then_some(time)
    }

    /// Whether the engine could ever get the candidate.
    fn is_reachable(&self, e: &Engine, candidate: &PlacementCandidate) -> bool {
        if self.planner().dependencies.involves(&e.id.model) {
            // Its dependencies, or those that need it, must stay for it.
            return self.builder.is_reachable(&e.id, candidate);
        }
        candidate.accelerators.iter().all(|on| {
            let Some(account) = self.planner().ledger.accelerators.get(on) else { return false };
            let possible =
                self.release_on(on).possible.saturating_sub(self.builder.may_ever_free(e, account));
            self.builder.would_suffice(&e.id, candidate, on, possible)
        })
    }

    /// The time until enough engines have left one accelerator of a candidate.
    fn time_to_free(
        &self,
        e: &Engine,
        candidate: &PlacementCandidate,
        on: &AcceleratorId,
        depth: u8,
    ) -> Option<WaitRange> {
        let (short, _) = self.shortfalls(e, candidate, on);
        if short.is_zero() {
            return Some(WaitRange::ZERO);
        }
        let leaving = self.leaving_engines(on, depth);
        let holds_some = |own: &Engine| {
            let reserved = own.pending_reservation.as_ref().map(|placing| &placing.accelerators);
            own.accelerators.contains(on) || reserved.is_some_and(|reserved| reserved.contains(on))
        };
        if self.planner().engines_of(&e.id.model).any(holds_some) {
            leaving.time_to_free_without(&e.id.model, short.bytes)
        } else {
            leaving.time_to_free(short.bytes)
        }
    }

    /// Memory that the engine keeps once it has left.
    pub(super) fn kept_by(&self, e: &Engine) -> Bytes {
        let stays_asleep =
            !matches!(e.state, LifecycleState::Asleep { .. } | LifecycleState::Stopping { .. })
                && self.builder.sleep_level(&e.id, None).is_some();
        if stays_asleep { self.planner().residue_of(&e.id) } else { Bytes::ZERO }
    }

    /// The time until the engine has left its memory to another model; `None` if no rule makes it leave.
    pub(super) fn time_to_leave(&self, e: &Engine, depth: u8) -> Option<WaitRange> {
        if e.state.is_winding_down() || e.releasing_since.is_some() {
            return Some(self.way_down(e));
        }
        let evictable_in = self.builder.evictable_at(e)?.since(self.builder.now);
        match &e.state {
            LifecycleState::Asleep { .. } if e.pending_reservation.is_none() => Some(self.stop_time(e)),
            LifecycleState::Awake => {
                let rest = self.rest_of_use(e, evictable_in)?;
                Some(rest.then(self.leaving(e)))
            }
            _ => {
                let served = self.time_until_up(e, depth)?;
                Some(served.then(self.turn(e)).then(self.leaving(e)))
            }
        }
    }

    /// The time until an awake engine may be put away and is drained.
    fn rest_of_use(&self, e: &Engine, evictable_in: Millis) -> Option<WaitRange> {
        if self.planner().in_use_count(e) == 0 {
            return Some(WaitRange::exactly(evictable_in));
        }
        if self.planner().eviction_of(&e.id.model) != EvictionPolicy::Residency {
            return None;
        }
        // At the end of its turn the gate closes, and the requests in flight finish.
        let last = evictable_in + self.planner().settings.turns.drain_deadline;
        Some(match e.busy_time {
            Some(busy) => busy.range().left_after(self.age(e.busy_since())).at_most(last),
            None => WaitRange { low: Millis::ZERO, likely: Millis(evictable_in.0 / 2), high: last },
        })
    }

    /// How long a model whose turn begins stays in use, while another waits for its memory.
    pub(super) fn turn(&self, e: &Engine) -> WaitRange {
        let longest = self.planner().settings.turns.max_turn;
        match e.busy_time {
            Some(busy) => busy.range().at_most(longest),
            None => WaitRange { low: Millis::ZERO, likely: Millis(longest.0 / 4), high: longest },
        }
    }

    /// The time that an engine without requests needs to sleep or stop.
    pub(super) fn leaving(&self, e: &Engine) -> WaitRange {
        if self.builder.sleep_level(&e.id, None).is_some() { self.sleep_time(e) } else { self.stop_time(e) }
    }

    /// What is left until an engine that goes down has released its memory.
    pub(super) fn way_down(&self, e: &Engine) -> WaitRange {
        let age = self.age(e.since);
        match &e.state {
            LifecycleState::Draining { after_drain, drained, .. } => {
                let drain = if *drained || self.planner().in_use_count(e) == 0 {
                    WaitRange::ZERO
                } else {
                    self.rest_of_drain(e)
                };
                let sleeps = match after_drain {
                    AfterDrain::Sleep(wish) => self.builder.sleep_level(&e.id, *wish).is_some(),
                    AfterDrain::Stop => false,
                };
                drain.then(if sleeps { self.next_sleep_time(e) } else { self.stop_time(e) })
            }
            LifecycleState::FallingAsleep { .. } => self.next_sleep_time(e).left_after(age),
            LifecycleState::Asleep { .. } => {
                WaitRange::within_deadline(self.planner().settings.timeouts.meter_lag).left_after(age)
            }
            _ => self.stop_time(e).left_after(age),
        }
    }

    /// What is left until the requests at a closed gate have ended.
    fn rest_of_drain(&self, e: &Engine) -> WaitRange {
        let turns = &self.planner().settings.turns;
        let limit = turns.drain_deadline;
        let rest = e.busy_time.map_or_else(
            || WaitRange::within_deadline(limit).left_after(self.age(e.since)),
            |busy| busy.range().left_after(self.age(e.busy_since())),
        );
        match turns.on_deadline {
            DrainDeadlinePolicy::Cut => rest.at_most((e.since + limit).since(self.builder.now)),
            DrainDeadlinePolicy::Wait => rest,
        }
    }

    fn sleep_time(&self, e: &Engine) -> WaitRange {
        let learned = self.planner().learned_of(&e.id).sleep_range();
        learned.unwrap_or_else(|| self.longest_sleep())
    }

    /// The time of the sleep under way, or of the one that follows the drain.
    fn next_sleep_time(&self, e: &Engine) -> WaitRange {
        if e.is_rehearsing() { self.rehearsed_sleep_time(e) } else { self.sleep_time(e) }
    }

    /// The time of a sleep that pins host memory.
    pub(super) fn rehearsed_sleep_time(&self, e: &Engine) -> WaitRange {
        let learned = self.planner().learned_of(&e.id).rehearsed_sleep_range();
        learned.unwrap_or_else(|| self.longest_sleep())
    }

    fn longest_sleep(&self) -> WaitRange {
        WaitRange::within_deadline(self.planner().settings.timeouts.sleep)
    }

    fn stop_time(&self, e: &Engine) -> WaitRange {
        let grace = self.planner().settings.timeouts.stop_grace;
        let learned = self.planner().learned_of(&e.id).times.stop;
        learned.map_or_else(|| WaitRange::within_deadline(grace), |known| known.range())
    }
}

/// Whether the engine is one of those whose memory [`super::cache::Release`] counts.
const fn releases_memory(e: &Engine) -> bool {
    e.state.is_winding_down() || e.releasing_since.is_some()
}
