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

use super::{
    command::Then,
    event::Learned,
    placement::Candidate,
    plan::{Draft, Planner},
    portion::Portion,
};
use crate::{
    engine::{Door, Engine, state::State},
    model::{AcceleratorId, EngineId, Eviction, Level, ModelName, Protect},
    units::{Bytes, Millis, Tick},
};

/// One engine to put away, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Victim {
    pub(super) engine: EngineId,
    pub(super) then: Then,
    frees: Portion,
    on: Vec<AcceleratorId>,
    last_used: Tick,
    comes_back_in: Millis,
    tier: u8,
    /// Another engine of its model goes on serving.
    spare: bool,
    /// No lease was ever given on it since it began to start or to sleep: nothing has to be drained.
    at_once: bool,
    /// Those that need it, and have to go with it.
    with: Vec<EngineId>,
}

/// Subsets of so many victims are tried exhaustively; beyond, only the longest unused are considered.
const MOST: usize = 10;
/// What a cold start and a wake are taken to last before one was seen.
const COLD_START: Millis = Millis::secs(60);
const WAKE: Millis = Millis::secs(1);
/// Idle, asleep (stopped), idle (stopped), spare in use, in use.
const TIERS: u8 = 5;
const SPARE_IN_USE: u8 = 3;
const IN_USE: u8 = 4;

