//! Takes a routed request to an engine's response: a lease at once or after queueing, and the few cases in which the
//! gateway retries without the client noticing.
//!
//! The gateway retries only while no byte of a response has gone out, so no output is generated twice for one client:
//!
//! * The first request after a start or wake is the canary. When it fails (5xx, a broken connection, no byte in time, a
//!   revoked lease), the engine is the suspect and not the request: the request returns to its old place in the queue,
//!   [`MAX_CANARY_ATTEMPTS`] times.
//! * An unreachable engine may be dead without the driver knowing it yet. No engine has begun the request, so it goes
//!   to another engine of the model at once. If there is none, it waits until the dead engine's gate closes and queues
//!   again. A request retries for this reason only once.
//!
//! * An engine behind a stub with a closed gate has not seen the request: the request returns to its old place in the
//!   queue each time, until its deadline. The gateway trusts the stub's mark only where a stub is configured. The stub
//!   removes such a mark from its engine's responses; with the mark, an engine could park every client's request.
//!
//! Any other request that an engine may have begun fails with the engine: only its client can know whether a repeat is
//! harmless. An engine's own refusal is a response, also a 503 with a `Retry-After`. The gateway relays it unchanged,
//! because the engine has examined the request, and a crowd that moves from one full engine to the next fills all of
//! them.

mod faults;
mod observer;

use std::{pin::pin, rc::Rc, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderValue, Method, uri::PathAndQuery};
use rouse::{
    fault::{DisconnectPhase, FailureCause, Fault},
    fleet::event::CanaryVerdict,
    model::{EngineId, ModelName},
    units::{Millis, Tick},
};
use rouse_config::OnDisconnect;
use rouse_net::{
    lease::{Gate, Lease},
    openai::ApiSchema,
    relay::{self, Exchange, GatedByStub, Payload, RelayTarget, ResponseInspection, UpstreamRequest},
};
use rouse_platform::EngineActivity;
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use self::faults::{canary_failure_cause, exit_as_closed, is_engine_gone, is_revocation};
use super::{
    WorkerContext,
    affinity::{AffinityKeys, EndpointAttempt},
    body::BodyBytesGuard,
    request_context::RequestContext,
    response_body::{self, EngineResponse},
    routed_request::RoutedBody,
};
use crate::{
    driver::{CanaryGuard, GrantedLease, ParkRequest},
    keys::{self, ApiKey, QuotaCharge},
    routing::Endpoint,
};

pub(crate) use observer::RequestExchangeObserver;

/// How often one request may be the canary of an engine that fails it.
const MAX_CANARY_ATTEMPTS: u32 = 3;
/// How long past its deadline a parked request waits for a driver that does not reply.
const PARK_DEADLINE_SLACK: Millis = Millis::secs(2);
/// How long the gateway may take to notice that a process has exited.
const EXIT_DETECTION_TIMEOUT: Duration = Duration::from_secs(1);

/// One request for an engine.
pub(crate) struct EngineRequest {
    pub(crate) worker: Rc<WorkerContext>,
    pub(crate) context: Rc<RequestContext>,
    pub(crate) config: Arc<rouse_config::Config>,
    pub(crate) model: ModelName,
    /// The configuration when the request arrived. The engine may have been started with another one.
    pub(crate) spec: Arc<rouse_config::EngineConfig>,
    pub(crate) method: Method,
    pub(crate) path: PathAndQuery,
    pub(crate) headers: HeaderMap,
    /// Whether the engine receives the request's id.
    pub(crate) sends_request_id: bool,
    pub(crate) body: RoutedBody,
    /// The body's charge to the limits on held bodies. Released with this value, which is dropped at the response's
    /// head.
    pub(crate) _body_guard: BodyBytesGuard,
    pub(crate) stream: bool,
    /// The API schema in which a broken stream's error is written.
    pub(crate) form: ApiSchema,
    pub(crate) affinity: AffinityKeys,
    /// The request's key. `None`: no keys are configured.
    pub(crate) key: Option<Arc<ApiKey>>,
    /// The client as a hash: of its API key, else of the user or session that the request names, else of its address.
    pub(crate) client_hash: u64,
    /// The request's charge to the limits of its key.
    pub(crate) quota_charge: Option<Rc<QuotaCharge>>,
    pub(crate) deadline: Tick,
    /// Whether the request may queue for its model and wake it. Otherwise a free engine answers it, or it is refused.
    pub(crate) may_park: bool,
    /// Notified when the request parks. `None` unless the request is for a stream.
    pub(crate) parked_notify: Option<Rc<Notify>>,
}

