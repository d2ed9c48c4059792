//! Forecasts a wait from the state that a plan left.
//!
//! The forecast follows the way of a request: a free place is no wait; an engine on its way needs what is left of its
//! start; any other engine first needs its dependencies and its memory, and the memory comes when the engines that hold
//! it have left, one turn after the other for the models ahead in line. Each part is a range, and the model's record of
//! earlier quotes corrects their sum.
//!
//! There is no forecast where a part is unknown: for a start or wake that was never measured, for a model whose last start
//! failed, and behind an engine that no rule makes leave. `room` has the way to the memory, and `cache` what the
//! forecasts of one state have in common.

mod cache;
mod room;

use std::collections::BTreeMap;

use self::cache::ForecastCache;
use super::{WaitRange, book::QuoteBook};
use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{
        command::AfterDrain,
        plan::{PlanBuilder, Planner, QueueDemand},
    },
    model::{EngineId, ModelName, SleepLevel},
    units::{Millis, Tick},
};

/// The expected wait of a request for one model, as of one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitForecast {
    pub made_at: Tick,
    pub range: WaitRange,
    /// Something brings the model up already, so the wait gets shorter with time.
    pub is_under_way: bool,
}

impl WaitForecast {
    /// The expected wait of a request that arrives at `now`, or has waited since the forecast was made.
    #[must_use]
    pub fn at(&self, now: Tick) -> WaitRange {
        if self.is_under_way { self.range.left_after(now.since(self.made_at)) } else { self.range }
    }
}

/// Forecasts waits over a copy of the state, in which nothing is claimed.
///
/// One forecaster for many models costs far less than one for each.
pub(in crate::fleet) struct WaitForecaster<'a> {
    builder: PlanBuilder<'a>,
    /// The engines that are wanted and not awake.
    turn_order: &'a [EngineId],
    quotes: &'a QuoteBook,
    cache: ForecastCache<'a>,
}

/// How far a forecast follows models that wait for each other.
const MAX_DEPTH: u8 = 8;

impl<'a> WaitForecaster<'a> {
    pub(in crate::fleet) fn new(
        planner: Planner,
        demand: &'a BTreeMap<ModelName, QueueDemand>,
        clients: &'a BTreeMap<u64, u32>,
        turn_order: &'a [EngineId],
        quotes: &'a QuoteBook,
        now: Tick,
    ) -> Self {
        let builder = PlanBuilder::new(planner, demand, clients, now);
        Self { builder, turn_order, quotes, cache: ForecastCache::default() }
    }

    /// Forecasts the wait of a request that so many requests for the model stand before. `None`: a part is unknown.
    pub(in crate::fleet) fn forecast(&self, model: &ModelName, ahead: u32) -> Option<WaitForecast> {
        let planner = self.planner();
        let made_at = self.builder.now;
        if planner.shutdown.is_some() || planner.spec(model).is_none() {
            return None;
        }
        if self.has_free_place(model) {
            return Some(WaitForecast { made_at, range: WaitRange::ZERO, is_under_way: false });
        }
        if planner.serves(model) {
            let place = self.quotes.place_range(model, ahead.saturating_add(1));
            let next = self.starting_engine(model).and_then(|e| self.rest_of_start(e));
            let range = match (place, next) {
                (Some(place), Some(next)) => place.first_of(next),
                (place, next) => place.or(next)?,
            };
            return Some(WaitForecast {
                made_at,
                range: self.quotes.corrected(model, range),
                is_under_way: true,
            });
        }
        if !planner.can_explain() || planner.api_unreachable_since.is_some() {
            return None;
        }
        let range = self.quotes.corrected(model, self.time_to_serve(model, MAX_DEPTH)?);
        let is_starting = |e: &Engine| e.state.is_starting() || e.pending_reservation.is_some();
        let is_under_way =
            self.builder.waiting(model) > 0 || planner.primary_engine(model).is_some_and(is_starting);
        Some(WaitForecast { made_at, range, is_under_way })
    }

    /// Whether the model's engines are awake and full.
    pub(in crate::fleet) fn is_full(&self, model: &ModelName) -> bool {
        self.planner().serves(model) && !self.has_free_place(model)
    }

