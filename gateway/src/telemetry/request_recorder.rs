//! Records a request while it runs, and its result when it ends.

use std::{net::IpAddr, sync::Arc};

use http::{HeaderValue, Version, header, request};
use rouse::{
    fault::DisconnectPhase,
    model::{EngineId, ModelName},
    units::Millis,
};
use rouse_net::openai::sse::TokenUsage;
use tokio::time::Instant;

use super::{Telemetry, TraceContext, WallClock, access_line};
use crate::{
    driver::ColdStart,
    http::client_text::{MAX_CLIENT_TEXT_BYTES, sanitize},
};

/// Facts from the request's connection and route.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestOrigin {
    /// The client's address, as the connection or a trusted proxy names it.
    pub(crate) client: Option<IpAddr>,
    /// The connection uses TLS.
    pub(crate) is_tls: bool,
    /// A health check of the gateway, whose span every second would carry no information.
    pub(crate) is_health_check: bool,
}

/// The record of a running request.
pub(crate) struct RequestRecorder {
    telemetry: Arc<Telemetry>,
    record: RequestRecord,
}

/// A completed request as plain data that any thread may take.
///
/// Values from the client are copied and cut: a reference to a part of the head would keep the whole head alive, and
/// thousands of records may wait.
pub(crate) struct RequestRecord {
    pub(crate) began_at: Instant,
    pub(crate) ended_at: Instant,
    /// Wall clock, read at `ended_at`.
    pub(crate) wall_clock: WallClock,
    pub(crate) client: Option<IpAddr>,
    pub(crate) is_tls: bool,
    pub(crate) user_agent: Option<String>,
    pub(crate) method: String,
    /// Includes the harmless parts of the query.
    pub(crate) path: String,
    pub(crate) version: Version,
    pub(crate) parent: Option<TraceContext>,
    /// The gateway's own span, if traces are on; not necessarily sampled.
    pub(crate) own_context: Option<TraceContext>,
    /// The engine of the last attempt.
    pub(crate) engine: Option<EngineId>,
    pub(crate) usage: Option<TokenUsage>,
    /// When the last byte of the request's body arrived.
    pub(crate) body_received_at: Option<Instant>,
    /// When the response's head was sent.
    pub(crate) head_sent_at: Option<Instant>,
    pub(crate) phases: Vec<PhaseInterval>,
    pub(crate) outcome: RequestOutcome,
}

/// One stay in one phase.
pub(crate) struct PhaseInterval {
    pub(crate) phase: DisconnectPhase,
    pub(crate) started_at: Instant,
    pub(crate) ended_at: Option<Instant>,
    /// The code of the error that ended it.
    pub(crate) error: Option<&'static str>,
    pub(crate) engine: Option<EngineId>,
}

/// What the request reports at its end.
#[derive(Default)]
pub(crate) struct RequestOutcome {
    pub(crate) id: Option<HeaderValue>,
    pub(crate) route: &'static str,
    pub(crate) model: Option<ModelName>,
    /// The key's name.
    pub(crate) key: Option<Arc<str>>,
    /// 499 if the client disconnected.
    pub(crate) status: u16,
    pub(crate) code: Option<&'static str>,
    pub(crate) left_in_phase: Option<DisconnectPhase>,
    pub(crate) cold_start: Option<ColdStart>,
    pub(crate) wait: Option<Millis>,
    pub(crate) retries: u32,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

impl RequestRecorder {
    pub(super) fn new(
        telemetry: Arc<Telemetry>,
        now: Instant,
        origin: RequestOrigin,
        head: &request::Parts,
        parent: Option<TraceContext>,
        own_context: Option<TraceContext>,
    ) -> Self {
        let record = RequestRecord {
            began_at: now,
            ended_at: now,
            wall_clock: WallClock::now(),
            client: origin.client,
            is_tls: origin.is_tls,
            user_agent: head.headers.get(header::USER_AGENT).map(|agent| sanitize_bytes(agent.as_bytes())),
            method: sanitize(head.method.as_str()),
            path: access_line::redacted_path(&head.uri),
            version: head.version,
            parent,
            own_context,
            engine: None,
            usage: None,
            body_received_at: None,
            head_sent_at: None,
            phases: Vec::new(),
            outcome: RequestOutcome::default(),
        };
        Self { telemetry, record }
    }

