//! Why a stub did not execute a call.

use rouse_net::{
    http_client::{HttpClientError, HttpClientReply},
    stub_api::{ActuationFailure, Epoch, GateStatus},
};

/// Why a stub did not execute a call. The texts are the beginning of the stub's answer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StubClientError {
    #[error("the call to the stub failed: {0}")]
    Unreachable(#[from] HttpClientError),
    /// Status 409: the stub knows a newer leader or generation, or its state excludes the order.
    #[error("the stub {}", conflict_text(*newer_epoch, text))]
    Conflict { newer_epoch: bool, text: String },
    /// Status 409 with this client's epoch and generation: the stub still executes an earlier order, for example.
    #[error("the stub is busy: {0}")]
    Busy(String),
    /// Status 412: a later order about the gate has arrived before this one, and counts.
    #[error("a later order about the stub's gate has arrived before this one")]
    Overtaken,
    /// Status 401: the stub was started with another key.
    #[error("the stub rejected the token: it was started with another key")]
    Unauthorized(String),
    /// Status 502: the engine accepted the order to sleep, and reports that it is awake.
    #[error("the engine stayed awake after the sleep order")]
    StaysAwake(String),
    #[error("the stub's gate was opened again")]
    GateReopened,
    #[error("the stub returned status {status}: {text}")]
    Refused { status: u16, text: String },
}

impl StubClientError {
    /// The stub is unreachable or cannot answer yet; a later call may succeed.
    pub(crate) const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Unreachable(_) | Self::Refused { status: 503, .. })
    }

    pub(crate) const fn is_unauthorized(&self) -> bool {
        matches!(self, Self::Unauthorized(_))
    }

    /// Reads the answer to a call that the stub did not execute. `epoch`: the caller's.
    pub(super) fn from_refusal(reply: &HttpClientReply, epoch: Epoch) -> Self {
        let text = text(reply);
        match reply.status {
            401 => Self::Unauthorized(text),
            409 => {
                let newer_epoch = conflicting_gate(reply).is_some_and(|gate| gate.epoch > epoch);
                Self::Conflict { newer_epoch, text }
            }
            412 => Self::Overtaken,
            502 if stays_awake(reply) => Self::StaysAwake(text),
            status => Self::Refused { status, text },
        }
    }
}

fn conflict_text(newer_epoch: bool, text: &str) -> String {
    if newer_epoch {
        "rejected the epoch: a newer leader is active".to_owned()
    } else {
        format!("returned status 409: {text}")
    }
}

/// Returns the gate's state, which the refusal of an order contains beside the reason.
pub(super) fn conflicting_gate(reply: &HttpClientReply) -> Option<GateStatus> {
    (reply.status == 409).then(|| serde_json::from_slice(&reply.body).ok()).flatten()
}

pub(super) fn text(reply: &HttpClientReply) -> String {
    String::from_utf8_lossy(&reply.body).chars().take(256).collect()
}

fn stays_awake(reply: &HttpClientReply) -> bool {
    serde_json::from_slice(&reply.body).is_ok_and(|failure: ActuationFailure| failure.stays_awake)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(status: u16, body: &str) -> StubClientError {
        let reply = HttpClientReply { status, body: body.to_owned().into(), gated: false };
        StubClientError::from_refusal(&reply, 2)
    }

    #[test]
    fn only_a_gate_with_a_newer_epoch_shows_a_newer_leader() {
        let newer = |body: &str| match refusal(409, body) {
            StubClientError::Conflict { newer_epoch, .. } => newer_epoch,
            other => panic!("{other}"),
        };
        assert!(newer(r#"{"reason":"stale","gated":true,"epoch":3,"generation":1,"leases":0}"#));
        assert!(!newer(r#"{"reason":"stale","gated":true,"epoch":2,"generation":9,"leases":0}"#));
        assert!(!newer("requests already go to 10.0.0.1:8000"));
    }

    #[test]
    fn a_502_that_does_not_say_that_the_engine_stays_awake_is_a_refusal() {
        let awake = refusal(502, r#"{"error":"denied","staysAwake":true}"#);
        assert!(matches!(awake, StubClientError::StaysAwake(_)), "{awake}");
        for body in [r#"{"error":"timed out"}"#, "bad gateway"] {
            assert_eq!(refusal(502, body).to_string(), format!("the stub returned status 502: {body}"));
        }
    }

    #[test]
    fn a_stub_without_a_call_refuses_it_and_one_that_starts_is_unavailable() {
        assert_eq!(refusal(404, "no").to_string(), "the stub returned status 404: no");
        assert!(refusal(401, "").is_unauthorized());
        let overtaken = refusal(412, r#"{"reason":"late","gated":true,"epoch":2,"generation":1,"leases":0}"#);
        assert!(matches!(overtaken, StubClientError::Overtaken), "no newer leader: {overtaken}");
        assert!(refusal(503, "").is_unavailable() && !refusal(500, "").is_unavailable());
    }
}
