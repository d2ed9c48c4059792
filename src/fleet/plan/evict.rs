//! Chooses the engines to evict so that another model fits.
//!
//! All or nothing: a set is evicted only if it frees enough on every accelerator of the candidate. Gentler tiers are
//! tried first, each completely before the next: idle engines put to sleep; sleepers stopped as well; idle engines
//! stopped; spare engines in use, whose model another engine serves; and, once a turn has lasted its maximum, the other
//! engines in use. A spare has no turn of its own, and nothing protects it, because no engine was evicted for it. A
//! spare that still starts serves no request yet, so it counts as idle.
//!
//! An idle engine is evicted at once, unless its clients are expected back sooner than it could be restored. Then it is
//! protected for as long as restoring it would take: waiting longer would cost more than it could save, whether they
//! return or not. A client that alone used the engine in this turn, and now waits for another model, will not return
//! before that model has served.
//!
//! A further replica that a target asks for ([`super::desired`]) takes only the place of engines that are idle and no
//! longer protected.
//!
//! An engine with dependents is evicted only along with them, once they are asleep or gone.

use crate::{
    engine::{Admission, Engine, state::LifecycleState},
    fleet::{
        command::AfterDrain,
        event::LearnedMeasurements,
        plan::{PlanBuilder, Planner, place::PlacementCandidate},
        state::ledger::amount::ResourceAmount,
    },
    model::{AcceleratorId, EngineId, EvictionPolicy, ModelSpec, ProtectionPolicy, SleepLevel},
    units::{Bytes, Millis, Tick},
};

/// One engine to evict, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::fleet) struct Victim {
    pub(in crate::fleet) engine: EngineId,
    pub(in crate::fleet) after_drain: AfterDrain,
    frees: ResourceAmount,
    accelerators: Vec<AcceleratorId>,
    last_used: Tick,
    restore_time: Millis,
    tier: u8,
    /// Another engine of its model continues serving.
    spare: bool,
    /// No lease was given since its start or sleep began, so there is nothing to drain.
    needs_no_drain: bool,
    /// The dependents that must be evicted with it.
    dependents: Vec<EngineId>,
}

/// Number of options whose subsets are tried exhaustively: the gentlest, longest unused ones.
///
/// If none of these subsets suffices, a greedy search over all options follows.
const MAX_EXHAUSTIVE_VICTIMS: usize = 10;
/// Assumed durations of a cold start and a wake before any was measured.
const DEFAULT_COLD_START_TIME: Millis = Millis::secs(60);
const DEFAULT_WAKE_TIME: Millis = Millis::secs(1);
/// Tiers in order: idle to sleep, asleep to stop, idle to stop, spare in use, in use.
const TIER_COUNT: u8 = 5;
const TIER_SPARE_IN_USE: u8 = 3;
const TIER_IN_USE: u8 = 4;

