//! Reads from a Pod why the scheduler does not bind it to its node.

use k8s_openapi::api::core::v1::Pod;
use rouse::warmup::WarmupCause;

use crate::warmup::keys;

/// Returns why the Pod is not scheduled; `None` if it is, or if nothing is known yet.
pub(super) fn cause(pod: &Pod) -> Option<WarmupCause> {
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let unscheduled = conditions.iter().find(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    })?;
    Some(classify(unscheduled.message.as_deref().unwrap_or_default()))
}

/// The Pod fits one node alone, so what the message says of nodes is about that one.
fn classify(message: &str) -> WarmupCause {
    if let Some(key) = untolerated_taint(message) {
        return match key.strip_prefix(keys::NODE_TAINTS) {
            Some("unschedulable") => WarmupCause::Cordoned,
            Some("not-ready" | "unreachable" | "network-unavailable" | "out-of-service") => {
                WarmupCause::NodeNotReady
            }
            Some("disk-pressure") => WarmupCause::DiskPressure,
            Some("memory-pressure" | "pid-pressure") => WarmupCause::NodeFull,
            _ => WarmupCause::Taint(key.to_owned()),
        };
    }
    let has = |part: &str| message.contains(part);
    if has("were unschedulable") {
        WarmupCause::Cordoned
    } else if has("were not ready") || has("were unreachable") {
        WarmupCause::NodeNotReady
    } else if has("Too many pods") || has("Insufficient ") || has("free ports") {
        WarmupCause::NodeFull
    } else {
        // Nothing was tried on the node, so this is no failure of it.
        WarmupCause::refused(message)
    }
}

/// Returns the key in `had untolerated taint {key: value}`.
fn untolerated_taint(message: &str) -> Option<&str> {
    let (_, taint) = message.split_once("untolerated taint")?;
    let (_, taint) = taint.split_once('{')?;
    let (taint, _) = taint.split_once('}')?;
    Some(taint.split_once(':').map_or(taint, |(key, _)| key).trim())
}
