//! Reasons of models that wait for memory: which models hold it, and until when.
//!
//! Apart from the other reasons, because these texts need the ledger and the rules of eviction.

use std::cmp::Reverse;

use super::{ModelReason, ReasonClass};
use crate::{
    engine::{Engine, state::LifecycleState},
    fault::BlockingModel,
    fleet::plan::{PlanBuilder, Planner, place::PlacementCandidate},
    model::{AcceleratorId, AcceleratorRequirement, EngineId, EvictionPolicy, ModelSpec},
    units::{Bytes, Tick, pluralize},
};

/// Smaller amounts beyond the reservations may be memory that is freed late, or a desktop.
const MIN_OTHER_PROGRAM: Bytes = Bytes::mib(512);
/// Maximum number of engines that a reason names: a pool may have thousands, and their texts change all the time.
const MAX_NAMED_HOLDERS: usize = 4;
/// Maximum number of engines that a reason lists as data: each refused client receives the list.
const MAX_LISTED_HOLDERS: usize = 16;

impl PlanBuilder<'_> {
    /// Reason with the engines that hold a candidate's memory, and until when.
    pub(in crate::fleet) fn memory_reason(
        &self,
        id: &EngineId,
        candidate: &PlacementCandidate,
    ) -> ModelReason {
        let planner = &self.planner;
        let on = |e: &&Engine| e.accelerators.iter().any(|a| candidate.accelerators.contains(a));
        let neighbours = planner.engines.on_accelerators(&candidate.accelerators);
        let holders: Vec<&Engine> =
            neighbours.into_iter().filter(|e| e.id != *id && e.state.has_process()).filter(on).collect();
        let named = holders.iter().take(MAX_NAMED_HOLDERS);
        let mut holder_texts: Vec<String> =
            named.clone().map(|e| format!("held by {}, {}", e.id.model, self.hold_text(e))).collect();
        let unnamed = holders.len().saturating_sub(MAX_NAMED_HOLDERS);
        if unnamed > 0 {
            holder_texts.push(format!("and by {}", pluralize(unnamed, "other engine")));
        }
        let listed = planner.largest_holders(&holders);
        let unlisted = holders.len().saturating_sub(listed.len());
        let awake = listed.iter().filter(|e| !matches!(e.state, LifecycleState::Asleep { .. }));
        let notes_for_holders = awake.map(|e| (e.id.model.clone(), self.hold_text(e))).collect();
        let waits_for = self.shortage_text(id, candidate);
        let available = candidate.accelerators.iter().filter_map(|a| planner.ledger.accelerators.get(a));
        let available =
            available.map(crate::fleet::state::ledger::AcceleratorAccount::free).min().unwrap_or_default();
        let retry_after = holders.iter().filter_map(|e| self.evictable_at(e)).min();
        let held_by = match (holder_texts.is_empty(), self.other_program_text(candidate)) {
            (false, _) => holder_texts.join("; "),
            (true, Some(text)) => text,
            (true, None) => "claimed by other models in line".to_owned(),
        };
        ModelReason {
            text: format!("{waits_for}: {held_by}{}", self.last_failure_text(id)),
            named_models: named.map(|e| e.id.model.clone()).collect(),
            holders: listed.iter().map(|e| planner.blocking_model(e, self.now)).collect(),
            unlisted_holders: u16::try_from(unlisted).unwrap_or(u16::MAX),
            notes_for_holders,
            admin_details: String::new(),
            retry_after,
            refuses_waiters: false,
            is_reservation_refused: false,
            class: ReasonClass::Memory { need: candidate.need.bytes, available },
        }
    }

    /// Text on memory that no engine has reserved; `None` if the meters show none.
    fn other_program_text(&self, candidate: &PlacementCandidate) -> Option<String> {
        let accounts = candidate.accelerators.iter().filter_map(|a| self.planner.ledger.accelerators.get(a));
        let beyond = accounts
            .filter_map(|account| Some(account.reading.as_ref()?.used.saturating_sub(account.reserved())))
            .max()?;
        (beyond >= MIN_OTHER_PROGRAM).then(|| format!("another program uses {beyond} there"))
    }

    /// Text on what a candidate lacks.
    fn shortage_text(&self, id: &EngineId, candidate: &PlacementCandidate) -> String {
        let short = |a: &&AcceleratorId| !self.shortfalls(id, candidate, a).0.is_zero();
        let short: Vec<&AcceleratorId> = candidate.accelerators.iter().filter(short).collect();
        // A pool may have free memory, but no free accelerator to use it with; an accelerator may have no free slot.
        if let [on] = short[..]
            && self.shortfalls(id, candidate, on).0.bytes == Bytes::ZERO
            && let Some(account) = self.planner.ledger.accelerators.get(on)
            && let Some(units) = account.units
        {
            let noun = account.unit_noun();
            return match account.free_units() {
                0 if units == 1 => format!("the only {noun} of {on} is taken"),
                0 => format!("all {units} {noun}s of {on} are taken"),
                free => format!(
                    "{free} of {units} {noun}s of {on} are free, and the engine needs {}",
                    candidate.need.units
                ),
            };
        }
        let names: Vec<&str> = short.into_iter().map(AcceleratorId::as_str).collect();
        format!(
            "waiting for {}",
            if names.is_empty() { "its accelerators".to_owned() } else { names.join(", ") }
        )
    }

    /// The first moment at which this engine may be evicted, if it ever may.
    ///
    /// That is the end of its protection, turn or cooldown, if no request uses it until then.
    pub(in crate::fleet) fn evictable_at(&self, e: &Engine) -> Option<Tick> {
        let turns = &self.planner.settings.turns;
        if self.planner.is_kept_awake(&e.id) || self.planner.keeping_dependent(e).is_some() {
            return None;
        }
        match self.planner.eviction_of(&e.id.model) {
            EvictionPolicy::Never => None,
            EvictionPolicy::Cooldown if e.state == LifecycleState::Awake => {
                let after = self.planner.engine_spec(&e.id)?.idle.sleep_after?;
                if self.planner.in_use_count(e) > 0 {
                    Some(self.now + after)
                } else {
                    self.planner.idle_at(e, after)
                }
            }
            _ if self.planner.in_use_count(e) == 0 => Some(self.idle_evictable_at(e)),
            _ => Some(e.turn_start + turns.max_turn),
        }
    }

    /// The same moment for an awake engine that stays idle.
    fn idle_evictable_at(&self, e: &Engine) -> Tick {
        let planner = &self.planner;
        let sleeps = self.sleep_level(&e.id, None).is_some();
        let back = if sleeps { planner.wake_time_of(&e.id) } else { planner.start_time_of(&e.id) };
        self.protected_until(e, back).min(e.turn_start + planner.settings.turns.max_turn)
    }

    /// Text on how an engine holds its memory, and until when.
    fn hold_text(&self, e: &Engine) -> String {
        let turns = &self.planner.settings.turns;
        let leases = pluralize(self.planner.in_use_count(e), "lease");
        let until = match &e.state {
            LifecycleState::Draining { .. } => {
                format!("drain deadline at {}", e.since + turns.drain_deadline)
            }
            LifecycleState::Awake if self.planner.is_kept_awake(&e.id) => self.planner.kept_text(&e.id),
            LifecycleState::Awake if self.planner.keeping_dependent(e).is_some() => {
                self.planner.needed_by_text(e)
            }
            LifecycleState::Awake if self.planner.eviction_of(&e.id.model) != EvictionPolicy::Residency => {
                self.no_turn_text(e)
            }
            LifecycleState::Awake if self.planner.in_use_count(e) == 0 => {
                format!("evictable at {}", self.idle_evictable_at(e))
            }
            LifecycleState::Awake => format!("its turn ends at {}", e.turn_start + turns.max_turn),
            state => state.to_string(),
        };
        format!("{leases}, {until}")
    }

    /// Text on an awake engine that has no turns.
    fn no_turn_text(&self, e: &Engine) -> String {
        match self.evictable_at(e) {
            None => "never evicted".to_owned(),
            Some(at) if self.planner.in_use_count(e) == 0 => {
                format!("idle since {}, evictable at {at}", e.idle_since())
            }
            Some(_) => "in use, evictable only after its cooldown".to_owned(),
        }
    }

    /// Reason of a model whose engine has no candidate: a lost accelerator, or none that could ever hold it.
    pub(in crate::fleet) fn misfit_reason(&self, id: &EngineId, spec: &ModelSpec) -> ModelReason {
        let need = spec.accelerators.bytes_per_account(spec.memory.awake);
        if !self.candidates(id, spec, false).is_empty() {
            let class = ReasonClass::Memory { need, available: Bytes::ZERO };
            let text = "waiting for its accelerator to recover".to_owned();
            return ModelReason { text, class, ..ModelReason::default() };
        }
        if let AcceleratorRequirement::Slots { pool, .. } = &spec.accelerators
            && self.planner.could_ever_hold(spec)
        {
            let class = ReasonClass::Memory { need, available: Bytes::ZERO };
            let text = if self.planner.could_hold_on_open_nodes(spec) {
                "waiting for accelerators without another engine of the model".to_owned()
            } else {
                format!("waiting for a node of {pool} that takes new Pods")
            };
            return ModelReason { text, class, ..ModelReason::default() };
        }
        ModelReason::unplaceable(self.planner.misfit_text(spec), need, self.planner.largest(spec))
    }
}

