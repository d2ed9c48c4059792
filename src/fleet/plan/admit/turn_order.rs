//! The order of turns.
//!
//! This order is the whole fairness between models: highest band first, then the model whose oldest waiter came first.
//! A model whose turn ended for another model stands behind that one until it has been served, whatever the band and
//! however old the backlog. Otherwise it would take its place back before the swap achieves anything.
//!
//! Several engines of one model (`replicas`) are not several models. One of them is the primary: it has the model's
//! place in line, and other models are evicted for it. The others are spares: they start together with the first if
//! there is memory that no model waits for, behind every model that has no engine yet, whatever their band. No engine
//! is evicted for a spare, and spares are evicted first. A user who writes `replicas: 2` has memory for two and wants
//! both; how many a load justifies is a question of scaling, not of the order of turns. Where nothing limits the
//! requests at one engine, no request ever waits for a second one, so waiting alone cannot start it: being in use is
//! enough. A spare that idleness stopped while its model was in use was superfluous, and returns once requests wait. A
//! spare that failed is tried again, ever more rarely if its starts keep failing. The engines of `minReplicas` are no
//! spares: each has its model's place in line, and other models are evicted for it.

use std::{cmp::Reverse, collections::BTreeMap};

use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::plan::{PlanBuilder, Planner},
    model::{EngineId, ModelName},
    units::Tick,
};

/// Sort key of an engine that should be awake: non-spares first; at one place, fewest dependencies first.
type TurnKey = (bool, Reverse<i32>, u32, Tick, usize, EngineId);
/// A place in line; the smallest is first.
type TurnPosition = (Reverse<i32>, Tick);

impl PlanBuilder<'_> {
    /// Returns every engine that is wanted and not awake, in turn order.
    pub(in crate::fleet) fn ordered_wanted_engines(&self) -> Vec<EngineId> {
        let planner = &self.planner;
        let ordered = planner.operations.values().map(|op| &op.model);
        let needed = self.needed_models();
        let models = self.demand.keys().chain(planner.kept_awake.iter()).chain(ordered);
        let models = models.chain(planner.used_models_with_several_engines()).chain(needed.keys().copied());
        let mut models: Vec<&ModelName> = models.collect();
        models.sort_unstable();
        models.dedup();
        let keys = models.into_iter().flat_map(|name| planner.engines_of(name)).filter_map(|e| {
            let model = planner.models.get(&e.id.model)?;
            let spec = model.spec.as_deref().filter(|s| e.id.replica < s.replicas)?;
            if e.serves() {
                return None;
            }
            let position = match self.demand.get(&e.id.model) {
                Some(demand) => Some((Reverse(demand.band), demand.oldest)),
                None if model.keeps_awake(e.id.replica)
                    || self.ordered_awake(&e.id.model)
                    || planner.should_start_as_spare(e, self.now) =>
                {
                    Some((Reverse(spec.priority), model.wanted_since))
                }
                None => None,
            };
            let needed = needed.get(&e.id.model).filter(|_| planner.is_primary(&e.id)).copied();
            let position = position.into_iter().chain(needed).min()?;
            let spare = !planner.may_evict_others(&e.id);
            let replica = if spare { e.id.replica } else { 0 };
            let dependency_count = planner.dependencies.closure(&e.id.model).len();
            Some((spare, position.0, replica, position.1, dependency_count, e.id.clone()))
        });
        let mut keys: Vec<TurnKey> = keys.collect();
        let mut positions: BTreeMap<EngineId, TurnPosition> =
            keys.iter().map(|(_, band, _, oldest, _, id)| (id.clone(), (*band, *oldest))).collect();
        for (_, band, _, oldest, _, id) in keys.iter().filter(|_| !planner.dependencies.is_empty()) {
            for needed in planner.dependencies.closure(&id.model).iter().flat_map(|m| planner.engines_of(m)) {
                positions.entry(needed.id.clone()).or_insert((*band, *oldest));
            }
        }
        for (_, band, _, since, _, id) in &mut keys {
            let Some(e) = self.engine(id) else { continue };
            *since = (*since).max(e.yielded_at);
            let ahead = e.yielded_to.as_ref().and_then(|other| positions.get(other));
            if let Some((other, oldest)) = ahead
                && *oldest <= e.yielded_at
            {
                *band = (*band).max(*other);
                *since = (*since).max(Tick(oldest.0 + 1));
            }
        }
        keys.sort();
        keys.into_iter().map(|(.., id)| id).collect()
    }

    /// Dependencies that must be awake because a dependent is up or starting.
    ///
    /// Each has the place of its first dependent.
    fn needed_models(&self) -> BTreeMap<&ModelName, TurnPosition> {
        let planner = &self.planner;
        let mut needed: BTreeMap<&ModelName, TurnPosition> = BTreeMap::new();
        for name in planner.dependencies.models_with_dependencies().filter(|name| planner.is_up(name)) {
            let position = match (self.demand.get(name), planner.models.get(name)) {
                (Some(demand), _) => (Reverse(demand.band), demand.oldest),
                (None, Some(model)) => {
                    (Reverse(model.spec.as_ref().map_or(0, |spec| spec.priority)), model.wanted_since)
                }
                (None, None) => continue,
            };
            for model in planner.dependencies.closure(name).iter().filter(|model| !planner.serves(model)) {
                needed.entry(model).and_modify(|first| *first = position.min(*first)).or_insert(position);
            }
        }
        needed
    }

    /// Positions of the engines in line, and of their missing dependencies.
    ///
    /// A dependency that does not serve stands with its first dependent, or at its own place if that is earlier.
    pub(in crate::fleet) fn turn_positions_in(&self, turn_order: &[EngineId]) -> BTreeMap<EngineId, usize> {
        let mut positions: BTreeMap<EngineId, usize> =
            turn_order.iter().cloned().enumerate().map(|(position, id)| (id, position)).collect();
        if self.planner.dependencies.is_empty() {
            return positions;
        }
        for (position, id) in turn_order.iter().enumerate() {
            for needed in self.planner.missing_engines(&id.model) {
                positions.entry(needed).and_modify(|known| *known = position.min(*known)).or_insert(position);
            }
        }
        positions
    }

    /// The band of the model's requests, or of its dependents' if that is higher; its priority if it has none.
    pub(in crate::fleet) fn band(&self, id: &EngineId) -> i32 {
        let own_band = self.planner.spec(&id.model).map_or(0, |spec| spec.priority);
        let own_band = self.demand.get(&id.model).map_or(own_band, |demand| demand.band);
        let needing =
            self.planner.dependencies.dependents(&id.model).filter_map(|model| self.demand.get(model));
        needing.map(|demand| demand.band).max().map_or(own_band, |band| own_band.max(band))
    }

    /// Whether `a` stands before `b` in line.
    pub(in crate::fleet) fn goes_before(&self, a: &EngineId, b: &EngineId) -> bool {
        let position = |id: &EngineId| self.turn_positions.get(id).copied().unwrap_or(usize::MAX);
        position(a) < position(b)
    }
}

