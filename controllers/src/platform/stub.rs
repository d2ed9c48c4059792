//! Client of the stub in front of an engine, for the leader.
//!
//! Every order carries the leader's epoch and the engine's generation. The stub refuses older ones, so a replaced
//! leader that does not know it yet changes nothing there.

use std::{collections::BTreeMap, net::SocketAddr, time::Duration};

use http::Method;
use rouse::{
    model::{AcceleratorId, SleepLevel},
    units::{Bytes, Generation, Millis},
};
use rouse_net::{
    http_client::{HttpClient, HttpClientError, HttpClientReply},
    nvml,
    stub_api::{
        ActuateRequest, ActuationFailure, CloseGateRequest, DrainDeadlineAction, Epoch, OpenGateRequest,
    },
};
use serde_json::{Value, json};

/// Timeout of most calls: a stub answers them at once.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of calls about accelerators, whose driver may hang.
const DRIVER_TIMEOUT: Duration = nvml::QUERY_TIMEOUT.saturating_add(CALL_TIMEOUT);
/// Maximum wait of one drain call; the caller then calls again.
const DRAIN_WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Longer than any deadline of the fleet, which limits sleeps and wakes.
const ACTUATION_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Why a stub did not execute an order.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error("the call to the stub failed: {0}")]
    Unreachable(#[from] HttpClientError),
    /// A newer leader has given orders.
    #[error("the stub rejected the epoch: a newer leader is active")]
    StaleEpoch,
    /// The stub still executes an earlier order for this generation.
    #[error("the stub is busy: {0}")]
    Busy(String),
    /// The stub was started with another key.
    #[error("the stub rejected the token: it was started with another key")]
    Unauthorized,
    /// The engine accepted the order to sleep, and reports that it is awake.
    #[error("the engine stayed awake after the sleep order")]
    StaysAwake,
    #[error("the stub returned status {status}: {text}")]
    Refused { status: u16, text: String },
}

impl Error {
    /// The stub cannot answer yet; a later call may succeed.
    pub(super) const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Refused { status: 503, .. })
    }
}

/// Client of one stub, with this leader's epoch and one engine generation.
#[derive(Debug)]
pub(super) struct StubClient {
    client: HttpClient,
    epoch: Epoch,
    generation: Generation,
}

impl StubClient {
    /// `token`: the stub refuses calls without it.
    pub(super) const fn new(
        address: SocketAddr,
        token: String,
        epoch: Epoch,
        generation: Generation,
    ) -> Self {
        Self { client: HttpClient::new(address, Some(token)), epoch, generation }
    }

    /// Sets the engine's address. Needed again after the stub's container restarted.
    pub(super) async fn set_target(&self, engine: SocketAddr) -> Result<(), Error> {
        let body = json!({"address": engine.ip().to_string(), "port": engine.port()});
        self.order(Method::PUT, "/v1/proxy/config", Some(body), CALL_TIMEOUT).await
    }

    /// Opens the gate.
    pub(super) async fn open(&self) -> Result<(), Error> {
        let body = serde_json::to_value(OpenGateRequest { epoch: self.epoch, generation: self.generation });
        self.order(Method::DELETE, "/v1/gate", body.ok(), CALL_TIMEOUT).await
    }

    /// Closes the gate: no request passes after the answer.
    ///
    /// `cut`: requests under way end with an error in their stream; otherwise they have unlimited time.
    pub(super) async fn close(&self, cut: bool) -> Result<(), Error> {
        self.order(Method::POST, "/v1/gate", Some(self.closing(cut)), CALL_TIMEOUT).await
    }

    /// Closes the gate and waits until no request is under way.
    ///
    /// The wait also ends when the gate is opened again, or after half a minute. Returns true if the gate is closed and
    /// drained.
    pub(super) async fn drain(&self, cut: bool) -> Result<bool, Error> {
        let body = self.closing(cut);
        let path = "/v1/gate?wait=true";
        let reply = match self.client.call(Method::POST, path, Some(&body), None, DRAIN_WAIT_TIMEOUT).await {
            Err(HttpClientError::Timeout) => return Ok(false),
            reply => checked(reply?)?,
        };
        let gate: rouse_net::stub_api::GateStatus =
            serde_json::from_slice(&reply.body).map_err(|_| HttpClientError::Broken)?;
        Ok(gate.gated && gate.leases == 0)
    }

