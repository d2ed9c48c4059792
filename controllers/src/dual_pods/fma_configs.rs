//! Sources of launchers and their engines: the public project's objects, if the API server has these kinds.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kube::Resource;
use rouse::{
    pairing::{
        event::{LauncherBuildPolicy, TemplateStatus},
        ids::{EngineFingerprint, LauncherBuild},
    },
    shell_words,
};

use crate::{
    crd::{
        fma::{FmaStatus, GROUP, InferenceServerConfig, LauncherConfig, LauncherPopulationPolicy},
        ledger::ObjectName,
    },
    dual_pods::population::{LauncherCounts, NodeTraits, PopulationPolicies},
    platform::launcher::{
        self,
        pod::{LauncherRevision, label_value},
    },
    watch::{Delta, WatchedObject},
};

/// The objects as last observed.
#[derive(Debug, Default)]
pub(super) struct FmaConfigs {
    /// Number of initial lists of each kind.
    expected_lists: usize,
    engines: FmaObjects<InferenceServerConfig>,
    /// The fingerprint of each InferenceServerConfig's engines without a served name.
    fingerprints: BTreeMap<ObjectName, EngineFingerprint>,
    launchers: FmaObjects<LauncherConfig>,
    policies: PopulationPolicies,
    /// The build of each LauncherConfig's next launchers, by namespace and label of the LauncherConfig.
    sources: BTreeMap<(String, String), ResolvedLauncherConfig>,
    changed: bool,
}

/// A LauncherConfig with its derived values.
#[derive(Debug)]
struct ResolvedLauncherConfig {
    source: LauncherRevision,
    build: LauncherBuild,
    max_engines: Option<u32>,
    /// Whether launchers can be made from it.
    valid: bool,
}

/// All objects of one kind.
#[derive(Debug)]
struct FmaObjects<K> {
    objects: BTreeMap<ObjectName, Arc<K>>,
    /// Namespaces whose list has arrived.
    listed: BTreeSet<Option<String>>,
}

/// Why no engine can start for a requester. Users see this text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error(
        "the API server has not listed InferenceServerConfigs and LauncherConfigs yet: if it does not know {GROUP}, \
         apply the output of 'rouse-gateway crds --fma', and charts/rouse/rbac/dual-pods.yaml and \
         dual-pods-namespace.yaml"
    )]
    NotListed,
    #[error("there is no InferenceServerConfig {0}: create it, or name another one")]
    NoConfig(ObjectName),
    #[error(
        "there is no LauncherConfig {0}, which the InferenceServerConfig names: create it, or name another one"
    )]
    NoLauncher(ObjectName),
    #[error("{kind} {name}: {}", problems.join("; "))]
    Problems { kind: &'static str, name: ObjectName, problems: Vec<String> },
}

impl<K> Default for FmaObjects<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), listed: BTreeSet::new() }
    }
}

impl<K: Resource> FmaObjects<K> {
    fn apply(&mut self, change: Delta<K>) {
        match change {
            Delta::All { namespace, objects } => {
                let listed: BTreeSet<ObjectName> = objects.iter().map(WatchedObject::name).collect();
                let in_scope = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                self.objects.retain(|name, _| !in_scope(name) || listed.contains(name));
                objects.into_iter().for_each(|found| self.upsert(found));
                self.listed.insert(namespace);
            }
            Delta::Applied(found) => self.upsert(found),
            Delta::Deleted(name) => drop(self.objects.remove(&name)),
        }
    }

    /// Stores an object. An unreadable one keeps its former version, so its engines do not become obsolete.
    fn upsert(&mut self, found: WatchedObject<K>) {
        let name = found.name();
        if let Some(object) = found.readable() {
            self.objects.insert(name, object);
        }
    }
}

impl FmaConfigs {
    /// `lists`: number of initial lists of each kind, one per watched namespace.
    pub(super) fn new(lists: usize) -> Self {
        Self { expected_lists: lists, ..Self::default() }
    }

