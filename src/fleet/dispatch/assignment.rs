//! Assigns waiters to the engines of a model.
//!
//! Waiters are taken in turn, and each goes to the engine with the fewest leases, so that engines fill evenly. There
//! are two exceptions. Both come from the data path as data, so a journal contains them:
//!
//! * An *ejected* engine, whose requests fail. An engine that fails at once always has the fewest leases, so it would
//!   get nearly all waiters while the working engines are full. It gets no waiter until its pause is over, and then
//!   one, whose answer decides. At most half of the serving engines are ejected, however many fail.
//! * A waiter that only *one* generation of an engine can answer, because that generation holds the response that the
//!   request continues. It waits for a place there while that generation serves. Afterwards no engine knows the
//!   response, and any engine may report that.

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
    pub(in crate::fleet) fn for_model(draft: &PlanBuilder<'_>, model: &ModelName) -> Self {
        if draft.planner.shutdown.is_some() {
            return Self { serving: Vec::new(), awaiting_canary: Vec::new() };
        }
        let limit = draft.planner.spec(model).and_then(|s| s.max_concurrency).unwrap_or(u32::MAX);
        let engines = || draft.planner.engines_of(model);
        let mut may_be_out = engines().filter(|e| e.serves()).count() / 2;
        let seat = |e: &crate::engine::Engine| {
            let out = e.ejected_until.filter(|_| may_be_out > 0);
            may_be_out -= usize::from(out.is_some());
            let open = match out {
                None => limit,
                Some(until) if until <= draft.now => limit.min(e.leases.saturating_add(1)),
                Some(_) => 0,
            };
            let (own, shares) = (Vec::new(), 0);
            let (engine, generation, leases) = (e.id.clone(), e.generation, e.leases);
            AssignableEngine {
                engine,
                generation,
                leases,
                limit,
                unpinned_limit: open,
                pinned_waiters: own,
                unpinned_count: shares,
            }
        };
        let awake = engines().filter(|e| e.serves()).map(seat).collect();
        // `assign` takes the last one first.
        let proves = |e: &&crate::engine::Engine| draft.planner.role.decides() && e.needs_probe();
        let mut proving: Vec<_> = engines().filter(proves).map(|e| e.id.clone()).collect();
        proving.reverse();
        Self { serving: awake, awaiting_canary: proving }
    }

    /// Assigns these waiters to engines, and returns them engine by engine.
    pub(in crate::fleet) fn assign(
        mut self,
        turn: impl Iterator<Item = &'w Waiter>,
    ) -> Vec<AssignedWaiter<'w>> {
        let (mut others, mut canaries) = (Vec::new(), Vec::new());
        for waiter in turn {
            if self.is_full() {
                break;
            }
            if let Some(seat) = self.serving.iter_mut().find(|seat| seat.is_required_by(waiter)) {
                if seat.leases < seat.limit {
                    seat.leases += 1;
                    seat.pinned_waiters.push(waiter);
                }
                continue;
            }
            let free = self.serving.iter_mut().filter(|seat| seat.leases < seat.unpinned_limit);
            if let Some(seat) = free.min_by_key(|seat| seat.leases) {
                seat.leases += 1;
                seat.unpinned_count += 1;
                others.push(waiter);
            } else if waiter.stream
                && let Some(engine) = self.awaiting_canary.pop()
            {
                canaries.push(AssignedWaiter { waiter, engine, canary: true });
            }
        }
        let mut others = others.into_iter();
        let seated = self.serving.into_iter().flat_map(
            |AssignableEngine { engine, pinned_waiters: own, unpinned_count: shares, .. }| {
                let here = own.into_iter().chain(others.by_ref().take(shares)).collect::<Vec<_>>();
                here.into_iter().map(move |waiter| AssignedWaiter {
                    waiter,
                    engine: engine.clone(),
                    canary: false,
                })
            },
        );
        let mut seated: Vec<_> = seated.collect();
        seated.append(&mut canaries);
        seated
    }

    /// Whether no engine can take another waiter.
    pub(in crate::fleet) fn is_full(&self) -> bool {
        self.awaiting_canary.is_empty() && self.serving.iter().all(|seat| seat.leases >= seat.limit)
    }
}

impl AssignableEngine<'_> {
    fn is_required_by(&self, waiter: &Waiter) -> bool {
        let only = waiter.required_engine.as_ref();
        only.is_some_and(|(engine, generation)| *engine == self.engine && *generation == self.generation)
    }
}
