//! How long threads wait for a core. Other processes take that time, so a bound on what a program takes leaves it out.

use std::{fs, path::Path, time::Duration};

/// Of the calling thread, in its life. Zero where the kernel does not count it: then a bound is one on all that passes.
#[must_use]
pub fn current_thread_wait() -> Duration {
    task_wait(Path::new("/proc/thread-self"))
}

/// Of all threads of this process that live. A thread that waits may hold what another needs, such as the lock of the address
/// space. Threads that wait at the same time count each.
#[must_use]
pub fn current_process_wait() -> Duration {
    let tasks = fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    tasks.map(|task| task_wait(&task.path())).sum()
}

/// Of the thread with this folder in `/proc`. A thread that has ended counts for nothing.
#[must_use]
pub fn task_wait(task: &Path) -> Duration {
    let counted = fs::read_to_string(task.join("schedstat")).unwrap_or_default();
    let nanos = counted.split_whitespace().nth(1).and_then(|word| word.parse().ok());
    Duration::from_nanos(nanos.unwrap_or_default())
}
