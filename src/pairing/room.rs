//! Is there room to launch or wake an engine, and if not, what has to go?
//!
//! Two things are asked of every accelerator of the engine. Its reservation must fit beside those of every engine known there,
//! whoever the kubelet says holds the accelerator: that is the guarantee. And the sleepers must be within their budget: seed 1's
//! rule, judged by the meter where a reading counts, else by what the sleepers are known to keep. Host RAM is no reason to wait or
//! to delete anything: an engine takes some when it falls asleep at level 1, and only where there is enough of it.
//!
//! What changes the memory of an accelerator does not go on beside something else whose measure that would spoil. An engine that
//! is launched measures what is free and takes its share of it: beside it nothing is launched, woken, put to sleep or ended for the
//! budget's sake. One that falls asleep is measured afterwards: beside it nothing is launched or woken. Wakes measure nothing, and go
//! on side by side.
//!
//! All or nothing: no sleeper is touched unless deleting some makes room for certain, and what is about to become free by itself
//! is waited for.

use std::collections::BTreeMap;

use super::{
    command::Why,
    cover::{Shortage, Sleeper, cover},
    event::{Sizes, Standing, Terms},
    ids::{Build, EngineId, Fingerprint},
    node::{Accelerator, Engine, Node, Requester, State},
    settings::Settings,
};
use crate::{
    model::AcceleratorId,
    units::{Bytes, Millis, Tick},
};

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Room {
    There,
    /// These sleepers have to be deleted first, and why.
    Evict(Vec<(EngineId, Why)>),
    /// Somebody or something has to be waited for.
    Wait(String),
}

/// The newcomer: an engine to launch, or a sleeper to wake.
pub(super) struct Newcomer<'a> {
    pub(super) engine: &'a EngineId,
    pub(super) sizes: Sizes,
}

pub(super) struct Rooms<'a> {
    pub(super) node: &'a Node,
    pub(super) settings: &'a Settings,
    pub(super) standings: &'a BTreeMap<Fingerprint, Standing>,
    pub(super) builds: &'a BTreeMap<Build, Terms>,
    pub(super) now: Tick,
}

/// What is too much on one accelerator.
#[derive(Clone, Copy, Default)]
struct Excess {
    /// With everything that is there now.
    now: Bytes,
    /// Once what leaves by itself has left.
    later: Bytes,
}

/// What an accelerator's sleepers use, as far as that can be said.
enum Use {
    Known {
        bytes: Bytes,
        by_meter: bool,
    },
    /// A younger reading is needed.
    Unread,
}

