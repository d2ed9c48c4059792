//! Counters for tests: not vLLM's metrics, but the engine's own record of leaks, aborts and timestamps.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use serde_json::{Value, json};
use tokio::{sync::Notify, time::Instant};

use crate::clock;

/// Arrivals kept. A test reads them before this many more arrive.
const MAX_ARRIVALS: usize = 1024;

#[derive(Debug, Default)]
pub(crate) struct SimCounters {
    pub(crate) running: AtomicU64,
    pub(crate) waiting: AtomicU64,
    pub(crate) total: AtomicU64,
    pub(crate) finished: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) aborts: AtomicU64,
    pub(crate) aborted_by_sleep: AtomicU64,
    pub(crate) requests_while_asleep: AtomicU64,
    /// Requests that violate RFC 9112; a proxy that causes one is broken.
    pub(crate) malformed: AtomicU64,
    pub(crate) bytes_in: AtomicU64,
    pub(crate) bytes_out: AtomicU64,
    pub(crate) connections_open: AtomicU64,
    pub(crate) connections_total: AtomicU64,
    pub(crate) sleeps: AtomicU64,
    pub(crate) wakes: AtomicU64,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) generation_tokens: AtomicU64,
    pub(crate) latency: LatencySums,
    /// Tokens of running requests in the KV cache.
    pub(crate) cached_tokens: AtomicU64,
    pub(crate) last_abort_unix_us: AtomicU64,
    pub(crate) first_ready_unix_us: AtomicU64,
    pub(crate) last_wake_unix_us: AtomicU64,
    arrivals: Mutex<VecDeque<SimArrival>>,
    /// The requests in `total`, by path.
    paths: Mutex<BTreeMap<String, u64>>,
    emptied: Notify,
}

/// Sums behind vLLM's latency histograms, in microseconds.
#[derive(Debug, Default)]
pub(crate) struct LatencySums {
    pub(crate) first_tokens: AtomicU64,
    pub(crate) to_first_token: AtomicU64,
    pub(crate) later_tokens: AtomicU64,
    pub(crate) between_tokens: AtomicU64,
}

/// The arrival of one inference request.
#[derive(Debug)]
pub(crate) struct SimArrival {
    pub(crate) unix_us: u64,
    pub(crate) path: String,
    pub(crate) request_id: Option<String>,
    pub(crate) body_bytes: u64,
}

impl SimCounters {
    pub(crate) fn record_arrival(&self, arrival: SimArrival) {
        self.total.fetch_add(1, Relaxed);
        let mut paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner);
        *paths.entry(arrival.path.clone()).or_default() += 1;
        drop(paths);
        let mut arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        if arrivals.len() == MAX_ARRIVALS {
            arrivals.pop_front();
        }
        arrivals.push_back(arrival);
    }

    pub(crate) fn record_first_ready(&self) {
        // Only the first time counts; losing the race means that another thread recorded it.
        self.first_ready_unix_us.compare_exchange(0, clock::wall_us(), Relaxed, Relaxed).ok();
    }

    /// Waits until no request runs or waits.
    pub(crate) async fn wait_until_idle(&self) {
        loop {
            let emptied = self.emptied.notified();
            if self.in_flight() == 0 {
                return;
            }
            emptied.await;
        }
    }

    pub(crate) fn in_flight(&self) -> u64 {
        self.running.load(Relaxed) + self.waiting.load(Relaxed)
    }

    pub(crate) fn json(&self) -> Value {
        let read = |counter: &AtomicU64| counter.load(Relaxed);
        let moment = |counter: &AtomicU64| Some(counter.load(Relaxed)).filter(|us| *us > 0);
        let arrivals = self.arrivals.lock().unwrap_or_else(PoisonError::into_inner);
        let times: Vec<u64> = arrivals.iter().map(|a| a.unix_us).collect();
        let details: Vec<Value> = arrivals
            .iter()
            .map(|a| {
                json!({
                    "unix_us": a.unix_us, "path": a.path, "request_id": a.request_id, "body_bytes": a.body_bytes,
                })
            })
            .collect();
        drop(arrivals);
        let paths = self.paths.lock().unwrap_or_else(PoisonError::into_inner).clone();
        json!({
            "running": read(&self.running),
            "waiting": read(&self.waiting),
            "total": read(&self.total),
            "finished": read(&self.finished),
            "failed": read(&self.failed),
            "aborts": read(&self.aborts),
            "aborted_by_sleep": read(&self.aborted_by_sleep),
            "requests_while_asleep": read(&self.requests_while_asleep),
            "malformed": read(&self.malformed),
            "bytes_in": read(&self.bytes_in),
            "bytes_out": read(&self.bytes_out),
            "connections_open": read(&self.connections_open),
            "connections_total": read(&self.connections_total),
            "sleeps": read(&self.sleeps),
            "wakes": read(&self.wakes),
            "prompt_tokens": read(&self.prompt_tokens),
            "generation_tokens": read(&self.generation_tokens),
            "cached_tokens": read(&self.cached_tokens),
            "last_abort_unix_us": moment(&self.last_abort_unix_us),
            "first_ready_unix_us": moment(&self.first_ready_unix_us),
            "last_wake_unix_us": moment(&self.last_wake_unix_us),
            "first_request_byte_unix_us": times,
            "arrivals": details,
            "paths": paths,
        })
    }
}

