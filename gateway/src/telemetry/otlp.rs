//! Traces: records become spans and go to a collector in batches.
//!
//! Half of OpenTelemetry's SDK is used: its exporter (the encoding, the standard variables, what a collector may answer)
//! and its resource. Its tracer and its batch processor are not. A tracer makes spans while things happen, and ours
//! are made afterwards; the processor drops what does not fit without telling how much, and blocks a thread of its own
//! per gateway. A bounded queue and a task on the control runtime are less, and count. The encoding alone
//! (`opentelemetry-proto`) would be less still, but then the variables that operators know would be ours to read.

use std::{sync::Arc, time::Duration};

use opentelemetry_otlp::{Protocol, RetryPolicy, SpanExporter, WithExportConfig as _, WithHttpConfig as _};
use opentelemetry_sdk::{
    Resource,
    trace::{SpanData, SpanExporter as _},
};
use tokio::{
    sync::{Notify, mpsc, oneshot, watch},
    time::timeout,
};

use super::{Error, RequestRecord};
use crate::{
    config::{self, invalid_collector_reason},
    metrics::TelemetryDropCounters,
};

mod http_client;
mod spans;

/// Requests that may wait to be exported.
const QUEUE_CAPACITY: usize = 2048;
/// In one export: about 300 KiB.
const MAX_BATCH_REQUESTS: usize = 256;
/// A request is exported no later than so long after its end.
const MAX_EXPORT_DELAY: Duration = Duration::from_secs(1);
/// Of one export, all of it.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// A batch that cannot be delivered is tried again after so long, and then dropped. The end cuts them short.
const RETRY_DELAYS: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3)];
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// What the environment may say instead of `telemetry.otlp`.
const ENDPOINT_VARS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// What it may say of how to speak to it.
const PROTOCOL_VARS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];

pub(super) struct TraceExporter {
    queue: mpsc::Sender<ExportMessage>,
    /// The task sleeps between two exports, since a wake for each request would cost the request's core more than all
    /// the rest. This ends its sleep.
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
    /// `None` when neither the configuration nor the environment names a collector, or the environment forbids it. What
    /// the environment says wrongly costs the traces only: it may be meant for whatever else runs here.
    pub(super) fn start(
        config: &config::TelemetryConfig,
        lost: &TelemetryDropCounters,
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
                // Not the value: it may hold what must not be shown.
                if let Some(fault) = invalid_collector_reason(&value) {
                    tracing::warn!("{name} {fault}; there are no traces");
                    return Ok(None);
                }
            }
        }
        if let Some((name, _)) = PROTOCOL_VARS.iter().find_map(|name| {
            env_var(name).map(|value| (name, value)).filter(|(_, value)| value.eq_ignore_ascii_case("grpc"))
        }) {
            tracing::warn!("{name} asks for gRPC, which is not spoken: traces go by HTTP (protobuf)");
        }
        match ExportTask::new(config, lost) {
            Ok(export) => Ok(Some(Self::spawn(export, lost))),
            Err(error) if config.otlp.is_some() => Err(Error::Traces(error)),
            Err(error) => {
                tracing::warn!("telemetry: {error}; there are no traces");
                Ok(None)
            }
        }
    }

    fn spawn((export, closing): (ExportTask, watch::Sender<bool>), lost: &TelemetryDropCounters) -> Self {
        let (queue, records) = mpsc::channel(QUEUE_CAPACITY);
        let hurry = Arc::clone(&export.flush);
        tokio::spawn(export.run(records));
        Self { queue, flush: hurry, closing, drop_counters: lost.clone() }
    }

    /// Never waits.
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
            let (tell, told) = oneshot::channel();
            self.closing.send_replace(true);
            if self.queue.send(ExportMessage::Close(tell)).await.is_ok() {
                self.flush.notify_one();
                // The task is gone when this fails: then there is nothing to wait for.
                told.await.unwrap_or_default();
            }
        };
        if timeout(CLOSE_TIMEOUT, closed).await.is_err() {
            tracing::warn!("the last traces could not be exported in time");
        }
    }
}

/// A variable that is there and not empty.
fn env_var(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

/// Who exports. A name in the environment goes first, then one in `OTEL_RESOURCE_ATTRIBUTES`.
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
        config: &config::TelemetryConfig,
        lost: &TelemetryDropCounters,
    ) -> Result<(Self, watch::Sender<bool>), String> {
        let client = http_client::OtlpHttpClient::new().map_err(|error| error.to_string())?;
        let mut builder = SpanExporter::builder()
            .with_http()
            .with_http_client(client.clone())
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(EXPORT_TIMEOUT)
            .with_headers(config.headers.clone().into_iter().collect())
            // It would sleep on the control runtime's thread.
            .with_retry_policy(RetryPolicy::disabled());
        if let Some(otlp) = &config.otlp {
            builder = builder.with_endpoint(otlp.clone());
        }
        let mut exporter = builder.build().map_err(|error| error.to_string())?;
        exporter.set_resource(&resource(env_var("OTEL_SERVICE_NAME").is_some()));
        let (end, closing) = watch::channel(false);
        let (hurry, lost) = (Arc::default(), lost.clone());
        Ok((Self { exporter, client, flush: hurry, closing, drop_counters: lost, failing: false }, end))
    }

    async fn run(mut self, mut records: mpsc::Receiver<ExportMessage>) {
        let mut close = None;
        while close.is_none() {
            let Some(first) = records.recv().await else { return };
            if matches!(first, ExportMessage::Request(_)) {
                // Asked to hurry, or not: both are fine.
                timeout(MAX_EXPORT_DELAY, self.flush.notified()).await.unwrap_or_default();
            }
            let mut batch = Vec::new();
            let mut next = Some(first);
            while let Some(message) = next {
                match message {
                    ExportMessage::Request(record) => batch.push(record),
                    ExportMessage::Close(tell) => {
                        close = Some(tell);
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
        if let Some(tell) = close {
            // Whoever asked may have given up.
            tell.send(()).unwrap_or_default();
        }
    }

    async fn deliver(&mut self, batch: &[Arc<RequestRecord>]) {
        if batch.is_empty() {
            return;
        }
        let spans: Vec<SpanData> = batch.iter().flat_map(|record| spans::request_spans(record)).collect();
        let mut pauses = RETRY_DELAYS.iter();
        loop {
            // When the end comes in a pause, this is the last attempt.
            let last = *self.closing.borrow();
            let exported = timeout(EXPORT_TIMEOUT, self.exporter.export(spans.clone())).await;
            let error = match exported {
                Ok(Ok(())) => break,
                Ok(Err(_)) => self.client.last_failure(),
                Err(_) => format!("no answer within {} s", EXPORT_TIMEOUT.as_secs()),
            };
            if !std::mem::replace(&mut self.failing, true) {
                tracing::warn!(error, "traces cannot be exported; those that do not fit are dropped");
            }
            let Some(pause) = pauses.next().filter(|_| !last) else {
                self.drop_counters.traces_failed.inc_by(batch.len() as u64);
                return;
            };
            // Over or cut short: both are followed by another attempt.
            drop(timeout(*pause, self.closing.wait_for(|closing| *closing)).await);
        }
        if std::mem::replace(&mut self.failing, false) {
            tracing::info!("traces are exported again");
        }
    }
}
