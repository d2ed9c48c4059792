//! From a routed request to an engine's answer: a lease at once, or a place in the queue and then a lease, and the few
//! cases in which one request is tried again without its client noticing.
//!
//! It is tried again only while no byte of an answer has gone out, so that nothing is generated twice for one client:
//!
//! * The first request after a start or wake is the canary. When it fails (5xx, a broken connection, no byte in time, a
//!   revoked lease) the engine is the suspect and not the request: it goes back to its old place in the queue,
//!   [`CANARIES`] times.
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

mod watcher;

use std::{pin::pin, rc::Rc, sync::Arc, time::Duration};

use http::{HeaderMap, HeaderValue, Method, uri::PathAndQuery};
use rouse::{
    fault::{Cause, Fault, Phase, Timer},
    fleet::event::Verdict,
    lease::{Gate, Lease},
    model::{EngineId, ModelName},
    openai::Form,
    relay::{self, Exchange, Gated, Look, Outgoing, Payload, Target},
    units::{Millis, Tick},
};
use tokio::{
    sync::{Notify, oneshot},
    time::Instant,
};

use super::{
    Core,
    affinity::{Attempted, Ties},
    call::Content,
    intake::Charge,
    reply::{self, Answer},
    track::Track,
};
use crate::{
    config::{self, OnDisconnect},
    driver::{Canary, Granted, Parking},
    keys::{self, Bill, Key},
};

pub(crate) use watcher::Watcher;

/// How often one request may be the canary of an engine that fails it.
const CANARIES: u32 = 3;
/// How much later than its own deadline a parked request gives up on a control plane that does not answer.
const SLACK: Millis = Millis::secs(2);
/// How long the end of a process may take to be noticed.
const NOTICED: Duration = Duration::from_secs(1);

/// One request that is to be answered by an engine.
pub(crate) struct Job {
    pub(crate) core: Rc<Core>,
    pub(crate) track: Rc<Track>,
    pub(crate) config: Arc<config::Config>,
    pub(crate) model: ModelName,
    /// As it was when the request came. The engine may have been started by another one.
    pub(crate) spec: Arc<config::Model>,
    pub(crate) method: Method,
    pub(crate) path: PathAndQuery,
    pub(crate) headers: HeaderMap,
    /// The engine is told the request's id.
    pub(crate) names_id: bool,
    pub(crate) body: Content,
    /// The body's share of what all bodies may hold. Goes with the job, which ends with the answer's head.
    pub(crate) _charge: Charge,
    pub(crate) stream: bool,
    /// In whose words a stream that breaks is told why.
    pub(crate) form: Form,
    pub(crate) ties: Ties,
    /// Whose request it is; `None` where no keys are configured.
    pub(crate) key: Option<Arc<Key>>,
    /// The client as a hash: of its API key, else of the user or session that the request names, else of its address.
    pub(crate) client: u64,
    /// What it takes of that key's limits.
    pub(crate) bill: Option<Rc<Bill>>,
    pub(crate) deadline: Tick,
    /// It queues for its model and wakes it; otherwise it is answered by an engine that is free, or refused.
    pub(crate) waits: bool,
    /// Notified when the request begins to wait, if it is one for a stream.
    pub(crate) parked: Option<Rc<Notify>>,
}

/// A lease, where to go with it, and whether the outcome is wanted.
struct Place {
    target: Target,
    /// With the name that this engine has for the model.
    body: Payload,
    lease: Lease,
    gate: Arc<Gate>,
    canary: Option<Canary>,
    /// A stub stands in front of it.
    stub: bool,
    /// For a model that may have several engines.
    attempted: Option<Box<Attempted>>,
}

/// What became of one attempt.
enum Attempt {
    Answered(Box<Answer>),
    Failed(Fault),
    /// The stub in front of the engine turned it away.
    Gated,
    /// The engine is at fault and not the request.
    Again(Fault, Again),
}

enum Again {
    Canary,
    /// Found gone before it saw anything.
    Absent(EngineId, Arc<Gate>),
}

