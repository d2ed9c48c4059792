//! Places launchers ahead of demand by the public project's LauncherPopulationPolicies, one launcher per accelerator.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use rouse::model::AcceleratorId;

use crate::{
    crd::{
        fma::{CountForLauncher, FmaStatus, LauncherPopulationPolicy, LauncherPopulationPolicySpec},
        ledger::ObjectName,
    },
    platform::launcher::pod::label_value,
    watch::{Delta, WatchedObject},
};

/// LauncherPopulationPolicies as last observed.
#[derive(Debug, Default)]
pub(super) struct PopulationPolicies {
    all: BTreeMap<ObjectName, Arc<LauncherPopulationPolicy>>,
    /// Policies in effect. An invalid version of a policy leaves the former one in effect.
    followed: BTreeMap<ObjectName, LauncherPopulationPolicySpec>,
}

impl PopulationPolicies {
    pub(super) fn apply(&mut self, change: Delta<LauncherPopulationPolicy>) {
        match change {
            Delta::All { namespace, objects } => {
                let listed: BTreeSet<ObjectName> = objects.iter().map(WatchedObject::name).collect();
                let in_scope = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                self.all.retain(|name, _| !in_scope(name) || listed.contains(name));
                self.followed.retain(|name, _| !in_scope(name) || listed.contains(name));
                objects.into_iter().for_each(|found| self.upsert(found));
            }
            Delta::Applied(found) => self.upsert(found),
            Delta::Deleted(name) => {
                self.all.remove(&name);
                self.followed.remove(&name);
            }
        }
    }

    fn upsert(&mut self, found: WatchedObject<LauncherPopulationPolicy>) {
        let name = found.name();
        let Some(policy) = found.readable() else { return };
        if policy.spec.problems().is_empty() {
            self.followed.insert(name.clone(), policy.spec.clone());
        }
        self.all.insert(name, policy);
    }

    /// Returns how many launchers such a node gets.
    pub(super) fn counts(&self, node: &NodeTraits) -> LauncherCounts {
        counts(self.followed.iter(), node)
    }

    /// Returns all statuses that need a write. `missing` returns what is wrong with a LauncherConfig.
    pub(super) fn changed_statuses(
        &self,
        missing: impl Fn(&ObjectName) -> Option<String>,
    ) -> Vec<(ObjectName, FmaStatus)> {
        let wanted = |(name, policy): (&ObjectName, &Arc<LauncherPopulationPolicy>)| {
            let mut errors = policy.spec.problems();
            let of = policy.spec.count_for_launcher.iter().map(|wanted| wanted.config(name));
            errors.extend(of.filter_map(|config| missing(&config)));
            let status = FmaStatus { observed_generation: policy.metadata.generation, errors };
            (policy.status.as_ref() != Some(&status)).then(|| (name.clone(), status))
        };
        self.all.iter().filter_map(wanted).collect()
    }
}

impl CountForLauncher {
    /// Returns the LauncherConfig that a policy of this name refers to.
    fn config(&self, policy: &ObjectName) -> ObjectName {
        ObjectName::new(policy.namespace.clone(), self.launcher_config_name.clone())
    }
}

/// Number of launchers of each LauncherConfig.
pub(super) type LauncherCounts = BTreeMap<ObjectName, usize>;

/// An existing launcher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ExistingLauncher {
    /// Namespace and label of the LauncherConfig that it was made from.
    pub(super) config: (String, String),
    /// Whether it has engines, asleep or awake.
    pub(super) used: bool,
}

/// Existing launchers by accelerator.
pub(super) type ExistingLaunchers<'a> = BTreeMap<&'a AcceleratorId, &'a ExistingLauncher>;

/// Properties of a Node object that policies select by.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct NodeTraits {
    pub(super) labels: BTreeMap<String, String>,
    pub(super) allocatable: BTreeMap<String, Quantity>,
}

/// Returns how many launchers such a node gets: of each LauncherConfig, the maximum over all policies.
fn counts<'a>(
    policies: impl Iterator<Item = (&'a ObjectName, &'a LauncherPopulationPolicySpec)>,
    node: &NodeTraits,
) -> LauncherCounts {
    let mut counts = LauncherCounts::new();
    let chooses = |policy: &LauncherPopulationPolicySpec| {
        policy.enhanced_node_selector.matches(&node.labels, &node.allocatable)
    };
    for (name, policy) in policies.filter(|(_, policy)| chooses(policy)) {
        for requested in &policy.count_for_launcher {
            let count = counts.entry(requested.config(name)).or_default();
            *count = (*count).max(usize::try_from(requested.launcher_count).unwrap_or_default());
        }
    }
    counts
}

