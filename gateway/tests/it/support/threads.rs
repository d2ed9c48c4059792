//! CPU time of a process's threads, as the kernel counts it.

use std::{path::PathBuf, time::Duration};

use super::read;

/// CPU time of each thread of a process since its start. Zero where the kernel does not count it.
pub(crate) struct ThreadRunTimes(Vec<Duration>);

impl ThreadRunTimes {
    pub(crate) fn of(pid: i32) -> Self {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        Self(tasks.filter_map(|task| task.ok().map(|task| run_time(task.path()))).collect())
    }

    pub(crate) fn total(&self) -> Duration {
        self.0.iter().sum()
    }
}

fn run_time(task: PathBuf) -> Duration {
    let counted = read(&task.join("schedstat"));
    let nanos = counted.split_whitespace().next().and_then(|word| word.parse().ok());
    Duration::from_nanos(nanos.unwrap_or_default())
}
