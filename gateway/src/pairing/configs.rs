//! What engines of launchers are started from, and the launchers themselves: the public project's objects, where the API server
//! has these kinds.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kube::Resource;
use rouse::{
    pairing::{
        event::{Standing, Terms},
        ids::{Build, Fingerprint},
    },
    words,
};

use crate::{
    controllers::{
        crd::{
            fma::{GROUP, InferenceServerConfig, LauncherConfig, LauncherPopulationPolicy, Status},
            ledger::ObjectName,
        },
        watch::{Change, Found},
    },
    pairing::population::{Counts, Policies, Traits},
    platform::kubernetes::launcher::{
        self,
        pod::{Source, label_value},
    },
};

/// As they were seen last.
#[derive(Debug, Default)]
pub(super) struct Configs {
    /// Lists of each kind that are awaited at first.
    lists: usize,
    engines: Known<InferenceServerConfig>,
    launchers: Known<LauncherConfig>,
    policies: Policies,
    /// By namespace and label, what launchers are made from now.
    sources: BTreeMap<(String, String), Current>,
    news: bool,
}

/// What a LauncherConfig comes to.
#[derive(Debug)]
struct Current {
    source: Source,
    build: Build,
    most: Option<u32>,
    /// Launchers can be made from it.
    sound: bool,
}

/// All of one kind.
#[derive(Debug)]
struct Known<K> {
    objects: BTreeMap<ObjectName, Arc<K>>,
    /// Of these namespaces the list has come.
    listed: BTreeSet<Option<String>>,
}

/// Why no engine can be started for who asks for one. It is told as it stands here.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error(
        "the API server has shown no list of InferenceServerConfigs and LauncherConfigs yet: where it has no {GROUP}, apply what \
         'rouse-gateway crds --fma' prints, and charts/rouse/rbac/dual-pods.yaml and dual-pods-namespace.yaml"
    )]
    Unseen,
    #[error("there is no InferenceServerConfig {0}: make it, or name another one")]
    NoConfig(ObjectName),
    #[error(
        "there is no LauncherConfig {0}, which the InferenceServerConfig names: make it, or name another one"
    )]
    NoLauncher(ObjectName),
    #[error("{kind} {name}: {}", problems.join("; "))]
    Problems { kind: &'static str, name: ObjectName, problems: Vec<String> },
}

impl<K> Default for Known<K> {
    fn default() -> Self {
        Self { objects: BTreeMap::new(), listed: BTreeSet::new() }
    }
}

impl<K: Resource> Known<K> {
    fn take(&mut self, change: Change<K>) {
        match change {
            Change::All { namespace, objects } => {
                let there: BTreeSet<ObjectName> = objects.iter().map(Found::name).collect();
                let within = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                self.objects.retain(|name, _| !within(name) || there.contains(name));
                objects.into_iter().for_each(|found| self.saw(found));
                self.listed.insert(namespace);
            }
            Change::Applied(found) => self.saw(*found),
            Change::Deleted(name) => drop(self.objects.remove(&name)),
        }
    }

    /// One that can no longer be read stays as it was: its engines are not obsolete for that.
    fn saw(&mut self, found: Found<K>) {
        let name = found.name();
        if let Some(object) = found.good() {
            self.objects.insert(name, Arc::new(object));
        }
    }
}

impl Configs {
    /// `lists`: how many there are of each kind at first, one for each namespace that is watched.
    pub(super) fn new(lists: usize) -> Self {
        Self { lists, ..Self::default() }
    }

    pub(super) fn engines(&mut self, change: Change<InferenceServerConfig>) {
        self.engines.take(change);
        self.news = true;
    }

    pub(super) fn launchers(&mut self, change: Change<LauncherConfig>) {
        self.launchers.take(change);
        let current = self.launchers.objects.values().map(|config| Current::of(config));
        self.sources = current.map(|own| (own.source.place(), own)).collect();
        self.news = true;
    }

    pub(super) fn policies(&mut self, change: Change<LauncherPopulationPolicy>) {
        self.policies.take(change);
        self.news = true;
    }

    /// What is to be written of LauncherPopulationPolicies. What is not is asked for again after [`Self::look_again`].
    pub(super) fn verdicts(&self) -> Vec<(ObjectName, Status)> {
        let missing = |name: &ObjectName| {
            let place = (name.namespace.clone(), label_value(&name.name));
            match self.sources.get(&place) {
                Some(own) if own.sound => None,
                Some(_) => Some(format!("the LauncherConfig {name} cannot be followed")),
                None => Some(format!("there is no LauncherConfig {name}: make it, or name another one")),
            }
        };
        if self.is_complete() { self.policies.verdicts(missing) } else { Vec::new() }
    }

    pub(super) fn look_again(&mut self) {
        self.news = true;
    }