impl Planner {
    /// The engine for which other models may be evicted.
    ///
    /// In this order: an awake engine, even if its stub's gate is closed; a starting one; a sleeper; one that is going
    /// down; the lowest cold replica; an engine in back-off.
    pub(in crate::fleet) fn primary_engine(&self, model: &ModelName) -> Option<&Engine> {
        let rank = |e: &Engine| match &e.state {
            _ if e.serves() && e.failing_since.is_none() => 0,
            _ if e.serves() || e.is_blocked_by_stub() => 1,
            state if state.is_starting() || e.pending_reservation.is_some() => 2,
            LifecycleState::Asleep { .. } => 3,
            state if state.is_winding_down() => 4,
            LifecycleState::Backoff { .. } => 6,
            _ => 5,
        };
        self.replicas_of(model).min_by_key(|e| (rank(e), e.id.replica))
    }

    pub(in crate::fleet) fn is_primary(&self, id: &EngineId) -> bool {
        self.primary_engine(&id.model).is_some_and(|leader| leader.id == *id)
    }

    /// Whether others may be evicted for the engine: it is the primary, or one of `minReplicas`.
    pub(in crate::fleet) fn may_evict_others(&self, id: &EngineId) -> bool {
        self.models.get(&id.model).is_some_and(|model| id.replica < model.min_running())
            || self.is_primary(id)
    }

    /// Whether the engine serves, or would with an open stub gate, beside the primary of its model.
    pub(in crate::fleet) fn is_spare(&self, e: &Engine) -> bool {
        (e.serves() || e.is_blocked_by_stub()) && !self.may_evict_others(&e.id)
    }

    /// Whether a spare should start: its model is in use, and idleness did not stop the spare.
    ///
    /// That is, it has not been awake since that use began, it yielded to another model, or it failed.
    pub(in crate::fleet) fn should_start_as_spare(&self, e: &Engine, now: Tick) -> bool {
        let awake = || self.engines_of(&e.id.model).filter(|other| other.serves());
        let serving_since = awake().map(|other| other.turn_start).min();
        let may_start = serving_since.is_some_and(|began| e.turn_start < began)
            || e.yielded_at > e.turn_start
            || e.failures_since_serving > 0;
        may_start && e.spare_start_at() <= now && awake().any(|other| self.in_use_count(other) > 0)
    }

    /// The models in use that have several engines. A model that no request uses starts no spare.
    fn used_models_with_several_engines(&self) -> impl Iterator<Item = &ModelName> {
        let used_elsewhere =
            self.remote_demand.models_in_flight().filter(|model| self.engines.has_several_engines(model));
        self.engines.leased_replicas().map(|id| &id.model).chain(used_elsewhere)
    }

    fn replicas_of<'a>(&'a self, model: &ModelName) -> impl Iterator<Item = &'a Engine> {
        let replicas = self.spec(model).map_or(0, |spec| spec.replicas);
        self.engines_of(model).filter(move |e| e.id.replica < replicas)
    }
}
