//! State shared by the parts of one engine.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::{
    args::EngineSimArgs,
    counters::SimCounters,
    faults::{ActiveFaults, SimFault},
    lifecycle::{EngineLifecycle, LifecycleCommand, LifecycleError, LifecycleResult, LifecycleView},
};

pub(crate) struct EngineShared {
    pub(crate) args: EngineSimArgs,
    pub(crate) faults: ActiveFaults,
    pub(crate) counters: Arc<SimCounters>,
    pub(crate) fatal: ExitSignal,
}

/// Ends the process from any part of the engine.
pub(crate) struct ExitSignal(watch::Sender<Option<u8>>);

impl ExitSignal {
    pub(crate) fn exit(&self, code: u8) {
        self.0.send_replace(Some(code));
    }

    /// Waits for a reason to exit, and returns the exit code.
    pub(crate) async fn wait(&self) -> u8 {
        let mut codes = self.0.subscribe();
        loop {
            if let Some(code) = *codes.borrow_and_update() {
                return code;
            }
            if codes.changed().await.is_err() {
                return std::future::pending().await;
            }
        }
    }
}

/// The engine as its server uses it.
pub(crate) struct SimEngine {
    shared: Arc<EngineShared>,
    view: watch::Receiver<LifecycleView>,
    aborts: watch::Receiver<u64>,
    commands: mpsc::Sender<(LifecycleCommand, oneshot::Sender<LifecycleResult>)>,
    running_permits: Semaphore,
    serial: AtomicU64,
}

impl std::ops::Deref for SimEngine {
    type Target = EngineShared;

    fn deref(&self) -> &EngineShared {
        &self.shared
    }
}

impl SimEngine {
    /// Creates the engine and the future of its lifecycle, which starts it.
    pub(crate) fn new(args: EngineSimArgs) -> (Arc<Self>, impl Future<Output = ()> + Send) {
        let faults = ActiveFaults::new(&args.faults);
        let counters = Arc::new(SimCounters::default());
        let seats = if args.max_running == 0 { Semaphore::MAX_PERMITS } else { args.max_running };
        let fatal = ExitSignal(watch::Sender::new(None));
        let shared = Arc::new(EngineShared { args, faults, counters, fatal });
        let (view_tx, view) = watch::channel(LifecycleView::default());
        let (abort_tx, aborts) = watch::channel(0);
        let (orders, orders_rx) = mpsc::channel(16);
        let lifecycle = EngineLifecycle::new(Arc::clone(&shared), view_tx, abort_tx).run(orders_rx);
        let (seats, serial) = (Semaphore::new(seats), AtomicU64::new(0));
        (Arc::new(Self { shared, view, aborts, commands: orders, running_permits: seats, serial }), lifecycle)
    }

    pub(crate) fn view(&self) -> LifecycleView {
        *self.view.borrow()
    }

    /// Waits until the engine's state satisfies `wanted`.
    pub(crate) async fn wait_until(&self, wanted: impl FnMut(&LifecycleView) -> bool) {
        if self.view.clone().wait_for(wanted).await.is_err() {
            // The lifecycle has ended, so the process is about to end.
            std::future::pending().await
        }
    }

    /// Executes an order and returns its outcome, however long it takes.
    pub(crate) async fn execute(&self, order: LifecycleCommand) -> LifecycleResult {
        let engine_dead = || LifecycleError { message: "EngineDeadError".to_owned(), fatal: false };
        let (told, outcome) = oneshot::channel();
        self.commands.send((order, told)).await.map_err(|_| engine_dead())?;
        outcome.await.map_err(|_| engine_dead())?
    }

    /// Notifies, from now on, each time a sleep aborts the running requests.
    pub(crate) fn aborts(&self) -> watch::Receiver<u64> {
        let mut aborts = self.aborts.clone();
        aborts.mark_unchanged();
        aborts
    }

    /// Waits for a place among the running requests, in FIFO order.
    pub(crate) async fn acquire_running(&self) -> tokio::sync::SemaphorePermit<'_> {
        match self.running_permits.acquire().await {
            Ok(seat) => seat,
            // The semaphore is never closed.
            Err(_) => std::future::pending().await,
        }
    }

    /// Numbers the requests from 0.
    pub(crate) fn serial(&self) -> u64 {
        self.serial.fetch_add(1, Relaxed)
    }

    /// The model names that requests may use. Responses show the first.
    pub(crate) fn names(&self) -> Vec<String> {
        let wrong = self.faults.is_on(SimFault::WrongModelName);
        self.args
            .model
            .iter()
            .map(|name| if wrong { format!("wrong-{name}") } else { name.clone() })
            .collect()
    }
}
