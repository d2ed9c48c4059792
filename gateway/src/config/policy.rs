//! Policy and limits: queue, turns, eviction, streams, timeouts, limits, shutdown.

use rouse::{
    model::{
        Eviction, OnDeadline, OwnQueue, Protect, Queue, QueuePolicy, Settings, Timeouts as Transitions, Turns,
    },
    units::{Bytes, Millis},
};

use super::{
    Affinity, Limits, Shutdown, Stream, Timeouts,
    reader::{Reader, Section},
    tree::Node,
};

/// The decisions' own policy. Its `timeouts` are the defaults: [`timeouts`] reads them.
pub(super) fn settings(reader: &mut Reader, root: &mut Section, host: Bytes) -> Settings {
    let default = Settings::default();
    let host_memory = root
        .sub(reader, "host", |reader, section| section.read(reader, "sleepMemory", Reader::memory))
        .unwrap_or(host);
    let queue = root.sub(reader, "queue", |reader, section| queue(reader, section, default.queue));
    let turns = root.sub(reader, "turns", |reader, section| turns(reader, section, default.turns));
    let eviction = eviction(reader, root).unwrap_or(default.eviction);
    Settings { host_memory, queue, turns, eviction, timeouts: default.timeouts }
}

/// Of all models, or of the one whose section this is.
pub(super) fn eviction(reader: &mut Reader, section: &mut Section) -> Option<Eviction> {
    section.read(reader, "eviction", |reader, node| {
        reader.choice(
            node,
            &[
                ("residency", Eviction::Residency),
                ("cooldown", Eviction::Cooldown),
                ("never", Eviction::Never),
            ],
        )
    })
}

fn queue(reader: &mut Reader, section: &mut Section, default: Queue) -> Queue {
    let said = own_queue(reader, section);
    Queue {
        policy: said.policy.unwrap_or(default.policy),
        max_waiting: said.max_waiting.unwrap_or(default.max_waiting),
        max_wait: said.max_wait.unwrap_or(default.max_wait),
    }
}

/// What a `queue` says, and nothing in place of what it leaves out.
pub(super) fn own_queue(reader: &mut Reader, section: &mut Section) -> OwnQueue {
    OwnQueue {
        policy: section.read(reader, "policy", |reader, node| {
            reader.choice(node, &[("wait", QueuePolicy::Wait), ("reject", QueuePolicy::Reject)])
        }),
        max_waiting: section.read(reader, "maxWaiting", Reader::number),
        max_wait: section.read(reader, "maxWait", Reader::positive_span),
    }
}

fn turns(reader: &mut Reader, section: &mut Section, default: Turns) -> Turns {
    let protect = section.read(reader, "protect", |reader, node| {
        reader.choice(
            node,
            &[("expected", Protect::Expected), ("always", Protect::Always), ("never", Protect::Never)],
        )
    });
    let protect = protect.unwrap_or(default.protect);
    let residency = section.read(reader, "residency", Reader::span);
    let max_turn = section
        .read(reader, "maxTurn", |reader, node| {
            let max_turn = reader.positive_span(node)?;
            if let Some(residency) = residency.filter(|residency| max_turn < *residency) {
                reader
                    .note(node.at, format_args!("{max_turn} is shorter than turns.residency ({residency})"));
            }
            Some(max_turn)
        })
        .unwrap_or_else(|| default.max_turn.max(residency.unwrap_or_default()));
    let residency = residency.unwrap_or_else(|| default.residency.min(max_turn));
    let (drain_deadline, on_deadline) = section.sub(reader, "drain", |reader, drain| {
        let deadline = drain.read(reader, "deadline", Reader::span);
        let then = drain.read(reader, "onDeadline", |reader, node| {
            reader.choice(node, &[("wait", OnDeadline::Wait), ("cut", OnDeadline::Cut)])
        });
        (deadline.unwrap_or(default.drain_deadline), then.unwrap_or(default.on_deadline))
    });
    Turns { protect, residency, max_turn, drain_deadline, on_deadline }
}

pub(super) fn stream(reader: &mut Reader, root: &mut Section) -> Stream {
    root.sub(reader, "stream", |reader, section| {
        let grace = section.read(reader, "grace", Reader::span);
        let heartbeat = section.read(reader, "heartbeat", Reader::positive_span);
        let events = section.read(reader, "responsesHeartbeat", |reader, node| {
            reader.choice(node, &[("comment", false), ("event", true)])
        });
        let take_over = section.read(reader, "takeOver", Reader::flag);
        Stream {
            grace: grace.unwrap_or(Millis::secs(2)),
            heartbeat: heartbeat.unwrap_or(Millis::secs(10)),
            responses_events: events.unwrap_or(false),
            take_over: take_over.unwrap_or(true),
        }
    })
}

pub(super) fn affinity(reader: &mut Reader, root: &mut Section) -> Affinity {
    root.sub(reader, "routing", |reader, section| {
        section.read(reader, "affinity", |reader, node| {
            reader.choice(
                node,
                &[("prefix", Affinity::Prefix), ("session", Affinity::Session), ("none", Affinity::None)],
            )
        })
    })
    .unwrap_or_default()
}

