//! Whom to put away so that another model fits.
//!
//! All or nothing: a set is touched only when it frees enough on every accelerator of the candidate. Gentler sets are
//! tried first, whole tiers before the next: idle engines asleep; sleepers stopped as well; idle engines stopped; then
//! spare engines in use, whose model is served by another one; only then, when a turn has lasted its maximum, the
//! others in use. A spare has no turn of its own, and nothing protects it: nobody was put away for it. One that still
//! starts is of no use to anybody yet: it goes as an idle engine does.
//!
//! An idle engine goes at once, unless its clients are expected back sooner than it could be: then it is left alone for as
//! long as bringing it back would take. Waiting longer than that would cost more than it could save, whether they come or
//! not. Whoever alone used it in this turn, and now waits for another model, will not be back before that one has served.
//!
//! What others need goes only along with them, and is told to when they are asleep or gone.

use crate::{
    engine::{Admission, Engine, state::LifecycleState},
    fleet::{
        command::AfterDrain,
        event::LearnedMeasurements,
        plan::{PlanBuilder, Planner, place::PlacementCandidate},
        state::ledger::amount::ResourceAmount,
    },
    model::{AcceleratorId, EngineId, EvictionPolicy, ModelName, ProtectionPolicy, SleepLevel},
    units::{Bytes, Millis, Tick},
};

/// One engine to put away, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::fleet) struct Victim {
    pub(in crate::fleet) engine: EngineId,
    pub(in crate::fleet) after_drain: AfterDrain,
    frees: ResourceAmount,
    accelerators: Vec<AcceleratorId>,
    last_used: Tick,
    restore_time: Millis,
    tier: u8,
    /// Another engine of its model goes on serving.
    spare: bool,
    /// No lease was ever given on it since it began to start or to sleep: nothing has to be drained.
    needs_no_drain: bool,
    /// Those that need it, and have to go with it.
    dependents: Vec<EngineId>,
}

/// Subsets of so many victims are tried exhaustively; beyond, only the longest unused are considered.
const MAX_EXHAUSTIVE_VICTIMS: usize = 10;
/// What a cold start and a wake are taken to last before one was seen.
const DEFAULT_COLD_START_TIME: Millis = Millis::secs(60);
const DEFAULT_WAKE_TIME: Millis = Millis::secs(1);
/// Idle, asleep (stopped), idle (stopped), spare in use, in use.
const TIER_COUNT: u8 = 5;
const TIER_SPARE_IN_USE: u8 = 3;
const TIER_IN_USE: u8 = 4;

