//! What answers at which port, beside the orders (`admin`) and the relays.

use std::sync::Arc;

use axum::Router;
use http::HeaderMap;
use serde_json::{Value, json};

use super::{
    accelerators, admin, debug, memory,
    metrics::{self, Now},
    probes, readiness, set_log,
    state::Proxy,
};

impl Proxy {
    /// The paths of the SPI that are no orders about the gate, the target or the engine.
    pub(super) fn spi(self: &Arc<Self>) -> Router {
        let proxy = Arc::clone(self);
        let fence = Arc::new(move |headers: &HeaderMap| admin::hear(&proxy, headers));
        accelerators::routes(self.accelerators.clone())
            .merge(memory::routes(self.memory.clone()))
            .merge(readiness::routes(Arc::clone(&self.readiness), fence))
            .merge(set_log::routes(self.log.clone()))
    }

    /// The probes port.
    pub(super) fn probes(self: &Arc<Self>) -> Router {
        let proxy = Arc::clone(self);
        probes::routes(Arc::clone(&self.readiness), Arc::new(move || !proxy.keeper.is_open()))
    }

    /// The metrics port.
    pub(super) fn scrapes(self: &Arc<Self>) -> Router {
        let proxy = Arc::clone(self);
        metrics::routes(Arc::clone(&self.metrics), Arc::new(move || proxy.now()))
    }

    /// The debug port.
    pub(super) fn insides(self: &Arc<Self>) -> Router {
        let proxy = Arc::clone(self);
        debug::routes(Arc::new(move || proxy.dump()))
    }

    fn now(&self) -> Now {
        let gate = self.keeper.view();
        let readiness = self.readiness.dump();
        Now {
            leases: gate.leases,
            gated: gate.gated,
            epoch: gate.epoch,
            generation: gate.generation,
            ready: readiness.ready,
            changes: readiness.changes,
            log: self.log.end(),
        }
    }

    fn dump(&self) -> Value {
        let (connections, streams) = self.metrics.open();
        let counts = &self.counts;
        json!({
            "gate": self.keeper.view(),
            "target": self.keeper.target(),
            // Unknown for the moment in which it begins to listen.
            "proxyPort": self.listening.try_lock().ok().and_then(|listening| *listening),
            "readiness": self.readiness.dump(),
            "accelerators": self.accelerators.now(),
            "log": self.log.end(),
            "connections": connections,
            "streams": streams,
            "requests": {
                "complete": counts.complete.get(),
                "left": counts.left.get(),
                "failed": counts.failed.get(),
                "cut": counts.cut.get(),
                "gated": counts.gated.get(),
                "notReady": counts.not_ready.get(),
                "refused": counts.refused.get(),
            },
            "epochGate": self.settings.epoch_gate,
            "model": self.settings.model,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{page::Section, proxy::admin};

    #[test]
    fn the_page_tells_of_every_flag() {
        Section::of("proxy", "Proxy").tells_of_every_flag();
    }

    #[tokio::test]
    async fn the_page_tells_of_every_path() {
        let (page, proxy) = (Section::of("proxy", "Proxy"), Proxy::of_flags(&[]));
        page.tells_of_every_path("Paths on the probes port", proxy.probes()).await;
        page.tells_of_every_path("Paths on the SPI and admin ports", admin::router(&proxy, proxy.spi()))
            .await;
        page.tells_of_every_path("Paths on the metrics port", proxy.scrapes()).await;
        page.tells_of_every_path("Paths on the debug port", proxy.insides()).await;
    }
}
