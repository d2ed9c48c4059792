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
    fault::{Fault, Phase},
    lease::Clock,
    model::{EngineId, ModelName},
    openai::{self, sse::Usage},
    units::{Millis, Tick},
};
use tokio::time::Instant;
use tracing::Level;

use crate::{
    driver::{ColdStart, Waited},
    metrics::{KeyMetrics, ModelMetrics},
    telemetry::{Ended, Notes, TRACEPARENT, TRACESTATE},
};

/// The code of a request whose client was cut because it took nothing.
const CLIENT_STALLED: &str = "client_stalled";

/// Where requests are counted.
pub trait Meter: Send + Sync {
    /// A request is over; called once for each.
    fn finished(&self, finished: &Finished<'_>);
    /// A request turned out to be for this model. Where it is counted comes back, and is kept by the request: under the
    /// same name another model may be configured when it ends.
    fn began(&self, model: &ModelName) -> Option<Arc<ModelMetrics>>;
    /// Where requests of this key are counted.
    fn key(&self, name: &str) -> Option<Arc<KeyMetrics>> {
        let _ = name;
        None
    }
    /// A client was refused before there was a request: a broken, too large or too slow head.
    fn refused(&self, status: u16);
    /// One client connection more (`+1`) or less (`-1`) is open.
    fn connections(&self, change: i64);
    /// A connection goes to another core than the one that accepted it.
    fn moved(&self) {}
}

/// Counts nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct Unmetered;

/// One request, when it is over.
pub struct Finished<'a> {
    pub route: &'static str,
    /// What [`Meter::began`] gave, once the request named a configured model.
    pub model: Option<&'a ModelMetrics>,
    /// What the client saw; 499 when it left by itself.
    pub status: u16,
    /// The fault's code, for what the gateway refused or broke off.
    pub code: Option<&'static str>,
    /// Where the client was when it left.
    pub left: Option<Phase>,
    pub cold_start: Option<ColdStart>,
    /// All of its waiting, however that ended; `None` when it did not wait.
    pub parked: Option<Millis>,
    /// What the gateway itself added to a request that did not wait, in microseconds: from the last byte of its body
    /// until it goes to the engine.
    pub added_micros: Option<u64>,
    /// From arrival to the response's head.
    pub first_byte: Option<Millis>,
    pub duration: Millis,
    /// How often it was given to another engine, or to the same one again.
    pub replays: u32,
    /// Of the request's body, and of the response's.
    pub bytes_in: u64,
    pub bytes_out: u64,
}

pub(crate) struct Track {
    meter: Arc<dyn Meter>,
    clock: Clock,
    pub(crate) id: HeaderValue,
    pub(crate) route: &'static str,
    pub(crate) arrived: Tick,
    model: RefCell<Option<ModelName>>,
    metrics: OnceCell<Arc<ModelMetrics>>,
    key: OnceCell<Arc<str>>,
    phase: Cell<Phase>,
    status: Cell<Option<u16>>,
    code: Cell<Option<&'static str>>,
    waited: Cell<Option<Waited>>,
    parked: Cell<Option<Millis>>,
    first_byte: Cell<Option<Millis>>,
    complete: Cell<Option<Instant>>,
    at_once: Cell<bool>,
    added_micros: Cell<Option<u64>>,
    replays: Cell<u32>,
    bytes_in: Cell<u64>,
    bytes_out: Cell<u64>,
    /// The client was found to have left while its body was read.
    gone: Cell<bool>,
    over: Cell<bool>,
    /// When it was over, where somebody had looked at the clock just then.
    ended: Cell<Option<Instant>>,
    /// There when somebody wants to hear of single requests.
    notes: OnceCell<Box<RefCell<Notes>>>,
}

