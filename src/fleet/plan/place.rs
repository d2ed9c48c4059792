//! Placement: whether a candidate set of accelerators has room for an engine.

pub(in crate::fleet) mod candidate_sets;
pub(in crate::fleet) mod feasibility;

mod accelerator_sets;
mod candidates;

use std::ops::ControlFlow;

use crate::{
    engine::{Engine, ProbeState, state::LifecycleState},
    fleet::{
        plan::PlanBuilder,
        state::ledger::{AcceleratorAccount, amount::ResourceAmount},
    },
    model::{AcceleratorId, EngineId, EvictionPolicy, ModelSpec},
    units::{Bytes, Millis},
};

/// One way to place an engine.
#[derive(Clone, Debug)]
pub(in crate::fleet) struct PlacementCandidate {
    pub(in crate::fleet) accelerators: Vec<AcceleratorId>,
    /// Amount that the engine will reserve and take on each of them.
    pub(in crate::fleet) need: ResourceAmount,
}

/// Whether a candidate has room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::fleet) enum PlacementStatus {
    /// The engine can start there now.
    Ready,
    /// An engine there measures free memory, or is about to change it.
    Blocked {
        by: EngineId,
    },
    /// The ledger has room; the meter was not read since the last change.
    MeterStale {
        accelerator: AcceleratorId,
    },
    /// The ledger has room; the meter does not show it as free yet.
    AwaitingRelease {
        accelerator: AcceleratorId,
        after: Millis,
        missing: Bytes,
    },
    /// Engines that are going down will make room.
    Freeing,
    NoRoom,
}

