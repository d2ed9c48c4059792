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
    command::EngineStopReason,
    event::{LauncherBuildPolicy, MemorySizes, TemplateStatus},
    eviction_set::{AcceleratorShortage, Sleeper, choose_eviction_set},
    ids::{EngineFingerprint, LauncherBuild, PairingEngineId},
    node::{PairingAccelerator, PairingEngine, PairingEngineState, PairingNode, PairingRequester},
    settings::PairingSettings,
};
use crate::{
    model::AcceleratorId,
    units::{Bytes, Millis, Tick},
};

/// The answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FitResult {
    Fits,
    /// These sleepers have to be deleted first, and why.
    Evict(Vec<(PairingEngineId, EngineStopReason)>),
    /// Somebody or something has to be waited for.
    Wait(String),
}

/// The newcomer: an engine to launch, or a sleeper to wake.
pub(super) struct IncomingEngine<'a> {
    pub(super) engine: &'a PairingEngineId,
    pub(super) sizes: MemorySizes,
}

pub(super) struct FitCheck<'a> {
    pub(super) node: &'a PairingNode,
    pub(super) settings: &'a PairingSettings,
    pub(super) template_statuses: &'a BTreeMap<EngineFingerprint, TemplateStatus>,
    pub(super) build_policies: &'a BTreeMap<LauncherBuild, LauncherBuildPolicy>,
    pub(super) now: Tick,
}

/// What is too much on one accelerator.
#[derive(Clone, Copy, Default)]
struct MemoryExcess {
    /// With everything that is there now.
    now: Bytes,
    /// Once what leaves by itself has left.
    after_release: Bytes,
}

/// What an accelerator's sleepers use, as far as that can be said.
enum SleeperUsage {
    Known {
        bytes: Bytes,
        by_meter: bool,
    },
    /// A younger reading is needed.
    NeedsReading,
}