impl Track {
    pub(crate) fn new(
        meter: &Arc<dyn Meter>,
        clock: Clock,
        arrived: Instant,
        id: HeaderValue,
        route: &'static str,
    ) -> Rc<Self> {
        Rc::new(Self {
            meter: Arc::clone(meter),
            clock,
            id,
            route,
            arrived: clock.at(arrived),
            model: RefCell::default(),
            metrics: OnceCell::new(),
            key: OnceCell::new(),
            phase: Cell::new(Phase::Connecting),
            status: Cell::new(None),
            code: Cell::new(None),
            waited: Cell::new(None),
            parked: Cell::new(None),
            first_byte: Cell::new(None),
            complete: Cell::new(None),
            at_once: Cell::new(false),
            added_micros: Cell::new(None),
            replays: Cell::new(0),
            bytes_in: Cell::new(0),
            bytes_out: Cell::new(0),
            gone: Cell::new(false),
            over: Cell::new(false),
            ended: Cell::new(None),
            notes: OnceCell::new(),
        })
    }

    pub(crate) fn keep_notes(&self, notes: Option<Notes>) {
        if let Some(notes) = notes {
            self.notes.get_or_init(|| Box::new(RefCell::new(notes)));
        }
    }

    /// Somebody wants to hear of it: what the engine counted included.
    pub(crate) fn is_noted(&self) -> bool {
        self.notes.get().is_some()
    }

    fn note(&self, note: impl FnOnce(&mut Notes)) {
        if let Some(notes) = self.notes.get() {
            note(&mut notes.borrow_mut());
        }
    }

    /// Tells the engine whose child its own span is. Where nothing is traced, what the client said passes.
    pub(crate) fn place_in_trace(&self, headers: &mut HeaderMap) {
        self.note(|notes| {
            if let Some(own) = notes.traceparent() {
                headers.insert(TRACEPARENT, own);
                if !notes.has_parent() {
                    headers.remove(TRACESTATE);
                }
            }
        });
    }

    pub(crate) fn phase(&self, phase: Phase) {
        self.phase.set(phase);
        self.note(|notes| notes.phase(phase));
    }

    /// It goes to this engine.
    pub(crate) fn engine(&self, engine: &EngineId) {
        self.note(|notes| notes.engine(engine));
    }

    /// What the engine counted, so far.
    pub(crate) fn usage(&self, usage: Usage) {
        self.note(|notes| notes.usage(usage));
    }

    /// An attempt failed, which its client may never see.
    pub(crate) fn failed(&self, code: &'static str) {
        self.note(|notes| notes.failed(code));
    }

    pub(crate) fn model(&self, model: &ModelName) {
        if let Some(metrics) = self.meter.began(model) {
            self.metrics.get_or_init(|| metrics);
        }
        *self.model.borrow_mut() = Some(model.clone());
    }

    /// `None` until it is known.
    pub(crate) fn names(&self) -> Option<ModelName> {
        self.model.borrow().clone()
    }

    /// Whose request it is, by the key's name.
    pub(crate) fn key(&self, name: &Arc<str>) {
        self.key.get_or_init(|| Arc::clone(name));
    }

    /// The request's body is here. Gives the moment, for whatever else is to happen at it.
    pub(crate) fn received(&self, bytes: usize) -> Tick {
        let now = Instant::now();
        self.bytes_in.set(bytes as u64);
        self.complete.set(Some(now));
        self.note(Notes::received);
        self.clock.at(now)
    }

    /// It will go to an engine without having waited.
    pub(crate) fn forwarded_at_once(&self) {
        self.at_once.set(true);
    }

    /// It goes to an engine.
    pub(crate) fn goes(&self, now: Instant) {
        // The first time only: what comes after is no work of the gateway's.
        if self.at_once.take() {
            let added = self.complete.get().map(|at| now.duration_since(at).as_micros());
            self.added_micros.set(added.and_then(|micros| u64::try_from(micros).ok()));
        }
    }

    pub(crate) fn sent(&self, bytes: usize) {
        self.bytes_out.set(self.bytes_out.get() + bytes as u64);
    }

    pub(crate) fn waited(&self, waited: Waited) {
        self.waited.set(Some(waited));
    }

    pub(crate) fn was_parked(&self) -> Option<Waited> {
        self.waited.get()
    }

    pub(crate) fn replayed(&self) {
        self.replays.set(self.replays.get() + 1);
    }

    pub(crate) fn fault(&self, fault: &Fault) {
        if let Fault::ClientLeft { phase } = fault {
            self.phase.set(*phase);
            self.gone.set(true);
            return;
        }
        log(fault, &self.id);
        self.code.set(Some(openai::error::code(fault)));
        self.failed(openai::error::code(fault));
    }

