//! `GET /admin/v1/live`: everything that the page shows, as server-sent events.
//!
//! One task composes the snapshots for all readers, and runs only while there are any: without a page, nothing is
//! computed. A reader gets the newest snapshot whenever it can take one, so a slow reader skips those in between and
//! learns how many.

use std::{
    collections::VecDeque,
    convert::Infallible,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use axum::{
    extract::State,
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use rouse::{
    fleet::report::{FleetView, ModelState},
    units::{Millis, Tick},
};
use serde::Serialize;
use tokio::{sync::watch, time::MissedTickBehavior};

use super::{AdminSources, AdminState};
use crate::{
    driver::Timeline,
    http::active_requests::{ActiveRequest, ActiveRequestList},
};

mod rates;

use rates::{ModelRate, RateWindow};

/// The shortest time between two snapshots.
const SNAPSHOT_INTERVAL: Duration = Duration::from_millis(250);
/// The shortest time between two turns that the driver takes for expected waits alone.
const REFRESH_INTERVAL: Millis = Millis::secs(1);
/// The most requests in a snapshot.
const MAX_REQUESTS: usize = 200;

pub(super) async fn live(State(shared): State<AdminState>) -> Response {
    let reader = LiveReader::new(&shared.live);
    let events = futures_util::stream::unfold(reader, |mut reader| async move {
        let event = reader.next().await?;
        Some((Ok::<_, Infallible>(event), reader))
    });
    Sse::new(events).keep_alive(KeepAlive::default()).into_response()
}

/// The snapshots for all readers.
pub(super) struct LiveFeed {
    sources: AdminSources,
    snapshots: watch::Sender<Snapshot>,
    /// Whether the task that composes them runs.
    is_publishing: Mutex<bool>,
}

/// The newest snapshot, as JSON.
#[derive(Clone, Default)]
struct Snapshot {
    number: u64,
    /// `None`: none has been composed since a reader came, or since the last one left.
    text: Option<Arc<str>>,
}

/// The content of a snapshot, without its time.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct SnapshotContent {
    gateway: String,
    leads: bool,
    fleet: Arc<FleetView>,
    requests: Vec<ActiveRequest>,
    requests_total: usize,
    rates: Vec<ModelRate>,
}

#[derive(Serialize)]
struct TimedSnapshot<'a> {
    at: Tick,
    #[serde(flatten)]
    content: &'a SnapshotContent,
}

impl LiveFeed {
    pub(super) fn new(sources: AdminSources) -> Arc<Self> {
        Arc::new(Self { sources, snapshots: watch::Sender::default(), is_publishing: Mutex::default() })
    }

    /// Adds a reader. The first one starts the task that composes snapshots.
    fn subscribe(self: &Arc<Self>) -> watch::Receiver<Snapshot> {
        let mut is_publishing = self.is_publishing();
        let reader = self.snapshots.subscribe();
        if mem::replace(&mut *is_publishing, true) {
            // The newest one may be old, and a page takes the gateway's time from it.
            self.snapshots.send_modify(|snapshot| snapshot.text = None);
        } else {
            tokio::spawn(Self::publish(Arc::clone(self)));
        }
        reader
    }

