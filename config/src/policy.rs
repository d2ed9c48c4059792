//! Reads policy and limits: queue, turns, eviction, streams, timeouts, limits, shutdown.

use rouse::{
    model::{
        DrainDeadlinePolicy, EngineTimeouts as Transitions, EvictionPolicy, FleetSettings, ProtectionPolicy,
        QueueOverrides, QueuePolicy, QueueSettings, ScaleUpEviction, TurnSettings,
    },
    units::{Bytes, Millis},
};

use super::{
    AffinityPolicy, ApiLimits, RequestTimeouts, ShutdownConfig, StreamConfig,
    reader::{ConfigReader, ConfigSection},
    yaml::YamlNode,
};

/// Reads the fleet's policy. Its `timeouts` are the defaults; [`timeouts`] reads those.
pub(super) fn settings(reader: &mut ConfigReader, root: &mut ConfigSection, host: Bytes) -> FleetSettings {
    let default = FleetSettings::default();
    let host_memory = root
        .sub(reader, "host", |reader, section| section.read(reader, "sleepMemory", ConfigReader::memory))
        .unwrap_or(host);
    let queue = root.sub(reader, "queue", |reader, section| queue(reader, section, default.queue));
    let turns = root.sub(reader, "turns", |reader, section| turns(reader, section, default.turns));
    let eviction = eviction(reader, root).unwrap_or(default.eviction);
    FleetSettings { host_memory, queue, turns, eviction, timeouts: default.timeouts }
}

/// Reads the policy of all models, or of the model whose section this is.
pub(super) fn eviction(reader: &mut ConfigReader, section: &mut ConfigSection) -> Option<EvictionPolicy> {
    section.read(reader, "eviction", |reader, node| {
        reader.choice(
            node,
            &[
                ("residency", EvictionPolicy::Residency),
                ("cooldown", EvictionPolicy::Cooldown),
                ("never", EvictionPolicy::Never),
            ],
        )
    })
}

fn queue(reader: &mut ConfigReader, section: &mut ConfigSection, default: QueueSettings) -> QueueSettings {
    let overrides = read_queue_overrides(reader, section);
    QueueSettings {
        policy: overrides.policy.unwrap_or(default.policy),
        max_waiting: overrides.max_waiting.unwrap_or(default.max_waiting),
        max_wait: overrides.max_wait.unwrap_or(default.max_wait),
    }
}

/// Reads a `queue` without filling in defaults.
pub(super) fn read_queue_overrides(reader: &mut ConfigReader, section: &mut ConfigSection) -> QueueOverrides {
    QueueOverrides {
        policy: section.read(reader, "policy", |reader, node| {
            reader.choice(node, &[("wait", QueuePolicy::Wait), ("reject", QueuePolicy::Reject)])
        }),
        max_waiting: section.read(reader, "maxWaiting", ConfigReader::number),
        max_wait: section.read(reader, "maxWait", ConfigReader::positive_duration),
    }
}

/// Reads a model's `saturation.mayEvict`.
pub(super) fn scale_up_eviction(reader: &mut ConfigReader, section: &mut ConfigSection) -> ScaleUpEviction {
    let may_evict = section.read(reader, "mayEvict", |reader, node| {
        reader.choice(node, &[("idle", ScaleUpEviction::Idle), ("never", ScaleUpEviction::Never)])
    });
    may_evict.unwrap_or_default()
}

fn turns(reader: &mut ConfigReader, section: &mut ConfigSection, default: TurnSettings) -> TurnSettings {
    let protect = section.read(reader, "protect", |reader, node| {
        reader.choice(
            node,
            &[
                ("expected", ProtectionPolicy::Expected),
                ("always", ProtectionPolicy::Always),
                ("never", ProtectionPolicy::Never),
            ],
        )
    });
    let protect = protect.unwrap_or(default.protection);
    let residency = section.read(reader, "residency", ConfigReader::duration);
    let max_turn = section
        .read(reader, "maxTurn", |reader, node| {
            let max_turn = reader.positive_duration(node)?;
            if let Some(residency) = residency.filter(|residency| max_turn < *residency) {
                reader
                    .note(node.at, format_args!("{max_turn} is shorter than turns.residency ({residency})"));
            }
            Some(max_turn)
        })
        .unwrap_or_else(|| default.max_turn.max(residency.unwrap_or_default()));
    let residency = residency.unwrap_or_else(|| default.residency.min(max_turn));
    let (drain_deadline, on_deadline) = section.sub(reader, "drain", |reader, drain| {
        let deadline = drain.read(reader, "deadline", ConfigReader::duration);
        let on_deadline = drain.read(reader, "onDeadline", |reader, node| {
            reader.choice(node, &[("wait", DrainDeadlinePolicy::Wait), ("cut", DrainDeadlinePolicy::Cut)])
        });
        (deadline.unwrap_or(default.drain_deadline), on_deadline.unwrap_or(default.on_deadline))
    });
    TurnSettings { protection: protect, residency, max_turn, drain_deadline, on_deadline }
}

pub(super) fn stream(reader: &mut ConfigReader, root: &mut ConfigSection) -> StreamConfig {
    root.sub(reader, "stream", |reader, section| {
        let grace = section.read(reader, "grace", ConfigReader::duration);
        let heartbeat = section.read(reader, "heartbeat", ConfigReader::positive_duration);
        let events = section.read(reader, "responsesHeartbeat", |reader, node| {
            reader.choice(node, &[("comment", false), ("event", true)])
        });
        section.refuse_removed(
            reader,
            "takeOver",
            "the gateway now serves every HTTP/1.1 connection as 'true' did, so delete the key",
        );
        StreamConfig {
            grace: grace.unwrap_or(Millis::secs(2)),
            heartbeat: heartbeat.unwrap_or(Millis::secs(10)),
            responses_heartbeat_events: events.unwrap_or(false),
        }
    })
}