impl PlanBuilder<'_> {
    /// Returns the best set of victims over all candidates, and its candidate.
    pub(in crate::fleet) fn victims<'c>(
        &self,
        id: &EngineId,
        candidates: &'c [PlacementCandidate],
    ) -> Option<(&'c PlacementCandidate, Vec<Victim>)> {
        let options_by_candidate: Vec<(&PlacementCandidate, EvictionOptions)> =
            candidates.iter().filter_map(|c| Some((c, self.eviction_options(id, c)?))).collect();
        (0..TIER_COUNT).find_map(|tier| {
            let sets = options_by_candidate
                .iter()
                .filter_map(|(c, options)| options.best_set(c, tier).map(|set| (*c, set)));
            sets.min_by_key(|(c, set)| score(c, &set.iter().collect::<Vec<_>>()))
        })
    }

    /// Returns the ways to make room; `None` if all of them together are not enough.
    fn eviction_options(&self, id: &EngineId, candidate: &PlacementCandidate) -> Option<EvictionOptions> {
        let short: Vec<(AcceleratorId, ResourceAmount)> = candidate
            .accelerators
            .iter()
            .map(|a| (a.clone(), self.shortfalls(id, candidate, a).1))
            .filter(|(_, short)| !short.is_zero())
            .collect();
        let mut options: Vec<Victim> = self
            .planner
            .engines
            .on_accelerators(&candidate.accelerators)
            .into_iter()
            .filter(|e| e.id != *id && e.accelerators.iter().any(|a| short.iter().any(|(s, _)| s == a)))
            .flat_map(|e| self.victim_options(id, e))
            .collect();
        self.add_dependents(id, &mut options);
        let all: Vec<&Victim> = options.iter().collect();
        // Counts both ways of an engine that has two: this can overestimate, never underestimate.
        covers(&all, &short).then(|| EvictionOptions::new(options, short))
    }

    /// Adds the dependents of victims, which must be evicted too, on any accelerator.
    fn add_dependents(&self, id: &EngineId, options: &mut Vec<Victim>) {
        let mut at = 0;
        while let Some(victim) = options.get(at) {
            let missing = victim.dependents.iter().filter(|with| options.iter().all(|v| v.engine != **with));
            let more = missing.filter_map(|with| self.engine(with)).flat_map(|e| self.victim_options(id, e));
            let more: Vec<Victim> = more.collect();
            options.extend(more);
            at += 1;
        }
    }

    /// Returns the dependents of this engine that are not leaving yet; `None` if one of them may not be evicted.
    fn dependents_to_evict(&self, requester: &EngineId, e: &Engine) -> Option<Vec<EngineId>> {
        let planner = &self.planner;
        let mut dependents = Vec::new();
        if planner.keeping_dependent(e).is_none() {
            return Some(dependents);
        }
        for other in planner.dependencies.dependents(&e.id.model).flat_map(|model| planner.engines_of(model))
        {
            let asleep = matches!(other.state, LifecycleState::Asleep { .. })
                && other.pending_reservation.is_none()
                && !other.is_rehearsing();
            let is_down = !other.state.has_process() && other.pending_reservation.is_none();
            if asleep || is_down || other.state.is_winding_down() {
                continue;
            }
            if self.victim_options(requester, other).is_empty() {
                return None;
            }
            dependents.push(other.id.clone());
        }
        Some(dependents)
    }

    /// Returns the ways in which this engine may make room.
    fn victim_options(&self, requester: &EngineId, e: &Engine) -> Vec<Victim> {
        let planner = &self.planner;
        let claimant = self.on_behalf_of(requester);
        if e.id.model == requester.model || planner.is_kept_awake(&e.id) || self.must_stay_for(claimant, e) {
            return Vec::new();
        }
        let Some(spec) = planner.engine_spec(&e.id) else {
            return Vec::new();
        };
        let for_replica = planner.is_further_replica(requester);
        if planner.settings.eviction_of(spec) == EvictionPolicy::Never {
            return Vec::new();
        }
        let all = planner.ledger.booked_amount(&e.id);
        let make_victim = |after_drain, frees, tier, restore_time| Victim {
            engine: e.id.clone(),
            after_drain,
            frees,
            accelerators: e.accelerators.clone(),
            last_used: e.idle_since(),
            restore_time,
            tier,
            spare: planner.is_spare(e) || e.state.is_starting() || planner.is_further_replica(&e.id),
            needs_no_drain: e.state != LifecycleState::Awake,
            dependents: Vec::new(),
        };
        let (start, wake) = (planner.start_time_of(&e.id), planner.wake_time_of(&e.id));
        match &e.state {
            LifecycleState::Asleep { .. }
                if e.pending_reservation.is_none() && e.releasing_since.is_none() =>
            {
                if self.keeps_residue_from(claimant, &e.id, for_replica) {
                    Vec::new()
                } else {
                    vec![make_victim(AfterDrain::Stop, all, 1, start)]
                }
            }
            LifecycleState::Awake if e.serves() || e.is_blocked_by_stub() => {
                // A busy engine of a higher band has waiters: taking turns would give half the time to the lower band,
                // with a swap each time.
                let of_higher_band = self.band(&e.id) > self.band(claimant);
                let in_use = if planner.is_spare(e) { TIER_SPARE_IN_USE } else { TIER_IN_USE };
                let make_option = |after_drain, frees, tier, restore_time| {
                    let busy =
                        self.evictable_now(e, restore_time).filter(|busy| !(*busy && of_higher_band))?;
                    if for_replica && (busy || self.is_protected_from_replicas(e, restore_time)) {
                        return None;
                    }
                    Some(make_victim(after_drain, frees, if busy { in_use } else { tier }, restore_time))
                };
                let sleeps = self.sleep_level(&e.id, None).is_some();
                let bytes = all.bytes.saturating_sub(planner.residue_of(&e.id));
                let asleep = sleeps
                    .then(|| {
                        make_option(AfterDrain::Sleep(None), ResourceAmount { bytes, units: 0 }, 0, wake)
                    })
                    .flatten();
                let mut options: Vec<Victim> = asleep
                    .into_iter()
                    .chain(make_option(AfterDrain::Stop, all, if sleeps { 2 } else { 0 }, start))
                    .collect();
                if options.is_empty() {
                    return options;
                }
                let Some(dependents) = self.dependents_to_evict(requester, e) else { return Vec::new() };
                options.iter_mut().for_each(|option| option.dependents.clone_from(&dependents));
                options
            }
            state if state.is_starting() && !for_replica && self.is_superfluous_start(e) => {
                let tier = if e.cold_start { 0 } else { 2 };
                vec![make_victim(AfterDrain::Stop, all, tier, start)]
            }
            _ => Vec::new(),
        }
    }

    /// Whether this sleeper stands in line before the claimant, so it is not stopped for it.
    ///
    /// A sleeper that no eviction could wake (pinned engines hold the memory that it lacks, say) claims none, so it also
    /// keeps none from the first engines of the models behind it.
    fn keeps_residue_from(&self, claimant: &EngineId, sleeper: &EngineId, for_replica: bool) -> bool {
        let claims_nothing =
            self.out_of_reach.contains(sleeper) && !self.dependency_claims.contains_key(sleeper);
        self.goes_before(sleeper, claimant) && (for_replica || !claims_nothing)
    }

    /// Whether this start is a spare without any request, which may be stopped.
    ///
    /// Like every release of memory, this waits for a neighbour that measures free memory. A waking spare is ready in a
    /// moment and can then sleep instead, so it is in a later tier than a cold start.
    fn is_superfluous_start(&self, e: &Engine) -> bool {
        self.planner.eviction_of(&e.id.model) == EvictionPolicy::Residency
            && e.admission == Admission::Closed
            && !self.planner.is_primary(&e.id)
            && !self.has_profiling_neighbour(&e.id)
    }

    /// Whether policy allows evicting this awake engine now: `Some(busy)` if so.
    ///
    /// That is, the engine is idle and not protected, or its turn has lasted its maximum. `restore_time`: the time to restore
    /// it.
    fn evictable_now(&self, e: &Engine, restore_time: Millis) -> Option<bool> {
        let settings = &self.planner.settings;
        let turns = &settings.turns;
        let spec = self.planner.engine_spec(&e.id)?;
        match settings.eviction_of(spec) {
            EvictionPolicy::Never => None,
            EvictionPolicy::Cooldown => {
                (self.planner.in_use_count(e) == 0 && self.is_cooldown_over(e, spec)).then_some(false)
            }
            EvictionPolicy::Residency if self.planner.is_spare(e) => Some(self.planner.in_use_count(e) > 0),
            EvictionPolicy::Residency => {
                // An engine that just woke for waiters has no lease before their grants.
                let used = self.planner.in_use_count(e) > 0 || self.waiting(&e.id.model) > 0;
                let turn_expired = e.turn_start + turns.max_turn <= self.now;
                let evictable = turn_expired || !used && self.protected_until(e, restore_time) <= self.now;
                evictable.then_some(used)
            }
        }
    }

    /// Whether the engine has been idle for its model's cooldown.
    fn is_cooldown_over(&self, e: &Engine, spec: &ModelSpec) -> bool {
        let idle_at = spec.idle.sleep_after.and_then(|after| self.planner.idle_at(e, after));
        idle_at.is_some_and(|at| at <= self.now)
    }

    /// Whether policy allows that this engine, asleep for its rehearsal, stays asleep for another model.
    pub(in crate::fleet) fn may_stay_asleep(&self, e: &Engine) -> bool {
        self.planner.engine_spec(&e.id).is_none_or(|spec| match self.planner.settings.eviction_of(spec) {
            EvictionPolicy::Never => false,
            EvictionPolicy::Cooldown => self.is_cooldown_over(e, spec),
            EvictionPolicy::Residency => true,
        })
    }

    /// Whether this idle engine must stay although a further replica of another model needs its place.
    ///
    /// A replica that a target asked for gets a while of its own first. Otherwise two models with targets beyond the
    /// memory would take the same place from each other at every pause.
    fn is_protected_from_replicas(&self, e: &Engine, restore_time: Millis) -> bool {
        let planner = &self.planner;
        if planner.is_spare(e) || planner.eviction_of(&e.id.model) != EvictionPolicy::Residency {
            return false;
        }
        let rests = planner.replica_rest_end(e).is_some_and(|at| at > self.now);
        rests || self.protected_until(e, restore_time) > self.now
    }

    /// End of this idle engine's protection, which depends on the time to restore it; in the past if unprotected.
    pub(in crate::fleet) fn protected_until(&self, e: &Engine, restore_time: Millis) -> Tick {
        let always = self.planner.settings.turns.protection == ProtectionPolicy::Always;
        let used_remotely = e.last_remote_use > Tick(0) && e.last_remote_use >= e.turn_start;
        let others_expected = || {
            used_remotely
                || e.clients.has_client_not_waiting(|client| self.waiting_clients.contains_key(&client))
        };
        self.planner
            .protection_end(e, restore_time)
            .filter(|_| always || others_expected())
            .unwrap_or_else(|| e.idle_since())
    }
}