    /// Composes snapshots until the last reader has left.
    async fn publish(self: Arc<Self>) {
        let mut composer = SnapshotComposer::default();
        let mut ticks = tokio::time::interval(SNAPSHOT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while self.has_readers() {
            ticks.tick().await;
            if self.snapshots.borrow().text.is_none() {
                composer.turns = None;
            }
            if let Some(text) = composer.compose(&self.sources).await {
                self.snapshots.send_modify(|snapshot| {
                    snapshot.number += 1;
                    snapshot.text = Some(text.into());
                });
            }
        }
    }

    /// Returns whether anybody reads. If not, the task has ended for [`Self::subscribe`].
    fn has_readers(&self) -> bool {
        let mut is_publishing = self.is_publishing();
        *is_publishing = self.snapshots.receiver_count() > 0;
        if !*is_publishing {
            // The next reader must not get it as if it were new.
            self.snapshots.send_modify(|snapshot| snapshot.text = None);
        }
        *is_publishing
    }

    fn is_publishing(&self) -> MutexGuard<'_, bool> {
        self.is_publishing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Composes snapshots, and remembers the last one.
#[derive(Default)]
struct SnapshotComposer {
    last: SnapshotContent,
    requests: ActiveRequestList,
    /// The driver's turns at the last snapshot. `None`: the next one is new, even if nothing has changed.
    turns: Option<u64>,
    /// When the driver last took a turn for the expected waits.
    refreshed_at: Tick,
    rates: RateWindow,
}

impl SnapshotComposer {
    /// Composes the next snapshot as JSON. `None`: nothing has changed.
    async fn compose(&mut self, sources: &AdminSources) -> Option<String> {
        let driver = &sources.driver;
        let requests = sources.workers.active_requests(MAX_REQUESTS).await;
        let now = driver.clock().now();
        if self.has_waits() && now.since(self.refreshed_at) >= REFRESH_INTERVAL {
            self.refreshed_at = now;
            driver.refresh().await;
        }
        let turns = Some(driver.turns());
        let mut content = self.last.clone();
        content.gateway.clone_from(&sources.name);
        // Without a turn, only the leases may have changed, and each is a request's.
        if turns != self.turns || requests != self.requests {
            let view = driver.live_view().await;
            (content.fleet, content.leads) = (view.fleet, view.leads);
        }
        if self.rates.is_due(now) {
            let mut totals = (sources.traffic)();
            for (model, tokens) in &requests.tokens {
                totals.entry(model.clone()).or_default().tokens += tokens;
            }
            self.rates.add(now, totals);
            content.rates = self.rates.rates();
        }
        content.requests.clone_from(&requests.oldest);
        content.requests_total = requests.total;
        let is_first = self.turns.is_none();
        (self.turns, self.requests) = (turns, requests);
        if content == self.last && !is_first {
            return None;
        }
        self.last = content;
        serde_json::to_string(&TimedSnapshot { at: driver.clock().now(), content: &self.last }).ok()
    }

    /// Whether an expected wait gets shorter with time, which only a turn shows.
    fn has_waits(&self) -> bool {
        let models = &self.last.fleet.models;
        models.iter().any(|model| model.waiting > 0 || model.state == ModelState::Launching)
    }
}

/// One page.
struct LiveReader {
    snapshots: watch::Receiver<Snapshot>,
    /// The number of the last snapshot that was sent.
    last_snapshot: Option<u64>,
    timeline: Arc<Timeline>,
    timeline_changes: watch::Receiver<u64>,
    /// The number of the next entry of the timeline.
    next_entry: u64,
    pending: VecDeque<Event>,
}

impl LiveReader {
    fn new(feed: &Arc<LiveFeed>) -> Self {
        let timeline = feed.sources.driver.timeline();
        Self {
            snapshots: feed.subscribe(),
            last_snapshot: None,
            timeline_changes: timeline.changes(),
            timeline,
            next_entry: 0,
            pending: VecDeque::new(),
        }
    }

    /// The next event: first a snapshot, then the entries of the timeline that are kept, then what changes.
    async fn next(&mut self) -> Option<Event> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Some(event);
            }
            if self.last_snapshot.is_none() {
                let first = self.snapshots.wait_for(|snapshot| snapshot.text.is_some()).await.ok()?.clone();
                self.push_snapshot(first);
                self.push_timeline();
                continue;
            }
            tokio::select! {
                changed = self.timeline_changes.changed() => {
                    changed.ok()?;
                    self.push_timeline();
                }
                changed = self.snapshots.changed() => {
                    changed.ok()?;
                    let newest = self.snapshots.borrow_and_update().clone();
                    self.push_snapshot(newest);
                }
            }
        }
    }

    fn push_snapshot(&mut self, Snapshot { number, text }: Snapshot) {
        let Some(text) = text else { return };
        let skipped = self.last_snapshot.map_or(0, |last| number.saturating_sub(last + 1));
        self.push_missed(skipped);
        self.last_snapshot = Some(number);
        self.pending.push_back(Event::default().event("snapshot").data(&*text));
    }

    fn push_timeline(&mut self) {
        let update = self.timeline.since(self.next_entry);
        self.push_missed(update.missed);
        self.next_entry = update.next;
        let entries = update.entries.iter().filter_map(|entry| serde_json::to_string(&**entry).ok());
        self.pending.extend(entries.map(|entry| Event::default().event("timeline").data(entry)));
    }

    fn push_missed(&mut self, count: u64) {
        if count > 0 {
            self.pending.push_back(Event::default().event("missed").data(count.to_string()));
        }
    }
}

#[cfg(test)]
mod tests;
