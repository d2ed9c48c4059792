//! What the parts of one engine share.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use tokio::sync::{Semaphore, mpsc, oneshot, watch};

use crate::{
    args::Args,
    counters::Counters,
    faults::{Fault, Faults},
    lifecycle::{Life, Order, Outcome, Refusal, View},
};

pub(crate) struct Shared {
    pub(crate) args: Args,
    pub(crate) faults: Faults,
    pub(crate) counters: Arc<Counters>,
    pub(crate) fatal: Fatal,
}

/// Ends the process, from wherever it went wrong.
pub(crate) struct Fatal(watch::Sender<Option<u8>>);

impl Fatal {
    pub(crate) fn die(&self, code: u8) {
        self.0.send_replace(Some(code));
    }

    /// The exit code, once there is a reason to exit.
    pub(crate) async fn died(&self) -> u8 {
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

/// The engine as its server sees it.
pub(crate) struct Engine {
    shared: Arc<Shared>,
    view: watch::Receiver<View>,
    aborts: watch::Receiver<u64>,
    orders: mpsc::Sender<(Order, oneshot::Sender<Outcome>)>,
    seats: Semaphore,
    serial: AtomicU64,
}

impl std::ops::Deref for Engine {
    type Target = Shared;

    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl Engine {
    /// Makes the engine and the future of its life, which starts it.
    pub(crate) fn new(args: Args) -> (Arc<Self>, impl Future<Output = ()> + Send) {
        let faults = Faults::new(&args.faults);
        let counters = Arc::new(Counters::default());
        let seats = if args.max_running == 0 { Semaphore::MAX_PERMITS } else { args.max_running };
        let fatal = Fatal(watch::Sender::new(None));
        let shared = Arc::new(Shared { args, faults, counters, fatal });
        let (view_tx, view) = watch::channel(View::default());
        let (abort_tx, aborts) = watch::channel(0);
        let (orders, orders_rx) = mpsc::channel(16);
        let life = Life::new(Arc::clone(&shared), view_tx, abort_tx).run(orders_rx);
        let (seats, serial) = (Semaphore::new(seats), AtomicU64::new(0));
        (Arc::new(Self { shared, view, aborts, orders, seats, serial }), life)
    }

    pub(crate) fn view(&self) -> View {
        *self.view.borrow()
    }

    /// Returns once the engine has reached a state that `wanted` accepts.
    pub(crate) async fn until(&self, wanted: impl FnMut(&View) -> bool) {
        if self.view.clone().wait_for(wanted).await.is_err() {
            // The life ended before: the process is about to.
            std::future::pending().await
        }
    }

    /// Gives an order and returns its outcome, however long it takes.
    pub(crate) async fn order(&self, order: Order) -> Outcome {
        let gone = || Refusal { message: "EngineDeadError".to_owned(), fatal: false };
        let (told, outcome) = oneshot::channel();
        self.orders.send((order, told)).await.map_err(|_| gone())?;
        outcome.await.map_err(|_| gone())?
    }

    /// Tells of each time that a sleep aborts what runs, from now on.
    pub(crate) fn aborts(&self) -> watch::Receiver<u64> {
        let mut aborts = self.aborts.clone();
        aborts.mark_unchanged();
        aborts
    }

    /// Waits for a place among the running requests; first come, first served.
    pub(crate) async fn seat(&self) -> tokio::sync::SemaphorePermit<'_> {
        match self.seats.acquire().await {
            Ok(seat) => seat,
            // The semaphore is never closed.
            Err(_) => std::future::pending().await,
        }
    }

    /// A number for each request, from 0.
    pub(crate) fn serial(&self) -> u64 {
        self.serial.fetch_add(1, Relaxed)
    }

    /// The names that requests may use; the first is shown in answers.
    pub(crate) fn names(&self) -> Vec<String> {
        let wrong = self.faults.on(Fault::WrongModelName);
        self.args
            .model
            .iter()
            .map(|name| if wrong { format!("wrong-{name}") } else { name.clone() })
            .collect()
    }
}
