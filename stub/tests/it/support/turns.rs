//! What of a time is this machine's. On a busy one a thread that could go on waits until a processor is free for it, and
//! the kernel counts for how long. A bound on what the program takes is one on the rest.

use std::{fs, path::PathBuf, time::Duration};

use rouse_testing::run_queue;

use super::Stub;

/// A thread of any process, by its folder in `/proc`.
#[derive(Clone)]
pub(crate) struct Thread(PathBuf);

/// Threads that take turns: while one of them is busy, the others have nothing to do.
pub(crate) struct Turns(Vec<(Thread, Duration)>);

impl Thread {
    /// The one that asks.
    pub(crate) fn this() -> Self {
        Self(PathBuf::from("/proc").join(fs::read_link("/proc/thread-self").unwrap()))
    }

    /// On which the stub hears orders and polls engines.
    pub(crate) fn control(stub: &Stub) -> Self {
        let pid = stub.pid().to_string();
        Self(["/proc", &pid, "task", &pid].iter().collect())
    }

    /// How long it has waited for a processor in its life. Nothing, where the kernel does not count it: then all that
    /// passes is taken for the program's.
    fn waited(&self) -> Duration {
        run_queue::of(&self.0)
    }
}

impl Turns {
    pub(crate) fn of<const N: usize>(threads: [Thread; N]) -> Self {
        Self(
            threads
                .into_iter()
                .map(|thread| {
                    let waited = thread.waited();
                    (thread, waited)
                })
                .collect(),
        )
    }

    /// With another, that has only just begun.
    pub(crate) fn and(mut self, thread: Thread) -> Self {
        self.0.push((thread, Duration::ZERO));
        self
    }

    /// What of the time that passed since was not waited for a processor by any of them.
    pub(crate) fn own(&self, took: Duration) -> Duration {
        let waited: Duration = self.0.iter().map(|(thread, before)| thread.waited() - *before).sum();
        took.saturating_sub(waited)
    }
}
