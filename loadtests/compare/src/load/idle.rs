//! Connections that stay open, each idle after one request.

use anyhow::{Context as _, ensure};
use tokio::time::timeout;

use super::{
    RequestLoad, check_bounds,
    http::LoadConnection,
    raise_descriptor_limit,
    requests::{RESPONSE_GRACE, RequestWorker},
    tally::LoadTally,
};

/// Open connections, which close on drop.
pub(crate) struct IdleConnections(Vec<LoadConnection>);

impl IdleConnections {
    /// Opens the load's connections, and sends one request on each. One connection follows the other, so a proxy needs
    /// only one connection to its engine for all of them.
    ///
    /// Errors: the load is out of bounds or not for this machine, a response is late or not the engine's, or the proxy
    /// closes a connection.
    pub(crate) async fn open(load: &RequestLoad) -> anyhow::Result<Self> {
        check_bounds(load.proxy, load.connections, load.body, load.duration)?;
        raise_descriptor_limit()?;
        let worker = RequestWorker::new(load, &LoadTally::new()?);
        let mut open = Vec::with_capacity(load.connections);
        for nth in 1..=load.connections {
            let mut connection = None;
            let limit = load.engine_time + RESPONSE_GRACE;
            let correct = timeout(limit, worker.exchange(&mut connection))
                .await
                .with_context(|| format!("connection {nth} had no response after {limit:?}"))??;
            ensure!(correct, "the response on connection {nth} is not the engine's");
            open.push(connection.with_context(|| format!("the proxy closed connection {nth}"))?);
        }
        Ok(Self(open))
    }

    pub(crate) fn count(&self) -> usize {
        self.0.len()
    }
}