impl Planner {
    /// End of this engine's protection if clients that do not wait now have used it.
    ///
    /// Assumes that no use follows.
    pub(in crate::fleet) fn protection_end(&self, e: &Engine, back: Millis) -> Option<Tick> {
        let turns = &self.settings.turns;
        let span = match turns.protection {
            ProtectionPolicy::Always => turns.residency,
            ProtectionPolicy::Expected if e.idle_gaps.median().is_some_and(|usual| usual < back) => {
                back.min(turns.residency)
            }
            ProtectionPolicy::Expected | ProtectionPolicy::Never => return None,
        };
        Some(e.idle_since() + span)
    }

    /// Duration of a start of this engine's variant, learned or assumed.
    pub(in crate::fleet) fn start_time_of(&self, id: &EngineId) -> Millis {
        self.learned_of(id).start.unwrap_or(DEFAULT_COLD_START_TIME)
    }

    /// Duration of a wake of this engine's variant, learned or assumed.
    pub(in crate::fleet) fn wake_time_of(&self, id: &EngineId) -> Millis {
        self.learned_of(id).wake.unwrap_or(DEFAULT_WAKE_TIME)
    }

    pub(in crate::fleet) fn learned_of(&self, id: &EngineId) -> LearnedMeasurements {
        self.models.get(&id.model).map(|model| model.learned_of(&id.variant)).unwrap_or_default()
    }
}

