//! A changed file, or SIGHUP: all of it or nothing.

use std::sync::Arc;

use arc_swap::ArcSwap;
use rouse::fleet::event::Event;

use crate::{
    config::{self, Config, Source},
    driver::Handle,
    metrics::{Metrics, Outcome},
    platform::local::Local,
};

pub(super) struct Reload {
    pub(super) source: Source,
    pub(super) config: Arc<ArcSwap<Config>>,
    pub(super) handle: Handle,
    pub(super) metrics: Arc<Metrics>,
    pub(super) platform: Arc<Local>,
}

impl Reload {
    /// Reads the source again. An invalid one is refused whole, with everything that is wrong in it; what ran goes on.
    pub(super) fn again(&mut self) {
        let new = match self.source.load() {
            Ok(new) => new,
            Err(errors) => {
                self.metrics.reloaded(Outcome::Failed);
                tracing::error!("the configuration was not reloaded; the old one stays\n{errors}");
                return;
            }
        };
        let old = self.config.load_full();
        let mut new = new;
        // Listening addresses, accelerators and the state directory belong to the whole life of the process.
        new.core.accelerators.clone_from(&old.core.accelerators);
        new.meters.clone_from(&old.meters);
        (new.api, new.admin.address) = (old.api, old.admin.address);
        new.state.clone_from(&old.state);
        let diff = config::diff(&old, &new);
        if diff.is_empty() {
            return;
        }
        tracing::info!("configuration reloaded: {diff}");
        if let Some(text) = super::restart_needed(&diff) {
            tracing::warn!("{text}");
        }
        let new = Arc::new(new);
        self.config.store(Arc::clone(&new));
        self.platform.reconfigure(Arc::clone(&new));
        self.handle.tell(Event::Configured { configuration: Box::new(new.core.clone()) });
        self.metrics.reloaded(Outcome::Done);
    }

    /// Saves what the platform keeps and unlocks its directory.
    pub(super) async fn close(self) {
        let Self { platform, .. } = self;
        match Arc::try_unwrap(platform) {
            Ok(platform) => platform.close().await,
            Err(_) => {
                tracing::debug!("the platform is still in use; its state was saved within the last second")
            }
        }
    }
}