/// An answer on its way to a client that may leave before it has it: sent, and not yet received, it would go with its
/// receiver.
struct Untaken(Option<Box<Answer>>);

impl Untaken {
    const fn new(answer: Box<Answer>) -> Self {
        Self(Some(answer))
    }

    fn take(mut self) -> Result<Box<Answer>, Fault> {
        self.0.take().ok_or(Fault::Internal)
    }
}

impl Drop for Untaken {
    fn drop(&mut self) {
        if let Some(answer) = self.0.take() {
            reply::drain(answer.response.into_body());
        }
    }
}

impl Job {
    /// Sees the request through to the head of an answer. A refusal says nothing that its client may not know.
    pub(crate) async fn run(self) -> Result<Box<Answer>, Fault> {
        if self.spec.on_disconnect == OnDisconnect::Drain {
            return Box::pin(self.run_apart()).await;
        }
        self.run_here().await
    }

    /// The same for a client that may interrupt its engine. Without a move: a job is large.
    pub(crate) async fn run_here(&self) -> Result<Box<Answer>, Fault> {
        let answer = match self.place().await {
            Ok(place) => self.attempts(place, None).await,
            Err(fault) => Err(fault),
        };
        answer.map_err(|fault| self.discreet(fault))
    }

    fn discreet(&self, fault: Fault) -> Fault {
        match &self.key {
            Some(key) => keys::discreet(fault, key),
            None => fault,
        }
    }

    /// In a task of its own, so that the engine is read to its end although the client left.
    async fn run_apart(self) -> Result<Box<Answer>, Fault> {
        let (mut tell, told) = oneshot::channel();
        tokio::task::spawn_local(async move {
            // Until a lease is held there is nothing to be read to its end: a client that leaves leaves the queue.
            let place = tokio::select! {
                biased;
                () = tell.closed() => return,
                place = self.place() => place,
            };
            let answer = match place {
                Ok(place) => self.attempts(place, Some(&mut tell)).await,
                Err(fault) => Err(fault),
            };
            let answer = answer.map_err(|fault| self.discreet(fault));
            drop(tell.send(answer.map(Untaken::new)));
        });
        told.await.unwrap_or(Err(Fault::Internal)).and_then(Untaken::take)
    }

    async fn place(&self) -> Result<Place, Fault> {
        match self.at_once(None) {
            Some(place) => {
                self.track.forwarded_at_once();
                Ok(place)
            }
            None => self.park().await,
        }
    }

    /// `client`: whom to tell, where the request outlives its client.
    async fn attempts(
        &self,
        first: Place,
        mut client: Option<&mut oneshot::Sender<Result<Untaken, Fault>>>,
    ) -> Result<Box<Answer>, Fault> {
        let mut place = first;
        let (mut canaries, mut absences) = (0, 0);
        loop {
            match self.attempt(place).await {
                Attempt::Answered(answer) => return Ok(answer),
                Attempt::Failed(fault) => return Err(fault),
                Attempt::Again(fault, Again::Canary) => {
                    canaries += 1;
                    if canaries >= CANARIES {
                        return Err(fault);
                    }
                }
                Attempt::Gated => {}
                Attempt::Again(fault, Again::Absent(engine, gate)) => {
                    absences += 1;
                    if absences > 1 {
                        return Err(fault);
                    }
                    if let Some(other) = self.at_once(Some(&engine)) {
                        self.track.replayed();
                        place = other;
                        continue;
                    }
                    until_revoked(&gate).await;
                }
            }
            self.track.replayed();
            if let Some(bill) = &self.bill {
                bill.again();
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
                () = left => return Err(Fault::ClientLeft { phase: Phase::Parked }),
                place = self.park() => place?,
            };
        }
    }

