//! Reports a Pod's status to the API server and deletes its object.

use std::time::Duration;

use k8s_openapi::{api::core::v1::Pod, jiff::Timestamp};
use kube::{
    Api, ResourceExt as _,
    api::{DeleteParams, Patch, PatchParams, Preconditions},
};
use tokio::time::{self, Instant};

use super::{PodWorker, RETRY_DELAY};
use crate::podrunner::status::{self, PodStatusInputs};

/// Longest wait for the API server. Containers must be restarted and killed in time even if it hangs.
const API_TIMEOUT: Duration = Duration::from_secs(2);

impl PodWorker {
    /// Whether a controller overwrote our status, as after it gave the node up.
    pub(super) fn is_overwritten(&self) -> bool {
        let is_newer =
            self.last_reported.as_ref().is_some_and(|(_, version)| version_of(&self.pod) >= *version);
        is_newer && !self.conditions.iter().all(|condition| condition.matches(&self.pod))
    }

    /// Reports the Pod's status if it has changed.
    pub(super) async fn report(&mut self, ended: bool) {
        if self.deleted || !self.node.reports_pods() || self.report_at > Instant::now() {
            return;
        }
        let policy = self.restart_policy();
        let facts = PodStatusInputs {
            pod: &self.pod,
            policy: &policy,
            pod_ip: self.ip,
            host_ip: self.node.address(),
            started_at: self.started_at,
            prepared: self.prepared.is_some(),
            ended,
            admission_error: self.admission_error.as_ref(),
        };
        self.conditions = status::conditions(&facts, &self.containers, &self.conditions, Timestamp::now());
        let patch = status::patch(&facts, &self.containers, &self.conditions);
        if self.last_reported.as_ref().is_some_and(|(reported, _)| *reported == patch) {
            return;
        }
        let parameters = PatchParams::default();
        let (name, api, change) = (self.pod.name_any(), self.api(), Patch::Strategic(&patch));
        let written = async {
            let _pen = self.node.status_write_lock.lock().await;
            api.patch_status(&name, &parameters, &change).await
        };
        match time::timeout(API_TIMEOUT, written).await {
            Ok(Ok(updated)) => self.last_reported = Some((patch, version_of(&updated))),
            // The object is gone or replaced; the watch will report it.
            Ok(Err(kube::Error::Api(status))) if status.is_not_found() || status.is_conflict() => {}
            failed => {
                let error =
                    failed.map_or_else(|_| "no answer".to_owned(), |answer| format!("{:?}", answer.err()));
                self.context.log_line(&format!("cannot write the status of {name}: {error}"));
                self.report_at = Instant::now() + RETRY_DELAY;
            }
        }
    }

    /// Deletes the object of a terminated Pod. Returns whether nothing is left to do.
    pub(super) async fn delete(&mut self) -> bool {
        let is_reported = self.last_reported.is_some() && self.report_at <= Instant::now();
        if self.pod.metadata.deletion_timestamp.is_none() || !self.node.reports_pods() || !is_reported {
            return false;
        }
        let parameters = DeleteParams {
            grace_period_seconds: Some(0),
            preconditions: Some(Preconditions { uid: Some(self.uid.clone()), resource_version: None }),
            ..DeleteParams::default()
        };
        match time::timeout(API_TIMEOUT, self.api().delete(&self.pod.name_any(), &parameters)).await {
            Ok(Ok(_)) => true,
            Ok(Err(kube::Error::Api(status))) if status.is_not_found() || status.is_conflict() => true,
            failed => {
                let error =
                    failed.map_or_else(|_| "no answer".to_owned(), |answer| format!("{:?}", answer.err()));
                self.context.log_line(&format!("cannot delete {}: {error}", self.pod.name_any()));
                self.report_at = Instant::now() + RETRY_DELAY;
                false
            }
        }
    }

    fn api(&self) -> Api<Pod> {
        Api::namespaced(self.context.client.clone(), &self.pod.namespace().unwrap_or_default())
    }
}

/// The object's version as a number. Kubernetes promises no order of versions, but etcd keeps one, and an error would
/// only cause a redundant write.
fn version_of(pod: &Pod) -> u64 {
    pod.resource_version().and_then(|version| version.parse().ok()).unwrap_or(0)
}