pub(super) fn affinity(reader: &mut ConfigReader, root: &mut ConfigSection) -> AffinityPolicy {
    root.sub(reader, "routing", |reader, section| {
        section.read(reader, "affinity", |reader, node| {
            reader.choice(
                node,
                &[
                    ("prefix", AffinityPolicy::Prefix),
                    ("session", AffinityPolicy::Session),
                    ("none", AffinityPolicy::None),
                ],
            )
        })
    })
    .unwrap_or_default()
}

/// Reads the timeouts of exchanges and probes, and those of an engine's transitions.
pub(super) fn timeouts(
    reader: &mut ConfigReader,
    root: &mut ConfigSection,
) -> (RequestTimeouts, Transitions) {
    root.sub(reader, "timeouts", |reader, section| {
        let mut span = |reader: &mut ConfigReader, key, default| {
            section.read(reader, key, ConfigReader::positive_duration).unwrap_or(default)
        };
        let default = FleetSettings::default().timeouts;
        let first_byte = span(reader, "firstByte", default.first_byte);
        let transitions = Transitions {
            progress: span(reader, "progress", default.progress),
            sleep: span(reader, "sleep", default.sleep),
            wake: span(reader, "wake", default.wake),
            stop_grace: span(reader, "stop", default.stop_grace),
            meter_lag: span(reader, "meterLag", default.meter_lag),
            first_byte,
        };
        let connect = span(reader, "connect", Millis::secs(2));
        let non_stream = span(reader, "nonStream", Millis::secs(600));
        let idle = span(reader, "idle", Millis::secs(300));
        let (health_every, health_timeout) = section.sub(reader, "health", |reader, health| {
            let every = health.read(reader, "every", ConfigReader::positive_duration);
            let timeout = health.read(reader, "timeout", ConfigReader::positive_duration);
            (every.unwrap_or(Millis::secs(2)), timeout.unwrap_or(Millis::secs(2)))
        });
        let exchange =
            RequestTimeouts { connect, first_byte, non_stream, idle, health_every, health_timeout };
        (exchange, transitions)
    })
}

pub(super) fn limits(reader: &mut ConfigReader, root: &mut ConfigSection, memory: Bytes) -> ApiLimits {
    root.sub(reader, "limits", |reader, section| {
        let body = section.read(reader, "body", ConfigReader::size).unwrap_or(Bytes::mib(256));
        // On a machine so small that one body exceeds its share, one body still fits.
        let auto = Bytes::gib(2).min(Bytes(memory.0 / 8)).max(body);
        let body_total = section
            .read(reader, "bodyTotal", |reader, node| body_total(reader, node, body, auto))
            .unwrap_or(auto);
        let mut span = |reader: &mut ConfigReader, key, default| {
            section.read(reader, key, ConfigReader::positive_duration).unwrap_or(default)
        };
        let header_read = span(reader, "headerRead", Millis::secs(10));
        let connection_idle = span(reader, "connectionIdle", Millis::secs(75));
        let client_stall = span(reader, "clientStall", Millis::secs(60));
        ApiLimits {
            body,
            body_total,
            body_rate: section.read(reader, "bodyRate", rate).unwrap_or(Bytes(1024)),
            header: section.read(reader, "header", header).unwrap_or(Bytes(64 << 10)),
            header_read,
            connection_idle,
            connections_per_address: section
                .read(reader, "connectionsPerAddress", ConfigReader::number)
                .unwrap_or(1024),
            offences_per_address: section
                .read(reader, "offencesPerAddress", ConfigReader::number)
                .unwrap_or(1000),
            client_stall,
        }
    })
}

fn body_total(reader: &mut ConfigReader, node: &YamlNode, body: Bytes, auto: Bytes) -> Option<Bytes> {
    let text = reader.text(node)?;
    if text == "auto" {
        return Some(auto);
    }
    let total = reader.size(node)?;
    if total < body {
        reader.note(
            node.at,
            format_args!(
                "{total} is less than limits.body ({body}): no body of that size would ever be accepted"
            ),
        );
    }
    Some(total)
}

/// Reads a size per second, like `1KiB/s`. The `/s` is optional.
fn rate(reader: &mut ConfigReader, node: &YamlNode) -> Option<Bytes> {
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

fn header(reader: &mut ConfigReader, node: &YamlNode) -> Option<Bytes> {
    let size = reader.size(node)?;
    // The lower bound is hyper's minimum; the upper one is more than any proxy lets through.
    if size < Bytes(8 << 10) || size > Bytes::mib(1) {
        reader.note(node.at, format_args!("{size} is not between 8Ki and 1Mi"));
        return None;
    }
    Some(size)
}

/// Reads `shutdown`.
///
/// In a `pod`, Kubernetes kills the process 30 seconds after SIGTERM by default, so the default grace is shorter.
pub(super) fn shutdown(reader: &mut ConfigReader, root: &mut ConfigSection, pod: bool) -> ShutdownConfig {
    let usual_grace = Millis::secs(if pod { 20 } else { 30 });
    root.sub(reader, "shutdown", |reader, section| {
        let grace = section.read(reader, "grace", ConfigReader::duration);
        let stop = section
            .read(reader, "engines", |reader, node| reader.choice(node, &[("stop", true), ("leave", false)]));
        ShutdownConfig { grace, default_grace: usual_grace, stop_engines: stop.unwrap_or(true) }
    })
}
