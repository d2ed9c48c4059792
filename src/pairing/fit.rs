//! Checks whether an engine fits, and otherwise which sleepers must be deleted.
//!
//! Every accelerator of the engine must pass two checks. First, its reservation must fit beside those of every engine
//! known there, whichever Pod the kubelet gave the accelerator to: that is the guarantee. Second, the sleepers must be
//! within their budget. That is the public project's rule, judged by the meter where a reading counts, else by the
//! known residues. It covers the unbound sleepers. A sleeper that is bound to its requester is the gateway's decision,
//! and its reservation counts as that of an awake engine does. Its wake needs only the reservation and waits for no
//! reading: unbound sleepers over the budget are deleted once it is awake.
//! Host RAM never delays or evicts: an engine takes some only when it falls asleep at level 1, and only if enough is
//! free.
//!
//! Operations that change an accelerator's memory do not overlap where one would spoil the other's measurement. A
//! launching engine measures the free memory and takes its share of it. So beside it no engine is launched, woken, put
//! to sleep, or stopped for the budget. An engine that falls asleep is measured afterwards, so beside it no engine is
//! launched or woken. Wakes measure nothing and may overlap.
//!
//! The check is all or nothing: no sleeper is deleted unless deletions make room for certain. Memory that is about to
//! become free is waited for.

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

/// Result of a fit check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FitResult {
    Fits,
    /// These sleepers must be deleted first, for these reasons.
    Evict(Vec<(PairingEngineId, EngineStopReason)>),
    /// The engine must wait for memory, for this reason.
    Wait(String),
    /// The engine cannot start, for this reason, however much memory becomes free.
    Unfit(String),
}

/// The engine to launch, or the sleeper to wake.
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

/// Excess memory on one accelerator.
#[derive(Clone, Copy, Default)]
struct MemoryExcess {
    /// With everything that is there now.
    now: Bytes,
    /// After the pending releases.
    after_release: Bytes,
}

/// Memory in use by an accelerator's sleepers.
enum SleeperUsage {
    Known {
        bytes: Bytes,
        by_meter: bool,
    },
    /// A newer reading is needed.
    NeedsReading,
}