/// The ways to make room on one candidate.
struct EvictionOptions {
    shortfalls: Vec<(AcceleratorId, ResourceAmount)>,
    options: Vec<Victim>,
}

impl EvictionOptions {
    /// Sorts the gentlest first, then the longest unused.
    fn new(mut options: Vec<Victim>, short: Vec<(AcceleratorId, ResourceAmount)>) -> Self {
        options.sort_by_key(|v| (v.tier, v.last_used));
        Self { shortfalls: short, options }
    }

    fn best_set(&self, candidate: &PlacementCandidate, tier: u8) -> Option<Vec<Victim>> {
        let options = self.options.get(..self.options.partition_point(|v| v.tier <= tier))?;
        if !covers(&options.iter().collect::<Vec<_>>(), &self.shortfalls) {
            return None;
        }
        let limited = options.get(..MAX_EXHAUSTIVE_VICTIMS).unwrap_or(options);
        (1_u32..1 << limited.len())
            .map(|mask| subset(limited, mask))
            .filter(|set| {
                has_no_duplicate_engine(set) && includes_dependents(set) && covers(set, &self.shortfalls)
            })
            .min_by_key(|set| score(candidate, set))
            .or_else(|| greedy(options, &self.shortfalls))
            .map(|set| set.into_iter().cloned().collect())
    }
}

fn subset(options: &[Victim], mask: u32) -> Vec<&Victim> {
    options.iter().enumerate().filter(|(i, _)| mask & (1 << i) != 0).map(|(_, v)| v).collect()
}

