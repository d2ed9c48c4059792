//! The threads of a gateway in a cluster.

use anyhow::Context as _;

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
    /// Reads the load of engines, and scales models by it.
    pub(super) saturation: ControllerThread,
    /// Carries out Warmups, if they are enabled.
    pub(super) warmup: Option<ControllerThread>,
    /// Keeps the slots of shared devices, if that is enabled.
    pub(super) slots: Option<ControllerThread>,
}

impl Threads {
    pub(super) fn start(dual_pods: bool, warmup: bool, slots: bool) -> anyhow::Result<Self> {
        let start = |name| ControllerThread::start(name).context("cannot start a controller thread");
        Ok(Self {
            lease: start("lease")?,
            models: start("models")?,
            dual_pods: dual_pods.then(|| start("dual-pods")).transpose()?,
            engines: start("engines")?,
            saturation: start("saturation")?,
            warmup: warmup.then(|| start("warmup")).transpose()?,
            slots: slots.then(|| start("slots")).transpose()?,
        })
    }
}
