//! The supervisor: executes the platform's commands and owns its engine tasks.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rouse::{
    fault::FailureCause,
    fleet::{
        command::Command,
        event::{CanaryVerdict, Event},
    },
    model::{AcceleratorId, EngineId, VariantName},
    units::{Generation, Millis},
};
use tokio::{
    sync::mpsc,
    task::{self, JoinSet},
    time::{self, MissedTickBehavior},
};

use super::{
    LocalContext, adopt, engine_log,
    engine_task::{self, LocalEngineCommand},
    launch,
};

/// Interval between checks of the log sizes.
const LOG_TRIM_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between saves of idle clocks, failures and learned measurements; a change is on disk after this time at the
/// latest.
const STATE_SAVE_INTERVAL: Duration = Duration::from_secs(1);

/// Routes each command to its engine's task. See [`super`].
pub(super) struct LocalSupervisor {
    shared: Arc<LocalContext>,
    engine_tasks: BTreeMap<EngineId, EngineTaskHandle>,
    tasks: JoinSet<()>,
}

/// Makes the queue of an engine's task.
///
/// The task takes commands at once, except while it starts or ends the process. The kernel may hold that up for hours
/// (a program on a lost network drive, a worker in a driver), and meanwhile the fleet repeats a stop a few times a
/// minute. This must delay no other engine.
#[expect(
    clippy::disallowed_methods,
    reason = "a full queue would hold up all engines, and the fleet sends few commands"
)]
fn engine_command_queue()
-> (mpsc::UnboundedSender<LocalEngineCommand>, mpsc::UnboundedReceiver<LocalEngineCommand>) {
    mpsc::unbounded_channel()
}

/// Handle of one engine generation's task. Its sender is closed once the process is gone.
struct EngineTaskHandle {
    generation: Generation,
    commands: mpsc::UnboundedSender<LocalEngineCommand>,
}

impl LocalSupervisor {
    pub(super) fn new(shared: Arc<LocalContext>) -> Self {
        Self { shared, engine_tasks: BTreeMap::new(), tasks: JoinSet::new() }
    }

