//! What is known of one request, for the access log and the metrics, and the certainty that it is told exactly once.
//!
//! A request ends in many places: in a handler, at the last byte of a body, or nowhere, because its client left and
//! every future that served it was dropped. So the account is kept in one shared value which speaks when the last part
//! that holds it is gone; one that was never finished is a client that left.

use std::{
    cell::{Cell, OnceCell, RefCell},
    rc::Rc,
    sync::Arc,
};

use http::{HeaderMap, HeaderValue};
use rouse::{
    fault::{DisconnectPhase, Fault},
    model::{EngineId, ModelName},
    units::{Millis, Tick},
};
use rouse_net::{
    lease::TickClock,
    openai::{self, sse::TokenUsage},
};
use tokio::time::Instant;
use tracing::Level;

use crate::{
    driver::{ColdStart, WaitBreakdown},
    metrics::{KeyMetrics, ModelMetrics},
    telemetry::{RequestOutcome, RequestRecorder, TRACEPARENT, TRACESTATE},
};

/// The code of a request whose client was cut because it took nothing.
const CLIENT_STALLED: &str = "client_stalled";

/// Where requests are counted.
pub trait RequestMetricsSink: Send + Sync {
    /// A request is over; called once for each.
    fn request_finished(&self, finished: &FinishedRequest<'_>);
    /// A request turned out to be for this model. Where it is counted comes back, and is kept by the request: under the
    /// same name another model may be configured when it ends.
    fn model_resolved(&self, model: &ModelName) -> Option<Arc<ModelMetrics>>;
    /// Where requests of this key are counted.
    fn key_metrics(&self, name: &str) -> Option<Arc<KeyMetrics>> {
        let _ = name;
        None
    }
    /// A client was refused before there was a request: a broken, too large or too slow head.
    fn connection_rejected(&self, status: u16);
    /// One client connection more (`+1`) or less (`-1`) is open.
    fn add_connections(&self, change: i64);
    /// A connection goes to another core than the one that accepted it.
    fn connection_moved(&self) {}
}

/// Counts nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoopMetricsSink;

/// One request, when it is over.
pub struct FinishedRequest<'a> {
    pub route: &'static str,
    /// What [`RequestMetricsSink::model_resolved`] gave, once the request named a configured model.
    pub model: Option<&'a ModelMetrics>,
    /// What the client saw; 499 when it left by itself.
    pub status: u16,
    /// The fault's code, for what the gateway refused or broke off.
    pub code: Option<&'static str>,
    /// Where the client was when it left.
    pub left_in_phase: Option<DisconnectPhase>,
    pub cold_start: Option<ColdStart>,
    /// All of its waiting, however that ended; `None` when it did not wait.
    pub parked_for: Option<Millis>,
    /// What the gateway itself added to a request that did not wait, in microseconds: from the last byte of its body
    /// until it goes to the engine.
    pub added_micros: Option<u64>,
    /// From arrival to the response's head.
    pub first_byte: Option<Millis>,
    pub duration: Millis,
    /// How often it was given to another engine, or to the same one again.
    pub retries: u32,
    /// Of the request's body, and of the response's.
    pub bytes_in: u64,
    pub bytes_out: u64,
}

pub(crate) struct RequestContext {
    metrics_sink: Arc<dyn RequestMetricsSink>,
    clock: TickClock,
    pub(crate) id: HeaderValue,
    pub(crate) route: &'static str,
    pub(crate) arrived: Tick,
    model: RefCell<Option<ModelName>>,
    model_metrics: OnceCell<Arc<ModelMetrics>>,
    key_name: OnceCell<Arc<str>>,
    phase: Cell<DisconnectPhase>,
    status: Cell<Option<u16>>,
    code: Cell<Option<&'static str>>,
    wait: Cell<Option<WaitBreakdown>>,
    parked_for: Cell<Option<Millis>>,
    first_byte: Cell<Option<Millis>>,
    body_received_at: Cell<Option<Instant>>,
    forwarded_at_once: Cell<bool>,
    added_micros: Cell<Option<u64>>,
    retries: Cell<u32>,
    bytes_in: Cell<u64>,
    bytes_out: Cell<u64>,
    /// The client was found to have left while its body was read.
    client_left: Cell<bool>,
    is_complete: Cell<bool>,
    /// When it was over, where somebody had looked at the clock just then.
    ended_at: Cell<Option<Instant>>,
    /// There when somebody wants to hear of single requests.
    recorder: OnceCell<Box<RefCell<RequestRecorder>>>,
}

