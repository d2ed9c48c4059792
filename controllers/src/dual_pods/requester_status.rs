//! Writes the annotation `status` for requesters' users, in the public project's format.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use rouse::{
    model::{AcceleratorId, SleepLevelPolicy},
    pairing::{
        event::RequestedEngine,
        ids::{ProviderMode, RequesterId},
        settings::PairingSettings,
    },
    units::Millis,
};
use serde_json::{Value, json};

use super::{
    FinishedTask, PairingTasks,
    execute::Executor,
    facts::ClusterFacts,
    index::{PairingPodIndex, RequesterPod},
    pod_events::PodEvents,
};
use crate::{dual_pods::keys, workload::merge};

/// Minimum interval between two status writes of a requester.
pub(super) const STATUS_WRITE_INTERVAL: Duration = Duration::from_secs(1);

/// After this many failed queries, within some seconds, a stub is not merely starting.
const UNRESPONSIVE_STUB_FAILURES: u32 = 6;

/// The status errors of requesters, and which statuses need a write.
#[derive(Debug, Default)]
pub(super) struct RequesterStatusWriter {
    /// Error of each requester's last command, if its user has to fix something.
    errors: BTreeMap<RequesterId, String>,
    /// Statuses to compare, without those that are being written.
    due: BTreeSet<RequesterId>,
    /// Statuses that are being written, or were a moment ago. All of them become due again.
    writing: BTreeSet<RequesterId>,
    /// Requesters whose accelerators were written on their Pods.
    accelerators_written: BTreeSet<RequesterId>,
    /// The warning that this leader last sent about each requester.
    warned: BTreeMap<RequesterId, String>,
}

impl RequesterStatusWriter {
    pub(super) fn error(&mut self, id: RequesterId, error: String) {
        self.errors.insert(id.clone(), error);
        self.mark_due(id);
    }

    /// Records an error if the stub has not answered for longer than a start takes.
    pub(super) fn report_unresponsive_stub(&mut self, requester: &RequesterPod, failures: u32) {
        if failures >= UNRESPONSIVE_STUB_FAILURES && !self.errors.contains_key(&requester.id) {
            let at =
                requester.stub_address.map_or_else(|| "an unknown address".to_owned(), |at| at.to_string());
            let error = format!("the stub at {at} does not report its accelerators; retrying");
            self.error(requester.id.clone(), error);
        }
    }

    /// Clears the requester's error.
    pub(super) fn clear_error(&mut self, id: &RequesterId) {
        if self.errors.remove(id).is_some() {
            self.mark_due(id.clone());
        }
    }

    /// Returns the error of the requester's last command.
    pub(super) fn error_of(&self, id: &RequesterId) -> Option<&str> {
        self.errors.get(id).map(String::as_str)
    }

    /// Schedules a status check after a change.
    pub(super) fn mark_due(&mut self, id: RequesterId) {
        if !self.writing.contains(&id) {
            self.due.insert(id);
        }
    }

    pub(super) fn gone(&mut self, id: &RequesterId) {
        self.errors.remove(id);
        self.due.remove(id);
        self.accelerators_written.remove(id);
        self.warned.remove(id);
    }

    /// Writes a waiting requester's accelerators on its Pod, once they are known.
    ///
    /// A requester that gets an engine at once gets them with its other metadata.
    pub(super) fn write_accelerators(
        &mut self,
        requester: &RequesterPod,
        accelerators: &[AcceleratorId],
        executor: &Arc<Executor>,
        tasks: &mut PairingTasks,
    ) {
        if accelerators.is_empty()
            || !requester.accelerators.is_empty()
            || !self.accelerators_written.insert(requester.id.clone())
        {
            return;
        }
        let (name, seen, executor) = (requester.name.clone(), requester.seen.clone(), Arc::clone(executor));
        let annotations = json!({keys::ACCELERATORS: keys::join_ids(accelerators)});
        tasks.spawn(async move {
            executor.annotate(&name, &seen, &annotations).await;
            FinishedTask::EngineVerified(None)
        });
    }

    /// Allows the next write: the interval since the last one has passed.
    pub(super) fn may_write(&mut self, id: RequesterId) {
        self.writing.remove(&id);
        self.due.insert(id);
    }

