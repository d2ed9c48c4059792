//! The details of a 422, 429 or 503: how the wait went, where in the queue it ended, and which models hold the memory.
//! Programs read them to decide, and people to find the responsible team.

use serde::Serialize;

use super::{BlockingModel, Fault, MemoryShortage, Millis, status, wait};
use rouse::fault::{FailureCause, RateLimitUsage};

#[derive(Serialize)]
pub(super) struct FaultDetails<'a> {
    waited_for: &'a str,
    waited: String,
    queue_position: u32,
    holders: Vec<MemoryHolder<'a>>,
    /// Number of engines that hold memory, too, and are listed neither here nor as `blocking`.
    #[serde(skip_serializing_if = "Option::is_none")]
    unlisted_holders: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cause: Option<String>,
    #[serde(flatten)]
    memory: Option<MemoryDetails<'a>>,
    #[serde(flatten)]
    rate: Option<RateLimitDetails>,
}

#[derive(Serialize)]
struct RateLimitDetails {
    unit: &'static str,
    limit: u64,
    used: u64,
    requested: u64,
    window: String,
}

#[derive(Serialize)]
struct MemoryDetails<'a> {
    requested: RequestedMemory<'a>,
    available: String,
    blocking: Vec<MemoryHolder<'a>>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    never: bool,
}

#[derive(Serialize)]
struct RequestedMemory<'a> {
    model: &'a str,
    memory: String,
}

#[derive(Serialize)]
struct MemoryHolder<'a> {
    model: &'a str,
    memory: String,
    idle_for: String,
    leases: u32,
    pinned: bool,
}

/// `None` unless the status is 422, 429 or 503.
pub(super) fn of(fault: &Fault) -> Option<FaultDetails<'_>> {
    if !matches!(status(fault).as_u16(), 422 | 429 | 503) {
        return None;
    }
    let waited = wait(fault);
    Some(FaultDetails {
        waited_for: waited.map_or_else(|| never_queued_reason(fault), |wait| wait.waited_for.as_str()),
        waited: go_duration(waited.map_or(Millis::ZERO, |wait| wait.waited)),
        queue_position: waited.map_or(0, |wait| wait.position),
        holders: waited.map_or_else(Vec::new, |wait| holders(&wait.holders)),
        unlisted_holders: waited.map(|wait| wait.unlisted_holders).filter(|number| *number > 0),
        cause: cause(fault).map(FailureCause::class),
        memory: match fault {
            Fault::InsufficientMemory(shortage) => Some(memory(shortage)),
            _ => None,
        },
        rate: match fault {
            Fault::RateLimited { rate, .. } => Some(limited(rate)),
            _ => None,
        },
    })
}

/// What blocked a request that never queued.
const fn never_queued_reason(fault: &Fault) -> &'static str {
    match fault {
        Fault::RateLimited { .. } => "this key's rate limit",
        Fault::BodyMemoryFull { .. } | Fault::ClientBodyMemoryFull { .. } => "memory for request bodies",
        Fault::ShuttingDown => "nothing: the gateway is shutting down",
        Fault::StubNotServing { .. } => "the engine's gate",
        Fault::ModelNotAwake { .. } => "nothing: a GET does not wake a model",
        Fault::ControlPlaneUnavailable => "the gateway's decision loop",
        _ => "nothing",
    }
}

fn limited(rate: &RateLimitUsage) -> RateLimitDetails {
    RateLimitDetails {
        unit: rate.unit.as_str(),
        limit: rate.limit,
        used: rate.used,
        requested: rate.requested,
        window: go_duration(rate.window),
    }
}

fn memory(shortage: &MemoryShortage) -> MemoryDetails<'_> {
    MemoryDetails {
        requested: RequestedMemory { model: shortage.model.as_str(), memory: shortage.memory.to_string() },
        available: shortage.available.to_string(),
        blocking: holders(&shortage.wait.holders),
        never: shortage.permanent,
    }
}

fn holders(blocking: &[BlockingModel]) -> Vec<MemoryHolder<'_>> {
    blocking
        .iter()
        .map(|holder| MemoryHolder {
            model: holder.model.as_str(),
            memory: holder.memory.to_string(),
            idle_for: go_duration(holder.idle_for),
            leases: holder.leases,
            pinned: holder.pinned,
        })
        .collect()
}

const fn cause(fault: &Fault) -> Option<&FailureCause> {
    match fault {
        Fault::EngineFailed { cause, .. } | Fault::ModelNotReady { cause, .. } => Some(cause),
        _ => None,
    }
}

/// Formats a duration as Go does, which this envelope's clients have always parsed: `5m30s`, `1h0m0s`, `1.5s`.
fn go_duration(span: Millis) -> String {
    let (hours, minutes, millis) = (span.0 / 3_600_000, span.0 / 60_000 % 60, span.0 % 60_000);
    if span.0 > 0 && span.0 < 1000 {
        return format!("{millis}ms");
    }
    let fraction = format!("{:03}", millis % 1000);
    let (seconds, fraction) = (millis / 1000, fraction.trim_end_matches('0'));
    let dot = if fraction.is_empty() { "" } else { "." };
    match (hours, minutes) {
        (0, 0) => format!("{seconds}{dot}{fraction}s"),
        (0, _) => format!("{minutes}m{seconds}{dot}{fraction}s"),
        _ => format!("{hours}h{minutes}m{seconds}{dot}{fraction}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_read_as_go_writes_them() {
        for (millis, text) in [
            (0, "0s"),
            (250, "250ms"),
            (1500, "1.5s"),
            (30_000, "30s"),
            (300_000, "5m0s"),
            (330_000, "5m30s"),
            (3_600_000, "1h0m0s"),
            (3_690_010, "1h1m30.01s"),
        ] {
            assert_eq!(go_duration(Millis(millis)), text);
        }
    }
}