    /// Runs until the command sender is dropped.
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        self.tasks.spawn(save_and_trim(Arc::clone(&self.shared)));
        self.adopt().await;
        loop {
            tokio::select! {
                command = commands.recv() => match command {
                    Some(command) => self.execute(command).await,
                    None => break,
                },
                Some(ended) = self.tasks.join_next() => {
                    if let Err(error) = ended {
                        tracing::error!(%error, "an engine supervisor task failed");
                    }
                }
            }
        }
        self.tasks.shutdown().await;
    }

    async fn adopt(&mut self) {
        let learned = self.shared.store.learned();
        for (model, learned) in learned {
            let variant = VariantName::default();
            self.shared.common.send_event(Event::MeasurementsRestored { model, variant, learned }).await;
        }
        for (local_engine, process, start) in adopt::adopt_all(&self.shared).await {
            let (id, generation) = (local_engine.client.id.clone(), local_engine.client.generation);
            let (orders, received) = engine_command_queue();
            self.tasks.spawn(engine_task::run(local_engine, process, received, start));
            self.engine_tasks.insert(id, EngineTaskHandle { generation, commands: orders });
        }
        for (engine, failure) in self.shared.store.failures() {
            self.shared.common.send_event(failure.into_event(engine)).await;
        }
        self.shared.common.send_event(Event::AdoptionDone).await;
    }

    async fn execute(&mut self, command: Command) {
        match command {
            Command::Reserve { engine, generation, accelerators, .. } => {
                let placed = Event::Placed { engine, generation, accelerators };
                self.shared.common.send_event(placed).await;
            }
            Command::Launch { engine, generation, accelerators, .. } => {
                self.launch(engine, generation, accelerators).await
            }
            Command::Probe { engine, generation } => {
                self.send_to_engine(engine, generation, LocalEngineCommand::Probe).await
            }
            Command::Sleep { engine, generation, level } => {
                self.send_to_engine(engine, generation, LocalEngineCommand::Sleep(level)).await
            }
            Command::Wake { engine, generation, level } => {
                self.send_to_engine(engine, generation, LocalEngineCommand::Wake(level)).await
            }
            Command::Stop { engine, generation, grace, .. } => {
                self.send_to_engine(engine, generation, LocalEngineCommand::Stop(grace)).await
            }
            Command::AwaitStub { engine, generation } => {
                self.send_to_engine(engine, generation, LocalEngineCommand::AwaitStub).await
            }
            Command::ReadMeter { accelerator, after } => self.meter(accelerator, after),
            // The fleet has its own ledger, and the driver handles the others.
            Command::Shrink { .. }
            | Command::OpenGate { .. }
            | Command::CloseGate { .. }
            | Command::RevokeLeases { .. }
            | Command::Grant { .. }
            | Command::Refuse { .. }
            | Command::FinishOperation { .. } => {}
        }
    }

    async fn launch(&mut self, engine: EngineId, generation: Generation, accelerators: Vec<AcceleratorId>) {
        let running = self.engine_tasks.get(&engine).filter(|task| !task.commands.is_closed());
        if let Some(running) = running {
            tracing::error!(
                %engine, %generation, running = %running.generation,
                "cannot launch the engine: an earlier generation still runs"
            );
            let cause = FailureCause::Refused;
            self.shared.common.send_event(Event::StartFailed { engine, generation, cause }).await;
            return;
        }
        let (orders, received) = engine_command_queue();
        let shared = Arc::clone(&self.shared);
        let id = engine.clone();
        self.tasks.spawn(async move {
            if let Some((local_engine, process)) = launch::launch(&shared, id, generation, accelerators).await
            {
                engine_task::run(local_engine, process, received, engine_task::LocalEngineStart::Starting)
                    .await;
            }
        });
        self.engine_tasks.insert(engine, EngineTaskHandle { generation, commands: orders });
    }

    /// Sends a command to an engine task. If that generation has ended, sends the outcome of a vanished engine instead.
    async fn send_to_engine(
        &mut self,
        engine: EngineId,
        generation: Generation,
        command: LocalEngineCommand,
    ) {
        let task = self.engine_tasks.get(&engine).filter(|task| task.generation == generation);
        if let Some(task) = task
            && task.commands.send(command).is_ok()
        {
            return;
        }
        let cause = FailureCause::Unreachable;
        let outcome = match command {
            LocalEngineCommand::Probe => {
                Event::Canary { engine, generation, verdict: CanaryVerdict::Failed(cause) }
            }
            LocalEngineCommand::Sleep(_) => Event::SleepFailed { engine, generation, cause },
            LocalEngineCommand::Wake(_) => Event::WakeFailed { engine, generation, cause },
            // The fleet receives `Gone` anyway.
            LocalEngineCommand::AwaitStub => return,
            LocalEngineCommand::Stop(_) => Event::Gone { engine, generation, cause: FailureCause::Stopped },
        };
        self.shared.common.send_event(outcome).await;
    }

    fn meter(&mut self, accelerator: AcceleratorId, after: Millis) {
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(async move {
            time::sleep(after.duration()).await;
            shared.measure(accelerator).await;
        });
    }
}

/// Saves changed state with a delay and trims logs, while the platform runs.
async fn save_and_trim(shared: Arc<LocalContext>) {
    let mut trim = time::interval(LOG_TRIM_INTERVAL);
    trim.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            () = shared.store.wait_until_dirty() => {
                shared.store.save().await;
                time::sleep(STATE_SAVE_INTERVAL).await;
            }
            _ = trim.tick() => {
                let cap = shared.common.config.load().log_cap;
                for engine in shared.store.engines().into_keys() {
                    let path = shared.log_path(&engine);
                    let trimmed = task::spawn_blocking(move || engine_log::trim(&path, cap)).await;
                    if let Ok(Err(error)) = trimmed {
                        tracing::warn!(%engine, %error, "cannot trim the engine log");
                    }
                }
            }
        }
    }
}