impl RequestContext {
    pub(crate) fn new(
        meter: &Arc<dyn RequestMetricsSink>,
        clock: TickClock,
        arrived: Instant,
        id: HeaderValue,
        route: &'static str,
    ) -> Rc<Self> {
        Rc::new(Self {
            metrics_sink: Arc::clone(meter),
            clock,
            id,
            route,
            arrived: clock.tick_at(arrived),
            model: RefCell::default(),
            model_metrics: OnceCell::new(),
            key_name: OnceCell::new(),
            phase: Cell::new(DisconnectPhase::Connecting),
            status: Cell::new(None),
            code: Cell::new(None),
            wait: Cell::new(None),
            parked_for: Cell::new(None),
            first_byte: Cell::new(None),
            body_received_at: Cell::new(None),
            forwarded_at_once: Cell::new(false),
            added_micros: Cell::new(None),
            retries: Cell::new(0),
            bytes_in: Cell::new(0),
            bytes_out: Cell::new(0),
            client_left: Cell::new(false),
            is_complete: Cell::new(false),
            ended_at: Cell::new(None),
            recorder: OnceCell::new(),
        })
    }

    pub(crate) fn set_recorder(&self, notes: Option<RequestRecorder>) {
        if let Some(notes) = notes {
            self.recorder.get_or_init(|| Box::new(RefCell::new(notes)));
        }
    }

    /// Somebody wants to hear of it: what the engine counted included.
    pub(crate) fn is_recorded(&self) -> bool {
        self.recorder.get().is_some()
    }

    fn with_recorder(&self, note: impl FnOnce(&mut RequestRecorder)) {
        if let Some(notes) = self.recorder.get() {
            note(&mut notes.borrow_mut());
        }
    }

    /// Tells the engine whose child its own span is. Where nothing is traced, what the client said passes.
    pub(crate) fn set_trace_headers(&self, headers: &mut HeaderMap) {
        self.with_recorder(|notes| {
            if let Some(own) = notes.traceparent() {
                headers.insert(TRACEPARENT, own);
                if !notes.has_parent() {
                    headers.remove(TRACESTATE);
                }
            }
        });
    }

    pub(crate) fn set_phase(&self, phase: DisconnectPhase) {
        self.phase.set(phase);
        self.with_recorder(|notes| notes.enter_phase(phase));
    }

    /// It goes to this engine.
    pub(crate) fn record_engine(&self, engine: &EngineId) {
        self.with_recorder(|notes| notes.set_engine(engine));
    }

    /// What the engine counted, so far.
    pub(crate) fn record_usage(&self, usage: TokenUsage) {
        self.with_recorder(|notes| notes.set_usage(usage));
    }

    /// An attempt failed, which its client may never see.
    pub(crate) fn record_failed_attempt(&self, code: &'static str) {
        self.with_recorder(|notes| notes.fail_phase(code));
    }

    pub(crate) fn set_model(&self, model: &ModelName) {
        if let Some(metrics) = self.metrics_sink.model_resolved(model) {
            self.model_metrics.get_or_init(|| metrics);
        }
        *self.model.borrow_mut() = Some(model.clone());
    }

    /// `None` until it is known.
    pub(crate) fn model_name(&self) -> Option<ModelName> {
        self.model.borrow().clone()
    }

    /// Whose request it is, by the key's name.
    pub(crate) fn set_key(&self, name: &Arc<str>) {
        self.key_name.get_or_init(|| Arc::clone(name));
    }

    /// The request's body is here. Gives the moment, for whatever else is to happen at it.
    pub(crate) fn body_received(&self, bytes: usize) -> Tick {
        let now = Instant::now();
        self.bytes_in.set(bytes as u64);
        self.body_received_at.set(Some(now));
        self.with_recorder(RequestRecorder::body_received);
        self.clock.tick_at(now)
    }

    /// It will go to an engine without having waited.
    pub(crate) fn set_forwarded_at_once(&self) {
        self.forwarded_at_once.set(true);
    }

    /// It goes to an engine.
    pub(crate) fn forwarded(&self, now: Instant) {
        // The first time only: what comes after is no work of the gateway's.
        if self.forwarded_at_once.take() {
            let added = self.body_received_at.get().map(|at| now.duration_since(at).as_micros());
            self.added_micros.set(added.and_then(|micros| u64::try_from(micros).ok()));
        }
    }

    pub(crate) fn add_bytes_out(&self, bytes: usize) {
        self.bytes_out.set(self.bytes_out.get() + bytes as u64);
    }

    pub(crate) fn set_wait(&self, waited: WaitBreakdown) {
        self.wait.set(Some(waited));
    }

    pub(crate) fn wait(&self) -> Option<WaitBreakdown> {
        self.wait.get()
    }

    pub(crate) fn retried(&self) {
        self.retries.set(self.retries.get() + 1);
    }

    pub(crate) fn record_fault(&self, fault: &Fault) {
        if let Fault::ClientDisconnected { phase } = fault {
            self.phase.set(*phase);
            self.client_left.set(true);
            return;
        }
        log_fault(fault, &self.id);
        self.code.set(Some(openai::error::code(fault)));
        self.record_failed_attempt(openai::error::code(fault));
    }

