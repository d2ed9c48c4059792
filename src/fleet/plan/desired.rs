//! Replicas that saturation asks for: how many engines of each variant run while their model is in use.
//!
//! The configuration says which models are scaled: these have targets and no spares. A target arrives as
//! [`Event::Desired`](crate::fleet::event::Event::Desired). It starts nothing by itself: requests, `minReplicas` and
//! operators start a model's first engine, and idleness ends its last. Between these two a model has as many engines as
//! its targets say:
//!
//! * Too few: the lowest replica numbers start, sleepers first, behind every model that has no engine yet. They take
//!   free memory, wait for memory that is being released, and while their model is in use they put away engines of
//!   other models that are idle and no longer protected (`saturation.mayEvict`). They never take the place of an engine
//!   in use. Each plan tries a refused replica again.
//! * Too many: the surplus drains and goes to sleep, or stops where it cannot sleep. First the engines that no request
//!   uses, then the highest replica numbers. One engine of the model always goes on serving, and those that are pinned
//!   or in `minReplicas` stay. A drain is called back if the target rises again, unless another model relies on it.
//!
//! A variant without a target keeps what it has. So nothing ends or starts by saturation before the first targets of a
//! new leader.

mod surplus;

use std::{collections::BTreeSet, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::{
    engine::{Engine, state::LifecycleState},
    fleet::{
        command::CloseReason,
        plan::{ModelRecord, Planner, admit::MAX_FAILED_STARTS, leadership::LeadershipRole},
    },
    model::{EngineId, ModelName, VariantName},
    units::{Millis, Tick},
};

/// How many engines one variant should have, and why.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::fleet) struct ReplicaTarget {
    pub(in crate::fleet) replicas: u32,
    pub(in crate::fleet) reason: String,
}

/// The models that are scaled, and those of them whose engines differ from their targets.
///
/// A plan looks at the latter alone. Derived from the other state, so two states never differ by it.
#[derive(Clone, Debug, Default)]
pub(in crate::fleet) struct ScalingIndex {
    scaled: Arc<BTreeSet<ModelName>>,
    unmet: Arc<BTreeSet<ModelName>>,
}

impl PartialEq for ScalingIndex {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl ScalingIndex {
    pub(in crate::fleet) fn from_planner(planner: &Planner) -> Self {
        let scaled = planner.models.iter().filter(|(_, model)| model.is_scaled());
        let scaled: BTreeSet<ModelName> = scaled.map(|(name, _)| name.clone()).collect();
        let unmet = scaled.iter().filter(|name| planner.is_unmet(name)).cloned().collect();
        Self { scaled: Arc::new(scaled), unmet: Arc::new(unmet) }
    }

    /// The models whose engines differ from their targets.
    pub(in crate::fleet) fn unmet(&self) -> impl Iterator<Item = &ModelName> {
        self.unmet.iter()
    }

    fn set(index: &mut Arc<BTreeSet<ModelName>>, model: &ModelName, is_in: bool) {
        if index.contains(model) == is_in {
            return;
        }
        let index = Arc::make_mut(index);
        if is_in {
            index.insert(model.clone());
        } else {
            index.remove(model);
        }
    }
}

/// Whether the engine is awake, or will be without any further decision.
pub(in crate::fleet) fn is_replica_up(e: &Engine) -> bool {
    e.pending_reservation.is_some() || e.state.is_starting() || is_awake(e) || e.is_rehearsing()
}

fn is_awake(e: &Engine) -> bool {
    e.state == LifecycleState::Awake
}

/// The order in which a variant's engines count towards its target: the smallest first.
///
/// An engine that fails keeps its slot through its back-off. If another took it, a broken image would be started under
/// every replica number in turn.
fn slot_rank(e: &Engine) -> u8 {
    match &e.state {
        _ if is_replica_up(e) => 0,
        LifecycleState::Draining { reason: CloseReason::Idle | CloseReason::ScaledDown, .. } => 1,
        LifecycleState::Asleep { .. } => 2,
        state if state.is_winding_down() => 3,
        LifecycleState::Backoff { .. } => 4,
        _ => 5,
    }
}

impl Planner {
    /// Whether targets say how many engines of this model run, even if there are none yet.
    pub(in crate::fleet) fn is_scaled(&self, model: &ModelName) -> bool {
        self.scaling.scaled.contains(model)
    }

