//! Measures the memory of one engine of this machine: on its accelerators, and in RAM.
//!
//! The gateway of this machine may run or not: the state directory says which processes the engine has, and both read
//! the same meters.

use std::{
    collections::BTreeMap,
    io,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use engine_sim::accelerator::AcceleratorFile;
use rouse::{
    model::{Accelerator, AcceleratorId, EngineId},
    units::Bytes,
};
use rouse_config::Config;
use rouse_net::{
    nvml::NvmlReading,
    process::{memory::proportional_set_size, table},
};
use tokio::task;

use super::{
    launch::{self, MARK_VAR},
    meter::{self, MeterReader, names_owners},
    state_store,
};

/// Why an engine's memory is unknown.
#[derive(Debug, thiserror::Error)]
pub enum MemoryMeterError {
    #[error(transparent)]
    Accelerator(#[from] meter::Error),
    #[error("cannot read the accelerator file: {0}")]
    Simulated(#[from] engine_sim::accelerator::Error),
    #[error("cannot read the memory of the engine's processes: {0}; run this as the gateway's user")]
    Processes(io::Error),
    #[error("cannot read the gateway's state directory: {0}; run this as the gateway's user")]
    State(io::Error),
    #[error(
        "accelerator {0} has no meter that reports what an engine uses there, and its engines do not run on the CPU: set \
         memory by hand"
    )]
    NoMeter(AcceleratorId),
    #[error(
        "accelerators {0} and {1} differ: one has a meter and the other has none, so their memory cannot be compared"
    )]
    Mixed(AcceleratorId, AcceleratorId),
}

/// An engine's process, as the gateway of a state directory recorded it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedEngine {
    pub address: SocketAddr,
    pub accelerators: Vec<AcceleratorId>,
    pid: i32,
    mark: String,
}

/// Memory of one engine at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryReading {
    /// On the accelerator where it is most; for engines on the CPU their RAM, divided by their accelerators.
    pub accelerator: Bytes,
    /// RAM that counts for a sleep at level 1, for all accelerators together.
    pub host: Bytes,
}

/// Reads the memory of an engine on these accelerators.
#[derive(Debug)]
pub struct EngineMemoryMeter {
    meters: Arc<MeterReader>,
    accelerators: Vec<Accelerator>,
    files: BTreeMap<AcceleratorId, PathBuf>,
    /// What was in use before the engine started, for a meter that does not name the owners.
    foreign: BTreeMap<AcceleratorId, Bytes>,
}

impl RecordedEngine {
    /// Finds the engine's process; `None` if it has none.
    ///
    /// # Errors
    /// The state directory cannot be read.
    pub fn find(state: &Path, engine: &EngineId) -> Result<Option<Self>, MemoryMeterError> {
        let folder = state.canonicalize().map_err(MemoryMeterError::State)?;
        let recorded = state_store::read_recorded(&folder, engine).map_err(MemoryMeterError::State)?;
        Ok(recorded.map(|entry| Self {
            address: entry.address,
            accelerators: entry.accelerators,
            pid: entry.pid,
            mark: format!("{MARK_VAR}={}", launch::mark_in(&folder, engine, entry.generation)),
        }))
    }

    /// Lists the processes that live. Blocks.
    fn processes(&self) -> Vec<i32> {
        table::members(Some(self.pid), &self.mark)
    }
}

impl MemoryReading {
    /// Returns the larger of each part.
    #[must_use]
    pub fn max(self, other: Self) -> Self {
        Self { accelerator: self.accelerator.max(other.accelerator), host: self.host.max(other.host) }
    }
}

