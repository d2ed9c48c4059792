//! Reads the metrics of awake engines, through the stubs beside them.

use std::{net::SocketAddr, time::Duration};

use futures_util::{StreamExt as _, stream};
use rouse::{model::EngineId, units::Generation};
use rouse_config::EngineConfig;
use rouse_net::{engine_load::LoadAnswer, http_client::HttpClient};
use rouse_platform::EngineReading;
use tokio::time;

/// Engines that are read at once. An answer takes some milliseconds, so these suffice for thousands in a few seconds.
const MAX_CONCURRENT_READS: usize = 64;
/// Timeout of one read. An engine under full load answers late, and must not hold up the others for long.
const READ_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of a reading of all engines. Otherwise hundreds of engines that do not answer, such as those of a lost zone,
/// would hold up the decisions about all models.
const READING_TIMEOUT: Duration = Duration::from_secs(5);

/// An awake engine and where its stub relays.
#[derive(Debug)]
pub(crate) struct EngineAddress {
    pub engine: EngineId,
    pub generation: Generation,
    client: HttpClient,
}

impl EngineAddress {
    pub(crate) fn new(
        engine: EngineId,
        generation: Generation,
        address: SocketAddr,
        config: &EngineConfig,
    ) -> Self {
        let client = HttpClient::new(address, config.profile().api_key);
        Self { engine, generation, client: client.with_origin(config.backend_origin.clone()) }
    }

    async fn read(self) -> EngineReading {
        let Self { engine, generation, client } = self;
        let reply = client.get("/metrics", READ_TIMEOUT).await;
        let load = match reply {
            Ok(reply) if reply.status == 200 => LoadAnswer::from_page(&reply.body).load(),
            Ok(reply) => {
                tracing::debug!(%engine, status = reply.status, "the engine returned no metrics");
                None
            }
            Err(error) => {
                tracing::debug!(%engine, %error, "the engine's metrics could not be read");
                None
            }
        };
        EngineReading { engine, generation, load }
    }
}

/// Reads these engines in their order, as many as answer within a few seconds.
///
/// An engine that is left out was not read, and keeps its earlier readings.
pub(crate) async fn read_engines(engines: Vec<EngineAddress>) -> Vec<EngineReading> {
    let reads = stream::iter(engines).map(EngineAddress::read).buffer_unordered(MAX_CONCURRENT_READS);
    reads.take_until(time::sleep(READING_TIMEOUT)).collect().await
}
