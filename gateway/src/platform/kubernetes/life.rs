//! One engine's life in a cluster: from the Pod that is found for it to the Pod that is seen gone.
//!
//! As on one machine, work is a future that this task polls: an order that supersedes it drops it. The task ends when the
//! engine's Pod is gone and its memory given back, or is dropped when this gateway no longer leads; then it has changed
//! nothing that the next leader does not find.

use std::{
    future::{pending, ready},
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use rouse::{
    fault::Cause,
    fleet::event::Event,
    model::{EngineId, Level},
    units::{Generation, Millis},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    time,
};

use super::{
    Place, Shared, asleep, observe,
    steward::Request,
    tenants::Tenancy,
    work::{self, Done},
};
use crate::{
    controllers::{
        pods::{Seen, Trouble},
        workload::PROXY_PORT,
    },
    platform::{
        contact::Contact,
        watch::{self as health, Known},
    },
};

/// What a life can be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    Probe,
    /// Its stub lets nobody in, and was not told so by this leader.
    Hold,
    /// No request passes any more; outcome: `Drained`.
    Close,
    /// As well, and those under way end.
    Cut,
    Open,
    /// At this level; no request is under way. Outcome: `Slept`.
    Sleep(Level),
    /// From this level. Outcome: `Ready`.
    Wake(Level),
    Stop,
}

/// How a life begins for this leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// A Pod is to be found for it.
    Launch,
    /// It has a Pod, and is not seen ready.
    Starting,
    Awake,
    /// It was awake to whoever led before, and has not answered this leader.
    Doubtful,
    Asleep,
    /// It was told to sleep, and whoever led before has not heard that it does.
    FallingAsleep(Level),
}

/// Which engine, in which life, and where.
pub(super) struct Berth {
    pub(super) shared: Arc<Shared>,
    pub(super) id: EngineId,
    pub(super) generation: Generation,
    pub(super) place: Arc<Place>,
    pub(super) requests: mpsc::UnboundedSender<Request>,
    /// The engine's stub has answered which accelerators its Pod has.
    pub(super) located: AtomicBool,
}

/// The Pod that it has; `None` while it has none, and once it is gone.
pub(super) type Pod = watch::Receiver<Option<Arc<Seen>>>;

type Work<T> = Option<Pin<Box<dyn Future<Output = T> + Send>>>;

