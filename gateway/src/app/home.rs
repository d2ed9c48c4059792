//! Where this gateway's engines are: on this machine, or in a cluster.

use std::{net::SocketAddr, sync::Arc};

use rouse::{fleet::event::Event, lease::Clock, units::Millis};
use tokio::sync::mpsc;

use super::cluster::Cluster;
use crate::{
    config::{self, Config, Shutdown},
    driver::Handle,
    http::admin::Waits,
    metrics::Metrics,
    platform::{
        Platform,
        local::{self, Local, Lock},
    },
};

/// Where a gateway's engines are to be, once no other gateway has that.
pub(super) enum Claim<'c> {
    Machine(Lock),
    /// Nothing is locked: the cluster's Lease decides at any time which gateway leads.
    Cluster(&'c config::Kubernetes),
}

impl<'c> Claim<'c> {
    /// Locks the state directory and changes nothing in it.
    pub(super) fn take(config: &'c Config) -> Result<Self, local::Error> {
        match &config.kubernetes {
            None => Ok(Self::Machine(Lock::take(&config.state)?)),
            Some(settings) => Ok(Self::Cluster(settings)),
        }
    }
}

pub(super) enum Home {
    Local(Arc<Local>),
    Cluster(Box<Cluster>),
}

/// What happens to a gateway in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// The objects mean something else than before.
    Objects,
    /// The task that holds the lease ended: this gateway would not hear that another leads, and must not go on.
    Ended,
}

impl Home {
    pub(super) async fn start(
        claim: Claim<'_>,
        config: &Arc<Config>,
        events: mpsc::Sender<Event>,
        clock: Clock,
        metrics: &Arc<Metrics>,
    ) -> anyhow::Result<Self> {
        match claim {
            Claim::Machine(lock) => {
                Ok(Self::Local(Arc::new(Local::start(lock, Arc::clone(config), events, clock)?)))
            }
            Claim::Cluster(settings) => {
                let cluster = Cluster::start(config, settings, events, clock, metrics).await?;
                Ok(Self::Cluster(Box::new(cluster)))
            }
        }
    }

    /// Says what a gateway has yet to see before it serves.
    pub(super) fn waits(&self) -> Arc<Waits> {
        match self {
            Self::Local(_) => Arc::new(|| None),
            Self::Cluster(cluster) => cluster.waits(),
        }
    }

    /// Says what it serves without.
    pub(super) fn lacks(&self) -> Arc<Waits> {
        match self {
            Self::Local(_) => Arc::new(|| None),
            Self::Cluster(cluster) => cluster.lacks(),
        }
    }

    /// Returns once all of that was seen.
    pub(super) async fn first(&mut self) {
        if let Self::Cluster(cluster) = self {
            cluster.first().await;
        }
    }

    pub(super) fn platform(&self) -> Arc<dyn Platform> {
        match self {
            Self::Local(local) => Arc::clone(local) as _,
            Self::Cluster(cluster) => Arc::clone(&cluster.platform) as _,
        }
    }

    /// Others are told of this gateway's demand, where there are others. `api`: where it is reached.
    pub(super) fn speak(&mut self, handle: &Handle, api: SocketAddr) {
        if let Self::Cluster(cluster) = self {
            cluster.speak(handle, api);
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
    pub(super) async fn next(&mut self) -> Next {
        match self {
            Self::Local(_) => std::future::pending().await,
            Self::Cluster(cluster) => cluster.next().await,
        }
    }

    /// The end has begun: whoever else there is may decide, without waiting for what still runs here.
    pub(super) fn step_down(&mut self) {
        if let Self::Cluster(cluster) = self {
            cluster.step_down();
        }
    }

    /// How long exchanges may run on, now that the end has begun.
    pub(super) async fn grace(&self, shutdown: &Shutdown) -> Millis {
        match self {
            Self::Local(_) => shutdown.grace(None),
            Self::Cluster(cluster) => shutdown.grace(cluster.killed_after().await),
        }
    }

    /// What still waits here is served no more, and nobody need start anything for it.
    pub(super) async fn withdraw(&mut self) {
        if let Self::Cluster(cluster) = self {
            cluster.withdraw().await;
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
