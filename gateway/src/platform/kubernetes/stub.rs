//! What the one that leads orders of the stub in front of an engine. Every order carries the leader's epoch and the life it
//! means; the stub refuses an older one, so whoever was replaced and does not know it yet changes nothing there.

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

/// A stub answers at once; a call that takes longer has failed.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// It answers nothing later about accelerators, whose driver may hang.
const DRIVER_TIMEOUT: Duration = nvml::QUERY_TIMEOUT.saturating_add(CALL_TIMEOUT);
/// For so long it may let its caller wait for a drain; then it is asked again.
const DRAIN_WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a sleep or a wake may last is the decisions' to say; longer than any deadline that they set.
const ACTUATION_TIMEOUT: Duration = Duration::from_secs(15 * 60);

/// Why an order was not carried out.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Error {
    #[error("the stub does not answer: {0}")]
    Unreachable(#[from] HttpClientError),
    /// A newer leader has given orders.
    #[error("the stub has heard a newer leader")]
    StaleEpoch,
    /// It is in the middle of what it was told before, in this life of the engine.
    #[error("the stub is busy: {0}")]
    Busy(String),
    /// It was started with another key.
    #[error("the stub knows another token")]
    Unauthorized,
    /// The engine took the order to sleep, and says that it is awake.
    #[error("the engine stays awake")]
    StaysAwake,
    #[error("the stub answered {status}: {text}")]
    Refused { status: u16, text: String },
}

impl Error {
    /// The stub cannot say yet, and can be asked again.
    pub(super) const fn is_unavailable(&self) -> bool {
        matches!(self, Self::Refused { status: 503, .. })
    }
}

/// One stub, as this leader speaks to it about one life of its engine.
#[derive(Debug)]
pub(super) struct StubClient {
    client: HttpClient,
    epoch: Epoch,
    generation: Generation,
}

impl StubClient {
    /// `token`: without it the stub refuses.
    pub(super) const fn new(
        address: SocketAddr,
        token: String,
        epoch: Epoch,
        generation: Generation,
    ) -> Self {
        Self { client: HttpClient::new(address, Some(token)), epoch, generation }
    }

    /// Where the engine listens. Told again after the stub's container was started anew.
    pub(super) async fn set_target(&self, engine: SocketAddr) -> Result<(), Error> {
        let body = json!({"address": engine.ip().to_string(), "port": engine.port()});
        self.order(Method::PUT, "/v1/proxy/config", Some(body), CALL_TIMEOUT).await
    }

    /// Requests may pass.
    pub(super) async fn open(&self) -> Result<(), Error> {
        let body = serde_json::to_value(OpenGateRequest { epoch: self.epoch, generation: self.generation });
        self.order(Method::DELETE, "/v1/gate", body.ok(), CALL_TIMEOUT).await
    }

    /// No request passes from the answer on. `cut`: those under way end with an error in their stream; else they have all the
    /// time they want.
    pub(super) async fn close(&self, cut: bool) -> Result<(), Error> {
        self.order(Method::POST, "/v1/gate", Some(self.closing(cut)), CALL_TIMEOUT).await
    }

    /// Closes, and returns when no request is under way any more, or the gate was opened again, or after half a minute: true
    /// when it is closed and drained.
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

    /// Puts the engine behind it to sleep, or wakes it; done when this returns.
    pub(super) async fn actuate(&self, wake: bool, level: SleepLevel) -> Result<(), Error> {
        let path = if wake { "/v1/engine/wake" } else { "/v1/engine/sleep" };
        let body =
            ActuateRequest { epoch: self.epoch, generation: self.generation, level: Some(level.number()) };
        let body = serde_json::to_value(body).ok();
        let reply =
            self.client.call(Method::POST, path, body.as_ref(), Some(self.epoch), ACTUATION_TIMEOUT).await?;
        // What it refuses to this leader, and in this life, bars the order for now: one that is under way, say.
        let own = |gate: &rouse_net::stub_api::GateStatus| {
            (gate.epoch, gate.generation) == (self.epoch, self.generation)
        };
        if reply.status == 409 && serde_json::from_slice(&reply.body).is_ok_and(|gate| own(&gate)) {
            return Err(Error::Busy(body_text(&reply)));
        }
        checked(reply).map(drop)
    }

    /// What the kubelet is told.
    pub(super) async fn set_ready(&self, ready: bool) -> Result<(), Error> {
        let path = if ready { "/v1/become-ready" } else { "/v1/become-unready" };
        self.order(Method::POST, path, None, CALL_TIMEOUT).await
    }

    /// Which accelerators its Pod was given, as far as it can know.
    pub(super) async fn accelerators(&self) -> Result<Vec<AcceleratorId>, Error> {
        let reply = checked(self.client.get("/v1/dual-pods/accelerators", DRIVER_TIMEOUT).await?)?;
        Ok(serde_json::from_slice(&reply.body).map_err(|_| HttpClientError::Broken)?)
    }

    /// What is in use on each of them, now.
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
        // Numbers and words: nothing of it can fail.
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
