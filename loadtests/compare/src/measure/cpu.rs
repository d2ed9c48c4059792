//! Measures the CPU time of processes.

use std::{collections::BTreeMap, fs, io, time::Duration};

use nix::sys::{
    resource::{UsageWho, getrusage},
    time::TimeValLike as _,
};

use super::{if_alive, tree};

/// The CPU time of a process and its descendants, in nanoseconds. The kernel drops a thread's count when the thread
/// ends, so the last reading is kept here.
#[derive(Debug)]
pub(crate) struct CpuMeter {
    root: u32,
    /// By process and thread.
    threads: BTreeMap<(u32, u32), u64>,
    ended: u64,
}

impl CpuMeter {
    pub(crate) fn new(root: u32) -> Self {
        Self { root, threads: BTreeMap::new(), ended: 0 }
    }

    pub(crate) fn root(&self) -> u32 {
        self.root
    }

    /// The total time until now, which never decreases. A cell's time is the difference of two totals.
    ///
    /// Errors: the processes cannot be read.
    pub(crate) fn total(&mut self) -> io::Result<Duration> {
        let mut now = BTreeMap::new();
        for pid in tree(self.root)? {
            let Some(tasks) = if_alive(fs::read_dir(format!("/proc/{pid}/task")))? else { continue };
            for task in tasks {
                let Some(task) = if_alive(task)? else { continue };
                let Some(tid) = task.file_name().to_str().and_then(|name| name.parse().ok()) else {
                    continue;
                };
                let Some(text) = if_alive(fs::read_to_string(task.path().join("schedstat")))? else {
                    continue;
                };
                let time = text.split(' ').next().and_then(|time| time.parse().ok());
                now.insert((pid, tid), time.ok_or(io::ErrorKind::InvalidData)?);
            }
        }
        Ok(Duration::from_nanos(self.advance(now)))
    }

    fn advance(&mut self, now: BTreeMap<(u32, u32), u64>) -> u64 {
        for (thread, time) in &self.threads {
            // Less than before means that another thread has reused the number.
            if now.get(thread).is_none_or(|later| later < time) {
                self.ended += time;
            }
        }
        self.threads = now;
        self.ended + self.threads.values().sum::<u64>()
    }
}

/// The total CPU time of children that ended and were waited for, with their own such children.
///
/// Errors: the kernel does not report it.
pub(crate) fn ended_children() -> io::Result<Duration> {
    let used = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let micros = used.user_time().num_microseconds() + used.system_time().num_microseconds();
    Ok(Duration::from_micros(micros.max(0).cast_unsigned()))
}

#[cfg(test)]
mod tests {
    use std::process::{self, Command};

    use engine_sim::fast::wire::monotonic_ns;

    use super::*;

    #[test]
    fn threads_that_ended_still_count() {
        let mut cpu = CpuMeter::new(1);
        let at = |times: &[(u32, u64)]| times.iter().map(|(tid, time)| ((1, *tid), *time)).collect();
        assert_eq!(cpu.advance(at(&[(1, 100), (2, 50)])), 150);
        assert_eq!(cpu.advance(at(&[(1, 110)])), 160);
        assert_eq!(cpu.advance(at(&[(1, 120), (2, 5)])), 175);
        assert_eq!(cpu.advance(at(&[(1, 120), (2, 3)])), 178);
        assert_eq!(cpu.advance(at(&[])), 178);
    }

    #[test]
    fn the_work_of_an_ended_child_is_seen() {
        let before = ended_children().unwrap();
        let mut shell = Command::new("sh");
        shell.args(["-c", "i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done"]);
        assert!(shell.status().unwrap().success());
        assert!(ended_children().unwrap() >= before + Duration::from_millis(5));
    }

    #[test]
    fn work_is_seen() {
        let mut cpu = CpuMeter::new(process::id());
        let before = cpu.total().unwrap();
        let began = monotonic_ns();
        // The test cannot control how much of the machine it gets.
        while cpu.total().unwrap() - before < Duration::from_millis(20) {
            assert!(monotonic_ns() - began < 20_000_000_000);
        }
    }
}
