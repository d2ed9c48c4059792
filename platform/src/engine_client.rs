//! Shared parts of every engine generation on any platform: the event channel and the engine's client.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use rouse::{
    engine::last_outcome::EngineDiagnostics, fleet::event::Event, model::EngineId, units::Generation,
};
use rouse_config::{Config, EngineConfig};
use rouse_net::{adapter::Adapter, lease::TickClock};
use tokio::sync::mpsc;

use crate::EngineActivity;

/// State shared by all tasks of a platform.
#[derive(Debug)]
pub struct PlatformContext {
    pub config: ArcSwap<Config>,
    events: mpsc::Sender<Event>,
    pub clock: TickClock,
    /// Activity of each engine's current generation.
    activity: Mutex<BTreeMap<EngineId, (Generation, Arc<EngineActivity>)>>,
}

impl PlatformContext {
    pub fn new(config: Arc<Config>, events: mpsc::Sender<Event>, clock: TickClock) -> Arc<Self> {
        Arc::new(Self { config: ArcSwap::new(config), events, clock, activity: Mutex::default() })
    }

    /// Sends an event and waits while the driver is behind: an outcome may be late, never lost.
    pub async fn send_event(&self, event: Event) {
        if self.events.send(event).await.is_err() {
            tracing::debug!("event dropped: the driver has ended");
        }
    }

    /// Returns the activity shared by all users of one engine generation.
    pub fn engine_activity(&self, engine: &EngineId, generation: Generation) -> Arc<EngineActivity> {
        let mut reported = self.activity.lock().unwrap_or_else(PoisonError::into_inner);
        let (life, latest) = reported.entry(engine.clone()).or_default();
        // Callers with an older generation get an activity that no task writes to.
        if *life > generation {
            return Arc::default();
        }
        if *life < generation {
            (*life, *latest) = (generation, Arc::default());
        }
        Arc::clone(latest)
    }
}

/// One engine generation and how to reach it.
#[derive(Debug)]
pub struct EngineClient {
    pub common: Arc<PlatformContext>,
    pub id: EngineId,
    pub generation: Generation,
    pub address: SocketAddr,
    pub model: Arc<EngineConfig>,
    pub adapter: Adapter,
}

impl EngineClient {
    pub fn new(
        common: &Arc<PlatformContext>,
        id: EngineId,
        generation: Generation,
        address: SocketAddr,
        model: Arc<EngineConfig>,
    ) -> Self {
        let common = Arc::clone(common);
        let adapter = Adapter::new(model.profile(), address).with_origin(model.backend_origin.clone());
        Self { common, id, generation, address, model, adapter }
    }

    /// Sends the diagnostics that show why the engine does not serve.
    pub async fn report_diagnostics(&self, symptoms: EngineDiagnostics) {
        let (engine, generation) = (self.id.clone(), self.generation);
        self.common.send_event(Event::Diagnostics { engine, generation, diagnostics: symptoms }).await;
    }

    pub fn health_timeout(&self) -> Duration {
        self.common.config.load().timeouts.health_timeout.duration()
    }

    pub fn explicit_memory(&self) -> bool {
        let config = self.common.config.load();
        let spec = config.core.models.iter().find(|spec| spec.name == self.id.model);
        spec.is_some_and(|spec| spec.explicit_memory)
    }
}