impl PlanBuilder<'_> {
    /// Returns the shortfalls on one accelerator: beyond the free amount, and beyond what will be free.
    ///
    /// The second counts what engines on their way out will release, so it is never more than the first.
    pub(in crate::fleet) fn shortfalls(
        &self,
        id: &EngineId,
        candidate: &PlacementCandidate,
        on: &AcceleratorId,
    ) -> (ResourceAmount, ResourceAmount) {
        self.shortfalls_with(id, candidate, on, self.freeing_amount(id, on))
    }

    /// The same. `coming`: what other engines on their way out will release there.
    pub(in crate::fleet) fn shortfalls_with(
        &self,
        id: &EngineId,
        candidate: &PlacementCandidate,
        on: &AcceleratorId,
        coming: ResourceAmount,
    ) -> (ResourceAmount, ResourceAmount) {
        let Some(account) = self.planner.ledger.accelerators.get(on) else {
            return (candidate.need, candidate.need);
        };
        let claimed = self.claims.get(on).copied().unwrap_or_default();
        let extra = candidate.need.saturating_sub(account.amount_of(id));
        let free = self.free_amount(id, on, account);
        let most = (free + coming).saturating_sub(claimed);
        (
            extra.saturating_sub(free.component_min(most)),
            extra.saturating_sub((free + coming).component_min(most)),
        )
    }

    /// Amount that is neither reserved nor known to be used by others.
    fn free_amount(&self, id: &EngineId, on: &AcceleratorId, account: &AcceleratorAccount) -> ResourceAmount {
        let mut free = account.free();
        if account.is_usage_confirmed() {
            free = free.min(
                account
                    .capacity
                    .saturating_sub(self.used_by_others(id, on))
                    .saturating_sub(account.booked_by(id)),
            );
        }
        ResourceAmount { bytes: free, units: account.free_units() }
    }

    /// Memory that others use beside this engine.
    ///
    /// If the meter names no engines and several sleep, this engine's excess over its declared residue may belong to
    /// another one, and counts as such.
    fn used_by_others(&self, id: &EngineId, on: &AcceleratorId) -> Bytes {
        let Some(account) = self.planner.ledger.accelerators.get(on) else {
            return Bytes::ZERO;
        };
        let used = account.used_by_others(id);
        let asleep =
            |e: &Engine| matches!(e.state, LifecycleState::Asleep { .. }) && e.accelerators.contains(on);
        let named = account.reading.as_ref().is_none_or(|r| r.by_engine.is_some());
        if named || !self.engine(id).is_some_and(asleep) {
            return used;
        }
        let neighbours = self.planner.engines.on_accelerators(std::slice::from_ref(on));
        if !neighbours.into_iter().any(|e| e.id != *id && asleep(e)) {
            return used;
        }
        let spec = self.planner.engine_spec(id);
        let declared = spec.map_or(Bytes::ZERO, |s| s.accelerators.bytes_per_account(s.memory.asleep));
        let doubtful = account.reading.as_ref().map_or(Bytes::ZERO, |r| r.used.saturating_sub(declared));
        used.max(doubtful)
    }

    /// Whether the engine could ever get this candidate: free memory plus evictable engines suffice.
    ///
    /// Engines count as evictable by policy or by idleness. An engine does not claim a candidate that is out of reach.
    pub(in crate::fleet) fn is_reachable(&self, id: &EngineId, candidate: &PlacementCandidate) -> bool {
        candidate.accelerators.iter().all(|on| {
            let Some(account) = self.planner.ledger.accelerators.get(on) else {
                return false;
            };
            let lacking = self.lacking_amount(id, candidate, on, account);
            if lacking.is_zero() {
                return true;
            }
            let others = account.booked.iter().map(|(other, _)| other).filter(|other| *other != id);
            let claimant = self.on_behalf_of(id);
            let engines = others.filter_map(|other| self.engine(other));
            let mut evictable = engines.filter(|e| !self.must_stay_for(claimant, e));
            // A pool may have hundreds of engines, and few of them usually suffice.
            let freed = evictable.try_fold(ResourceAmount::default(), |freed, e| {
                let freed = freed + self.may_ever_free(e, account);
                if freed.covers(lacking) { ControlFlow::Break(()) } else { ControlFlow::Continue(freed) }
            });
            freed.is_break()
        })
    }

    /// Whether an accelerator of the candidate has room for the engine once others have freed `may_go` there.
    pub(in crate::fleet) fn would_suffice(
        &self,
        id: &EngineId,
        candidate: &PlacementCandidate,
        on: &AcceleratorId,
        may_go: ResourceAmount,
    ) -> bool {
        let account = self.planner.ledger.accelerators.get(on);
        account.is_some_and(|account| may_go.covers(self.lacking_amount(id, candidate, on, account)))
    }

    /// Amount that others must free on an accelerator of the candidate before the engine has room.
    fn lacking_amount(
        &self,
        id: &EngineId,
        candidate: &PlacementCandidate,
        on: &AcceleratorId,
        account: &AcceleratorAccount,
    ) -> ResourceAmount {
        let needed = candidate.need + self.claimed_for_other_members(id, on);
        needed.saturating_sub(account.amount_of(id) + self.free_amount(id, on, account))
    }

    /// Amount that the engine frees there if it is evicted; none if it never may be.
    pub(in crate::fleet) fn may_ever_free(&self, e: &Engine, account: &AcceleratorAccount) -> ResourceAmount {
        if !self.may_ever_be_evicted(e) {
            return ResourceAmount::default();
        }
        let (bytes, units) = (account.booked_by(&e.id), account.units_taken.of(&e.id));
        if self.may_ever_stop(e) {
            return ResourceAmount { bytes, units };
        }
        // One that is winding down may end instead.
        let residue = if e.state.is_winding_down() { Bytes::ZERO } else { self.planner.residue_of(&e.id) };
        ResourceAmount { bytes: bytes.saturating_sub(residue), units: 0 }
    }

    fn may_ever_be_evicted(&self, e: &Engine) -> bool {
        let Some(spec) = self.planner.engine_spec(&e.id) else {
            return true;
        };
        let by_idleness = spec.idle.sleep_after.is_some() || spec.idle.stop_after.is_some();
        let eviction = self.planner.settings.eviction_of(spec);
        let by_policy = match eviction {
            EvictionPolicy::Residency => true,
            // A sleeper is stopped at once.
            EvictionPolicy::Cooldown => matches!(e.state, LifecycleState::Asleep { .. }),
            EvictionPolicy::Never => false,
        };
        let evictable_itself = !self.planner.is_kept_awake(&e.id) && (by_idleness || by_policy);
        e.state.is_winding_down() || (evictable_itself && self.may_dependents_ever_be_evicted(e))
    }

    /// Whether the dependents for which the engine stays may ever be evicted.
    fn may_dependents_ever_be_evicted(&self, e: &Engine) -> bool {
        let planner = &self.planner;
        if planner.keeping_dependent(e).is_none() {
            return true;
        }
        let active = planner.dependencies.dependents(&e.id.model).filter(|model| planner.is_active(model));
        let mut engines = active.flat_map(|model| planner.engines_of(model));
        engines.all(|e| !e.state.has_process() || self.may_ever_be_evicted(e))
    }

    /// Whether an evictable engine may stop, too: sleep keeps its units, of a pool or of an accelerator with slots.
    fn may_ever_stop(&self, e: &Engine) -> bool {
        let Some(spec) = self.planner.engine_spec(&e.id) else {
            return true;
        };
        let only_sleeps = self.sleep_level(&e.id, None).is_some() && spec.idle.stop_after.is_none();
        !only_sleeps || self.planner.settings.eviction_of(spec) != EvictionPolicy::Never
    }

    /// Amount that other engines on their way out will release on an accelerator.
    fn freeing_amount(&self, id: &EngineId, on: &AcceleratorId) -> ResourceAmount {
        self.planner.engines.winding_down_on(on).filter(|e| e.id != *id).map(|e| self.will_free(e, on)).sum()
    }

    /// Amount that this engine will release on its own.
    pub(in crate::fleet) fn will_free(&self, e: &Engine, on: &AcceleratorId) -> ResourceAmount {
        let Some(account) = self.planner.ledger.accelerators.get(on) else {
            return ResourceAmount::default();
        };
        let all = account.amount_of(&e.id);
        // A sleeping engine keeps its units.
        let asleep =
            ResourceAmount { bytes: all.bytes.saturating_sub(self.planner.residue_of(&e.id)), units: 0 };
        match &e.state {
            LifecycleState::Draining {
                after_drain: crate::fleet::command::AfterDrain::Sleep(wish), ..
            } => {
                if self.sleep_level(&e.id, *wish).is_some() {
                    asleep
                } else {
                    all
                }
            }
            LifecycleState::FallingAsleep { .. } => asleep,
            LifecycleState::Asleep { .. } if e.releasing_since.is_some() => asleep,
            state if state.is_winding_down() => all,
            _ => ResourceAmount::default(),
        }
    }

    /// Returns whether the engine can start on this candidate, and if not, why.
    pub(in crate::fleet) fn placement_status(
        &self,
        id: &EngineId,
        spec: &ModelSpec,
        candidate: &PlacementCandidate,
    ) -> PlacementStatus {
        let mut awaiting_release = false;
        for on in &candidate.accelerators {
            let (shortfall_now, shortfall_later) = self.shortfalls(id, candidate, on);
            if !shortfall_later.is_zero() {
                return PlacementStatus::NoRoom;
            }
            awaiting_release |= !shortfall_now.is_zero();
        }
        if awaiting_release {
            return PlacementStatus::Freeing;
        }
        // Engines that are reserved together start one by one, and each checks again.
        if self.closure_attempt.is_none()
            && let Some(by) = self.blocking_engine(id, spec, candidate)
        {
            return PlacementStatus::Blocked { by };
        }
        let mut unseen = None;
        for accelerator in &candidate.accelerators {
            let Some(account) = self.planner.ledger.accelerators.get(accelerator) else {
                continue;
            };
            if !account.is_fresh(self.now) {
                return PlacementStatus::MeterStale { accelerator: accelerator.clone() };
            }
            let used = self.used_by_others(id, accelerator) + candidate.need.bytes;
            if account.metered && used > account.capacity {
                let short = used.saturating_sub(account.capacity);
                unseen = Some(PlacementStatus::AwaitingRelease {
                    accelerator: accelerator.clone(),
                    after: account.reading_delay(),
                    missing: short,
                });
            }
        }
        unseen.unwrap_or(PlacementStatus::Ready)
    }

    /// Returns an engine that must finish first.
    ///
    /// A launch that measures free memory excludes every other memory change on its accelerators.
    fn blocking_engine(
        &self,
        id: &EngineId,
        spec: &ModelSpec,
        candidate: &PlacementCandidate,
    ) -> Option<EngineId> {
        let cold = !self.engine(id).is_some_and(|e| e.state.has_process());
        let launch = cold && spec.profiles_memory();
        let is_neighbour = |e: &&Engine| {
            e.id != *id && held_or_reserved(e).iter().any(|a| candidate.accelerators.contains(a))
        };
        // An engine that lacks a dependency is not about to use its reservation.
        let about_to =
            |e: &Engine| e.pending_reservation.is_some() && self.planner.first_missing(&e.id.model).is_none();
        let engines = self.planner.engines.moving_on(&candidate.accelerators);
        let blocks = |e: &&Engine| self.interferes(e, launch, about_to(e));
        engines.into_iter().filter(is_neighbour).find(blocks).map(|e| e.id.clone())
    }

    /// Whether this engine's current or next step must end before another engine allocates memory beside it.
    ///
    /// `launch`: the other engine measures free memory.
    fn interferes(&self, e: &Engine, launch: bool, about_to: bool) -> bool {
        let profiles = self.planner.engine_spec(&e.id).is_none_or(ModelSpec::profiles_memory);
        if e.is_profiling() || (about_to && !e.state.has_process() && profiles) {
            return true;
        }
        // An engine with explicit bytes lets others start beside it at once, but allocates its memory only while it
        // loads: a neighbour that measures meanwhile would measure wrong.
        let takes =
            e.state.is_starting() && e.probe_state == ProbeState::NotReady && !(profiles && e.profiled);
        let moves = about_to
            || matches!(
                e.state,
                LifecycleState::Waking { .. }
                    | LifecycleState::FallingAsleep { .. }
                    | LifecycleState::Stopping { .. }
            )
            || e.releasing_since.is_some()
            || takes;
        launch && moves
    }

    /// Whether another engine interferes on these accelerators with the start of this reserved engine.
    ///
    /// A reservation outside a dependency group starts at once, so it interferes; of those that wait for dependencies,
    /// the first goes ahead.
    pub(in crate::fleet) fn has_interference(&self, id: &EngineId, accelerators: &[AcceleratorId]) -> bool {
        let cold = !self.engine(id).is_some_and(|e| e.state.has_process());
        let launch = cold && self.planner.engine_spec(id).is_none_or(ModelSpec::profiles_memory);
        let about_to = |e: &Engine| {
            e.pending_reservation.as_ref().is_some_and(|placing| !self.is_in_dependency_group(&e.id, placing))
        };
        let neighbours = self.planner.engines.moving_on(accelerators).into_iter().filter(|e| e.id != *id);
        let mut neighbours = neighbours.filter(|e| e.state.has_process() || about_to(e));
        // A failing engine may measure until it is stopped.
        neighbours.any(|e| {
            matches!(e.state, LifecycleState::Failing { .. }) || self.interferes(e, launch, about_to(e))
        })
    }
}

/// The accelerators of an engine, or those that it will have.
fn held_or_reserved(e: &Engine) -> &[AcceleratorId] {
    e.pending_reservation.as_ref().map_or(&e.accelerators, |placing| &placing.accelerators)
}