    /// How many launchers of each LauncherConfig such a node is to have, of those from which any can be made.
    pub(super) fn counts(&self, node: &Traits) -> Counts {
        let mut counts = self.policies.counts(node);
        counts.retain(|name, _| {
            self.sources.get(&(name.namespace.clone(), label_value(&name.name))).is_some_and(|own| own.sound)
        });
        counts
    }

    /// Something is otherwise than when this was last asked.
    pub(super) fn news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    pub(super) fn engine(&self, name: &ObjectName) -> Option<&Arc<InferenceServerConfig>> {
        self.engines.objects.get(name)
    }

    /// How many InferenceServerConfigs name each LauncherConfig.
    pub(super) fn by_launcher(&self) -> BTreeMap<String, usize> {
        let mut counts = BTreeMap::new();
        for config in self.engines.objects.values() {
            *counts.entry(config.spec.launcher_config_name.clone()).or_default() += 1;
        }
        counts
    }

    /// The LauncherConfig of this name.
    pub(super) fn named(&self, name: &ObjectName) -> Option<&Arc<LauncherConfig>> {
        self.launchers.objects.get(name)
    }

    /// What the launchers of this InferenceServerConfig are made from.
    pub(super) fn launcher(&self, name: &ObjectName) -> Option<&Arc<LauncherConfig>> {
        self.launchers.objects.get(&launcher_name(name, self.engine(name)?))
    }

    /// Of what build the launchers of this InferenceServerConfig are.
    pub(super) fn build(&self, name: &ObjectName) -> Option<Build> {
        let of = launcher_name(name, self.engine(name)?);
        self.sources.get(&(of.namespace, label_value(&of.name))).map(|own| own.build)
    }

    /// What launchers can be made from now.
    pub(super) fn sources(&self) -> impl Iterator<Item = &Source> {
        self.sources.values().map(|own| &own.source)
    }

    /// What holds for launchers of this source; `None`: that is not known, or nothing can be made in their stead.
    pub(super) fn terms(&self, source: &Source) -> Option<Terms> {
        match self.sources.get(&source.place()) {
            Some(own) if own.sound => {
                Some(Terms { obsolete: own.source.hash != source.hash, most: own.most })
            }
            Some(_) => None,
            None => self.is_complete().then_some(Terms { obsolete: true, most: None }),
        }
    }

    /// What the engine of this InferenceServerConfig is that is asked for by this name.
    pub(super) fn fingerprint(&self, name: &ObjectName, served: Option<&str>) -> Result<Fingerprint, Error> {
        let config = self
            .engine(name)
            .ok_or_else(|| if self.is_complete() { Error::NoConfig(name.clone()) } else { Error::Unseen })?;
        sound("InferenceServerConfig", name, config.spec.problems())?;
        let of = launcher_name(name, config);
        let launcher = self.launchers.objects.get(&of);
        let launcher = launcher
            .ok_or_else(|| if self.is_complete() { Error::NoLauncher(of.clone()) } else { Error::Unseen })?;
        sound("LauncherConfig", &of, launcher.spec.problems())?;
        Ok(launcher::fingerprint(&config.spec.model_server_config, served))
    }

    /// The engine's options, split into words; empty if the InferenceServerConfig is unknown.
    pub(super) fn options(&self, name: &ObjectName) -> Vec<String> {
        let options = self.engine(name).map(|config| &config.spec.model_server_config.options);
        options.and_then(|options| words::split(options).ok()).unwrap_or_default()
    }

    /// Whether somebody may ask for such an engine again; `None`: that is not known yet.
    pub(super) fn standing(&self, fingerprint: Fingerprint) -> Option<Standing> {
        let is_of = |config: &Arc<InferenceServerConfig>| {
            launcher::is_of(&config.spec.model_server_config, fingerprint)
        };
        if self.engines.objects.values().any(is_of) {
            return Some(Standing::Current);
        }
        self.is_complete().then_some(Standing::Obsolete)
    }

    fn is_complete(&self) -> bool {
        let least = self.engines.listed.len().min(self.launchers.listed.len());
        least > 0 && least >= self.lists
    }
}

impl Current {
    fn of(config: &LauncherConfig) -> Self {
        let source = Source::of(config);
        Self {
            build: source.build(),
            source,
            most: config.spec.max_instances.and_then(|most| u32::try_from(most).ok()),
            sound: config.spec.problems().is_empty(),
        }
    }
}

fn sound(kind: &'static str, name: &ObjectName, problems: Vec<String>) -> Result<(), Error> {
    if problems.is_empty() { Ok(()) } else { Err(Error::Problems { kind, name: name.clone(), problems }) }
}