    /// What went wrong is not a fault of ours: it has this code.
    pub(crate) fn set_code(&self, code: &'static str) {
        self.code.set(Some(code));
    }

    /// So many of the model's engines are left out now; `more`: this request was the reason for one of them.
    pub(crate) fn set_ejected(&self, engines: usize, more: bool) {
        if let Some(metrics) = self.model_metrics.get() {
            metrics.set_ejected(engines);
            if more {
                metrics.ejected();
            }
        }
    }

    /// The response's head is handed to the client's connection.
    pub(crate) fn head_sent(&self, status: u16, now: Tick) {
        self.status.set(Some(status));
        self.first_byte.set(Some(now.since(self.arrived)));
        self.with_recorder(RequestRecorder::head_sent);
    }

    /// The response is complete: what comes after is no client that left.
    pub(crate) fn set_complete(&self) {
        self.is_complete.set(!self.client_left.get());
    }

    /// The same, and nobody will ask any more: it ended at `now`.
    pub(crate) fn set_complete_at(&self, now: Instant) {
        self.set_complete();
        self.ended_at.set(Some(now));
    }

    pub(crate) fn since_arrival(&self) -> Millis {
        self.clock.now().since(self.arrived)
    }

    /// A guard for the time in which the request is parked.
    pub(crate) fn park(self: &Rc<Self>) -> ParkedTimer {
        self.set_phase(DisconnectPhase::Parked);
        if let Some(metrics) = self.model_metrics.get() {
            metrics.add_parked(1);
        }
        ParkedTimer { context: Rc::clone(self), since: self.clock.now() }
    }

    /// The gateway cut the client, which took nothing: it did not leave.
    pub(crate) fn client_stalled(&self) {
        if !self.is_complete.get() {
            self.set_code(CLIENT_STALLED);
            self.set_complete();
        }
    }
}

/// What an operator should know of is logged where it happens; the access log has the rest.
fn log_fault(fault: &Fault, id: &HeaderValue) {
    let (id, code) = (id.to_str().unwrap_or("?"), openai::error::code(fault));
    match openai::error::log_level(fault) {
        Level::ERROR => tracing::error!(id, code, "{fault}"),
        Level::WARN => tracing::warn!(id, code, "{fault}"),
        _ => {}
    }
}

pub(crate) struct ParkedTimer {
    context: Rc<RequestContext>,
    since: Tick,
}

impl Drop for ParkedTimer {
    fn drop(&mut self) {
        let before = self.context.parked_for.get().unwrap_or_default();
        let now = self.context.clock.now().since(self.since);
        self.context.parked_for.set(Some(Millis(before.0 + now.0)));
        if let Some(metrics) = self.context.model_metrics.get() {
            metrics.add_parked(-1);
        }
    }
}

impl Drop for RequestContext {
    fn drop(&mut self) {
        let left = (!self.is_complete.get()).then(|| self.phase.get());
        let waited = self.wait.get();
        let finished = FinishedRequest {
            route: self.route,
            model: self.model_metrics.get().map(AsRef::as_ref),
            status: left.map_or_else(|| self.status.get().unwrap_or(500), |_| 499),
            code: self.code.get(),
            left_in_phase: left,
            cold_start: waited.and_then(|waited| waited.cold_start),
            parked_for: self.parked_for.get(),
            first_byte: self.first_byte.get(),
            duration: self
                .ended_at
                .get()
                .map_or_else(|| self.clock.now(), |at| self.clock.tick_at(at))
                .since(self.arrived),
            added_micros: self.added_micros.get(),
            retries: self.retries.get(),
            bytes_in: self.bytes_in.get(),
            bytes_out: self.bytes_out.get(),
        };
        self.metrics_sink.request_finished(&finished);
        let Some(notes) = self.recorder.take() else { return };
        let ended = RequestOutcome {
            id: Some(self.id.clone()),
            route: self.route,
            model: self.model.take(),
            key: self.key_name.take(),
            status: finished.status,
            code: finished.code,
            left_in_phase: left,
            cold_start: finished.cold_start,
            wait: finished.parked_for,
            retries: finished.retries,
            bytes_in: finished.bytes_in,
            bytes_out: finished.bytes_out,
        };
        notes.into_inner().finish(ended);
    }
}

impl RequestMetricsSink for NoopMetricsSink {
    fn request_finished(&self, _: &FinishedRequest<'_>) {}
    fn model_resolved(&self, _: &ModelName) -> Option<Arc<ModelMetrics>> {
        None
    }
    fn connection_rejected(&self, _: u16) {}
    fn add_connections(&self, _: i64) {}
}