impl EngineMemoryMeter {
    /// Creates the meter of an engine that will start on some of these accelerators.
    ///
    /// Reads at once what others use there. What cannot be read is left out of [`Self::foreign`].
    pub async fn new(config: &Config, accelerators: &[AcceleratorId]) -> Self {
        let known = config.core.accelerators.iter().filter(|one| accelerators.contains(&one.id));
        let mut meter = Self {
            meters: Arc::default(),
            accelerators: known.cloned().collect(),
            files: config.meters.clone(),
            foreign: BTreeMap::new(),
        };
        for accelerator in meter.accelerators.clone() {
            if let Ok(used) = meter.in_use(&accelerator).await {
                meter.foreign.insert(accelerator.id, used);
            }
        }
        meter
    }

    /// Restricts the meter to the accelerators on which the engine runs.
    ///
    /// # Errors
    /// An accelerator has no meter and is not a stand-in for the CPU.
    pub fn on(mut self, config: &Config, accelerators: &[AcceleratorId]) -> Result<Self, MemoryMeterError> {
        self.accelerators.retain(|one| accelerators.contains(&one.id));
        self.check(config)?;
        Ok(self)
    }

    /// Refuses accelerators whose use by an engine cannot be known.
    ///
    /// An accelerator without a meter is a stand-in for the CPU, unless an engine must be shown it.
    fn check(&self, config: &Config) -> Result<(), MemoryMeterError> {
        let hidden = |one: &&Accelerator| !one.metered && config.visible.contains_key(&one.id);
        if let Some(one) = self.accelerators.iter().find(hidden) {
            return Err(MemoryMeterError::NoMeter(one.id.clone()));
        }
        let (with, without): (Vec<_>, Vec<_>) = self.accelerators.iter().partition(|one| one.metered);
        match (with.first(), without.first()) {
            (Some(with), Some(without)) => Err(MemoryMeterError::Mixed(with.id.clone(), without.id.clone())),
            _ => Ok(()),
        }
    }

    /// Whether the accelerators have meters. Otherwise the engines run on the CPU, and their RAM counts.
    #[must_use]
    pub fn is_metered(&self) -> bool {
        self.accelerators.iter().any(|one| one.metered)
    }

    /// Returns what was in use on each accelerator before the engine started.
    #[must_use]
    pub const fn foreign(&self) -> &BTreeMap<AcceleratorId, Bytes> {
        &self.foreign
    }

    /// Reads the engine's memory.
    ///
    /// # Errors
    /// A meter or the process table cannot be read.
    pub async fn read(&self, engine: &RecordedEngine) -> Result<MemoryReading, MemoryMeterError> {
        let found = engine.clone();
        let pids = task::spawn_blocking(move || found.processes()).await.unwrap_or_default();
        if !self.is_metered() {
            let ram = self.ram(&pids).await?;
            let count = u64::try_from(self.accelerators.len().max(1)).unwrap_or(u64::MAX);
            return Ok(MemoryReading { accelerator: Bytes(ram.0.div_ceil(count)), host: ram });
        }
        let mut most = Bytes::ZERO;
        for accelerator in &self.accelerators {
            let reading = self.reading(accelerator).await?;
            let foreign = self.foreign.get(&accelerator.id).copied().unwrap_or_default();
            most = most.max(owned(&reading, &pids).unwrap_or_else(|| reading.used.saturating_sub(foreign)));
        }
        let host = if self.files.is_empty() { self.ram(&pids).await? } else { self.simulated_host(&pids)? };
        Ok(MemoryReading { accelerator: most, host })
    }

    async fn ram(&self, pids: &[i32]) -> Result<Bytes, MemoryMeterError> {
        let pids = pids.to_vec();
        // The kernel walks all pages of a large engine.
        let sum = task::spawn_blocking(move || proportional_set_size(&pids)).await;
        sum.unwrap_or(Ok(Bytes::ZERO)).map_err(MemoryMeterError::Processes)
    }

