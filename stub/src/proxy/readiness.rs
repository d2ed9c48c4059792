//! Whether the engine behind this stub is ready, as reported to the kubelet.
//!
//! Two parties can set this bit. A controller of the public design watches the engine itself and posts `become-ready`
//! and `become-unready`. A controller of the older design posts the engine's readiness URL, and the stub polls it.
//! **The newest order wins**: an explicit order ends polling, and a URL replaces the previous URL, in one step under
//! one lock, so that no response to an older order is recorded ([`Readiness::record_response`]). A URL with a different
//! endpoint makes the engine unready at once, because the new endpoint's state is unknown. The same endpoint keeps the
//! bit and restarts polling at short intervals, because its sender has just woken the engine. The end of polling
//! (`DELETE`) makes the engine unready, because nothing reports its state any more.
//!
//! [`tracker`] decides when to poll and what the responses mean, without a clock. [`endpoint`] decides which URLs may
//! be polled.

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

mod endpoint;
mod poll;
mod tracker;

use endpoint::PolledEndpoint;
pub(super) use endpoint::is_possible_pod_ip;
use tracker::ReadinessTracker;

pub(crate) const BECOME_READY_PATH: &str = "/v1/become-ready";
pub(crate) const BECOME_UNREADY_PATH: &str = "/v1/become-unready";
pub(crate) const READINESS_URL_PATH: &str = "/v1/readiness-url";

/// Default poll interval while ready: fast enough for a person, and no load for an engine.
const DEFAULT_PERIOD: Millis = Millis::secs(1);
/// Kubernetes' default. One lost response of a busy engine means nothing.
const DEFAULT_FAILURE_THRESHOLD: u32 = 3;
/// Longest accepted poll interval.
const MAX_PERIOD: Millis = Millis::secs(3600);

/// Body of `POST /v1/readiness-url`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ReadinessUrlRequest {
    url: String,
    /// Milliseconds, or a text like `500ms`.
    #[serde(default = "period")]
    period: Millis,
    #[serde(default = "threshold")]
    failure_threshold: u32,
}

/// A validated polling order.
#[derive(Clone, Debug, PartialEq, Eq)]
struct PollSpec {
    endpoint: PolledEndpoint,
    period: Duration,
    threshold: u32,
}

/// Why an order is invalid.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error("the body is not {{\"url\", \"period\"?, \"failureThreshold\"?}}: {0}")]
    Body(#[from] serde_json::Error),
    #[error("the url {0}")]
    Endpoint(#[from] endpoint::Error),
    #[error("period must be from 1 ms to 1 h, but is {0}")]
    Period(Millis),
    #[error("failureThreshold must be 1 or more")]
    Threshold,
}

/// The readiness bit and its poller.
#[derive(Debug, Default)]
pub(crate) struct Readiness {
    state: Mutex<ReadinessState>,
}

#[derive(Debug, Default)]
struct ReadinessState {
    ready: bool,
    changes: u64,
    /// Counts orders. A response to an older order is dropped.
    order_seq: u64,
    poller: Option<Poller>,
}

#[derive(Debug)]
struct Poller {
    endpoint: PolledEndpoint,
    tracker: ReadinessTracker,
    /// The last response as text.
    last: Option<String>,
    task: AbortHandle,
}

/// The readiness state for `/debug/state`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct ReadinessDump {
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
        self.state().ready
    }

    /// Sets readiness explicitly and ends polling.
    pub(crate) fn become_ready(&self, ready: bool) {
        let mut state = self.state();
        state.end_poller();
        state.set(ready);
    }

    /// Ends polling and becomes unready.
    pub(crate) fn stop_polling(&self) {
        self.become_ready(false);
    }

    /// Polls until another order arrives.
    fn start_polling(self: &Arc<Self>, watched: PollSpec) {
        let mut state = self.state();
        let same = state.poller.as_ref().is_some_and(|poller| poller.endpoint == watched.endpoint);
        state.end_poller();
        if !same {
            state.set(false);
        }
        let tracker = ReadinessTracker::new(&watched, state.ready, Instant::now());
        // The task can record its first response only after this lock is released.
        let task = tokio::spawn(poll::run(Arc::clone(self), state.order_seq, watched.endpoint.clone()));
        state.poller =
            Some(Poller { endpoint: watched.endpoint, tracker, last: None, task: task.abort_handle() });
    }

    /// Records the response to the poll sent at `sent_at`, for order number `order_seq`. Returns when to poll again, or `None`
    /// if a newer order arrived.
    fn record_response(
        &self,
        order_seq: u64,
        answer: &poll::PollResponse,
        sent_at: Instant,
        now: Instant,
    ) -> Option<Instant> {
        let mut state = self.state();
        let poller = (state.order_seq == order_seq).then_some(state.poller.as_mut()).flatten()?;
        let outcome = poller.tracker.record(answer.is_success(), sent_at, now);
        poller.last = Some(answer.to_string());
        state.set(outcome.ready);
        Some(outcome.next_poll_at)
    }

    pub(crate) fn dump(&self) -> ReadinessDump {
        let state = self.state();
        let poller = state.poller.as_ref().map(|poller| PollerDump {
            url: poller.endpoint.to_string(),
            period: poller.tracker.period().into(),
            failure_threshold: poller.tracker.threshold(),
            failures: poller.tracker.failures(),
            last: poller.last.clone(),
        });
        ReadinessDump { ready: state.ready, changes: state.changes, poller }
    }

    fn state(&self) -> MutexGuard<'_, ReadinessState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReadinessState {
    fn set(&mut self, ready: bool) {
        if self.ready != ready {
            self.ready = ready;
            self.changes += 1;
            tracing::info!(ready, "readiness changed");
        }
    }

    fn end_poller(&mut self) {
        self.order_seq += 1;
        if let Some(poller) = self.poller.take() {
            poller.task.abort();
        }
    }
}

