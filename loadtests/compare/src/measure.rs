//! What processes cost, as the kernel counts it: time on a core to the nanosecond, memory by proportional share, and what else the
//! machine was doing meanwhile.

mod cpu;
mod machine;
mod memory;
mod process_tree;

use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

pub(crate) use cpu::CpuMeter;
pub(crate) use machine::MachineTicks;
pub(crate) use memory::ProcessMemory;
pub(crate) use process_tree::{children, tree};

/// Keeps the calling thread, and the threads and processes that it starts from now on, on one core.
///
/// Errors: there is no such core, or it is not allowed to this process.
pub(crate) fn pin(core: usize) -> anyhow::Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &cores)?)
}

/// Nothing, where a process or thread ended between being listed and being read.
fn if_alive<T>(read: std::io::Result<T>) -> std::io::Result<Option<T>> {
    use std::io::ErrorKind::NotFound;
    match read {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == NotFound => Ok(None),
        Err(error) if error.raw_os_error() == Some(nix::libc::ESRCH) => Ok(None),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, thread};

    use super::*;

    #[test]
    fn a_pinned_thread_is_allowed_one_core() {
        let status = thread::spawn(|| {
            pin(1)?;
            Ok::<_, anyhow::Error>(fs::read_to_string("/proc/thread-self/status")?)
        });
        let status = status.join().unwrap().unwrap();
        assert!(status.lines().any(|line| line.starts_with("Cpus_allowed_list:") && line.ends_with("\t1")));
        assert!(pin(100_000).is_err());
    }
}
