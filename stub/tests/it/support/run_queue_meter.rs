//! What of a time is this machine's. On a busy one a thread that could go on waits until a processor is free for it, and
//! the kernel counts for how long. A bound on what the program takes is one on the rest.

use std::{fs, path::PathBuf, time::Duration};

use rouse_testing::run_queue;

use super::StubProcess;

/// A thread of any process, by its folder in `/proc`.
#[derive(Clone)]
pub(crate) struct ProcThread(PathBuf);

/// Threads that take turns: while one of them is busy, the others have nothing to do.
pub(crate) struct RunQueueMeter(Vec<(ProcThread, Duration)>);

impl ProcThread {
    /// The one that asks.
    pub(crate) fn current() -> Self {
        Self(PathBuf::from("/proc").join(fs::read_link("/proc/thread-self").unwrap()))
    }

    /// On which the stub hears orders and polls engines.
    pub(crate) fn control(stub: &StubProcess) -> Self {
        let pid = stub.pid().to_string();
        Self(["/proc", &pid, "task", &pid].iter().collect())
    }

    /// How long it has waited for a processor in its life. Nothing, where the kernel does not count it: then all that
    /// passes is taken for the program's.
    fn run_queue_wait(&self) -> Duration {
        run_queue::task_wait(&self.0)
    }
}

impl RunQueueMeter {
    pub(crate) fn start<const N: usize>(threads: [ProcThread; N]) -> Self {
        Self(
            threads
                .into_iter()
                .map(|thread| {
                    let waited = thread.run_queue_wait();
                    (thread, waited)
                })
                .collect(),
        )
    }

    /// With another, that has only just begun.
    pub(crate) fn with_thread(mut self, thread: ProcThread) -> Self {
        self.0.push((thread, Duration::ZERO));
        self
    }

    /// What of the time that passed since was not waited for a processor by any of them.
    pub(crate) fn without_waits(&self, took: Duration) -> Duration {
        let waited: Duration = self.0.iter().map(|(thread, before)| thread.run_queue_wait() - *before).sum();
        took.saturating_sub(waited)
    }
}