    pub(super) fn apply_server_configs(&mut self, change: Delta<InferenceServerConfig>) {
        let name = match &change {
            Delta::Applied(found) => Some(found.name()),
            Delta::Deleted(name) => Some(name.clone()),
            Delta::All { .. } => None,
        };
        self.engines.apply(change);
        self.changed = true;
        let of =
            |config: &InferenceServerConfig| launcher::fingerprint(&config.spec.model_server_config, None);
        match name {
            Some(name) => {
                self.fingerprints.remove(&name);
                let config = self.engines.objects.get(&name);
                self.fingerprints.extend(config.map(|config| (name, of(config))));
            }
            None => {
                let all = self.engines.objects.iter().map(|(name, config)| (name.clone(), of(config)));
                self.fingerprints = all.collect();
            }
        }
    }

    pub(super) fn apply_launcher_configs(&mut self, change: Delta<LauncherConfig>) {
        self.launchers.apply(change);
        let current = self.launchers.objects.values().map(|config| ResolvedLauncherConfig::of(config));
        self.sources = current.map(|config| (config.source.config_key(), config)).collect();
        self.changed = true;
    }

    pub(super) fn apply_policies(&mut self, change: Delta<LauncherPopulationPolicy>) {
        self.policies.apply(change);
        self.changed = true;
    }

    /// Returns the policy statuses to write. After a failed write, [`Self::mark_changed`] triggers a retry.
    pub(super) fn changed_policy_statuses(&self) -> Vec<(ObjectName, FmaStatus)> {
        let missing = |name: &ObjectName| {
            let key = (name.namespace.clone(), label_value(&name.name));
            match self.sources.get(&key) {
                Some(config) if config.valid => None,
                Some(_) => Some(format!("the LauncherConfig {name} is invalid")),
                None => Some(format!("there is no LauncherConfig {name}: create it, or name another one")),
            }
        };
        if self.is_complete() { self.policies.changed_statuses(missing) } else { Vec::new() }
    }

    pub(super) fn mark_changed(&mut self) {
        self.changed = true;
    }

    /// Returns how many launchers of each valid LauncherConfig such a node gets.
    pub(super) fn counts(&self, node: &NodeTraits) -> LauncherCounts {
        let mut counts = self.policies.counts(node);
        counts.retain(|name, _| {
            self.sources
                .get(&(name.namespace.clone(), label_value(&name.name)))
                .is_some_and(|config| config.valid)
        });
        counts
    }

    /// Returns whether anything changed since the last call.
    pub(super) fn take_changed(&mut self) -> bool {
        std::mem::take(&mut self.changed)
    }

    pub(super) fn server_config(&self, name: &ObjectName) -> Option<&Arc<InferenceServerConfig>> {
        self.engines.objects.get(name)
    }

    /// Counts the InferenceServerConfigs that name each LauncherConfig.
    pub(super) fn by_launcher(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for config in self.engines.objects.values() {
            *counts.entry(config.spec.launcher_config_name.clone()).or_default() += 1;
        }
        counts
    }

    /// Returns the LauncherConfig of this name.
    pub(super) fn launcher_config(&self, name: &ObjectName) -> Option<&Arc<LauncherConfig>> {
        self.launchers.objects.get(name)
    }

    /// Returns the LauncherConfig that this InferenceServerConfig names.
    pub(super) fn launcher_config_of(&self, name: &ObjectName) -> Option<&Arc<LauncherConfig>> {
        self.launchers.objects.get(&launcher_name(name, self.server_config(name)?))
    }

    /// Returns the build of this InferenceServerConfig's launchers.
    pub(super) fn build(&self, name: &ObjectName) -> Option<LauncherBuild> {
        let of = launcher_name(name, self.server_config(name)?);
        self.sources.get(&(of.namespace, label_value(&of.name))).map(|config| config.build)
    }

    /// Returns the current source of each LauncherConfig.
    pub(super) fn sources(&self) -> impl Iterator<Item = &LauncherRevision> {
        self.sources.values().map(|config| &config.source)
    }

