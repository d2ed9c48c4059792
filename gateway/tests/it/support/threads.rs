//! What the kernel counts of the threads of a process: for how long each has run, and waited for a processor while it could.

use std::{collections::BTreeMap, path::PathBuf, time::Duration};

use super::read;

/// Times of a thread since it began. Nothing, where the kernel does not count them.
#[derive(Clone, Copy, Default)]
pub(crate) struct Times {
    pub(crate) ran: Duration,
    pub(crate) waited: Duration,
}

/// The threads of a process, by their folders in `/proc`.
pub(crate) struct Threads(BTreeMap<PathBuf, Times>);

impl Threads {
    pub(crate) fn of(pid: i32) -> Self {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
        Self(tasks.filter_map(|task| task.ok().map(|task| (task.path(), times(task.path())))).collect())
    }

    pub(crate) fn ran(&self) -> Duration {
        self.0.values().map(|times| times.ran).sum()
    }

    /// How long that thread waited which waited longest since the earlier count.
    pub(crate) fn waited_since(&self, earlier: &Self) -> Duration {
        let since = |(thread, now): (&PathBuf, &Times)| {
            let before = earlier.0.get(thread).copied().unwrap_or_default();
            now.waited.saturating_sub(before.waited)
        };
        self.0.iter().map(since).max().unwrap_or_default()
    }
}

fn times(task: PathBuf) -> Times {
    let counted = read(&task.join("schedstat"));
    let mut nanos = counted.split_whitespace().map_while(|word| word.parse().ok()).map(Duration::from_nanos);
    Times { ran: nanos.next().unwrap_or_default(), waited: nanos.next().unwrap_or_default() }
}
