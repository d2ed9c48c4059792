//! Collects the data of one request for logs and metrics, and reports it exactly once.
//!
//! A request ends in many places: in a handler, at the last byte of a body, or at any point where its client
//! disconnects and every future that serves it is dropped. So all its data lives in one shared value, which reports on
//! drop of its last holder. A request that never completed counts as a disconnect.

use std::{
    cell::{Cell, OnceCell, RefCell},
    rc::Rc,
    sync::Arc,
};

use http::{HeaderMap, HeaderValue};
use rouse::{
    fault::{DisconnectPhase, Fault},
    fleet::quote::WaitRange,
    model::{EngineId, ModelName},
    units::{Millis, Tick},
};
use rouse_net::{
    lease::TickClock,
    openai::{self, sse::TokenUsage},
};
use tokio::time::Instant;

use crate::{
    driver::{QuotedWait, WaitBreakdown},
    http::{
        RequestMetricsSink,
        active_requests::{ActiveRequest, ActiveRequestGuard},
    },
    metrics::ModelMetrics,
    serve::RequestPermit,
    telemetry::{RequestRecorder, TRACEPARENT, TRACESTATE},
};

mod parked_timer;
mod report;

use report::log_fault;

/// The code of a request whose client was disconnected because it read nothing.
const CLIENT_STALLED: &str = "client_stalled";

/// What all requests report to and measure with. Shared, because each open stream holds a reference.
pub(crate) struct RequestEnvironment {
    pub(crate) metrics_sink: Arc<dyn RequestMetricsSink>,
    pub(crate) clock: TickClock,
}

pub(crate) struct RequestContext {
    environment: Arc<RequestEnvironment>,
    pub(crate) id: HeaderValue,
    pub(crate) route: &'static str,
    pub(crate) arrived: Tick,
    model: OnceCell<ModelName>,
    model_metrics: OnceCell<Arc<ModelMetrics>>,
    key_name: OnceCell<Arc<str>>,
    phase: Cell<DisconnectPhase>,
    /// When the phase began, as well as it is known without reading the clock for it.
    phase_began: Cell<Tick>,
    /// Tokens of the answer so far.
    tokens: Cell<u64>,
    /// The request's place among those that its core is serving, once its model is known.
    active: OnceCell<ActiveRequestGuard>,
    /// The request's permit among its client's, if a trusted proxy sent the request.
    client_permit: OnceCell<Box<RequestPermit>>,
    /// Set once the response's head was sent.
    status: Cell<Option<u16>>,
    /// From arrival to the response's head; only meaningful with a `status`.
    first_byte: Cell<Millis>,
    exceptions: OnceCell<Box<ExceptionFacts>>,
    forwarded_at_once: Cell<bool>,
    own_latency: Cell<OwnLatency>,
    bytes_in: Cell<u64>,
    bytes_out: Cell<u64>,
    /// The client disconnected while the gateway read its body.
    client_left: Cell<bool>,
    is_complete: Cell<bool>,
    /// When the request ended, if the caller had just read the clock; `Tick(0)` if not.
    ended_at: Cell<Tick>,
    /// Set when telemetry records this request.
    recorder: OnceCell<Box<RefCell<RequestRecorder>>>,
}

/// Facts of a request that parked, was retried or failed. Most requests and their streams have none.
#[derive(Default)]
struct ExceptionFacts {
    code: Cell<Option<&'static str>>,
    wait: Cell<Option<WaitBreakdown>>,
    /// Set when the request first parks.
    quoted_wait: OnceCell<QuotedWait>,
    parked_for: Cell<Option<Millis>>,
    retries: Cell<u32>,
}

/// The gateway's own latency for a request that did not park.
#[derive(Clone, Copy, Default)]
enum OwnLatency {
    #[default]
    Unknown,
    /// The body was complete at this moment, and no engine has the request.
    Since(Instant),
    Micros(u64),
}

#[cfg(test)]
impl RequestEnvironment {
    /// An environment that counts nothing. Its clock begins at `now`.
    pub(crate) fn uncounted(now: Tick) -> Arc<Self> {
        Arc::new(Self {
            metrics_sink: Arc::new(super::NoopMetricsSink),
            clock: TickClock::new(Instant::now(), now),
        })
    }
}

