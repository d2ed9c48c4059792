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
//! spares: each has its model's place in line, and other models are evicted for it. A model that is scaled
//! ([`crate::fleet::plan::desired`]) has no spares either, even before its first target: the replicas that its targets
//! ask for stand between the primaries and the spares of all models.
//!
//! Of several variants, the primary is of the one that serves or starts. If none does, it is of the cheapest that fits;
//! variants that a target asks for go before the others, and a variant whose start failed a short time ago goes behind
//! them.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet},
};

use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::plan::{PlanBuilder, Planner, desired::is_replica_up},
    model::{EngineId, ModelName, VariantName},
    units::Tick,
};

/// In which round an engine gets its turn, and what may be evicted for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::fleet) enum AdmissionClass {
    /// It has its model's place in line: other models are evicted for it as their turns allow.
    First,
    /// A target asks for it: at most idle engines are evicted for it.
    Desired,
    /// It uses free memory that no model waits for.
    Spare,
}

/// Sort key of an engine that should be awake: by class; at one place, fewest dependencies first.
type TurnKey = (AdmissionClass, Reverse<i32>, u32, Tick, usize, EngineId);
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
        let mut models: Vec<&ModelName> = models.chain(planner.scaling.unmet()).collect();
        models.sort_unstable();
        models.dedup();
        let desired: BTreeSet<&EngineId> =
            models.iter().flat_map(|name| planner.missing_replicas(name, self.now)).collect();
        // Checked first: each plan looks at all engines that are kept awake, and most of them serve.
        let missing = models.into_iter().flat_map(|name| planner.engines_of(name)).filter(|e| !e.serves());
        let keys = missing.filter_map(|e| {
            let model = planner.models.get(&e.id.model)?;
            let spec = planner.engine_spec(&e.id).filter(|s| e.id.replica < s.replicas)?;
            let class = planner.admission_class(&e.id);
            let is_desired = desired.contains(&e.id);
            let position = match self.demand.get(&e.id.model) {
                // In a model that is scaled, requests alone start no more than the first engine.
                Some(demand)
                    if is_desired || class == AdmissionClass::First || planner.may_be_spare(&e.id) =>
                {
                    Some((Reverse(demand.band), demand.oldest))
                }
                Some(_) => None,
                None if is_desired
                    || model.keeps_awake(&e.id)
                    || (class == AdmissionClass::First && self.ordered_awake(&e.id.model))
                    || (planner.may_be_spare(&e.id)
                        && (self.ordered_awake(&e.id.model)
                            || planner.should_start_as_spare(e, self.now))) =>
                {
                    Some((Reverse(spec.priority), model.wanted_since))
                }
                None => None,
            };
            let needed = needed.get(&e.id.model).filter(|_| planner.is_primary(&e.id)).copied();
            let position = position.into_iter().chain(needed).min()?;
            let replica = if class == AdmissionClass::First { 0 } else { e.id.replica };
            let dependency_count = planner.dependencies.closure(&e.id.model).len();
            Some((class, position.0, replica, position.1, dependency_count, e.id.clone()))
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
        let first = self.replicas_of(model).min_by_key(|e| (primary_rank(e), e.id.replica));
        let variants = self.variant_specs.of_model(model);
        if variants.is_empty() || first.is_some_and(|e| primary_rank(e) <= RANK_STARTING) {
            return first;
        }
        // None runs. The variants are ranked once each, because a model may have many engines.
        let best = variants.iter().filter_map(|(name, _)| self.best_engine_of(model, name));
        best.min_by_key(|e| self.variant_rank(&e.id))
    }

    /// The engine of this variant that suits best as the primary of its model.
    fn best_engine_of(&self, model: &ModelName, variant: &VariantName) -> Option<&Engine> {
        let engines = self.replicas_of(model).filter(|e| e.id.variant == *variant);
        engines.min_by_key(|e| (primary_rank(e), e.id.replica))
    }

    /// Place of a variant among those of its model, none of which runs; the smallest is tried first.
    fn variant_rank(&self, id: &EngineId) -> VariantRank {
        let variants = self.variant_specs.of_model(&id.model);
        let by_cost = variants.iter().position(|(name, _)| *name == id.variant);
        let fits = self.engine_spec(id).is_some_and(|spec| self.could_ever_hold(spec));
        let has_failed = self
            .engines_of(&id.model)
            .filter(|e| e.id.variant == id.variant)
            .any(|e| e.has_failed_recently(self.last_planned));
        let is_targeted = self.desired_replicas(&id.model, &id.variant).is_some_and(|desired| desired > 0);
        VariantRank {
            fits_nowhere: !fits,
            has_failed,
            is_untargeted: !is_targeted,
            by_cost: by_cost.unwrap_or(usize::MAX),
        }
    }

    /// Returns one engine of each other variant that could be the model's first instead of this one.
    ///
    /// None if an engine of the model runs or is about to, or if this engine must run in any case.
    pub(in crate::fleet) fn other_variants(&self, id: &EngineId) -> Vec<EngineId> {
        let variants = self.variant_specs.of_model(&id.model);
        if variants.len() < 2 || self.is_kept_awake(id) || self.engines_of(&id.model).any(is_replica_up) {
            return Vec::new();
        }
        let others = variants.iter().map(|(name, _)| name).filter(|name| **name != id.variant);
        let best = others.filter_map(|name| self.best_engine_of(&id.model, name));
        let mut others: Vec<(VariantRank, &EngineId)> =
            best.map(|e| (self.variant_rank(&e.id), &e.id)).collect();
        others.sort_unstable();
        others.into_iter().map(|(_, id)| id.clone()).collect()
    }

    pub(in crate::fleet) fn is_primary(&self, id: &EngineId) -> bool {
        self.primary_engine(&id.model).is_some_and(|leader| leader.id == *id)
    }

    /// Whether others may be evicted for the engine: it is the primary, or one of `minReplicas`.
    pub(in crate::fleet) fn may_evict_others(&self, id: &EngineId) -> bool {
        self.models.get(&id.model).is_some_and(|model| id.replica < model.min_running_of(&id.variant))
            || self.is_primary(id)
    }

    /// In which round the engine gets its turn.
    pub(in crate::fleet) fn admission_class(&self, id: &EngineId) -> AdmissionClass {
        if self.may_evict_others(id) {
            AdmissionClass::First
        } else if self.is_scaled(&id.model) {
            AdmissionClass::Desired
        } else {
            AdmissionClass::Spare
        }
    }

    /// Whether the engine serves, or would with an open stub gate, beside the primary of its model, and no target asks
    /// for it.
    pub(in crate::fleet) fn is_spare(&self, e: &Engine) -> bool {
        (e.serves() || e.is_blocked_by_stub()) && self.admission_class(&e.id) == AdmissionClass::Spare
    }

    /// Whether free memory alone is a reason to start the engine: its model is not scaled, and its variant is the one
    /// that runs.
    fn may_be_spare(&self, id: &EngineId) -> bool {
        !self.is_scaled(&id.model)
            && (self.variant_specs.of_model(&id.model).is_empty()
                || self.primary_engine(&id.model).is_some_and(|primary| primary.id.variant == id.variant))
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
        let used = self.engines.leased_replicas().map(|id| &id.model).chain(used_elsewhere);
        used.filter(|model| !self.is_scaled(model))
    }

    /// Returns the configured engines of the model.
    fn replicas_of<'a>(&'a self, model: &ModelName) -> impl Iterator<Item = &'a Engine> + use<'a> {
        let spec = self.spec(model);
        self.engines_of(model)
            .filter(move |e| spec.is_some_and(|spec| e.id.replica < spec.replicas_of(&e.id.variant)))
    }
}

/// Rank of an engine that is on its way to serve: one with a larger rank does not run.
const RANK_STARTING: u8 = 2;

/// How well an engine suits as the primary of its model; the smallest suits best.
fn primary_rank(e: &Engine) -> u8 {
    match &e.state {
        _ if e.serves() && e.failing_since.is_none() => 0,
        _ if e.serves() || e.is_blocked_by_stub() => 1,
        state if state.is_starting() || e.pending_reservation.is_some() || e.is_rehearsing() => RANK_STARTING,
        LifecycleState::Asleep { .. } => 3,
        state if state.is_winding_down() => 4,
        LifecycleState::Backoff { .. } => 6,
        _ => 5,
    }
}

/// Place of a variant among those of its model; the fields count in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct VariantRank {
    fits_nowhere: bool,
    has_failed: bool,
    is_untargeted: bool,
    by_cost: usize,
}
