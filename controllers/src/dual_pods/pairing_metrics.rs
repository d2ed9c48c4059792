//! The leader's metrics about requesters, launchers and the pairs of requesters and engines.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    due_times::DueTimes,
    model::AcceleratorId,
    pairing::{event::ProviderPhase, ids::PairingEngineId},
    units::{Millis, Tick},
};

use super::{
    facts::ClusterFacts,
    index::{IndexedPod, PairingPodIndex, ProviderPod, RequesterPod},
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
    due: DueTimes<ObjectName>,
}

/// Current inputs of the metrics.
#[derive(Clone, Copy)]
pub(super) struct MetricsInputs<'a> {
    pub(super) index: &'a PairingPodIndex,
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
    pub(super) fn new(metrics: DualPodMetrics) -> Self {
        Self {
            metrics,
            leads: false,
            pods: BTreeMap::new(),
            requesters: BTreeMap::new(),
            launchers: BTreeMap::new(),
            configs: BTreeMap::new(),
            due: DueTimes::default(),
        }
    }

    /// Resets all metrics. Nothing is counted until [`Self::begin`].
    pub(super) fn clear(&mut self) {
        self.metrics.reset();
        *self = Self::new(self.metrics.clone());
    }

    pub(super) fn begin(&mut self, inputs: MetricsInputs<'_>) {
        self.leads = true;
        self.recount_all(inputs);
    }

    /// Returns when a count changes without an event.
    pub(super) fn due(&self) -> Option<Tick> {
        self.due.first()
    }

    pub(super) fn recount_due(&mut self, inputs: MetricsInputs<'_>) {
        while let Some(name) = self.next_due(inputs.now) {
            self.count(&name, inputs);
        }
    }

    /// The first launcher that counts as stuck by this moment and was not counted again since.
    fn next_due(&self, now: Tick) -> Option<ObjectName> {
        self.due.due_by(now).next().cloned()
    }

    pub(super) fn recount_all(&mut self, inputs: MetricsInputs<'_>) {
        let known: BTreeSet<ObjectName> = self.pods.keys().chain(inputs.index.names()).cloned().collect();
        known.iter().for_each(|name| self.recount(name, inputs));
        self.count_configs(inputs.facts);
    }

    fn count_configs(&mut self, facts: &ClusterFacts) {
        if !self.leads {
            return;
        }
        let now = facts.configs.by_launcher();
        let removed = self.configs.keys().filter(|name| !now.contains_key(*name)).map(|name| (name, &0));
        now.iter().chain(removed).for_each(|(name, count)| self.metrics.set_configs(name, *count));
        self.configs = now;
    }

    /// Counts a Pod again after a change.
    pub(super) fn recount(&mut self, name: &ObjectName, inputs: MetricsInputs<'_>) {
        if !self.leads {
            return;
        }
        let dual =
            |pods: &BTreeMap<ObjectName, CountedPod>| pods.get(name).and_then(CountedPod::dual).cloned();
        let before = dual(&self.pods);
        self.count(name, inputs);
        // The provider's pairs contain its requester's name, so they depend on this Pod.
        let providers: BTreeSet<ObjectName> = before.into_iter().chain(dual(&self.pods)).collect();
        providers.iter().for_each(|name| self.count(name, inputs));
    }

    fn count(&mut self, name: &ObjectName, inputs: MetricsInputs<'_>) {
        self.due.set(name, None);
        let counted = match inputs.index.pod(name) {
            Some(IndexedPod::Requester(requester)) => Some(CountedPod::requester(requester)),
            Some(IndexedPod::Provider(provider)) => Some(CountedPod::Provider {
                pairs: pairs(provider, inputs.index),
                launcher: self.launcher_phase(provider, inputs),
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
        provider: &ProviderPod,
        inputs: MetricsInputs<'_>,
    ) -> Option<(String, LauncherPhase)> {
        let source = provider.source.as_ref().filter(|_| provider.is_launcher())?;
        let phase = if provider.is_bound() {
            LauncherPhase::Bound
        } else if inputs.facts.configs.build_policy(source).is_some_and(|terms| terms.obsolete) {
            LauncherPhase::Stale
        } else if provider.phase() == ProviderPhase::Ready {
            LauncherPhase::Unbound
        } else {
            let (stuck, after) = if provider.is_scheduled() {
                (LauncherPhase::StuckStarting, STUCK_STARTING_AFTER)
            } else {
                (LauncherPhase::StuckScheduling, STUCK_SCHEDULING_AFTER)
            };
            let due = provider.created + after;
            if due <= inputs.now {
                stuck
            } else {
                self.due.set(&provider.name, Some(due));
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
                if let Some(labels @ (config, phase)) = launcher {
                    let count = change(&mut self.launchers, labels, 1);
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
                let stays = |labels: &&EngineBindingLabels| matches!(now, Some(CountedPod::Provider { pairs, .. }) if pairs.contains(*labels));
                pairs.iter().filter(|pair| !stays(pair)).for_each(|pair| self.metrics.remove_bound(pair));
                if let Some(labels @ (config, phase)) = launcher {
                    let count = change(&mut self.launchers, labels, -1);
                    self.metrics.set_launchers(config, *phase, count);
                }
            }
        }
    }
}

impl CountedPod {
    fn requester(requester: &RequesterPod) -> Self {
        let dual = requester
            .dual
            .as_ref()
            .map(|dual| ObjectName::new(requester.name.namespace.clone(), dual.clone()));
        Self::Requester {
            config: requester.config().map(|config| config.name.clone()).unwrap_or_default(),
            dual,
        }
    }

    const fn dual(&self) -> Option<&ObjectName> {
        match self {
            Self::Requester { dual, .. } => dual.as_ref(),
            Self::Provider { .. } => None,
        }
    }
}

/// Returns a pair for each accelerator of the Pod's bound engines.
fn pairs(provider: &ProviderPod, index: &PairingPodIndex) -> BTreeSet<EngineBindingLabels> {
    let bound = provider
        .records()
        .iter()
        .filter_map(|record| Some((&record.engine, index.requester(record.requester.as_ref()?)?)));
    let of = |(engine, requester): (&PairingEngineId, &RequesterPod)| {
        let instance = if provider.is_launcher() {
            launcher::instance_id(engine.fingerprint, &engine.accelerators)
        } else {
            String::new()
        };
        let pair = |accelerator: &AcceleratorId| EngineBindingLabels {
            namespace: requester.name.namespace.clone(),
            requester: requester.name.name.clone(),
            provider: provider.name.name.clone(),
            container: keys::CONTAINER,
            instance: instance.clone(),
            accelerator: accelerator.to_string(),
            node: provider.node().to_string(),
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
