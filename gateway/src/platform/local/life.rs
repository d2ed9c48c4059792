//! One engine's life on this machine: the task that owns its process and whatever is being done with it.
//!
//! Work is a future that this task polls, not a task of its own: an order that supersedes it, or the end of the
//! process, drops it, and with it the connection it talks on. So nothing can report on behalf of a life that is over.

use std::{future::pending, net::SocketAddr, pin::Pin, sync::Arc};

use nix::sys::signal::Signal;
use rouse::{
    engine::past::Symptoms,
    fault::Cause,
    fleet::event::{Event, Learned},
    model::{EngineId, Level},
    process::Process,
    units::{Generation, Millis},
};
use tokio::{
    sync::mpsc::UnboundedReceiver,
    time::{self, Instant},
};

use super::{
    Shared,
    launch::{self, MARK},
    log,
    store::Phase,
    work::{self, After, Watch, Work},
};
use crate::{config::Model, platform::contact::Contact};

/// What a life can be told.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    Probe,
    Sleep(Level),
    Wake(Level),
    /// Its stub lets nobody in: tell when it does.
    Hold,
    Stop(Millis),
}

/// How a life begins for this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    /// Not yet seen ready.
    Starting,
    Awake,
    Asleep,
}

/// An engine whose process is on this machine.
#[derive(Debug)]
pub(super) struct Tenant {
    pub(super) shared: Arc<Shared>,
    pub(super) contact: Contact,
}

/// Until the process group is gone, or the gateway leaves.
pub(super) async fn live(
    tenant: Arc<Tenant>,
    process: Process,
    mut orders: UnboundedReceiver<Order>,
    start: Start,
) {
    // A probe has its place apart: it is ordered on `Ready`, when the work that sent it has yet to end.
    let (mut work, mut probe): (Option<Work>, Option<Work>) = (None, None);
    let mut health: Option<Watch> = None;
    match start {
        Start::Starting => work = Some(Box::pin(work::become_ready(Arc::clone(&tenant)))),
        Start::Awake => health = Some(Box::pin(work::watch(Arc::clone(&tenant), false))),
        Start::Asleep => {}
    }
    let mut kill_at: Option<Instant> = None;
    let mut stopping = false;
    // One that is stopped before it was ready has failed, or was not wanted any more: who stops it knows which.
    let mut ready = start != Start::Starting;
    // Said while the work is not over that the watch begins after.
    let mut held = false;
    loop {
        tokio::select! {
            biased;
            () = process.exited() => break,
            order = orders.recv() => match order {
                None => return,
                Some(Order::Stop(grace)) => {
                    (work, probe, health) = (None, None, None);
                    if !stopping {
                        process.signal(Signal::SIGTERM);
                    }
                    // A second order may be less patient.
                    let at = Instant::now() + grace.duration();
                    kill_at = Some(kill_at.map_or(at, |earlier| earlier.min(at)));
                    stopping = true;
                }
                Some(_) if stopping => {}
                Some(Order::Probe) => probe = Some(Box::pin(work::probe(Arc::clone(&tenant)))),
                Some(Order::Hold) if work.is_some() => held = true,
                Some(Order::Hold) => {
                    health = Some(Box::pin(work::watch(Arc::clone(&tenant), true)));
                }
                Some(Order::Sleep(level)) => {
                    (probe, health, held) = (None, None, false);
                    work = Some(Box::pin(work::sleep(Arc::clone(&tenant), level)));
                }
                Some(Order::Wake(level)) => {
                    (probe, health, held) = (None, None, false);
                    work = Some(Box::pin(work::wake(Arc::clone(&tenant), level)));
                }
            },
            after = under_way(&mut work) => {
                work = None;
                if after == After::Watch {
                    ready = true;
                    let held = std::mem::take(&mut held);
                    health = Some(Box::pin(work::watch(Arc::clone(&tenant), held)));
                }
            }
            _ = under_way(&mut probe) => probe = None,
            () = under_way(&mut health) => health = None,
            () = at(kill_at) => {
                kill_at = None;
                process.signal(Signal::SIGKILL);
            }
        }
    }
    drop((work, probe, health));
    bury(&tenant, process, orders, stopping, ready).await;
}

/// Ends what is left of the group, and only then reports.
async fn bury(
    tenant: &Tenant,
    process: Process,
    orders: UnboundedReceiver<Order>,
    stopping: bool,
    ready: bool,
) {
    let Tenant { shared, contact } = tenant;
    let Contact { id, generation, .. } = contact;
    let status = process.end().await;
    let mut cause = Cause::Stopped;
    if !(stopping && ready) {
        let path = shared.log(id);
        let launch = log::launch(id, *generation);
        let tail = tokio::task::spawn_blocking(move || log::tail(&path, &launch)).await.unwrap_or_default();
        if !stopping {
            cause = log::classify(status, &tail);
        }
        if let Some(line) = log::last_line(&tail) {
            contact.shows(Symptoms { last_line: Some(line), ..Symptoms::default() }).await;
        }
    }
    tracing::debug!(engine = %id, %generation, %cause, "gone");
    shared.store.remove(id, *generation).await;
    shared.release_port(contact.address.port());
    // From here on the supervisor knows that a new life may begin; the driver learns it next.
    drop(orders);
    shared.common.tell(Event::Gone { engine: id.clone(), generation: *generation, cause }).await;
}

async fn under_way<T>(work: &mut Option<Pin<Box<dyn Future<Output = T> + Send>>>) -> T {
    match work {
        Some(work) => work.as_mut().await,
        None => pending().await,
    }
}

async fn at(moment: Option<Instant>) {
    match moment {
        Some(moment) => time::sleep_until(moment).await,
        None => pending().await,
    }
}

impl Tenant {
    pub(super) fn new(
        shared: &Arc<Shared>,
        id: EngineId,
        generation: Generation,
        address: SocketAddr,
        model: Arc<Model>,
    ) -> Arc<Self> {
        let contact = Contact::new(&shared.common, id, generation, address, model);
        Arc::new(Self { shared: Arc::clone(shared), contact })
    }

    /// As it stands in the environment of the engine's processes.
    pub(super) fn mark(&self) -> String {
        let mark = launch::mark(&self.shared, &self.contact.id, self.contact.generation);
        format!("{MARK}={mark}")
    }

    /// The process group; `None` when it is gone.
    pub(super) fn group(&self) -> Option<i32> {
        let engines = self.shared.store.engines();
        engines.get(&self.contact.id).map(|entry| entry.pid)
    }

    pub(super) fn learned(&self) -> Option<Learned> {
        self.shared.store.learned().get(&self.contact.id.model).copied()
    }

    pub(super) async fn enter(&self, phase: Phase) {
        self.shared.store.set_phase(&self.contact.id, self.contact.generation, phase).await;
    }
}
