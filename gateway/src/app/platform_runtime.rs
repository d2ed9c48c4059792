//! The gateway's platform: this machine or a cluster.

use std::{net::SocketAddr, sync::Arc};

use rouse::{fleet::event::Event, units::Millis};
use rouse_config::{Config, ShutdownConfig};
use rouse_controllers::runtime::{ClusterChange, ClusterRuntime};
use rouse_net::lease::TickClock;
use rouse_platform::{Platform, ReadinessCheck, SharedDriver};
use tokio::sync::mpsc;

use crate::{
    driver::DriverHandle,
    http::admin::WarmupSource,
    metrics::Metrics,
    platform::local::{self, LocalPlatform, StateDirLock},
};

/// A claim on the engines, held before the platform starts.
pub(super) enum PlatformClaim<'c> {
    Machine(StateDirLock),
    /// Holds no lock: the cluster's Lease decides at any time which gateway leads.
    Cluster(&'c rouse_config::KubernetesConfig),
}

impl<'c> PlatformClaim<'c> {
    /// Locks the state directory without changing anything in it.
    pub(super) fn take(config: &'c Config) -> Result<Self, local::Error> {
        match &config.kubernetes {
            None => Ok(Self::Machine(StateDirLock::take(&config.state)?)),
            Some(settings) => Ok(Self::Cluster(settings)),
        }
    }
}

pub(super) enum PlatformRuntime {
    Local(Arc<LocalPlatform>),
    Cluster(Box<ClusterRuntime>, Arc<Metrics>),
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
                let cluster =
                    ClusterRuntime::start(config, settings, events, clock, metrics.controllers()).await?;
                Ok(Self::Cluster(Box::new(cluster), Arc::clone(metrics)))
            }
        }
    }

    /// Reports what the gateway must still see before it serves.
    pub(super) fn not_ready_reason(&self) -> Arc<ReadinessCheck> {
        match self {
            Self::Local(_) => Arc::new(|| None),
            Self::Cluster(cluster, _) => cluster.not_ready_reason(),
        }
    }

    /// Reports what the gateway runs without.
    pub(super) fn degraded_reason(&self) -> Arc<ReadinessCheck> {
        match self {
            Self::Local(_) => Arc::new(|| None),
            Self::Cluster(cluster, _) => cluster.degraded_reason(),
        }
    }

    /// Returns the lister of the cluster's Warmups; `None` on one machine, which has none.
    pub(super) fn warmups(&self) -> Option<Arc<WarmupSource>> {
        let Self::Cluster(cluster, _) = self else { return None };
        let lister = cluster.warmups();
        let source: Arc<WarmupSource> = Arc::new(move || {
            let lister = lister.clone();
            Box::pin(async move { lister.list().await })
        });
        Some(source)
    }

    /// Returns once the gateway has seen everything that it must.
    pub(super) async fn wait_until_synced(&mut self) {
        if let Self::Cluster(cluster, _) = self {
            cluster.wait_until_synced().await;
        }
    }

    pub(super) fn platform(&self) -> Arc<dyn Platform> {
        match self {
            Self::Local(local) => Arc::clone(local) as _,
            Self::Cluster(cluster, _) => Arc::clone(&cluster.platform) as _,
        }
    }

    /// Reports this gateway's demand to other gateways, in a cluster. `api` is the address of this gateway's API.
    pub(super) fn start_reporting(&mut self, handle: &DriverHandle, api: SocketAddr) {
        if let Self::Cluster(cluster, _) = self {
            cluster.start_reporting(&SharedDriver::new(handle.clone()), api);
        }
    }

    /// Combines the file's configuration with the cluster's objects; `None` on one machine, where the file has
    /// everything.
    pub(super) fn compose(&mut self, base: &Config) -> Option<Config> {
        match self {
            Self::Local(_) => None,
            Self::Cluster(cluster, metrics) => {
                let (config, namespaces) = cluster.compose(base);
                metrics.set_namespaces(namespaces);
                Some(config)
            }
        }
    }

    /// Waits for the next change that concerns the whole gateway; never returns on one machine.
    pub(super) async fn next_event(&mut self) -> ClusterChange {
        match self {
            Self::Local(_) => std::future::pending().await,
            Self::Cluster(cluster, _) => cluster.next_event().await,
        }
    }

    /// Completes when the platform has lost a command: the process must end. Never completes in a cluster.
    pub(super) fn command_lost(&self) -> impl Future<Output = ()> + use<> {
        let lost = match self {
            Self::Local(local) => Some(local.command_lost()),
            Self::Cluster(..) => None,
        };
        async move {
            match lost {
                Some(lost) => lost.await,
                None => std::future::pending().await,
            }
        }
    }

    /// Releases leadership at the start of a shutdown, without waiting for running requests.
    pub(super) fn step_down(&mut self) {
        if let Self::Cluster(cluster, _) = self {
            cluster.step_down();
        }
    }

    /// How long exchanges may continue during a shutdown.
    pub(super) async fn grace(&self, shutdown: &ShutdownConfig) -> Millis {
        match self {
            Self::Local(_) => shutdown.effective_grace(None),
            Self::Cluster(cluster, _) => shutdown.effective_grace(cluster.termination_grace().await),
        }
    }

    /// Withdraws this gateway's demand, so that other gateways start nothing for its waiting requests.
    pub(super) async fn withdraw_demand(&mut self) {
        if let Self::Cluster(cluster, _) = self {
            cluster.withdraw_demand().await;
        }
    }

    /// Saves the platform's state and releases what other gateways may need. Engines live on.
    pub(super) async fn close(self) {
        match self {
            Self::Local(local) => match Arc::try_unwrap(local) {
                Ok(local) => local.close().await,
                Err(_) => {
                    tracing::debug!(
                        "the platform is still in use at shutdown; its state was saved within the last second"
                    );
                }
            },
            Self::Cluster(cluster, _) => cluster.close().await,
        }
    }
}