impl RequestContext {
    pub(crate) fn new(
        environment: &Arc<RequestEnvironment>,
        arrived: Instant,
        id: HeaderValue,
        route: &'static str,
    ) -> Rc<Self> {
        let arrived = environment.clock.tick_at(arrived);
        Rc::new(Self {
            environment: Arc::clone(environment),
            id,
            route,
            arrived,
            model: OnceCell::new(),
            model_metrics: OnceCell::new(),
            key_name: OnceCell::new(),
            phase: Cell::new(DisconnectPhase::Connecting),
            phase_began: Cell::new(arrived),
            tokens: Cell::new(0),
            active: OnceCell::new(),
            client_permit: OnceCell::new(),
            status: Cell::new(None),
            first_byte: Cell::default(),
            exceptions: OnceCell::new(),
            forwarded_at_once: Cell::new(false),
            own_latency: Cell::default(),
            bytes_in: Cell::new(0),
            bytes_out: Cell::new(0),
            client_left: Cell::new(false),
            is_complete: Cell::new(false),
            ended_at: Cell::default(),
            recorder: OnceCell::new(),
        })
    }

    /// The place for facts of a request that does not go straight to an engine.
    fn exceptions(&self) -> &ExceptionFacts {
        self.exceptions.get_or_init(Box::default)
    }

    fn now(&self) -> Tick {
        self.environment.clock.now()
    }

    pub(crate) fn set_recorder(&self, recorder: Option<RequestRecorder>) {
        if let Some(recorder) = recorder {
            self.recorder.get_or_init(|| Box::new(RefCell::new(recorder)));
        }
    }

    /// Whether telemetry records this request, including the engine's token usage.
    pub(crate) fn is_recorded(&self) -> bool {
        self.recorder.get().is_some()
    }

    fn with_recorder(&self, note: impl FnOnce(&mut RequestRecorder)) {
        if let Some(recorder) = self.recorder.get() {
            note(&mut recorder.borrow_mut());
        }
    }

    /// Sends the engine this request's own span as its parent. Without tracing, the client's own headers pass through.
    pub(crate) fn set_trace_headers(&self, headers: &mut HeaderMap) {
        self.with_recorder(|recorder| {
            if let Some(traceparent) = recorder.traceparent() {
                headers.insert(TRACEPARENT, traceparent);
                if !recorder.has_parent() {
                    headers.remove(TRACESTATE);
                }
            }
        });
    }

    pub(crate) fn set_phase(&self, phase: DisconnectPhase) {
        let before = self.phase.replace(phase);
        // A stream that waited got its head long ago. For any other, `head_sent` follows with the time.
        if phase == DisconnectPhase::Streaming && before != phase && self.status.get().is_some() {
            self.phase_began.set(self.now());
        }
        self.with_recorder(|recorder| recorder.enter_phase(phase));
    }

    /// Records the engine of the next attempt.
    pub(crate) fn record_engine(&self, engine: &EngineId) {
        self.with_recorder(|recorder| recorder.set_engine(engine));
    }

    /// Records the engine's token usage so far.
    pub(crate) fn record_usage(&self, usage: TokenUsage) {
        self.with_recorder(|recorder| recorder.set_usage(usage));
    }

    /// Records a failed attempt, which the client may never see.
    pub(crate) fn record_failed_attempt(&self, code: &'static str) {
        self.with_recorder(|recorder| recorder.fail_phase(code));
    }

    pub(crate) fn set_model(&self, model: &ModelName) {
        if let Some(metrics) = self.environment.metrics_sink.model_resolved(model) {
            self.model_metrics.get_or_init(|| metrics);
        }
        self.model.get_or_init(|| model.clone());
    }

    /// Keeps the request's place among those that its core is serving.
    pub(super) fn set_active(&self, active: ActiveRequestGuard) {
        self.active.set(active).unwrap_or_default();
    }

    /// Keeps the request's permit among its client's.
    pub(super) fn set_client_permit(&self, permit: RequestPermit) {
        self.client_permit.set(Box::new(permit)).unwrap_or_default();
    }

    /// The request's permit among its client's. `None`: the connection counts instead.
    pub(super) fn client_permit(&self) -> Option<&RequestPermit> {
        self.client_permit.get().map(AsRef::as_ref)
    }

    /// Records the tokens of the answer so far.
    pub(crate) fn set_tokens(&self, tokens: u64) {
        self.tokens.set(tokens);
    }

    pub(super) fn tokens(&self) -> u64 {
        self.tokens.get()
    }

    /// The request as a page shows it. `None` until its model is known.
    pub(super) fn describe(&self) -> Option<ActiveRequest> {
        Some(ActiveRequest {
            id: String::from_utf8_lossy(self.id.as_bytes()).into_owned(),
            model: self.model_name()?.clone(),
            phase: self.phase.get().into(),
            since: self.phase_began.get(),
            started: self.arrived,
            key: self.key_name.get().map(Arc::clone),
            route: self.route,
            tokens: self.tokens.get(),
        })
    }

