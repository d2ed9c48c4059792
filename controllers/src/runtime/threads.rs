//! The threads of a gateway in a cluster.

use anyhow::Context as _;
use rouse_config::KubernetesConfig;

use crate::kit::ControllerThread;

/// One thread for each controller. None of them waits for another, and the driver waits for none.
pub(super) struct Threads {
    /// Renews the Lease, and does nothing else.
    pub(super) lease: ControllerThread,
    /// Watches the API server, resolves its objects, and writes their statuses, Events and this gateway's demand.
    pub(super) models: ControllerThread,
    /// Pairs requesters and engines, if dual pods are enabled.
    pub(super) dual_pods: Option<ControllerThread>,
    /// Runs the platform of the engines.
    pub(super) engines: ControllerThread,
    /// Reads the load of engines and scales models by it, if that is enabled.
    pub(super) saturation: Option<ControllerThread>,
    /// Carries out Warmups, if they are enabled.
    pub(super) warmup: Option<ControllerThread>,
    /// Keeps the slots of shared devices, if that is enabled.
    pub(super) slots: Option<ControllerThread>,
}

impl Threads {
    pub(super) fn start(settings: &KubernetesConfig) -> anyhow::Result<Self> {
        let start = |name| ControllerThread::start(name).context("cannot start a controller thread");
        let start_if = |enabled: bool, name| enabled.then(|| start(name)).transpose();
        Ok(Self {
            lease: start("lease")?,
            models: start("models")?,
            dual_pods: start_if(settings.dual_pods.is_some(), "dual-pods")?,
            engines: start("engines")?,
            saturation: start_if(settings.saturation.is_some(), "saturation")?,
            warmup: start_if(settings.warmup.enabled, "warmup")?,
            slots: start_if(settings.slots.is_some(), "slots")?,
        })
    }
}
