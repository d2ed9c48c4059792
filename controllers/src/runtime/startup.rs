//! What a gateway finds out about its surroundings before it starts its controllers.

use std::time::Duration;

use anyhow::Context as _;
use kube::Client;
use rouse_config::{KubernetesConfig, LoadSource, ShutdownConfig};
use tokio::time;

use crate::{own_pod::OwnPod, prometheus_api::PrometheusClient, stub_key::StubKey};

/// Interval between attempts to read the stub key, which the gateway cannot do without.
const STUB_KEY_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Returns a client of the Prometheus that scrapes engines, if the load of engines is read from it.
pub(super) fn prometheus_of_engines(
    settings: &KubernetesConfig,
    source: LoadSource,
) -> anyhow::Result<Option<PrometheusClient>> {
    let is_source = source == LoadSource::Prometheus;
    settings.prometheus.clone().filter(|_| is_source).map(PrometheusClient::new).transpose()
}

/// Reads the stub key and retries transient errors. Errors that need an operator are returned.
pub(super) async fn stub_key(client: &Client, namespace: &str) -> anyhow::Result<StubKey> {
    loop {
        match StubKey::load_or_create(client, namespace).await {
            Err(error) if error.is_transient() => {
                tracing::warn!(%error, "cannot load the stub token key, retrying");
                time::sleep(STUB_KEY_RETRY_INTERVAL).await;
            }
            outcome => return Ok(outcome?),
        }
    }
}

/// Warns if the file gives streams more time than the Pod has.
pub(super) fn warn_if_grace_exceeds_pod(shutdown: &ShutdownConfig, pod: &OwnPod) {
    let (Some(configured), Some(pod_grace)) = (shutdown.grace, pod.termination_grace()) else { return };
    let grace = shutdown.effective_grace(Some(pod_grace));
    if grace < configured {
        tracing::warn!(
            %configured,
            killed_after = %pod_grace,
            %grace,
            "shutdown.grace is longer than this gateway's Pod allows, so streams end sooner: set \
             terminationGracePeriodSeconds to shutdown.grace plus ten seconds"
        );
    }
}

/// Returns the host name, for a gateway without a configured name.
///
/// # Errors
/// The kernel does not show it.
pub fn hostname() -> anyhow::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    Ok(name.context("cannot read this machine's host name: set kubernetes.name")?.trim().to_owned())
}
