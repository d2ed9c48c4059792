//! One engine's life on this machine: the task that owns its process and whatever is being done with it.
//!
//! Work is a future that this task polls, not a task of its own: an order that supersedes it, or the end of the
//! process, drops it, and with it the connection it talks on. So nothing can report on behalf of a life that is over.

use std::{future::pending, net::SocketAddr, pin::Pin, sync::Arc, time::Duration};

use nix::sys::signal::Signal;
use rouse::{
    fault::Cause,
    fleet::event::Event,
    model::{EngineId, Level},
    units::{Generation, Millis},
};
use tokio::{
    sync::mpsc::UnboundedReceiver,
    time::{self, Instant, MissedTickBehavior},
};

use super::{
    Shared,
    launch::{self, MARK},
    log,
    process::Process,
    ready,
    store::Phase,
};
use crate::{
    config::Model,
    platform::adapter::{Adapter, Health},
};

/// What a life can be told.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    Probe,
    Sleep(Level),
    Wake(Level),
    Stop(Millis),
}

/// How a life begins for this gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    Launched,
    /// It ran already, and was not yet seen ready.
    Starting,
    Awake,
    Asleep,
}

/// Which engine, in which life, and how to speak to it.
#[derive(Debug)]
pub(super) struct Contact {
    pub(super) shared: Arc<Shared>,
    pub(super) id: EngineId,
    pub(super) generation: Generation,
    pub(super) address: SocketAddr,
    pub(super) model: Arc<Model>,
    pub(super) adapter: Adapter,
}

/// Something under way; tells whether the engine is to be watched afterwards.
type Work = Pin<Box<dyn Future<Output = After> + Send>>;
type Watch = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    Watch,
    AsBefore,
}

/// Until the process group is gone, or the gateway leaves.
pub(super) async fn live(
    contact: Arc<Contact>,
    process: Process,
    mut orders: UnboundedReceiver<Order>,
    start: Start,
) {
    let mut work: Option<Work> = None;
    let mut health: Option<Watch> = None;
    match start {
        Start::Launched | Start::Starting => work = Some(Box::pin(become_ready(Arc::clone(&contact), start))),
        Start::Awake => health = Some(Box::pin(watch(Arc::clone(&contact)))),
        Start::Asleep => {}
    }
    let mut kill_at: Option<Instant> = None;
    let mut stopping = false;
    loop {
        tokio::select! {
            biased;
            () = process.exited() => break,
            order = orders.recv() => match order {
                None => return,
                Some(Order::Stop(grace)) => {
                    (work, health) = (None, None);
                    if !stopping {
                        process.signal(Signal::SIGTERM);
                    }
                    // A second order may be less patient.
                    let at = Instant::now() + grace.duration();
                    kill_at = Some(kill_at.map_or(at, |earlier| earlier.min(at)));
                    stopping = true;
                }
                Some(_) if stopping => {}
                Some(Order::Probe) => work = Some(Box::pin(probe(Arc::clone(&contact)))),
                Some(Order::Sleep(level)) => {
                    health = None;
                    work = Some(Box::pin(sleep(Arc::clone(&contact), level)));
                }
                Some(Order::Wake(level)) => {
                    health = None;
                    work = Some(Box::pin(wake(Arc::clone(&contact), level)));
                }
            },
            after = under_way(&mut work) => {
                work = None;
                if after == After::Watch {
                    health = Some(Box::pin(watch(Arc::clone(&contact))));
                }
            }
            () = under_way(&mut health) => health = None,
            () = at(kill_at) => {
                kill_at = None;
                process.signal(Signal::SIGKILL);
            }
        }
    }
    (work, health) = (None, None);
    drop((work, health));
    bury(&contact, process, orders, stopping).await;
}