    /// Puts the engine to sleep or wakes it; returns when that is done.
    pub(super) async fn actuate(&self, wake: bool, level: SleepLevel) -> Result<(), Error> {
        let path = if wake { "/v1/engine/wake" } else { "/v1/engine/sleep" };
        let body =
            ActuateRequest { epoch: self.epoch, generation: self.generation, level: Some(level.number()) };
        let body = serde_json::to_value(body).ok();
        let reply =
            self.client.call(Method::POST, path, body.as_ref(), Some(self.epoch), ACTUATION_TIMEOUT).await?;
        // A refusal with our own epoch and generation is temporary: the stub is busy, for example.
        let own = |gate: &rouse_net::stub_api::GateStatus| {
            (gate.epoch, gate.generation) == (self.epoch, self.generation)
        };
        if reply.status == 409 && serde_json::from_slice(&reply.body).is_ok_and(|gate| own(&gate)) {
            return Err(Error::Busy(body_text(&reply)));
        }
        checked(reply).map(drop)
    }

    /// Sets the readiness that the kubelet sees.
    pub(super) async fn set_ready(&self, ready: bool) -> Result<(), Error> {
        let path = if ready { "/v1/become-ready" } else { "/v1/become-unready" };
        self.order(Method::POST, path, None, CALL_TIMEOUT).await
    }

    /// Returns the accelerators of the stub's Pod, as far as the stub can know them.
    pub(super) async fn accelerators(&self) -> Result<Vec<AcceleratorId>, Error> {
        let reply = checked(self.client.get("/v1/dual-pods/accelerators", DRIVER_TIMEOUT).await?)?;
        Ok(serde_json::from_slice(&reply.body).map_err(|_| HttpClientError::Broken)?)
    }

    /// Returns the memory in use on each of them now.
    pub(super) async fn usage(&self) -> Result<BTreeMap<AcceleratorId, Bytes>, Error> {
        let reply =
            checked(self.client.get("/v1/dual-pods/accelerator-memory-usage", DRIVER_TIMEOUT).await?)?;
        let used: BTreeMap<AcceleratorId, u64> =
            serde_json::from_slice(&reply.body).map_err(|_| HttpClientError::Broken)?;
        Ok(used.into_iter().map(|(id, mib)| (id, Bytes(mib.saturating_mul(1 << 20)))).collect())
    }

    fn closing(&self, cut: bool) -> Value {
        let close = CloseGateRequest {
            epoch: self.epoch,
            generation: self.generation,
            drain_deadline: cut.then_some(Millis::ZERO.0),
            on_deadline: if cut { DrainDeadlineAction::Cut } else { DrainDeadlineAction::Keep },
        };
        // Only numbers and words, so this cannot fail.
        serde_json::to_value(close).unwrap_or_default()
    }

    async fn order(
        &self,
        method: Method,
        path: &str,
        body: Option<Value>,
        within: Duration,
    ) -> Result<(), Error> {
        let reply = self.client.call(method, path, body.as_ref(), Some(self.epoch), within).await?;
        checked(reply).map(drop)
    }
}

fn checked(reply: HttpClientReply) -> Result<HttpClientReply, Error> {
    match reply.status {
        200..=299 => Ok(reply),
        401 => Err(Error::Unauthorized),
        409 => Err(Error::StaleEpoch),
        502 if serde_json::from_slice(&reply.body).is_ok_and(|said: ActuationFailure| said.stays_awake) => {
            Err(Error::StaysAwake)
        }
        status => {
            let text = body_text(&reply);
            Err(Error::Refused { status, text })
        }
    }
}

fn body_text(reply: &HttpClientReply) -> String {
    String::from_utf8_lossy(&reply.body).chars().take(256).collect()
}