/// Until its Pod is gone, or this gateway does not lead any more.
pub(super) async fn live(
    berth: Arc<Berth>,
    mut orders: mpsc::UnboundedReceiver<Order>,
    mut pod: Pod,
    start: Start,
) {
    let mut contact = match start {
        Start::Launch => None,
        _ => berth.contact(&pod),
    };
    let mut starting: Work<Done> = Some(match (start, &contact) {
        (Start::Launch, _) => Box::pin(work::begin(Arc::clone(&berth), pod.clone())),
        (Start::Starting, _) => Box::pin(work::resume(Arc::clone(&berth), pod.clone())),
        (Start::Awake | Start::Doubtful, _) => Box::pin(ready(Done::Ready)),
        (Start::FallingAsleep(level), Some(contact)) => {
            Box::pin(asleep::again(Arc::clone(contact), Arc::clone(&berth), pod.clone(), level))
        }
        (Start::Asleep | Start::FallingAsleep(_), _) => Box::pin(ready(Done::Asleep)),
    });
    let (mut probe, mut drain, mut watched, mut leaving): (Work<()>, Work<()>, Work<()>, Work<()>) =
        (None, None, None, None);
    let mut observed: Work<()> = None;
    let mut tenancy = contact.is_some().then(|| berth.tenancy(&pod));
    let mut cause = Cause::Stopped;
    loop {
        tokio::select! {
            biased;
            ended = lost(&mut pod, contact.is_some(), leaving.is_some()) => {
                (starting, probe, drain, watched, observed) = (None, None, None, None, None);
                cause = ended;
                berth.goes(&pod).await;
                berth.explain(&pod).await;
                leaving = Some(Box::pin(work::leave(Arc::clone(&berth), pod.clone(), contact.is_some())));
            }
            () = under_way(&mut leaving) => break,
            order = orders.recv() => match order {
                None => return,
                Some(_) if leaving.is_some() => {}
                Some(Order::Stop) => {
                    (starting, probe, drain, watched, observed) = (None, None, None, None, None);
                    leaving = Some(Box::pin(work::leave(Arc::clone(&berth), pod.clone(), contact.is_some())));
                }
                Some(order) => {
                    let Some(contact) = contact.clone() else { continue };
                    match order {
                        Order::Probe => probe = Some(Box::pin(async move { health::probe(&contact).await })),
                        Order::Close => drain = Some(Box::pin(work::drain(contact, Arc::clone(&berth), false))),
                        Order::Cut => drain = Some(Box::pin(work::drain(contact, Arc::clone(&berth), true))),
                        Order::Open => drain = Some(Box::pin(work::open(contact, Arc::clone(&berth)))),
                        Order::Hold => {
                            let opened = work::restore(Arc::clone(&contact), Arc::clone(&berth));
                            watched = Some(Box::pin(async move {
                                opened.await;
                                health::watch(&contact, Known::Held).await;
                            }));
                        }
                        Order::Sleep(level) => {
                            (probe, watched, observed) = (None, None, None);
                            starting = Some(Box::pin(asleep::sleep(contact, Arc::clone(&berth), pod.clone(), level)));
                        }
                        Order::Wake(level) => {
                            starting = Some(Box::pin(asleep::wake(contact, Arc::clone(&berth), pod.clone(), level)));
                        }
                        Order::Stop => {}
                    }
                }
            },
            done = under_way(&mut starting) => {
                starting = None;
                match done {
                    // From here on this Pod is the life's, and there is no other.
                    Done::Started => {
                        contact = berth.contact(&pod);
                        tenancy = Some(berth.tenancy(&pod));
                        starting = Some(Box::pin(work::resume(Arc::clone(&berth), pod.clone())));
                    }
                    Done::Ready => {
                        if let Some(contact) = contact.clone() {
                            let known = if start == Start::Doubtful { Known::Doubtful } else { Known::Well };
                            watched = Some(Box::pin(async move { health::watch(&contact, known).await }));
                        }
                        if let Some(tenancy) = tenancy.clone() {
                            observed = Some(Box::pin(berth.observe(&pod, tenancy, start)));
                        }
                    }
                    Done::Asleep | Done::Failed => {}
                }
            }
            () = under_way(&mut probe) => probe = None,
            () = under_way(&mut drain) => drain = None,
            () = under_way(&mut watched) => watched = None,
            () = under_way(&mut observed) => observed = None,
        }
    }
    drop((starting, probe, drain, watched, observed, leaving, tenancy));
    berth.bury(cause).await;
}

impl Berth {
    /// How its engine is spoken to, once its Pod has an address: through its stub.
    fn contact(&self, pod: &Pod) -> Option<Arc<Contact>> {
        let address = self.proxy(pod)?;
        let contact = Contact::new(
            &self.shared.common,
            self.id.clone(),
            self.generation,
            address,
            Arc::clone(&self.place.engine),
        );
        Some(Arc::new(contact))
    }

    pub(super) fn proxy(&self, pod: &Pod) -> Option<SocketAddr> {
        let address = pod.borrow().as_ref()?.address?;
        Some(SocketAddr::new(address, PROXY_PORT))
    }

    /// Somebody else told its Pod to go: nobody is sent to it any more, and whoever comes waits for the next one.
    async fn goes(&self, pod: &Pod) {
        if pod.borrow().as_ref().is_some_and(|pod| pod.ending && !pod.over) {
            let (engine, generation) = (self.id.clone(), self.generation);
            self.shared.common.tell(Event::Gated { engine, generation }).await;
        }
    }

    /// Tells what its Pod's trouble is.
    pub(super) async fn explain(&self, pod: &Pod) {
        let trouble = pod.borrow().as_ref().and_then(|seen| seen.trouble.as_ref().map(ToString::to_string));
        if let Some(trouble) = trouble {
            self.shared.fails(&self.id, self.generation, &trouble).await;
        }
    }

