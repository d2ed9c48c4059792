//! Reads how much memory is in use on an accelerator, and by which engine.
//!
//! The source is NVML if there is a driver, or a simulated accelerator's file if the configuration names one. Both
//! block, so reads run on a blocking thread. The NVML library is loaded on first use, and its absence is a result.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use engine_sim::accelerator::AcceleratorFile;
use rouse::{
    fleet::event::Event,
    model::{Accelerator, AcceleratorId, EngineId},
    units::Bytes,
};
use rouse_net::{
    nvml::{self, Nvml, NvmlReading},
    process::table,
};
use tokio::{sync::Semaphore, task, time};

use super::{LocalContext, launch};

/// Memory in use that needs no process: what the driver keeps, and what it frees late.
const MAX_UNOWNED: Bytes = Bytes::mib(512);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}: list the accelerators in the configuration, `accelerators: [{{id, memory}}]`")]
    NoDriver(nvml::Error),
    #[error(transparent)]
    Nvml(#[from] nvml::Error),
    #[error(transparent)]
    Simulated(#[from] engine_sim::accelerator::Error),
    #[error("accelerator {0} is not in its meter file")]
    Unknown(AcceleratorId),
    #[error("the meter did not answer in time")]
    Timeout,
}

/// The meters of this machine.
#[derive(Debug, Default)]
pub(super) struct MeterReader {
    nvml: Nvml,
    /// One permit for each accelerator.
    ///
    /// A reading keeps a thread for as long as the driver hangs, and the threads are shared with all that the platform
    /// does on disk. So an accelerator has one reading at a time, and one that hangs delays no other accelerator's.
    permits: Mutex<BTreeMap<AcceleratorId, Arc<Semaphore>>>,
}

/// Returns all accelerators that NVML lists. Blocks.
///
/// The id is the UUID. The capacity is the total minus what the driver keeps and `headroom`.
pub fn discover(headroom: Bytes) -> Result<Vec<Accelerator>, Error> {
    usable(Nvml::default().devices(), headroom)
}

/// Converts the driver's answer to accelerators.
fn usable(
    answered: Result<Vec<nvml::NvmlDevice>, nvml::Error>,
    headroom: Bytes,
) -> Result<Vec<Accelerator>, Error> {
    let no_driver = |error| match error {
        error @ nvml::Error::NoDriver(_) => Error::NoDriver(error),
        other => Error::Nvml(other),
    };
    let found = answered.map_err(no_driver)?;
    if found.is_empty() {
        return Err(Error::NoDriver(nvml::Error::NoDriver("NVML lists no accelerator".to_owned())));
    }
    let accelerator = |device: nvml::NvmlDevice| Accelerator {
        metered: true,
        ..Accelerator::new(device.id, device.usable.saturating_sub(headroom))
    };
    Ok(found.into_iter().map(accelerator).collect())
}

impl MeterReader {
    /// Reads the accelerator's meter: `file` if the accelerator is simulated.
    pub(super) async fn read(
        self: &Arc<Self>,
        id: AcceleratorId,
        file: Option<PathBuf>,
    ) -> Result<NvmlReading, Error> {
        let meters = Arc::clone(self);
        let reading = async move {
            // Nothing closes the semaphore.
            let permit = meters.permits_of(&id).acquire_owned().await.ok();
            let read = task::spawn_blocking(move || {
                let _permit = permit;
                match file {
                    Some(file) => simulated(&file, &id),
                    None => Ok(meters.nvml.read(&id)?),
                }
            });
            read.await
        };
        match time::timeout(nvml::QUERY_TIMEOUT, reading).await {
            Ok(Ok(reading)) => reading,
            Ok(Err(_)) | Err(_) => Err(Error::Timeout),
        }
    }

    fn permits_of(&self, id: &AcceleratorId) -> Arc<Semaphore> {
        let mut permits = self.permits.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(permits.entry(id.clone()).or_insert_with(|| Arc::new(Semaphore::new(1))))
    }
}

impl LocalContext {
    /// Reads the meter and sends the reading. An accelerator that vanished is reported once.
    pub(super) async fn measure(&self, accelerator: AcceleratorId) {
        let file = self.common.config.load().meters.get(&accelerator).cloned();
        match self.meters.read(accelerator.clone(), file).await {
            Ok(reading) => {
                if self.set_lost(&accelerator, false) {
                    self.common
                        .send_event(Event::AcceleratorRecovered { accelerator: accelerator.clone() })
                        .await;
                }
                let by_pid = reading.by_pid.filter(|by_pid| names_owners(by_pid, reading.used));
                let by_engine = by_pid.and_then(|by_pid| self.by_engine(&accelerator, by_pid));
                self.common.send_event(Event::MeterRead { accelerator, used: reading.used, by_engine }).await;
            }
            Err(Error::Nvml(nvml::Error::Lost(_))) => {
                if self.set_lost(&accelerator, true) {
                    self.common.send_event(Event::AcceleratorLost { accelerator }).await;
                }
            }
            Err(error) => tracing::warn!(%accelerator, %error, "cannot read the accelerator's meter"),
        }
    }

    /// Returns each engine's memory use, by process group.
    ///
    /// `None` if the meter names processes and none of them is visible here (another pid namespace): their owners are
    /// unknown.
    fn by_engine(
        &self,
        accelerator: &AcceleratorId,
        by_pid: BTreeMap<u32, Bytes>,
    ) -> Option<BTreeMap<EngineId, Bytes>> {
        let mut engines = self.store.engines();
        engines.retain(|_, entry| entry.accelerators.contains(accelerator));
        let mut used: BTreeMap<EngineId, Bytes> =
            engines.keys().map(|engine| (engine.clone(), Bytes::ZERO)).collect();
        let mut any_readable = by_pid.is_empty();
        for (pid, bytes) in by_pid {
            let Ok(pid) = i32::try_from(pid) else {
                continue;
            };
            let Some(stat) = table::stat(pid) else {
                continue;
            };
            any_readable = true;
            // A worker may have left the group, but it keeps the mark.
            let mark = table::env_value(pid, launch::MARK_VAR);
            let owner = engines.iter().find(|(engine, entry)| {
                let engine_mark = launch::mark(self, engine, entry.generation);
                entry.pid == stat.group || mark.as_ref() == Some(&engine_mark)
            });
            if let Some(sum) = owner.and_then(|(engine, _)| used.get_mut(engine)) {
                *sum += bytes;
            }
        }
        any_readable.then_some(used)
    }

    /// Records whether the accelerator is lost. Returns true if that changed.
    fn set_lost(&self, accelerator: &AcceleratorId, lost: bool) -> bool {
        let mut known = self.lost_accelerators.lock().unwrap_or_else(PoisonError::into_inner);
        if lost { known.insert(accelerator.clone()) } else { known.remove(accelerator) }
    }
}

/// Whether the list of processes names the users of the memory.
///
/// In a container without the host's pid namespace, NVML answers with an empty list however much memory is in use.
pub(crate) fn names_owners(by_pid: &BTreeMap<u32, Bytes>, used: Bytes) -> bool {
    !by_pid.is_empty() || used <= MAX_UNOWNED
}

fn simulated(file: &Path, id: &AcceleratorId) -> Result<NvmlReading, Error> {
    let mut usage = AcceleratorFile::open(file)?.usage()?;
    let usage = usage.remove(id.as_str()).ok_or_else(|| Error::Unknown(id.clone()))?;
    let by_pid = usage.by_pid.iter().map(|(&pid, &bytes)| (pid, Bytes(bytes)));
    Ok(NvmlReading {
        total: Bytes(usage.capacity),
        used: Bytes(usage.used_total),
        by_pid: Some(by_pid.collect()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_accelerator_whose_reading_hangs_takes_one_thread_and_delays_no_other() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("gpus");
        AcceleratorFile::create(file.clone(), &[("gpu-0", 4 << 30), ("gpu-1", 4 << 30)]).unwrap();
        let meters = Arc::<MeterReader>::default();
        let read = |id: &str| meters.read(id.into(), Some(file.clone()));
        assert_eq!(read("gpu-0").await.unwrap().used, Bytes::ZERO);
        let hanging = meters.permits_of(&"gpu-0".into()).acquire_owned().await.unwrap();
        let soon = std::time::Duration::from_millis(20);
        assert!(time::timeout(soon, read("gpu-0")).await.is_err(), "a further reading waits");
        assert_eq!(read("gpu-1").await.unwrap().used, Bytes::ZERO);
        drop(hanging);
        assert_eq!(read("gpu-0").await.unwrap().used, Bytes::ZERO);
    }

    #[test]
    fn a_machine_without_a_driver_is_told_what_to_configure_instead() {
        for answered in [Err(nvml::Error::NoDriver("libnvidia-ml.so.1".to_owned())), Ok(Vec::new())] {
            let error = usable(answered, Bytes::gib(1)).unwrap_err().to_string();
            assert!(error.contains("list the accelerators in the configuration"), "{error}");
        }
        // The failure of an existing driver is no reason to configure accelerators.
        let error = usable(Err(nvml::Error::Lost("GPU-1".into())), Bytes::gib(1)).unwrap_err().to_string();
        assert_eq!(error, "accelerator GPU-1 is lost");
    }

    #[test]
    fn an_empty_list_of_processes_beside_used_memory_names_no_owners() {
        let (none, one) = (BTreeMap::new(), BTreeMap::from([(7, Bytes::gib(30))]));
        assert!(!names_owners(&none, Bytes::gib(30)), "a container, which sees no processes");
        assert!(names_owners(&none, Bytes::mib(3)), "an idle accelerator");
        assert!(names_owners(&one, Bytes::gib(31)));
    }

    #[test]
    fn what_the_driver_lists_is_metered_and_has_the_headroom_left_out() {
        let device = |id: &str, usable| nvml::NvmlDevice { id: id.into(), index: Some(0), usable };
        let listed = Ok(vec![device("GPU-1", Bytes::gib(80)), device("GPU-2", Bytes::mib(500))]);
        let found = usable(listed, Bytes::gib(1)).unwrap();
        let shown: Vec<_> = found.iter().map(|a| (a.id.as_str(), a.capacity, a.metered)).collect();
        assert_eq!(shown, [("GPU-1", Bytes::gib(79), true), ("GPU-2", Bytes::ZERO, true)]);
    }
}
