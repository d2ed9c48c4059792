//! Asks NVIDIA's driver for its versions and accelerators.
//!
//! A driver that hangs must not hang the command, not even at its end. So each query has a thread of its own, which a
//! query without an answer keeps until the process ends.

use std::{collections::BTreeMap, thread};

use rouse::{model::AcceleratorId, units::Bytes};
use rouse_net::nvml::{self, DeviceCondition, DriverVersions, Nvml, NvmlReading};
use tokio::{sync::oneshot, time};

/// Why nothing is known about the accelerators.
#[derive(Debug, thiserror::Error)]
pub(in crate::cli) enum Error {
    #[error(transparent)]
    Driver(#[from] nvml::Error),
    #[error("the driver does not answer within {:?}", nvml::QUERY_TIMEOUT)]
    NoAnswer,
}

/// What the driver says about this machine.
#[derive(Debug)]
pub(in crate::cli) struct DriverAnswer {
    pub(in crate::cli) versions: DriverVersions,
    pub(in crate::cli) accelerators: Vec<DetectedAccelerator>,
}

/// One accelerator as the driver describes it.
#[derive(Debug)]
pub(in crate::cli) struct DetectedAccelerator {
    pub(in crate::cli) id: AcceleratorId,
    /// Memory without what the driver keeps for itself.
    pub(in crate::cli) usable: Bytes,
    pub(in crate::cli) reading: Result<NvmlReading, nvml::Error>,
    pub(in crate::cli) condition: DeviceCondition,
}

impl DetectedAccelerator {
    /// Returns the product's name, or the id if the driver does not report it.
    pub(in crate::cli) fn label(&self) -> &str {
        self.condition.name.as_deref().unwrap_or_else(|| self.id.as_str())
    }
}

/// Asks the driver for everything at once.
///
/// # Errors
/// There is no driver, or it does not answer.
pub(in crate::cli) async fn ask_driver() -> Result<DriverAnswer, Error> {
    let (sender, answer) = oneshot::channel();
    let ask = move || {
        // The receiver may have given up.
        drop(sender.send(query()));
    };
    thread::Builder::new().name("driver".to_owned()).spawn(ask).map_err(|_| Error::NoAnswer)?;
    match time::timeout(nvml::QUERY_TIMEOUT, answer).await {
        Ok(Ok(answer)) => Ok(answer?),
        Ok(Err(_)) | Err(_) => Err(Error::NoAnswer),
    }
}

fn query() -> Result<DriverAnswer, nvml::Error> {
    let nvml = Nvml::default();
    let versions = nvml.versions()?;
    let devices = nvml.devices()?;
    let accelerators = devices.into_iter().map(|device| DetectedAccelerator {
        usable: device.usable,
        reading: nvml.read(&device.id),
        condition: nvml.condition(&device.id),
        id: device.id,
    });
    Ok(DriverAnswer { versions, accelerators: accelerators.collect() })
}

/// Returns the memory that processes other than engines of a gateway hold, by pid.
///
/// `is_engine` returns whether a pid is one of an engine. `None`: the driver does not name the processes.
pub(in crate::cli) fn foreign_holders(
    reading: &NvmlReading,
    is_engine: impl Fn(u32) -> bool,
) -> Option<BTreeMap<u32, Bytes>> {
    let by_pid = reading.by_pid.as_ref()?;
    Some(by_pid.iter().filter(|(pid, _)| !is_engine(**pid)).map(|(pid, bytes)| (*pid, *bytes)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engines_are_no_foreign_holders_and_unnamed_processes_are_unknown() {
        let by_pid = BTreeMap::from([(7, Bytes::gib(3)), (8, Bytes::gib(1))]);
        let mut reading = NvmlReading { total: Bytes::gib(8), used: Bytes::gib(4), by_pid: Some(by_pid) };
        let foreign = foreign_holders(&reading, |pid| pid == 7).unwrap();
        assert_eq!(foreign, BTreeMap::from([(8, Bytes::gib(1))]));
        reading.by_pid = None;
        assert_eq!(foreign_holders(&reading, |_| false), None);
    }
}