    /// Returns the policy for launchers of this source; `None` if it is unknown, or if no replacement can be made.
    pub(super) fn build_policy(&self, source: &LauncherRevision) -> Option<LauncherBuildPolicy> {
        if source.is_of_patch() {
            return Some(LauncherBuildPolicy::default());
        }
        match self.sources.get(&source.config_key()) {
            Some(config) if config.valid => Some(LauncherBuildPolicy {
                obsolete: config.source.hash != source.hash,
                max_engines: config.max_engines,
            }),
            Some(_) => None,
            None => self.is_complete().then_some(LauncherBuildPolicy { obsolete: true, max_engines: None }),
        }
    }

    /// Returns the fingerprint of this InferenceServerConfig's engine under this served name.
    pub(super) fn fingerprint(
        &self,
        name: &ObjectName,
        served: Option<&str>,
    ) -> Result<EngineFingerprint, Error> {
        let config = self.server_config(name).ok_or_else(|| {
            if self.is_complete() { Error::NoConfig(name.clone()) } else { Error::NotListed }
        })?;
        ensure_valid("InferenceServerConfig", name, config.spec.problems())?;
        let of = launcher_name(name, config);
        let launcher = self.launchers.objects.get(&of);
        let launcher = launcher.ok_or_else(|| {
            if self.is_complete() { Error::NoLauncher(of.clone()) } else { Error::NotListed }
        })?;
        ensure_valid("LauncherConfig", &of, launcher.spec.problems())?;
        Ok(launcher::fingerprint(&config.spec.model_server_config, served))
    }

    /// The engine's options, split into words; empty if the InferenceServerConfig is unknown.
    pub(super) fn options(&self, name: &ObjectName) -> Vec<String> {
        let options = self.server_config(name).map(|config| &config.spec.model_server_config.options);
        options.and_then(|options| shell_words::split(options).ok()).unwrap_or_default()
    }

    /// Whether a requester may request such an engine again; `None` while unknown.
    pub(super) fn template_status(&self, fingerprint: EngineFingerprint) -> Option<TemplateStatus> {
        if self.fingerprints.values().any(|own| launcher::same_server(*own, fingerprint)) {
            return Some(TemplateStatus::Current);
        }
        self.is_complete().then_some(TemplateStatus::Obsolete)
    }

    fn is_complete(&self) -> bool {
        let least = self.engines.listed.len().min(self.launchers.listed.len());
        least > 0 && least >= self.expected_lists
    }
}

impl ResolvedLauncherConfig {
    fn of(config: &LauncherConfig) -> Self {
        let source = LauncherRevision::of(config);
        Self {
            build: source.build(),
            source,
            max_engines: config.spec.max_instances.and_then(|most| u32::try_from(most).ok()),
            valid: config.spec.problems().is_empty(),
        }
    }
}

fn ensure_valid(kind: &'static str, name: &ObjectName, problems: Vec<String>) -> Result<(), Error> {
    if problems.is_empty() { Ok(()) } else { Err(Error::Problems { kind, name: name.clone(), problems }) }
}

