//! Runs the engine itself, while no gateway does.
//!
//! It takes the lock of the state directory, so no gateway starts meanwhile, and it records the engine there: if this
//! program dies, the next gateway adopts the engine.

use std::{sync::Arc, time::Duration};

use anyhow::{Context as _, bail};
use rouse::{
    fault::FailureCause,
    fleet::{command::Command, event::Event},
    model::{AcceleratorId, AcceleratorRequirement, EngineId, ModelSpec, SleepLevel},
    units::{Bytes, Generation, Millis},
};
use rouse_config::Config;
use rouse_platform::Platform as _;
use tokio::{sync::mpsc, time};

use super::sequence::MeasurePlan;
use crate::{
    app::wall_anchored_clock,
    cli::{screen::interrupted, show::replace_control_chars},
    platform::local::{EngineMemoryMeter, LocalPlatform, RecordedEngine, StateDirLock},
};

/// Events that may wait, as in a gateway.
const EVENT_QUEUE_CAPACITY: usize = 1024;
/// How long an engine may take to end beyond its grace: the kernel frees its memory.
const END_TIMEOUT: Duration = Duration::from_secs(60);

/// An engine under this program's own control.
pub(super) struct OwnEngine {
    platform: LocalPlatform,
    events: mpsc::Receiver<Event>,
    config: Arc<Config>,
    id: EngineId,
    generation: Generation,
    bytes: Bytes,
    start_timeout: Millis,
    pub(super) accelerators: Vec<AcceleratorId>,
    has_process: bool,
    last_line: Option<String>,
}

/// An outcome that a step waits for.
enum OwnStepOutcome {
    Ready,
    Slept,
    Ended(FailureCause),
    Failed(FailureCause),
}

impl OwnEngine {
    /// Locks the state directory and chooses accelerators.
    ///
    /// # Errors
    /// A gateway uses the directory, or engines that an earlier one left still run and `evict` is false.
    pub(super) async fn begin(config: &Arc<Config>, spec: &ModelSpec, evict: bool) -> anyhow::Result<Self> {
        let accelerators = choose_accelerators(config, spec).await?;
        let lock = StateDirLock::take(&config.state)?;
        let (tx, events) = mpsc::channel(EVENT_QUEUE_CAPACITY);
        let platform = LocalPlatform::start(lock, Arc::clone(config), tx, wall_anchored_clock())?;
        let mut engine = Self {
            platform,
            events,
            config: Arc::clone(config),
            id: EngineId::new(spec.name.clone(), 0),
            generation: Generation::default().next(),
            bytes: spec.memory.awake,
            start_timeout: spec.start_timeout,
            accelerators,
            has_process: false,
            last_line: None,
        };
        if let Err(error) = engine.end_left_over(evict).await {
            engine.end().await;
            return Err(error);
        }
        Ok(engine)
    }

    /// Ends the engines that an earlier gateway left running, if that is wanted.
    async fn end_left_over(&mut self, evict: bool) -> anyhow::Result<()> {
        let mut left = Vec::new();
        loop {
            match self.events.recv().await {
                Some(Event::Adopted { engine, generation, .. }) => left.push((engine, generation)),
                Some(Event::AdoptionDone) => break,
                Some(_) => {}
                None => bail!("the platform ended unexpectedly"),
            }
        }
        if let Some((engine, _)) = left.first().filter(|_| !evict) {
            bail!(
                "{engine} still runs, left by the last gateway: stop it by starting and stopping the gateway, or pass \
                 --evict to end it now"
            );
        }
        for (engine, generation) in left {
            if engine == self.id {
                self.generation = generation.next();
            }
            self.stop(&engine, generation).await?;
        }
        Ok(())
    }

    /// Refuses a start beside other processes that leave too little memory.
    pub(super) fn check_room(&self, plan: &MeasurePlan<'_>, meter: &EngineMemoryMeter) -> anyhow::Result<()> {
        for accelerator in &plan.config.core.accelerators {
            let Some(used) = meter.foreign().get(&accelerator.id) else { continue };
            let free = (accelerator.capacity + plan.config.headroom).saturating_sub(*used);
            if free < self.bytes {
                bail!(
                    "other processes use {used} of {}, and {free} is too little for memory.awake ({}): end them first",
                    accelerator.id,
                    self.bytes
                );
            }
        }
        Ok(())
    }

    pub(super) async fn start(&mut self) -> anyhow::Result<RecordedEngine> {
        self.has_process = true;
        self.platform.submit(Command::Launch {
            engine: self.id.clone(),
            generation: self.generation,
            accelerators: self.accelerators.clone(),
            bytes: self.bytes,
        });
        let limit = self.start_timeout;
        self.until_ready(limit, "start").await?;
        let recorded = RecordedEngine::find(&self.config.state, &self.id)?;
        recorded.context("the engine ended right after its start")
    }

    pub(super) async fn sleep(&mut self, level: SleepLevel) -> anyhow::Result<()> {
        self.platform.submit(Command::Sleep { engine: self.id.clone(), generation: self.generation, level });
        let limit = self.with_bytes(self.config.core.settings.timeouts.sleep);
        match self.outcome(limit).await {
            Some(OwnStepOutcome::Slept) => Ok(()),
            other => Err(self.failure("sleep", limit, other)),
        }
    }

    pub(super) async fn wake(&mut self, level: SleepLevel) -> anyhow::Result<()> {
        self.platform.submit(Command::Wake { engine: self.id.clone(), generation: self.generation, level });
        let limit = self.with_bytes(self.config.core.settings.timeouts.wake);
        self.until_ready(limit, "wake").await
    }

