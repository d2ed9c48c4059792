//! The order of turns.
//!
//! It is the whole fairness: highest band first, then the model whose oldest waiter came first. A model whose turn was
//! ended for another stands behind that one until it has been served, whatever its band and however old its backlog:
//! else it would take its place back before anybody came of the swap.

use std::{cmp::Reverse, collections::BTreeMap};

use super::plan::Draft;
use crate::{model::EngineId, units::Tick};

/// A model that should be awake, with its place in line.
type Turn = (Reverse<i32>, u32, Tick, EngineId);

impl Draft<'_> {
    /// Every engine that is wanted and not awake, the first in line first.
    pub(super) fn wanted_in_order(&self) -> Vec<EngineId> {
        let wanted = self.planner.engines.values().filter_map(|e| {
            let model = self.planner.models.get(&e.id.model)?;
            let spec = model.spec.as_ref().filter(|s| e.id.replica < s.replicas)?;
            if e.serves() {
                return None;
            }
            let place = match self.demand.get(&e.id.model) {
                Some(demand) => (demand.band, demand.oldest),
                None if model.pinned() || self.ordered_awake(&e.id.model) => (spec.priority, model.since),
                None => return None,
            };
            Some((Reverse(place.0), e.id.replica, place.1, e.id.clone()))
        });
        let mut line: Vec<Turn> = wanted.collect();
        let asked: BTreeMap<EngineId, (Reverse<i32>, Tick)> =
            line.iter().map(|(band, _, oldest, id)| (id.clone(), (*band, *oldest))).collect();
        for (band, _, place, id) in &mut line {
            let Some(e) = self.engine(id) else { continue };
            *place = (*place).max(e.yielded);
            let ahead = e.yielded_to.as_ref().and_then(|other| asked.get(other));
            if let Some((other, oldest)) = ahead
                && *oldest <= e.yielded
            {
                *band = (*band).max(*other);
                *place = (*place).max(Tick(oldest.0 + 1));
            }
        }
        line.sort();
        line.into_iter().map(|(.., id)| id).collect()
    }

    /// The band in which somebody asks for a model, or would.
    pub(super) fn band(&self, id: &EngineId) -> i32 {
        let own = self.planner.spec(&id.model).map_or(0, |spec| spec.priority);
        self.demand.get(&id.model).map_or(own, |demand| demand.band)
    }

    /// Whether `a` stands before `b` in line.
    pub(super) fn goes_before(&self, a: &EngineId, b: &EngineId) -> bool {
        let place = |id: &EngineId| self.line.iter().position(|e| e == id).unwrap_or(usize::MAX);
        place(a) < place(b)
    }
}
