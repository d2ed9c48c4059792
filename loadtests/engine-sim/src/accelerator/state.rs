//! The content of the accelerator file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{SimAcceleratorUsage, process};

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct AcceleratorFileState {
    pub(super) accelerators: BTreeMap<String, SimAcceleratorState>,
    #[serde(default)]
    pub(super) late: Vec<DelayedFree>,
    #[serde(default)]
    pub(super) host: HostMemoryState,
    #[serde(default)]
    pub(super) refused: Vec<String>,
}

/// How many refusals are kept.
const MAX_REFUSALS: usize = 64;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct SimAcceleratorState {
    pub(super) capacity: u64,
    #[serde(default)]
    pub(super) used: BTreeMap<u32, MemoryEntry>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct HostMemoryState {
    #[serde(default)]
    pub(super) used: BTreeMap<u32, MemoryEntry>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MemoryEntry {
    pub(super) start: u64,
    pub(super) bytes: u64,
    pub(super) label: String,
    /// How long the memory stays counted after the process ends, for any reason.
    #[serde(default)]
    pub(super) late_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct DelayedFree {
    pub(super) accelerator: String,
    pub(super) bytes: u64,
    pub(super) until_unix_ms: u64,
    pub(super) pid: u32,
    pub(super) start: u64,
}

impl AcceleratorFileState {
    /// Adds a refused allocation.
    pub(super) fn with_refusal(mut self, what: String) -> Self {
        if self.refused.len() == MAX_REFUSALS {
            self.refused.remove(0);
        }
        self.refused.push(what);
        self
    }

    pub(super) fn usage(&self, id: &str) -> SimAcceleratorUsage {
        let Some(card) = self.accelerators.get(id) else {
            return SimAcceleratorUsage::default();
        };
        let mut by_pid: BTreeMap<u32, u64> =
            card.used.iter().map(|(pid, entry)| (*pid, entry.bytes)).collect();
        let mut used_total: u64 = by_pid.values().sum();
        for delayed in self.late.iter().filter(|late| late.accelerator == id) {
            used_total += delayed.bytes;
            if process::is_alive(delayed.pid, delayed.start) {
                *by_pid.entry(delayed.pid).or_default() += delayed.bytes;
            }
        }
        SimAcceleratorUsage { capacity: card.capacity, used_total, by_pid }
    }

    /// Drops the memory of dead processes, or moves it to the late memory.
    pub(super) fn drop_dead_processes(&mut self, now_ms: u64) {
        let is_dead = |pid: &u32, entry: &mut MemoryEntry| !process::is_alive(*pid, entry.start);
        for (id, card) in &mut self.accelerators {
            for (pid, entry) in card.used.extract_if(.., is_dead).filter(|(_, entry)| entry.late_ms > 0) {
                let until_unix_ms = now_ms + entry.late_ms;
                let MemoryEntry { bytes, start, .. } = entry;
                self.late.push(DelayedFree { accelerator: id.clone(), bytes, until_unix_ms, pid, start });
            }
        }
        self.host.used.retain(|pid, entry| process::is_alive(*pid, entry.start));
        self.late.retain(|delayed| delayed.until_unix_ms > now_ms && delayed.bytes > 0);
    }
}
