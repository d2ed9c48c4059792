//! The leader's metrics about requesters, launchers and the pairs of requesters and engines.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    model::AcceleratorId,
    pairing::{event::ProviderPhase, ids::PairingEngineId},
    units::{Millis, Tick},
};

use super::{
    facts::ClusterFacts,
    index::{IndexedPod, PodIndex, ProviderPod, RequesterPod},
};
use crate::{
    crd::ledger::ObjectName,
    dual_pods::keys,
    metrics::{DualPodMetrics, EngineBindingLabels, LauncherPhase},
    platform::launcher,
};

/// A launcher without a node counts as stuck after this time. The public project uses the same.
const STUCK_SCHEDULING_AFTER: Millis = Millis::secs(120);
/// A scheduled launcher that is not ready counts as stuck after this time: images are large.
const STUCK_STARTING_AFTER: Millis = Millis::secs(450);

pub(super) struct PairingMetrics {
    metrics: DualPodMetrics,
    leads: bool,
    pods: BTreeMap<ObjectName, CountedPod>,
    /// By InferenceServerConfig.
    requesters: BTreeMap<String, usize>,
    launchers: BTreeMap<(String, LauncherPhase), usize>,
    /// InferenceServerConfigs by LauncherConfig.
    configs: BTreeMap<String, usize>,
    /// When each starting launcher counts as stuck.
    due: BTreeMap<ObjectName, Tick>,
}

/// Current inputs of the metrics.
#[derive(Clone, Copy)]
pub(super) struct MetricsInputs<'a> {
    pub(super) index: &'a PodIndex,
    pub(super) facts: &'a ClusterFacts,
    pub(super) now: Tick,
}

/// What was counted of a Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CountedPod {
    /// The requested InferenceServerConfig, and the provider that the Pod names.
    Requester { config: String, dual: Option<ObjectName> },
    /// `launcher`: its LauncherConfig and phase.
    Provider { pairs: BTreeSet<EngineBindingLabels>, launcher: Option<(String, LauncherPhase)> },
}

impl PairingMetrics {
    pub(super) const fn new(told: DualPodMetrics) -> Self {
        Self {
            metrics: told,
            leads: false,
            pods: BTreeMap::new(),
            requesters: BTreeMap::new(),
            launchers: BTreeMap::new(),
            configs: BTreeMap::new(),
            due: BTreeMap::new(),
        }
    }

    /// Resets all metrics. Nothing is counted until [`Self::begin`].
    pub(super) fn clear(&mut self) {
        self.metrics.reset();
        *self = Self::new(self.metrics.clone());
    }

    pub(super) fn begin(&mut self, sight: MetricsInputs<'_>) {
        self.leads = true;
        self.recount_all(sight);
    }

    /// Returns when a count changes without an event.
    pub(super) fn due(&self) -> Option<Tick> {
        self.due.values().min().copied()
    }

    pub(super) fn recount_due(&mut self, sight: MetricsInputs<'_>) {
        let is_due = |(_, at): &(&ObjectName, &Tick)| **at <= sight.now;
        let due: Vec<ObjectName> = self.due.iter().filter(is_due).map(|(name, _)| name.clone()).collect();
        due.iter().for_each(|name| self.count(name, sight));
    }

    pub(super) fn recount_all(&mut self, sight: MetricsInputs<'_>) {
        let known: BTreeSet<ObjectName> = self.pods.keys().chain(sight.index.names()).cloned().collect();
        known.iter().for_each(|name| self.recount(name, sight));
        self.count_configs(sight.facts);
    }

    fn count_configs(&mut self, facts: &ClusterFacts) {
        if !self.leads {
            return;
        }
        let now = facts.configs.by_launcher();
        let gone = self.configs.keys().filter(|name| !now.contains_key(*name)).map(|name| (name, &0));
        now.iter().chain(gone).for_each(|(name, count)| self.metrics.set_configs(name, *count));
        self.configs = now;
    }

    /// Counts a Pod again after a change.
    pub(super) fn recount(&mut self, name: &ObjectName, sight: MetricsInputs<'_>) {
        if !self.leads {
            return;
        }
        let dual =
            |pods: &BTreeMap<ObjectName, CountedPod>| pods.get(name).and_then(CountedPod::dual).cloned();
        let before = dual(&self.pods);
        self.count(name, sight);
        // The provider's pairs contain its requester's name, so they depend on this Pod.
        let providers: BTreeSet<ObjectName> = before.into_iter().chain(dual(&self.pods)).collect();
        providers.iter().for_each(|name| self.count(name, sight));
    }

