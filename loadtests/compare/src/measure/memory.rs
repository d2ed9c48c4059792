//! Memory of processes.

use std::{fs, io};

use super::if_alive;

/// Bytes of memory, over several processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ProcessMemory {
    /// Pages shared with others count in part, so the sum over processes is what they take together.
    pub(crate) pss: u64,
    /// Pages shared with others count in full, for each.
    pub(crate) rss: u64,
}

impl ProcessMemory {
    /// Of all of these together; processes that are gone have none.
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
        // Other tests of this process give theirs back meanwhile: much more than they have.
        let touched = vec![1_u8; 256 << 20];
        let after = ProcessMemory::of(&[process::id()]).unwrap();
        assert!(after.pss >= before.pss + (128 << 20) && after.rss >= after.pss, "{before:?} {after:?}");
        drop(touched);
        assert_eq!(ProcessMemory::of(&[u32::MAX]).unwrap(), ProcessMemory::default());
    }
}
