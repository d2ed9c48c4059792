//! Reads the metrics of awake engines, through the stubs beside them.

use std::{net::SocketAddr, time::Duration};

use futures_util::{StreamExt as _, stream};
use rouse::{model::EngineId, units::Generation};
use rouse_config::EngineConfig;
use rouse_net::{
    engine_load::{EngineTokens, LoadAnswer},
    http_client::HttpClient,
};
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
    /// Whether its size and the lengths of its requests are wanted, too.
    reads_tokens: bool,
}

/// What an engine answered.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EngineAnswer {
    pub load: EngineReading,
    /// `None`: it did not answer with metrics, or tokens were not wanted.
    pub tokens: Option<EngineTokens>,
}

impl EngineAddress {
    pub(crate) fn new(
        engine: EngineId,
        generation: Generation,
        address: SocketAddr,
        config: &EngineConfig,
        reads_tokens: bool,
    ) -> Self {
        let client = HttpClient::new(address, config.profile().api_key);
        let client = client.with_origin(config.backend_origin.clone());
        Self { engine, generation, client, reads_tokens }
    }

    async fn read(self) -> EngineAnswer {
        let Self { engine, generation, client, reads_tokens } = self;
        let reply = client.get("/metrics", READ_TIMEOUT).await;
        let mut tokens = None;
        let load = match reply {
            Ok(reply) if reply.status == 200 => {
                tokens = reads_tokens.then(|| EngineTokens::from_page(&reply.body));
                LoadAnswer::from_page(&reply.body).load()
            }
            Ok(reply) => {
                tracing::debug!(%engine, status = reply.status, "the engine returned no metrics");
                None
            }
            Err(error) => {
                tracing::debug!(%engine, %error, "the engine's metrics could not be read");
                None
            }
        };
        EngineAnswer { load: EngineReading { engine, generation, load }, tokens }
    }
}

/// Reads these engines in their order, as many as answer within a few seconds.
///
/// An engine that is left out was not read, and keeps its earlier readings.
pub(crate) async fn read_engines(engines: Vec<EngineAddress>) -> Vec<EngineAnswer> {
    let reads = stream::iter(engines).map(EngineAddress::read).buffer_unordered(MAX_CONCURRENT_READS);
    reads.take_until(time::sleep(READING_TIMEOUT)).collect().await
}
