//! What engines of launchers are started from, and the launchers themselves: the public project's objects, where the API server
//! has these kinds.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use kube::Resource;
use rouse::pairing::{event::Standing, ids::Fingerprint};

use crate::{
    controllers::{
        crd::{
            fma::{GROUP, InferenceServerConfig, LauncherConfig},
            ledger::ObjectName,
        },
        watch::{Change, Found},
    },
    platform::kubernetes::launcher,
};

/// As they were seen last.
#[derive(Debug, Default)]
pub(super) struct Configs {
    /// Lists of each kind that are awaited at first.
    lists: usize,
    engines: Known<InferenceServerConfig>,
    launchers: Known<LauncherConfig>,
    news: bool,
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
         'rouse-gateway crds --fma' prints, and charts/rouse/rbac/dual-pods.yaml"
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
        self.news = true;
    }

    /// Something is otherwise than when this was last asked.
    pub(super) fn news(&mut self) -> bool {
        std::mem::take(&mut self.news)
    }

    pub(super) fn engine(&self, name: &ObjectName) -> Option<&Arc<InferenceServerConfig>> {
        self.engines.objects.get(name)
    }

    /// What the launchers of this InferenceServerConfig are made from.
    pub(super) fn launcher(&self, name: &ObjectName) -> Option<&Arc<LauncherConfig>> {
        self.launchers.objects.get(&launcher_name(name, self.engine(name)?))
    }

    /// What the engine of this InferenceServerConfig is.
    pub(super) fn fingerprint(&self, name: &ObjectName) -> Result<Fingerprint, Error> {
        let config = self
            .engine(name)
            .ok_or_else(|| if self.is_complete() { Error::NoConfig(name.clone()) } else { Error::Unseen })?;
        sound("InferenceServerConfig", name, config.spec.problems())?;
        let of = launcher_name(name, config);
        let launcher = self.launchers.objects.get(&of);
        let launcher = launcher
            .ok_or_else(|| if self.is_complete() { Error::NoLauncher(of.clone()) } else { Error::Unseen })?;
        sound("LauncherConfig", &of, launcher.spec.problems())?;
        Ok(launcher::fingerprint(&config.spec.model_server_config))
    }

    /// Whether somebody may ask for such an engine again; `None`: that is not known yet.
    pub(super) fn standing(&self, fingerprint: Fingerprint) -> Option<Standing> {
        let is_of = |config: &Arc<InferenceServerConfig>| {
            launcher::fingerprint(&config.spec.model_server_config) == fingerprint
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
        let said = |configs: &Configs| configs.fingerprint(&name).unwrap_err();
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
        let first = configs.fingerprint(&name).unwrap();
        assert_eq!(configs.standing(first), Some(Standing::Current));
        configs.engines(Change::Applied(Box::new(engine("--model b"))));
        assert_eq!(configs.standing(first), Some(Standing::Obsolete));
        configs.engines(Change::Applied(Box::new(engine("--model 'b"))));
        assert!(said(&configs).to_string().contains("modelServerConfig.options"));
        assert!(configs.news() && !configs.news());
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
