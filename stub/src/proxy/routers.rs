//! Builds each port's router, except for the order routes (`admin`) and the relays.

use std::sync::Arc;

use axum::Router;
use http::HeaderMap;
use serde_json::{Value, json};

use super::{
    accelerators, admin, debug, memory,
    metrics::{self, ScrapeSnapshot},
    probes, readiness, set_log,
    state::Proxy,
};

impl Proxy {
    /// The SPI routes that are not orders about the gate, the target or the engine.
    pub(super) fn spi_router(self: &Arc<Self>) -> Router {
        let proxy = Arc::clone(self);
        let fence = Arc::new(move |headers: &HeaderMap| admin::accept_epoch_header(&proxy, headers));
        accelerators::routes(self.accelerators.clone())
            .merge(memory::routes(self.memory.clone()))
            .merge(readiness::routes(Arc::clone(&self.readiness), fence))
            .merge(set_log::routes(self.log.clone()))
    }

    /// The probes port's router.
    pub(super) fn probes_router(self: &Arc<Self>) -> Router {
        let proxy = Arc::clone(self);
        probes::routes(Arc::clone(&self.readiness), Arc::new(move || !proxy.gate.is_open()))
    }

    /// The metrics port's router.
    pub(super) fn metrics_router(self: &Arc<Self>) -> Router {
        let proxy = Arc::clone(self);
        metrics::routes(Arc::clone(&self.metrics), Arc::new(move || proxy.scrape_snapshot()))
    }

    /// The debug port's router.
    pub(super) fn debug_router(self: &Arc<Self>) -> Router {
        let proxy = Arc::clone(self);
        debug::routes(Arc::new(move || proxy.debug_state()))
    }

    fn scrape_snapshot(&self) -> ScrapeSnapshot {
        let gate = self.gate.view();
        let readiness = self.readiness.dump();
        ScrapeSnapshot {
            leases: gate.leases,
            gated: gate.gated,
            epoch: gate.epoch,
            generation: gate.generation,
            ready: readiness.ready,
            readiness_changes: readiness.changes,
            log_bytes: self.log.end(),
        }
    }

    fn debug_state(&self) -> Value {
        let (connections, streams) = self.metrics.open_counts();
        let counts = &self.counts;
        json!({
            "gate": self.gate.view(),
            "target": self.gate.target(),
            // Unknown while another task is binding the port.
            "proxyPort": self.proxy_port_address.try_lock().ok().and_then(|listening| *listening),
            "readiness": self.readiness.dump(),
            "accelerators": self.accelerators.current(),
            "log": self.log.end(),
            "connections": connections,
            "streams": streams,
            "requests": {
                "complete": counts.complete.get(),
                "left": counts.client_left.get(),
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
    use crate::{docs_check::StubDocsSection, proxy::admin};

    #[test]
    fn the_page_tells_of_every_flag() {
        StubDocsSection::load("proxy", "Proxy").assert_flags_documented();
    }

    #[tokio::test]
    async fn the_page_tells_of_every_path() {
        let (page, proxy) = (StubDocsSection::load("proxy", "Proxy"), Proxy::from_flags(&[]));
        page.assert_paths_documented("Paths on the probes port", proxy.probes_router()).await;
        page.assert_paths_documented(
            "Paths on the SPI and admin ports",
            admin::router(&proxy, proxy.spi_router()),
        )
        .await;
        page.assert_paths_documented("Paths on the metrics port", proxy.metrics_router()).await;
        page.assert_paths_documented("Paths on the debug port", proxy.debug_router()).await;
    }
}
