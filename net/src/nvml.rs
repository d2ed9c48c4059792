//! NVIDIA's management library: lists accelerators and reads their memory use.
//!
//! The library is loaded on first use, and its absence is a regular result. Every call blocks, and hangs when the
//! driver hangs: callers use a blocking thread, and wait no longer than [`QUERY_TIMEOUT`].

use std::{collections::BTreeMap, sync::OnceLock, time::Duration};

use nvml_wrapper::{
    Device as Handle,
    enum_wrappers::device::{EccCounter, MemoryError},
    enums::device::UsedGpuMemory,
    error::NvmlError,
};

use rouse::{model::AcceleratorId, units::Bytes};

/// The longest that a caller waits for the driver.
pub const QUERY_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a query failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("no NVIDIA driver found ({0})")]
    NoDriver(String),
    #[error("accelerator {0} is lost")]
    Lost(AcceleratorId),
    #[error("there is no accelerator with index {0}")]
    NoSuchIndex(String),
    #[error("NVML: {0}")]
    Failed(#[from] NvmlError),
}

/// One accelerator, or one part of it (MIG).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlDevice {
    /// Its UUID.
    pub id: AcceleratorId,
    /// Its number in the driver's order, which also counts accelerators that are cut into parts; `None` for a part.
    pub index: Option<u32>,
    /// Its memory, without what the driver reserves for itself.
    pub usable: Bytes,
}

/// Versions of the driver and of its library.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverVersions {
    pub driver: String,
    pub nvml: String,
    /// The newest CUDA that the driver supports, such as `12.4`; `None` where the driver does not report it.
    pub cuda: Option<String>,
}

/// Name and faults of one accelerator. A driver that does not report a fault reports none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceCondition {
    /// The product's name.
    pub name: Option<String>,
    /// Memory errors since the driver was loaded that the accelerator could not correct.
    pub uncorrected_errors: u64,
    /// Faulty memory is taken out of use at the next reset.
    pub retires_pages: bool,
}

/// Memory of one accelerator at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmlReading {
    pub total: Bytes,
    pub used: Bytes,
    /// Memory in use by process; `None` where the driver does not report it.
    pub by_pid: Option<BTreeMap<u32, Bytes>>,
}

/// The library, once loaded. A failed load is retried at the next use, since the driver may have appeared meanwhile.
#[derive(Debug, Default)]
pub struct Nvml {
    library: OnceLock<nvml_wrapper::Nvml>,
}

impl Nvml {
    fn library(&self) -> Result<&nvml_wrapper::Nvml, Error> {
        if let Some(library) = self.library.get() {
            return Ok(library);
        }
        let library = nvml_wrapper::Nvml::init().map_err(|error| Error::NoDriver(error.to_string()))?;
        Ok(self.library.get_or_init(|| library))
    }

    /// Lists every accelerator that the driver knows, in its own order; empty when it knows none. An accelerator that
    /// is cut into parts (MIG) cannot be used as a whole, so its parts take its place. Blocks.
    ///
    /// # Errors
    /// There is no driver, or it does not answer for one of the accelerators.
    pub fn devices(&self) -> Result<Vec<NvmlDevice>, Error> {
        let nvml = self.library()?;
        let mut found = Vec::new();
        for index in 0..nvml.device_count()? {
            let device = nvml.device_by_index(index)?;
            match parts(&device)? {
                Some(parts) => {
                    for part in parts {
                        found.push(describe(&part, None)?);
                    }
                }
                None => found.push(describe(&device, Some(index))?),
            }
        }
        Ok(found)
    }

    /// Returns the versions of the driver and its library. Blocks.
    ///
    /// # Errors
    /// There is no driver, or it does not answer.
    pub fn versions(&self) -> Result<DriverVersions, Error> {
        let nvml = self.library()?;
        let cuda = nvml.sys_cuda_driver_version().ok();
        Ok(DriverVersions {
            driver: nvml.sys_driver_version()?,
            nvml: nvml.sys_nvml_version()?,
            cuda: cuda.map(|number| format!("{}.{}", number / 1000, number % 1000 / 10)),
        })
    }

    /// Returns name and faults of one accelerator. Blocks.
    #[must_use]
    pub fn condition(&self, id: &AcceleratorId) -> DeviceCondition {
        let Some(device) = self.library().ok().and_then(|nvml| nvml.device_by_uuid(id.as_str()).ok()) else {
            return DeviceCondition::default();
        };
        DeviceCondition {
            name: device.name().ok(),
            uncorrected_errors: device
                .total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile)
                .unwrap_or_default(),
            retires_pages: device.are_pages_pending_retired().unwrap_or_default(),
        }
    }

    /// Resolves an index in the driver's own order, such as `3`, or `3:1` for a part. Blocks.
    ///
    /// # Errors
    /// There is no driver, it does not answer, or it has no accelerator with this number.
    pub fn id_at_index(&self, index: u32, part: Option<u32>) -> Result<AcceleratorId, Error> {
        let missing = |error| match (error, part) {
            (NvmlError::InvalidArg | NvmlError::NotFound, None) => Error::NoSuchIndex(index.to_string()),
            (NvmlError::InvalidArg | NvmlError::NotFound, Some(part)) => {
                Error::NoSuchIndex(format!("{index}:{part}"))
            }
            (other, _) => Error::Failed(other),
        };
        let mut device = self.library()?.device_by_index(index).map_err(missing)?;
        if let Some(part) = part {
            device = device.mig_device_by_index(part).map_err(missing)?;
        }
        Ok(device.uuid()?.into())
    }

    /// Reads the memory of one accelerator. Blocks.
    ///
    /// # Errors
    /// There is no driver, it does not know this accelerator (any more), or it does not answer.
    pub fn read(&self, id: &AcceleratorId) -> Result<NvmlReading, Error> {
        let lost = |error| match error {
            NvmlError::GpuLost | NvmlError::NotFound => Error::Lost(id.clone()),
            other => Error::Failed(other),
        };
        let device = self.library()?.device_by_uuid(id.as_str()).map_err(lost)?;
        let memory = device.memory_info().map_err(lost)?;
        let processes = device.running_compute_processes().ok();
        let by_pid = processes.and_then(|processes| {
            let used = processes.iter().map(|process| match process.used_gpu_memory {
                UsedGpuMemory::Used(bytes) => Some((process.pid, Bytes(bytes))),
                UsedGpuMemory::Unavailable => None,
            });
            used.collect()
        });
        Ok(NvmlReading { total: Bytes(memory.total), used: Bytes(memory.used), by_pid })
    }
}

/// Returns the parts of a device that is cut; `None` for a whole device.
fn parts<'nvml>(device: &Handle<'nvml>) -> Result<Option<Vec<Handle<'nvml>>>, Error> {
    let cut = match device.mig_mode() {
        Ok(mode) => mode.current != 0,
        // Most devices cannot be cut, and older drivers do not support the query.
        Err(NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_)) => {
            false
        }
        Err(other) => return Err(other.into()),
    };
    if !cut {
        return Ok(None);
    }
    let mut parts = Vec::new();
    for index in 0..device.mig_device_count()? {
        match device.mig_device_by_index(index) {
            Ok(part) => parts.push(part),
            // Numbers of removed parts stay unused.
            Err(NvmlError::NotFound) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Ok(Some(parts))
}

fn describe(device: &Handle<'_>, index: Option<u32>) -> Result<NvmlDevice, Error> {
    let memory = device.memory_info()?;
    let usable = Bytes(memory.total.saturating_sub(memory.reserved));
    Ok(NvmlDevice { id: device.uuid()?.into(), index, usable })
}
