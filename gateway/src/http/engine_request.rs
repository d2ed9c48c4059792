//! From a routed request to an engine's answer: a lease at once, or a place in the queue and then a lease, and the few
//! cases in which one request is tried again without its client noticing.
//!
//! It is tried again only while no byte of an answer has gone out, so that nothing is generated twice for one client:
//!
//! * The first request after a start or wake is the canary. When it fails (5xx, a broken connection, no byte in time, a
//!   revoked lease) the engine is the suspect and not the request: it goes back to its old place in the queue,
//!   [`MAX_CANARY_ATTEMPTS`] times.
//! * An engine that cannot be reached is not yet known to be dead by those who decide. The request, which no engine has
//!   begun, goes to another engine of the model at once; where there is none to be had, it waits until the dead engine's
//!   gate closes and queues again. Once, either way.
//!
//! * An engine behind a stub whose gate is closed has not seen the request at all: it goes back to its old place in the queue
//!   as often as that happens, until its deadline. The mark that says so is believed only where a stub is configured. The
//!   stub lets no such mark of its engine through; an engine alone could park everybody with it.
//!
//! Every other request that an engine may have begun fails with it: only its client can know whether twice is harmless. An
//! engine's own refusal is an answer, also a 503 with a `Retry-After`: it passes on as it is, since the engine looked at
//! the request, and a crowd that is sent on from one full engine to the next makes all of them full.

mod observer;

use std::{pin::pin, rc::Rc, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderValue, Method, uri::PathAndQuery};
use rouse::{
    fault::{DisconnectPhase, ExchangeTimeout, FailureCause, Fault},
    fleet::event::CanaryVerdict,
    model::{EngineId, ModelName},
    units::{Millis, Tick},
};
use rouse_net::{
    lease::{Gate, Lease},
    openai::ApiSchema,
    relay::{self, Exchange, GatedByStub, Payload, RelayTarget, ResponseInspection, UpstreamRequest},
};
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use super::{
    WorkerContext,
    affinity::{AffinityKeys, EndpointAttempt},
    body::BodyBytesGuard,
    request_context::RequestContext,
    response_body::{self, EngineResponse},
    routed_request::RoutedBody,
};
use crate::{
    config::{self, OnDisconnect},
    driver::{CanaryGuard, GrantedLease, ParkRequest},
    keys::{self, ApiKey, QuotaCharge},
};

pub(crate) use observer::RequestExchangeObserver;

/// How often one request may be the canary of an engine that fails it.
const MAX_CANARY_ATTEMPTS: u32 = 3;
/// How much later than its own deadline a parked request gives up on a control plane that does not answer.
const PARK_DEADLINE_SLACK: Millis = Millis::secs(2);
/// How long the end of a process may take to be noticed.
const EXIT_DETECTION_TIMEOUT: Duration = Duration::from_secs(1);

/// One request that is to be answered by an engine.
pub(crate) struct EngineRequest {
    pub(crate) worker: Rc<WorkerContext>,
    pub(crate) context: Rc<RequestContext>,
    pub(crate) config: Arc<config::Config>,
    pub(crate) model: ModelName,
    /// As it was when the request came. The engine may have been started by another one.
    pub(crate) spec: Arc<config::EngineConfig>,
    pub(crate) method: Method,
    pub(crate) path: PathAndQuery,
    pub(crate) headers: HeaderMap,
    /// The engine is told the request's id.
    pub(crate) sends_request_id: bool,
    pub(crate) body: RoutedBody,
    /// The body's share of what all bodies may hold. Goes with the job, which ends with the answer's head.
    pub(crate) _body_guard: BodyBytesGuard,
    pub(crate) stream: bool,
    /// In whose words a stream that breaks is told why.
    pub(crate) form: ApiSchema,
    pub(crate) affinity: AffinityKeys,
    /// Whose request it is; `None` where no keys are configured.
    pub(crate) key: Option<Arc<ApiKey>>,
    /// The client as a hash: of its API key, else of the user or session that the request names, else of its address.
    pub(crate) client_hash: u64,
    /// What it takes of that key's limits.
    pub(crate) quota_charge: Option<Rc<QuotaCharge>>,
    pub(crate) deadline: Tick,
    /// It queues for its model and wakes it; otherwise it is answered by an engine that is free, or refused.
    pub(crate) may_park: bool,
    /// Notified when the request begins to wait, if it is one for a stream.
    pub(crate) parked_notify: Option<Rc<Notify>>,
}

