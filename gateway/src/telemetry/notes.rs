//! What is noted of one request while it runs, and what it becomes when it is over.

use std::{net::SocketAddr, sync::Arc};

use http::{HeaderValue, Version, header, request};
use rouse::{
    fault::Phase,
    model::{EngineId, ModelName},
    openai::sse::Usage,
    units::Millis,
};
use tokio::time::Instant;

use super::{Context, Telemetry, Wall, line};
use crate::{
    driver::ColdStart,
    http::text::{LONGEST, cut},
};

/// What the connection and the route tell of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) peer: Option<SocketAddr>,
    /// Its connection is under TLS.
    pub(crate) secure: bool,
    /// Asks for the gateway's health: a span every second that says nothing.
    pub(crate) probe: bool,
}

/// The account of a request that runs.
pub(crate) struct Notes {
    telemetry: Arc<Telemetry>,
    record: Record,
}

/// One request that is over, as plain data that any thread may take. What its client chose is copied and cut: parts of
/// a head that are kept as they are keep all of the head, and thousands of records may wait.
pub(crate) struct Record {
    pub(crate) began: Instant,
    pub(crate) over: Instant,
    /// When that was.
    pub(crate) wall: Wall,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) secure: bool,
    pub(crate) agent: Option<String>,
    pub(crate) method: String,
    /// With of its query what is harmless.
    pub(crate) path: String,
    pub(crate) version: Version,
    pub(crate) parent: Option<Context>,
    /// The gateway's own span, when there are traces; not necessarily sampled.
    pub(crate) own: Option<Context>,
    /// The last one that was asked.
    pub(crate) engine: Option<EngineId>,
    pub(crate) usage: Option<Usage>,
    /// The last byte of the request's body came.
    pub(crate) received: Option<Instant>,
    /// The response's head went out.
    pub(crate) answered: Option<Instant>,
    pub(crate) steps: Vec<Step>,
    pub(crate) ended: Ended,
}

/// One stay in one phase.
pub(crate) struct Step {
    pub(crate) phase: Phase,
    pub(crate) from: Instant,
    pub(crate) to: Option<Instant>,
    /// The code of what ended it badly.
    pub(crate) error: Option<&'static str>,
    pub(crate) engine: Option<EngineId>,
}

/// The request's own account of itself.
#[derive(Default)]
pub(crate) struct Ended {
    pub(crate) id: Option<HeaderValue>,
    pub(crate) route: &'static str,
    pub(crate) model: Option<ModelName>,
    /// By its key's name.
    pub(crate) key: Option<Arc<str>>,
    /// 499 when the client left.
    pub(crate) status: u16,
    pub(crate) code: Option<&'static str>,
    pub(crate) left: Option<Phase>,
    pub(crate) cold_start: Option<ColdStart>,
    pub(crate) waited: Option<Millis>,
    pub(crate) replays: u32,
    pub(crate) bytes_in: u64,
    pub(crate) bytes_out: u64,
}

impl Notes {
    pub(super) fn new(
        telemetry: Arc<Telemetry>,
        now: Instant,
        seen: Seen,
        head: &request::Parts,
        parent: Option<Context>,
        own: Option<Context>,
    ) -> Self {
        let record = Record {
            began: now,
            over: now,
            wall: Wall::now(),
            peer: seen.peer,
            secure: seen.secure,
            agent: head.headers.get(header::USER_AGENT).map(|agent| text(agent.as_bytes())),
            method: cut(head.method.as_str()),
            path: line::path(&head.uri),
            version: head.version,
            parent,
            own,
            engine: None,
            usage: None,
            received: None,
            answered: None,
            steps: Vec::new(),
            ended: Ended::default(),
        };
        Self { telemetry, record }
    }

    /// What the engine is told as its parent, where there are traces.
    pub(crate) fn traceparent(&self) -> Option<HeaderValue> {
        self.record.own?.header()
    }

    /// The client's own place in a trace was valid, and so is what else it said of it.
    pub(crate) const fn has_parent(&self) -> bool {
        self.record.parent.is_some()
    }

    /// Only spans need to know when each phase began.
    pub(crate) fn phase(&mut self, phase: Phase) {
        if !self.record.is_traced() {
            return;
        }
        let open = self.record.steps.last().filter(|step| step.to.is_none());
        if open.is_some_and(|step| step.phase == phase) {
            return;
        }
        let now = Instant::now();
        self.leave(now, None);
        let engine = (phase != Phase::Parked).then(|| self.record.engine.clone()).flatten();
        self.record.steps.push(Step { phase, from: now, to: None, error: None, engine });
    }

    /// The present phase is over, and not well.
    pub(crate) fn failed(&mut self, code: &'static str) {
        self.leave(Instant::now(), Some(code));
    }

    fn leave(&mut self, now: Instant, error: Option<&'static str>) {
        if let Some(open) = self.record.steps.last_mut().filter(|step| step.to.is_none()) {
            (open.to, open.error) = (Some(now), error);
        }
    }

    pub(crate) fn engine(&mut self, engine: &EngineId) {
        self.record.engine = Some(engine.clone());
    }

    pub(crate) const fn usage(&mut self, usage: Usage) {
        self.record.usage = Some(usage);
    }

    pub(crate) fn received(&mut self) {
        self.record.received = Some(Instant::now());
    }

    pub(crate) fn answered(&mut self) {
        self.record.answered = Some(Instant::now());
    }

    /// The request is over. Hands its record on, without waiting.
    pub(crate) fn end(mut self, ended: Ended) {
        let now = Instant::now();
        self.leave(now, ended.left.map(|_| CLIENT_LEFT));
        (self.record.over, self.record.wall, self.record.ended) = (now, Wall::now(), ended);
        self.telemetry.finish(self.record);
    }
}

/// No more of it is looked at than is kept.
fn text(bytes: &[u8]) -> String {
    cut(&String::from_utf8_lossy(bytes.get(..LONGEST + 3).unwrap_or(bytes)))
}

/// What ended a span, when it was its client.
pub(super) const CLIENT_LEFT: &str = "client_left";

impl Record {
    pub(super) fn is_traced(&self) -> bool {
        self.own.is_some_and(Context::is_sampled)
    }

    /// The trace that it belongs to, whether it is recorded here or not.
    pub(super) fn trace(&self) -> Option<u128> {
        self.own.or(self.parent).map(|context| context.trace)
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
        let seen = Seen { peer: None, secure: false, probe: false };
        let notes = Notes::new(Arc::default(), Instant::now(), seen, &head, None, None);
        drop(head);
        assert!(long.is_unique());
        let record = &notes.record;
        for kept in [record.agent.as_ref().unwrap(), &record.method, &record.path] {
            assert!(kept.capacity() < 2 * LONGEST && kept.ends_with('…'), "{} {kept}", kept.capacity());
        }
    }
}