    /// Returns the parent header for the engine, if traces are on.
    pub(crate) fn traceparent(&self) -> Option<HeaderValue> {
        self.record.own_context?.to_header()
    }

    /// Whether the client sent a valid trace context. Only then are its other trace headers valid.
    pub(crate) const fn has_parent(&self) -> bool {
        self.record.parent.is_some()
    }

    /// Enters a phase. Only spans need the time.
    pub(crate) fn enter_phase(&mut self, phase: DisconnectPhase) {
        if !self.record.is_traced() {
            return;
        }
        let open = self.record.phases.last().filter(|step| step.ended_at.is_none());
        if open.is_some_and(|step| step.phase == phase) {
            return;
        }
        let now = Instant::now();
        self.end_phase(now, None);
        let engine = (phase != DisconnectPhase::Parked).then(|| self.record.engine.clone()).flatten();
        self.record.phases.push(PhaseInterval {
            phase,
            started_at: now,
            ended_at: None,
            error: None,
            engine,
        });
    }

    /// Ends the current phase with an error.
    pub(crate) fn fail_phase(&mut self, code: &'static str) {
        self.end_phase(Instant::now(), Some(code));
    }

    fn end_phase(&mut self, now: Instant, error: Option<&'static str>) {
        if let Some(open) = self.record.phases.last_mut().filter(|step| step.ended_at.is_none()) {
            (open.ended_at, open.error) = (Some(now), error);
        }
    }

    pub(crate) fn set_engine(&mut self, engine: &EngineId) {
        self.record.engine = Some(engine.clone());
    }

    pub(crate) const fn set_usage(&mut self, usage: TokenUsage) {
        self.record.usage = Some(usage);
    }

    pub(crate) fn body_received(&mut self) {
        self.record.body_received_at = Some(Instant::now());
    }

    pub(crate) fn head_sent(&mut self) {
        self.record.head_sent_at = Some(Instant::now());
    }

    /// Ends the request and enqueues its record without waiting.
    pub(crate) fn finish(mut self, outcome: RequestOutcome) {
        let now = Instant::now();
        self.end_phase(now, outcome.left_in_phase.map(|_| CLIENT_LEFT));
        (self.record.ended_at, self.record.wall_clock, self.record.outcome) =
            (now, WallClock::now(), outcome);
        self.telemetry.finish(self.record);
    }
}

/// Sanitizes client text. Looks at no more bytes than it keeps.
fn sanitize_bytes(bytes: &[u8]) -> String {
    sanitize(&String::from_utf8_lossy(bytes.get(..MAX_CLIENT_TEXT_BYTES + 3).unwrap_or(bytes)))
}

/// The error of a span that ended because its client disconnected.
pub(super) const CLIENT_LEFT: &str = "client_left";

impl RequestRecord {
    pub(super) fn is_traced(&self) -> bool {
        self.own_context.is_some_and(TraceContext::is_sampled)
    }

    /// Returns the id of the request's trace, whether or not it is recorded here.
    pub(super) fn trace_id(&self) -> Option<u128> {
        self.own_context.or(self.parent).map(|context| context.trace_id)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::{Method, Request};

    use super::*;

    #[test]
    fn notes_keep_no_part_of_a_head_and_little_of_what_stood_in_it() {
        let long = Bytes::from(vec![b'x'; 60_000]);
        let uri = http::Uri::from_maybe_shared(Bytes::from(format!("/{}", "y".repeat(60_000)))).unwrap();
        let agent = HeaderValue::from_maybe_shared(long.clone()).unwrap();
        let method = Method::from_bytes(&long).unwrap();
        let request = Request::builder().method(method).uri(uri).header(header::USER_AGENT, agent);
        let (head, ()) = request.body(()).unwrap().into_parts();
        let seen = RequestOrigin { client: None, is_tls: false, is_health_check: false };
        let notes = RequestRecorder::new(Arc::default(), Instant::now(), seen, &head, None, None);
        drop(head);
        assert!(long.is_unique());
        let record = &notes.record;
        for kept in [record.user_agent.as_ref().unwrap(), &record.method, &record.path] {
            assert!(
                kept.capacity() < 2 * MAX_CLIENT_TEXT_BYTES && kept.ends_with('…'),
                "{} {kept}",
                kept.capacity()
            );
        }
    }
}