    /// A lease on an awake engine, if one can be had without waiting. `avoid`: but not on this one.
    fn at_once(&self, avoid: Option<&EngineId>) -> Option<Place> {
        let routes = self.core.shared.control.routes();
        let route = routes.models.get(&self.model)?;
        let (endpoint, lease) = self.ties.take(&self.core, route, &self.headers, avoid)?;
        let lease = if self.waits { lease } else { lease.unnoted() };
        let spec = self.spoken_to(endpoint.fingerprint);
        Some(Place {
            target: Target {
                engine: endpoint.engine.clone(),
                generation: endpoint.generation,
                address: endpoint.address,
                authorization: authorization(&spec),
                origin: spec.origin.clone(),
            },
            body: self.body.payload(&spec.served_name),
            lease,
            gate: Arc::clone(&endpoint.gate),
            canary: None,
            stub: spec.stub,
            attempted: Attempted::new(&self.core, route, endpoint, &self.path),
        })
    }

    async fn park(&self) -> Result<Place, Fault> {
        if !self.waits {
            return Err(Fault::NotAwake { model: self.model.clone() });
        }
        let control = &self.core.shared.control;
        let _parked = self.track.park();
        if let Some(parked) = &self.parked {
            parked.notify_one();
        }
        let (band, only) = control.routes().models.get(&self.model).map_or((0, None), |route| {
            let only = self.ties.only(&self.core, route);
            (route.priority, only)
        });
        let (key, priority) = self.key.as_ref().map_or(("", 0), |key| (&*key.name, key.priority));
        let wait = control.park(Parking {
            model: self.model.clone(),
            band: band.saturating_add(priority),
            key: key.to_owned(),
            client: self.client,
            arrived: self.track.arrived,
            deadline: self.deadline,
            stream: self.stream,
            only,
        });
        // The queue ends every wait by its deadline; this is for a queue that has died.
        let patience = control.clock().instant(self.deadline + SLACK);
        let Granted { lease, engine, generation, fingerprint, address, canary, waited } =
            tokio::time::timeout_at(patience, wait).await.unwrap_or(Err(Fault::ControlPlane))?;
        self.track.waited(waited);
        let spec = self.spoken_to(fingerprint);
        let attempted = Attempted::of_granted(&self.core, &engine, generation, &self.path);
        Ok(Place {
            target: Target {
                engine,
                generation,
                address,
                authorization: authorization(&spec),
                origin: spec.origin.clone(),
            },
            body: self.body.payload(&spec.served_name),
            gate: Arc::clone(lease.gate()),
            lease,
            canary,
            stub: spec.stub,
            attempted,
        })
    }

    async fn attempt(&self, place: Place) -> Attempt {
        self.track.engine(&place.target.engine);
        self.track.phase(Phase::Connecting);
        let Place { target, body, lease, gate, canary, stub, attempted } = place;
        let (engine, generation) = (target.engine.clone(), target.generation);
        let timeouts = &self.config.timeouts;
        let now = Instant::now();
        self.track.goes(now);
        lease.is_of(self.client, now);
        let exchange = Exchange {
            now,
            target,
            outgoing: Outgoing {
                method: &self.method,
                path: &self.path,
                headers: &self.headers,
                request_id: self.names_id.then_some(&self.track.id),
                body,
                stream: self.stream,
                form: self.form,
                look: if self.bill.is_some()
                    || self.track.is_noted()
                    || attempted.as_ref().is_some_and(|attempted| attempted.learns())
                {
                    Look::Documents
                } else {
                    Look::Events
                },
            },
            upload: None,
            lease,
            timeouts: relay::Timeouts {
                connect: timeouts.connect,
                first_byte: timeouts.first_byte,
                non_stream: timeouts.non_stream,
                idle: timeouts.idle,
                death: NOTICED.into(),
            },
            observer: Watcher {
                core: Rc::clone(&self.core),
                track: Rc::clone(&self.track),
                attempted,
                bill: self.bill.clone(),
                answered: false,
            },
        };
        match (relay::exchange(&self.core.pool, exchange).await, canary) {
            (Ok(response), canary) if stub && response.extensions().get() == Some(&Gated) => {
                // In this order: the lease ends, the engine is known to be gated, and its canary has proved nothing.
                drop(response);
                self.core.shared.control.gated(engine, generation);
                drop(canary);
                Attempt::Gated
            }
            (Ok(response), Some(canary)) if response.status().is_server_error() => {
                canary.tell(Verdict::Failed(Cause::Unhealthy));
                let fault =
                    Fault::EngineFailed { model: self.model.clone(), cause: Cause::Unhealthy, wait: None };
                Attempt::Again(fault, Again::Canary)
            }
            (Ok(response), canary) => {
                if let Some(canary) = canary {
                    canary.tell(Verdict::Passed);
                }
                Attempt::Answered(Box::new(Answer { response, gate }))
            }
            (Err(failed), Some(canary)) => {
                if let Some(cause) = blame(&failed.fault) {
                    canary.tell(Verdict::Failed(cause));
                } else if !is_revocation(&failed.fault) {
                    return Attempt::Failed(failed.fault);
                }
                Attempt::Again(failed.fault, Again::Canary)
            }
            (Err(failed), None) if failed.elsewhere && is_absent(&failed.fault) => {
                Attempt::Again(failed.fault, Again::Absent(engine, gate))
            }
            (Err(failed), None) => Attempt::Failed(ended(failed)),
        }
    }

