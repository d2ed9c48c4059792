//! What the forecasts of one state have in common.
//!
//! A forecast for each of a thousand models would walk the same accelerators a thousand times. So an accelerator is
//! walked once for all of them, and the parts that depend on the model are added or left out:
//!
//! * The engines that hold its memory, in the order in which they could leave, with the sums of what they free. How
//!   long a shortage lasts is then a binary search. Only where the waiting model has engines there itself, these are
//!   left out one by one.
//! * What engines on their way out release, and what could ever be freed, each as one sum.
//!
//! The times of other models' engines depend on how far the forecast still follows them, so such results are kept for
//! each depth. All of it is discarded with the forecaster.

use std::{
    cell::{OnceCell, RefCell},
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
    rc::Rc,
};

use super::WaitForecaster;
use crate::{
    engine::Engine,
    fleet::{
        plan::place::candidate_sets::AcceleratorSets, quote::WaitRange, state::ledger::amount::ResourceAmount,
    },
    model::{AcceleratorId, EngineId, ModelName},
    units::Bytes,
};

/// Models ahead in line that a forecast looks at.
const MAX_RIVALS: usize = 16;

#[derive(Default)]
pub(super) struct ForecastCache<'a> {
    releases: RefCell<BTreeMap<AcceleratorId, Release>>,
    leaving: RefCell<BTreeMap<(AcceleratorId, u8), Rc<LeavingEngines>>>,
    /// The time until each model serves, by depth.
    times_to_serve: RefCell<BTreeMap<(ModelName, u8), Option<WaitRange>>>,
    first_rivals: OnceCell<Vec<Rival>>,
    in_line: OnceCell<BTreeSet<&'a EngineId>>,
}

/// What becomes free on one accelerator without any further decision, and what ever could.
#[derive(Clone, Copy)]
pub(super) struct Release {
    pub(super) coming: ResourceAmount,
    /// The time until all of it is free.
    pub(super) time: WaitRange,
    /// What engines could ever be made to free.
    pub(super) possible: ResourceAmount,
}

/// The engines that hold memory on one accelerator, in the order in which they could leave.
pub(super) struct LeavingEngines(Vec<LeavingEngine>);

struct LeavingEngine {
    model: ModelName,
    time: WaitRange,
    freed: Bytes,
    /// The time until it and all before it have left, and what they free.
    time_of_all: WaitRange,
    freed_by_all: Bytes,
}

/// An engine at the front of the line that has no memory yet.
pub(super) struct Rival {
    position: usize,
    pub(super) id: EngineId,
    pub(super) candidates: Rc<AcceleratorSets>,
    /// The parts of its turn: its start, its use, and its leaving.
    pub(super) turn: [WaitRange; 3],
}

impl LeavingEngines {
    /// `engines`: each with its time to leave and what it frees.
    fn new(mut engines: Vec<(WaitRange, Bytes, &EngineId)>) -> Self {
        engines.sort_by_key(|(time, freed, id)| (time.likely, Reverse(*freed), *id));
        let mut before: Option<(WaitRange, Bytes)> = None;
        let in_order = engines.into_iter().map(|(time, freed, id)| {
            let (time_of_all, freed_by_all) = before.map_or((time, freed), |(time_before, freed_before)| {
                (time_before.both(time), freed_before + freed)
            });
            before = Some((time_of_all, freed_by_all));
            LeavingEngine { model: id.model.clone(), time, freed, time_of_all, freed_by_all }
        });
        Self(in_order.collect())
    }

    /// The time until they have freed so much; `None` if that is never.
    pub(super) fn time_to_free(&self, short: Bytes) -> Option<WaitRange> {
        let at = self.0.partition_point(|engine| engine.freed_by_all < short);
        self.0.get(at).map(|engine| engine.time_of_all)
    }

    /// The same without the engines of this model.
    pub(super) fn time_to_free_without(&self, model: &ModelName, short: Bytes) -> Option<WaitRange> {
        // All together would not free enough.
        self.time_to_free(short)?;
        let mut freed = Bytes::ZERO;
        let mut time: Option<WaitRange> = None;
        for engine in self.0.iter().filter(|engine| engine.model != *model) {
            time = Some(time.map_or(engine.time, |before| before.both(engine.time)));
            freed += engine.freed;
            if freed >= short {
                return time;
            }
        }
        None
    }
}

