//! Reads accelerator memory use from Prometheus, which scrapes DCGM's exporter.
//!
//! One query covers all accelerators. It runs on demand, at most once per scrape interval, and callers in between get
//! the last answer. A sample is tens of seconds old, so [`trusted_usage`] decides whether to trust it.

mod freshness;
mod query;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use anyhow::Context as _;
use http::Request;
use http_body_util::{BodyExt as _, LengthLimitError, Limited};
use kube::{Client, client::Body};
use rouse::{
    model::AcceleratorId,
    units::{Bytes, Millis, Tick},
};
use rouse_config::PrometheusConfig;
use rouse_net::lease::TickClock;
use tokio::{
    sync::Mutex,
    time::{self, Instant},
};

pub use self::{
    freshness::{UntrustedSample, trusted_usage},
    query::{DcgmSamples, MemorySample, QueryError},
};
use crate::metrics::{MeterReadMetrics, MeterSource};

/// Two series of about six hundred bytes for each of ten thousand accelerators.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// Why a query failed, worded for the gateway's operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("cannot reach Prometheus at {url}: {why}; check kubernetes.prometheus.url")]
    Unreachable { url: String, why: String },
    #[error("Prometheus at {url} did not answer within {within} (kubernetes.prometheus.timeout)")]
    Timeout { url: String, within: Millis },
    #[error(
        "Prometheus at {url} rejected the query with status {status}; check kubernetes.prometheus.tokenFile"
    )]
    Forbidden { url: String, status: u16 },
    #[error(
        "the server at {url} is not Prometheus (status {status}, {why}); set kubernetes.prometheus.url to the part of the URL before /api/v1"
    )]
    NotPrometheus { url: String, status: u16, why: String },
    #[error("Prometheus at {url} refused the query: {why}")]
    Query { url: String, why: String },
    #[error(
        "Prometheus at {url} has no series {} or {} with a UUID; check that dcgm-exporter runs on the nodes and is scraped",
        query::USED_MIB_METRIC,
        query::USED_BYTES_METRIC
    )]
    NoSeries { url: String },
    #[error("the response of Prometheus at {url} is larger than {}", Bytes(MAX_RESPONSE_BYTES as u64))]
    Large { url: String },
}

/// Why the memory use of an accelerator is unknown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UsageUnknown {
    #[error(transparent)]
    Query(#[from] Error),
    #[error("Prometheus has no sample of {0}")]
    NoSample(AcceleratorId),
    #[error(transparent)]
    Untrusted(#[from] UntrustedSample),
}

/// Queries one Prometheus server.
pub struct DcgmClient {
    client: Client,
    settings: PrometheusConfig,
    clock: TickClock,
    readings: MeterReadMetrics,
    /// The last answer and when it was requested. Locked during a query, so that concurrent callers share one.
    last: Mutex<Option<(Instant, SamplesResult)>>,
}

type SamplesResult = Result<Arc<DcgmSamples>, Error>;

impl DcgmClient {
    /// # Errors
    /// A file that the settings name is unusable.
    pub fn new(
        settings: PrometheusConfig,
        clock: TickClock,
        readings: MeterReadMetrics,
    ) -> anyhow::Result<Self> {
        let mut config = kube::Config::new(settings.url.clone());
        config.root_cert_file.clone_from(&settings.ca_file);
        config.default_retry = false;
        config.auth_info.token_file = settings.token_file.as_ref().map(|file| file.display().to_string());
        let client =
            Client::try_from(config).context("cannot set up the client for kubernetes.prometheus")?;
        Ok(Self { client, settings, clock, readings, last: Mutex::default() })
    }

    /// Returns the minimum interval between queries.
    #[must_use]
    pub fn interval(&self) -> Duration {
        self.settings.interval.duration()
    }

    /// Returns the memory in use on this accelerator, if the sample can be trusted.
    ///
    /// `last_sleep`: when an engine last fell asleep there; `settle`: the pool's meter lag.
    ///
    /// # Errors
    /// The query failed, or it has no sample of this accelerator, or the sample is too old or too early.
    pub async fn used(
        &self,
        accelerator: &AcceleratorId,
        last_sleep: Option<Tick>,
        settle: Millis,
    ) -> Result<Bytes, UsageUnknown> {
        let samples = self.samples().await?;
        let sample =
            samples.used.get(accelerator).ok_or_else(|| UsageUnknown::NoSample(accelerator.clone()))?;
        Ok(trusted_usage(sample, last_sleep, settle, self.clock.now())?)
    }

    /// Returns all samples: the last answer while it is younger than the interval, else a new one.
    ///
    /// # Errors
    /// The query failed.
    pub async fn samples(&self) -> SamplesResult {
        let mut last = self.last.lock().await;
        if let Some((asked_at, answer)) = &*last
            && asked_at.elapsed() < self.interval()
        {
            return answer.clone();
        }
        let asked_at = Instant::now();
        let answer = self.ask().await.map(Arc::new);
        match &answer {
            Ok(samples) => {
                let newest = samples.used.values().map(|sample| sample.at).max();
                self.readings.read_succeeded(MeterSource::Prometheus, newest.unwrap_or_default());
            }
            Err(error) => {
                self.readings.read_failed(MeterSource::Prometheus);
                let is_logged = matches!(&*last, Some((_, Err(before))) if before == error);
                if !is_logged {
                    tracing::warn!(%error, "cannot read accelerator memory from Prometheus");
                }
            }
        }
        *last = Some((asked_at, answer.clone()));
        answer
    }

    async fn ask(&self) -> Result<DcgmSamples, Error> {
        let now = self.clock.now();
        let within = self.settings.timeout;
        let response = time::timeout(within.duration(), self.exchange()).await;
        let (status, body) = response.map_err(|_| Error::Timeout { url: self.url(), within })??;
        let url = self.url();
        if matches!(status, 401 | 403) {
            return Err(Error::Forbidden { url, status });
        }
        let samples = query::parse(&body, now).map_err(|foreign| match foreign {
            QueryError::Refused(why) => Error::Query { url: url.clone(), why },
            QueryError::NotPrometheus(why) => Error::NotPrometheus { url: url.clone(), status, why },
        })?;
        if samples.used.is_empty() { Err(Error::NoSeries { url }) } else { Ok(samples) }
    }

    async fn exchange(&self) -> Result<(u16, bytes::Bytes), Error> {
        let unreachable = |why: String| Error::Unreachable { url: self.url(), why };
        let request = Request::get(query::PATH.as_str()).body(Body::empty());
        let request = request.map_err(|error| unreachable(error.to_string()))?;
        let response = self.client.send(request).await.map_err(|error| unreachable(cause(&error)))?;
        let status = response.status().as_u16();
        match Limited::new(response.into_body(), MAX_RESPONSE_BYTES).collect().await {
            Ok(body) => Ok((status, body.to_bytes())),
            Err(error) if error.is::<LengthLimitError>() => Err(Error::Large { url: self.url() }),
            Err(error) => Err(unreachable(error.to_string())),
        }
    }

    fn url(&self) -> String {
        self.settings.url.to_string().trim_end_matches('/').to_owned()
    }
}

/// Returns the innermost cause of the error, which an operator can act on.
fn cause(error: &kube::Error) -> String {
    let mut cause: &dyn std::error::Error = error;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    cause.to_string()
}