    pub(in crate::fleet) fn set_target(
        &mut self,
        model: &ModelName,
        variant: &VariantName,
        replicas: u32,
        reason: &str,
    ) {
        let target = ReplicaTarget { replicas, reason: reason.to_owned() };
        let has_targets =
            self.spec(model).is_some_and(|spec| spec.scaled && spec.fingerprint_of(variant).is_some());
        let is_same = self.models.get(model).is_some_and(|m| m.targets.get(variant) == Some(&target));
        // Only the leader has targets: the next leader gets its own.
        if self.role == LeadershipRole::Follower || !has_targets || is_same {
            return;
        }
        if let Some(record) = Arc::make_mut(&mut self.models).get_mut(model) {
            record.targets.insert(variant.clone(), target);
            self.engines.mark_model_dirty(model);
        }
    }

    /// Removes all targets, because another gateway decides from now on.
    pub(in crate::fleet) fn remove_all_targets(&mut self) {
        for model in self.scaling.scaled.iter() {
            if let Some(record) = Arc::make_mut(&mut self.models).get_mut(model) {
                record.targets.clear();
            }
            self.engines.mark_model_dirty(model);
        }
        self.scaling.unmet = Arc::default();
    }

    /// Lowers the target of an engine that idleness ends, so that the next request does not bring the engine back.
    pub(in crate::fleet) fn lower_target_of_idle(&mut self, id: &EngineId) {
        let remaining =
            self.engines_of(&id.model).filter(|e| e.id.variant == id.variant && is_replica_up(e)).count();
        let remaining = u32::try_from(remaining).unwrap_or(u32::MAX);
        let is_lower = |target: &ReplicaTarget| remaining < target.replicas;
        let targets = self.models.get(&id.model).map(|model| &model.targets);
        if targets.and_then(|targets| targets.get(&id.variant)).is_some_and(is_lower)
            && let Some(record) = Arc::make_mut(&mut self.models).get_mut(&id.model)
        {
            let reason = "no request used the model for its idle timeout".to_owned();
            record.targets.insert(id.variant.clone(), ReplicaTarget { replicas: remaining, reason });
            self.engines.mark_model_dirty(&id.model);
        }
    }

    /// How many engines this variant should have while its model is in use; `None` without a target.
    ///
    /// Not less than are pinned or in `minReplicas`, and not more than are configured.
    pub(in crate::fleet) fn desired_replicas(&self, model: &ModelName, variant: &VariantName) -> Option<u32> {
        let record = self.models.get(model)?;
        let target = record.targets.get(variant)?;
        let most = record.spec.as_ref()?.replicas_of(variant);
        Some(target.replicas.max(record.replica_floor(variant)).min(most))
    }

    fn targeted_variants(&self, model: &ModelName) -> impl Iterator<Item = (&VariantName, u32)> {
        let variants = self.models.get(model).into_iter().flat_map(|record| record.targets.keys());
        variants.filter_map(move |variant| Some((variant, self.desired_replicas(model, variant)?)))
    }

    fn has_awake_engine(&self, model: &ModelName) -> bool {
        self.engines_of(model).any(is_awake)
    }

    /// Whether the model's engines may differ from its targets.
    ///
    /// Depends on the engines' states and the targets alone, because the index changes only with these.
    fn is_unmet(&self, model: &ModelName) -> bool {
        let up: Vec<&Engine> = self.engines_of(model).filter(|e| is_replica_up(e)).collect();
        let is_serving = self.has_awake_engine(model);
        self.targeted_variants(model).any(|(variant, desired)| {
            let count = up.iter().filter(|e| e.id.variant == *variant).count();
            let desired = desired as usize;
            (count < desired && is_serving) || (count > desired && up.len() > 1)
        })
    }

    /// Brings the index up to date with the model's configuration.
    ///
    /// Its engines count as changed, too, and [`Self::refresh_scaling`] compares them with the targets.
    pub(in crate::fleet) fn refresh_scaled(&mut self, model: &ModelName) {
        let is_scaled = self.models.get(model).is_some_and(ModelRecord::is_scaled);
        ScalingIndex::set(&mut self.scaling.scaled, model, is_scaled);
        if !is_scaled {
            ScalingIndex::set(&mut self.scaling.unmet, model, false);
        }
    }