fn launcher_name(name: &ObjectName, config: &InferenceServerConfig) -> ObjectName {
    ObjectName::new(name.namespace.clone(), config.spec.launcher_config_name.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn object<K: serde::de::DeserializeOwned>(kind: &str, spec: &Value) -> Found<K> {
        let object = json!({"apiVersion": "fma.llm-d.ai/v1alpha1", "kind": kind,
            "metadata": {"name": "one", "namespace": "chat"}, "spec": spec});
        Found::Good(serde_json::from_value(object).unwrap())
    }

    fn engine(options: &str) -> Found<InferenceServerConfig> {
        let spec = json!({"launcherConfigName": "one", "modelServerConfig": {"options": options}});
        object("InferenceServerConfig", &spec)
    }

    fn all<K>(objects: Vec<Found<K>>) -> Change<K> {
        Change::All { namespace: Some("chat".to_owned()), objects }
    }

    #[test]
    fn what_is_missing_is_said_and_an_edit_makes_its_engines_obsolete() {
        let (name, mut configs) = (ObjectName::new("chat", "one"), Configs::new(1));
        let said = |configs: &Configs| configs.fingerprint(&name, None).unwrap_err();
        assert_eq!(said(&configs), Error::Unseen);
        configs.engines(all(vec![]));
        configs.launchers(all(vec![]));
        assert_eq!(said(&configs), Error::NoConfig(name.clone()));
        configs.engines(Change::Applied(Box::new(engine("--model a"))));
        assert_eq!(said(&configs), Error::NoLauncher(name.clone()));
        let bare = json!({"podTemplate": {"spec": {"containers": []}}});
        configs.launchers(Change::Applied(Box::new(object("LauncherConfig", &bare))));
        assert!(
            said(&configs).to_string().starts_with("LauncherConfig chat/one: podTemplate"),
            "{configs:?}"
        );
        let whole = json!({"podTemplate": {"spec": {"containers": [{"name": "inference-server"}]}}});
        configs.launchers(Change::Applied(Box::new(object("LauncherConfig", &whole))));
        let first =
            [None, Some("a"), Some("another")].map(|served| configs.fingerprint(&name, served).unwrap());
        assert_eq!(first.map(|one| configs.standing(one)), [Some(Standing::Current); 3]);
        configs.engines(Change::Applied(Box::new(engine("--model b"))));
        assert_eq!(first.map(|one| configs.standing(one)), [Some(Standing::Obsolete); 3]);
        configs.engines(Change::Applied(Box::new(engine("--model 'b"))));
        assert!(said(&configs).to_string().contains("modelServerConfig.options"));
        assert!(configs.news() && !configs.news());
    }

    #[test]
    fn a_launcher_is_obsolete_once_its_template_is_another_or_its_configuration_is_gone() {
        let config = |image: &str, most: i32| -> Found<LauncherConfig> {
            let container = json!({"name": "inference-server", "image": image});
            let template = json!({"spec": {"containers": [container]}});
            object("LauncherConfig", &json!({"podTemplate": template, "maxInstances": most}))
        };
        let mut configs = Configs::new(1);
        configs.engines(all(vec![engine("--model a")]));
        configs.launchers(all(vec![config("a", 2)]));
        let source = configs.sources().next().unwrap().clone();
        assert_eq!(configs.build(&ObjectName::new("chat", "one")), Some(source.build()));
        let terms = |obsolete, most| Some(Terms { obsolete, most });
        assert_eq!(configs.terms(&source), terms(false, Some(2)));
        configs.launchers(Change::Applied(Box::new(config("a", 3))));
        assert_eq!(configs.terms(&source), terms(false, Some(3)));
        configs.launchers(Change::Applied(Box::new(config("b", 3))));
        assert_eq!(configs.terms(&source), terms(true, Some(3)));
        assert_ne!(configs.build(&ObjectName::new("chat", "one")), Some(source.build()));
        configs.launchers(Change::Applied(Box::new(config("b", 0))));
        assert_eq!(configs.terms(&source), None, "nothing could be made in its stead");
        configs.launchers(Change::Deleted(ObjectName::new("chat", "one")));
        assert_eq!(configs.terms(&source), terms(true, None));
        assert_eq!(Configs::new(1).terms(&source), None);
    }

    #[test]
    fn nothing_is_obsolete_before_every_list_has_come() {
        let mut configs = Configs::new(2);
        configs.engines(all(vec![]));
        configs.launchers(all(vec![]));
        assert_eq!(configs.standing(Fingerprint(1)), None);
        configs.engines(Change::All { namespace: Some("other".to_owned()), objects: vec![] });
        configs.launchers(Change::All { namespace: Some("other".to_owned()), objects: vec![] });
        assert_eq!(configs.standing(Fingerprint(1)), Some(Standing::Obsolete));
    }
}
