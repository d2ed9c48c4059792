//! The engine tasks of this leader, by engine, by Deployment and by Pod.
//!
//! A task changes only through [`EngineIndex::change`], which keeps the indexes as the task is.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use rouse::model::EngineId;

use crate::crd::ledger::ObjectName;

/// What an engine needs of its Deployment's Pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PodNeed {
    /// A Pod, and another one if that is lost.
    Seeking,
    /// Its bound Pod only.
    Bound,
    /// None: its Pod is being released.
    Leaving,
}

/// A task that uses a Pod of a Deployment.
pub(super) trait PodUser {
    /// Returns the Deployment; `None` for an engine without Pods.
    fn deployment(&self) -> Option<&ObjectName>;
    /// Returns the Pod that the task has.
    fn pod(&self) -> Option<&ObjectName>;
    fn need(&self) -> PodNeed;
}

/// Tasks by engine, and which of them a Deployment or a Pod concerns.
pub(super) struct EngineIndex<T> {
    tasks: BTreeMap<EngineId, T>,
    deployments: BTreeMap<ObjectName, DeploymentMembers>,
    pods: BTreeMap<ObjectName, BTreeSet<EngineId>>,
}

/// The engines of one Deployment.
#[derive(Debug, Default)]
struct DeploymentMembers {
    all: BTreeSet<EngineId>,
    seeking: BTreeSet<EngineId>,
    /// Those that seek a Pod and have none.
    waiting: BTreeSet<EngineId>,
    leaving: BTreeSet<EngineId>,
}

impl<T> Default for EngineIndex<T> {
    fn default() -> Self {
        Self { tasks: BTreeMap::new(), deployments: BTreeMap::new(), pods: BTreeMap::new() }
    }
}

impl<T: PodUser> EngineIndex<T> {
    pub(super) fn get(&self, engine: &EngineId) -> Option<&T> {
        self.tasks.get(engine)
    }

    pub(super) fn contains(&self, engine: &EngineId) -> bool {
        self.tasks.contains_key(engine)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&EngineId, &T)> {
        self.tasks.iter()
    }

    /// Adds a task, in place of an earlier one of the same engine.
    pub(super) fn insert(&mut self, engine: EngineId, task: T) {
        self.remove(&engine);
        self.tasks.insert(engine.clone(), task);
        self.link(&engine);
    }

    pub(super) fn remove(&mut self, engine: &EngineId) -> Option<T> {
        self.unlink(engine);
        self.tasks.remove(engine)
    }

    /// Changes a task; `None` if the engine has none.
    pub(super) fn change<R>(&mut self, engine: &EngineId, change: impl FnOnce(&mut T) -> R) -> Option<R> {
        self.unlink(engine);
        let outcome = self.tasks.get_mut(engine).map(change);
        self.link(engine);
        outcome
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Returns the engines that have this Pod.
    pub(super) fn of_pod(&self, pod: &ObjectName) -> Vec<EngineId> {
        self.pods.get(pod).into_iter().flatten().cloned().collect()
    }

    pub(super) fn has_pod(&self, pod: &ObjectName) -> bool {
        self.pods.contains_key(pod)
    }

    /// Returns all engines of this Deployment.
    pub(super) fn members(&self, deployment: &ObjectName) -> impl Iterator<Item = (&EngineId, &T)> {
        let members = self.deployments.get(deployment).into_iter().flat_map(|members| &members.all);
        members.filter_map(move |engine| Some((engine, self.tasks.get(engine)?)))
    }

    pub(super) fn has_members(&self, deployment: &ObjectName) -> bool {
        self.deployments.contains_key(deployment)
    }

    /// Returns the number of this Deployment's engines that keep a Pod.
    pub(super) fn keeping(&self, deployment: &ObjectName) -> usize {
        self.deployments.get(deployment).map_or(0, |members| members.all.len() - members.leaving.len())
    }

    /// Returns the number of this Deployment's engines that have not bound a Pod yet.
    pub(super) fn seeking(&self, deployment: &ObjectName) -> usize {
        self.deployments.get(deployment).map_or(0, |members| members.seeking.len())
    }

    /// Returns this Deployment's engines that wait for a Pod, the lowest engine id first.
    pub(super) fn waiting(&self, deployment: &ObjectName) -> Vec<EngineId> {
        self.collect(deployment, |members| &members.waiting)
    }

    /// Returns this Deployment's engines whose Pods are being released.
    pub(super) fn leaving(&self, deployment: &ObjectName) -> Vec<EngineId> {
        self.collect(deployment, |members| &members.leaving)
    }

    fn collect(
        &self,
        deployment: &ObjectName,
        which: impl Fn(&DeploymentMembers) -> &BTreeSet<EngineId>,
    ) -> Vec<EngineId> {
        self.deployments
            .get(deployment)
            .map(|members| which(members).iter().cloned().collect())
            .unwrap_or_default()
    }

    /// Adds the task to the indexes.
    fn link(&mut self, engine: &EngineId) {
        let Some(task) = self.tasks.get(engine) else { return };
        if let Some(pod) = task.pod() {
            self.pods.entry(pod.clone()).or_default().insert(engine.clone());
        }
        let Some(deployment) = task.deployment() else { return };
        let members = self.deployments.entry(deployment.clone()).or_default();
        members.all.insert(engine.clone());
        match task.need() {
            PodNeed::Seeking => {
                members.seeking.insert(engine.clone());
                if task.pod().is_none() {
                    members.waiting.insert(engine.clone());
                }
            }
            PodNeed::Bound => {}
            PodNeed::Leaving => {
                members.leaving.insert(engine.clone());
            }
        }
    }

    /// Removes the task from the indexes.
    fn unlink(&mut self, engine: &EngineId) {
        let Some(task) = self.tasks.get(engine) else { return };
        if let Some(pod) = task.pod()
            && let Some(engines) = self.pods.get_mut(pod)
        {
            engines.remove(engine);
            if engines.is_empty() {
                self.pods.remove(pod);
            }
        }
        if let Some(deployment) = task.deployment()
            && let Some(members) = self.deployments.get_mut(deployment)
        {
            members.all.remove(engine);
            members.seeking.remove(engine);
            members.waiting.remove(engine);
            members.leaving.remove(engine);
            if members.all.is_empty() {
                self.deployments.remove(deployment);
            }
        }
    }
}
