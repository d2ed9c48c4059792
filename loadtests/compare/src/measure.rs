//! Measures processes with the kernel's counters: CPU time in nanoseconds, proportional memory, and the machine's other
//! work.

mod cpu;
mod machine;
mod memory;
mod process_tree;

use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};

pub(crate) use cpu::{CpuMeter, ended_children};
pub(crate) use machine::MachineTicks;
pub(crate) use memory::ProcessMemory;
pub(crate) use process_tree::{children, tree};

/// Pins the calling thread to one core, together with threads and processes that it starts later.
///
/// Errors: there is no such core, or this process may not use it.
pub(crate) fn pin(core: usize) -> anyhow::Result<()> {
    let mut cores = CpuSet::new();
    cores.set(core)?;
    Ok(sched_setaffinity(Pid::from_raw(0), &cores)?)
}

/// Returns `None` if a process or thread ended between listing and reading.
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
