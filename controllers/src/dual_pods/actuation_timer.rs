//! Measures how long each requester waits for its engine, by kind of actuation.

use std::collections::BTreeMap;

use rouse::{
    pairing::{
        command::{EngineStep, PairingAction, ProviderStep},
        ids::RequesterId,
    },
    units::{Millis, Tick},
};

use super::index::RequesterPod;
use crate::metrics::{ActuationPath, DualPodMetrics};

/// Wait times of requesters whose stubs were seen running.
pub(super) struct ActuationTimer {
    metrics: DualPodMetrics,
    all: BTreeMap<RequesterId, ActuationWait>,
    /// Whether everything that existed when this gateway began to lead has been seen.
    listed: bool,
}

#[derive(Default)]
struct ActuationWait {
    /// `None` if the start is unknown, or if the wait is over.
    since: Option<Tick>,
    path: Option<ActuationPath>,
}

impl ActuationTimer {
    pub(super) const fn new(metrics: DualPodMetrics) -> Self {
        Self { metrics, all: BTreeMap::new(), listed: false }
    }

    /// Starts over: requesters that are seen next may have waited for long.
    pub(super) fn forget(&mut self) {
        (self.all, self.listed) = (BTreeMap::new(), false);
    }

    pub(super) const fn listed(&mut self) {
        self.listed = true;
    }

    /// Starts the wait of a requester whose stub runs.
    ///
    /// The kubelet's start time has a resolution of a second; it serves for stubs that ran before this gateway led.
    pub(super) fn stub_running(&mut self, requester: &RequesterPod, now: Tick) {
        if !self.all.contains_key(&requester.id) {
            let since =
                if self.listed { Some(now) } else { requester.stub_started_at.map(|began| began.min(now)) };
            self.all.insert(requester.id.clone(), ActuationWait { since, path: None });
        }
    }

    pub(super) fn gone(&mut self, id: &RequesterId) {
        self.all.remove(id);
    }

    /// Records the actuation path: the first such command for a requester decides.
    pub(super) fn command_issued(&mut self, id: &RequesterId, action: &PairingAction) {
        let path = match action {
            PairingAction::Provider { step: ProviderStep::Create { .. }, .. }
            | PairingAction::Engine { step: EngineStep::Create { .. }, .. } => ActuationPath::Cold,
            PairingAction::Engine { step: EngineStep::Launch, .. } => ActuationPath::Warm,
            PairingAction::Engine { step: EngineStep::Wake { .. }, .. } => ActuationPath::Hot,
            _ => return,
        };
        if let Some(wait) = self.all.get_mut(id) {
            wait.path.get_or_insert(path);
        }
    }

    /// Ends the wait and returns its path and duration. Opening a gate again ends no wait.
    pub(super) fn engine_served(
        &mut self,
        requester: &RequesterPod,
        now: Tick,
    ) -> Option<(ActuationPath, Millis)> {
        let wait = self.all.get_mut(&requester.id)?;
        let (took, path) = (now.since(wait.since.take()?), wait.path?);
        let config = requester.config().map(|config| config.name.as_str());
        self.metrics.observe_actuation(&requester.name.namespace, path, config, took);
        Some((path, took))
    }
}