impl PlanBuilder<'_> {
    /// The best set of victims over all candidates, with the candidate it is for.
    pub(in crate::fleet) fn victims<'c>(
        &self,
        id: &EngineId,
        candidates: &'c [PlacementCandidate],
    ) -> Option<(&'c PlacementCandidate, Vec<Victim>)> {
        let ways: Vec<(&PlacementCandidate, EvictionOptions)> =
            candidates.iter().filter_map(|c| Some((c, self.eviction_options(id, c)?))).collect();
        (0..TIER_COUNT).find_map(|tier| {
            let sets = ways.iter().filter_map(|(c, ways)| ways.best_set(c, tier).map(|set| (*c, set)));
            sets.min_by_key(|(c, set)| score(c, &set.iter().collect::<Vec<_>>()))
        })
    }

    /// `None`: all of them together are not enough.
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
        // Counted with both ways of an engine, where it has two: more than there is, never less.
        covers(&all, &short).then(|| EvictionOptions::new(options, short))
    }

    /// Wherever they are, they have to go as well.
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

    /// Those that need this engine and are not leaving yet, where each of them may be made to; `None`: one may not.
    fn dependents_to_evict(&self, requester: &EngineId, e: &Engine) -> Option<Vec<EngineId>> {
        let planner = &self.planner;
        let mut with = Vec::new();
        if planner.keeping_dependent(e).is_none() {
            return Some(with);
        }
        for other in planner.dependencies.dependents(&e.id.model).flat_map(|model| planner.engines_of(model))
        {
            let asleep =
                matches!(other.state, LifecycleState::Asleep { .. }) && other.pending_reservation.is_none();
            let gone = !other.state.has_process() && other.pending_reservation.is_none();
            if asleep || gone || other.state.is_winding_down() {
                continue;
            }
            if self.victim_options(requester, other).is_empty() {
                return None;
            }
            with.push(other.id.clone());
        }
        Some(with)
    }

    /// How this engine could make room, if it may be made to.
    fn victim_options(&self, requester: &EngineId, e: &Engine) -> Vec<Victim> {
        let planner = &self.planner;
        let asker = self.on_behalf_of(requester);
        if e.id.model == requester.model || planner.is_kept_awake(&e.id) || self.must_stay_for(asker, e) {
            return Vec::new();
        }
        let Some(spec) = planner.spec(&e.id.model) else {
            return Vec::new();
        };
        if planner.settings.eviction_of(spec) == EvictionPolicy::Never {
            return Vec::new();
        }
        let all = planner.ledger.booked_amount(&e.id);
        let victim = |then, frees, tier, comes_back_in| Victim {
            engine: e.id.clone(),
            after_drain: then,
            frees,
            accelerators: e.accelerators.clone(),
            last_used: e.idle_since(),
            restore_time: comes_back_in,
            tier,
            spare: planner.is_spare(e) || e.state.is_starting(),
            needs_no_drain: e.state != LifecycleState::Awake,
            dependents: Vec::new(),
        };
        let (start, wake) = (planner.start_time_of(&e.id.model), planner.wake_time_of(&e.id.model));
        match &e.state {
            LifecycleState::Asleep { .. }
                if e.pending_reservation.is_none() && e.releasing_since.is_none() =>
            {
                if self.goes_before(&e.id, asker) {
                    Vec::new()
                } else {
                    vec![victim(AfterDrain::Stop, all, 1, start)]
                }
            }
            LifecycleState::Awake if e.serves() || e.is_blocked_by_stub() => {
                // In use in a higher band, it is waited for: taking turns would let the lower band in by halves, with a
                // swap each time.
                let above = self.band(&e.id) > self.band(asker);
                let in_use = if planner.is_spare(e) { TIER_SPARE_IN_USE } else { TIER_IN_USE };
                let way = |then, frees, tier, back| {
                    let busy = self.evictable_now(e, back).filter(|busy| !(*busy && above))?;
                    Some(victim(then, frees, if busy { in_use } else { tier }, back))
                };
                let sleeps = self.sleep_level(&e.id, None).is_some();
                let bytes = all.bytes.saturating_sub(planner.residue_of(&e.id));
                let asleep = sleeps
                    .then(|| way(AfterDrain::Sleep(None), ResourceAmount { bytes, units: 0 }, 0, wake))
                    .flatten();
                let mut ways: Vec<Victim> = asleep
                    .into_iter()
                    .chain(way(AfterDrain::Stop, all, if sleeps { 2 } else { 0 }, start))
                    .collect();
                if ways.is_empty() {
                    return ways;
                }
                let Some(with) = self.dependents_to_evict(requester, e) else { return Vec::new() };
                ways.iter_mut().for_each(|way| way.dependents.clone_from(&with));
                ways
            }
            state if state.is_starting() && self.is_superfluous_start(e) => {
                let tier = if e.cold_start { 0 } else { 2 };
                vec![victim(AfterDrain::Stop, all, tier, start)]
            }
            _ => Vec::new(),
        }
    }

    /// It starts beside another of its model, and nobody has been sent to it. As whatever gives memory back, it waits for
    /// a neighbour that measures it. A warm one is there in a moment, and sleeps rather than ends.
    fn is_superfluous_start(&self, e: &Engine) -> bool {
        self.planner.eviction_of(&e.id.model) == EvictionPolicy::Residency
            && e.admission == Admission::Closed
            && !self.planner.is_primary(&e.id)
            && !self.has_profiling_neighbour(&e.id)
    }

    /// `Some(busy)` when policy lets this awake engine be put away now: idle and not protected, or in use for longer than a
    /// turn may last. `back`: what it would take to bring it back.
    fn evictable_now(&self, e: &Engine, back: Millis) -> Option<bool> {
        let settings = &self.planner.settings;
        let turns = &settings.turns;
        let spec = self.planner.spec(&e.id.model)?;
        match settings.eviction_of(spec) {
            EvictionPolicy::Never => None,
            EvictionPolicy::Cooldown => {
                let after = spec.idle.sleep_after?;
                let idle = self.planner.idle_at(e, after).is_some_and(|at| at <= self.now);
                (self.planner.in_use_count(e) == 0 && idle).then_some(false)
            }
            EvictionPolicy::Residency if self.planner.is_spare(e) => Some(self.planner.in_use_count(e) > 0),
            EvictionPolicy::Residency => {
                // Who has just been woken for waiters has no lease before they are granted theirs.
                let used = self.planner.in_use_count(e) > 0 || self.waiting(&e.id.model) > 0;
                let over = e.turn_start + turns.max_turn <= self.now;
                let leaves = over || !used && self.protected_until(e, back) <= self.now;
                leaves.then_some(used)
            }
        }
    }

    /// Until when this idle engine is left alone, by what bringing it back would take; past when it is not.
    pub(in crate::fleet) fn protected_until(&self, e: &Engine, back: Millis) -> Tick {
        let always = self.planner.settings.turns.protection == ProtectionPolicy::Always;
        let elsewhere = e.last_remote_use > Tick(0) && e.last_remote_use >= e.turn_start;
        let others = || {
            elsewhere || e.clients.has_client_not_waiting(|client| self.waiting_clients.contains_key(&client))
        };
        self.planner.protection_end(e, back).filter(|_| always || others()).unwrap_or_else(|| e.idle_since())
    }
}

