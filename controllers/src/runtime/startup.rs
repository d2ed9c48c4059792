//! What a gateway finds out about its surroundings before it starts its controllers.

use std::time::Duration;

use anyhow::Context as _;
use kube::Client;
use rouse_config::{ImageVolumes, KubernetesConfig, LoadSource, ShutdownConfig};
use tokio::time;

use crate::{own_pod::OwnPod, prometheus_api::PrometheusClient, stub_key::StubKey};

/// The minor version of Kubernetes 1 from which on every node has image volumes.
const IMAGE_VOLUMES_MINOR: u32 = 36;
/// Timeout of the call for the API server's version, without which the gateway starts as well.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval between attempts to read the stub key, which the gateway cannot do without.
const STUB_KEY_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// Returns a client of the Prometheus that scrapes engines, if the load of engines is read from it.
pub(super) fn prometheus_of_engines(settings: &KubernetesConfig) -> anyhow::Result<Option<PrometheusClient>> {
    let is_source = settings.saturation.source == LoadSource::Prometheus;
    settings.prometheus.clone().filter(|_| is_source).map(PrometheusClient::new).transpose()
}

/// Whether Pods may have images as volumes, as far as the API server's version tells. Each node must mount them, too.
pub(super) async fn has_image_volumes(client: &Client, setting: ImageVolumes) -> bool {
    if setting == ImageVolumes::Never {
        return false;
    }
    match time::timeout(VERSION_TIMEOUT, client.apiserver_version()).await {
        Ok(Ok(version)) => {
            // A provider may add to the number: "36+".
            let number =
                |text: &str| text.trim_end_matches(|c: char| !c.is_ascii_digit()).parse::<u32>().ok();
            (number(&version.major), number(&version.minor)) >= (Some(1), Some(IMAGE_VOLUMES_MINOR))
        }
        outcome => {
            tracing::debug!(?outcome, "the version of the API server is unknown: no image volumes are used");
            false
        }
    }
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
pub(super) fn hostname() -> anyhow::Result<String> {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    Ok(name.context("cannot read this machine's host name: set kubernetes.name")?.trim().to_owned())
}