impl Draft<'_> {
    /// The best set of victims over all candidates, with the candidate it is for.
    pub(super) fn victims<'c>(
        &self,
        id: &EngineId,
        candidates: &'c [Candidate],
    ) -> Option<(&'c Candidate, Vec<Victim>)> {
        let ways: Vec<(&Candidate, Ways)> =
            candidates.iter().filter_map(|c| Some((c, self.ways(id, c)?))).collect();
        (0..TIERS).find_map(|tier| {
            let sets = ways.iter().filter_map(|(c, ways)| ways.best_set(c, tier).map(|set| (*c, set)));
            sets.min_by_key(|(c, set)| score(c, &set.iter().collect::<Vec<_>>()))
        })
    }

    /// `None`: all of them together are not enough.
    fn ways(&self, id: &EngineId, candidate: &Candidate) -> Option<Ways> {
        let short: Vec<(AcceleratorId, Portion)> = candidate
            .accelerators
            .iter()
            .map(|a| (a.clone(), self.shortfalls(id, candidate, a).1))
            .filter(|(_, short)| !short.is_nothing())
            .collect();
        let mut options: Vec<Victim> = self
            .planner
            .engines
            .near(&candidate.accelerators)
            .into_iter()
            .filter(|e| e.id != *id && e.accelerators.iter().any(|a| short.iter().any(|(s, _)| s == a)))
            .flat_map(|e| self.options(id, e))
            .collect();
        self.add_those_that_need(id, &mut options);
        let all: Vec<&Victim> = options.iter().collect();
        // Counted with both ways of an engine, where it has two: more than there is, never less.
        covers(&all, &short).then(|| Ways::new(options, short))
    }

    /// Wherever they are, they have to go as well.
    fn add_those_that_need(&self, id: &EngineId, options: &mut Vec<Victim>) {
        let mut at = 0;
        while let Some(victim) = options.get(at) {
            let missing = victim.with.iter().filter(|with| options.iter().all(|v| v.engine != **with));
            let more = missing.filter_map(|with| self.engine(with)).flat_map(|e| self.options(id, e));
            let more: Vec<Victim> = more.collect();
            options.extend(more);
            at += 1;
        }
    }

    /// Those that need this engine and are not leaving yet, where each of them may be made to; `None`: one may not.
    fn those_that_need(&self, requester: &EngineId, e: &Engine) -> Option<Vec<EngineId>> {
        let planner = &self.planner;
        let mut with = Vec::new();
        if planner.keeper(e).is_none() {
            return Some(with);
        }
        for other in planner.needs.dependents(&e.id.model).flat_map(|model| planner.engines_of(model)) {
            let asleep = matches!(other.state, State::Asleep { .. }) && other.placing.is_none();
            let gone = !other.state.has_process() && other.placing.is_none();
            if asleep || gone || other.state.is_leaving() {
                continue;
            }
            if self.options(requester, other).is_empty() {
                return None;
            }
            with.push(other.id.clone());
        }
        Some(with)
    }

    /// How this engine could make room, if it may be made to.
    fn options(&self, requester: &EngineId, e: &Engine) -> Vec<Victim> {
        let planner = &self.planner;
        let asker = self.asker(requester);
        if e.id.model == requester.model || planner.is_kept(&e.id) || self.is_needed_with(asker, e) {
            return Vec::new();
        }
        let Some(spec) = planner.spec(&e.id.model) else {
            return Vec::new();
        };
        if planner.settings.eviction_of(spec) == Eviction::Never {
            return Vec::new();
        }
        let all = planner.ledger.part(&e.id);
        let victim = |then, frees, tier, comes_back_in| Victim {
            engine: e.id.clone(),
            then,
            frees,
            on: e.accelerators.clone(),
            last_used: e.idle_since(),
            comes_back_in,
            tier,
            spare: planner.is_spare(e) || e.state.is_starting(),
            at_once: e.state != State::Awake,
            with: Vec::new(),
        };
        let (start, wake) = (planner.start_of(&e.id.model), planner.wake_of(&e.id.model));
        match &e.state {
            State::Asleep { .. } if e.placing.is_none() && e.shrinking.is_none() => {
                if self.goes_before(&e.id, asker) {
                    Vec::new()
                } else {
                    vec![victim(Then::Stop, all, 1, start)]
                }
            }
            State::Awake if e.serves() || e.is_held() => {
                // In use in a higher band, it is waited for: taking turns would let the lower band in by halves, with a
                // swap each time.
                let above = self.band(&e.id) > self.band(asker);
                let in_use = if planner.is_spare(e) { SPARE_IN_USE } else { IN_USE };
                let way = |then, frees, tier, back| {
                    let busy = self.leaves_its_turn(e, back).filter(|busy| !(*busy && above))?;
                    Some(victim(then, frees, if busy { in_use } else { tier }, back))
                };
                let sleeps = self.sleep_level(&e.id, None).is_some();
                let bytes = all.bytes.saturating_sub(planner.residue_of(&e.id));
                let asleep =
                    sleeps.then(|| way(Then::Sleep(None), Portion { bytes, units: 0 }, 0, wake)).flatten();
                let mut ways: Vec<Victim> = asleep
                    .into_iter()
                    .chain(way(Then::Stop, all, if sleeps { 2 } else { 0 }, start))
                    .collect();
                if ways.is_empty() {
                    return ways;
                }
                let Some(with) = self.those_that_need(requester, e) else { return Vec::new() };
                ways.iter_mut().for_each(|way| way.with.clone_from(&with));
                ways
            }
            state if state.is_starting() && self.is_superfluous(e) => {
                let tier = if e.cold { 0 } else { 2 };
                vec![victim(Then::Stop, all, tier, start)]
            }
            _ => Vec::new(),
        }
    }

    /// It starts beside another of its model, and nobody has been sent to it. As whatever gives memory back, it waits for
    /// a neighbour that measures it. A warm one is there in a moment, and sleeps rather than ends.
    fn is_superfluous(&self, e: &Engine) -> bool {
        self.planner.eviction_of(&e.id.model) == Eviction::Residency
            && e.door == Door::Closed
            && !self.planner.leads(&e.id)
            && !self.profiled_beside(&e.id)
    }

    /// `Some(busy)` when policy lets this awake engine be put away now: idle and not protected, or in use for longer than a
    /// turn may last. `back`: what it would take to bring it back.
    fn leaves_its_turn(&self, e: &Engine, back: Millis) -> Option<bool> {
        let settings = &self.planner.settings;
        let turns = &settings.turns;
        let spec = self.planner.spec(&e.id.model)?;
        match settings.eviction_of(spec) {
            Eviction::Never => None,
            Eviction::Cooldown => {
                let after = spec.idle.sleep_after?;
                let idle = self.planner.idle_at(e, after).is_some_and(|at| at <= self.now);
                (self.planner.uses(e) == 0 && idle).then_some(false)
            }
            Eviction::Residency if self.planner.is_spare(e) => Some(self.planner.uses(e) > 0),
            Eviction::Residency => {
                // Who has just been woken for waiters has no lease before they are granted theirs.
                let used = self.planner.uses(e) > 0 || self.waiting(&e.id.model) > 0;
                let over = e.turn + turns.max_turn <= self.now;
                let leaves = over || !used && self.protected_until(e, back) <= self.now;
                leaves.then_some(used)
            }
        }
    }

    /// Until when this idle engine is left alone, by what bringing it back would take; past when it is not.
    pub(super) fn protected_until(&self, e: &Engine, back: Millis) -> Tick {
        let always = self.planner.settings.turns.protect == Protect::Always;
        let elsewhere = e.used_elsewhere > Tick(0) && e.used_elsewhere >= e.turn;
        let others = || elsewhere || e.clients.has_others(|client| self.clients.contains_key(&client));
        self.planner.protected(e, back).filter(|_| always || others()).unwrap_or_else(|| e.idle_since())
    }
}

