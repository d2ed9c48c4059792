//! One machine: engines are child processes, accelerators are the machine's own.
//!
//! ```text
//!   submit ──▶ supervisor ──▶ one task per engine's life ──▶ events
//!                                │ owns the process and the work under way
//!                                └ adapter: HTTP on loopback
//! ```
//!
//! The supervisor hands each command to the life it means and keeps no state of its own beside that table. A life ends
//! only when its whole process group is seen gone. Dropping [`Local`] ends every task and no engine: the next start
//! adopts them.
//!
//! What runs when:
//! * `Reserve` is placed at once: the decisions' ledger is the only one there is on one machine.
//! * An awake engine's health is asked every `timeouts.health.every`; an event is sent when the answer changes, and
//!   with every failing answer, so that a journal of a healthy night is short.

mod adopt;
mod launch;
mod life;
mod log;
mod meter;
mod proc;
mod process;
mod ready;
mod store;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use arc_swap::ArcSwap;
use rouse::{
    fault::Cause,
    fleet::{
        command::Command,
        event::{Event, Learned, Verdict},
    },
    lease::Clock,
    model::{AcceleratorId, EngineId, ModelName},
    units::{Bytes, Generation, Millis, Tick},
};
use tokio::{
    sync::mpsc,
    task::{JoinHandle, JoinSet},
    time::{self, MissedTickBehavior},
};

use super::Platform;
use crate::config::Config;
use life::Order;
use meter::Meters;
use store::{Lock, Store};

pub use meter::{Error as MeterError, discover};
pub use store::Error;

/// How often the sizes of logs are looked at.
const TRIM_EVERY: Duration = Duration::from_secs(10);
/// Idle clocks and learned values are on disk so long after they changed, at the latest.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// The engines of this machine.
#[derive(Debug)]
pub struct Local {
    commands: mpsc::UnboundedSender<Command>,
    shared: Arc<Shared>,
    supervisor: JoinHandle<()>,
    lock: Lock,
}

/// What every task of the platform uses.
#[derive(Debug)]
struct Shared {
    config: ArcSwap<Config>,
    events: mpsc::Sender<Event>,
    clock: Clock,
    store: Arc<Store>,
    meters: Arc<Meters>,
    lost: Mutex<BTreeSet<AcceleratorId>>,
    /// Given to engines that live, or are about to.
    ports: Mutex<BTreeSet<u16>>,
}

impl Local {
    /// Locks the state directory and begins. On `events` come, in this order: what was learned earlier (`Recalled`),
    /// engines that already run (`Adopted`), `AdoptionDone`; then outcomes. Must be called inside a runtime, on which
    /// the platform's tasks run.
    pub fn start(config: Arc<Config>, events: mpsc::Sender<Event>, clock: Clock) -> Result<Self, Error> {
        let (store, lock) = Store::open(&config.state)?;
        let shared = Arc::new(Shared {
            store: Arc::new(store),
            config: ArcSwap::new(config),
            events,
            clock,
            meters: Arc::default(),
            lost: Mutex::default(),
            ports: Mutex::default(),
        });
        let (commands, orders) = mpsc::unbounded_channel();
        let supervisor = Supervisor {
            shared: Arc::clone(&shared),
            lives: BTreeMap::new(),
            tasks: JoinSet::new(),
        };
        Ok(Self {
            commands,
            shared,
            supervisor: tokio::spawn(supervisor.run(orders)),
            lock,
        })
    }

    /// From here on launches and probes go by `config`. Engines that run are not touched: stopping what is no longer
    /// configured is decided elsewhere.
    pub fn reconfigure(&self, config: Arc<Config>) {
        self.shared.config.store(config);
    }

    /// Keeps an engine's idle clock for the next start of the gateway. Cheap; call it every few seconds.
    pub fn note_idle(&self, engine: &EngineId, generation: Generation, last_end: Tick) {
        self.shared.store.note_idle(engine, generation, last_end);
    }

    /// Keeps what was learned for the next start.
    pub fn save_learned(&self, learned: BTreeMap<ModelName, Learned>) {
        self.shared.store.learn(learned);
    }

    /// The log of the model's first engine. There may be no such file yet.
    #[must_use]
    pub fn logs(&self, model: &ModelName) -> PathBuf {
        self.log(&EngineId::new(model.clone(), 0))
    }

