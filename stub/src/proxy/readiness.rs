//! Whether the engine behind this stub serves, as the kubelet is told.
//!
//! One bit, and two who may set it. A controller of the public design watches the engine itself and posts
//! `become-ready` and `become-unready`. One of the older design posts the URL of the engine's own readiness, and the
//! stub polls it. **The newest order holds**: an explicit word ends a poller, and a URL replaces the one before it, in
//! the same step under one lock, so that no answer to an older order can still be noted ([`Readiness::note`]).
//! A URL of another place makes unready at once, since nothing is known of that place; the same place again changes
//! nothing but begins to poll anew, quickly: whoever sends it has just woken the engine there. Without a poller nobody
//! knows any more, so the end of one (`DELETE`) makes unready.
//!
//! When to ask, and what follows from the answers, is [`judge`]'s, without a clock; what may be asked is [`place`]'s.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::post,
};
use rouse::units::Millis;
use serde::{Deserialize, Serialize};
use tokio::{task::AbortHandle, time::Instant};

mod judge;
mod place;
mod poll;

use judge::Judge;
use place::Place;
pub(super) use place::may_be_a_pod;

pub(crate) const READY: &str = "/v1/become-ready";
pub(crate) const UNREADY: &str = "/v1/become-unready";
pub(crate) const URL: &str = "/v1/readiness-url";

/// While ready, where nothing is said: as often as a person would notice, and no burden for an engine.
const PERIOD: Millis = Millis::secs(1);
/// As Kubernetes has it: one lost answer of a busy engine means nothing.
const THRESHOLD: u32 = 3;
/// More would be no watch any more.
const LONGEST: Millis = Millis::secs(3600);

/// `POST /v1/readiness-url`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Order {
    url: String,
    /// Milliseconds, or a text like `500ms`.
    #[serde(default = "period")]
    period: Millis,
    #[serde(default = "threshold")]
    failure_threshold: u32,
}

/// What is to be polled, once it was understood.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Watched {
    place: Place,
    period: Duration,
    threshold: u32,
}

