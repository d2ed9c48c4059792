//! The accelerator driver behind a trait. Tests can use a driver that fails or hangs.

use std::fmt::Debug;

use rouse::{model::AcceleratorId, units::Bytes};
use rouse_net::{
    accelerators_file::AcceleratorEntry,
    nvml::{Error, Nvml, NvmlDevice},
};

/// Queries the accelerator driver. Every call blocks, forever if the driver hangs, so call it only on threads that no
/// task joins.
pub(crate) trait AcceleratorDriver: Debug + Send + Sync + 'static {
    /// Lists every accelerator in the driver's order. The partitions of a partitioned accelerator replace it in the
    /// list.
    fn list(&self) -> Result<Vec<AcceleratorEntry>, Error>;

    /// Returns the accelerator at index `3`, or its partition for `3:1`.
    fn id_at_index(&self, index: u32, part: Option<u32>) -> Result<AcceleratorId, Error>;

    /// Returns the accelerator memory in use now.
    fn used_memory(&self, id: &AcceleratorId) -> Result<Bytes, Error>;
}

impl AcceleratorDriver for Nvml {
    fn list(&self) -> Result<Vec<AcceleratorEntry>, Error> {
        let entry = |device: NvmlDevice| AcceleratorEntry {
            id: device.id,
            index: device.index,
            memory: Some(device.usable),
        };
        Ok(self.devices()?.into_iter().map(entry).collect())
    }

    fn id_at_index(&self, index: u32, part: Option<u32>) -> Result<AcceleratorId, Error> {
        Self::id_at_index(self, index, part)
    }

    fn used_memory(&self, id: &AcceleratorId) -> Result<Bytes, Error> {
        Ok(self.read(id)?.used)
    }
}

/// A fake driver for tests, with a switch that makes its calls hang and return.
#[cfg(test)]
pub(crate) mod fake {
    use std::sync::{
        Condvar, Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    };

    use super::*;

    /// Has these accelerators, each with its MiB in use. `None` fails like a device that fell off the bus.
    #[derive(Debug, Default)]
    pub(crate) struct FakeDriver {
        pub(crate) devices: Mutex<Vec<(&'static str, Option<u64>)>>,
        /// Calls about this accelerator block while this field names it.
        hanging_id: Mutex<Option<&'static str>>,
        released: Condvar,
        pub(crate) readings: AtomicUsize,
        active_calls: AtomicUsize,
        pub(crate) max_active_calls: AtomicUsize,
    }

    impl FakeDriver {
        pub(crate) fn new(devices: &[(&'static str, Option<u64>)]) -> Self {
            Self { devices: Mutex::new(devices.to_vec()), ..Self::default() }
        }

        pub(crate) fn set_hanging_id(&self, id: Option<&'static str>) {
            *self.hanging_id.lock().unwrap_or_else(PoisonError::into_inner) = id;
            self.released.notify_all();
        }

        fn enter_call(&self, id: &str) {
            let inside = self.active_calls.fetch_add(1, Ordering::SeqCst) + 1;
            self.max_active_calls.fetch_max(inside, Ordering::SeqCst);
            let hangs = self.hanging_id.lock().unwrap();
            drop(self.released.wait_while(hangs, |hangs| *hangs == Some(id)).unwrap());
            self.active_calls.fetch_sub(1, Ordering::SeqCst);
        }
    }

    impl AcceleratorDriver for FakeDriver {
        fn list(&self) -> Result<Vec<AcceleratorEntry>, Error> {
            self.enter_call("all");
            let devices = self.devices.lock().unwrap();
            let listed = |(index, (id, _)): (u32, &(&'static str, _))| AcceleratorEntry {
                id: (*id).into(),
                index: Some(index),
                memory: None,
            };
            Ok((0..).zip(devices.iter()).map(listed).collect())
        }

        fn id_at_index(&self, index: u32, part: Option<u32>) -> Result<AcceleratorId, Error> {
            let devices = self.devices.lock().unwrap();
            match (usize::try_from(index).ok().and_then(|index| devices.get(index)), part) {
                (Some((id, _)), None) => Ok((*id).into()),
                (Some((id, _)), Some(part)) => Ok(id.replace("GPU", &format!("MIG-{part}")).into()),
                (None, _) => Err(Error::NoSuchIndex(index.to_string())),
            }
        }

        fn used_memory(&self, id: &AcceleratorId) -> Result<Bytes, Error> {
            self.enter_call(id.as_str());
            self.readings.fetch_add(1, Ordering::SeqCst);
            let devices = self.devices.lock().unwrap();
            let (_, mib) = devices.iter().find(|(known, _)| *known == id.as_str()).unwrap();
            mib.map(|mib| Bytes(Bytes::mib(mib).0 + 4096)).ok_or_else(|| Error::Lost(id.clone()))
        }
    }

    /// A driver whose library is missing.
    #[derive(Debug)]
    pub(crate) struct MissingDriver;

    impl AcceleratorDriver for MissingDriver {
        fn list(&self) -> Result<Vec<AcceleratorEntry>, Error> {
            Err(Error::NoDriver("libnvidia-ml.so.1 does not exist".to_owned()))
        }

        fn id_at_index(&self, _: u32, _: Option<u32>) -> Result<AcceleratorId, Error> {
            self.list().map(|_| unreachable!("it always fails"))
        }

        fn used_memory(&self, _: &AcceleratorId) -> Result<Bytes, Error> {
            self.list().map(|_| unreachable!("it always fails"))
        }
    }
}
