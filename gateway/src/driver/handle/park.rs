//! The wait of a parked request: its place in the queue, and the lease at the end.

use std::{net::SocketAddr, sync::atomic::Ordering};

use rouse::{
    engine::Engine,
    fault::{Fault, WaitDetails},
    fleet::event::{Waiter, WaiterId},
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};
use rouse_net::lease::Lease;
use tokio::sync::oneshot;

use super::{CanaryGuard, DriverHandle, DriverRequest, DriverState};
use crate::driver::QuotedWait;

/// A request that must wait.
pub struct ParkRequest {
    pub model: ModelName,
    pub band: i32,
    pub key: String,
    /// Hash of the client, see [`Waiter::client`].
    pub client: u64,
    /// First arrival; a replayed canary keeps its place.
    pub arrived: Tick,
    pub deadline: Tick,
    /// Whether it is an SSE stream, which can be the canary.
    pub stream: bool,
    /// The only engine generation that can answer it, as long as that serves.
    pub required_engine: Option<(EngineId, Generation)>,
    /// Where the driver quotes the expected wait. A quote that is there already stays.
    pub quoted: QuotedWait,
}

/// A lease at the end of a wait, with the engine's address.
pub struct GrantedLease {
    pub lease: Lease,
    pub engine: EngineId,
    pub generation: Generation,
    /// Fingerprint that the engine was started with. It may differ from the one when the request began to wait.
    pub fingerprint: u64,
    pub address: SocketAddr,
    /// Present for the engine's first request, whose outcome must be reported.
    pub canary: Option<CanaryGuard>,
    pub wait: WaitBreakdown,
}

/// Parts of the wait, for `x-rouse-cold-start` and `server-timing`.
#[derive(Clone, Copy, Debug)]
pub struct WaitBreakdown {
    /// How the engine became awake; `None` if the request only waited for a place.
    pub cold_start: Option<ColdStart>,
    /// Total time in the queue.
    pub queue: Millis,
    /// Part of `queue` between the order to launch or wake and ready.
    pub wake: Millis,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColdStart {
    Hot,
    Cold,
}

impl DriverHandle {
    /// Waits for a lease until the deadline. Dropping the future leaves the queue.
    ///
    /// Waits for room in the driver's channel too. The number of places bounds the requests that do.
    pub async fn park(&self, request: ParkRequest) -> Result<GrantedLease, Fault> {
        let mut position_guard = QueuePositionGuard::new(&self.0, &request.model)?;
        let (reply, answer) = oneshot::channel();
        let waiter = Waiter {
            id: position_guard.id,
            model: request.model,
            band: request.band,
            key: request.key,
            client: request.client,
            arrived: request.arrived,
            deadline: request.deadline,
            stream: request.stream,
            required_engine: request.required_engine,
        };
        let permit = self.0.requests.reserve().await.map_err(|_| Fault::ShuttingDown)?;
        position_guard.in_queue = true;
        permit.send(DriverRequest::Park { waiter, reply, quoted: request.quoted });
        let answer = answer.await;
        position_guard.in_queue = false;
        answer.unwrap_or(Err(Fault::ShuttingDown))
    }
}

/// A place in the queue, left when dropped.
struct QueuePositionGuard<'a> {
    shared: &'a DriverState,
    id: WaiterId,
    /// The driver has the waiter in its queue, or will. It then releases the place once it knows that the waiter has
    /// left.
    in_queue: bool,
}

impl<'a> QueuePositionGuard<'a> {
    fn new(shared: &'a DriverState, model: &ModelName) -> Result<Self, Fault> {
        if shared.parked.fetch_add(1, Ordering::Relaxed) >= shared.max_parked.load(Ordering::Relaxed) {
            shared.parked.fetch_sub(1, Ordering::Relaxed);
            // A driver that has ended releases no place.
            if shared.requests.is_closed() {
                return Err(Fault::ShuttingDown);
            }
            let message = "too many requests wait (queue.maxWaiting)".to_owned();
            let expected_wait = shared.waits.of(model, shared.clock.now()).map(Box::new);
            let wait = WaitDetails { expected_wait, ..WaitDetails::default() };
            return Err(Fault::QueueFull { message, wait });
        }
        let id = WaiterId(shared.ids.fetch_add(1, Ordering::Relaxed));
        Ok(Self { shared, id, in_queue: false })
    }
}

impl Drop for QueuePositionGuard<'_> {
    fn drop(&mut self) {
        if self.in_queue {
            // If the driver has sent an answer meanwhile, it no longer knows the waiter and only releases the place.
            self.shared.reports.add_left(self.id);
        } else {
            self.shared.release_positions(1);
        }
    }
}

impl WaitBreakdown {
    pub(in crate::driver) fn of(waiter: &Waiter, engine: &Engine, canary: bool, now: Tick) -> Self {
        let queue = now.since(waiter.arrived);
        // It became awake while this request waited, or this request is the one that proves it.
        if !canary && engine.turn_start < waiter.arrived {
            return Self { cold_start: None, queue, wake: Millis::ZERO };
        }
        let ready = if canary { now } else { engine.turn_start };
        let wake = ready.since(engine.startup_began.max(waiter.arrived));
        let cold_start = Some(if engine.cold_start { ColdStart::Cold } else { ColdStart::Hot });
        Self { cold_start, queue, wake }
    }
}
