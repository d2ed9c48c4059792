//! Decides what `accelerators` is.

use rouse::units::Bytes;
use rouse_config::host::HostMemory;
use serde::Serialize;

use super::estimate::round_up;
use crate::cli::detect::{
    accelerators::{DriverAnswer, Error as DriverError},
    programs::FoundProgram,
};

/// The gateway's default for `headroom`.
const DEFAULT_HEADROOM: Bytes = Bytes::gib(1);
/// From this size on, the default headroom is a small part of the memory.
const ROOMY: Bytes = Bytes::gib(8);
/// RAM to assume where the kernel does not report it.
const UNKNOWN_RAM: Bytes = Bytes::gib(16);

/// The value of `accelerators`, with its reason.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub(super) enum AcceleratorChoice {
    /// `auto`: the driver lists them at each start.
    Detected {
        names: Vec<String>,
        /// What one of them can give to engines.
        capacity: Bytes,
        /// How many of them one engine may have.
        alike: u32,
    },
    /// A stand-in for engines that compute on the CPU.
    Cpu {
        memory: Bytes,
        headroom: Bytes,
        why: String,
        /// Accelerators that only a program lists, and no meter.
        listed: Vec<String>,
    },
}

impl AcceleratorChoice {
    pub(super) fn new(
        driver: &Result<DriverAnswer, DriverError>,
        memory: Option<&HostMemory>,
        programs: &[FoundProgram],
    ) -> Self {
        let found: Vec<(String, Bytes)> = match driver {
            Ok(answer) => {
                let healthy = answer.accelerators.iter().filter(|accelerator| accelerator.reading.is_ok());
                healthy.map(|accelerator| (accelerator.label().to_owned(), accelerator.usable)).collect()
            }
            Err(_) => Vec::new(),
        };
        let reason = match driver {
            Ok(_) => "NVIDIA's driver lists no GPU that answers".to_owned(),
            Err(error) => format!("NVIDIA's driver lists no GPU ({error})"),
        };
        Self::of(&found, &reason, memory.map_or(UNKNOWN_RAM, HostMemory::usable), programs)
    }

    /// `found` has the driver's accelerators with their memory; `reason` says why there may be none.
    pub(super) fn of(found: &[(String, Bytes)], reason: &str, ram: Bytes, programs: &[FoundProgram]) -> Self {
        let computes_there = |program: &FoundProgram| program.uses_accelerators != Some(false);
        let largest = found.iter().map(|(_, usable)| *usable).max();
        if let Some(largest) = largest.filter(|_| programs.is_empty() || programs.iter().any(computes_there))
        {
            // Of accelerators that differ much, an engine on several could use only the smallest one's memory.
            let alike = found.iter().filter(|(_, usable)| usable.0 >= largest.0 / 10 * 9).count();
            return Self::Detected {
                names: found.iter().map(|(name, usable)| format!("{name} with {usable}")).collect(),
                capacity: largest.saturating_sub(DEFAULT_HEADROOM),
                alike: u32::try_from(alike).unwrap_or(1),
            };
        }
        let memory = Bytes((ram.0 / 4 * 3).max(Bytes::mib(512).0));
        // Whole mebibytes read better.
        let memory = Bytes(memory.0 >> 20 << 20);
        let why = if found.is_empty() {
            reason.to_owned()
        } else {
            "there is a GPU, but no engine that was found computes on it".to_owned()
        };
        Self::Cpu {
            memory,
            headroom: if memory >= ROOMY { DEFAULT_HEADROOM } else { round_up(Bytes(memory.0 / 8)) },
            why,
            listed: programs.iter().flat_map(|program| program.devices.clone()).collect(),
        }
    }

    pub(super) const fn is_detected(&self) -> bool {
        matches!(self, Self::Detected { .. })
    }

    /// Returns what one accelerator can give, and how many one engine may have.
    pub(super) fn capacity(&self) -> (Bytes, u32) {
        match self {
            Self::Detected { capacity, alike, .. } => (*capacity, *alike),
            Self::Cpu { memory, headroom, .. } => (memory.saturating_sub(*headroom), 1),
        }
    }

    /// Describes the choice in a few words.
    pub(super) fn summary(&self) -> String {
        match self {
            Self::Detected { names, .. } => names.join(", "),
            Self::Cpu { memory, .. } => format!("none, engines compute on the CPU with {memory} of RAM"),
        }
    }
}
