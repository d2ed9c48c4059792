//! Reads the gateway's own Pod, to find out how long the kubelet lets a terminating gateway run.
//!
//! A gateway that is killed before its streams end cannot explain that to its clients, and leaves its demand report
//! behind. So its own deadline follows from the Pod's grace period. No environment variable has that, so the gateway
//! asks the API server.

use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::{Container, Pod};
use kube::{Api, Client, ResourceExt as _};
use rouse::units::Millis;
use tokio::time::{self, Duration};

/// Kubernetes' default grace period.
const DEFAULT_GRACE_SECONDS: i64 = 30;
/// Timeout of the read at startup.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of the read during shutdown, when the grace period is running.
const SHUTDOWN_READ_TIMEOUT: Duration = Duration::from_secs(1);

pub struct OwnPod {
    api: Api<Pod>,
    name: String,
    /// The configured uid.
    uid: Option<String>,
    state: Option<OwnPodState>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct OwnPodState {
    uid: String,
    termination_grace: Millis,
}

/// Why the Pod could not be read.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the API server did not answer in time")]
    Timeout(#[from] time::error::Elapsed),
    #[error("{0}")]
    Refused(#[from] kube::Error),
}

impl OwnPod {
    /// Reads the Pod of this name, which must have `uid` if given. Without its Pod the gateway serves all the same.
    pub async fn find(client: Client, namespace: &str, name: &str, uid: Option<&str>) -> Self {
        let api = Api::namespaced(client, namespace);
        let mut own_pod = Self { api, name: name.to_owned(), uid: uid.map(str::to_owned), state: None };
        match own_pod.read(READ_TIMEOUT).await {
            Ok(found) => own_pod.state = found,
            Err(error) => tracing::warn!(
                pod = name,
                %error,
                "this gateway's Pod cannot be read, so the time until the kubelet kills it is unknown: allow the \
                 gateway's account to get Pods in its own namespace (charts/rouse/rbac/gateway.yaml), or set the \
                 Pod's terminationGracePeriodSeconds to at least ten seconds more than shutdown.grace"
            ),
        }
        own_pod
    }

    /// Returns the uid of the Pod that owns this gateway's objects.
    #[must_use]
    pub fn uid(&self) -> Option<&str> {
        self.uid.as_deref().or_else(|| self.state.as_ref().map(|known| known.uid.as_str()))
    }

    /// Returns the time between SIGTERM and the kubelet's kill, as last read.
    #[must_use]
    pub fn termination_grace(&self) -> Option<Millis> {
        self.state.as_ref().map(|known| known.termination_grace)
    }

    /// Reads that time again during shutdown, since a deletion may set its own grace period.
    pub async fn current_termination_grace(&self) -> Option<Millis> {
        match self.read(SHUTDOWN_READ_TIMEOUT).await {
            Ok(Some(now)) => Some(now.termination_grace),
            Ok(None) => self.termination_grace(),
            Err(error) => {
                tracing::debug!(%error, "this gateway's Pod could not be read again");
                self.termination_grace()
            }
        }
    }

    /// Reads the Pod; `None` if it does not exist or has another uid. Boxed for the program's size (ADR 18).
    fn read(&self, timeout: Duration) -> BoxFuture<'_, Result<Option<OwnPodState>, Error>> {
        Box::pin(async move {
            let found = time::timeout(timeout, self.api.get_opt(&self.name)).await??;
            Ok(found.and_then(|pod| OwnPodState::of(&pod, self.uid.as_deref())))
        })
    }
}

impl OwnPodState {
    fn of(pod: &Pod, uid: Option<&str>) -> Option<Self> {
        let uid_found = pod.uid().filter(|uid_found| uid.is_none_or(|uid| uid == uid_found))?;
        let spec = pod.spec.as_ref()?;
        let grace = pod.metadata.deletion_grace_period_seconds.or(spec.termination_grace_period_seconds);
        // The grace period includes preStop sleeps, and the signal follows them. How long a preStop command takes is
        // unknown.
        let pause = spec.containers.iter().filter_map(pre_stop_sleep).max().unwrap_or(0);
        let remaining = grace.unwrap_or(DEFAULT_GRACE_SECONDS).saturating_sub(pause);
        Some(Self { uid: uid_found, termination_grace: Millis::secs(u64::try_from(remaining).unwrap_or(0)) })
    }
}

fn pre_stop_sleep(container: &Container) -> Option<i64> {
    Some(container.lifecycle.as_ref()?.pre_stop.as_ref()?.sleep.as_ref()?.seconds)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn known(metadata: &Value, spec: &Value, uid: Option<&str>) -> Option<OwnPodState> {
        let pod = json!({"metadata": metadata, "spec": spec});
        OwnPodState::of(&serde_json::from_value(pod).unwrap(), uid)
    }

    #[test]
    fn the_time_until_the_kill_is_the_deletions_or_the_pods_without_a_pause_before_the_signal() {
        let spec = |grace: Value, pause: u32| {
            let lifecycle = json!({"preStop": {"sleep": {"seconds": pause}}});
            json!({"terminationGracePeriodSeconds": grace, "containers": [
                {"name": "gateway", "lifecycle": lifecycle}, {"name": "other"},
            ]})
        };
        let seconds = |metadata: Value, spec: &Value| {
            known(&metadata, spec, Some("u")).unwrap().termination_grace.0 / 1000
        };
        let lives = json!({"uid": "u"});
        assert_eq!(seconds(lives.clone(), &spec(json!(45), 0)), 45);
        assert_eq!(seconds(lives.clone(), &spec(Value::Null, 0)), 30);
        assert_eq!(seconds(lives.clone(), &spec(json!(45), 15)), 30);
        assert_eq!(seconds(lives, &spec(json!(10), 15)), 0);
        let deleted = json!({"uid": "u", "deletionGracePeriodSeconds": 5});
        assert_eq!(seconds(deleted, &spec(json!(45), 0)), 5);
    }

    #[test]
    fn a_pod_with_another_uid_is_another_gateways() {
        let (metadata, spec) = (json!({"uid": "u"}), json!({"containers": []}));
        assert!(known(&metadata, &spec, None).is_some());
        assert!(known(&metadata, &spec, Some("u")).is_some());
        assert_eq!(known(&metadata, &spec, Some("v")), None);
    }
}