/// Chooses the accelerators for the launchers. `accelerators`: of the node, by index.
///
/// Existing launchers stay, those with engines first. A launcher of another LauncherConfig blocks its accelerator until
/// it has gone.
pub(super) fn place_launchers(
    counts: &LauncherCounts,
    accelerators: &[&AcceleratorId],
    existing: &ExistingLaunchers<'_>,
) -> BTreeMap<AcceleratorId, ObjectName> {
    let mut placements = BTreeMap::new();
    let empty = accelerators.iter().enumerate().filter(|(_, a)| !existing.contains_key(**a));
    let mut free: BTreeSet<usize> = empty.map(|(at, _)| at).collect();
    for (config, count) in counts {
        let config_key = (config.namespace.clone(), label_value(&config.name));
        let of = |used: bool| {
            let wanted = ExistingLauncher { config: config_key.clone(), used };
            accelerators.iter().filter(move |a| existing.get(**a) == Some(&&wanted))
        };
        let retained = of(true).chain(of(false)).take(*count);
        placements.extend(retained.map(|a| ((*a).clone(), config.clone())));
    }
    for (config, count) in counts {
        let placed_count = placements.values().filter(|placed| *placed == config).count();
        for _ in placed_count..*count {
            let next = free.pop_first().and_then(|at| accelerators.get(at));
            let Some(next) = next else { return placements };
            placements.insert((*next).clone(), config.clone());
        }
    }
    placements
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn policy(label: &str, counts: &[(&str, i32)]) -> LauncherPopulationPolicy {
        let counts = counts.iter().map(|(name, n)| json!({"launcherConfigName": name, "launcherCount": n}));
        let nodes = json!({"labelSelector": {"matchLabels": {"gpu": label}}});
        let spec = json!({"enhancedNodeSelector": nodes, "countForLauncher": counts.collect::<Vec<_>>()});
        serde_json::from_value(
            json!({"apiVersion": "fma.llm-d.ai/v1alpha1", "kind": "LauncherPopulationPolicy",
            "metadata": {"name": "p", "namespace": "chat"}, "spec": spec}),
        )
        .unwrap()
    }

    fn named(name: &str) -> ObjectName {
        ObjectName::new("chat", name)
    }

    #[test]
    fn the_most_that_any_policy_says_of_a_node_is_meant() {
        let all =
            [policy("h100", &[("a", 1), ("b", 2)]), policy("h100", &[("a", 3)]), policy("l4", &[("c", 9)])];
        let node =
            NodeTraits { labels: BTreeMap::from([("gpu".into(), "h100".into())]), ..NodeTraits::default() };
        let name = named("p");
        let counts = counts(all.iter().map(|policy| (&name, &policy.spec)), &node);
        assert_eq!(counts, LauncherCounts::from([(named("a"), 3), (named("b"), 2)]));
    }

    #[test]
    fn a_policy_that_cannot_be_followed_stays_as_it_was_and_says_why() {
        let mut policies = PopulationPolicies::default();
        let node =
            NodeTraits { labels: BTreeMap::from([("gpu".into(), "h100".into())]), ..NodeTraits::default() };
        let mut seen = |spec, generation, status: Option<&FmaStatus>| {
            let mut policy = policy("h100", &[("a", spec)]);
            (policy.metadata.generation, policy.status) = (Some(generation), status.cloned());
            policies.apply(Delta::Applied(policy.into()));
            let said = policies.changed_statuses(|name| (name.name != "a").then(|| "missing".to_owned()));
            (policies.counts(&node), said.into_iter().map(|(_, status)| status).next())
        };
        let (counts, said) = seen(2, 1, None);
        let well = FmaStatus { observed_generation: Some(1), errors: Vec::new() };
        assert_eq!((&counts, said.as_ref()), (&LauncherCounts::from([(named("a"), 2)]), Some(&well)));
        assert_eq!(seen(2, 1, Some(&well)), (counts.clone(), None), "it is written");
        let (still, said) = seen(-1, 2, Some(&well));
        assert_eq!(still, counts);
        let errors =
            ["countForLauncher: -1 launchers of 'a' are impossible: set 0 or more".to_owned()].into();
        assert_eq!(said.unwrap(), FmaStatus { observed_generation: Some(2), errors });
    }

    #[test]
    fn what_is_there_stays_and_others_have_the_lowest_that_are_free() {
        let all: Vec<AcceleratorId> = ["g0", "g1", "g2", "g3"].map(Into::into).into();
        let accelerators: Vec<_> = all.iter().collect();
        let counts = LauncherCounts::from([(named("a"), 2), (named("b"), 1)]);
        let launcher =
            |name: &str, used: bool| ExistingLauncher { config: ("chat".to_owned(), name.to_owned()), used };
        let [a, b, other] = ["a", "b", "other"].map(|name| launcher(name, false));
        let placed = |there: &ExistingLaunchers<'_>| {
            let placed = place_launchers(&counts, &accelerators, there);
            placed.into_iter().map(|(at, config)| format!("{at} {}", config.name)).collect::<Vec<_>>()
        };
        assert_eq!(placed(&ExistingLaunchers::new()), ["g0 a", "g1 a", "g2 b"]);
        assert_eq!(
            placed(&ExistingLaunchers::from([(&all[0], &b), (&all[3], &a)])),
            ["g0 b", "g1 a", "g3 a"]
        );
        let full = ExistingLaunchers::from([(&all[0], &other), (&all[1], &other), (&all[2], &other)]);
        assert_eq!(placed(&full), ["g3 a"], "the others wait for theirs to go");
        let many = ExistingLaunchers::from([(&all[0], &b), (&all[1], &b), (&all[2], &b)]);
        assert_eq!(placed(&many), ["g0 b", "g3 a"], "surplus launchers belong to no policy");
        let used = launcher("b", true);
        let many = ExistingLaunchers::from([(&all[0], &b), (&all[1], &used), (&all[2], &b)]);
        assert_eq!(placed(&many), ["g1 b", "g3 a"], "a launcher that has engines stays anyway");
    }
}