/// A lease, its engine's address, and the canary guard if the outcome counts.
struct LeasedEndpoint {
    target: RelayTarget,
    /// The body, with this engine's name for the model.
    body: Payload,
    lease: Lease,
    leased_at: Instant,
    gate: Arc<Gate>,
    canary: Option<CanaryGuard>,
    /// Where the load report of the engine's stub goes, if the request asks for one.
    report_target: Option<Arc<EngineActivity>>,
    /// Whether a stub stands in front of the engine.
    behind_stub: bool,
    /// Set for a model that may have several engines.
    attempt: Option<Box<EndpointAttempt>>,
}

/// The outcome of one attempt.
enum AttemptOutcome {
    Answered(Box<EngineResponse>),
    Failed(Fault),
    /// The stub in front of the engine rejected the request.
    Gated,
    /// The engine is at fault and not the request.
    Retry(Fault, RetryReason),
}

enum RetryReason {
    Canary,
    /// The engine was gone before it saw the request.
    EngineGone(EngineId, Arc<Gate>),
}

/// A response on its way to a client that may disconnect first. Dropped undelivered, it is still read to its end: a
/// plain response would be dropped together with the channel.
struct UndeliveredResponse(Option<Box<EngineResponse>>);

impl UndeliveredResponse {
    const fn new(response: Box<EngineResponse>) -> Self {
        Self(Some(response))
    }

    fn take(mut self) -> Result<Box<EngineResponse>, Fault> {
        self.0.take().ok_or(Fault::Internal)
    }
}

impl Drop for UndeliveredResponse {
    fn drop(&mut self) {
        if let Some(answer) = self.0.take() {
            response_body::drain_detached(answer.response.into_body());
        }
    }
}

impl EngineRequest {
    /// Runs the request up to the head of a response. Faults are redacted to what the client may know.
    pub(crate) async fn run(self) -> Result<Box<EngineResponse>, Fault> {
        if self.spec.on_disconnect == OnDisconnect::Drain {
            return Box::pin(self.run_detached()).await;
        }
        self.run_inline().await
    }

    /// Like [`Self::run`], for a client that may interrupt its engine. Borrows, because moving this large value is
    /// costly.
    pub(crate) async fn run_inline(&self) -> Result<Box<EngineResponse>, Fault> {
        let answer = match self.acquire_lease().await {
            Ok(endpoint) => self.run_attempts(endpoint, None).await,
            Err(fault) => Err(fault),
        };
        answer.map_err(|fault| self.redact_fault(fault))
    }

    fn redact_fault(&self, fault: Fault) -> Fault {
        match &self.key {
            Some(key) => keys::redact(fault, key),
            None => fault,
        }
    }

    /// Runs in its own task. So the engine's response is read to its end even after the client disconnects.
    async fn run_detached(self) -> Result<Box<EngineResponse>, Fault> {
        let (mut response_tx, response_rx) = oneshot::channel();
        tokio::task::spawn_local(async move {
            // Without a lease there is no response to drain: a client that disconnects leaves the queue.
            let endpoint = tokio::select! {
                biased;
                () = response_tx.closed() => return,
                endpoint = self.acquire_lease() => endpoint,
            };
            let answer = match endpoint {
                Ok(endpoint) => self.run_attempts(endpoint, Some(&mut response_tx)).await,
                Err(fault) => Err(fault),
            };
            let answer = answer.map_err(|fault| self.redact_fault(fault));
            drop(response_tx.send(answer.map(UndeliveredResponse::new)));
        });
        response_rx.await.unwrap_or(Err(Fault::Internal)).and_then(UndeliveredResponse::take)
    }

    async fn acquire_lease(&self) -> Result<LeasedEndpoint, Fault> {
        match self.try_acquire_lease(None) {
            Some(endpoint) => {
                self.context.set_forwarded_at_once();
                Ok(endpoint)
            }
            None => self.park().await,
        }
    }

    /// `response_tx`: the channel to the client, where the request outlives its client.
    async fn run_attempts(
        &self,
        first: LeasedEndpoint,
        mut response_tx: Option<&mut oneshot::Sender<Result<UndeliveredResponse, Fault>>>,
    ) -> Result<Box<EngineResponse>, Fault> {
        let mut endpoint = first;
        let (mut canaries, mut absences) = (0, 0);
        loop {
            match self.attempt(endpoint).await {
                AttemptOutcome::Answered(answer) => return Ok(answer),
                AttemptOutcome::Failed(fault) => return Err(fault),
                AttemptOutcome::Retry(fault, RetryReason::Canary) => {
                    canaries += 1;
                    if canaries >= MAX_CANARY_ATTEMPTS {
                        return Err(fault);
                    }
                }
                AttemptOutcome::Gated => {}
                AttemptOutcome::Retry(fault, RetryReason::EngineGone(engine, gate)) => {
                    absences += 1;
                    if absences > 1 {
                        return Err(fault);
                    }
                    if let Some(other) = self.try_acquire_lease(Some(&engine)) {
                        self.context.retried();
                        endpoint = other;
                        continue;
                    }
                    until_revoked(&gate).await;
                }
            }
            self.context.retried();
            if let Some(charge) = &self.quota_charge {
                charge.reset_for_retry();
            }
            let disconnected = async {
                match &mut response_tx {
                    Some(client) => client.closed().await,
                    None => std::future::pending().await,
                }
            };
            // Do not wake a model for a client that has disconnected.
            endpoint = tokio::select! {
                biased;
                () = disconnected => return Err(Fault::ClientDisconnected { phase: DisconnectPhase::Parked }),
                endpoint = self.park() => endpoint?,
            };
        }
    }