    /// The log of this engine. There may be no such file yet.
    #[must_use]
    pub fn log(&self, engine: &EngineId) -> PathBuf {
        log::path(self.shared.store.folder(), engine)
    }

    /// Ends every task, saves what is unsaved and unlocks the state directory. Engines live on.
    pub async fn close(self) {
        let Self {
            commands,
            shared,
            supervisor,
            lock,
        } = self;
        drop(commands);
        if let Err(error) = supervisor.await {
            tracing::error!(%error, "the platform's supervisor died");
        }
        shared.store.save().await;
        drop(lock);
    }
}

impl Platform for Local {
    fn submit(&self, command: Command) {
        if self.commands.send(command).is_err() {
            tracing::error!("the platform's supervisor is gone");
        }
    }
}

impl Shared {
    /// Waits when the driver is behind: an outcome may be late, never lost.
    async fn tell(&self, event: Event) {
        if self.events.send(event).await.is_err() {
            tracing::debug!("nobody listens to events any more");
        }
    }

    fn log(&self, engine: &EngineId) -> PathBuf {
        log::path(self.store.folder(), engine)
    }

    /// This port belongs to an engine from here on.
    fn keep_port(&self, port: u16) -> bool {
        self.ports().insert(port)
    }

    fn release_port(&self, port: u16) {
        self.ports().remove(&port);
    }

    fn ports(&self) -> MutexGuard<'_, BTreeSet<u16>> {
        self.ports.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn measure(&self, accelerator: AcceleratorId) {
        let file = self.config.load().meters.get(&accelerator).cloned();
        match self.meters.read(accelerator.clone(), file).await {
            Ok(reading) => {
                if self.set_lost(&accelerator, false) {
                    self.tell(Event::AcceleratorBack {
                        accelerator: accelerator.clone(),
                    })
                    .await;
                }
                let by_engine = reading
                    .by_pid
                    .and_then(|by_pid| self.by_engine(&accelerator, by_pid));
                self.tell(Event::Memory {
                    accelerator,
                    used: reading.used,
                    by_engine,
                })
                .await;
            }
            Err(MeterError::Lost(_)) => {
                if self.set_lost(&accelerator, true) {
                    self.tell(Event::AcceleratorLost { accelerator }).await;
                }
            }
            Err(error) => tracing::warn!(%accelerator, %error, "no reading"),
        }
    }

    /// Whose memory it is, by process group. `None` when the meter names processes and none of them is visible here
    /// (another pid namespace): then nothing can be told.
    fn by_engine(
        &self,
        accelerator: &AcceleratorId,
        by_pid: BTreeMap<u32, Bytes>,
    ) -> Option<BTreeMap<EngineId, Bytes>> {
        let mut engines = self.store.engines();
        engines.retain(|_, entry| entry.accelerators.contains(accelerator));
        let mut held: BTreeMap<EngineId, Bytes> = engines
            .keys()
            .map(|engine| (engine.clone(), Bytes::ZERO))
            .collect();
        let foreign_view = !by_pid.is_empty();
        let mut seen = false;
        for (pid, bytes) in by_pid {
            let Some(stat) = i32::try_from(pid).ok().and_then(proc::stat) else {
                continue;
            };
            seen = true;
            let owner = engines.iter().find(|(_, entry)| entry.pid == stat.group);
            if let Some(sum) = owner.and_then(|(engine, _)| held.get_mut(engine)) {
                *sum += bytes;
            }
        }
        (seen || !foreign_view).then_some(held)
    }

    /// Whether that is news.
    fn set_lost(&self, accelerator: &AcceleratorId, lost: bool) -> bool {
        let mut known = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if lost {
            known.insert(accelerator.clone())
        } else {
            known.remove(accelerator)
        }
    }
}

struct Supervisor {
    shared: Arc<Shared>,
    lives: BTreeMap<EngineId, Life>,
    tasks: JoinSet<()>,
}

/// Where to reach the task of one engine's life. Closed once the process is gone.
struct Life {
    generation: Generation,
    orders: mpsc::UnboundedSender<Order>,
}

