//! Where this gateway's engines are: on this machine, or in a cluster.

use std::{net::SocketAddr, sync::Arc};

use rouse::{fleet::event::Event, units::Millis};
use rouse_net::lease::TickClock;
use tokio::sync::mpsc;

use super::cluster::ClusterRuntime;
use crate::{
    config::{self, Config, ShutdownConfig},
    driver::DriverHandle,
    http::admin::ReadinessCheck,
    metrics::Metrics,
    platform::{
        Platform,
        local::{self, LocalPlatform, StateDirLock},
    },
};

/// Where a gateway's engines are to be, once no other gateway has that.
pub(super) enum PlatformClaim<'c> {
    Machine(StateDirLock),
    /// Nothing is locked: the cluster's Lease decides at any time which gateway leads.
    Cluster(&'c config::KubernetesConfig),
}

impl<'c> PlatformClaim<'c> {
    /// Locks the state directory and changes nothing in it.
    pub(super) fn take(config: &'c Config) -> Result<Self, local::Error> {
        match &config.kubernetes {
            None => Ok(Self::Machine(StateDirLock::take(&config.state)?)),
            Some(settings) => Ok(Self::Cluster(settings)),
        }
    }
}

pub(super) enum PlatformRuntime {
    Local(Arc<LocalPlatform>),
    Cluster(Box<ClusterRuntime>),
}

/// What happens to a gateway in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PlatformChange {
    /// The objects mean something else than before.
    ObjectsChanged,
    /// The task that holds the lease ended: this gateway would not hear that another leads, and must not go on.
    TaskEnded,
}

impl PlatformRuntime {
    pub(super) async fn start(
        claim: PlatformClaim<'_>,
        config: &Arc<Config>,
        events: mpsc::Sender<Event>,
        clock: TickClock,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        match claim {
            PlatformClaim::Machine(lock) => {
                Ok(Self::Local(Arc::new(LocalPlatform::start(lock, Arc::clone(config), events, clock)?)))
            }
            PlatformClaim::Cluster(settings) => {
                let cluster = ClusterRuntime::start(config, settings, events, clock, metrics).await?;
                Ok(Self::Cluster(Box::new(cluster)))
            }
        }
    }

    /// Says what a gateway has yet to see before it serves.
    pub(super) fn not_ready_reason(&self) -> Arc<ReadinessCheck> {
        match self {
            Self::Local(_) => Arc::new(|| None),
            Self::Cluster(cluster) => cluster.not_ready_reason(),
        }
    }

    /// Says what it serves without.
    pub(super) fn degraded_reason(&self) -> Arc<ReadinessCheck> {
        match self {
            Self::Local(_) => Arc::new(|| None),
            Self::Cluster(cluster) => cluster.degraded_reason(),
        }
    }

    /// Returns once all of that was seen.
    pub(super) async fn wait_until_synced(&mut self) {
        if let Self::Cluster(cluster) = self {
            cluster.wait_until_synced().await;
        }
    }

    pub(super) fn platform(&self) -> Arc<dyn Platform> {
        match self {
            Self::Local(local) => Arc::clone(local) as _,
            Self::Cluster(cluster) => Arc::clone(&cluster.platform) as _,
        }
    }

    /// Others are told of this gateway's demand, where there are others. `api`: where it is reached.
    pub(super) fn start_reporting(&mut self, handle: &DriverHandle, api: SocketAddr) {
        if let Self::Cluster(cluster) = self {
            cluster.start_reporting(handle, api);
        }
    }

    /// The file's configuration with what the cluster's objects say; `None` on one machine, where the file says all.
    pub(super) fn compose(&mut self, base: &Config) -> Option<Config> {
        match self {
            Self::Local(_) => None,
            Self::Cluster(cluster) => Some(cluster.compose(base)),
        }
    }

    /// What happens next that concerns the whole gateway; on one machine nothing.
    pub(super) async fn next_event(&mut self) -> PlatformChange {
        match self {
            Self::Local(_) => std::future::pending().await,
            Self::Cluster(cluster) => cluster.next_event().await,
        }
    }

    /// The end has begun: whoever else there is may decide, without waiting for what still runs here.
    pub(super) fn step_down(&mut self) {
        if let Self::Cluster(cluster) = self {
            cluster.step_down();
        }
    }

    /// How long exchanges may run on, now that the end has begun.
    pub(super) async fn grace(&self, shutdown: &ShutdownConfig) -> Millis {
        match self {
            Self::Local(_) => shutdown.effective_grace(None),
            Self::Cluster(cluster) => shutdown.effective_grace(cluster.termination_grace().await),
        }
    }

    /// What still waits here is served no more, and nobody need start anything for it.
    pub(super) async fn withdraw_demand(&mut self) {
        if let Self::Cluster(cluster) = self {
            cluster.withdraw_demand().await;
        }
    }

    /// Saves what the platform keeps, and gives back what others may want. Engines live on.
    pub(super) async fn close(self) {
        match self {
            Self::Local(local) => match Arc::try_unwrap(local) {
                Ok(local) => local.close().await,
                Err(_) => {
                    tracing::debug!(
                        "the platform is still in use; its state was saved within the last second"
                    );
                }
            },
            Self::Cluster(cluster) => cluster.close().await,
        }
    }
}