/// Why an order is none.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the body is not {{\"url\", \"period\"?, \"failureThreshold\"?}}: {0}")]
    Body(#[from] serde_json::Error),
    #[error("the url {0}")]
    Place(#[from] place::Error),
    #[error("period must be from 1 ms to 1 h, and is {0}")]
    Period(Millis),
    #[error("failureThreshold must be 1 or more")]
    Threshold,
}

/// The bit, and who keeps it.
#[derive(Debug, Default)]
pub(crate) struct Readiness {
    state: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    ready: bool,
    changes: u64,
    /// Counts the orders: an answer to an older one is not noted.
    life: u64,
    poller: Option<Poller>,
}

#[derive(Debug)]
struct Poller {
    place: Place,
    judge: Judge,
    /// The last answer, in words.
    last: Option<String>,
    task: AbortHandle,
}

/// Everything that is known, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Dump {
    pub(crate) ready: bool,
    pub(crate) changes: u64,
    pub(crate) poller: Option<PollerDump>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PollerDump {
    pub(crate) url: String,
    pub(crate) period: Millis,
    pub(crate) failure_threshold: u32,
    pub(crate) failures: u32,
    pub(crate) last: Option<String>,
}

impl Readiness {
    pub(crate) fn ready(&self) -> bool {
        self.known().ready
    }

    /// The explicit word; whatever was polled is polled no more.
    pub(crate) fn become_ready(&self, ready: bool) {
        let mut known = self.known();
        known.end_poller();
        known.set(ready);
    }

    /// Nobody polls any more, and nobody knows.
    pub(crate) fn forget(&self) {
        self.become_ready(false);
    }

    /// Polls from now on, and until another order comes.
    fn watch(self: &Arc<Self>, watched: Watched) {
        let mut known = self.known();
        let same = known.poller.as_ref().is_some_and(|poller| poller.place == watched.place);
        known.end_poller();
        if !same {
            known.set(false);
        }
        let judge = Judge::new(&watched, known.ready, Instant::now());
        // Its first answer can be noted only when this lock is free.
        let task = tokio::spawn(poll::run(Arc::clone(self), known.life, watched.place.clone()));
        known.poller = Some(Poller { place: watched.place, judge, last: None, task: task.abort_handle() });
    }

    /// An answer that the order of this `life` has got, to a question of the moment `asked`; when to ask again, or `None`
    /// when a newer order came.
    fn note(&self, life: u64, answer: &poll::Answer, asked: Instant, now: Instant) -> Option<Instant> {
        let mut known = self.known();
        let poller = (known.life == life).then_some(known.poller.as_mut()).flatten()?;
        let verdict = poller.judge.note(answer.is_good(), asked, now);
        poller.last = Some(answer.to_string());
        known.set(verdict.ready);
        Some(verdict.again)
    }

    pub(crate) fn dump(&self) -> Dump {
        let known = self.known();
        let poller = known.poller.as_ref().map(|poller| PollerDump {
            url: poller.place.to_string(),
            period: poller.judge.period().into(),
            failure_threshold: poller.judge.threshold(),
            failures: poller.judge.failures(),
            last: poller.last.clone(),
        });
        Dump { ready: known.ready, changes: known.changes, poller }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn set(&mut self, ready: bool) {
        if self.ready != ready {
            self.ready = ready;
            self.changes += 1;
            tracing::info!(ready, "readiness");
        }
    }

    fn end_poller(&mut self) {
        self.life += 1;
        if let Some(poller) = self.poller.take() {
            poller.task.abort();
        }
    }
}

impl Order {
    fn read(body: &[u8]) -> Result<Watched, Error> {
        let order: Self = serde_json::from_slice(body)?;
        if order.period == Millis::ZERO || order.period > LONGEST {
            return Err(Error::Period(order.period));
        }
        if order.failure_threshold == 0 {
            return Err(Error::Threshold);
        }
        Ok(Watched {
            place: order.url.parse()?,
            period: order.period.duration(),
            threshold: order.failure_threshold,
        })
    }
}

const fn period() -> Millis {
    PERIOD
}

const fn threshold() -> u32 {
    THRESHOLD
}

/// Why an order with this head must not be followed. It is asked when nothing is left to wait for, so that no order of a
/// newer leader comes between the answer and what follows from it.
type Fence = Arc<dyn Fn(&HeaderMap) -> Result<(), Response> + Send + Sync>;

/// What an order meets.
#[derive(Clone)]
struct Met {
    readiness: Arc<Readiness>,
    fence: Fence,
}

/// Answers [`READY`], [`UNREADY`] and [`URL`].
pub(crate) fn routes(readiness: Arc<Readiness>, fence: Fence) -> Router {
    let word = |ready| {
        post(move |State(met): State<Met>, headers: HeaderMap| async move {
            met.follow(&headers, |readiness| readiness.become_ready(ready))
        })
    };
    Router::new()
        .route(READY, word(true))
        .route(UNREADY, word(false))
        .route(URL, post(watch).delete(forget))
        .with_state(Met { readiness, fence })
}

async fn watch(State(met): State<Met>, headers: HeaderMap, body: Bytes) -> Response {
    match Order::read(&body) {
        Ok(watched) => met.follow(&headers, |readiness| readiness.watch(watched)),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

async fn forget(State(met): State<Met>, headers: HeaderMap) -> Response {
    met.follow(&headers, |readiness| readiness.forget())
}

impl Met {
    fn follow(&self, headers: &HeaderMap, order: impl FnOnce(&Arc<Readiness>)) -> Response {
        match (self.fence)(headers) {
            Ok(()) => {
                order(&self.readiness);
                "OK\n".into_response()
            }
            Err(refusal) => refusal,
        }
    }
}

#[cfg(test)]
mod tests;