    /// Takes a lease on an awake engine if one is free now. `avoid`: the engine to skip.
    fn try_acquire_lease(&self, avoid: Option<&EngineId>) -> Option<LeasedEndpoint> {
        let routes = self.worker.server.driver.routes();
        let route = routes.models.get(&self.model)?;
        let (endpoint, lease) =
            self.affinity.take_lease(&self.worker, route, &self.headers, avoid, self.may_park)?;
        let lease = if self.may_park { lease } else { lease.without_marking_use() };
        let spec = self.spec_for(endpoint.fingerprint);
        let leased_at = Instant::now();
        Some(LeasedEndpoint {
            target: RelayTarget {
                engine: endpoint.engine.clone(),
                generation: endpoint.generation,
                address: endpoint.address,
                authorization: authorization(&spec),
                origin: spec.backend_origin.clone(),
            },
            body: self.body.payload(&spec.served_name),
            lease,
            leased_at,
            gate: Arc::clone(&endpoint.gate),
            canary: None,
            report_target: if spec.stub { self.report_target(endpoint, leased_at) } else { None },
            behind_stub: spec.stub,
            attempt: EndpointAttempt::new(&self.worker, route, endpoint, &self.path),
        })
    }

    /// Returns where the load report goes if this request asks the engine's stub for one. The first request after an
    /// interval without a reading does.
    ///
    /// A model's only engine is asked, too. There is no choice between engines, but each gateway limits its requests to
    /// a saturated engine, and only the leader reads the load in another way. Of an engine without a stub no request
    /// asks for a report, because only a stub reports the load at no cost.
    fn report_target(&self, endpoint: &Endpoint, now: Instant) -> Option<Arc<EngineActivity>> {
        let is_due = endpoint.activity.load().take_report_due(self.worker.tick_at(now));
        is_due.then(|| Arc::clone(&endpoint.activity))
    }

    async fn park(&self) -> Result<LeasedEndpoint, Fault> {
        if !self.may_park {
            return Err(Fault::ModelNotAwake { model: self.model.clone() });
        }
        let control = &self.worker.server.driver;
        let _parked = self.context.park();
        if let Some(parked) = &self.parked_notify {
            parked.notify_one();
        }
        let (band, only) = control.routes().models.get(&self.model).map_or((0, None), |route| {
            let only = self.affinity.required_owner(&self.worker, route);
            (route.priority, only)
        });
        let (key, priority) = self.key.as_ref().map_or(("", 0), |key| (&*key.name, key.priority));
        let wait = control.park(ParkRequest {
            model: self.model.clone(),
            band: band.saturating_add(priority),
            key: key.to_owned(),
            client: self.client_hash,
            arrived: self.context.arrived,
            deadline: self.deadline,
            stream: self.stream,
            required_engine: only,
            quoted: self.context.quoted_wait(),
        });
        // The queue ends every wait by its deadline; this timeout covers a dead queue.
        let patience = control.clock().instant_at(self.deadline + PARK_DEADLINE_SLACK);
        let GrantedLease { lease, engine, generation, fingerprint, address, canary, wait: waited } =
            tokio::time::timeout_at(patience, wait).await.unwrap_or(Err(Fault::ControlPlaneUnavailable))?;
        self.context.set_wait(waited);
        let spec = self.spec_for(fingerprint);
        let leased_at = Instant::now();
        let routes = control.routes();
        let route = routes.models.get(&self.model);
        let granted = (engine.clone(), generation);
        let endpoint = route.and_then(|route| route.endpoint_of(&granted));
        let reporting = endpoint.filter(|_| spec.stub);
        let report_target = reporting.and_then(|endpoint| self.report_target(endpoint, leased_at));
        let attempted = route.and_then(|route| {
            EndpointAttempt::for_granted(&self.worker, route, granted, endpoint, &self.path)
        });
        Ok(LeasedEndpoint {
            target: RelayTarget {
                engine,
                generation,
                address,
                authorization: authorization(&spec),
                origin: spec.backend_origin.clone(),
            },
            body: self.body.payload(&spec.served_name),
            gate: Arc::clone(lease.gate()),
            lease,
            leased_at,
            canary,
            report_target,
            behind_stub: spec.stub,
            attempt: attempted,
        })
    }

