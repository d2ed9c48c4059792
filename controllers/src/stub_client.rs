//! Client of an engine's stub, with this leader's epoch and one engine generation.
//!
//! Every order carries both. The stub refuses older ones, so a replaced leader that does not know it yet changes
//! nothing there. An order about the gate has a number, too, since orders of one leader can pass each other: one that
//! was given up and arrives late must not open the gate of an engine that sleeps by then.

mod error;

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use http::Method;
use rouse::{
    model::{AcceleratorId, SleepLevel},
    units::{Bytes, Generation, Millis},
};
use rouse_net::{
    http_client::{CallObserver, HttpClient, HttpClientError, HttpClientReply},
    nvml,
    stub_api::{
        ActuateRequest, ActuationResult, CloseGateRequest, DrainDeadlineAction, EPOCH_PATH, Epoch,
        EpochAnnouncement, GateStatus, OpenGateRequest,
    },
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::json;

use crate::failpoint;

pub(crate) use self::error::StubClientError;

/// Timeout of most calls: a stub answers them at once.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);
/// Timeout of calls about accelerators, whose driver may hang.
const DRIVER_TIMEOUT: Duration = nvml::QUERY_TIMEOUT.saturating_add(CALL_TIMEOUT);
/// Maximum wait of one call of [`StubClient::drain`].
const DRAIN_WAIT_TIMEOUT: Duration = Duration::from_secs(30);

/// Numbers the orders about gates. Of the whole process, because several of its parts give orders to one stub.
static NEXT_GATE_ORDER: AtomicU64 = AtomicU64::new(1);

/// Client of one stub.
#[derive(Debug)]
pub(crate) struct StubClient {
    client: HttpClient,
    epoch: Epoch,
    generation: Generation,
    /// See [`Self::for_requester`].
    requester: bool,
}

impl StubClient {
    /// `token`: a stub that was started with a key refuses calls without it.
    pub(crate) const fn new(
        address: SocketAddr,
        token: Option<String>,
        epoch: Epoch,
        generation: Generation,
    ) -> Self {
        Self { client: HttpClient::new(address, token), epoch, generation, requester: false }
    }

    /// Makes this the dual-pods controller's client of a requester's stub, and reports every call to `observer`.
    ///
    /// The stub may be the public project's, which has no gate and does not actuate engines: the client skips orders
    /// that the stub answers with 404 or 405. Each order is a failpoint.
    pub(crate) fn for_requester(self, observer: Arc<dyn CallObserver>) -> Self {
        Self { client: self.client.with_observer(observer), requester: true, ..self }
    }

    /// Returns the accelerators of the stub's Pod, as far as the stub can know them.
    pub(crate) async fn accelerators(&self) -> Result<Vec<AcceleratorId>, StubClientError> {
        self.get("/v1/dual-pods/accelerators", DRIVER_TIMEOUT).await
    }

    /// Returns the memory in use on each of them now.
    pub(crate) async fn usage(&self) -> Result<BTreeMap<AcceleratorId, Bytes>, StubClientError> {
        let used = self.usage_mib(DRIVER_TIMEOUT).await?;
        Ok(used.into_iter().map(|(id, mib)| (id.into(), Bytes(mib.saturating_mul(1 << 20)))).collect())
    }

    /// Returns the MiB in use on each of them now, by UUID.
    pub(crate) async fn usage_mib(&self, within: Duration) -> Result<BTreeMap<String, u64>, StubClientError> {
        self.get("/v1/dual-pods/accelerator-memory-usage", within).await
    }

    /// Announces this leader, so that the stub refuses older ones; returns the gate's state, if there is a gate.
    pub(crate) async fn announce_leader(&self) -> Result<Option<GateStatus>, StubClientError> {
        let body = EpochAnnouncement { epoch: self.epoch };
        let reply = self.order(Method::POST, EPOCH_PATH, &body, CALL_TIMEOUT).await?;
        reply.map(|reply| read(&reply)).transpose()
    }

    /// Makes this a client for the generation that the stub's gate has now; `None` if the gate was never opened.
    ///
    /// The pairing controller opens a requester's gate, with generations of its own.
    pub(crate) async fn for_gate_generation(self) -> Result<Option<Self>, StubClientError> {
        let gate = self.announce_leader().await?;
        let generation = gate.map(|gate| gate.generation).filter(|known| *known > Generation::default());
        Ok(generation.map(|generation| Self { generation, ..self }))
    }

    /// Sets the engine's address. Needed again after the stub's container restarted.
    pub(crate) async fn set_target(&self, engine: SocketAddr) -> Result<(), StubClientError> {
        let body = json!({"address": engine.ip().to_string(), "port": engine.port()});
        self.order(Method::PUT, "/v1/proxy/config", &body, CALL_TIMEOUT).await.map(drop)
    }

    /// Opens the gate.
    pub(crate) async fn open(&self) -> Result<(), StubClientError> {
        let body = OpenGateRequest { epoch: self.epoch, generation: self.generation };
        self.order(Method::DELETE, &gate_path(false), &body, CALL_TIMEOUT).await.map(drop)
    }

    /// Closes the gate: no request passes after the answer. Requests under way end with an error in their stream.
    pub(crate) async fn close(&self) -> Result<(), StubClientError> {
        let body = self.closing(self.generation, Some(Millis::ZERO));
        self.order(Method::POST, &gate_path(false), &body, CALL_TIMEOUT).await.map(drop)
    }

    /// Closes the gate and waits up to half a minute until no request is under way.
    ///
    /// `cut`: requests under way end with an error in their stream; otherwise they have unlimited time. Returns whether
    /// the gate is closed and drained; if not, the caller calls again.
    pub(crate) async fn drain(&self, cut: bool) -> Result<bool, StubClientError> {
        let body = self.closing(self.generation, cut.then_some(Millis::ZERO));
        match self.wait_drained(&body, DRAIN_WAIT_TIMEOUT).await {
            Ok(()) => Ok(true),
            Err(StubClientError::GateReopened | StubClientError::Unreachable(HttpClientError::Timeout)) => {
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// Closes the gate and waits until no request is under way; cuts requests after `left`. No-op without a gate.
    pub(crate) async fn close_and_drain(&self, left: Millis) -> Result<(), StubClientError> {
        self.wait_drained(&self.closing(self.generation, Some(left)), left.duration() + CALL_TIMEOUT).await
    }

    /// Closes the gate for any generation of any engine, and cuts requests under way.
    pub(crate) async fn ensure_gate_closed(&self) -> Result<(), StubClientError> {
        match self.announce_leader().await? {
            Some(gate) if !is_drained(&gate) => {
                self.wait_drained(&self.closing(gate.generation, Some(Millis::ZERO)), CALL_TIMEOUT).await
            }
            _ => Ok(()),
        }
    }

    /// Sets the readiness that the kubelet sees.
    pub(crate) async fn set_ready(&self, ready: bool) -> Result<(), StubClientError> {
        let path = if ready { "/v1/become-ready" } else { "/v1/become-unready" };
        self.order(Method::POST, path, &(), CALL_TIMEOUT).await.map(drop)
    }

    /// Puts the engine to sleep or wakes it; returns when that is done. `None`: the stub has no such call.
    ///
    /// Errors: also an answer that is not an [`ActuationResult`].
    pub(crate) async fn actuate(
        &self,
        wake: bool,
        level: SleepLevel,
        timeout: Duration,
    ) -> Result<Option<ActuationResult>, StubClientError> {
        let path = if wake { "/v1/engine/wake" } else { "/v1/engine/sleep" };
        let body =
            ActuateRequest { epoch: self.epoch, generation: self.generation, level: Some(level.number()) };
        let Some(reply) = self.send(Method::POST, path, &body, timeout).await? else { return Ok(None) };
        // A conflict with our own epoch and generation is temporary.
        let own = |gate: GateStatus| (gate.epoch, gate.generation) == (self.epoch, self.generation);
        if error::conflicting_gate(&reply).is_some_and(own) {
            return Err(StubClientError::Busy(error::text(&reply)));
        }
        read(&self.checked(reply)?).map(Some)
    }

    /// Ends the stub's hold after SIGTERM.
    pub(crate) async fn release(&self) -> Result<(), StubClientError> {
        let body = EpochAnnouncement { epoch: self.epoch };
        self.order(Method::POST, "/v1/release", &body, CALL_TIMEOUT).await.map(drop)
    }

    /// `cut_after`: requests under way end after this time; `None`: they have unlimited time.
    fn closing(&self, generation: Generation, cut_after: Option<Millis>) -> CloseGateRequest {
        let on_deadline =
            if cut_after.is_some() { DrainDeadlineAction::Cut } else { DrainDeadlineAction::Keep };
        let drain_deadline = cut_after.map(|after| after.0);
        CloseGateRequest { epoch: self.epoch, generation, drain_deadline, on_deadline }
    }

    async fn wait_drained(&self, body: &CloseGateRequest, within: Duration) -> Result<(), StubClientError> {
        let reply = self.order(Method::POST, &gate_path(true), body, within).await?;
        let Some(reply) = reply else { return Ok(()) };
        if is_drained(&read(&reply)?) { Ok(()) } else { Err(StubClientError::GateReopened) }
    }

    async fn get<T: DeserializeOwned>(&self, path: &str, within: Duration) -> Result<T, StubClientError> {
        read(&self.checked(self.client.get(path, within).await?)?)
    }

    /// Sends an order. Returns `None` if a requester's stub has no such call.
    async fn order(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        timeout: Duration,
    ) -> Result<Option<HttpClientReply>, StubClientError> {
        let reply = self.send(method, path, body, timeout).await?;
        reply.map(|reply| self.checked(reply)).transpose()
    }

    /// Like [`Self::order`], but returns refusals, too.
    async fn send(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        timeout: Duration,
    ) -> Result<Option<HttpClientReply>, StubClientError> {
        // Only numbers and words, so this cannot fail.
        let body = serde_json::to_value(body).ok().filter(|body| !body.is_null());
        if self.requester {
            failpoint::hit();
        }
        let reply = self.client.call(method, path, body.as_ref(), Some(self.epoch), timeout).await?;
        Ok(Some(reply).filter(|reply| !(self.requester && matches!(reply.status, 404 | 405))))
    }

    fn checked(&self, reply: HttpClientReply) -> Result<HttpClientReply, StubClientError> {
        if reply.success() { Ok(reply) } else { Err(StubClientError::from_refusal(&reply, self.epoch)) }
    }
}

fn read<T: DeserializeOwned>(reply: &HttpClientReply) -> Result<T, StubClientError> {
    serde_json::from_slice(&reply.body).map_err(|_| HttpClientError::Broken.into())
}

/// Returns the path of one order about the gate, with its number. `waits`: until the gate has drained.
///
/// In the query, which a stub without such numbers ignores.
fn gate_path(waits: bool) -> String {
    let sequence = NEXT_GATE_ORDER.fetch_add(1, Ordering::Relaxed);
    let wait = if waits { "wait=true&" } else { "" };
    format!("/v1/gate?{wait}sequence={sequence}")
}

const fn is_drained(gate: &GateStatus) -> bool {
    gate.gated && gate.leases == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_about_a_gate_has_a_larger_number_than_all_before_it() {
        let number = |path: &str| path.split_once("sequence=").unwrap().1.parse::<u64>().unwrap();
        let orders = [false, true, true, false].map(gate_path);
        assert!(orders.is_sorted_by(|earlier, later| number(earlier) < number(later)), "{orders:?}");
        let starts = orders.each_ref().map(|path| path.starts_with("/v1/gate?wait=true&sequence="));
        assert_eq!(starts, [false, true, true, false]);
    }
}
