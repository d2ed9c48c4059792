//! Records Events on models and on Pods of dual pods.
//!
//! A task of its own writes them, and no caller waits for it: Events that do not fit or cannot be written are dropped.
//! A repetition within minutes counts in the existing Event, which is written at most once a minute, so that a storm of
//! refusals causes no storm of writes.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{Api, Client};
use tokio::{
    sync::mpsc,
    time::{self, Duration, Instant},
};

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
/// Pause between writes.
///
/// Without it the Events of a hundred new Pods would keep the API server from serving those Pods.
const WRITE_INTERVAL: Duration = Duration::from_millis(50);
const CONTROLLER: &str = "rouse.dev/gateway";
/// Maximum length of a note, in bytes, that an API server accepts.
const MAX_NOTE_BYTES: usize = 1024;
/// Maximum length of the object's name in an Event's name, which also has the reason and the time.
const MAX_NAME_CHARS: usize = 200;

/// The kind of object that an Event is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegardingKind {
    Model,
    Pod,
}

/// A request to record an Event on an object.
#[derive(Clone, Debug)]
pub struct EventRequest {
    pub regarding: RegardingKind,
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
        loop {
            let due = self.aggregator.due.first().map(|(at, _)| next.max(*at));
            let sleep = async {
                match due {
                    Some(at) => time::sleep_until(at).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                request = self.requests.recv() => match request {
                    Some(notice) => self.aggregator.note(notice, Instant::now(), Timestamp::now()),
                    None => return,
                },
                () = sleep => {
                    if let Some(event) = self.aggregator.next(Instant::now(), &self.instance) {
                        self.write(event).await;
                        next = Instant::now() + WRITE_INTERVAL;
                    }
                }
            }
        }
    }

    async fn write(&self, event: Event) {
        let namespace = event.metadata.namespace.clone().unwrap_or_default();
        let name = event.metadata.name.clone().unwrap_or_default();
        let api: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        let Ok(object) = serde_json::to_value(&event) else { return };
        match self.writer.apply(&api, &name, &object).await {
            Ok(_) | Err(Error::NotLeading) => {}
            Err(error) => tracing::debug!(name, %error, "Event write failed"),
        }
    }
}

/// The object's uid, the reason, and the note if it is part of the key.
type EventKey = (String, EventReason, Option<String>);

/// Aggregates requests and schedules their writes.
#[derive(Debug, Default)]
struct EventAggregator {
    series: BTreeMap<EventKey, AggregatedEvent>,
    due: BTreeSet<(Instant, EventKey)>,
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
                self.due.insert((due, key));
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
        };
        if self.series.get(&key).is_none_or(|before| !before.queued) {
            self.due.insert((now, key.clone()));
        }
        self.series.insert(key, series);
    }

    /// Takes the next Event that is due.
    fn next(&mut self, now: Instant, instance: &str) -> Option<Event> {
        if self.due.first()?.0 > now {
            return None;
        }
        let (_, key) = self.due.pop_first()?;
        let series = self.series.get_mut(&key)?;
        (series.queued, series.written) = (false, Some(now));
        Some(series.event(instance))
    }
}

impl RegardingKind {
    /// Returns apiVersion and kind of the object.
    const fn api_version_and_kind(self) -> (&'static str, &'static str) {
        match self {
            Self::Model => ("rouse.dev/v1alpha1", "InferenceModel"),
            Self::Pod => ("v1", "Pod"),
        }
    }
}