    /// The host memory that simulated engines hold is only in the file.
    fn simulated_host(&self, pids: &[i32]) -> Result<Bytes, MemoryMeterError> {
        let Some(accelerator) = self.accelerators.iter().find_map(|one| self.files.get(&one.id)) else {
            return Ok(Bytes::ZERO);
        };
        let usage = AcceleratorFile::open(accelerator)?.host_usage()?;
        let owned =
            usage.into_iter().filter(|(pid, _)| i32::try_from(*pid).is_ok_and(|pid| pids.contains(&pid)));
        Ok(owned.map(|(_, bytes)| Bytes(bytes)).sum())
    }

    /// Returns the bytes in use on an accelerator; 0 without a meter.
    async fn in_use(&self, accelerator: &Accelerator) -> Result<Bytes, MemoryMeterError> {
        if !accelerator.metered {
            return Ok(Bytes::ZERO);
        }
        Ok(self.reading(accelerator).await?.used)
    }

    async fn reading(&self, accelerator: &Accelerator) -> Result<NvmlReading, meter::Error> {
        let file = self.files.get(&accelerator.id).cloned();
        self.meters.read(accelerator.id.clone(), file).await
    }
}

/// Returns what these processes use; `None` if the meter does not say whose the memory is.
fn owned(reading: &NvmlReading, pids: &[i32]) -> Option<Bytes> {
    let by_pid = reading.by_pid.as_ref().filter(|by_pid| names_owners(by_pid, reading.used))?;
    let local = |pid: &u32| i32::try_from(*pid).ok();
    // None of them is visible here: they are in another pid namespace.
    if !by_pid.is_empty() && !by_pid.keys().filter_map(local).any(|pid| table::stat(pid).is_some()) {
        return None;
    }
    let own = by_pid.iter().filter(|(pid, _)| local(pid).is_some_and(|pid| pids.contains(&pid)));
    Some(own.map(|(_, bytes)| *bytes).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(used: Bytes, by_pid: Option<&[(u32, Bytes)]>) -> NvmlReading {
        let by_pid = by_pid.map(|all| all.iter().copied().collect());
        NvmlReading { total: Bytes::gib(80), used, by_pid }
    }

    #[test]
    fn memory_belongs_to_the_processes_that_the_meter_names() {
        let me = std::process::id();
        let own = i32::try_from(me).unwrap();
        let named = reading(Bytes::gib(5), Some(&[(me, Bytes::gib(3)), (1, Bytes::gib(2))]));
        assert_eq!(owned(&named, &[own]), Some(Bytes::gib(3)));
        assert_eq!(owned(&named, &[]), Some(Bytes::ZERO));
        for unnamed in [
            reading(Bytes::gib(5), None),
            reading(Bytes::gib(5), Some(&[])),
            reading(Bytes::gib(5), Some(&[(u32::MAX, Bytes::gib(5))])),
        ] {
            assert_eq!(owned(&unnamed, &[own]), None);
        }
    }

    #[tokio::test]
    async fn an_accelerator_that_an_engine_must_be_shown_and_that_has_no_meter_is_refused() {
        let config = |more: &str| {
            let yaml = format!(
                "headroom: 0\naccelerators: [{{id: a, memory: 8Gi}}, {{id: b, memory: 8Gi{more}}}]\n"
            );
            rouse_config::parse(&yaml, "test").unwrap()
        };
        let ids: Vec<AcceleratorId> = vec!["a".into(), "b".into()];
        let on = async |more: &str| {
            let config = config(more);
            EngineMemoryMeter::new(&config, &ids).await.on(&config, &ids)
        };
        let plain = on("").await.unwrap();
        assert!(!plain.is_metered());
        assert_eq!(plain.foreign().values().copied().sum::<Bytes>(), Bytes::ZERO);
        let hidden = on(", visible: {X: '0'}").await.unwrap_err();
        assert!(matches!(hidden, MemoryMeterError::NoMeter(id) if id.as_str() == "b"));
        let mixed = on(", meter: /nowhere").await.unwrap_err();
        assert!(matches!(mixed, MemoryMeterError::Mixed(..)), "{mixed}");
    }
}
