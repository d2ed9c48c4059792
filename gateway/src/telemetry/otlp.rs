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

use super::{Error, Record};
use crate::{
    config::{self, collector_fault},
    metrics::Lost,
};

mod client;
mod spans;

/// Requests that may wait to be exported.
const QUEUE: usize = 2048;
/// In one export: about 300 KiB.
const BATCH: usize = 256;
/// A request is exported no later than so long after its end.
const DELAY: Duration = Duration::from_secs(1);
/// Of one export, all of it.
const EXPORT: Duration = Duration::from_secs(10);
/// A batch that cannot be delivered is tried again after so long, and then dropped. The end cuts them short.
const PAUSES: [Duration; 2] = [Duration::from_secs(1), Duration::from_secs(3)];
const CLOSE: Duration = Duration::from_secs(2);

/// What the environment may say instead of `telemetry.otlp`.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];

/// What it may say of how to speak to it.
const PROTOCOLS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"];

pub(super) struct Traces {
    queue: mpsc::Sender<Message>,
    /// The task sleeps between two exports, since a wake for each request would cost the request's core more than all
    /// the rest. This ends its sleep.
    hurry: Arc<Notify>,
    closing: watch::Sender<bool>,
    lost: Lost,
}

enum Message {
    Request(Arc<Record>),
    Close(oneshot::Sender<()>),
}

struct Export {
    exporter: SpanExporter,
    client: client::Client,
    hurry: Arc<Notify>,
    closing: watch::Receiver<bool>,
    lost: Lost,
    /// The last export failed.
    broken: bool,
}

impl Traces {
    /// `None` when neither the configuration nor the environment names a collector, or the environment forbids it. What
    /// the environment says wrongly costs the traces only: it may be meant for whatever else runs here.
    pub(super) fn start(config: &config::Telemetry, lost: &Lost) -> Result<Option<Self>, Error> {
        let forbidden = set("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
            || set("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
        if forbidden {
            return Ok(None);
        }
        let found = ENDPOINTS.iter().find_map(|name| set(name).map(|value| (name, value)));
        match (&config.otlp, found) {
            (None, None) => return Ok(None),
            (Some(_), _) => {}
            (None, Some((name, value))) => {
                // Not the value: it may hold what must not be shown.
                if let Some(fault) = collector_fault(&value) {
                    tracing::warn!("{name} {fault}; there are no traces");
                    return Ok(None);
                }
            }
        }
        if let Some((name, _)) = PROTOCOLS.iter().find_map(|name| {
            set(name).map(|value| (name, value)).filter(|(_, value)| value.eq_ignore_ascii_case("grpc"))
        }) {
            tracing::warn!("{name} asks for gRPC, which is not spoken: traces go by HTTP (protobuf)");
        }
        match Export::new(config, lost) {
            Ok(export) => Ok(Some(Self::of(export, lost))),
            Err(error) if config.otlp.is_some() => Err(Error::Traces(error)),
            Err(error) => {
                tracing::warn!("telemetry: {error}; there are no traces");
                Ok(None)
            }
        }
    }

    fn of((export, closing): (Export, watch::Sender<bool>), lost: &Lost) -> Self {
        let (queue, records) = mpsc::channel(QUEUE);
        let hurry = Arc::clone(&export.hurry);
        tokio::spawn(export.run(records));
        Self { queue, hurry, closing, lost: lost.clone() }
    }

    /// Never waits.
    pub(super) fn tell(&self, record: Arc<Record>) {
        if self.queue.try_send(Message::Request(record)).is_err() {
            self.lost.traces_full.inc();
        }
        if self.queue.capacity() < QUEUE / 2 {
            self.hurry.notify_one();
        }
    }

    pub(super) async fn close(&self) {
        let closed = async {
            let (tell, told) = oneshot::channel();
            self.closing.send_replace(true);
            if self.queue.send(Message::Close(tell)).await.is_ok() {
                self.hurry.notify_one();
                // The task is gone when this fails: then there is nothing to wait for.
                told.await.unwrap_or_default();
            }
        };
        if timeout(CLOSE, closed).await.is_err() {
            tracing::warn!("the last traces could not be exported in time");
        }
    }
}

/// A variable that is there and not empty.
fn set(name: &str) -> Option<String> {
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

impl Export {
    fn new(config: &config::Telemetry, lost: &Lost) -> Result<(Self, watch::Sender<bool>), String> {
        let client = client::Client::new().map_err(|error| error.to_string())?;
        let mut builder = SpanExporter::builder()
            .with_http()
            .with_http_client(client.clone())
            .with_protocol(Protocol::HttpBinary)
            .with_timeout(EXPORT)
            .with_headers(config.headers.clone().into_iter().collect())
            // It would sleep on the control runtime's thread.
            .with_retry_policy(RetryPolicy::disabled());
        if let Some(otlp) = &config.otlp {
            builder = builder.with_endpoint(otlp.clone());
        }
        let mut exporter = builder.build().map_err(|error| error.to_string())?;
        exporter.set_resource(&resource(set("OTEL_SERVICE_NAME").is_some()));
        let (end, closing) = watch::channel(false);
        let (hurry, lost) = (Arc::default(), lost.clone());
        Ok((Self { exporter, client, hurry, closing, lost, broken: false }, end))
    }

    async fn run(mut self, mut records: mpsc::Receiver<Message>) {
        let mut close = None;
        while close.is_none() {
            let Some(first) = records.recv().await else { return };
            if matches!(first, Message::Request(_)) {
                // Asked to hurry, or not: both are fine.
                timeout(DELAY, self.hurry.notified()).await.unwrap_or_default();
            }
            let mut batch = Vec::new();
            let mut next = Some(first);
            while let Some(message) = next {
                match message {
                    Message::Request(record) => batch.push(record),
                    Message::Close(tell) => {
                        close = Some(tell);
                        break;
                    }
                }
                if batch.len() == BATCH {
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

    async fn deliver(&mut self, batch: &[Arc<Record>]) {
        if batch.is_empty() {
            return;
        }
        let spans: Vec<SpanData> = batch.iter().flat_map(|record| spans::of(record)).collect();
        let mut pauses = PAUSES.iter();
        loop {
            // When the end comes in a pause, this is the last attempt.
            let last = *self.closing.borrow();
            let exported = timeout(EXPORT, self.exporter.export(spans.clone())).await;
            let error = match exported {
                Ok(Ok(())) => break,
                Ok(Err(_)) => self.client.failure(),
                Err(_) => format!("no answer within {} s", EXPORT.as_secs()),
            };
            if !std::mem::replace(&mut self.broken, true) {
                tracing::warn!(error, "traces cannot be exported; those that do not fit are dropped");
            }
            let Some(pause) = pauses.next().filter(|_| !last) else {
                self.lost.traces_failed.inc_by(batch.len() as u64);
                return;
            };
            // Over or cut short: both are followed by another attempt.
            drop(timeout(*pause, self.closing.wait_for(|closing| *closing)).await);
        }
        if std::mem::replace(&mut self.broken, false) {
            tracing::info!("traces are exported again");
        }
    }
}
