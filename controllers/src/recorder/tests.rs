use std::collections::BTreeSet;

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

fn next(book: &mut EventAggregator, now: Instant) -> Option<Event> {
    book.next(now, "gateway-0").map(|(_, event)| event)
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
        written.extend(std::iter::from_fn(|| next(&mut book, now)));
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
    assert_eq!(book.due.next_at().unwrap(), last);
    assert_eq!(next(&mut book, last).unwrap().series.unwrap().count, 30_000);
    assert!(book.due.next_at().is_none());
}

#[test]
fn what_happens_again_much_later_is_another_event() {
    let (mut book, started) = (EventAggregator::default(), Instant::now());
    book.note(notice("a", "first"), started, at(0));
    let first = next(&mut book, started).unwrap();
    assert_eq!((first.series.as_ref(), first.note.as_deref()), (None, Some("first")));
    let later = started + SERIES_TIMEOUT;
    book.note(notice("a", "second"), later, at(360));
    let second = next(&mut book, later).unwrap();
    assert_eq!((second.series.as_ref(), second.note.as_deref()), (None, Some("second")));
    assert_ne!(first.metadata.name, second.metadata.name);
}

#[test]
fn an_event_names_its_object_and_who_told_of_it() {
    let (mut book, now) = (EventAggregator::default(), Instant::now());
    let long = "ä".repeat(MAX_NOTE_BYTES);
    book.note(notice("large", &long), now, at(0));
    let event = next(&mut book, now).unwrap();
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
    let told: Vec<_> = std::iter::from_fn(|| next(&mut book, later)).collect();
    let notes: Vec<_> = told.iter().filter_map(|event| event.note.as_deref()).collect();
    assert_eq!(notes, ["its engine is loading", "no memory"]);
    let names: BTreeSet<_> = told.iter().map(|event| event.metadata.name.clone()).collect();
    assert_eq!(names.len(), 2);
    let regarding = told[0].regarding.clone().unwrap();
    assert_eq!((regarding.api_version.as_deref(), regarding.kind.as_deref()), (Some("v1"), Some("Pod")));
}

#[test]
fn an_event_on_an_object_without_a_namespace_is_in_the_default_one() {
    let (mut book, now) = (EventAggregator::default(), Instant::now());
    let object = ObjectName::new("", "gpu-0123456789");
    let content = EventReason::NodeLost.with_note("the node a is gone");
    let regarding = RegardingKind::DeviceInstance;
    book.note(EventRequest { regarding, object, uid: "u".to_owned(), content }, now, at(0));
    let event = next(&mut book, now).unwrap();
    assert_eq!(event.metadata.namespace.as_deref(), Some("default"));
    let regarding = event.regarding.unwrap();
    assert_eq!((regarding.namespace, regarding.kind.as_deref()), (None, Some("DeviceInstance")));
}

#[test]
fn there_are_never_more_than_are_kept() {
    let (mut book, now) = (EventAggregator::default(), Instant::now());
    for n in 0..MAX_SERIES + 100 {
        book.note(notice(&format!("model-{n}"), "full"), now, at(0));
    }
    assert_eq!(book.series.len(), MAX_SERIES);
    assert_eq!(std::iter::from_fn(|| next(&mut book, now)).count(), MAX_SERIES);
    assert_eq!(book.due.next_at(), None, "an Event that was dropped is not due");
    let later = now + SERIES_TIMEOUT;
    book.note(notice("another", "full"), later, at(360));
    assert_eq!(book.series.len(), 1, "what has ended makes room");
}

#[test]
fn a_failed_write_is_repeated_with_pauses_and_then_given_up() {
    let (mut book, started) = (EventAggregator::default(), Instant::now());
    book.note(notice("a", "full"), started, at(0));
    let mut now = started;
    for pause in [1, 2, 4, 8] {
        let (key, event) = book.next(now, "gateway-0").unwrap();
        assert_eq!(event.note.as_deref(), Some("full"));
        book.wrote(key, false, now);
        let due = now + Duration::from_secs(pause);
        assert_eq!(book.due.next_at().unwrap(), due);
        assert!(next(&mut book, now).is_none());
        now = due;
    }
    let (key, _) = book.next(now, "gateway-0").unwrap();
    book.wrote(key, false, now);
    assert!(book.due.next_at().is_none(), "five tries");

    // A repetition a minute later begins anew, and a success ends the tries.
    now += MIN_REWRITE_INTERVAL;
    book.note(notice("a", "full"), now, at(80));
    let (key, event) = book.next(now, "gateway-0").unwrap();
    assert_eq!(event.series.unwrap().count, 2);
    book.wrote(key, true, now);
    assert!(book.due.next_at().is_none());
}

#[test]
fn a_burst_of_events_ends_and_is_earned_again_by_pauses() {
    let begun = Instant::now();
    let (mut pacer, mut at) = (EventPacer::new(begun), begun);
    let mut write = |pacer: &mut EventPacer, more: Duration| {
        at += more;
        let pause = pacer.pause(at);
        at += pause;
        pause
    };
    for _ in 0..BURST {
        assert_eq!(write(&mut pacer, Duration::ZERO), BURST_INTERVAL);
    }
    for _ in 0..10 {
        assert_eq!(write(&mut pacer, Duration::ZERO), WRITE_INTERVAL, "ten a second, however long it lasts");
    }
    let rest = WRITE_INTERVAL * 3;
    assert_eq!(write(&mut pacer, rest), BURST_INTERVAL);
    let pauses: Vec<Duration> = (0..4).map(|_| write(&mut pacer, Duration::ZERO)).collect();
    assert_eq!(pauses, [BURST_INTERVAL, BURST_INTERVAL, WRITE_INTERVAL, WRITE_INTERVAL]);
}