impl Supervisor {
    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        self.tasks.spawn(keep(Arc::clone(&self.shared)));
        self.adopt().await;
        loop {
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.carry_out(command).await,
                    None => break,
                },
                Some(ended) = self.tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "a task of the platform died");
                    }
                }
            }
        }
        self.tasks.shutdown().await;
    }

    async fn adopt(&mut self) {
        let learned = self.shared.store.learned();
        for (model, learned) in learned {
            self.shared.tell(Event::Recalled { model, learned }).await;
        }
        for (contact, process, start) in adopt::all(&self.shared).await {
            let (id, generation) = (contact.id.clone(), contact.generation);
            let (orders, received) = mpsc::unbounded_channel();
            self.tasks.spawn(life::live(contact, process, received, start));
            self.lives.insert(id, Life { generation, orders });
        }
        self.shared.tell(Event::AdoptionDone).await;
    }

    async fn carry_out(&mut self, command: Command) {
        match command {
            Command::Reserve {
                engine,
                generation,
                accelerators,
                ..
            } => {
                let placed = Event::Placed {
                    engine,
                    generation,
                    accelerators,
                };
                self.shared.tell(placed).await;
            }
            Command::Launch {
                engine,
                generation,
                accelerators,
                ..
            } => self.launch(engine, generation, accelerators).await,
            Command::Probe { engine, generation } => self.order(engine, generation, Order::Probe).await,
            Command::Sleep {
                engine,
                generation,
                level,
            } => self.order(engine, generation, Order::Sleep(level)).await,
            Command::Wake {
                engine,
                generation,
                level,
            } => self.order(engine, generation, Order::Wake(level)).await,
            Command::Stop {
                engine,
                generation,
                grace,
            } => self.order(engine, generation, Order::Stop(grace)).await,
            Command::Meter { accelerator, after } => self.meter(accelerator, after),
            // The ledger is the decisions' own; the rest is the driver's.
            Command::Shrink { .. }
            | Command::OpenGate { .. }
            | Command::CloseGate { .. }
            | Command::Revoke { .. }
            | Command::Grant { .. }
            | Command::Refuse { .. }
            | Command::Finish { .. } => {}
        }
    }

    async fn launch(&mut self, engine: EngineId, generation: Generation, accelerators: Vec<AcceleratorId>) {
        let running = self.lives.get(&engine).filter(|life| !life.orders.is_closed());
        if let Some(running) = running {
            tracing::error!(%engine, %generation, running = %running.generation, "launched while it runs");
            let cause = Cause::Refused;
            self.shared
                .tell(Event::StartFailed {
                    engine,
                    generation,
                    cause,
                })
                .await;
            return;
        }
        let (orders, received) = mpsc::unbounded_channel();
        let shared = Arc::clone(&self.shared);
        let id = engine.clone();
        self.tasks.spawn(async move {
            if let Some((contact, process)) = launch::launch(&shared, id, generation, accelerators).await {
                life::live(contact, process, received, life::Start::Launched).await;
            }
        });
        self.lives.insert(engine, Life { generation, orders });
    }

    /// An order to a life that is over has the outcome that it has for something that is gone.
    async fn order(&mut self, engine: EngineId, generation: Generation, order: Order) {
        let life = self
            .lives
            .get(&engine)
            .filter(|life| life.generation == generation);
        if life.is_some_and(|life| life.orders.send(order).is_ok()) {
            return;
        }
        let cause = Cause::Unreachable;
        let outcome = match order {
            Order::Probe => Event::Canary {
                engine,
                generation,
                verdict: Verdict::Failed(cause),
            },
            Order::Sleep(_) => Event::SleepFailed {
                engine,
                generation,
                cause,
            },
            Order::Wake(_) => Event::WakeFailed {
                engine,
                generation,
                cause,
            },
            Order::Stop(_) => Event::Gone {
                engine,
                generation,
                cause: Cause::Stopped,
            },
        };
        self.shared.tell(outcome).await;
    }

    fn meter(&mut self, accelerator: AcceleratorId, after: Millis) {
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(async move {
            time::sleep(after.duration()).await;
            shared.measure(accelerator).await;
        });
    }
}

/// Saves what may be saved late and keeps logs below their cap, while the platform lives.
async fn keep(shared: Arc<Shared>) {
    let mut trim = time::interval(TRIM_EVERY);
    trim.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = shared.store.dirty() => {
                shared.store.save().await;
                time::sleep(SAVE_EVERY).await;
            }
            _ = trim.tick() => {
                let cap = shared.config.load().log_cap;
                for engine in shared.store.engines().into_keys() {
                    let path = shared.log(&engine);
                    let trimmed = tokio::task::spawn_blocking(move || log::trim(&path, cap)).await;
                    if let Ok(Err(error)) = trimmed {
                        tracing::warn!(%engine, %error, "cannot trim the log");
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
