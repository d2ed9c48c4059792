//! Reads accelerator memory use from Prometheus, which scrapes DCGM's exporter.
//!
//! One query covers all accelerators. It runs on demand, at most once per scrape interval, and callers in between get
//! the last answer. A sample is tens of seconds old, so [`trusted_usage`] decides whether to trust it.

mod freshness;
mod query;
#[cfg(test)]
mod tests;

use std::{sync::Arc, time::Duration};

use rouse::{
    model::AcceleratorId,
    units::{Bytes, Millis, Tick},
};
use rouse_config::PrometheusConfig;
use rouse_net::lease::TickClock;
use tokio::{sync::Mutex, time::Instant};

pub use self::{
    freshness::{UntrustedSample, trusted_usage},
    query::{DcgmSamples, MemorySample},
};
use crate::{
    metrics::{MeterReadMetrics, MeterSource},
    prometheus_api::{PrometheusClient, PrometheusError},
};

/// Why there are no samples, worded for the gateway's operator.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Prometheus(#[from] PrometheusError),
    #[error(
        "Prometheus at {url} has no series {} or {} with a UUID; check that dcgm-exporter runs on the nodes and is scraped",
        query::USED_MIB_METRIC,
        query::USED_BYTES_METRIC
    )]
    NoSeries { url: String },
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
    prometheus: PrometheusClient,
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
        let prometheus = PrometheusClient::new(settings)?;
        Ok(Self { prometheus, clock, readings, last: Mutex::default() })
    }

    /// Returns the minimum interval between queries.
    #[must_use]
    pub fn interval(&self) -> Duration {
        self.prometheus.interval().duration()
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
        let series = self.prometheus.query(query::QUERY.as_str()).await?;
        let samples = query::samples(series, now);
        if samples.used.is_empty() {
            Err(Error::NoSeries { url: self.prometheus.url() })
        } else {
            Ok(samples)
        }
    }
}
