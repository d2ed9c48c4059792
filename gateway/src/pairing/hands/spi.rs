//! A requester's stub, as the leader speaks to it about one life of an engine.
//!
//! Ours has a gate, wakes and puts to sleep, and refuses who was replaced. The public project's knows none of that: what it
//! answers 404 to is done without it.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use http::Method;
use rouse::{
    caller::{Caller, Failure, Observer, Reply},
    model::{AcceleratorId, Level},
    nvml,
    pairing::event::{Cause, Epoch},
    units::{Generation, Millis},
    wire::{Actuate, Actuated, Close, Gate, LEADS, Leads, OnDeadline, Open},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::Failed;
use crate::{controllers::fault, pairing::proof::Usage};

/// A stub answers at once; a call that takes longer has failed.
const CALL: Duration = Duration::from_secs(2);
/// It answers nothing later about accelerators, whose driver may hang.
const DRIVER: Duration = nvml::DEADLINE.saturating_add(CALL);

pub(super) struct Spi {
    caller: Caller,
    epoch: u64,
    generation: Generation,
}

impl Spi {
    pub(super) const fn new(
        address: SocketAddr,
        token: Option<String>,
        epoch: Epoch,
        generation: Generation,
    ) -> Self {
        Self { caller: Caller::new(address, token), epoch: epoch.0, generation }
    }

    /// Calls are told to this one.
    pub(super) fn observed(self, observer: Arc<dyn Observer>) -> Self {
        Self { caller: self.caller.observed(observer), ..self }
    }

    pub(super) async fn accelerators(&self) -> Result<Vec<AcceleratorId>, Failed> {
        read(&checked(self.caller.get("/v1/dual-pods/accelerators", DRIVER).await?)?)
    }

    /// MiB in use of its accelerators, by UUID.
    pub(super) async fn memory(&self, within: Duration) -> Result<Usage, Failed> {
        read(&checked(self.caller.get("/v1/dual-pods/accelerator-memory-usage", within).await?)?)
    }

    /// Where its engine listens. One that relays nothing has no use for it.
    pub(super) async fn target(&self, engine: SocketAddr) -> Result<(), Failed> {
        let body = json!({"address": engine.ip().to_string(), "port": engine.port()});
        self.order(Method::PUT, "/v1/proxy/config", &body, CALL).await.map(drop)
    }

    /// Requests may pass.
    pub(super) async fn open(&self) -> Result<(), Failed> {
        let body = Open { epoch: self.epoch, generation: self.generation };
        self.order(Method::DELETE, "/v1/gate", &body, CALL).await.map(drop)
    }

    /// Closes the gate and returns once nothing is under way; what still is after `left` is cut. At once where there is no gate.
    pub(super) async fn drained(&self, left: Millis) -> Result<(), Failed> {
        self.drain(self.generation, left).await
    }

    async fn drain(&self, generation: Generation, left: Millis) -> Result<(), Failed> {
        let body = Close {
            epoch: self.epoch,
            generation,
            drain_deadline: Some(left.0),
            on_deadline: OnDeadline::Cut,
        };
        let within = left.duration() + CALL;
        let Some(reply) = self.order(Method::POST, "/v1/gate?wait=true", &body, within).await? else {
            return Ok(());
        };
        let gate: Gate = read(&reply)?;
        if gate.gated && gate.leases == 0 {
            return Ok(());
        }
        Err(Failed::refused("its gate was opened again"))
    }

    /// Tells it who leads, so that it obeys nobody older from here on; how its gate is, if it has one.
    pub(super) async fn hear(&self) -> Result<Option<Gate>, Failed> {
        let reply = self.order(Method::POST, LEADS, &Leads { epoch: self.epoch }, CALL).await?;
        reply.map(|reply| read(&reply)).transpose()
    }

    /// Makes sure that its gate is closed, whichever life of whichever engine it belongs to, and cuts what is under way.
    pub(super) async fn shut(&self) -> Result<(), Failed> {
        let Some(gate) = self.hear().await? else { return Ok(()) };
        if gate.gated && gate.leases == 0 {
            return Ok(());
        }
        self.drain(gate.generation, Millis::ZERO).await
    }

    /// What the kubelet is told.
    pub(super) async fn ready(&self, ready: bool) -> Result<(), Failed> {
        let path = if ready { "/v1/become-ready" } else { "/v1/become-unready" };
        self.order(Method::POST, path, &Value::Null, CALL).await.map(drop)
    }

    /// Wakes or puts to sleep the engine that it relays to. `None`: it cannot.
    pub(super) async fn actuate(
        &self,
        wake: bool,
        level: Level,
        within: Duration,
    ) -> Result<Option<Actuated>, Failed> {
        let path = if wake { "/v1/engine/wake" } else { "/v1/engine/sleep" };
        let body = Actuate { epoch: self.epoch, generation: self.generation, level: Some(level.number()) };
        let reply = self.order(Method::POST, path, &body, within).await?;
        reply.map(|reply| read(&reply)).transpose()
    }

    /// It was told to end, and need not hold on.
    pub(super) async fn release(&self) -> Result<(), Failed> {
        self.order(Method::POST, "/v1/release", &Leads { epoch: self.epoch }, CALL).await.map(drop)
    }

    /// `None`: it knows no such order.
    async fn order(
        &self,
        method: Method,
        path: &str,
        body: &impl Serialize,
        within: Duration,
    ) -> Result<Option<Reply>, Failed> {
        // Numbers and words: nothing of it can fail.
        let body = serde_json::to_value(body).ok().filter(|body| !body.is_null());
        fault::point();
        let reply = self.caller.call(method, path, body.as_ref(), Some(self.epoch), within).await?;
        if matches!(reply.status, 404 | 405) {
            return Ok(None);
        }
        if is_younger(&reply, self.epoch) {
            return Err(Failed::deposed());
        }
        checked(reply).map(Some)
    }
}

fn read<T: DeserializeOwned>(reply: &Reply) -> Result<T, Failed> {
    serde_json::from_slice(&reply.body).map_err(|_| Failure::Broken.into())
}

fn checked(reply: Reply) -> Result<Reply, Failed> {
    if reply.success() {
        return Ok(reply);
    }
    let text: String = String::from_utf8_lossy(&reply.body).chars().take(256).collect();
    let cause = if reply.status == 409 { Cause::Conflict } else { Cause::Refused };
    Err(Failed {
        cause,
        text: format!("its stub answered {}: {}", reply.status, text.trim()),
        tell: false,
        deposed: false,
    })
}

/// Whether a refusal says that a younger leader was heard than the one with this epoch.
fn is_younger(reply: &Reply, epoch: u64) -> bool {
    // What is refused shows the gate as it is, beside the reason.
    let stale = (reply.status == 409).then(|| serde_json::from_slice::<Gate>(&reply.body).ok()).flatten();
    stale.is_some_and(|gate| gate.epoch > epoch)
}