/// Takes options in order until they suffice, then drops the superfluous ones.
///
/// Used if there are more victims than can be tried in every combination.
fn greedy<'v>(options: &'v [Victim], short: &[(AcceleratorId, ResourceAmount)]) -> Option<Vec<&'v Victim>> {
    let mut set: Vec<&Victim> = Vec::new();
    for option in options {
        if covers(&set, short) {
            break;
        }
        // The gentler way comes first; the other replaces it if nothing else is left.
        set.retain(|v| v.engine != option.engine);
        set.push(option);
        while let Some(with) =
            set.iter().flat_map(|v| &v.dependents).find(|with| !contains_engine(&set, with))
        {
            set.push(options.iter().find(|v| v.engine == *with)?);
        }
    }
    if !covers(&set, short) {
        return None;
    }
    for at in (0..set.len()).rev() {
        let without: Vec<&Victim> =
            set.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, v)| *v).collect();
        if includes_dependents(&without) && covers(&without, short) {
            set = without;
        }
    }
    Some(set)
}

/// Whether the set has no engine twice, once to sleep and once to stop.
fn has_no_duplicate_engine(set: &[&Victim]) -> bool {
    set.iter().enumerate().all(|(i, v)| set.iter().skip(i + 1).all(|w| w.engine != v.engine))
}

fn contains_engine(set: &[&Victim], engine: &EngineId) -> bool {
    set.iter().any(|v| v.engine == *engine)
}

/// Whether the set includes the dependents of its members.
fn includes_dependents(set: &[&Victim]) -> bool {
    set.iter().all(|v| v.dependents.iter().all(|with| contains_engine(set, with)))
}

fn covers(set: &[&Victim], short: &[(AcceleratorId, ResourceAmount)]) -> bool {
    short.iter().all(|(a, need)| {
        set.iter()
            .filter(|v| v.accelerators.contains(a))
            .map(|v| v.frees)
            .sum::<ResourceAmount>()
            .covers(*need)
    })
}

/// Score of a set; smaller is better.
///
/// In order: accelerators disturbed that the newcomer does not need, whether the set has other engines than spares,
/// bytes freed, the latest use of any engine, the time to restore all of them.
fn score(candidate: &PlacementCandidate, set: &[&Victim]) -> (usize, bool, Bytes, Tick, Millis) {
    let outside =
        set.iter().flat_map(|v| &v.accelerators).filter(|a| !candidate.accelerators.contains(a)).count();
    let freed = set.iter().map(|v| Bytes(v.frees.bytes.0.saturating_mul(v.accelerators.len() as u64))).sum();
    let latest = set.iter().map(|v| v.last_used).max().unwrap_or_default();
    let restore_time = set.iter().map(|v| v.restore_time).fold(Millis::ZERO, |a, b| a + b);
    let not_only_spares = !set.iter().all(|v| v.spare);
    (outside, not_only_spares, freed, latest, restore_time)
}

impl Victim {
    pub(in crate::fleet) const fn needs_no_drain(&self) -> bool {
        self.needs_no_drain
    }

    /// Whether the engine is in use, so its drain takes time.
    pub(in crate::fleet) const fn is_busy(&self) -> bool {
        self.tier >= TIER_SPARE_IN_USE
    }

    /// Name for texts.
    pub(in crate::fleet) fn display_name(&self) -> String {
        if self.spare { self.engine.to_string() } else { self.engine.model.to_string() }
    }

    /// The action on the engine, for texts.
    pub(in crate::fleet) const fn action_text(&self) -> &'static str {
        match self.after_drain {
            AfterDrain::Sleep(Some(SleepLevel::One | SleepLevel::Two) | None) => "put to sleep",
            AfterDrain::Stop => "stopped",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_sleepers_are_stopped_as_it_takes() {
        let sleeper = |n: u64| Victim {
            engine: EngineId::new(format!("sleeper-{n}").into(), 0),
            after_drain: AfterDrain::Stop,
            frees: ResourceAmount { bytes: Bytes::gib(4), units: 1 },
            accelerators: vec!["gpu-0".into()],
            last_used: Tick(n),
            restore_time: Millis::secs(60),
            tier: 1,
            spare: false,
            needs_no_drain: true,
            dependents: Vec::new(),
        };
        let options: Vec<Victim> = (0..18).map(sleeper).collect();
        let short =
            |gib| [(AcceleratorId::from("gpu-0"), ResourceAmount { bytes: Bytes::gib(gib), units: 0 })];
        let set = greedy(&options, &short(46)).expect("twelve are enough");
        assert_eq!(set.len(), 12);
        assert!(set.iter().all(|v| v.last_used < Tick(12)), "those unused for longest");
        assert!(greedy(&options, &short(73)).is_none());
    }
}