impl AggregatedEvent {
    fn event(&self, instance: &str) -> Event {
        let EventRequest { regarding, object, uid, content } = &self.request;
        let text = |text: &str| Some(text.to_owned());
        let head: String = object.name.chars().take(MAX_NAME_CHARS).collect();
        let word = content.reason.as_str();
        let (version, kind) = regarding.api_version_and_kind();
        let series = EventSeries { count: self.count, last_observed_time: MicroTime(self.last) };
        Event {
            metadata: ObjectMeta {
                namespace: Some(object.namespace.clone()),
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
                namespace: Some(object.namespace.clone()),
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
mod tests {
    use super::*;

    fn notice(object: &str, note: &str) -> EventRequest {
        let news = EventReason::InsufficientMemory.with_note(note);
        let regarding = RegardingKind::Model;
        EventRequest {
            regarding,
            object: ObjectName::new("chat", object),
            uid: format!("uid-{object}"),
            content: news,
        }
    }

    fn at(seconds: u64) -> Timestamp {
        Timestamp::from_second(1_795_000_000 + i64::try_from(seconds).unwrap()).unwrap()
    }

    #[test]
    fn a_storm_is_one_event_that_is_written_once_in_a_minute() {
        let (mut book, started) = (EventAggregator::default(), Instant::now());
        let mut written = Vec::new();
        // A hundred requests a second for five minutes.
        for second in 0..300 {
            let now = started + Duration::from_secs(second);
            for n in 0..100 {
                book.note(notice("large", &format!("refusal {n} of {second}")), now, at(second));
            }
            written.extend(std::iter::from_fn(|| book.next(now, "gateway-0")));
        }
        assert_eq!(written.len(), 5);
        let names: BTreeSet<_> = written.iter().map(|event| event.metadata.name.clone()).collect();
        assert_eq!(names.len(), 1, "one Event");
        let notes: BTreeSet<_> = written.iter().map(|event| event.note.clone().unwrap()).collect();
        assert_eq!(notes.into_iter().collect::<Vec<_>>(), ["refusal 0 of 0"], "an Event keeps its note");
        let series = written[4].series.as_ref().unwrap();
        assert_eq!((series.count, series.last_observed_time.0), (24_100, at(240)));
        // Repetitions after the last write are written one minute after it.
        let last = started + Duration::from_secs(300);
        assert_eq!(book.due.first().unwrap().0, last);
        assert_eq!(book.next(last, "gateway-0").unwrap().series.unwrap().count, 30_000);
        assert!(book.due.is_empty());
    }

    #[test]
    fn what_happens_again_much_later_is_another_event() {
        let (mut book, started) = (EventAggregator::default(), Instant::now());
        book.note(notice("a", "first"), started, at(0));
        let first = book.next(started, "gateway-0").unwrap();
        assert_eq!((first.series.as_ref(), first.note.as_deref()), (None, Some("first")));
        let later = started + SERIES_TIMEOUT;
        book.note(notice("a", "second"), later, at(360));
        let second = book.next(later, "gateway-0").unwrap();
        assert_eq!((second.series.as_ref(), second.note.as_deref()), (None, Some("second")));
        assert_ne!(first.metadata.name, second.metadata.name);
    }

    #[test]
    fn an_event_names_its_object_and_who_told_of_it() {
        let (mut book, now) = (EventAggregator::default(), Instant::now());
        let long = "ä".repeat(MAX_NOTE_BYTES);
        book.note(notice("large", &long), now, at(0));
        let event = book.next(now, "gateway-0").unwrap();
        let regarding = event.regarding.unwrap();
        assert_eq!(
            (regarding.kind.as_deref(), regarding.uid.as_deref()),
            (Some("InferenceModel"), Some("uid-large"))
        );
        assert_eq!((event.type_.as_deref(), event.action.as_deref()), (Some("Warning"), Some("Start")));
        assert_eq!(event.reporting_instance.as_deref(), Some("gateway-0"));
        assert_eq!(event.note.unwrap().len(), MAX_NOTE_BYTES);
    }

    #[test]
    fn why_a_pod_waits_is_told_again_where_it_is_another_reason() {
        let (mut book, started) = (EventAggregator::default(), Instant::now());
        let waits = |note: &str| {
            let news = EventReason::Waiting.with_note(note);
            EventRequest { regarding: RegardingKind::Pod, content: news, ..notice("chat-x", "") }
        };
        for (second, note) in (0..).zip(["its engine is loading", "no memory", "its engine is loading"]) {
            book.note(waits(note), started + Duration::from_secs(second), at(second));
        }
        let later = started + MIN_REWRITE_INTERVAL;
        let told: Vec<_> = std::iter::from_fn(|| book.next(later, "gateway-0")).collect();
        let notes: Vec<_> = told.iter().filter_map(|event| event.note.as_deref()).collect();
        assert_eq!(notes, ["its engine is loading", "no memory"]);
        let names: BTreeSet<_> = told.iter().map(|event| event.metadata.name.clone()).collect();
        assert_eq!(names.len(), 2);
        let regarding = told[0].regarding.clone().unwrap();
        assert_eq!((regarding.api_version.as_deref(), regarding.kind.as_deref()), (Some("v1"), Some("Pod")));
    }

    #[test]
    fn there_are_never_more_than_are_kept() {
        let (mut book, now) = (EventAggregator::default(), Instant::now());
        for n in 0..MAX_SERIES + 100 {
            book.note(notice(&format!("model-{n}"), "full"), now, at(0));
        }
        assert_eq!((book.series.len(), book.due.len()), (MAX_SERIES, MAX_SERIES));
        assert_eq!(std::iter::from_fn(|| book.next(now, "gateway-0")).count(), MAX_SERIES);
        let later = now + SERIES_TIMEOUT;
        book.note(notice("another", "full"), later, at(360));
        assert_eq!(book.series.len(), 1, "what has ended makes room");
    }
}