    const fn planner(&self) -> &Planner {
        &self.builder.planner
    }

    fn age(&self, since: Tick) -> Millis {
        self.builder.now.since(since)
    }

    fn has_free_place(&self, model: &ModelName) -> bool {
        let limit = self.planner().spec(model).and_then(|spec| spec.max_concurrency).unwrap_or(u32::MAX);
        let is_free = |e: &Engine| e.serves() && e.leases < e.max_leases(limit, self.builder.now);
        self.planner().engines_of(model).any(is_free)
    }

    fn starting_engine(&self, model: &ModelName) -> Option<&Engine> {
        self.planner().engines_of(model).find(|e| e.state.is_starting())
    }

    /// The time until an engine of this model serves; no engine does now.
    fn find_time_to_serve(&self, model: &ModelName, depth: u8) -> Option<WaitRange> {
        let depth = depth.checked_sub(1)?;
        let e = self.planner().primary_engine(model)?;
        if e.stub_gate_closed || e.failed_to_start() {
            return None;
        }
        if e.state.is_starting() {
            return self.rest_of_start(e);
        }
        let own = self.next_start(e)?;
        if e.is_rehearsing() {
            return Some(self.way_down(e).then(own));
        }
        let dependencies = self.dependencies_served(model, depth)?;
        if let Some(placing) = &e.pending_reservation {
            return Some(if placing.in_dependency_group {
                dependencies.then(own)
            } else {
                own.left_after(self.age(e.startup_began))
            });
        }
        let pause = match &e.state {
            LifecycleState::Backoff { until, .. } => WaitRange::exactly(until.since(self.builder.now)),
            _ => WaitRange::ZERO,
        };
        let room = self.time_to_room(e, depth)?;
        Some(pause.both(room).both(dependencies).then(own))
    }

    /// The time until this engine serves, which is on its way or in line. Another one of its model may serve already.
    fn time_until_up(&self, e: &Engine, depth: u8) -> Option<WaitRange> {
        if e.state.is_starting() { self.rest_of_start(e) } else { self.time_to_serve(&e.id.model, depth) }
    }

    /// The time until all direct dependencies serve.
    fn dependencies_served(&self, model: &ModelName, depth: u8) -> Option<WaitRange> {
        let spec = self.planner().spec(model)?;
        let missing = spec.dependencies.iter().filter(|needed| !self.planner().serves(needed));
        missing
            .map(|needed| self.time_to_serve(needed, depth))
            .try_fold(WaitRange::ZERO, |served, next| Some(served.both(next?)))
    }

    /// What is left of a start or wake under way.
    fn rest_of_start(&self, e: &Engine) -> Option<WaitRange> {
        let learned = self.planner().learned_of(&e.id);
        let usual = match &e.state {
            LifecycleState::Waking { level } => learned.wake_range(*level)?,
            _ => learned.start_range()?,
        };
        let rest = usual.left_after(self.age(e.startup_began));
        if !self.builder.is_held_for_rehearsal(e) {
            return Some(rest);
        }
        self.with_rehearsal(e, rest)
    }

    /// The time for a start and then the rehearsal, in which a new engine sleeps and wakes before any request gets it.
    fn with_rehearsal(&self, e: &Engine, start: WaitRange) -> Option<WaitRange> {
        let wake = self.planner().learned_of(&e.id).wake_range(SleepLevel::One)?;
        Some(start.then(self.rehearsed_sleep_time(e)).then(wake))
    }

    /// The time of the start or wake that the engine needs next.
    fn next_start(&self, e: &Engine) -> Option<WaitRange> {
        let learned = self.planner().learned_of(&e.id);
        let level = match &e.state {
            LifecycleState::Asleep { level } | LifecycleState::FallingAsleep { level } => Some(*level),
            LifecycleState::Draining { after_drain: AfterDrain::Sleep(wish), .. } => {
                self.builder.sleep_level(&e.id, *wish)
            }
            _ => None,
        };
        if let Some(level) = level {
            return learned.wake_range(level);
        }
        let start = learned.start_range()?;
        if self.builder.would_rehearse_before_use(e) { self.with_rehearsal(e, start) } else { Some(start) }
    }
}

#[cfg(test)]
mod tests;
