//! The only clock, and the only caller of all three verbs.

use std::{net::SocketAddr, sync::Arc};

use arc_swap::{ArcSwap, Guard};
use rouse::{
    fault::Fault,
    fleet::{
        event::{OperationId, Order, Verdict, WaiterId},
        report::{Report, View},
    },
    lease::{Clock, Lease},
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};

use tokio::sync::broadcast;

use crate::routes::Routes;

/// What the rest of the gateway may do with the driver. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    routes: Arc<ArcSwap<Routes>>,
    clock: Clock,
}

/// A request that must wait.
pub struct Parking {
    pub model: ModelName,
    pub band: i32,
    pub key: String,
    /// When it first arrived (a replayed canary keeps its place).
    pub arrived: Tick,
    pub deadline: Tick,
    /// An SSE stream: can be the canary.
    pub stream: bool,
}

/// The end of a wait: a lease, and where to go with it.
pub struct Granted {
    pub lease: Lease,
    pub engine: EngineId,
    pub generation: Generation,
    pub address: SocketAddr,
    /// Present when this request is the engine's first: its outcome is wanted.
    pub canary: Option<Canary>,
    pub waited: Waited,
}

/// What the wait was made of, for `x-rouse-cold-start` and `server-timing`.
#[derive(Clone, Copy, Debug)]
pub struct Waited {
    /// How the engine came to be awake; `None` when only a place was waited for.
    pub cold_start: Option<ColdStart>,
    /// In the queue, all in all.
    pub queue: Millis,
    /// Of that, from the order to launch or wake until ready.
    pub wake: Millis,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColdStart {
    Hot,
    Warm,
    Cold,
}

/// The duty to tell how the first exchange after a start or wake went. Dropped without a word it counts as
/// inconclusive: the client left, and the next one is tried.
pub struct Canary {
    tell: Option<Box<dyn FnOnce(Verdict) + Send>>,
}

impl Handle {
    pub fn routes(&self) -> Guard<Arc<Routes>> {
        self.routes.load()
    }

    pub fn clock(&self) -> Clock {
        self.clock
    }

    /// Waits for a lease until the deadline. Dropping the future leaves the queue.
    pub async fn park(&self, parking: Parking) -> Result<Granted, Fault> {
        let _ = parking;
        Err(Fault::Internal)
    }

    /// The state of the fleet, as of the last plan.
    pub fn view(&self) -> Arc<View> {
        Arc::default()
    }

    /// The last plan's report.
    pub fn report(&self) -> Arc<Report> {
        Arc::default()
    }

    /// How an order went; `None` when unknown or older than an hour.
    pub fn operation(&self, id: OperationId) -> Option<Operation> {
        let _ = id;
        None
    }

    /// The journal from now on, line by line (JSON). Slow readers miss lines rather than hold up the driver.
    pub fn journal(&self) -> broadcast::Receiver<Arc<str>> {
        broadcast::channel(1).1
    }

    /// Gives an order; its outcome is found under the returned id for an hour. `Err`: why an invariant forbids it.
    pub async fn order(&self, model: ModelName, order: Order) -> Result<OperationId, String> {
        let _ = (model, order, WaiterId(0));
        Err(String::new())
    }
}

/// An operator's order and what became of it.
#[derive(Clone, Debug)]
pub struct Operation {
    pub model: ModelName,
    pub order: Order,
    pub given: Tick,
    /// `None`: still running.
    pub outcome: Option<Result<(), String>>,
}

impl Canary {
    /// The first byte of an answer below 500 came.
    pub fn tell(mut self, verdict: Verdict) {
        if let Some(tell) = self.tell.take() {
            tell(verdict);
        }
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        if let Some(tell) = self.tell.take() {
            tell(Verdict::Inconclusive);
        }
    }
}