/// Ends what is left of the group, and only then reports.
async fn bury(contact: &Contact, process: Process, orders: UnboundedReceiver<Order>, stopping: bool) {
    let Contact { shared, id, generation, .. } = contact;
    let status = process.end().await;
    let cause = if stopping {
        Cause::Stopped
    } else {
        let path = shared.log(id);
        let tail = tokio::task::spawn_blocking(move || log::tail(&path)).await;
        log::classify(status, &tail.unwrap_or_default())
    };
    tracing::info!(engine = %id, %generation, %cause, "gone");
    shared.store.remove(id, *generation).await;
    shared.release_port(contact.address.port());
    // From here on the supervisor knows that a new life may begin; the driver learns it next.
    drop(orders);
    shared.tell(Event::Gone { engine: id.clone(), generation: *generation, cause }).await;
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

async fn become_ready(contact: Arc<Contact>, start: Start) -> After {
    let (engine, generation) = (contact.id.clone(), contact.generation);
    let profiled = Event::Profiled { engine: engine.clone(), generation };
    // Told its cache's size, an engine does not look at what is free: others may start beside it at once.
    let explicit = contact.explicit_memory();
    if explicit && start == Start::Launched {
        contact.shared.tell(profiled.clone()).await;
    }
    let expected = contact.learned().and_then(|learned| learned.start);
    ready::up(&contact, expected).await;
    let fit = ready::fit(&contact).await;
    if !explicit {
        contact.shared.tell(profiled).await;
    }
    match fit {
        Ok(()) => {
            contact.shared.tell(Event::Ready { engine, generation }).await;
            contact.enter(Phase::Awake).await;
            After::Watch
        }
        Err(cause) => {
            let failed = Event::StartFailed { engine, generation, cause };
            contact.shared.tell(failed).await;
            After::AsBefore
        }
    }
}

async fn probe(contact: Arc<Contact>) -> After {
    let patience = contact.shared.config.load().timeouts.first_byte.duration();
    let verdict = contact.adapter.probe(patience).await;
    let (engine, generation) = (contact.id.clone(), contact.generation);
    contact.shared.tell(Event::Canary { engine, generation, verdict }).await;
    After::AsBefore
}

async fn sleep(contact: Arc<Contact>, level: Level) -> After {
    contact.enter(Phase::Moving(level)).await;
    let outcome = contact.adapter.sleep(level).await;
    let (engine, generation) = (contact.id.clone(), contact.generation);
    let event = match outcome {
        Ok(()) => {
            contact.enter(Phase::Asleep(level)).await;
            Event::Slept { engine, generation, level }
        }
        Err(cause) => Event::SleepFailed { engine, generation, cause },
    };
    contact.shared.tell(event).await;
    After::AsBefore
}

async fn wake(contact: Arc<Contact>, level: Level) -> After {
    contact.enter(Phase::Moving(level)).await;
    let outcome = contact.adapter.wake(level).await;
    let (engine, generation) = (contact.id.clone(), contact.generation);
    if let Err(cause) = outcome {
        let failed = Event::WakeFailed { engine, generation, cause };
        contact.shared.tell(failed).await;
        return After::AsBefore;
    }
    // The orders return when they are carried out: what is left takes milliseconds.
    ready::up(&contact, None).await;
    contact.shared.tell(Event::Ready { engine, generation }).await;
    contact.enter(Phase::Awake).await;
    After::Watch
}

/// Asks an awake engine for its health, for as long as it is polled. See the platform's header for what is sent.
async fn watch(contact: Arc<Contact>) {
    let every = contact.shared.config.load().timeouts.health_every.duration();
    let mut ticks = time::interval(every.max(Duration::from_millis(1)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let (mut was_ok, mut tokens) = (true, None);
    loop {
        ticks.tick().await;
        let within = contact.health_timeout();
        let (health, counters) =
            tokio::join!(contact.adapter.health(within), contact.adapter.counters(within));
        let ok = health == Health::Good;
        let now = counters.map(|counters| counters.tokens);
        let progressed = matches!((tokens, now), (Some(before), Some(now)) if now != before);
        tokens = now.or(tokens);
        if !ok || !was_ok {
            let (engine, generation) = (contact.id.clone(), contact.generation);
            contact.shared.tell(Event::Health { engine, generation, ok, progressed }).await;
        }
        was_ok = ok;
    }
}

impl Contact {
    pub(super) fn new(
        shared: &Arc<Shared>,
        id: EngineId,
        generation: Generation,
        address: SocketAddr,
        model: Arc<Model>,
    ) -> Arc<Self> {
        Arc::new(Self {
            shared: Arc::clone(shared),
            id,
            generation,
            address,
            adapter: Adapter::new(&model, address),
            model,
        })
    }

    pub(super) fn health_timeout(&self) -> Duration {
        self.shared.config.load().timeouts.health_timeout.duration()
    }

    /// As it stands in the environment of the engine's processes.
    pub(super) fn mark(&self) -> String {
        format!("{MARK}={}", launch::mark(&self.shared, &self.id, self.generation))
    }

    /// The process group; `None` when it is gone.
    pub(super) fn group(&self) -> Option<i32> {
        let engines = self.shared.store.engines();
        engines.get(&self.id).map(|entry| entry.pid)
    }

    fn explicit_memory(&self) -> bool {
        let config = self.shared.config.load();
        let spec = config.core.models.iter().find(|spec| spec.name == self.id.model);
        spec.is_some_and(|spec| spec.explicit_memory)
    }

    fn learned(&self) -> Option<rouse::fleet::event::Learned> {
        self.shared.store.learned().get(&self.id.model).copied()
    }

    pub(super) async fn enter(&self, phase: Phase) {
        self.shared.store.set_phase(&self.id, self.generation, phase).await;
    }
}
