//! Exports traces: records become spans and go to a collector in batches.
//!
//! This uses OpenTelemetry's exporter (the encoding, the standard variables, the collector's possible responses) and
//! its resource, but not its tracer and batch processor. A tracer creates spans while things happen, and ours are
//! created afterwards. The processor drops spans that do not fit without counting them, and blocks a thread of its own
//! per gateway. A bounded queue and a task on the control runtime are simpler, and count. The encoding alone
//! (`opentelemetry-proto`) would be simpler still, but then this module would have to read the variables that operators
//! know.

use std::{sync::Arc, time::Duration};

use opentelemetry_otlp::{Protocol, RetryPolicy, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::{
    Resource,
    trace::{SpanData, SpanExporter as _},
};
use rouse_config::invalid_collector_reason;
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    time::timeout,
};

use super::{Error, RequestRecord};
use crate::metrics::TelemetryDropCounters;

mod http_client;
mod spans;

/// Maximum number of requests that wait for export.
const QUEUE_CAPACITY: usize = 2048;
/// Requests per export: about 300 KiB.
const MAX_BATCH_REQUESTS: usize = 256;
/// Maximum delay between a request's end and its export.
const MAX_EXPORT_DELAY: Duration = Duration::from_secs(1);
/// Timeout of a whole export.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Pauses before retries of a failed batch, which is then dropped. A shutdown cuts the pauses short.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3)];
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Variables that may set the address instead of `telemetry.otlp`.
const ENDPOINT_VARS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// Variables that may set the protocol.
const PROTOCOL_VARS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];

pub(super) struct TraceExporter {
    queue: mpsc::Sender<ExportMessage>,
    /// Ends the task's sleep between two exports. It sleeps because a wake per request would cost the request's core
    /// more than everything else.
    flush: Arc<Notify>,
    closing: watch::Sender<bool>,
    drop_counters: TelemetryDropCounters,
}

enum ExportMessage {
    Request(Arc<RequestRecord>),
    Close(oneshot::Sender<()>),
}

struct ExportTask {
    exporter: SpanExporter,
    client: http_client::OtlpHttpClient,
    flush: Arc<Notify>,
    closing: watch::Receiver<bool>,
    drop_counters: TelemetryDropCounters,
    /// The last export failed.
    failing: bool,
}