    /// How the engine is spoken to that was started with this fingerprint. Looked up when it is known which engine it is:
    /// a reload may have come while the request waited, and may not have reached the engine yet.
    fn spoken_to(&self, fingerprint: u64) -> Arc<config::Model> {
        let config = self.core.shared.config.load();
        config.spoken_to(&self.model, fingerprint).map_or_else(|| Arc::clone(&self.spec), Arc::clone)
    }
}

fn authorization(spec: &config::Model) -> Option<HeaderValue> {
    let key = spec.api_key.as_ref()?;
    let mut value = HeaderValue::try_from(format!("Bearer {key}")).ok()?;
    value.set_sensitive(true);
    Some(value)
}

/// What a failed canary says about its engine; `None` when the engine is not to blame (its lease was revoked).
const fn blame(fault: &Fault) -> Option<Cause> {
    match fault {
        Fault::EngineTimeout { .. } => Some(Cause::Timeout),
        Fault::EngineUnreachable { .. }
        | Fault::EngineClosed { .. }
        | Fault::EngineFailed {
            cause: Cause::Exited(_) | Cause::Killed(_) | Cause::Unreachable | Cause::BrokeOff,
            ..
        } => Some(Cause::Unreachable),
        _ => None,
    }
}

/// That a process has ended and that its connection has are one thing, of which either may be heard first. Before a byte of the answer
/// its client is told the same of both, and so whether to ask again.
fn ended(failed: relay::Failed) -> Fault {
    match failed.fault {
        Fault::EngineFailed { model, cause: Cause::Exited(_) | Cause::Killed(_), wait: None } => {
            Fault::EngineClosed { model, begun: failed.begun }
        }
        other => other,
    }
}

/// The engine was taken away from the request, which another one may answer: not at the gateway's own end.
const fn is_revocation(fault: &Fault) -> bool {
    matches!(fault, Fault::EngineFailed { .. } | Fault::TurnOver { .. })
}

/// There is no engine to ask, or none that lets anybody in, whether its socket told so first or those who watch its
/// process.
const fn is_absent(fault: &Fault) -> bool {
    is_revocation(fault)
        || matches!(
            fault,
            Fault::EngineUnreachable { .. } | Fault::EngineTimeout { which: Timer::Connect, .. }
        )
}

/// A dead engine is revoked as soon as its process is seen gone. Queued before that, the request would be given to it
/// again.
async fn until_revoked(gate: &Gate) {
    let mut revoked = pin!(gate.on_revoke());
    revoked.as_mut().enable();
    if gate.revoked().is_none() && gate.is_open() {
        // Not revoked in this time, it is not dead: it closed a connection, and may be asked again.
        drop(tokio::time::timeout(NOTICED, revoked).await);
    }
}