impl Planner {
    /// Until when this engine is protected if anybody other than those who wait has used it, and nobody uses it before.
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

    /// How long a start of this model takes, learned or supposed.
    pub(in crate::fleet) fn start_time_of(&self, model: &ModelName) -> Millis {
        self.learned_of(model).start.unwrap_or(DEFAULT_COLD_START_TIME)
    }

    /// The same of a wake.
    pub(in crate::fleet) fn wake_time_of(&self, model: &ModelName) -> Millis {
        self.learned_of(model).wake.unwrap_or(DEFAULT_WAKE_TIME)
    }

    fn learned_of(&self, model: &ModelName) -> LearnedMeasurements {
        self.models.get(model).map(|model| model.learned).unwrap_or_default()
    }
}

/// How room may be made on one candidate.
struct EvictionOptions {
    shortfalls: Vec<(AcceleratorId, ResourceAmount)>,
    options: Vec<Victim>,
}

impl EvictionOptions {
    /// The gentlest first, then those unused for longest.
    fn new(mut options: Vec<Victim>, short: Vec<(AcceleratorId, ResourceAmount)>) -> Self {
        options.sort_by_key(|v| (v.tier, v.last_used));
        Self { shortfalls: short, options }
    }

    fn best_set(&self, candidate: &PlacementCandidate, tier: u8) -> Option<Vec<Victim>> {
        let options = self.options.get(..self.options.partition_point(|v| v.tier <= tier))?;
        if !covers(&options.iter().collect::<Vec<_>>(), &self.shortfalls) {
            return None;
        }
        let few = options.get(..MAX_EXHAUSTIVE_VICTIMS).unwrap_or(options);
        (1_u32..1 << few.len())
            .map(|mask| subset(few, mask))
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

/// Where it takes more victims than can be tried in every combination: as many as are needed, in their order, less
/// those that turn out to be superfluous.
fn greedy<'v>(options: &'v [Victim], short: &[(AcceleratorId, ResourceAmount)]) -> Option<Vec<&'v Victim>> {
    let mut set: Vec<&Victim> = Vec::new();
    for option in options {
        if covers(&set, short) {
            break;
        }
        // The gentler way stands first; the other takes its place when there is nothing else left.
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

/// No engine stands in the set twice, once to sleep and once to stop.
fn has_no_duplicate_engine(set: &[&Victim]) -> bool {
    set.iter().enumerate().all(|(i, v)| set.iter().skip(i + 1).all(|w| w.engine != v.engine))
}

fn contains_engine(set: &[&Victim], engine: &EngineId) -> bool {
    set.iter().any(|v| v.engine == *engine)
}

/// Those that need one of the set are in it, too.
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

/// Smaller is better: accelerators disturbed that the newcomer does not need, then whether spare engines are not
/// enough, then bytes freed, then how lately any of them was used, then the time until all of them are back.
fn score(candidate: &PlacementCandidate, set: &[&Victim]) -> (usize, bool, Bytes, Tick, Millis) {
    let outside =
        set.iter().flat_map(|v| &v.accelerators).filter(|a| !candidate.accelerators.contains(a)).count();
    let freed = set.iter().map(|v| Bytes(v.frees.bytes.0.saturating_mul(v.accelerators.len() as u64))).sum();
    let latest = set.iter().map(|v| v.last_used).max().unwrap_or_default();
    let back = set.iter().map(|v| v.restore_time).fold(Millis::ZERO, |a, b| a + b);
    let others = !set.iter().all(|v| v.spare);
    (outside, others, freed, latest, back)
}

impl Victim {
    pub(in crate::fleet) const fn needs_no_drain(&self) -> bool {
        self.needs_no_drain
    }

    /// Somebody uses it: its drain has to be waited for.
    pub(in crate::fleet) const fn is_busy(&self) -> bool {
        self.tier >= TIER_SPARE_IN_USE
    }

    /// For texts.
    pub(in crate::fleet) fn display_name(&self) -> String {
        if self.spare { self.engine.to_string() } else { self.engine.model.to_string() }
    }

    /// For texts: what becomes of it.
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
