//! Records Events on models, on Warmups, on DeviceInstances and on Pods.
//!
//! A task of its own writes them, and no caller waits for it. Events that do not fit are dropped. A write that fails is
//! repeated a few times: the API server may be busy, and the renewal of the Lease late. A repetition within minutes
//! counts in the existing Event, which is written at most once a minute, so that a storm of refusals causes no storm of
//! writes. Warnings do not wait behind the thousands of Events of a start (`due_events`).
//!
//! The client library's recorder cannot take this over: it counts writes instead of occurrences, counts an Event with
//! another note as a repetition, and makes a second Event when a write is repeated
//! (`docs/adr/0011-events-recorder.md`).

mod due_events;

use std::collections::BTreeMap;

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Client};
use rouse_net::timer::sleep_until_some;
use tokio::{
    sync::mpsc,
    time::{Duration, Instant},
};

use self::due_events::DueEvents;
use super::{
    crd::ledger::ObjectName,
    event_content::{EventContent, EventReason},
    writer::{Error, ObjectWriter},
};

/// Capacity of the channel to the task, which drains it before each write.
const CHANNEL_CAPACITY: usize = 1024;
/// Maximum number of Events that wait to be written or repeated.
const MAX_SERIES: usize = 8192;
/// Time without repetition after which the next one starts a new Event.
const SERIES_TIMEOUT: Duration = Duration::from_secs(6 * 60);
/// Minimum interval between two writes of one Event.
const MIN_REWRITE_INTERVAL: Duration = Duration::from_secs(60);
/// Pause between writes, once a burst of [`BURST`] is used up.
///
/// Events then take at most half of the 20 writes a second that a leader may make, even after thousands of engines have
/// started.
const WRITE_INTERVAL: Duration = Duration::from_millis(100);
/// Pause between the writes of a burst: thousands of new models get their Events soon.
///
/// Without a pause the Events of a hundred new Pods would keep the API server from serving those Pods.
const BURST_INTERVAL: Duration = Duration::from_millis(50);
/// Number of writes in a burst. Each pause that is left out earns one again.
const BURST: u32 = 2000;
const CONTROLLER: &str = "rouse.dev/gateway";
/// Namespace of Events on objects that have none.
const CLUSTER_NAMESPACE: &str = "default";
/// Maximum number of tries to write an Event, and the pause after the first one, which doubles with each.
const MAX_TRIES: u32 = 5;
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Maximum length of a note, in bytes, that an API server accepts.
const MAX_NOTE_BYTES: usize = 1024;
/// Maximum length of the object's name in an Event's name, which also has the reason and the time.
const MAX_NAME_CHARS: usize = 200;

/// The kind of object that an Event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegardingKind {
    Model,
    Pod,
    Warmup,
    DeviceInstance,
}

/// A request to record an Event on an object.
#[derive(Clone, Debug)]
pub struct EventRequest {
    pub regarding: RegardingKind,
    /// Without a namespace for a kind that has none.
    pub object: ObjectName,
    pub uid: String,
    pub content: EventContent,
}

/// Sends requests to the recorder's task.
#[derive(Clone, Debug)]
pub struct EventSender(mpsc::Sender<EventRequest>);

/// The task that writes Events.
pub struct EventRecorder {
    client: Client,
    writer: ObjectWriter,
    /// Name of this gateway.
    instance: String,
    requests: mpsc::Receiver<EventRequest>,
    aggregator: EventAggregator,
}

impl EventSender {
    /// Returns a sender, and what it sends.
    #[cfg(test)]
    pub(crate) fn for_test() -> (Self, mpsc::Receiver<EventRequest>) {
        let (tx, rx) = mpsc::channel(CHANNEL_CAPACITY);
        (Self(tx), rx)
    }

    pub fn send(&self, request: EventRequest) {
        if let Err(error) = self.0.try_send(request) {
            tracing::debug!(%error, "Event dropped");
        }
    }
}