impl<'a> WaitForecaster<'a> {
    /// What becomes free on this accelerator without any further decision, and what ever could.
    pub(super) fn release_on(&self, on: &AcceleratorId) -> Release {
        if let Some(known) = self.cache.releases.borrow().get(on) {
            return *known;
        }
        #[cfg(test)]
        walks::record();
        let builder = &self.builder;
        let (mut coming, mut time) = (ResourceAmount::default(), WaitRange::ZERO);
        for e in builder.planner.engines.winding_down_on(on) {
            coming = coming + builder.will_free(e, on);
            time = time.both(self.way_down(e));
        }
        let account = builder.planner.ledger.accelerators.get(on);
        let possible = account.map_or_else(ResourceAmount::default, |account| {
            let engines = account.booked.iter().filter_map(|(id, _)| builder.engine(id));
            engines.map(|e| builder.may_ever_free(e, account)).sum()
        });
        let release = Release { coming, time, possible };
        self.cache.releases.borrow_mut().insert(on.clone(), release);
        release
    }

    /// The engines that could leave this accelerator.
    pub(super) fn leaving_engines(&self, on: &AcceleratorId, depth: u8) -> Rc<LeavingEngines> {
        let key = (on.clone(), depth);
        let known = self.cache.leaving.borrow().get(&key).cloned();
        known.unwrap_or_else(|| {
            #[cfg(test)]
            walks::record();
            let account = self.planner().ledger.accelerators.get(on);
            let engines = self.planner().engines.on_accelerators(std::slice::from_ref(on));
            let leaving = engines.into_iter().filter_map(|e| {
                let all = account?.amount_of(&e.id).bytes;
                Some((self.time_to_leave(e, depth)?, all.saturating_sub(self.kept_by(e)), &e.id))
            });
            let leaving = Rc::new(LeavingEngines::new(leaving.collect()));
            self.cache.leaving.borrow_mut().insert(key, Rc::clone(&leaving));
            leaving
        })
    }

    /// [`Self::find_time_to_serve`], once for each model and depth.
    pub(super) fn time_to_serve(&self, model: &ModelName, depth: u8) -> Option<WaitRange> {
        let key = (model.clone(), depth);
        if let Some(known) = self.cache.times_to_serve.borrow().get(&key) {
            return *known;
        }
        let time = self.find_time_to_serve(model, depth);
        self.cache.times_to_serve.borrow_mut().insert(key, time);
        time
    }

    /// The first engines in line that have no memory yet and stand before this one.
    pub(super) fn rivals_ahead(&self, id: &EngineId) -> impl Iterator<Item = &Rival> {
        let own = self.turn_order.iter().take(MAX_RIVALS).position(|other| other == id);
        let rivals = self.cache.first_rivals.get_or_init(|| {
            let first = self.turn_order.iter().take(MAX_RIVALS).enumerate();
            first.filter_map(|(position, id)| self.rival(position, id)).collect()
        });
        rivals.iter().filter(move |rival| own.is_none_or(|own| rival.position < own))
    }

    /// Returns `None` for an engine that has its memory.
    fn rival(&self, position: usize, id: &EngineId) -> Option<Rival> {
        let is_placed = |e: &Engine| e.state.is_starting() || e.pending_reservation.is_some();
        let e = self.builder.engine(id).filter(|e| !is_placed(e))?;
        let candidates = self.builder.candidate_sets(id, self.planner().engine_spec(id)?);
        let start = self.next_start(e).unwrap_or(WaitRange::ZERO);
        Some(Rival { position, id: id.clone(), candidates, turn: [start, self.turn(e), self.leaving(e)] })
    }

    /// Whether the engine is wanted and not awake.
    pub(super) fn is_in_line(&self, e: &Engine) -> bool {
        let turn_order: &'a [EngineId] = self.turn_order;
        self.cache.in_line.get_or_init(|| turn_order.iter().collect()).contains(&e.id)
    }
}

/// Counts the walks over the engines of an accelerator, so that tests can show that they are few.
#[cfg(test)]
pub(super) mod walks {
    use std::cell::Cell;

    thread_local! {
        static COUNT: Cell<u64> = const { Cell::new(0) };
    }

    pub(super) fn record() {
        COUNT.set(COUNT.get() + 1);
    }

    pub(in crate::fleet::quote) fn count() -> u64 {
        COUNT.get()
    }
}