/// A lease, where to go with it, and whether the outcome is wanted.
struct LeasedEndpoint {
    target: RelayTarget,
    /// With the name that this engine has for the model.
    body: Payload,
    lease: Lease,
    gate: Arc<Gate>,
    canary: Option<CanaryGuard>,
    /// A stub stands in front of it.
    behind_stub: bool,
    /// For a model that may have several engines.
    attempt: Option<Box<EndpointAttempt>>,
}

/// What became of one attempt.
enum AttemptOutcome {
    Answered(Box<EngineResponse>),
    Failed(Fault),
    /// The stub in front of the engine turned it away.
    Gated,
    /// The engine is at fault and not the request.
    Retry(Fault, RetryReason),
}

enum RetryReason {
    Canary,
    /// Found gone before it saw anything.
    EngineGone(EngineId, Arc<Gate>),
}

/// An answer on its way to a client that may leave before it has it: sent, and not yet received, it would go with its
/// receiver.
struct UndeliveredResponse(Option<Box<EngineResponse>>);

impl UndeliveredResponse {
    const fn new(answer: Box<EngineResponse>) -> Self {
        Self(Some(answer))
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
    /// Sees the request through to the head of an answer. A refusal says nothing that its client may not know.
    pub(crate) async fn run(self) -> Result<Box<EngineResponse>, Fault> {
        if self.spec.on_disconnect == OnDisconnect::Drain {
            return Box::pin(self.run_detached()).await;
        }
        self.run_inline().await
    }

    /// The same for a client that may interrupt its engine. Without a move: a job is large.
    pub(crate) async fn run_inline(&self) -> Result<Box<EngineResponse>, Fault> {
        let answer = match self.acquire_lease().await {
            Ok(place) => self.run_attempts(place, None).await,
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

    /// In a task of its own, so that the engine is read to its end although the client left.
    async fn run_detached(self) -> Result<Box<EngineResponse>, Fault> {
        let (mut tell, told) = oneshot::channel();
        tokio::task::spawn_local(async move {
            // Until a lease is held there is nothing to be read to its end: a client that leaves leaves the queue.
            let place = tokio::select! {
                biased;
                () = tell.closed() => return,
                place = self.acquire_lease() => place,
            };
            let answer = match place {
                Ok(place) => self.run_attempts(place, Some(&mut tell)).await,
                Err(fault) => Err(fault),
            };
            let answer = answer.map_err(|fault| self.redact_fault(fault));
            drop(tell.send(answer.map(UndeliveredResponse::new)));
        });
        told.await.unwrap_or(Err(Fault::Internal)).and_then(UndeliveredResponse::take)
    }

    async fn acquire_lease(&self) -> Result<LeasedEndpoint, Fault> {
        match self.try_acquire_lease(None) {
            Some(place) => {
                self.context.set_forwarded_at_once();
                Ok(place)
            }
            None => self.park().await,
        }
    }

    /// `client`: whom to tell, where the request outlives its client.
    async fn run_attempts(
        &self,
        first: LeasedEndpoint,
        mut client: Option<&mut oneshot::Sender<Result<UndeliveredResponse, Fault>>>,
    ) -> Result<Box<EngineResponse>, Fault> {
        let mut place = first;
        let (mut canaries, mut absences) = (0, 0);
        loop {
            match self.attempt(place).await {
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
                        place = other;
                        continue;
                    }
                    until_revoked(&gate).await;
                }
            }
            self.context.retried();
            if let Some(bill) = &self.quota_charge {
                bill.reset_for_retry();
            }
            let left = async {
                match &mut client {
                    Some(client) => client.closed().await,
                    None => std::future::pending().await,
                }
            };
            // No model is woken for nobody.
            place = tokio::select! {
                biased;
                () = left => return Err(Fault::ClientDisconnected { phase: DisconnectPhase::Parked }),
                place = self.park() => place?,
            };
        }
    }

    /// A lease on an awake engine, if one can be had without waiting. `avoid`: but not on this one.
    fn try_acquire_lease(&self, avoid: Option<&EngineId>) -> Option<LeasedEndpoint> {
        let routes = self.worker.server.driver.routes();
        let route = routes.models.get(&self.model)?;
        let (endpoint, lease) = self.affinity.take_lease(&self.worker, route, &self.headers, avoid)?;
        let lease = if self.may_park { lease } else { lease.without_marking_use() };
        let spec = self.spec_for(endpoint.fingerprint);
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
            gate: Arc::clone(&endpoint.gate),
            canary: None,
            behind_stub: spec.stub,
            attempt: EndpointAttempt::new(&self.worker, route, endpoint, &self.path),
        })
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
        });
        // The queue ends every wait by its deadline; this is for a queue that has died.
        let patience = control.clock().instant_at(self.deadline + PARK_DEADLINE_SLACK);
        let GrantedLease { lease, engine, generation, fingerprint, address, canary, wait: waited } =
            tokio::time::timeout_at(patience, wait).await.unwrap_or(Err(Fault::ControlPlaneUnavailable))?;
        self.context.set_wait(waited);
        let spec = self.spec_for(fingerprint);
        let attempted = EndpointAttempt::for_granted(&self.worker, &engine, generation, &self.path);
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
            canary,
            behind_stub: spec.stub,
            attempt: attempted,
        })
    }

    async fn attempt(&self, place: LeasedEndpoint) -> AttemptOutcome {
        self.context.record_engine(&place.target.engine);
        self.context.set_phase(DisconnectPhase::Connecting);
        let LeasedEndpoint { target, body, lease, gate, canary, behind_stub: stub, attempt: attempted } =
            place;
        let (engine, generation) = (target.engine.clone(), target.generation);
        let timeouts = &self.config.timeouts;
        let now = Instant::now();
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
                quota_charge: self.quota_charge.clone(),
                head_received: false,
            },
        };
        match (relay::exchange(&self.worker.pool, exchange).await, canary) {
            (Ok(response), canary) if stub && response.extensions().get() == Some(&GatedByStub) => {
                // In this order: the lease ends, the engine is known to be gated, and its canary has proved nothing.
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

    /// How the engine is spoken to that was started with this fingerprint. Looked up when it is known which engine it is:
    /// a reload may have come while the request waited, and may not have reached the engine yet.
    fn spec_for(&self, fingerprint: u64) -> Arc<config::EngineConfig> {
        let config = self.worker.server.config.load();
        config
            .engine_started_with(&self.model, fingerprint)
            .map_or_else(|| Arc::clone(&self.spec), Arc::clone)
    }
}

fn authorization(spec: &config::EngineConfig) -> Option<HeaderValue> {
    let key = spec.api_key.as_ref()?;
    let mut value = HeaderValue::try_from(format!("Bearer {key}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// What a failed canary says about its engine; `None` when the engine is not to blame (its lease was revoked).
const fn canary_failure_cause(fault: &Fault) -> Option<FailureCause> {
    match fault {
        Fault::EngineTimeout { .. } => Some(FailureCause::Timeout),
        Fault::EngineUnreachable { .. }
        | Fault::EngineClosedConnection { .. }
        | Fault::EngineFailed {
            cause:
                FailureCause::Exited(_)
                | FailureCause::Killed(_)
                | FailureCause::Unreachable
                | FailureCause::ConnectionBroken,
            ..
        } => Some(FailureCause::Unreachable),
        _ => None,
    }
}

/// That a process has ended and that its connection has are one thing, of which either may be heard first. Before a byte of the answer
/// its client is told the same of both, and so whether to ask again.
fn exit_as_closed(failed: relay::ExchangeError) -> Fault {
    match failed.fault {
        Fault::EngineFailed {
            model,
            cause: FailureCause::Exited(_) | FailureCause::Killed(_),
            wait: None,
        } => Fault::EngineClosedConnection { model, may_have_started: failed.begun },
        other => other,
    }
}

/// The engine was taken away from the request, which another one may answer: not at the gateway's own end.
const fn is_revocation(fault: &Fault) -> bool {
    matches!(fault, Fault::EngineFailed { .. } | Fault::TurnEnded { .. })
}

/// There is no engine to ask, or none that lets anybody in, whether its socket told so first or those who watch its
/// process.
const fn is_engine_gone(fault: &Fault) -> bool {
    is_revocation(fault)
        || matches!(
            fault,
            Fault::EngineUnreachable { .. } | Fault::EngineTimeout { timeout: ExchangeTimeout::Connect, .. }
        )
}

/// A dead engine is revoked as soon as its process is seen gone. Queued before that, the request would be given to it
/// again.
async fn until_revoked(gate: &Gate) {
    let mut revoked = pin!(gate.on_revoke());
    revoked.as_mut().enable();
    if gate.revoked().is_none() && gate.is_open() {
        // Not revoked in this time, it is not dead: it closed a connection, and may be asked again.
        drop(tokio::time::timeout(EXIT_DETECTION_TIMEOUT, revoked).await);
    }
}