impl EventRecorder {
    #[must_use]
    pub fn new(client: Client, writer: ObjectWriter, instance: String) -> (EventSender, Self) {
        let (tx, rx) = mpsc::channel(CHANNEL_CAPACITY);
        (
            EventSender(tx),
            Self { client, writer, instance, requests: rx, aggregator: EventAggregator::default() },
        )
    }

    /// Runs until all senders are dropped.
    pub async fn run(mut self) {
        let mut next = Instant::now();
        let mut pacer = EventPacer::new(next);
        let paced = !is_unpaced();
        loop {
            let due = self.aggregator.due.next_at().map(|at| next.max(at));
            tokio::select! {
                biased;
                request = self.requests.recv() => match request {
                    Some(notice) => self.aggregator.note(notice, Instant::now(), Timestamp::now()),
                    None => return,
                },
                () = sleep_until_some(due) => {
                    if let Some((key, event)) = self.aggregator.next(Instant::now(), &self.instance) {
                        let written = self.write(event).await;
                        let now = Instant::now();
                        self.aggregator.wrote(key, written, now);
                        next = if paced { now + pacer.pause(now) } else { now };
                    }
                }
            }
        }
    }

    /// Writes an Event. Returns false if a later try may succeed.
    async fn write(&self, event: Event) -> bool {
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let name = event.metadata.name.clone().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let Ok(object) = serde_json::to_value(&event) else { return true };
        let Err(error) = self.writer.apply(&api, &name, &object).await else { return true };
        let retries = match error {
            // The renewal of the Lease may only be late.
            Error::NotLeading => self.writer.may_lead(),
            Error::Timeout | Error::Api(_) => true,
            Error::Conflict | Error::Gone | Error::Invalid(_) => false,
        };
        tracing::debug!(name, %error, retries, "Event write failed");
        !retries
    }
}

/// Whether tests of thousands of Events have them written without pauses. Never in release builds.
fn is_unpaced() -> bool {
    cfg!(debug_assertions) && std::env::var_os("ROUSE_TEST_UNPACED_EVENTS").is_some()
}

/// The pauses between writes of Events.
#[derive(Debug)]
struct EventPacer {
    /// Writes that the burst has left.
    left: u32,
    last_write: Instant,
}

impl EventPacer {
    const fn new(now: Instant) -> Self {
        Self { left: BURST, last_write: now }
    }

    /// Returns the pause after a write at this moment.
    fn pause(&mut self, now: Instant) -> Duration {
        let pauses = now.duration_since(self.last_write).as_millis() / WRITE_INTERVAL.as_millis();
        let earned = u32::try_from(pauses).unwrap_or(BURST).saturating_sub(1);
        self.last_write = now;
        self.left = self.left.saturating_add(earned).min(BURST);
        let Some(left) = self.left.checked_sub(1) else { return WRITE_INTERVAL };
        self.left = left;
        BURST_INTERVAL
    }
}

/// The object's uid, the reason, and the note if it is part of the key.
type EventKey = (String, EventReason, Option<String>);

/// Aggregates requests and schedules their writes.
#[derive(Debug, Default)]
struct EventAggregator {
    series: BTreeMap<EventKey, AggregatedEvent>,
    due: DueEvents,
}

/// One Event and its repetitions.
#[derive(Debug)]
struct AggregatedEvent {
    request: EventRequest,
    first: Timestamp,
    last: Timestamp,
    last_seen: Instant,
    count: i32,
    written: Option<Instant>,
    queued: bool,
    /// Tries of the current write that failed.
    failures: u32,
}