impl TraceExporter {
    /// Starts the exporter.
    ///
    /// Returns `None` if neither the configuration nor the environment names a collector, or the environment disables
    /// traces. Bad values in the environment only disable the traces, since they may be meant for other programs.
    pub(super) fn start(
        config: &rouse_config::TelemetryConfig,
        drop_counters: &TelemetryDropCounters,
    ) -> Result<Option<Self>, Error> {
        let forbidden = env_var("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
            || env_var("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
        if forbidden {
            return Ok(None);
        }
        let found = ENDPOINT_VARS.iter().find_map(|name| env_var(name).map(|value| (name, value)));
        match (&config.otlp, found) {
            (None, None) => return Ok(None),
            (Some(_), _) => {}
            (None, Some((name, value))) => {
                // The message omits the value, which may hold a secret.
                if let Some(fault) = invalid_collector_reason(&value) {
                    tracing::warn!("trace export disabled: {name} {fault}");
                    return Ok(None);
                }
            }
        }
        if let Some((name, _)) = PROTOCOL_VARS.iter().find_map(|name| {
            env_var(name).map(|value| (name, value)).filter(|(_, value)| value.eq_ignore_ascii_case("grpc"))
        }) {
            tracing::warn!(
                "{name} requests gRPC, which is not supported: traces are exported over HTTP (protobuf)"
            );
        }
        match ExportTask::new(config, drop_counters) {
            Ok(export) => Ok(Some(Self::spawn(export, drop_counters))),
            Err(error) if config.otlp.is_some() => Err(Error::Traces(error)),
            Err(error) => {
                tracing::warn!("trace export disabled: {error}");
                Ok(None)
            }
        }
    }

    fn spawn(
        (export, closing): (ExportTask, watch::Sender<bool>),
        drop_counters: &TelemetryDropCounters,
    ) -> Self {
        let (queue, records) = mpsc::channel(QUEUE_CAPACITY);
        let flush = Arc::clone(&export.flush);
        tokio::spawn(export.run(records));
        Self { queue, flush, closing, drop_counters: drop_counters.clone() }
    }

    /// Enqueues a record. Never waits.
    pub(super) fn enqueue(&self, record: Arc<RequestRecord>) {
        if self.queue.try_send(ExportMessage::Request(record)).is_err() {
            self.drop_counters.traces_full.inc();
        }
        if self.queue.capacity() < QUEUE_CAPACITY / 2 {
            self.flush.notify_one();
        }
    }

    pub(super) async fn close(&self) {
        let closed = async {
            let (done_tx, done_rx) = oneshot::channel();
            self.closing.send_replace(true);
            if self.queue.send(ExportMessage::Close(done_tx)).await.is_ok() {
                self.flush.notify_one();
                // On an error the task is gone, and nothing is left to wait for.
                done_rx.await.unwrap_or_default();
            }
        };
        if timeout(CLOSE_TIMEOUT, closed).await.is_err() {
            tracing::warn!("the last traces were not exported in time");
        }
    }
}

/// Returns a variable that is set and not empty.
fn env_var(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Returns this service's resource.
///
/// A name in the environment has precedence, then one in `OTEL_RESOURCE_ATTRIBUTES`.
fn resource(named: bool) -> Resource {
    let found = Resource::builder().build();
    let unknown =
        found.get(&"service.name".into()).is_none_or(|name| name.to_string().starts_with("unknown_service"));
    let version = opentelemetry::KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
    let builder = Resource::builder().with_attribute(version);
    if unknown && !named { builder.with_service_name("rouse-gateway") } else { builder }.build()
}

impl ExportTask {
    fn new(
        config: &rouse_config::TelemetryConfig,
        drop_counters: &TelemetryDropCounters,
    ) -> Result<(Self, watch::Sender<bool>), String> {
        let client = http_client::OtlpHttpClient::new().map_err(|error| error.to_string())?;
        let mut builder = SpanExporter::builder()
            .with_http()
            .with_http_client(client.clone())
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(EXPORT_TIMEOUT)
            .with_headers(config.headers.clone().into_iter().collect())
            // The SDK's retries would sleep on the control runtime's thread.
            .with_retry_policy(RetryPolicy::disabled());
        if let Some(otlp) = &config.otlp {
            builder = builder.with_endpoint(otlp.clone());
        }
        let mut exporter = builder.build().map_err(|error| error.to_string())?;
        exporter.set_resource(&resource(env_var("OTEL_SERVICE_NAME").is_some()));
        let (end, closing) = watch::channel(false);
        let (flush, lost) = (Arc::default(), drop_counters.clone());
        Ok((Self { exporter, client, flush, closing, drop_counters: lost, failing: false }, end))
    }

    async fn run(mut self, mut records: mpsc::Receiver<ExportMessage>) {
        let mut close = None;
        while close.is_none() {
            let Some(first) = records.recv().await else { return };
            if matches!(first, ExportMessage::Request(_)) {
                // An early flush and a timeout are treated alike.
                timeout(MAX_EXPORT_DELAY, self.flush.notified()).await.unwrap_or_default();
            }
            let mut batch = Vec::new();
            let mut next = Some(first);
            while let Some(message) = next {
                match message {
                    ExportMessage::Request(record) => batch.push(record),
                    ExportMessage::Close(done_tx) => {
                        close = Some(done_tx);
                        break;
                    }
                }
                if batch.len() == MAX_BATCH_REQUESTS {
                    self.deliver(&std::mem::take(&mut batch)).await;
                }
                next = records.try_recv().ok();
            }
            self.deliver(&batch).await;
        }
        if let Some(done_tx) = close {
            // The requester may have timed out.
            done_tx.send(()).unwrap_or_default();
        }
    }

    async fn deliver(&mut self, batch: &[Arc<RequestRecord>]) {
        if batch.is_empty() {
            return;
        }
        let spans: Vec<SpanData> = batch.iter().flat_map(|record| spans::request_spans(record)).collect();
        let mut pauses = RETRY_DELAYS.iter();
        loop {
            // If the shutdown begins during a pause, this attempt is the last.
            let last = *self.closing.borrow();
            let error = match self.exporter.export(spans.clone()).await {
                Ok(()) => break,
                Err(_) => self.client.last_failure(),
            };
            if !std::mem::replace(&mut self.failing, true) {
                tracing::warn!(
                    error,
                    "cannot export traces, retrying; traces that do not fit in the queue are dropped"
                );
            }
            let Some(pause) = pauses.next().filter(|_| !last) else {
                self.drop_counters.traces_failed.inc_by(batch.len() as u64);
                return;
            };
            // The pause is over or was cut short; another attempt follows in both cases.
            drop(timeout(*pause, self.closing.wait_for(|closing| *closing)).await);
        }
        if std::mem::replace(&mut self.failing, false) {
            tracing::info!("trace export recovered");
        }
    }
}