impl Planner {
    /// Until when this engine is protected if anybody other than those who wait has used it, and nobody uses it before.
    pub(super) fn protected(&self, e: &Engine, back: Millis) -> Option<Tick> {
        let turns = &self.settings.turns;
        let span = match turns.protect {
            Protect::Always => turns.residency,
            Protect::Expected if e.pauses.usual().is_some_and(|usual| usual < back) => {
                back.min(turns.residency)
            }
            Protect::Expected | Protect::Never => return None,
        };
        Some(e.idle_since() + span)
    }

    /// How long a start of this model takes, learned or supposed.
    pub(super) fn start_of(&self, model: &ModelName) -> Millis {
        self.learned_of(model).start.unwrap_or(COLD_START)
    }

    /// The same of a wake.
    pub(super) fn wake_of(&self, model: &ModelName) -> Millis {
        self.learned_of(model).wake.unwrap_or(WAKE)
    }

    fn learned_of(&self, model: &ModelName) -> Learned {
        self.models.get(model).map(|model| model.learned).unwrap_or_default()
    }
}

/// How room may be made on one candidate.
struct Ways {
    short: Vec<(AcceleratorId, Portion)>,
    options: Vec<Victim>,
}

impl Ways {
    /// The gentlest first, then those unused for longest.
    fn new(mut options: Vec<Victim>, short: Vec<(AcceleratorId, Portion)>) -> Self {
        options.sort_by_key(|v| (v.tier, v.last_used));
        Self { short, options }
    }

    fn best_set(&self, candidate: &Candidate, tier: u8) -> Option<Vec<Victim>> {
        let options = self.options.get(..self.options.partition_point(|v| v.tier <= tier))?;
        if !covers(&options.iter().collect::<Vec<_>>(), &self.short) {
            return None;
        }
        let few = options.get(..MOST).unwrap_or(options);
        (1_u32..1 << few.len())
            .map(|mask| pick(few, mask))
            .filter(|set| one_way_each(set) && is_whole(set) && covers(set, &self.short))
            .min_by_key(|set| score(candidate, set))
            .or_else(|| greedy(options, &self.short))
            .map(|set| set.into_iter().cloned().collect())
    }
}

fn pick(options: &[Victim], mask: u32) -> Vec<&Victim> {
    options.iter().enumerate().filter(|(i, _)| mask & (1 << i) != 0).map(|(_, v)| v).collect()
}