    pub(super) fn write(
        &mut self,
        index: &PairingPodIndex,
        facts: &ClusterFacts,
        executor: &Arc<Executor>,
        pod_events: &PodEvents,
        tasks: &mut PairingTasks,
    ) {
        for id in std::mem::take(&mut self.due) {
            let Some(requester) = index.requester(&id) else { continue };
            let Some(StatusAnnotation { text, warning }) =
                self.pending_status(requester, facts, &executor.settings.core)
            else {
                continue;
            };
            if let Some(warning) = warning
                && self.warned.insert(id.clone(), warning.clone()).as_ref() != Some(&warning)
            {
                pod_events.report_short_grace(requester, &warning);
            }
            self.writing.insert(id.clone());
            let (name, seen, executor) =
                (requester.name.clone(), requester.seen.clone(), Arc::clone(executor));
            tasks.spawn(async move {
                executor.write_status(&name, &seen, &text).await;
                FinishedTask::StatusWritten(id)
            });
        }
    }

    /// Returns the new annotation, if it differs from the current one.
    fn pending_status(
        &self,
        requester: &RequesterPod,
        facts: &ClusterFacts,
        settings: &PairingSettings,
    ) -> Option<StatusAnnotation> {
        let requested = requester.spec.as_ref().zip(requester.node.as_ref()).map(|(spec, node)| match spec {
            Ok(spec) => spec.resolve(node, facts).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        });
        let warning = requested
            .as_ref()
            .and_then(|requested| short_grace(requester.grace?, requested.as_ref().ok()?, settings));
        let resolve_error = requested.as_ref().and_then(|requested| requested.as_ref().err());
        let errors: Vec<&String> =
            resolve_error.or_else(|| self.errors.get(&requester.id)).into_iter().collect();
        // There is nothing to report and nothing to clear.
        if errors.is_empty() && warning.is_none() && requester.status.is_none() {
            return None;
        }
        let errors = if errors.is_empty() { Value::Null } else { json!(errors) };
        let mut status = json!({"Errors": errors});
        if let Some(warning) = &warning {
            merge::into(&mut status, &json!({"Warnings": [warning]}));
        }
        let text = status.to_string();
        let current = requester.status.as_deref().unwrap_or_default();
        let warning = warning.filter(|warning| !current.contains(warning.as_str()));
        (current != text).then_some(StatusAnnotation { text, warning })
    }
}

/// The content for a requester's annotation.
struct StatusAnnotation {
    text: String,
    /// A warning in this text that the requester's former status did not have.
    warning: Option<String>,
}

/// Returns a warning if the kubelet may kill the stub before the engine sleeps, and cut requests.
fn short_grace(grace: Millis, requested: &RequestedEngine, settings: &PairingSettings) -> Option<String> {
    let needed = settings.max_hold(&requested.sizes);
    let sleeps = requested.mode != ProviderMode::Plain && requested.level != SleepLevelPolicy::Never;
    (sleeps && grace < needed).then(|| {
        format!(
            "terminationGracePeriodSeconds is {}: requests may be cut, and the engine may not fall asleep in time; \
             set it to at least {}",
            grace.0 / 1000,
            needed.0.div_ceil(1000)
        )
    })
}

#[cfg(test)]
mod tests {
    use rouse::{
        pairing::{event::MemorySizes, ids::EngineFingerprint},
        units::Bytes,
    };

    use super::*;

    #[test]
    fn a_status_that_changes_while_it_is_written_is_due_once_it_may_be_written_again() {
        let (id, mut statuses) = (RequesterId::from("uid"), RequesterStatusWriter::default());
        statuses.writing.insert(id.clone());
        statuses.error(id.clone(), "the stub does not answer".to_owned());
        assert!(statuses.due.is_empty());
        statuses.may_write(id.clone());
        assert!(statuses.due.contains(&id) && statuses.writing.is_empty());
    }

    #[test]
    fn a_grace_that_is_shorter_than_drain_and_sleep_is_told_of() {
        let sizes = MemorySizes { awake: Bytes::gib(60), asleep: Bytes::gib(2), host: Bytes::gib(40) };
        let ask = |mode, level| {
            let fingerprint = EngineFingerprint(1);
            RequestedEngine { mode, fingerprint, build: None, sizes, level, stop_after: None }
        };
        let told = |secs, mode, level| {
            short_grace(Millis::secs(secs), &ask(mode, level), &PairingSettings::default())
        };
        let short = told(70, ProviderMode::Sleep, SleepLevelPolicy::Auto).unwrap();
        assert!(short.contains("is 70: ") && short.ends_with("; set it to at least 110"), "{short}");
        assert_eq!(told(110, ProviderMode::Sleep, SleepLevelPolicy::Auto), None);
        assert_eq!(told(1, ProviderMode::Plain, SleepLevelPolicy::Auto), None);
        assert_eq!(told(1, ProviderMode::Launcher, SleepLevelPolicy::Never), None);
    }
}
