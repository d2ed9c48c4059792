//! Client of a requester's stub, with the leader's epoch and one engine generation.
//!
//! Our stub has a gate, puts engines to sleep and wakes them, and refuses a replaced leader. The public project's stub
//! has none of that: the client skips calls that it answers with 404 or 405.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use http::Method;
use rouse::{
    model::{AcceleratorId, SleepLevel},
    pairing::event::{CommandFailure, Epoch},
    units::{Generation, Millis},
};
use rouse_net::{
    http_client::{CallObserver, HttpClient, HttpClientError, HttpClientReply},
    nvml,
    stub_api::{
        ActuateRequest, ActuationResult, CloseGateRequest, DrainDeadlineAction, EPOCH_PATH,
        EpochAnnouncement, GateStatus, OpenGateRequest,
    },
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::ExecutionError;
use crate::{dual_pods::memory_baseline::AcceleratorUsedMib, failpoint};

/// Timeout of most calls: a stub answers them at once.
const STUB_CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of calls about accelerators, whose driver may hang.
const DRIVER_CALL_TIMEOUT: Duration = nvml::QUERY_TIMEOUT.saturating_add(STUB_CALL_TIMEOUT);

pub(super) struct RequesterStubClient {
    http_client: HttpClient,
    epoch: u64,
    generation: Generation,
}

impl RequesterStubClient {
    pub(super) const fn new(
        address: SocketAddr,
        token: Option<String>,
        epoch: Epoch,
        generation: Generation,
    ) -> Self {
        Self { http_client: HttpClient::new(address, token), epoch: epoch.0, generation }
    }

    /// Reports every call to this observer.
    pub(super) fn with_observer(self, observer: Arc<dyn CallObserver>) -> Self {
        Self { http_client: self.http_client.with_observer(observer), ..self }
    }

    pub(super) async fn accelerators(&self) -> Result<Vec<AcceleratorId>, ExecutionError> {
        read(&checked(self.http_client.get("/v1/dual-pods/accelerators", DRIVER_CALL_TIMEOUT).await?)?)
    }

    /// Returns the MiB in use on the stub's accelerators, by UUID.
    pub(super) async fn memory(&self, within: Duration) -> Result<AcceleratorUsedMib, ExecutionError> {
        read(&checked(self.http_client.get("/v1/dual-pods/accelerator-memory-usage", within).await?)?)
    }

    /// Sets the engine's address. A stub without a proxy does not need it.
    pub(super) async fn set_engine_address(&self, engine: SocketAddr) -> Result<(), ExecutionError> {
        let body = json!({"address": engine.ip().to_string(), "port": engine.port()});
        self.order(Method::PUT, "/v1/proxy/config", &body, STUB_CALL_TIMEOUT).await.map(drop)
    }

    /// Opens the gate.
    pub(super) async fn open(&self) -> Result<(), ExecutionError> {
        let body = OpenGateRequest { epoch: self.epoch, generation: self.generation };
        self.order(Method::DELETE, "/v1/gate", &body, STUB_CALL_TIMEOUT).await.map(drop)
    }

    /// Closes the gate and waits until no request is under way; cuts requests after `left`. No-op without a gate.
    pub(super) async fn close_and_drain(&self, left: Millis) -> Result<(), ExecutionError> {
        self.drain(self.generation, left).await
    }

    async fn drain(&self, generation: Generation, left: Millis) -> Result<(), ExecutionError> {
        let body = CloseGateRequest {
            epoch: self.epoch,
            generation,
            drain_deadline: Some(left.0),
            on_deadline: DrainDeadlineAction::Cut,
        };
        let within = left.duration() + STUB_CALL_TIMEOUT;
        let Some(reply) = self.order(Method::POST, "/v1/gate?wait=true", &body, within).await? else {
            return Ok(());
        };
        let gate: GateStatus = read(&reply)?;
        if gate.gated && gate.leases == 0 {
            return Ok(());
        }
        Err(ExecutionError::refused("the stub's gate was opened again"))
    }

    /// Announces this leader, so that the stub refuses older ones; returns the gate's state, if there is a gate.
    pub(super) async fn announce_leader(&self) -> Result<Option<GateStatus>, ExecutionError> {
        let reply = self
            .order(Method::POST, EPOCH_PATH, &EpochAnnouncement { epoch: self.epoch }, STUB_CALL_TIMEOUT)
            .await?;
        reply.map(|reply| read(&reply)).transpose()
    }

    /// Closes the gate for any generation of any engine, and cuts requests under way.
    pub(super) async fn ensure_gate_closed(&self) -> Result<(), ExecutionError> {
        let Some(gate) = self.announce_leader().await? else { return Ok(()) };
        if gate.gated && gate.leases == 0 {
            return Ok(());
        }
        self.drain(gate.generation, Millis::ZERO).await
    }

    /// Sets the readiness that the kubelet sees.
    pub(super) async fn set_ready(&self, ready: bool) -> Result<(), ExecutionError> {
        let path = if ready { "/v1/become-ready" } else { "/v1/become-unready" };
        self.order(Method::POST, path, &Value::Null, STUB_CALL_TIMEOUT).await.map(drop)
    }

    /// Wakes the stub's engine or puts it to sleep. `None` if the stub has no such call.
    pub(super) async fn actuate(
        &self,
        wake: bool,
        level: SleepLevel,
        within: Duration,
    ) -> Result<Option<ActuationResult>, ExecutionError> {
        let path = if wake { "/v1/engine/wake" } else { "/v1/engine/sleep" };
        let body =
            ActuateRequest { epoch: self.epoch, generation: self.generation, level: Some(level.number()) };
        let reply = self.order(Method::POST, path, &body, within).await?;
        reply.map(|reply| read(&reply)).transpose()
    }

    /// Ends the stub's hold after SIGTERM.
    pub(super) async fn release(&self) -> Result<(), ExecutionError> {
        self.order(Method::POST, "/v1/release", &EpochAnnouncement { epoch: self.epoch }, STUB_CALL_TIMEOUT)
            .await
            .map(drop)
    }

    /// Sends an order. Returns `None` if the stub has no such call.
    async fn order(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        within: Duration,
    ) -> Result<Option<HttpClientReply>, ExecutionError> {
        // Only numbers and words, so this cannot fail.
        let body = serde_json::to_value(body).ok().filter(|body| !body.is_null());
        failpoint::hit();
        let reply = self.http_client.call(method, path, body.as_ref(), Some(self.epoch), within).await?;
        if matches!(reply.status, 404 | 405) {
            return Ok(None);
        }
        if has_newer_epoch(&reply, self.epoch) {
            return Err(ExecutionError::superseded());
        }
        checked(reply).map(Some)
    }
}

fn read<T: DeserializeOwned>(reply: &HttpClientReply) -> Result<T, ExecutionError> {
    serde_json::from_slice(&reply.body).map_err(|_| HttpClientError::Broken.into())
}

fn checked(reply: HttpClientReply) -> Result<HttpClientReply, ExecutionError> {
    if reply.success() {
        return Ok(reply);
    }
    let text: String = String::from_utf8_lossy(&reply.body).chars().take(256).collect();
    let cause = if reply.status == 409 { CommandFailure::Conflict } else { CommandFailure::Refused };
    Err(ExecutionError {
        cause,
        text: format!("the stub answered {}: {}", reply.status, text.trim()),
        user_facing: false,
        superseded: false,
    })
}

/// Whether a refusal shows that the stub has seen an epoch newer than this one.
fn has_newer_epoch(reply: &HttpClientReply, epoch: u64) -> bool {
    // A refusal contains the gate's state beside the reason.
    let stale =
        (reply.status == 409).then(|| serde_json::from_slice::<GateStatus>(&reply.body).ok()).flatten();
    stale.is_some_and(|gate| gate.epoch > epoch)
}