impl FitCheck<'_> {
    pub(super) fn memory_fit(&self, new: &IncomingEngine<'_>) -> FitResult {
        let mut short = AcceleratorShortage::default();
        let mut leaving: Option<String> = None;
        let is_bound_sleeper = self.node.engines.get(new.engine).is_some_and(|engine| engine.awaits_want);
        for a in new.engine.accelerators.iter() {
            let Some(accelerator) = self.node.accelerators.get(a) else {
                return FitResult::Wait(format!("{a} is not known yet"));
            };
            if new.sizes.awake > accelerator.facts.capacity {
                let (awake, all) = (new.sizes.awake, accelerator.facts.capacity);
                return FitResult::Unfit(format!("the engine needs {awake} of {a}, which has {all}"));
            }
            let memory = self.memory_excess(a, accelerator, new);
            if let Some(other) = self.conflicting_engine(a, new.engine) {
                let conflict = format!("{} is {} on {a}", other.id, other.state);
                let full = memory.now > Bytes::ZERO;
                return FitResult::Wait(if full { self.wait_reason(a, new.engine, true) } else { conflict });
            }
            let budget = if is_bound_sleeper {
                Some(MemoryExcess::default())
            } else {
                self.budget_excess(a, accelerator, Some(new.engine))
            };
            let Some(budget) = budget else {
                return FitResult::Wait(format!("the memory of {a} must be measured again"));
            };
            if memory.now > Bytes::ZERO || budget.now > Bytes::ZERO {
                leaving.get_or_insert_with(|| self.wait_reason(a, new.engine, memory.now > Bytes::ZERO));
            }
            if budget.after_release > Bytes::ZERO && !self.may_delete(accelerator) {
                return FitResult::Wait(format!(
                    "the sleepers on {a} exceed their budget, and the last sleep there is recent"
                ));
            }
            let budget = self.cap_at_sleepers(a, new.engine, budget.after_release);
            short.accelerators.insert(a.clone(), memory.after_release.max(budget));
        }
        self.choose(short, new, leaving)
    }

    /// Limits the excess to what the sleepers hold, where the meter finds more than is known. One of the sleepers may
    /// keep more than expected, and which is unknown: all are deleted, and the meter is read again. If no sleeper is
    /// left, another process uses the memory, and the engine waits for it.
    fn cap_at_sleepers(&self, a: &AcceleratorId, new: &PairingEngineId, excess: Bytes) -> Bytes {
        if excess == Bytes::ZERO {
            return excess;
        }
        let sleepers = self.node.engines_on(a).filter(|e| e.is_evictable() && e.id != *new);
        let sleeper_bytes = sleepers.map(|e| e.reserved).sum::<Bytes>();
        let capped = sleeper_bytes > Bytes::ZERO && self.reading_exceeds_known(a, Some(new));
        if capped { excess.min(sleeper_bytes) } else { excess }
    }

    /// The sleepers to delete where an engine is awake and the sleepers are over their budget.
    pub(super) fn budget_evictions(&self) -> Vec<PairingEngineId> {
        let mut short = AcceleratorShortage::default();
        for (a, accelerator) in &self.node.accelerators {
            let awake = self.node.engines_on(a).any(|engine| engine.may_hold_full_memory());
            let launching = self.node.engines_on(a).any(|engine| engine.is_launching());
            if !awake || launching || !self.may_delete(accelerator) {
                continue;
            }
            if let Some(excess) = self.budget_excess(a, accelerator, None) {
                short.accelerators.insert(a.clone(), excess.after_release);
            }
        }
        if short.is_none() {
            return Vec::new();
        }
        let (ids, sleepers) = self.sleepers(None);
        // An accelerator with too few sleepers does not keep the others from being relieved.
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
        if short.is_none() {
            return leaving.map_or(FitResult::Fits, FitResult::Wait);
        }
        let (ids, sleepers) = self.sleepers(Some(new.engine));
        match (choose_eviction_set(&sleepers, &short), leaving) {
            (Some(set), _) => {
                let chosen = set.into_iter().filter_map(|i| ids.get(i).cloned());
                FitResult::Evict(chosen.map(|id| (id, EngineStopReason::Evicted)).collect())
            }
            (None, leaving) => {
                let short_of = || short.accelerators.iter().find(|(_, b)| **b > Bytes::ZERO);
                let reason =
                    leaving.or_else(|| short_of().map(|(a, _)| self.wait_reason(a, new.engine, true)));
                FitResult::Wait(reason.unwrap_or_default())
            }
        }
    }

    /// The engine whose memory changes on this accelerator, so that `new` must wait for it.
    fn conflicting_engine<'b>(
        &'b self,
        a: &'b AcceleratorId,
        new: &PairingEngineId,
    ) -> Option<&'b PairingEngine> {
        let launch = !self.node.engines.contains_key(new);
        let soon_awake = |e: &PairingEngine| {
            let stub_reachable =
                || self.node.staying_requester(e).is_some_and(PairingRequester::is_stub_reachable);
            let is_asleep = matches!(e.state, PairingEngineState::Asleep { .. }) && !e.awaits_want;
            e.state == PairingEngineState::Waking && !e.ready || is_asleep && stub_reachable()
        };
        let leaves = |e: &PairingEngine| match e.state {
            PairingEngineState::Draining { .. } => true,
            // An engine that does not stop is waited for no longer than `stop_timeout`.
            PairingEngineState::Stopping { .. } => {
                e.reserved > Bytes::ZERO && e.since + self.settings.stop_timeout > self.now
            }
            _ => false,
        };
        let mut other_engines = self.node.engines_on(a).filter(|e| e.id != *new);
        other_engines.find(|e| {
            let sleeps = matches!(e.state, PairingEngineState::FallingAsleep { .. });
            e.is_launching() || sleeps || launch && (soon_awake(e) || leaves(e))
        })
    }

    fn memory_excess(
        &self,
        a: &AcceleratorId,
        accelerator: &PairingAccelerator,
        new: &IncomingEngine<'_>,
    ) -> MemoryExcess {
        let other_engines = || self.node.engines_on(a).filter(|engine| engine.id != *new.engine);
        let vanished = self.node.vanished_on(a);
        let sum = other_engines().map(|engine| engine.reserved).sum::<Bytes>() + vanished + new.sizes.awake;
        let now = sum.saturating_sub(accelerator.facts.capacity);
        let frees = other_engines().map(PairingEngine::pending_release).sum::<Bytes>() + vanished;
        MemoryExcess { now, after_release: now.saturating_sub(frees) }
    }

    /// By how much this accelerator's sleepers, except `except`, exceed their budget. `None` until the meter has been
    /// read again.
    fn budget_excess(
        &self,
        a: &AcceleratorId,
        accelerator: &PairingAccelerator,
        except: Option<&PairingEngineId>,
    ) -> Option<MemoryExcess> {
        let Some(budget) = accelerator.facts.sleeping_memory else {
            return Some(MemoryExcess::default());
        };
        let bytes = match self.sleeper_usage(a, accelerator, except) {
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

    /// Whether the meter found more on this accelerator than the known residues.
    pub(super) fn reading_exceeds_known(&self, a: &AcceleratorId, except: Option<&PairingEngineId>) -> bool {
        let Some(accelerator) = self.node.accelerators.get(a) else { return false };
        match self.sleeper_usage(a, accelerator, except) {
            SleeperUsage::Known { bytes, by_meter } => by_meter && bytes > self.known_residue(a, except),
            SleeperUsage::NeedsReading => false,
        }
    }

    fn known_residue(&self, a: &AcceleratorId, except: Option<&PairingEngineId>) -> Bytes {
        let other_engines = self.node.engines_on(a).filter(|engine| Some(&engine.id) != except);
        other_engines.filter(|engine| is_unbound_sleeper(engine)).map(|engine| engine.reserved).sum()
    }

    /// The reading minus the reservations of awake engines, bound sleepers and vanished Pods, and minus the residue of
    /// `except`. An awake engine may use less than its reservation. So while an engine is awake, the result is at least
    /// the known residues.
    fn sleeper_usage(
        &self,
        a: &AcceleratorId,
        accelerator: &PairingAccelerator,
        except: Option<&PairingEngineId>,
    ) -> SleeperUsage {
        let by_residues = self.known_residue(a, except);
        let settled_at = accelerator
            .last_sleep
            .max(accelerator.last_engine_gone)
            .map_or(Tick(0), |at| at + self.settings.meter_lag);
        let Some((used, _)) = accelerator.last_reading.filter(|(_, at)| *at >= settled_at) else {
            let stale =
                accelerator.last_reading.is_some_and(|(_, at)| self.now.since(at) > self.meter_lost_after());
            return if accelerator.needs_reading && !stale {
                SleeperUsage::NeedsReading
            } else {
                SleeperUsage::Known { bytes: by_residues, by_meter: false }
            };
        };
        let others = self.node.engines_on(a).filter(|e| !is_unbound_sleeper(e)).map(|e| e.reserved);
        let full_memory = others.sum::<Bytes>() + self.node.vanished_on(a);
        let excepted = self.node.engines_on(a).filter(|e| Some(&e.id) == except && is_unbound_sleeper(e));
        let bytes = used.saturating_sub(full_memory + excepted.map(|e| e.reserved).sum());
        let bytes = if full_memory > Bytes::ZERO { bytes.max(by_residues) } else { bytes };
        SleeperUsage::Known { bytes, by_meter: true }
    }

    /// Age at which a missing reading is no longer waited for.
    fn meter_lost_after(&self) -> Millis {
        self.settings.meter_lag + self.settings.meter_lag + self.settings.meter_lag
    }

    /// Whether sleepers of this accelerator may be deleted for the budget.
    fn may_delete(&self, accelerator: &PairingAccelerator) -> bool {
        accelerator.last_sleep.is_none_or(|at| at + self.settings.meter_lag <= self.now)
    }

    /// The sleepers that may be deleted to make room.
    fn sleepers(&self, except: Option<&PairingEngineId>) -> (Vec<PairingEngineId>, Vec<Sleeper>) {
        let free = |e: &&PairingEngine| e.is_evictable() && Some(&e.id) != except;
        let sleeper = |engine: &PairingEngine| Sleeper {
            accelerators: engine.id.accelerators.to_vec(),
            residue: engine.reserved,
            wanted: self.is_wanted(&engine.id),
            outdated: self.is_outdated(&engine.id),
            last_used: engine.last_used,
            // Larger engines take longer to load.
            restart_time: Millis(engine.sizes.awake.0 >> 20),
        };
        self.node.engines.values().filter(free).map(|engine| (engine.id.clone(), sleeper(engine))).unzip()
    }

    pub(super) fn is_outdated(&self, id: &PairingEngineId) -> bool {
        self.template_statuses.get(&id.fingerprint).is_some_and(|status| *status != TemplateStatus::Current)
    }

    pub(super) fn is_wanted(&self, id: &PairingEngineId) -> bool {
        self.node.requesters.iter().any(|(requester, r)| {
            r.stays()
                && !self.node.wants_asleep(requester)
                && r.observed.requested.fingerprint == id.fingerprint
                && r.accelerators == id.accelerators
        })
    }

    /// Describes what occupies this accelerator.
    fn wait_reason(&self, a: &AcceleratorId, except: &PairingEngineId, memory: bool) -> String {
        if !memory {
            return format!("the sleepers on {a} exceed their budget");
        }
        let holders = self.node.engines_on(a).filter(|e| e.id != *except && e.reserved > Bytes::ZERO);
        let biggest = holders.max_by_key(|e| (e.reserved, e.since));
        let vanished = self.node.vanished_on(a);
        if vanished > biggest.map_or(Bytes::ZERO, |e| e.reserved) {
            return format!("{vanished} of {a} may still be held by a Pod that vanished");
        }
        biggest.map_or_else(
            || format!("{a} has too little memory"),
            |e| format!("{} of {a} is held by {}, which is {}", e.reserved, e.id, e.state),
        )
    }
}

/// Whether the budget covers this engine: it keeps no more than its residue, and no requester keeps it.
fn is_unbound_sleeper(engine: &PairingEngine) -> bool {
    !engine.may_hold_full_memory() && !engine.awaits_want
}
