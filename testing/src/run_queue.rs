//! Measures how long threads wait for a core. Other processes use that time, so a bound on a program's time excludes
//! it.

use std::{fs, path::Path, time::Duration};

/// The calling thread's wait since its start. Zero if the kernel does not count it, which makes a bound cover the whole
/// elapsed time.
#[must_use]
pub fn current_thread_wait() -> Duration {
    task_wait(Path::new("/proc/thread-self"))
}

/// The total wait of all live threads of this process. A waiting thread may hold what another thread needs, such as the
/// lock of the address space. Concurrent waits all count.
#[must_use]
pub fn current_process_wait() -> Duration {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.map(|task| task_wait(&task.path())).sum()
}

/// The wait of the thread with this folder in `/proc`. Zero for an ended thread.
#[must_use]
pub fn task_wait(task: &Path) -> Duration {
    let counted = fs::read_to_string(task.join("schedstat")).unwrap_or_default();
    let nanos = counted.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    Duration::from_nanos(nanos.unwrap_or_default())
}