fn launcher_name(name: &ObjectName, config: &InferenceServerConfig) -> ObjectName {
    ObjectName::new(name.namespace.clone(), config.spec.launcher_config_name.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object<K: serde::de::DeserializeOwned>(kind: &str, spec: &Value) -> WatchedObject<K> {
        let object = json!({"apiVersion": "fma.llm-d.ai/v1alpha1", "kind": kind,
            "metadata": {"name": "one", "namespace": "chat"}, "spec": spec});
        WatchedObject::from(serde_json::from_value::<K>(object).unwrap())
    }

    fn engine(options: &str) -> WatchedObject<InferenceServerConfig> {
        let spec = json!({"launcherConfigName": "one", "modelServerConfig": {"options": options}});
        object("InferenceServerConfig", &spec)
    }

    fn all<K>(objects: Vec<WatchedObject<K>>) -> Delta<K> {
        Delta::All { namespace: Some("chat".to_owned()), objects }
    }

    #[test]
    fn what_is_missing_is_said_and_an_edit_makes_its_engines_obsolete() {
        let (name, mut configs) = (ObjectName::new("chat", "one"), FmaConfigs::new(1));
        let error_of = |configs: &FmaConfigs| configs.fingerprint(&name, None).unwrap_err();
        assert_eq!(error_of(&configs), Error::NotListed);
        configs.apply_server_configs(all(vec![]));
        configs.apply_launcher_configs(all(vec![]));
        assert_eq!(error_of(&configs), Error::NoConfig(name.clone()));
        configs.apply_server_configs(Delta::Applied(engine("--model a")));
        assert_eq!(error_of(&configs), Error::NoLauncher(name.clone()));
        let bare = json!({"podTemplate": {"spec": {"containers": []}}});
        configs.apply_launcher_configs(Delta::Applied(object("LauncherConfig", &bare)));
        assert!(
            error_of(&configs).to_string().starts_with("LauncherConfig chat/one: podTemplate"),
            "{configs:?}"
        );
        let whole = json!({"podTemplate": {"spec": {"containers": [{"name": "inference-server"}]}}});
        configs.apply_launcher_configs(Delta::Applied(object("LauncherConfig", &whole)));
        let first =
            [None, Some("a"), Some("another")].map(|served| configs.fingerprint(&name, served).unwrap());
        assert_eq!(first.map(|one| configs.template_status(one)), [Some(TemplateStatus::Current); 3]);
        configs.apply_server_configs(Delta::Applied(engine("--model b")));
        assert_eq!(first.map(|one| configs.template_status(one)), [Some(TemplateStatus::Obsolete); 3]);
        configs.apply_server_configs(Delta::Applied(engine("--model 'b")));
        assert!(error_of(&configs).to_string().contains("modelServerConfig.options"));
        assert!(configs.take_changed() && !configs.take_changed());
    }

    #[test]
    fn a_launcher_is_obsolete_once_its_template_is_another_or_its_configuration_is_gone() {
        let config = |image: &str, most: i32| -> WatchedObject<LauncherConfig> {
            let container = json!({"name": "inference-server", "image": image});
            let template = json!({"spec": {"containers": [container]}});
            object("LauncherConfig", &json!({"podTemplate": template, "maxInstances": most}))
        };
        let mut configs = FmaConfigs::new(1);
        configs.apply_server_configs(all(vec![engine("--model a")]));
        configs.apply_launcher_configs(all(vec![config("a", 2)]));
        let source = configs.sources().next().unwrap().clone();
        assert_eq!(configs.build(&ObjectName::new("chat", "one")), Some(source.build()));
        let terms = |obsolete, most| Some(LauncherBuildPolicy { obsolete, max_engines: most });
        assert_eq!(configs.build_policy(&source), terms(false, Some(2)));
        configs.apply_launcher_configs(Delta::Applied(config("a", 3)));
        assert_eq!(configs.build_policy(&source), terms(false, Some(3)));
        configs.apply_launcher_configs(Delta::Applied(config("b", 3)));
        assert_eq!(configs.build_policy(&source), terms(true, Some(3)));
        assert_ne!(configs.build(&ObjectName::new("chat", "one")), Some(source.build()));
        configs.apply_launcher_configs(Delta::Applied(config("b", 0)));
        assert_eq!(configs.build_policy(&source), None, "nothing could be made in its stead");
        configs.apply_launcher_configs(Delta::Deleted(ObjectName::new("chat", "one")));
        assert_eq!(configs.build_policy(&source), terms(true, None));
        assert_eq!(FmaConfigs::new(1).build_policy(&source), None);
        let of_patch = LauncherRevision::of_patch("chat", &crate::crd::PodTemplateJson::default());
        for configs in [configs, FmaConfigs::new(1)] {
            assert_eq!(configs.build_policy(&of_patch), terms(false, None), "it needs no LauncherConfig");
        }
    }

    #[test]
    fn nothing_is_obsolete_before_every_list_has_come() {
        let mut configs = FmaConfigs::new(2);
        configs.apply_server_configs(all(vec![]));
        configs.apply_launcher_configs(all(vec![]));
        assert_eq!(configs.template_status(EngineFingerprint(1)), None);
        configs.apply_server_configs(Delta::All { namespace: Some("other".to_owned()), objects: vec![] });
        configs.apply_launcher_configs(Delta::All { namespace: Some("other".to_owned()), objects: vec![] });
        assert_eq!(configs.template_status(EngineFingerprint(1)), Some(TemplateStatus::Obsolete));
    }
}
