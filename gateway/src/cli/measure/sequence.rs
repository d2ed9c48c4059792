//! The steps of a measurement: start, a request, and a sleep and a wake at each level.

use std::{pin::pin, time::Duration};

use rouse::{
    fleet::event::CanaryVerdict,
    model::{AcceleratorId, EngineId, ModelName, ModelSpec, SleepLevel, SleepLevelPolicy},
    units::{Bytes, Millis},
};
use rouse_config::{Config, EngineConfig, MeasuredMemory};
use rouse_net::adapter::Adapter;
use serde::Serialize;
use tokio::time::{self, Instant};

use super::{MeasuredEngine, settle::SettlingReading};
use crate::{
    cli::detect::probe::with_progress,
    platform::local::{EngineMemoryMeter, MemoryReading, RecordedEngine},
};

/// Interval between two readings while the engine starts, wakes, or serves the request.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(20);
/// Interval between two readings of an engine that fell asleep.
const SETTLE_INTERVAL: Duration = Duration::from_millis(100);

/// What to measure, and how.
pub(super) struct MeasurePlan<'c> {
    pub(super) config: &'c Config,
    pub(super) spec: &'c ModelSpec,
    pub(super) engine: &'c EngineConfig,
}

/// What one engine of a model took. Sizes are bytes, times milliseconds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ModelMeasurement {
    pub(super) model: ModelName,
    pub(super) accelerators: Vec<AcceleratorId>,
    pub(super) source: MemorySource,
    /// Most that was in use on one accelerator while the engine started, woke or was awake.
    pub(super) awake: Bytes,
    pub(super) start: Millis,
    pub(super) levels: Vec<LevelMeasurement>,
}

/// What a sleep at one level left and took.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct LevelMeasurement {
    pub(super) level: u8,
    /// Still in use on one accelerator.
    pub(super) asleep: Bytes,
    /// RAM that the engine took for its sleep, for each of its accelerators. `None` at level 2, which takes none, and
    /// if the engine had slept before.
    pub(super) host: Option<Bytes>,
    pub(super) sleep: Millis,
    pub(super) wake: Millis,
}

/// Where the bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum MemorySource {
    /// The accelerators' meter.
    Meter,
    /// The RAM of the engine's processes, which run on the CPU.
    Pss,
}

impl MeasurePlan<'_> {
    /// The levels at which the model may sleep.
    fn levels(&self) -> &'static [SleepLevel] {
        match self.spec.idle.level {
            _ if !self.spec.can_sleep => &[],
            SleepLevelPolicy::Never => &[],
            SleepLevelPolicy::One | SleepLevelPolicy::OneOrStop => &[SleepLevel::One],
            SleepLevelPolicy::Two => &[SleepLevel::Two],
            SleepLevelPolicy::Auto => &[SleepLevel::One, SleepLevel::Two],
        }
    }
}

/// Runs every step. The caller ends the engine, also after an error.
pub(super) async fn measure(
    plan: &MeasurePlan<'_>,
    engine: &mut MeasuredEngine,
) -> anyhow::Result<ModelMeasurement> {
    with_progress("make room", engine.prepare()).await?;
    let meter = EngineMemoryMeter::new(plan.config, engine.accelerators()).await;
    engine.check_room(plan, &meter)?;
    let id = EngineId::new(plan.spec.name.clone(), 0);
    let find = || RecordedEngine::find(&plan.config.state, &id).ok().flatten();
    let ((running, start), starting) = sampled(&meter, find, Box::pin(timed("start", engine.start()))).await;
    let running = running?;
    // A gateway chooses among the accelerators itself.
    let meter = meter.on(plan.config, &running.accelerators)?;
    let step = MeasureStep { plan, meter: &meter, running: &running };
    let mut awake = step.peak().await?.accelerator.max(starting);
    let mut levels = Vec::new();
    for &level in plan.levels() {
        let (measured, woken) = step.sleep_and_wake(engine, level).await?;
        levels.push(measured);
        awake = awake.max(woken);
    }
    let source = if meter.is_metered() { MemorySource::Meter } else { MemorySource::Pss };
    let accelerators = running.accelerators.clone();
    Ok(ModelMeasurement { model: plan.spec.name.clone(), accelerators, source, awake, start, levels })
}

/// What every step after the start needs.
struct MeasureStep<'a> {
    plan: &'a MeasurePlan<'a>,
    meter: &'a EngineMemoryMeter,
    running: &'a RecordedEngine,
}