    /// Brings the index up to date with these engines, which are ordered by name.
    pub(in crate::fleet) fn refresh_scaling(&mut self, touched: &[EngineId]) {
        let mut last: Option<&ModelName> = None;
        for EngineId { model, .. } in touched {
            if last == Some(model) || !self.is_scaled(model) {
                continue;
            }
            last = Some(model);
            let is_unmet = self.is_unmet(model);
            ScalingIndex::set(&mut self.scaling.unmet, model, is_unmet);
        }
    }

    /// Whether the index equals a newly built one.
    pub(in crate::fleet) fn is_scaling_index_consistent(&self) -> bool {
        let anew = ScalingIndex::from_planner(self);
        self.scaling.scaled == anew.scaled && self.scaling.unmet == anew.unmet
    }

    /// Returns the engines that count towards the target of this variant, whatever their state.
    fn slots_of(&self, model: &ModelName, variant: &VariantName) -> Vec<&Engine> {
        let desired = self.desired_replicas(model, variant).unwrap_or(0);
        let most = self.spec(model).map_or(0, |spec| spec.replicas_of(variant));
        let of_variant = self.engines_of(model).filter(|e| e.id.variant == *variant && e.id.replica < most);
        let mut engines: Vec<&Engine> = of_variant.collect();
        engines.sort_by_key(|e| (slot_rank(e), e.id.replica));
        engines.truncate(desired as usize);
        engines
    }

    /// Returns the engines that should start because targets ask for more than are up.
    pub(in crate::fleet) fn missing_replicas(&self, model: &ModelName, now: Tick) -> Vec<&EngineId> {
        if !self.is_scaled(model) || !self.has_awake_engine(model) {
            return Vec::new();
        }
        let slots = self.targeted_variants(model).flat_map(|(variant, _)| self.slots_of(model, variant));
        slots.filter(|e| !is_replica_up(e) && e.spare_start_at() <= now).map(|e| &e.id).collect()
    }

    /// Returns the engine that the variant of a scaled model would get next, if its starts keep failing.
    ///
    /// That counts against it for a while. So no target waits for it, and other variants are tried.
    pub(in crate::fleet) fn failing_replica(
        &self,
        model: &ModelName,
        variant: &VariantName,
    ) -> Option<&Engine> {
        let most = self.spec(model).filter(|spec| spec.scaled)?.replicas_of(variant);
        let missing = self
            .engines_of(model)
            .filter(|e| e.id.variant == *variant && e.id.replica < most && !is_awake(e));
        let next = missing.min_by_key(|e| (slot_rank(e), e.id.replica))?;
        let is_permanent = next.failure().is_some_and(|failure| failure.cause.is_permanent());
        let keeps_failing = next.failures_since_serving >= MAX_FAILED_STARTS || is_permanent;
        (keeps_failing && next.has_failed_recently(self.last_planned)).then_some(next)
    }

    fn is_within_target(&self, id: &EngineId) -> bool {
        self.slots_of(&id.model, &id.variant).iter().any(|e| e.id == *id)
    }

    /// Whether the engine comes on top of the one that has its model's place in line, because of a target.
    pub(in crate::fleet) fn is_further_replica(&self, id: &EngineId) -> bool {
        self.is_scaled(&id.model) && self.has_awake_engine(&id.model) && !self.may_evict_others(id)
    }

    /// Until when an idle engine of a model with targets keeps its place against replicas of other models.
    pub(in crate::fleet) fn replica_rest_end(&self, e: &Engine) -> Option<Tick> {
        self.is_scaled(&e.id.model).then(|| e.idle_since() + self.settings.turns.residency)
    }

    /// When idleness of `after` ends this engine.
    ///
    /// In a scaled model, an engine without requests is no reason to have fewer: then only the idleness of all awake
    /// engines counts, and of those that wind down.
    pub(in crate::fleet) fn idle_replica_at(&self, e: &Engine, after: Millis) -> Option<Tick> {
        let own = self.idle_at(e, after)?;
        if !self.is_scaled(&e.id.model) {
            return Some(own);
        }
        let mut used =
            self.engines_of(&e.id.model).filter(|other| is_awake(other) || other.state.is_winding_down());
        used.try_fold(own, |latest, other| {
            if self.in_use_count(other) > 0 {
                return None;
            }
            Some(latest.max(self.idle_at(other, after)?))
        })
    }
}