/// Deadlines of exchanges and probes, and those of an engine's transitions.
pub(super) fn timeouts(reader: &mut Reader, root: &mut Section) -> (Timeouts, Transitions) {
    root.sub(reader, "timeouts", |reader, section| {
        let mut span = |reader: &mut Reader, key, default| {
            section.read(reader, key, Reader::positive_span).unwrap_or(default)
        };
        let default = Settings::default().timeouts;
        let first_byte = span(reader, "firstByte", default.first_byte);
        let transitions = Transitions {
            progress: span(reader, "progress", default.progress),
            sleep: span(reader, "sleep", default.sleep),
            wake: span(reader, "wake", default.wake),
            stop_grace: span(reader, "stop", default.stop_grace),
            settle: span(reader, "settle", default.settle),
            first_byte,
        };
        let connect = span(reader, "connect", Millis::secs(2));
        let non_stream = span(reader, "nonStream", Millis::secs(600));
        let idle = span(reader, "idle", Millis::secs(300));
        let (health_every, health_timeout) = section.sub(reader, "health", |reader, health| {
            let every = health.read(reader, "every", Reader::positive_span);
            let timeout = health.read(reader, "timeout", Reader::positive_span);
            (every.unwrap_or(Millis::secs(2)), timeout.unwrap_or(Millis::secs(2)))
        });
        let exchange = Timeouts { connect, first_byte, non_stream, idle, health_every, health_timeout };
        (exchange, transitions)
    })
}

pub(super) fn limits(reader: &mut Reader, root: &mut Section, memory: Bytes) -> Limits {
    root.sub(reader, "limits", |reader, section| {
        let body = section.read(reader, "body", Reader::size).unwrap_or(Bytes::mib(256));
        // A machine so small that one body exceeds its share still takes one.
        let auto = Bytes::gib(2).min(Bytes(memory.0 / 8)).max(body);
        let body_total = section
            .read(reader, "bodyTotal", |reader, node| body_total(reader, node, body, auto))
            .unwrap_or(auto);
        let mut span = |reader: &mut Reader, key, default| {
            section.read(reader, key, Reader::positive_span).unwrap_or(default)
        };
        let header_read = span(reader, "headerRead", Millis::secs(10));
        let connection_idle = span(reader, "connectionIdle", Millis::secs(75));
        let client_stall = span(reader, "clientStall", Millis::secs(60));
        Limits {
            body,
            body_total,
            body_rate: section.read(reader, "bodyRate", rate).unwrap_or(Bytes(1024)),
            header: section.read(reader, "header", header).unwrap_or(Bytes(64 << 10)),
            header_read,
            connection_idle,
            connections_per_address: section
                .read(reader, "connectionsPerAddress", Reader::number)
                .unwrap_or(1024),
            offences_per_address: section.read(reader, "offencesPerAddress", Reader::number).unwrap_or(1000),
            client_stall,
        }
    })
}

fn body_total(reader: &mut Reader, node: &Node, body: Bytes, auto: Bytes) -> Option<Bytes> {
    let text = reader.text(node)?;
    if text == "auto" {
        return Some(auto);
    }
    let total = reader.size(node)?;
    if total < body {
        reader.note(
            node.at,
            format_args!(
                "{total} is less than limits.body ({body}): a body of that size could never be taken"
            ),
        );
    }
    Some(total)
}

/// A size per second: `1KiB/s`. The `/s` may be left out.
fn rate(reader: &mut Reader, node: &Node) -> Option<Bytes> {
    let text = reader.text(node)?;
    let size = text.strip_suffix("/s").unwrap_or(&text).trim();
    match size.parse() {
        Ok(rate) => Some(rate),
        Err(_) => {
            reader
                .note(node.at, format_args!("'{text}' is not a rate: write a size per second, like 1KiB/s"));
            None
        }
    }
}

fn header(reader: &mut Reader, node: &Node) -> Option<Bytes> {
    let size = reader.size(node)?;
    // hyper's floor, and more than any proxy lets through.
    if size < Bytes(8 << 10) || size > Bytes::mib(1) {
        reader.note(node.at, format_args!("{size} is not between 8Ki and 1Mi"));
        return None;
    }
    Some(size)
}

/// `pod`: it is one's process, which Kubernetes kills half a minute after SIGTERM where its Pod says nothing else.
pub(super) fn shutdown(reader: &mut Reader, root: &mut Section, pod: bool) -> Shutdown {
    let usual_grace = Millis::secs(if pod { 20 } else { 30 });
    root.sub(reader, "shutdown", |reader, section| {
        let grace = section.read(reader, "grace", Reader::span);
        let stop = section
            .read(reader, "engines", |reader, node| reader.choice(node, &[("stop", true), ("leave", false)]));
        Shutdown { grace, usual_grace, stop_engines: stop.unwrap_or(true) }
    })
}
