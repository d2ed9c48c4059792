//! The gateway's interface to the driver: its handle, the state that both share, and the requests that it receives.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use arc_swap::{ArcSwap, Guard};
use rouse::{
    driver::DriverCore,
    fleet::{
        Fleet, Plan, RoutingChanges,
        event::{Event, GatewayDemand, OperationId, OperatorAction, Waiter},
        report::{FleetView, Report},
    },
    model::ModelName,
    units::Tick,
};
use rouse_net::lease::TickClock;
use rouse_platform::{DriverClient, Platform};
use tokio::sync::{broadcast, mpsc, oneshot};

use super::{
    Driver, Journal, ServedTokens,
    gates::EngineGates,
    parked_replies::ParkedReplies,
    platform::GatewayPlatform,
    reports::DriverReports,
    route_updates,
    timeline::Timeline,
    transition_log::TransitionRecorder,
    waits::{QuotedWait, WaitBoard, WaitRenewal},
};
use crate::{metrics::Metrics, routing::RouteTable};

mod canary_guard;
mod operations;
mod park;
mod views;

pub use canary_guard::CanaryGuard;
pub use operations::OperationStatus;
pub use park::{ColdStart, GrantedLease, ParkRequest, WaitBreakdown};
pub use views::LiveView;

/// Parked requests beyond `queue.maxWaiting` that may be in transit to or from the driver.
///
/// This bounds memory and is no policy; the fleet refuses requests above the configured number.
pub(super) const MAX_IN_TRANSIT: usize = 4096;
/// Requests that may wait in the driver's channel: those of four turns. Further senders wait.
///
/// They are few: parked requests, which [`DriverState::parked`] bounds, and requests of operators, which the admin
/// listener's limit of connections bounds.
pub(super) const REQUEST_QUEUE_CAPACITY: usize = 1024;

/// Handle to the driver. Cheap to clone.
#[derive(Clone)]
pub struct DriverHandle(Arc<DriverState>);

pub(super) struct DriverState {
    pub(super) clock: TickClock,
    routes: ArcSwap<RouteTable>,
    view: ArcSwap<FleetView>,
    report: ArcSwap<Report>,
    requests: mpsc::Sender<DriverRequest>,
    pub(super) reports: DriverReports,
    /// Places in the queue: those of parked requests, and of requests that have left, until the driver knows.
    parked: AtomicUsize,
    max_parked: AtomicUsize,
    ids: AtomicU64,
    operations: Mutex<BTreeMap<OperationId, OperationStatus>>,
    journal: broadcast::Sender<Arc<str>>,
    metrics: Arc<Metrics>,
    pub(super) served_tokens: ServedTokens,
    timeline: Arc<Timeline>,
    /// The driver's turns so far.
    turns: AtomicU64,
    pub(super) waits: WaitBoard,
}

/// Reads the state, the last plan and the gates.
pub(super) type DriverInspection = dyn FnOnce(&Fleet, &Plan, &EngineGates) + Send;

pub(super) enum DriverRequest {
    Park {
        waiter: Waiter,
        reply: super::parked_replies::ParkedReply,
        quoted: QuotedWait,
    },
    SubmitOrder {
        model: ModelName,
        order: OperatorAction,
        reply: oneshot::Sender<Result<OperationId, String>>,
    },
    /// Takes a turn, so that views are current.
    Refresh(oneshot::Sender<()>),
    /// Takes a turn, and composes no view.
    TakeTurn(oneshot::Sender<()>),
    /// Reads the state that the last turn left.
    Inspect(Box<DriverInspection>),
}

impl DriverHandle {
    /// Creates a driver over this platform, and the handle to it. `events` receives the platform's events.
    pub fn new(
        platform: Arc<dyn Platform>,
        events: mpsc::Receiver<Event>,
        journal: Journal,
        metrics: Arc<Metrics>,
        clock: TickClock,
    ) -> (Self, Driver) {
        let (asks, received) = mpsc::channel(REQUEST_QUEUE_CAPACITY);
        let shared = Arc::new(DriverState {
            clock,
            routes: ArcSwap::default(),
            view: ArcSwap::default(),
            report: ArcSwap::default(),
            requests: asks,
            reports: DriverReports::default(),
            parked: AtomicUsize::new(0),
            max_parked: AtomicUsize::new(MAX_IN_TRANSIT),
            ids: AtomicU64::new(1),
            operations: Mutex::default(),
            journal: journal.lines(),
            metrics: Arc::clone(&metrics),
            served_tokens: ServedTokens::default(),
            timeline: Arc::default(),
            turns: AtomicU64::new(0),
            waits: WaitBoard::default(),
        });
        let platform = GatewayPlatform {
            engines: platform,
            shared: Arc::clone(&shared),
            gates: EngineGates::new(clock),
            parked: ParkedReplies::default(),
            journal,
            recorder: TransitionRecorder::new(metrics, Arc::clone(&shared.timeline)),
            wait_renewal: WaitRenewal::default(),
            unquoted: Vec::new(),
        };
        let driver = Driver {
            core: DriverCore::new(),
            platform,
            shared: Arc::clone(&shared),
            requests: received,
            events,
            refresh_waiters: Vec::new(),
            turn_waiters: Vec::new(),
            deferred_order: None,
        };
        (Self(shared), driver)
    }