impl MeasureStep<'_> {
    /// Puts the engine to sleep and wakes it. Also returns what the woken engine uses.
    async fn sleep_and_wake(
        &self,
        engine: &mut MeasuredEngine,
        level: SleepLevel,
    ) -> anyhow::Result<(LevelMeasurement, Bytes)> {
        let before = self.meter.read(self.running).await?;
        let number = level.number();
        let (slept, sleep) = timed(&format!("sleep at level {number}"), engine.sleep(level)).await;
        slept?;
        let asleep = self.settled().await?;
        let what = format!("wake from level {number}");
        let find = || Some(self.running.clone());
        let ((woken, wake), waking) =
            sampled(self.meter, find, Box::pin(timed(&what, engine.wake(level)))).await;
        woken?;
        let peak = self.peak().await?.accelerator.max(waking);
        let count = u64::try_from(self.running.accelerators.len().max(1)).unwrap_or(u64::MAX);
        let took = || Bytes(asleep.host.saturating_sub(before.host).0.div_ceil(count));
        // Engines keep the RAM of their first sleep.
        let host = (level == SleepLevel::One && !engine.has_slept(self.plan)).then(took);
        let measured = LevelMeasurement { level: number, asleep: asleep.accelerator, host, sleep, wake };
        Ok((measured, peak))
    }

    /// Returns the most that the engine uses while it serves a request of its task.
    async fn peak(&self) -> anyhow::Result<MemoryReading> {
        let adapter = Adapter::new(self.plan.engine.profile(), self.running.address);
        let mut request = pin!(adapter.exercise(self.plan.config.timeouts.first_byte.duration()));
        let mut peak = self.meter.read(self.running).await?;
        loop {
            tokio::select! {
                verdict = &mut request => {
                    match verdict {
                        CanaryVerdict::Passed => {}
                        CanaryVerdict::Failed(cause) => anyhow::bail!("the engine does not answer a request: {cause}"),
                        CanaryVerdict::Inconclusive => anyhow::bail!("the engine's stub forwards no requests"),
                    }
                    return Ok(peak.max(self.meter.read(self.running).await?));
                }
                () = time::sleep(SAMPLE_INTERVAL) => peak = peak.max(self.meter.read(self.running).await?),
            }
        }
    }

    /// Waits until the engine has freed what it will free, and returns what is left.
    ///
    /// A driver frees memory some time after the engine has.
    async fn settled(&self) -> anyhow::Result<MemoryReading> {
        let lag = self.plan.config.core.settings.timeouts.meter_lag.duration();
        let deadline = Instant::now() + lag.max(Duration::from_secs(1)) * 5;
        let mut settling = SettlingReading::default();
        loop {
            let reading = self.meter.read(self.running).await?;
            if settling.add(reading) || Instant::now() >= deadline {
                return Ok(reading);
            }
            time::sleep(SETTLE_INTERVAL).await;
        }
    }
}

/// Runs a step, and also returns the most that the engine used on one accelerator meanwhile: loading may take more than
/// serving. There is nothing to read before the engine has a process.
async fn sampled<T>(
    meter: &EngineMemoryMeter,
    find: impl Fn() -> Option<RecordedEngine>,
    step: impl Future<Output = T>,
) -> (T, Bytes) {
    let mut step = pin!(step);
    let mut most = Bytes::ZERO;
    loop {
        tokio::select! {
            done = &mut step => return (done, most),
            () = time::sleep(SAMPLE_INTERVAL) => {
                if let Some(engine) = find() {
                    most = most.max(meter.read(&engine).await.unwrap_or_default().accelerator);
                }
            }
        }
    }
}

/// Runs a step, shows its progress, and returns its duration.
async fn timed<T>(what: &str, step: impl Future<Output = T>) -> (T, Millis) {
    let began = Instant::now();
    let done = with_progress(what, step).await;
    (done, began.elapsed().into())
}

impl ModelMeasurement {
    /// Returns what the configuration should declare, in whole MiB.
    pub(super) fn memory(&self) -> MeasuredMemory {
        let most = |of: fn(&LevelMeasurement) -> Bytes| self.levels.iter().map(of).max();
        let awake = whole_mib(self.awake);
        MeasuredMemory {
            awake,
            asleep: most(|level| level.asleep).map(|asleep| whole_mib(asleep).min(awake)),
            host: self.levels.iter().find_map(|level| level.host).map(whole_mib),
        }
    }
}

fn whole_mib(size: Bytes) -> Bytes {
    Bytes::mib(size.0.div_ceil(1 << 20))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_declared_memory_is_the_most_of_all_levels_in_whole_mebibytes() {
        let level = |level, asleep: u64, host| LevelMeasurement {
            level,
            asleep: Bytes(asleep),
            host,
            sleep: Millis(1),
            wake: Millis(1),
        };
        let mut measured = ModelMeasurement {
            model: "m".into(),
            accelerators: vec!["gpu-0".into()],
            source: MemorySource::Meter,
            awake: Bytes((8 << 30) + 1),
            start: Millis(1),
            levels: vec![level(1, 1 << 29, Some(Bytes::gib(4))), level(2, (1 << 29) + 1, None)],
        };
        let memory = measured.memory();
        assert_eq!(memory.awake, Bytes::mib(8193));
        assert_eq!((memory.asleep, memory.host), (Some(Bytes::mib(513)), Some(Bytes::gib(4))));
        measured.levels.remove(0);
        assert_eq!(measured.memory().host, None, "level 2 says nothing about the RAM of level 1");
        measured.levels.clear();
        assert_eq!(measured.memory().asleep, None);
    }
}