/// A request's slot in the counters, from admission to its end. Dropping it without an end counts as an abort: the
/// connection's task ended because the client disconnected.
pub(crate) struct RequestSlot {
    counters: Arc<SimCounters>,
    running: bool,
    cached_tokens: u64,
    /// Time of the arrival, then of the last step.
    last_step: Instant,
    generated: u64,
    ended: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RequestEnd {
    Finished,
    Aborted,
    AbortedBySleep,
    Failed,
}

impl RequestSlot {
    pub(crate) fn waiting(counters: &Arc<SimCounters>) -> Self {
        counters.waiting.fetch_add(1, Relaxed);
        let counters = Arc::clone(counters);
        Self {
            counters,
            running: false,
            cached_tokens: 0,
            last_step: Instant::now(),
            generated: 0,
            ended: false,
        }
    }

    pub(crate) fn start_running(&mut self) {
        self.running = true;
        self.counters.running.fetch_add(1, Relaxed);
        self.counters.waiting.fetch_sub(1, Relaxed);
    }

    pub(crate) fn record_prefill(&mut self, tokens: u64) {
        self.counters.prompt_tokens.fetch_add(tokens, Relaxed);
        self.cache(tokens);
    }

    /// Records one step: a token of each of `choices`.
    pub(crate) fn record_step(&mut self, choices: u64) {
        self.counters.generation_tokens.fetch_add(choices, Relaxed);
        self.cache(choices);
        let now = Instant::now();
        let took = now.duration_since(std::mem::replace(&mut self.last_step, now)).as_micros() as u64;
        let latency = &self.counters.latency;
        let (count, sum) = if self.generated == 0 {
            (&latency.first_tokens, &latency.to_first_token)
        } else {
            (&latency.later_tokens, &latency.between_tokens)
        };
        count.fetch_add(1, Relaxed);
        sum.fetch_add(took, Relaxed);
        self.generated += choices;
    }

    fn cache(&mut self, tokens: u64) {
        self.cached_tokens += tokens;
        self.counters.cached_tokens.fetch_add(tokens, Relaxed);
    }

    /// Releases the slot; only the first call counts.
    pub(crate) fn end(&mut self, end: RequestEnd) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let counters = &self.counters;
        counters.cached_tokens.fetch_sub(self.cached_tokens, Relaxed);
        match end {
            RequestEnd::Finished => counters.finished.fetch_add(1, Relaxed),
            RequestEnd::Failed => counters.failed.fetch_add(1, Relaxed),
            RequestEnd::AbortedBySleep => counters.aborted_by_sleep.fetch_add(1, Relaxed),
            RequestEnd::Aborted => {
                counters.last_abort_unix_us.store(clock::wall_us(), Relaxed);
                counters.aborts.fetch_add(1, Relaxed)
            }
        };
        let held = if self.running { &counters.running } else { &counters.waiting };
        held.fetch_sub(1, Relaxed);
        if counters.in_flight() == 0 {
            counters.emptied.notify_waiters();
        }
    }
}

impl Drop for RequestSlot {
    fn drop(&mut self) {
        self.end(RequestEnd::Aborted);
    }
}