    fn count(&mut self, name: &ObjectName, sight: MetricsInputs<'_>) {
        self.due.remove(name);
        let counted = match sight.index.pod(name) {
            Some(IndexedPod::Requester(own)) => Some(CountedPod::requester(own)),
            Some(IndexedPod::Provider(own)) => Some(CountedPod::Provider {
                pairs: pairs(own, sight.index),
                launcher: self.launcher_phase(own, sight),
            }),
            None => None,
        };
        let before = match &counted {
            Some(counted) => self.pods.insert(name.clone(), counted.clone()),
            None => self.pods.remove(name),
        };
        if before == counted {
            return;
        }
        if let Some(before) = &before {
            self.subtract(before, counted.as_ref());
        }
        if let Some(counted) = &counted {
            self.add(counted);
        }
    }

    fn launcher_phase(
        &mut self,
        own: &ProviderPod,
        sight: MetricsInputs<'_>,
    ) -> Option<(String, LauncherPhase)> {
        let source = own.source.as_ref().filter(|_| own.is_launcher())?;
        let phase = if own.is_bound() {
            LauncherPhase::Bound
        } else if sight.facts.configs.build_policy(source).is_some_and(|terms| terms.obsolete) {
            LauncherPhase::Stale
        } else if own.phase() == ProviderPhase::Ready {
            LauncherPhase::Unbound
        } else {
            let (stuck, after) = if own.is_scheduled() {
                (LauncherPhase::StuckStarting, STUCK_STARTING_AFTER)
            } else {
                (LauncherPhase::StuckScheduling, STUCK_SCHEDULING_AFTER)
            };
            let due = own.created + after;
            if due <= sight.now {
                stuck
            } else {
                self.due.insert(own.name.clone(), due);
                LauncherPhase::Unbound
            }
        };
        Some((source.config.clone(), phase))
    }

    fn add(&mut self, counted: &CountedPod) {
        match counted {
            CountedPod::Requester { config, .. } => {
                let count = change(&mut self.requesters, config, 1);
                self.metrics.set_requesters(config, count);
            }
            CountedPod::Provider { pairs, launcher } => {
                pairs.iter().for_each(|pair| self.metrics.set_bound(pair));
                if let Some(own @ (config, phase)) = launcher {
                    let count = change(&mut self.launchers, own, 1);
                    self.metrics.set_launchers(config, *phase, count);
                }
            }
        }
    }

    /// `now`: what replaces it.
    fn subtract(&mut self, before: &CountedPod, now: Option<&CountedPod>) {
        match before {
            CountedPod::Requester { config, .. } => {
                let count = change(&mut self.requesters, config, -1);
                self.metrics.set_requesters(config, count);
            }
            CountedPod::Provider { pairs, launcher } => {
                let stays = |pair: &&EngineBindingLabels| matches!(now, Some(CountedPod::Provider { pairs, .. }) if pairs.contains(*pair));
                pairs.iter().filter(|pair| !stays(pair)).for_each(|pair| self.metrics.remove_bound(pair));
                if let Some(own @ (config, phase)) = launcher {
                    let count = change(&mut self.launchers, own, -1);
                    self.metrics.set_launchers(config, *phase, count);
                }
            }
        }
    }
}

impl CountedPod {
    fn requester(own: &RequesterPod) -> Self {
        let dual = own.dual.as_ref().map(|dual| ObjectName::new(own.name.namespace.clone(), dual.clone()));
        Self::Requester { config: own.config().map(|config| config.name.clone()).unwrap_or_default(), dual }
    }

    const fn dual(&self) -> Option<&ObjectName> {
        match self {
            Self::Requester { dual, .. } => dual.as_ref(),
            Self::Provider { .. } => None,
        }
    }
}

/// Returns a pair for each accelerator of the Pod's bound engines.
fn pairs(own: &ProviderPod, directory: &PodIndex) -> BTreeSet<EngineBindingLabels> {
    let bound = own
        .records()
        .iter()
        .filter_map(|record| Some((&record.engine, directory.requester(record.requester.as_ref()?)?)));
    let of = |(engine, requester): (&PairingEngineId, &RequesterPod)| {
        let instance = if own.is_launcher() {
            launcher::instance_id(engine.fingerprint, &engine.accelerators)
        } else {
            String::new()
        };
        let pair = |accelerator: &AcceleratorId| EngineBindingLabels {
            namespace: requester.name.namespace.clone(),
            requester: requester.name.name.clone(),
            provider: own.name.name.clone(),
            container: keys::CONTAINER,
            instance: instance.clone(),
            accelerator: accelerator.to_string(),
            node: own.node().to_string(),
        };
        engine.accelerators.iter().map(pair).collect::<Vec<_>>()
    };
    bound.flat_map(of).collect()
}

/// Returns the new count.
fn change<K: Ord + Clone>(counts: &mut BTreeMap<K, usize>, of: &K, by: isize) -> usize {
    let count = counts.entry(of.clone()).or_default();
    *count = count.saturating_add_signed(by);
    let now = *count;
    if now == 0 {
        counts.remove(of);
    }
    now
}

#[cfg(test)]
mod tests;