impl Rooms<'_> {
    pub(super) fn for_newcomer(&self, new: &Newcomer<'_>) -> Room {
        let mut short = Shortage::default();
        let mut leaving: Option<String> = None;
        for a in new.engine.accelerators.iter() {
            let Some(known) = self.node.accelerators.get(a) else {
                return Room::Wait(format!("nothing is known of {a} yet"));
            };
            if new.sizes.awake > known.facts.capacity {
                let (awake, all) = (new.sizes.awake, known.facts.capacity);
                return Room::Wait(format!("it needs {awake} of {a}, which has {all}"));
            }
            let memory = self.too_full(a, known, new);
            if let Some(other) = self.spoils(a, new.engine) {
                let what = format!("{} is {} on {a}", other.id, other.state);
                let full = memory.now > Bytes::ZERO;
                return Room::Wait(if full { self.waits_for(a, new.engine, true) } else { what });
            }
            let Some(budget) = self.over_budget(a, known, Some(new.engine)) else {
                return Room::Wait(format!("{a} has to be measured again"));
            };
            if memory.now > Bytes::ZERO || budget.now > Bytes::ZERO {
                leaving.get_or_insert_with(|| self.waits_for(a, new.engine, memory.now > Bytes::ZERO));
            }
            if budget.later > Bytes::ZERO && !self.may_delete(known) {
                return Room::Wait(format!("{a} is over its sleepers' budget, and its last sleep is recent"));
            }
            let budget = self.no_more_than_there_is(a, new.engine, budget.later);
            short.accelerators.insert(a.clone(), memory.later.max(budget));
        }
        self.choose(short, new, leaving)
    }

    /// Where the meter finds more than is known, it may be one of the sleepers that keeps more than it was to keep, whichever: all
    /// go, and then it is read again. Where none is left somebody else uses it, and that is waited for.
    fn no_more_than_there_is(&self, a: &AcceleratorId, new: &EngineId, excess: Bytes) -> Bytes {
        let (_, sleepers) = self.sleepers(Some(new));
        let there = sleepers.iter().filter(|s| s.on.contains(a)).map(|s| s.residue).sum::<Bytes>();
        let capped = there > Bytes::ZERO && self.is_more_than_known(a, Some(new));
        if capped { excess.min(there) } else { excess }
    }

    /// Accelerators where something is awake and sleepers are over their budget: which sleepers go.
    pub(super) fn upkeep(&self) -> Vec<EngineId> {
        let mut short = Shortage::default();
        for (a, known) in &self.node.accelerators {
            let awake = self.node.engines_on(a).any(|engine| engine.is_big());
            let launching = self.node.engines_on(a).any(|engine| engine.is_launching());
            if !awake || launching || !self.may_delete(known) {
                continue;
            }
            if let Some(excess) = self.over_budget(a, known, None) {
                short.accelerators.insert(a.clone(), excess.later);
            }
        }
        let (ids, sleepers) = self.sleepers(None);
        // One that cannot be helped does not keep the others from being helped.
        short.accelerators.retain(|a, bytes| {
            let on = sleepers.iter().filter(|s| s.on.contains(a)).map(|s| s.residue).sum::<Bytes>();
            *bytes = (*bytes).min(on);
            *bytes > Bytes::ZERO
        });
        let chosen = cover(&sleepers, &short).unwrap_or_default();
        chosen.into_iter().filter_map(|i| ids.get(i).cloned()).collect()
    }

    fn choose(&self, short: Shortage, new: &Newcomer<'_>, leaving: Option<String>) -> Room {
        let (ids, sleepers) = self.sleepers(Some(new.engine));
        match (cover(&sleepers, &short), leaving) {
            (Some(set), Some(what)) if set.is_empty() => Room::Wait(what),
            (Some(set), None) if set.is_empty() => Room::There,
            (Some(set), _) => {
                let chosen = set.into_iter().filter_map(|i| ids.get(i).cloned());
                Room::Evict(chosen.map(|id| (id, Why::Evicted)).collect())
            }
            (None, leaving) => {
                let held = || short.accelerators.iter().find(|(_, b)| **b > Bytes::ZERO);
                let what = leaving.or_else(|| held().map(|(a, _)| self.waits_for(a, new.engine, true)));
                Room::Wait(what.unwrap_or_default())
            }
        }
    }

    /// Whose memory changes there now, so that this one is neither launched nor woken beside it.
    fn spoils<'b>(&'b self, a: &'b AcceleratorId, new: &EngineId) -> Option<&'b Engine> {
        let launch = !self.node.engines.contains_key(new);
        let soon_awake = |e: &Engine| {
            let speaks = || self.node.staying(e).is_some_and(Requester::speaks);
            e.state == State::Waking && !e.answers || matches!(e.state, State::Asleep { .. }) && speaks()
        };
        let leaves = |e: &Engine| match e.state {
            State::Draining { .. } => true,
            // One that does not obey is waited for no longer than it takes others.
            State::Ending { .. } => e.held > Bytes::ZERO && e.since + self.settings.end > self.now,
            _ => false,
        };
        let mut others = self.node.engines_on(a).filter(|e| e.id != *new);
        others.find(|e| {
            let sleeps = matches!(e.state, State::FallingAsleep { .. });
            e.is_launching() || sleeps || launch && (soon_awake(e) || leaves(e))
        })
    }

    fn too_full(&self, a: &AcceleratorId, known: &Accelerator, new: &Newcomer<'_>) -> Excess {
        let others = || self.node.engines_on(a).filter(|engine| engine.id != *new.engine);
        let left = self.node.left_on(a);
        let sum = others().map(|engine| engine.held).sum::<Bytes>() + left + new.sizes.awake;
        let now = sum.saturating_sub(known.facts.capacity);
        let frees = others().map(Engine::frees).sum::<Bytes>() + left;
        Excess { now, later: now.saturating_sub(frees) }
    }

    /// By how much the sleepers of this accelerator, but for `except`, are over their budget. `None`: that cannot be said before
    /// the meter has been read again.
    fn over_budget(
        &self,
        a: &AcceleratorId,
        known: &Accelerator,
        except: Option<&EngineId>,
    ) -> Option<Excess> {
        let Some(budget) = known.facts.sleeping else {
            return Some(Excess::default());
        };
        let bytes = match self.sleepers_use(a, known, except) {
            Use::Known { bytes, .. } => bytes,
            Use::Unread => return None,
        };
        let now = bytes.saturating_sub(budget);
        let leaving = |engine: &&Engine| matches!(engine.state, State::Ending { asleep: true, .. });
        let frees = self.node.engines_on(a).filter(leaving).map(|engine| engine.held).sum();
        Some(Excess { now, later: now.saturating_sub(frees) })
    }

    /// The meter found more on this accelerator than the sleepers are known to keep.
    pub(super) fn is_more_than_known(&self, a: &AcceleratorId, except: Option<&EngineId>) -> bool {
        let Some(known) = self.node.accelerators.get(a) else { return false };
        match self.sleepers_use(a, known, except) {
            Use::Known { bytes, by_meter } => by_meter && bytes > self.known_use(a, except),
            Use::Unread => false,
        }
    }

    fn known_use(&self, a: &AcceleratorId, except: Option<&EngineId>) -> Bytes {
        let others = self.node.engines_on(a).filter(|engine| Some(&engine.id) != except);
        others.filter(|engine| !engine.is_big()).map(|engine| engine.held).sum()
    }

    /// The meter's reading less what is reserved for engines that are awake, and what the newcomer keeps itself. While something is
    /// awake its reservation may be more than it uses, so the sleepers use no less than is known of them.
    fn sleepers_use(&self, a: &AcceleratorId, known: &Accelerator, except: Option<&EngineId>) -> Use {
        let by_residues = self.known_use(a, except);
        let settled = known.last_sleep.max(known.last_gone).map_or(Tick(0), |at| at + self.settings.settle);
        let Some((used, _)) = known.observed.filter(|(_, at)| *at >= settled) else {
            let stale = known.observed.is_some_and(|(_, at)| self.now.since(at) > self.lost_after());
            return if known.doubted && !stale {
                Use::Unread
            } else {
                Use::Known { bytes: by_residues, by_meter: false }
            };
        };
        let awake = self.node.engines_on(a).filter(|e| e.is_big()).map(|e| e.held);
        let big = awake.sum::<Bytes>() + self.node.left_on(a);
        let own = self.node.engines_on(a).filter(|e| Some(&e.id) == except && !e.is_big());
        let bytes = used.saturating_sub(big + own.map(|e| e.held).sum());
        let bytes = if big > Bytes::ZERO { bytes.max(by_residues) } else { bytes };
        Use::Known { bytes, by_meter: true }
    }

    /// A meter that has said nothing for so long is not waited for.
    fn lost_after(&self) -> Millis {
        self.settings.settle + self.settings.settle + self.settings.settle
    }

    /// Whether sleepers of this accelerator may be deleted for the budget's sake.
    fn may_delete(&self, known: &Accelerator) -> bool {
        known.last_sleep.is_none_or(|at| at + self.settings.settle <= self.now)
    }

    /// What may be deleted to make room.
    fn sleepers(&self, except: Option<&EngineId>) -> (Vec<EngineId>, Vec<Sleeper>) {
        let free = |e: &&Engine| e.is_free() && Some(&e.id) != except;
        let sleeper = |engine: &Engine| Sleeper {
            on: engine.id.accelerators.to_vec(),
            residue: engine.held,
            wanted: self.is_wanted(&engine.id),
            outdated: self.is_outdated(&engine.id),
            last_used: engine.last_used,
            // What is larger takes longer to load.
            comes_back_in: Millis(engine.sizes.awake.0 >> 20),
        };
        self.node.engines.values().filter(free).map(|engine| (engine.id.clone(), sleeper(engine))).unzip()
    }

    pub(super) fn is_outdated(&self, id: &EngineId) -> bool {
        self.standings.get(&id.fingerprint).is_some_and(|standing| *standing != Standing::Current)
    }

    pub(super) fn is_wanted(&self, id: &EngineId) -> bool {
        self.node.requesters.values().any(|r| {
            r.stays() && r.seen.ask.fingerprint == id.fingerprint && r.accelerators == *id.accelerators
        })
    }

    /// In words: what is in the way on this accelerator.
    fn waits_for(&self, a: &AcceleratorId, except: &EngineId, memory: bool) -> String {
        if !memory {
            return format!("{a} is over its sleepers' budget");
        }
        let others = self.node.engines_on(a).filter(|e| e.id != *except && e.held > Bytes::ZERO);
        let biggest = others.max_by_key(|e| (e.held, e.since));
        let left = self.node.left_on(a);
        if left > biggest.map_or(Bytes::ZERO, |e| e.held) {
            return format!("{left} of {a} may still be held by a Pod that vanished");
        }
        biggest.map_or_else(
            || format!("{a} has too little memory"),
            |e| format!("{} of {a} is held by {}, which is {}", e.held, e.id, e.state),
        )
    }
}