impl Planner {
    /// Returns the engines to list as holders: all, or those with the most memory first if there are too many.
    fn largest_holders<'e>(&self, holders: &[&'e Engine]) -> Vec<&'e Engine> {
        let mut listed = holders.to_vec();
        if listed.len() > MAX_LISTED_HOLDERS {
            listed.sort_by_cached_key(|e| Reverse(self.ledger.booked_bytes(&e.id)));
            listed.truncate(MAX_LISTED_HOLDERS);
        }
        listed
    }

    fn blocking_model(&self, e: &Engine, now: Tick) -> BlockingModel {
        BlockingModel {
            model: e.id.model.clone(),
            memory: self.ledger.booked_bytes(&e.id),
            idle_for: if self.in_use_count(e) > 0 {
                crate::units::Millis::ZERO
            } else {
                now.since(e.idle_since())
            },
            leases: self.in_use_count(e),
            pinned: self.is_kept_awake(&e.id),
        }
    }

    /// Text on why this engine is kept awake.
    pub(super) fn kept_text(&self, id: &EngineId) -> String {
        match self.models.get(&id.model) {
            Some(model) if !model.pinned() => {
                format!("kept by minReplicas {}", model.min_running_of(&id.variant))
            }
            _ => "pinned".to_owned(),
        }
    }

    /// Text on which models need this engine.
    pub(super) fn needed_by_text(&self, e: &Engine) -> String {
        let by = self.dependencies.dependents(&e.id.model).filter(|model| self.is_active(model));
        format!("needed by {}", by.map(|model| format!("'{model}'")).collect::<Vec<_>>().join(", "))
    }
}