    /// It is at the accelerators of this Pod from now on.
    fn tenancy(&self, pod: &Pod) -> Arc<Tenancy> {
        let node = pod.borrow().as_ref().and_then(|pod| pod.node.clone());
        Arc::new(self.shared.tenants.enter(self.id.clone(), node))
    }

    /// Looks at the engine's memory while it serves, and, should it have become ready before that was known, at where it is.
    fn observe(
        self: &Arc<Self>,
        pod: &Pod,
        tenancy: Arc<Tenancy>,
        start: Start,
    ) -> impl Future<Output = ()> + use<> {
        let (berth, pod) = (Arc::clone(self), pod.clone());
        let since = self.shared.common.clock.now();
        async move {
            if matches!(start, Start::Awake | Start::Doubtful) {
                // Of an engine that was found serving it is not known at once who else is there.
                time::sleep(observe::EVERY).await;
            }
            let memory = async {
                // On a requester's accelerators others sleep: what is in use there is not this engine's alone.
                if !berth.place.dual {
                    observe::watch(Arc::clone(&berth), pod.clone(), tenancy, since).await;
                }
            };
            tokio::join!(work::locate(&berth, &pod), memory);
        }
    }

    /// Gives its memory back, and only then reports.
    async fn bury(&self, cause: Cause) {
        tracing::debug!(engine = %self.id, generation = %self.generation, %cause, "gone");
        self.shared.release(&self.place, self.id.replica).await;
        self.shared.told.is_over(&self.id);
        let (engine, generation) = (self.id.clone(), self.generation);
        drop(self.requests.send(Request::Over { engine: engine.clone(), generation }));
        self.shared.common.tell(Event::Gone { engine, generation, cause }).await;
    }

    /// No Pod is kept for it any more, and it has none; what it had has been told to go.
    pub(super) async fn left(&self) {
        let (done, left) = oneshot::channel();
        let request = Request::Leave { engine: self.id.clone(), generation: self.generation, done };
        if self.requests.send(request).is_err() || left.await.is_err() {
            // This gateway leads no more: the task is about to be dropped.
            pending().await
        }
    }
}

/// Its Pod has come to an end that nobody ordered. `begun`: this Pod is the life's; before that another takes its place.
async fn lost(pod: &mut Pod, begun: bool, leaving: bool) -> Cause {
    if !begun || leaving {
        return pending().await;
    }
    let over = |pod: &Option<Arc<Seen>>| {
        let crashed = |pod: &Seen| matches!(pod.trouble, Some(Trouble::Crashed { .. }));
        pod.as_ref().is_none_or(|pod| pod.over || pod.ending || crashed(pod))
    };
    let Ok(seen) = pod.wait_for(over).await else {
        return pending().await;
    };
    match seen.as_ref().and_then(|seen| seen.trouble.as_ref()) {
        Some(Trouble::Crashed { code, signal, .. }) => crashed(*code, *signal),
        _ => Cause::Unreachable,
    }
}

pub(super) fn crashed(code: i32, signal: Option<i32>) -> Cause {
    /// A shell's, and a container runtime's, for one that a signal has ended.
    const SIGNALLED: i32 = 128;
    match (code, signal) {
        (_, Some(signal)) => Cause::Killed(signal),
        (code, None) if code > SIGNALLED && code < SIGNALLED + 65 => Cause::Killed(code - SIGNALLED),
        (code, None) => Cause::Exited(code),
    }
}

async fn under_way<T>(work: &mut Work<T>) -> T {
    match work {
        Some(work) => work.as_mut().await,
        None => pending().await,
    }
}

/// Pauses that grow, between tries of something that must come to pass.
pub(super) struct Pauses(Duration);

impl Pauses {
    pub(super) const fn new() -> Self {
        Self(Duration::from_millis(20))
    }

    pub(super) async fn pause(&mut self) {
        time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(Millis::secs(1).duration());
    }
}