    async fn attempt(&self, endpoint: LeasedEndpoint) -> AttemptOutcome {
        self.context.record_engine(&endpoint.target.engine);
        self.context.set_phase(DisconnectPhase::Connecting);
        let LeasedEndpoint { target, body, lease, leased_at: now, gate, canary, .. } = endpoint;
        let (stub, report_target, attempted) =
            (endpoint.behind_stub, endpoint.report_target, endpoint.attempt);
        let (engine, generation) = (target.engine.clone(), target.generation);
        let timeouts = &self.config.timeouts;
        self.context.forwarded(now);
        lease.record_client(self.client_hash, now);
        let exchange = Exchange {
            now,
            target,
            request: UpstreamRequest {
                method: &self.method,
                path: &self.path,
                headers: &self.headers,
                request_id: self.sends_request_id.then_some(&self.context.id),
                body,
                stream: self.stream,
                schema: self.form,
                inspection: if self.quota_charge.is_some()
                    || self.context.is_recorded()
                    || attempted.as_ref().is_some_and(|attempted| attempted.records_response_id())
                {
                    ResponseInspection::EventsAndJson
                } else {
                    ResponseInspection::Events
                },
                wants_load_report: report_target.is_some(),
            },
            upload: None,
            lease,
            timeouts: relay::RelayTimeouts {
                connect: timeouts.connect,
                first_byte: timeouts.first_byte,
                non_stream: timeouts.non_stream,
                idle: timeouts.idle,
                exit_wait: EXIT_DETECTION_TIMEOUT.into(),
            },
            observer: RequestExchangeObserver {
                worker: Rc::clone(&self.worker),
                context: Rc::clone(&self.context),
                attempt: attempted,
                report_target,
                quota_charge: self.quota_charge.clone(),
                head_received: false,
            },
        };
        match (relay::exchange(&self.worker.pool, exchange).await, canary) {
            (Ok(response), canary) if stub && response.extensions().get() == Some(&GatedByStub) => {
                // The order matters: the lease ends, the driver learns that the engine is gated, and the canary ends
                // without a verdict.
                drop(response);
                self.worker.server.driver.report_gated(engine, generation);
                drop(canary);
                AttemptOutcome::Gated
            }
            (Ok(response), Some(canary)) if response.status().is_server_error() => {
                canary.report(CanaryVerdict::Failed(FailureCause::Unhealthy));
                let fault = Fault::EngineFailed {
                    model: self.model.clone(),
                    cause: FailureCause::Unhealthy,
                    wait: None,
                };
                AttemptOutcome::Retry(fault, RetryReason::Canary)
            }
            (Ok(response), canary) => {
                if let Some(canary) = canary {
                    canary.report(CanaryVerdict::Passed);
                }
                AttemptOutcome::Answered(Box::new(EngineResponse { response, gate }))
            }
            (Err(failed), Some(canary)) => {
                if let Some(cause) = canary_failure_cause(&failed.fault) {
                    canary.report(CanaryVerdict::Failed(cause));
                } else if !is_revocation(&failed.fault) {
                    return AttemptOutcome::Failed(failed.fault);
                }
                AttemptOutcome::Retry(failed.fault, RetryReason::Canary)
            }
            (Err(failed), None) if failed.reroutable && is_engine_gone(&failed.fault) => {
                AttemptOutcome::Retry(failed.fault, RetryReason::EngineGone(engine, gate))
            }
            (Err(failed), None) => AttemptOutcome::Failed(exit_as_closed(failed)),
        }
    }

    /// The configuration of the engine that was started with this fingerprint. Looked up once the engine is known: a
    /// reload may have happened while the request waited, and may not have reached the engine yet.
    fn spec_for(&self, fingerprint: u64) -> Arc<rouse_config::EngineConfig> {
        let config = self.worker.server.config.load();
        config
            .engine_started_with(&self.model, fingerprint)
            .map_or_else(|| Arc::clone(&self.spec), Arc::clone)
    }
}

fn authorization(spec: &rouse_config::EngineConfig) -> Option<HeaderValue> {
    let key = spec.api_key.as_ref()?;
    let mut value = HeaderValue::try_from(format!("Bearer {key}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// Waits until the gate of a dead engine is revoked, or [`EXIT_DETECTION_TIMEOUT`] passes. The gate is revoked as soon
/// as the engine's process is seen to be gone. A request that queues earlier would get the same engine again.
async fn until_revoked(gate: &Gate) {
    let mut revoked = pin!(gate.on_revoke());
    revoked.as_mut().enable();
    if gate.revoked().is_none() && gate.is_open() {
        // An engine that is not revoked in this time is alive: it closed a connection, and may get the request again.
        drop(tokio::time::timeout(EXIT_DETECTION_TIMEOUT, revoked).await);
    }
}
