//! Measures the memory of processes.

use std::{fs, io};

use super::if_alive;

/// Memory over several processes, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessMemory {
    /// Shared pages count proportionally, so the sum over processes is their joint memory.
    pub(crate) pss: u64,
    /// Shared pages count in full for each process.
    pub(crate) rss: u64,
}

impl ProcessMemory {
    /// The total of these processes. Processes that have ended count as zero.
    ///
    /// Errors: a process belongs to another user.
    pub(crate) fn of(pids: &[u32]) -> io::Result<Self> {
        let mut all = Self::default();
        for pid in pids {
            if let Some(text) = if_alive(fs::read_to_string(format!("/proc/{pid}/smaps_rollup")))? {
                all.pss += field(&text, "Pss:");
                all.rss += field(&text, "Rss:");
            }
        }
        Ok(all)
    }
}

fn field(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kilobytes.unwrap_or(0) * 1024
}

#[cfg(test)]
mod tests {
    use std::process;

    use super::*;

    #[test]
    fn touched_memory_is_seen() {
        let before = ProcessMemory::of(&[process::id()]).unwrap();
        // Other tests of this process free memory meanwhile, so allocate much more than theirs.
        let touched = vec![1_u8; 256 << 20];
        let after = ProcessMemory::of(&[process::id()]).unwrap();
        assert!(after.pss >= before.pss + (128 << 20) && after.rss >= after.pss, "{before:?} {after:?}");
        drop(touched);
        assert_eq!(ProcessMemory::of(&[u32::MAX]).unwrap(), ProcessMemory::default());
    }
}