    /// Ends the engine, and unlocks the state directory. An interrupt meanwhile kills the engine.
    ///
    /// The engine's end is awaited then, too: the next start must find the memory free.
    pub(super) async fn end(mut self) {
        if self.has_process {
            let (engine, generation) = (self.id.clone(), self.generation);
            let stopped = tokio::select! {
                stopped = self.stop(&engine, generation) => stopped,
                () = interrupted() => {
                    eprintln!("rouse-gateway: interrupted while {engine} ends; killing it");
                    self.stop_within(Millis::ZERO, &engine, generation).await
                }
            };
            if let Err(error) = stopped {
                eprintln!("rouse-gateway: {error}");
            }
        }
        self.platform.close().await;
    }

    async fn stop(&mut self, engine: &EngineId, generation: Generation) -> anyhow::Result<()> {
        let grace = self.config.core.settings.timeouts.stop_grace;
        self.stop_within(grace, engine, generation).await
    }

    /// Stops an engine, by force after the grace, and waits for its end.
    async fn stop_within(
        &mut self,
        grace: Millis,
        engine: &EngineId,
        generation: Generation,
    ) -> anyhow::Result<()> {
        let command = Command::Stop { engine: engine.clone(), generation, grace, successor: None };
        self.platform.submit(command);
        let gone = async {
            while let Some(event) = self.events.recv().await {
                if matches!(&event, Event::Gone { engine: gone, .. } if gone == engine) {
                    return true;
                }
            }
            false
        };
        let is_gone = time::timeout(grace.duration() + END_TIMEOUT, gone).await;
        if is_gone != Ok(true) {
            bail!("the processes of {engine} do not end");
        }
        Ok(())
    }

    async fn until_ready(&mut self, limit: Millis, step: &str) -> anyhow::Result<()> {
        match self.outcome(limit).await {
            Some(OwnStepOutcome::Ready) => Ok(()),
            other => Err(self.failure(step, limit, other)),
        }
    }

    /// Waits for the next outcome of this engine; `None`: none came in time.
    async fn outcome(&mut self, limit: Millis) -> Option<OwnStepOutcome> {
        let next = async {
            loop {
                let event = self.events.recv().await?;
                if let Event::Diagnostics { diagnostics, .. } = &event {
                    let said = diagnostics.last_line.clone().or_else(|| diagnostics.system.clone());
                    self.last_line = said.or_else(|| self.last_line.take());
                }
                if let Some(outcome) = outcome_of(event, &self.id) {
                    self.has_process &= !matches!(outcome, OwnStepOutcome::Ended(_));
                    return Some(outcome);
                }
            }
        };
        time::timeout(limit.duration(), next).await.ok().flatten()
    }

    /// A step that moves much memory may take longer, as in a gateway.
    fn with_bytes(&self, limit: Millis) -> Millis {
        limit + Millis::secs(self.bytes.0 >> 30)
    }

    fn failure(&self, step: &str, limit: Millis, outcome: Option<OwnStepOutcome>) -> anyhow::Error {
        let cause = match outcome {
            Some(OwnStepOutcome::Ended(cause) | OwnStepOutcome::Failed(cause)) => cause.to_string(),
            Some(OwnStepOutcome::Ready | OwnStepOutcome::Slept) => {
                "the engine reported another state".to_owned()
            }
            None => format!("not done within {limit}"),
        };
        let said = self.last_line.as_deref().map(replace_control_chars);
        let said = said.map(|line| format!("; the engine's last line: {line}"));
        let log = self.platform.log_path(&self.id).map(|path| format!("; its log: {}", path.display()));
        let (said, log) = (said.unwrap_or_default(), log.unwrap_or_default());
        anyhow::anyhow!("cannot {step} {}: {cause}{said}{log}", self.id.model)
    }
}

/// Returns the outcome that an event reports for this engine.
fn outcome_of(event: Event, id: &EngineId) -> Option<OwnStepOutcome> {
    let (engine, outcome) = match event {
        Event::Ready { engine, .. } => (engine, OwnStepOutcome::Ready),
        Event::Slept { engine, .. } => (engine, OwnStepOutcome::Slept),
        Event::Gone { engine, cause, .. } => (engine, OwnStepOutcome::Ended(cause)),
        Event::StartFailed { engine, cause, .. }
        | Event::SleepFailed { engine, cause, .. }
        | Event::WakeFailed { engine, cause, .. } => (engine, OwnStepOutcome::Failed(cause)),
        _ => return None,
    };
    (engine == *id).then_some(outcome)
}

/// Chooses the accelerators with the least memory in use.
async fn choose_accelerators(config: &Config, spec: &ModelSpec) -> anyhow::Result<Vec<AcceleratorId>> {
    let count = match &spec.accelerators {
        AcceleratorRequirement::Ids(ids) => return Ok(ids.clone()),
        AcceleratorRequirement::Count(count) => usize::try_from(*count).unwrap_or(usize::MAX),
        AcceleratorRequirement::InPool { .. } | AcceleratorRequirement::Slots { .. } => {
            bail!("the engines of {} run in a cluster", spec.name)
        }
    };
    let mut found = Vec::new();
    for accelerator in &config.core.accelerators {
        let meter = EngineMemoryMeter::new(config, std::slice::from_ref(&accelerator.id)).await;
        // One that cannot be read is the last choice, and its error shows if it is chosen.
        let used = meter.foreign().get(&accelerator.id).copied();
        found.push((used.is_none(), used.unwrap_or_default(), accelerator.id.clone()));
    }
    found.sort();
    let chosen: Vec<_> = found.into_iter().take(count).map(|(_, _, id)| id).collect();
    if chosen.len() < count {
        bail!("{} needs {count} accelerators, and there are only {}", spec.name, chosen.len());
    }
    Ok(chosen)
}