    pub fn routes(&self) -> Guard<Arc<RouteTable>> {
        self.0.routes.load()
    }

    pub fn clock(&self) -> TickClock {
        self.0.clock
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.0.metrics
    }

    /// Returns the counters of tokens served to each key.
    pub fn served_tokens(&self) -> &ServedTokens {
        &self.0.served_tokens
    }

    /// Makes the driver take a turn. Returns at once when the driver has ended.
    async fn take_turn(&self) {
        let (reply, done) = oneshot::channel();
        if self.0.requests.send(DriverRequest::TakeTurn(reply)).await.is_ok() {
            // An error means that the driver ended meanwhile.
            drop(done.await);
        }
    }

    /// The number of turns that the driver has taken. Without a new one, only leases have changed.
    pub fn turns(&self) -> u64 {
        self.0.turns.load(Ordering::Relaxed)
    }

    /// Returns the latest transitions of engines, with their cause and cost.
    pub fn timeline(&self) -> &Arc<Timeline> {
        &self.0.timeline
    }

    /// Reads the state and the last plan without a turn; `None` when the driver has ended.
    async fn inspect<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Fleet, &Plan, &EngineGates) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let read = move |fleet: &Fleet, plan: &Plan, gates: &EngineGates| {
            drop(reply.send(read(fleet, plan, gates)));
        };
        self.0.requests.send(DriverRequest::Inspect(Box::new(read))).await.ok()?;
        answer.await.ok()
    }

    /// Subscribes to the journal's future lines (JSON). Slow readers miss lines and do not delay the driver.
    pub fn journal(&self) -> broadcast::Receiver<Arc<str>> {
        self.0.journal.subscribe()
    }

    /// Sends an event that no platform observes, such as a configuration or a shutdown. Lost if the driver has ended.
    ///
    /// Never waits. Until the driver takes it, a later event on the same subject replaces it.
    pub fn send_event(&self, event: Event) {
        self.0.reports.add_event(event);
    }
}

impl DriverClient for DriverHandle {
    fn send_event(&self, event: Event) {
        Self::send_event(self, event);
    }

    fn clock(&self) -> TickClock {
        Self::clock(self)
    }

    async fn read_fleet<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Fleet, &Plan) -> T + Send + 'static,
    ) -> Option<T> {
        // Without a turn in between, events that were sent before may still wait for theirs.
        self.take_turn().await;
        self.inspect(move |fleet, plan, _| read(fleet, plan)).await
    }

    async fn demand(&self, models: Option<BTreeSet<ModelName>>) -> BTreeMap<ModelName, GatewayDemand> {
        let demand = self.inspect(move |fleet, _, gates| {
            let (mut demand, usage) = match models {
                None => (fleet.demand(), gates.lease_usage()),
                Some(models) => (
                    models.iter().map(|model| (model.clone(), fleet.demand_of(model))).collect(),
                    models.iter().map(|model| (model.clone(), gates.lease_usage_of(model))).collect(),
                ),
            };
            let used = usage
                .into_iter()
                .filter(|(model, used)| *used != <(u32, Tick)>::default() && fleet.spec(model).is_some());
            for (model, (leases, last_end)) in used {
                let model_demand = demand.entry(model).or_default();
                (model_demand.in_flight, model_demand.last_request) = (leases, last_end);
            }
            demand.retain(|_, demand| *demand != GatewayDemand::default());
            demand
        });
        demand.await.unwrap_or_default()
    }
}

impl DriverState {
    /// Counts one more turn, so that readers know that something may have changed.
    pub(super) fn count_turn(&self) {
        self.turns.fetch_add(1, Ordering::Relaxed);
    }

    /// Releases places in the queue.
    pub(super) fn release_positions(&self, count: usize) {
        self.parked.fetch_sub(count, Ordering::Relaxed);
    }

    /// Replaces what requests read, if it changed.
    pub(super) fn publish(&self, fleet: &Fleet, changes: &RoutingChanges, gates: &EngineGates) {
        self.max_parked.store(fleet.max_waiting() + MAX_IN_TRANSIT, Ordering::Relaxed);
        if let Some(routes) = route_updates::updated_routes(&self.routes.load(), fleet, changes, gates) {
            self.routes.store(Arc::new(routes));
        }
    }

    /// Returns whether a check of everything would find no missed change.
    pub(super) fn is_current(&self, fleet: &Fleet, gates: &EngineGates) -> bool {
        let everything = RoutingChanges { reconfigured: true, ..RoutingChanges::default() };
        route_updates::updated_routes(&self.routes.load(), fleet, &everything, gates).is_none()
    }
}
