//! Threads for controllers.

use std::{io, thread};

use kube::Client;
use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::oneshot,
};

/// A thread with a runtime and a client of its own, both until it is dropped.
///
/// The client is not shared with other threads: a connection makes progress only while the thread that opened it does.
#[derive(Debug)]
pub(crate) struct ControllerThread {
    handle: Handle,
    /// Its drop ends the thread.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl ControllerThread {
    /// Starts a thread of this name.
    ///
    /// # Errors
    /// The system refuses another thread.
    pub(crate) fn start(name: &str) -> io::Result<Self> {
        Self::spawn(thread::Builder::new().name(name.to_owned()))
    }

    fn spawn(builder: thread::Builder) -> io::Result<Self> {
        let runtime =
            Builder::new_current_thread().enable_all().max_blocking_threads(MAX_BLOCKING_THREADS).build()?;
        let handle = runtime.handle().clone();
        let runtime = ThreadRuntime(Some(runtime));
        let (stop, stopped) = oneshot::channel();
        let thread = builder.spawn(move || runtime.run_until(stopped))?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    /// Returns a client whose connections live on this thread.
    ///
    /// # Errors
    /// The configuration names files or an address that the client cannot use.
    pub(crate) fn client(&self, config: &kube::Config) -> kube::Result<Client> {
        let _on_this_thread = self.handle.enter();
        Client::try_from(config.clone())
    }

    /// Returns the handle on which this thread's tasks are spawned.
    #[must_use]
    pub(crate) const fn handle(&self) -> &Handle {
        &self.handle
    }
}

/// Bound on threads for calls that would hold up other tasks: name look-ups, and the reading of long lists.
const MAX_BLOCKING_THREADS: usize = 4;

/// A runtime whose drop waits for nothing. Async code drops it if its thread cannot be spawned, and must not block.
struct ThreadRuntime(Option<Runtime>);

impl ThreadRuntime {
    /// Runs until the sender is dropped, and ends the runtime.
    fn run_until(self, stopped: oneshot::Receiver<()>) {
        if let Some(runtime) = &self.0 {
            // The sender is only ever dropped.
            drop(runtime.block_on(stopped));
        }
    }
}

impl Drop for ThreadRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for ControllerThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("a controller thread panicked");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thread_that_the_system_refuses_is_an_error_and_no_panic() {
        // No address space has room for this stack.
        let refused = ControllerThread::spawn(thread::Builder::new().stack_size(1 << 60));
        assert!(refused.is_err());
        assert!(ControllerThread::start("granted").is_ok());
    }
}
