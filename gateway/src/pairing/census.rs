//! Who is there, as metrics tell it at the gateway that leads: requesters, whose engines are whose, and launchers.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    model::AcceleratorId,
    pairing::{event::Stage, ids::EngineId},
    units::{Millis, Tick},
};

use super::{
    directory::{Directory, Provider, Requester, Role},
    facts::Facts,
};
use crate::{
    controllers::{crd::ledger::ObjectName, dual::keys},
    metrics::{Duals, LauncherPhase as Phase, Pair},
    platform::kubernetes::launcher,
};

/// A launcher that has no node after this is told of as one that is stuck: as long as the public project's.
const PLACED: Millis = Millis::secs(120);
/// The same of one that has a node, and is not ready: images are large.
const STARTED: Millis = Millis::secs(450);

pub(super) struct Census {
    told: Duals,
    leads: bool,
    pods: BTreeMap<ObjectName, Counted>,
    /// By InferenceServerConfig.
    requesters: BTreeMap<String, usize>,
    launchers: BTreeMap<(String, Phase), usize>,
    /// InferenceServerConfigs by LauncherConfig.
    configs: BTreeMap<String, usize>,
    /// When launchers that start are stuck.
    due: BTreeMap<ObjectName, Tick>,
}

/// What is known now.
#[derive(Clone, Copy)]
pub(super) struct Sight<'a> {
    pub(super) directory: &'a Directory,
    pub(super) facts: &'a Facts,
    pub(super) now: Tick,
}

/// What was counted of a Pod.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Counted {
    /// The InferenceServerConfig that it asks for, and the provider that it names.
    Requester { config: String, dual: Option<ObjectName> },
    /// `launcher`: its LauncherConfig, and what it is doing.
    Provider { pairs: BTreeSet<Pair>, launcher: Option<(String, Phase)> },
}

impl Census {
    pub(super) const fn new(told: Duals) -> Self {
        Self {
            told,
            leads: false,
            pods: BTreeMap::new(),
            requesters: BTreeMap::new(),
            launchers: BTreeMap::new(),
            configs: BTreeMap::new(),
            due: BTreeMap::new(),
        }
    }

    /// Nothing is told from here on until it begins.
    pub(super) fn close(&mut self) {
        self.told.forget();
        *self = Self::new(self.told.clone());
    }

    pub(super) fn begin(&mut self, sight: Sight<'_>) {
        self.leads = true;
        self.look_at_all(sight);
    }

    /// When something is otherwise that nobody tells.
    pub(super) fn due(&self) -> Option<Tick> {
        self.due.values().min().copied()
    }

    pub(super) fn look_at_due(&mut self, sight: Sight<'_>) {
        let is_due = |(_, at): &(&ObjectName, &Tick)| **at <= sight.now;
        let due: Vec<ObjectName> = self.due.iter().filter(is_due).map(|(name, _)| name.clone()).collect();
        due.iter().for_each(|name| self.count(name, sight));
    }

    pub(super) fn look_at_all(&mut self, sight: Sight<'_>) {
        let known: BTreeSet<ObjectName> = self.pods.keys().chain(sight.directory.names()).cloned().collect();
        known.iter().for_each(|name| self.look(name, sight));
        self.count_configs(sight.facts);
    }

    fn count_configs(&mut self, facts: &Facts) {
        if !self.leads {
            return;
        }
        let now = facts.configs.by_launcher();
        let gone = self.configs.keys().filter(|name| !now.contains_key(*name)).map(|name| (name, &0));
        now.iter().chain(gone).for_each(|(name, count)| self.told.configs(name, *count));
        self.configs = now;
    }

    /// Something of this Pod may be otherwise.
    pub(super) fn look(&mut self, name: &ObjectName, sight: Sight<'_>) {
        if !self.leads {
            return;
        }
        let dual = |pods: &BTreeMap<ObjectName, Counted>| pods.get(name).and_then(Counted::dual).cloned();
        let before = dual(&self.pods);
        self.count(name, sight);
        // It says whose its engine is, and knows requesters by what they are called here.
        let providers: BTreeSet<ObjectName> = before.into_iter().chain(dual(&self.pods)).collect();
        providers.iter().for_each(|name| self.count(name, sight));
    }

    fn count(&mut self, name: &ObjectName, sight: Sight<'_>) {
        self.due.remove(name);
        let counted = match sight.directory.role(name) {
            Some(Role::Requester(own)) => Some(Counted::requester(own)),
            Some(Role::Provider(own)) => Some(Counted::Provider {
                pairs: pairs(own, sight.directory),
                launcher: self.launcher(own, sight),
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
            self.uncounted(before, counted.as_ref());
        }
        if let Some(counted) = &counted {
            self.counted(counted);
        }
    }

    fn launcher(&mut self, own: &Provider, sight: Sight<'_>) -> Option<(String, Phase)> {
        let source = own.source.as_ref().filter(|_| own.is_launcher())?;
        let phase = if own.is_bound() {
            Phase::Bound
        } else if sight.facts.configs.terms(source).is_some_and(|terms| terms.obsolete) {
            Phase::Stale
        } else if own.stage() == Stage::Ready {
            Phase::Unbound
        } else {
            let (stuck, after) = if own.is_placed() {
                (Phase::StuckStarting, STARTED)
            } else {
                (Phase::StuckScheduling, PLACED)
            };
            let due = own.created + after;
            if due <= sight.now {
                stuck
            } else {
                self.due.insert(own.name.clone(), due);
                Phase::Unbound
            }
        };
        Some((source.config.clone(), phase))
    }

    fn counted(&mut self, counted: &Counted) {
        match counted {
            Counted::Requester { config, .. } => {
                let count = change(&mut self.requesters, config, 1);
                self.told.requesters(config, count);
            }
            Counted::Provider { pairs, launcher } => {
                pairs.iter().for_each(|pair| self.told.bound(pair));
                if let Some(own @ (config, phase)) = launcher {
                    let count = change(&mut self.launchers, own, 1);
                    self.told.launchers(config, *phase, count);
                }
            }
        }
    }

    /// `now`: as what it is counted next.
    fn uncounted(&mut self, before: &Counted, now: Option<&Counted>) {
        match before {
            Counted::Requester { config, .. } => {
                let count = change(&mut self.requesters, config, -1);
                self.told.requesters(config, count);
            }
            Counted::Provider { pairs, launcher } => {
                let stays = |pair: &&Pair| matches!(now, Some(Counted::Provider { pairs, .. }) if pairs.contains(*pair));
                pairs.iter().filter(|pair| !stays(pair)).for_each(|pair| self.told.unbound(pair));
                if let Some(own @ (config, phase)) = launcher {
                    let count = change(&mut self.launchers, own, -1);
                    self.told.launchers(config, *phase, count);
                }
            }
        }
    }
}

impl Counted {
    fn requester(own: &Requester) -> Self {
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

/// Of the engines of a Pod that are somebody's, each of their accelerators.
fn pairs(own: &Provider, directory: &Directory) -> BTreeSet<Pair> {
    let bound = own
        .records()
        .iter()
        .filter_map(|record| Some((&record.engine, directory.requester(record.requester.as_ref()?)?)));
    let of = |(engine, requester): (&EngineId, &Requester)| {
        let instance = if own.is_launcher() {
            launcher::id(engine.fingerprint, &engine.accelerators)
        } else {
            String::new()
        };
        let pair = |accelerator: &AcceleratorId| Pair {
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

/// How many there are by now.
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