    /// The request's model. `None` until it is known.
    pub(crate) fn model_name(&self) -> Option<&ModelName> {
        self.model.get()
    }

    /// Records the name of the request's key.
    pub(crate) fn set_key(&self, name: &Arc<str>) {
        self.key_name.get_or_init(|| Arc::clone(name));
    }

    /// Records that the body is complete, and returns that time for the caller's further use.
    pub(crate) fn body_received(&self, bytes: usize) -> Tick {
        let now = Instant::now();
        self.bytes_in.set(bytes as u64);
        self.own_latency.set(OwnLatency::Since(now));
        self.with_recorder(RequestRecorder::body_received);
        let now = self.environment.clock.tick_at(now);
        self.phase_began.set(now);
        now
    }

    /// Records that the request goes to an engine without having parked.
    pub(crate) fn set_forwarded_at_once(&self) {
        self.forwarded_at_once.set(true);
    }

    /// Records that the request goes to an engine.
    pub(crate) fn forwarded(&self, now: Instant) {
        // Only the first time: later time is not the gateway's own work.
        if self.forwarded_at_once.take()
            && let OwnLatency::Since(at) = self.own_latency.get()
        {
            let micros = u64::try_from(now.duration_since(at).as_micros());
            self.own_latency.set(micros.map_or(OwnLatency::Unknown, OwnLatency::Micros));
        }
    }

    pub(crate) fn add_bytes_out(&self, bytes: usize) {
        self.bytes_out.set(self.bytes_out.get() + bytes as u64);
    }

    pub(crate) fn set_wait(&self, waited: WaitBreakdown) {
        self.exceptions().wait.set(Some(waited));
    }

    /// The place for the quote of the request's wait, which is that of its first arrival in the queue.
    pub(crate) fn quoted_wait(&self) -> QuotedWait {
        Arc::clone(self.exceptions().quoted_wait.get_or_init(QuotedWait::default))
    }

    /// The expected wait at the request's arrival in the queue, if it parked and one was quoted.
    pub(super) fn expected_wait(&self) -> Option<WaitRange> {
        self.exceptions.get()?.quoted_wait.get()?.get().copied()
    }

    pub(crate) fn wait(&self) -> Option<WaitBreakdown> {
        self.exceptions.get()?.wait.get()
    }

    pub(crate) fn retried(&self) {
        let retries = &self.exceptions().retries;
        retries.set(retries.get() + 1);
    }

    pub(crate) fn record_fault(&self, fault: &Fault) {
        if let Fault::ClientDisconnected { phase } = fault {
            self.phase.set(*phase);
            self.client_left.set(true);
            return;
        }
        log_fault(fault, &self.id);
        self.set_code(openai::error::code(fault));
        self.record_failed_attempt(openai::error::code(fault));
    }

    /// Records a code for a failure that is not a fault of the gateway.
    pub(crate) fn set_code(&self, code: &'static str) {
        self.exceptions().code.set(Some(code));
    }

    /// Records how many of the model's engines are ejected now. `more`: this request caused an ejection.
    pub(crate) fn set_ejected(&self, engines: usize, more: bool) {
        if let Some(metrics) = self.model_metrics.get() {
            metrics.set_ejected(engines);
            if more {
                metrics.ejected();
            }
        }
    }

    /// Records that the client's connection has the response's head.
    pub(crate) fn head_sent(&self, status: u16, now: Tick) {
        self.status.set(Some(status));
        self.first_byte.set(now.since(self.arrived));
        if self.phase.get() == DisconnectPhase::Streaming {
            self.phase_began.set(now);
        }
        self.with_recorder(RequestRecorder::head_sent);
    }

    /// Records that the response is complete. A later disconnect of the client does not count as one.
    pub(crate) fn set_complete(&self) {
        self.is_complete.set(!self.client_left.get());
    }

    /// Like [`Self::set_complete`], with the end time `now`, so the drop need not read the clock.
    pub(crate) fn set_complete_at(&self, now: Instant) {
        self.set_complete();
        self.ended_at.set(self.environment.clock.tick_at(now));
    }

    pub(crate) fn since_arrival(&self) -> Millis {
        self.now().since(self.arrived)
    }

    /// Records that the gateway disconnected a client that read nothing. This does not count as a disconnect by the
    /// client.
    pub(crate) fn client_stalled(&self) {
        if !self.is_complete.get() {
            self.set_code(CLIENT_STALLED);
            self.set_complete();
        }
    }
}