impl EventAggregator {
    fn note(&mut self, request: EventRequest, now: Instant, at: Timestamp) {
        let EventContent { reason, note } = &request.content;
        let key = (request.uid.clone(), *reason, reason.is_keyed_by_note().then(|| note.clone()));
        let goes_on = |series: &&mut AggregatedEvent| series.last_seen + SERIES_TIMEOUT > now;
        if let Some(series) = self.series.get_mut(&key).filter(goes_on) {
            (series.last_seen, series.last) = (now, at);
            series.count = series.count.saturating_add(1);
            if !std::mem::replace(&mut series.queued, true) {
                let due = series.written.map_or(now, |written| now.max(written + MIN_REWRITE_INTERVAL));
                self.due.insert(due, key);
            }
            return;
        }
        if self.series.len() >= MAX_SERIES {
            self.series.retain(|_, series| series.queued || series.last_seen + SERIES_TIMEOUT > now);
        }
        if self.series.len() >= MAX_SERIES {
            return tracing::debug!(object = %request.object, "Event dropped: too many Events are tracked");
        }
        let series = AggregatedEvent {
            request,
            first: at,
            last: at,
            last_seen: now,
            count: 1,
            written: None,
            queued: true,
            failures: 0,
        };
        if self.series.get(&key).is_none_or(|before| !before.queued) {
            self.due.insert(now, key.clone());
        }
        self.series.insert(key, series);
    }

    /// Takes the next Event that is due, with its key.
    fn next(&mut self, now: Instant, instance: &str) -> Option<(EventKey, Event)> {
        let key = self.due.take(now)?;
        let series = self.series.get_mut(&key)?;
        (series.queued, series.written) = (false, Some(now));
        let event = series.event(instance);
        Some((key, event))
    }

    /// Notes the end of a write. A failed one is due again, a limited number of times.
    fn wrote(&mut self, key: EventKey, written: bool, now: Instant) {
        let Some(series) = self.series.get_mut(&key) else { return };
        series.failures = if written { 0 } else { series.failures + 1 };
        if written || series.failures >= MAX_TRIES {
            series.failures = 0;
            return;
        }
        if !std::mem::replace(&mut series.queued, true) {
            let pause = RETRY_PAUSE * 2_u32.pow(series.failures - 1);
            self.due.insert(now + pause, key);
        }
    }
}

impl RegardingKind {
    /// Returns apiVersion and kind of the object.
    const fn api_version_and_kind(self) -> (&'static str, &'static str) {
        match self {
            Self::Model => ("rouse.dev/v1alpha1", "InferenceModel"),
            Self::Pod => ("v1", "Pod"),
            Self::Warmup => ("rouse.dev/v1alpha1", "Warmup"),
            Self::DeviceInstance => ("rouse.dev/v1alpha1", "DeviceInstance"),
        }
    }
}

impl AggregatedEvent {
    fn event(&self, instance: &str) -> Event {
        let EventRequest { regarding, object, uid, content } = &self.request;
        let text = |text: &str| Some(text.to_owned());
        let namespace = Some(object.namespace.clone()).filter(|namespace| !namespace.is_empty());
        let head: String = object.name.chars().take(MAX_NAME_CHARS).collect();
        let word = content.reason.as_str();
        let (version, kind) = regarding.api_version_and_kind();
        let series = EventSeries { count: self.count, last_observed_time: MicroTime(self.last) };
        Event {
            metadata: ObjectMeta {
                namespace: namespace.clone().or_else(|| text(CLUSTER_NAMESPACE)),
                name: Some(format!("{head}.{}.{:x}", word.to_lowercase(), self.first.as_nanosecond())),
                ..ObjectMeta::default()
            },
            event_time: Some(MicroTime(self.first)),
            reporting_controller: text(CONTROLLER),
            reporting_instance: text(instance),
            action: text(content.reason.action()),
            reason: text(word),
            type_: text(content.reason.event_type()),
            note: Some(cut(&content.note)),
            regarding: Some(ObjectReference {
                api_version: text(version),
                kind: text(kind),
                namespace,
                name: Some(object.name.clone()),
                uid: Some(uid.clone()),
                ..ObjectReference::default()
            }),
            series: (self.count > 1).then_some(series),
            ..Event::default()
        }
    }
}

fn cut(note: &str) -> String {
    let mut end = MAX_NOTE_BYTES.min(note.len());
    while !note.is_char_boundary(end) {
        end -= 1;
    }
    note.get(..end).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests;