    /// What went wrong is not a fault of ours: it has this code.
    pub(crate) fn code(&self, code: &'static str) {
        self.code.set(Some(code));
    }

    /// So many of the model's engines are left out now; `more`: this request was the reason for one of them.
    pub(crate) fn left_out(&self, engines: usize, more: bool) {
        if let Some(metrics) = self.metrics.get() {
            metrics.left_out(engines);
            if more {
                metrics.ejected();
            }
        }
    }

    /// The response's head is handed to the client's connection.
    pub(crate) fn head(&self, status: u16, now: Tick) {
        self.status.set(Some(status));
        self.first_byte.set(Some(now.since(self.arrived)));
        self.note(Notes::answered);
    }

    /// The response is complete: what comes after is no client that left.
    pub(crate) fn over(&self) {
        self.over.set(!self.gone.get());
    }

    /// The same, and nobody will ask any more: it ended at `now`.
    pub(crate) fn over_at(&self, now: Instant) {
        self.over();
        self.ended.set(Some(now));
    }

    pub(crate) fn since_arrival(&self) -> Millis {
        self.clock.now().since(self.arrived)
    }

    /// A guard for the time in which the request is parked.
    pub(crate) fn park(self: &Rc<Self>) -> Parked {
        self.phase(Phase::Parked);
        if let Some(metrics) = self.metrics.get() {
            metrics.parked(1);
        }
        Parked { track: Rc::clone(self), since: self.clock.now() }
    }

    /// The gateway cut the client, which took nothing: it did not leave.
    pub(crate) fn stalled(&self) {
        if !self.over.get() {
            self.code(CLIENT_STALLED);
            self.over();
        }
    }
}

/// What an operator should know of is logged where it happens; the access log has the rest.
fn log(fault: &Fault, id: &HeaderValue) {
    let (id, code) = (id.to_str().unwrap_or("?"), openai::error::code(fault));
    match openai::error::level(fault) {
        Level::ERROR => tracing::error!(id, code, "{fault}"),
        Level::WARN => tracing::warn!(id, code, "{fault}"),
        _ => {}
    }
}

pub(crate) struct Parked {
    track: Rc<Track>,
    since: Tick,
}

impl Drop for Parked {
    fn drop(&mut self) {
        let before = self.track.parked.get().unwrap_or_default();
        let now = self.track.clock.now().since(self.since);
        self.track.parked.set(Some(Millis(before.0 + now.0)));
        if let Some(metrics) = self.track.metrics.get() {
            metrics.parked(-1);
        }
    }
}

impl Drop for Track {
    fn drop(&mut self) {
        let left = (!self.over.get()).then(|| self.phase.get());
        let waited = self.waited.get();
        let finished = Finished {
            route: self.route,
            model: self.metrics.get().map(AsRef::as_ref),
            status: left.map_or_else(|| self.status.get().unwrap_or(500), |_| 499),
            code: self.code.get(),
            left,
            cold_start: waited.and_then(|waited| waited.cold_start),
            parked: self.parked.get(),
            first_byte: self.first_byte.get(),
            duration: self
                .ended
                .get()
                .map_or_else(|| self.clock.now(), |at| self.clock.at(at))
                .since(self.arrived),
            added_micros: self.added_micros.get(),
            replays: self.replays.get(),
            bytes_in: self.bytes_in.get(),
            bytes_out: self.bytes_out.get(),
        };
        self.meter.finished(&finished);
        let Some(notes) = self.notes.take() else { return };
        let ended = Ended {
            id: Some(self.id.clone()),
            route: self.route,
            model: self.model.take(),
            key: self.key.take(),
            status: finished.status,
            code: finished.code,
            left,
            cold_start: finished.cold_start,
            waited: finished.parked,
            replays: finished.replays,
            bytes_in: finished.bytes_in,
            bytes_out: finished.bytes_out,
        };
        notes.into_inner().end(ended);
    }
}

impl Meter for Unmetered {
    fn finished(&self, _: &Finished<'_>) {}
    fn began(&self, _: &ModelName) -> Option<Arc<ModelMetrics>> {
        None
    }
    fn refused(&self, _: u16) {}
    fn connections(&self, _: i64) {}
}
