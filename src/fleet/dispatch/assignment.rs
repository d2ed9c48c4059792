//! Assigns waiters to the engines of a model.
//!
//! Waiters are taken in turn, and each goes to the engine with the fewest leases, so that engines fill evenly. There
//! are three exceptions. All come from the data path as data, so a journal contains them:
//!
//! * An *ejected* engine, whose requests fail. An engine that fails at once always has the fewest leases, so it would
//!   get nearly all waiters while the working engines are full. It gets no waiter until its pause is over, and then
//!   one, whose answer decides. At most half of the serving engines are ejected, however many fail.
//! * A waiter that only *one* generation of an engine can answer, because that generation holds the response that the
//!   request continues. It waits for a place there while that generation serves. Afterwards no engine knows the
//!   response, and any engine may report that.
//! * A *saturated* engine, which gets waiters only after all others, and only up to its limit
//!   ([`SaturationLimit`](crate::engine::saturation_limit::SaturationLimit)): one when a lease ends, and more once it
//!   reports a lower load. The limit is at least one lease and ends by itself, so no waiter starves.

use crate::{
    fleet::{event::Waiter, plan::PlanBuilder},
    model::{EngineId, ModelName},
    units::Generation,
};

/// The free places of one model's engines at this moment.
pub(in crate::fleet) struct WaiterAssigner<'w> {
    serving: Vec<AssignableEngine<'w>>,
    /// Engines that must prove themselves first, with one stream each.
    awaiting_canary: Vec<EngineId>,
}

struct AssignableEngine<'w> {
    engine: EngineId,
    generation: Generation,
    leases: u32,
    is_saturated: bool,
    /// Maximum number of leases; `unpinned_limit`: the maximum for waiters that may go to any engine.
    limit: u32,
    unpinned_limit: u32,
    /// Waiters that require this engine; `unpinned_count`: how many of the others it gets.
    pinned_waiters: Vec<&'w Waiter>,
    unpinned_count: usize,
}

/// A waiter with the engine that serves it now.
pub(in crate::fleet) struct AssignedWaiter<'w> {
    pub(in crate::fleet) waiter: &'w Waiter,
    pub(in crate::fleet) engine: EngineId,
    pub(in crate::fleet) canary: bool,
}

impl<'w> WaiterAssigner<'w> {
    pub(in crate::fleet) fn for_model(builder: &PlanBuilder<'_>, model: &ModelName) -> Self {
        if builder.planner.shutdown.is_some() {
            return Self { serving: Vec::new(), awaiting_canary: Vec::new() };
        }
        let configured = builder.planner.spec(model).and_then(|s| s.max_concurrency).unwrap_or(u32::MAX);
        let engines = || builder.planner.engines_of(model);
        let mut may_be_out = engines().filter(|e| e.serves()).count() / 2;
        let assignable = |e: &crate::engine::Engine| {
            let out = e.ejected_until.filter(|_| may_be_out > 0);
            may_be_out -= usize::from(out.is_some());
            let limit = e.max_leases(configured, builder.now);
            let open = match out {
                None => limit,
                Some(until) if until <= builder.now => limit.min(e.leases.saturating_add(1)),
                Some(_) => 0,
            };
            let (pinned_waiters, unpinned_count) = (Vec::new(), 0);
            let (engine, generation, leases) = (e.id.clone(), e.generation, e.leases);
            AssignableEngine {
                engine,
                generation,
                leases,
                is_saturated: e.saturation_at(builder.now).is_some(),
                limit,
                unpinned_limit: open,
                pinned_waiters,
                unpinned_count,
            }
        };
        let serving = engines().filter(|e| e.serves()).map(assignable).collect();
        // A new engine that rehearses its sleep first proves itself without a request.
        let needs_probe = |e: &&crate::engine::Engine| {
            builder.planner.role.decides() && e.needs_probe() && !builder.is_held_for_rehearsal(e)
        };
        let mut awaiting_canary: Vec<_> = engines().filter(needs_probe).map(|e| e.id.clone()).collect();
        // `assign` takes the last one first.
        awaiting_canary.reverse();
        Self { serving, awaiting_canary }
    }

    /// Assigns these waiters to engines, and returns them engine by engine.
    pub(in crate::fleet) fn assign(
        mut self,
        turn: impl Iterator<Item = &'w Waiter>,
    ) -> Vec<AssignedWaiter<'w>> {
        let (mut unpinned, mut canaries) = (Vec::new(), Vec::new());
        for waiter in turn {
            if self.is_full() {
                break;
            }
            if let Some(engine) = self.serving.iter_mut().find(|engine| engine.is_required_by(waiter)) {
                if engine.leases < engine.limit {
                    engine.leases += 1;
                    engine.pinned_waiters.push(waiter);
                }
                continue;
            }
            let free = self.serving.iter_mut().filter(|engine| engine.leases < engine.unpinned_limit);
            if let Some(engine) = free.min_by_key(|engine| (engine.is_saturated, engine.leases)) {
                engine.leases += 1;
                engine.unpinned_count += 1;
                unpinned.push(waiter);
            } else if waiter.stream
                && let Some(engine) = self.awaiting_canary.pop()
            {
                canaries.push(AssignedWaiter { waiter, engine, canary: true });
            }
        }
        let mut unpinned = unpinned.into_iter();
        let assigned = self.serving.into_iter().flat_map(
            |AssignableEngine { engine, pinned_waiters, unpinned_count, .. }| {
                let waiters = pinned_waiters
                    .into_iter()
                    .chain(unpinned.by_ref().take(unpinned_count))
                    .collect::<Vec<_>>();
                waiters.into_iter().map(move |waiter| AssignedWaiter {
                    waiter,
                    engine: engine.clone(),
                    canary: false,
                })
            },
        );
        let mut assigned: Vec<_> = assigned.collect();
        assigned.append(&mut canaries);
        assigned
    }

    /// Whether no engine can take another waiter.
    pub(in crate::fleet) fn is_full(&self) -> bool {
        self.awaiting_canary.is_empty() && self.serving.iter().all(|engine| engine.leases >= engine.limit)
    }
}

impl AssignableEngine<'_> {
    fn is_required_by(&self, waiter: &Waiter) -> bool {
        let only = waiter.required_engine.as_ref();
        only.is_some_and(|(engine, generation)| *engine == self.engine && *generation == self.generation)
    }
}