/// Where it takes more victims than can be tried in every combination: as many as are needed, in their order, less
/// those that turn out to be superfluous.
fn greedy<'v>(options: &'v [Victim], short: &[(AcceleratorId, Portion)]) -> Option<Vec<&'v Victim>> {
    let mut set: Vec<&Victim> = Vec::new();
    for option in options {
        if covers(&set, short) {
            break;
        }
        // The gentler way stands first; the other takes its place when there is nothing else left.
        set.retain(|v| v.engine != option.engine);
        set.push(option);
        while let Some(with) = set.iter().flat_map(|v| &v.with).find(|with| !holds(&set, with)) {
            set.push(options.iter().find(|v| v.engine == *with)?);
        }
    }
    if !covers(&set, short) {
        return None;
    }
    for at in (0..set.len()).rev() {
        let without: Vec<&Victim> =
            set.iter().enumerate().filter(|(i, _)| *i != at).map(|(_, v)| *v).collect();
        if is_whole(&without) && covers(&without, short) {
            set = without;
        }
    }
    Some(set)
}

/// No engine stands in the set twice, once to sleep and once to stop.
fn one_way_each(set: &[&Victim]) -> bool {
    set.iter().enumerate().all(|(i, v)| set.iter().skip(i + 1).all(|w| w.engine != v.engine))
}

fn holds(set: &[&Victim], engine: &EngineId) -> bool {
    set.iter().any(|v| v.engine == *engine)
}

/// Those that need one of the set are in it, too.
fn is_whole(set: &[&Victim]) -> bool {
    set.iter().all(|v| v.with.iter().all(|with| holds(set, with)))
}

fn covers(set: &[&Victim], short: &[(AcceleratorId, Portion)]) -> bool {
    short.iter().all(|(a, need)| {
        set.iter().filter(|v| v.on.contains(a)).map(|v| v.frees).sum::<Portion>().covers(*need)
    })
}

/// Smaller is better: accelerators disturbed that the newcomer does not need, then whether spare engines are not
/// enough, then bytes freed, then how lately any of them was used, then the time until all of them are back.
fn score(candidate: &Candidate, set: &[&Victim]) -> (usize, bool, Bytes, Tick, Millis) {
    let outside = set.iter().flat_map(|v| &v.on).filter(|a| !candidate.accelerators.contains(a)).count();
    let freed = set.iter().map(|v| Bytes(v.frees.bytes.0.saturating_mul(v.on.len() as u64))).sum();
    let latest = set.iter().map(|v| v.last_used).max().unwrap_or_default();
    let back = set.iter().map(|v| v.comes_back_in).fold(Millis::ZERO, |a, b| a + b);
    let others = !set.iter().all(|v| v.spare);
    (outside, others, freed, latest, back)
}

impl Victim {
    pub(super) const fn goes_at_once(&self) -> bool {
        self.at_once
    }

    /// Somebody uses it: its drain has to be waited for.
    pub(super) const fn is_busy(&self) -> bool {
        self.tier >= SPARE_IN_USE
    }

    /// For texts.
    pub(super) fn name(&self) -> String {
        if self.spare { self.engine.to_string() } else { self.engine.model.to_string() }
    }

    /// For texts: what becomes of it.
    pub(super) const fn fate(&self) -> &'static str {
        match self.then {
            Then::Sleep(Some(Level::One | Level::Two) | None) => "put to sleep",
            Then::Stop => "stopped",
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
            then: Then::Stop,
            frees: Portion { bytes: Bytes::gib(4), units: 1 },
            on: vec!["gpu-0".into()],
            last_used: Tick(n),
            comes_back_in: Millis::secs(60),
            tier: 1,
            spare: false,
            at_once: true,
            with: Vec::new(),
        };
        let options: Vec<Victim> = (0..18).map(sleeper).collect();
        let short = |gib| [(AcceleratorId::from("gpu-0"), Portion { bytes: Bytes::gib(gib), units: 0 })];
        let set = greedy(&options, &short(46)).expect("twelve are enough");
        assert_eq!(set.len(), 12);
        assert!(set.iter().all(|v| v.last_used < Tick(12)), "those unused for longest");
        assert!(greedy(&options, &short(73)).is_none());
    }
}
