//! The one that is given commands, and the tasks it keeps.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rouse::{
    fault::Cause,
    fleet::{
        command::Command,
        event::{Event, Verdict},
    },
    model::{AcceleratorId, EngineId},
    units::{Generation, Millis},
};
use tokio::{
    sync::mpsc,
    task::{self, JoinSet},
    time::{self, MissedTickBehavior},
};

use super::{
    Shared, adopt, launch,
    life::{self, Order},
    log,
};

/// How often the sizes of logs are looked at.
const TRIM_EVERY: Duration = Duration::from_secs(10);
/// Idle clocks and learned values are on disk so long after they changed, at the latest.
const SAVE_EVERY: Duration = Duration::from_secs(1);

/// See the platform's header.
pub(super) struct Supervisor {
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
    pub(super) fn new(shared: Arc<Shared>) -> Self {
        Self { shared, lives: BTreeMap::new(), tasks: JoinSet::new() }
    }

    /// Until nobody can give commands any more.
    pub(super) async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
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
            self.shared.common.tell(Event::Recalled { model, learned }).await;
        }
        for (tenant, process, start) in adopt::all(&self.shared).await {
            let (id, generation) = (tenant.contact.id.clone(), tenant.contact.generation);
            let (orders, received) = mpsc::unbounded_channel();
            self.tasks.spawn(life::live(tenant, process, received, start));
            self.lives.insert(id, Life { generation, orders });
        }
        self.shared.common.tell(Event::AdoptionDone).await;
    }

    async fn carry_out(&mut self, command: Command) {
        match command {
            Command::Reserve { engine, generation, accelerators, .. } => {
                let placed = Event::Placed { engine, generation, accelerators };
                self.shared.common.tell(placed).await;
            }
            Command::Launch { engine, generation, accelerators, .. } => {
                self.launch(engine, generation, accelerators).await
            }
            Command::Probe { engine, generation } => self.order(engine, generation, Order::Probe).await,
            Command::Sleep { engine, generation, level } => {
                self.order(engine, generation, Order::Sleep(level)).await
            }
            Command::Wake { engine, generation, level } => {
                self.order(engine, generation, Order::Wake(level)).await
            }
            Command::Stop { engine, generation, grace, .. } => {
                self.order(engine, generation, Order::Stop(grace)).await
            }
            Command::Hold { engine, generation } => self.order(engine, generation, Order::Hold).await,
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
            self.shared.common.tell(Event::StartFailed { engine, generation, cause }).await;
            return;
        }
        let (orders, received) = mpsc::unbounded_channel();
        let shared = Arc::clone(&self.shared);
        let id = engine.clone();
        self.tasks.spawn(async move {
            if let Some((tenant, process)) = launch::launch(&shared, id, generation, accelerators).await {
                life::live(tenant, process, received, life::Start::Starting).await;
            }
        });
        self.lives.insert(engine, Life { generation, orders });
    }

    /// An order to a life that is over has the outcome that it has for something that is gone.
    async fn order(&mut self, engine: EngineId, generation: Generation, order: Order) {
        let life = self.lives.get(&engine).filter(|life| life.generation == generation);
        if life.is_some_and(|life| life.orders.send(order).is_ok()) {
            return;
        }
        let cause = Cause::Unreachable;
        let outcome = match order {
            Order::Probe => Event::Canary { engine, generation, verdict: Verdict::Failed(cause) },
            Order::Sleep(_) => Event::SleepFailed { engine, generation, cause },
            Order::Wake(_) => Event::WakeFailed { engine, generation, cause },
            // What is gone is heard of anyhow.
            Order::Hold => return,
            Order::Stop(_) => Event::Gone { engine, generation, cause: Cause::Stopped },
        };
        self.shared.common.tell(outcome).await;
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
                let cap = shared.common.config.load().log_cap;
                for engine in shared.store.engines().into_keys() {
                    let path = shared.log(&engine);
                    let trimmed = task::spawn_blocking(move || log::trim(&path, cap)).await;
                    if let Ok(Err(error)) = trimmed {
                        tracing::warn!(%engine, %error, "cannot trim the log");
                    }
                }
            }
        }
    }
}
