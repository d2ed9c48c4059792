//! Separates the machine's share of an elapsed time. On a busy machine a runnable thread waits for a free processor,
//! and the kernel counts that wait. A limit on the program's time applies to the rest.

use std::{fs, path::PathBuf, time::Duration};

use rouse_testing::run_queue;

use super::StubProcess;

/// A thread of any process, by its folder in `/proc`.
#[derive(Clone)]
pub(crate) struct ProcThread(PathBuf);

/// Threads that work alternately: while one is busy, the others are idle.
pub(crate) struct RunQueueMeter(Vec<(ProcThread, Duration)>);

impl ProcThread {
    /// The calling thread.
    pub(crate) fn current() -> Self {
        Self(PathBuf::from("/proc").join(fs::read_link("/proc/thread-self").unwrap()))
    }

    /// The stub's control thread, which receives orders and polls engines.
    pub(crate) fn control(stub: &StubProcess) -> Self {
        let pid = stub.pid().to_string();
        Self(["/proc", &pid, "task", &pid].iter().collect())
    }

    /// How long the thread has waited for a processor since its start. Zero if the kernel does not count it; all
    /// elapsed time then counts for the program.
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

    /// Adds a thread that has only just started.
    pub(crate) fn with_thread(mut self, thread: ProcThread) -> Self {
        self.0.push((thread, Duration::ZERO));
        self
    }

    /// Returns the elapsed time without these threads' waits for a processor.
    pub(crate) fn without_waits(&self, took: Duration) -> Duration {
        let waited: Duration = self.0.iter().map(|(thread, before)| thread.run_queue_wait() - *before).sum();
        took.saturating_sub(waited)
    }
}