impl FitCheck<'_> {
    pub(super) fn memory_fit(&self, new: &IncomingEngine<'_>) -> FitResult {
        let mut short = AcceleratorShortage::default();
        let mut leaving: Option<String> = None;
        for a in new.engine.accelerators.iter() {
            let Some(known) = self.node.accelerators.get(a) else {
                return FitResult::Wait(format!("nothing is known of {a} yet"));
            };
            if new.sizes.awake > known.facts.capacity {
                let (awake, all) = (new.sizes.awake, known.facts.capacity);
                return FitResult::Wait(format!("it needs {awake} of {a}, which has {all}"));
            }
            let memory = self.memory_excess(a, known, new);
            if let Some(other) = self.conflicting_engine(a, new.engine) {
                let what = format!("{} is {} on {a}", other.id, other.state);
                let full = memory.now > Bytes::ZERO;
                return FitResult::Wait(if full { self.wait_reason(a, new.engine, true) } else { what });
            }
            let Some(budget) = self.budget_excess(a, known, Some(new.engine)) else {
                return FitResult::Wait(format!("{a} has to be measured again"));
            };
            if memory.now > Bytes::ZERO || budget.now > Bytes::ZERO {
                leaving.get_or_insert_with(|| self.wait_reason(a, new.engine, memory.now > Bytes::ZERO));
            }
            if budget.after_release > Bytes::ZERO && !self.may_delete(known) {
                return FitResult::Wait(format!(
                    "{a} is over its sleepers' budget, and its last sleep is recent"
                ));
            }
            let budget = self.cap_at_sleepers(a, new.engine, budget.after_release);
            short.accelerators.insert(a.clone(), memory.after_release.max(budget));
        }
        self.choose(short, new, leaving)
    }

    /// Where the meter finds more than is known, it may be one of the sleepers that keeps more than it was to keep, whichever: all
    /// go, and then it is read again. Where none is left somebody else uses it, and that is waited for.
    fn cap_at_sleepers(&self, a: &AcceleratorId, new: &PairingEngineId, excess: Bytes) -> Bytes {
        let (_, sleepers) = self.sleepers(Some(new));
        let there = sleepers.iter().filter(|s| s.accelerators.contains(a)).map(|s| s.residue).sum::<Bytes>();
        let capped = there > Bytes::ZERO && self.reading_exceeds_known(a, Some(new));
        if capped { excess.min(there) } else { excess }
    }

    /// Accelerators where something is awake and sleepers are over their budget: which sleepers go.
    pub(super) fn budget_evictions(&self) -> Vec<PairingEngineId> {
        let mut short = AcceleratorShortage::default();
        for (a, known) in &self.node.accelerators {
            let awake = self.node.engines_on(a).any(|engine| engine.may_hold_full_memory());
            let launching = self.node.engines_on(a).any(|engine| engine.is_launching());
            if !awake || launching || !self.may_delete(known) {
                continue;
            }
            if let Some(excess) = self.budget_excess(a, known, None) {
                short.accelerators.insert(a.clone(), excess.after_release);
            }
        }
        let (ids, sleepers) = self.sleepers(None);
        // One that cannot be helped does not keep the others from being helped.
        short.accelerators.retain(|a, bytes| {
            let on = sleepers.iter().filter(|s| s.accelerators.contains(a)).map(|s| s.residue).sum::<Bytes>();
            *bytes = (*bytes).min(on);
            *bytes > Bytes::ZERO
        });
        let chosen = choose_eviction_set(&sleepers, &short).unwrap_or_default();
        chosen.into_iter().filter_map(|i| ids.get(i).cloned()).collect()
    }

    fn choose(
        &self,
        short: AcceleratorShortage,
        new: &IncomingEngine<'_>,
        leaving: Option<String>,
    ) -> FitResult {
        let (ids, sleepers) = self.sleepers(Some(new.engine));
        match (choose_eviction_set(&sleepers, &short), leaving) {
            (Some(set), Some(what)) if set.is_empty() => FitResult::Wait(what),
            (Some(set), None) if set.is_empty() => FitResult::Fits,
            (Some(set), _) => {
                let chosen = set.into_iter().filter_map(|i| ids.get(i).cloned());
                FitResult::Evict(chosen.map(|id| (id, EngineStopReason::Evicted)).collect())
            }
            (None, leaving) => {
                let held = || short.accelerators.iter().find(|(_, b)| **b > Bytes::ZERO);
                let what = leaving.or_else(|| held().map(|(a, _)| self.wait_reason(a, new.engine, true)));
                FitResult::Wait(what.unwrap_or_default())
            }
        }
    }

    /// Whose memory changes there now, so that this one is neither launched nor woken beside it.
    fn conflicting_engine<'b>(
        &'b self,
        a: &'b AcceleratorId,
        new: &PairingEngineId,
    ) -> Option<&'b PairingEngine> {
        let launch = !self.node.engines.contains_key(new);
        let soon_awake = |e: &PairingEngine| {
            let speaks = || self.node.staying_requester(e).is_some_and(PairingRequester::is_stub_reachable);
            e.state == PairingEngineState::Waking && !e.ready
                || matches!(e.state, PairingEngineState::Asleep { .. }) && speaks()
        };
        let leaves = |e: &PairingEngine| match e.state {
            PairingEngineState::Draining { .. } => true,
            // One that does not obey is waited for no longer than it takes others.
            PairingEngineState::Stopping { .. } => {
                e.reserved > Bytes::ZERO && e.since + self.settings.stop_timeout > self.now
            }
            _ => false,
        };
        let mut others = self.node.engines_on(a).filter(|e| e.id != *new);
        others.find(|e| {
            let sleeps = matches!(e.state, PairingEngineState::FallingAsleep { .. });
            e.is_launching() || sleeps || launch && (soon_awake(e) || leaves(e))
        })
    }

    fn memory_excess(
        &self,
        a: &AcceleratorId,
        known: &PairingAccelerator,
        new: &IncomingEngine<'_>,
    ) -> MemoryExcess {
        let others = || self.node.engines_on(a).filter(|engine| engine.id != *new.engine);
        let left = self.node.vanished_on(a);
        let sum = others().map(|engine| engine.reserved).sum::<Bytes>() + left + new.sizes.awake;
        let now = sum.saturating_sub(known.facts.capacity);
        let frees = others().map(PairingEngine::pending_release).sum::<Bytes>() + left;
        MemoryExcess { now, after_release: now.saturating_sub(frees) }
    }

    /// By how much the sleepers of this accelerator, but for `except`, are over their budget. `None`: that cannot be said before
    /// the meter has been read again.
    fn budget_excess(
        &self,
        a: &AcceleratorId,
        known: &PairingAccelerator,
        except: Option<&PairingEngineId>,
    ) -> Option<MemoryExcess> {
        let Some(budget) = known.facts.sleeping_memory else {
            return Some(MemoryExcess::default());
        };
        let bytes = match self.sleeper_usage(a, known, except) {
            SleeperUsage::Known { bytes, .. } => bytes,
            SleeperUsage::NeedsReading => return None,
        };
        let now = bytes.saturating_sub(budget);
        let leaving = |engine: &&PairingEngine| {
            matches!(engine.state, PairingEngineState::Stopping { asleep: true, .. })
        };
        let frees = self.node.engines_on(a).filter(leaving).map(|engine| engine.reserved).sum();
        Some(MemoryExcess { now, after_release: now.saturating_sub(frees) })
    }

    /// The meter found more on this accelerator than the sleepers are known to keep.
    pub(super) fn reading_exceeds_known(&self, a: &AcceleratorId, except: Option<&PairingEngineId>) -> bool {
        let Some(known) = self.node.accelerators.get(a) else { return false };
        match self.sleeper_usage(a, known, except) {
            SleeperUsage::Known { bytes, by_meter } => by_meter && bytes > self.known_residue(a, except),
            SleeperUsage::NeedsReading => false,
        }
    }

    fn known_residue(&self, a: &AcceleratorId, except: Option<&PairingEngineId>) -> Bytes {
        let others = self.node.engines_on(a).filter(|engine| Some(&engine.id) != except);
        others.filter(|engine| !engine.may_hold_full_memory()).map(|engine| engine.reserved).sum()
    }

    /// The meter's reading less what is reserved for engines that are awake, and what the newcomer keeps itself. While something is
    /// awake its reservation may be more than it uses, so the sleepers use no less than is known of them.
    fn sleeper_usage(
        &self,
        a: &AcceleratorId,
        known: &PairingAccelerator,
        except: Option<&PairingEngineId>,
    ) -> SleeperUsage {
        let by_residues = self.known_residue(a, except);
        let settled =
            known.last_sleep.max(known.last_engine_gone).map_or(Tick(0), |at| at + self.settings.meter_lag);
        let Some((used, _)) = known.last_reading.filter(|(_, at)| *at >= settled) else {
            let stale =
                known.last_reading.is_some_and(|(_, at)| self.now.since(at) > self.meter_lost_after());
            return if known.needs_reading && !stale {
                SleeperUsage::NeedsReading
            } else {
                SleeperUsage::Known { bytes: by_residues, by_meter: false }
            };
        };
        let awake = self.node.engines_on(a).filter(|e| e.may_hold_full_memory()).map(|e| e.reserved);
        let big = awake.sum::<Bytes>() + self.node.vanished_on(a);
        let own = self.node.engines_on(a).filter(|e| Some(&e.id) == except && !e.may_hold_full_memory());
        let bytes = used.saturating_sub(big + own.map(|e| e.reserved).sum());
        let bytes = if big > Bytes::ZERO { bytes.max(by_residues) } else { bytes };
        SleeperUsage::Known { bytes, by_meter: true }
    }

    /// A meter that has said nothing for so long is not waited for.
    fn meter_lost_after(&self) -> Millis {
        self.settings.meter_lag + self.settings.meter_lag + self.settings.meter_lag
    }

    /// Whether sleepers of this accelerator may be deleted for the budget's sake.
    fn may_delete(&self, known: &PairingAccelerator) -> bool {
        known.last_sleep.is_none_or(|at| at + self.settings.meter_lag <= self.now)
    }

    /// What may be deleted to make room.
    fn sleepers(&self, except: Option<&PairingEngineId>) -> (Vec<PairingEngineId>, Vec<Sleeper>) {
        let free = |e: &&PairingEngine| e.is_evictable() && Some(&e.id) != except;
        let sleeper = |engine: &PairingEngine| Sleeper {
            accelerators: engine.id.accelerators.to_vec(),
            residue: engine.reserved,
            wanted: self.is_wanted(&engine.id),
            outdated: self.is_outdated(&engine.id),
            last_used: engine.last_used,
            // What is larger takes longer to load.
            restart_time: Millis(engine.sizes.awake.0 >> 20),
        };
        self.node.engines.values().filter(free).map(|engine| (engine.id.clone(), sleeper(engine))).unzip()
    }

    pub(super) fn is_outdated(&self, id: &PairingEngineId) -> bool {
        self.template_statuses
            .get(&id.fingerprint)
            .is_some_and(|standing| *standing != TemplateStatus::Current)
    }

    pub(super) fn is_wanted(&self, id: &PairingEngineId) -> bool {
        self.node.requesters.values().any(|r| {
            r.stays()
                && r.observed.requested.fingerprint == id.fingerprint
                && r.accelerators == *id.accelerators
        })
    }

    /// In words: what is in the way on this accelerator.
    fn wait_reason(&self, a: &AcceleratorId, except: &PairingEngineId, memory: bool) -> String {
        if !memory {
            return format!("{a} is over its sleepers' budget");
        }
        let others = self.node.engines_on(a).filter(|e| e.id != *except && e.reserved > Bytes::ZERO);
        let biggest = others.max_by_key(|e| (e.reserved, e.since));
        let left = self.node.vanished_on(a);
        if left > biggest.map_or(Bytes::ZERO, |e| e.reserved) {
            return format!("{left} of {a} may still be held by a Pod that vanished");
        }
        biggest.map_or_else(
            || format!("{a} has too little memory"),
            |e| format!("{} of {a} is held by {}, which is {}", e.reserved, e.id, e.state),
        )
    }
}