impl ReadinessUrlRequest {
    fn parse(body: &[u8]) -> Result<PollSpec, Error> {
        let order: Self = serde_json::from_slice(body)?;
        if order.period == Millis::ZERO || order.period > MAX_PERIOD {
            return Err(Error::Period(order.period));
        }
        if order.failure_threshold == 0 {
            return Err(Error::Threshold);
        }
        Ok(PollSpec {
            endpoint: order.url.parse()?,
            period: order.period.duration(),
            threshold: order.failure_threshold,
        })
    }
}

const fn period() -> Millis {
    DEFAULT_PERIOD
}

const fn threshold() -> u32 {
    DEFAULT_FAILURE_THRESHOLD
}

/// Checks an order's headers and returns the refusal. Called after the last await, so that no order of a newer leader
/// comes between the check and its effect.
type ReadinessFenceFn = Arc<dyn Fn(&HeaderMap) -> Result<(), Response> + Send + Sync>;

/// State of the readiness routes.
#[derive(Clone)]
struct ReadinessRouteState {
    readiness: Arc<Readiness>,
    fence: ReadinessFenceFn,
}

/// Serves [`BECOME_READY_PATH`], [`BECOME_UNREADY_PATH`] and [`READINESS_URL_PATH`].
pub(crate) fn routes(readiness: Arc<Readiness>, fence: ReadinessFenceFn) -> Router {
    let readiness_route = |ready| {
        post(move |State(met): State<ReadinessRouteState>, headers: HeaderMap| async move {
            met.apply_fenced(&headers, |readiness| readiness.become_ready(ready))
        })
    };
    Router::new()
        .route(BECOME_READY_PATH, readiness_route(true))
        .route(BECOME_UNREADY_PATH, readiness_route(false))
        .route(READINESS_URL_PATH, post(set_readiness_url).delete(delete_readiness_url))
        .with_state(ReadinessRouteState { readiness, fence })
}

async fn set_readiness_url(
    State(met): State<ReadinessRouteState>,
    headers: HeaderMap,
    body: Bytes,
) -> Response {
    match ReadinessUrlRequest::parse(&body) {
        Ok(watched) => met.apply_fenced(&headers, |readiness| readiness.start_polling(watched)),
        Err(error) => (StatusCode::BAD_REQUEST, format!("{error}\n")).into_response(),
    }
}

async fn delete_readiness_url(State(met): State<ReadinessRouteState>, headers: HeaderMap) -> Response {
    met.apply_fenced(&headers, |readiness| readiness.stop_polling())
}

impl ReadinessRouteState {
    fn apply_fenced(&self, headers: &HeaderMap, order: impl FnOnce(&Arc<Readiness>)) -> Response {
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
