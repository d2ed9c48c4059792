//! What the rest of the gateway may do with the driver, and what it reads of it.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use arc_swap::{ArcSwap, Guard};
use rouse::{
    engine::Engine,
    fault::{Fault, WaitDetails},
    fleet::{
        Fleet, Plan, RoutingChanges,
        event::{
            CanaryVerdict, Event, GatewayDemand, LearnedMeasurements, OperationId, OperatorAction, Waiter,
            WaiterId,
        },
        report::{FleetView, Report},
    },
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};
use rouse_net::lease::{Lease, TickClock};
use tokio::sync::{broadcast, mpsc, oneshot};

use super::{
    Driver, Journal, ServedTokens, gates::EngineGates, parked_replies::ParkedReplies, route_updates,
    transition_log::TransitionRecorder,
};
use crate::{metrics::Metrics, platform::Platform, routing::RouteTable};

/// Parked requests beyond `queue.maxWaiting` that may be on their way to the driver or from it: a bound on memory, not
/// a policy; the fleet refuses what is above the configured number.
const MAX_IN_TRANSIT: usize = 4096;
/// Outcomes of orders are kept so long.
const OPERATION_RETENTION: Millis = Millis::secs(3600);

/// Cheap to clone.
#[derive(Clone)]
pub struct DriverHandle(Arc<DriverState>);

pub(super) struct DriverState {
    pub(super) clock: TickClock,
    routes: ArcSwap<RouteTable>,
    view: ArcSwap<FleetView>,
    report: ArcSwap<Report>,
    /// Unbounded by type, bounded by use: three messages for each parked request, which `parked` bounds, and one for
    /// each canary and order.
    requests: mpsc::UnboundedSender<DriverRequest>,
    parked: AtomicUsize,
    max_parked: AtomicUsize,
    ids: AtomicU64,
    operations: Mutex<BTreeMap<OperationId, OperationStatus>>,
    journal: broadcast::Sender<Arc<str>>,
    metrics: Arc<Metrics>,
    pub(super) served_tokens: ServedTokens,
}

/// Looks at the state, at the last plan and at the gates.
pub(super) type DriverInspection = dyn FnOnce(&Fleet, &Plan, &EngineGates) + Send;

pub(super) enum DriverRequest {
    Park {
        waiter: Waiter,
        reply: super::parked_replies::ParkedReply,
    },
    CancelPark(WaiterId),
    SubmitOrder {
        model: ModelName,
        order: OperatorAction,
        reply: oneshot::Sender<Result<OperationId, String>>,
    },
    Event(Event),
    /// A turn is wanted, so that what is shown is of now.
    Refresh(oneshot::Sender<()>),
    /// What the last turn left is enough.
    Inspect(Box<DriverInspection>),
}

/// A request that must wait.
pub struct ParkRequest {
    pub model: ModelName,
    pub band: i32,
    pub key: String,
    /// The client, as [`Waiter::client`] has it.
    pub client: u64,
    /// When it first arrived (a replayed canary keeps its place).
    pub arrived: Tick,
    pub deadline: Tick,
    /// An SSE stream: can be the canary.
    pub stream: bool,
    /// The one life of an engine that can answer it, as long as that serves.
    pub required_engine: Option<(EngineId, Generation)>,
}

/// The end of a wait: a lease, and where to go with it.
pub struct GrantedLease {
    pub lease: Lease,
    pub engine: EngineId,
    pub generation: Generation,
    /// Of what it was started with: other than when the request began to wait, maybe.
    pub fingerprint: u64,
    pub address: SocketAddr,
    /// Present when this request is the engine's first: its outcome is wanted.
    pub canary: Option<CanaryGuard>,
    pub wait: WaitBreakdown,
}

/// What the wait was made of, for `x-rouse-cold_start-start` and `server-timing`.
#[derive(Clone, Copy, Debug)]
pub struct WaitBreakdown {
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
pub struct CanaryGuard {
    shared: Arc<DriverState>,
    engine: EngineId,
    generation: Generation,
    reported: bool,
}

/// An operator's order and what became of it.
#[derive(Clone, Debug)]
pub struct OperationStatus {
    pub model: ModelName,
    pub order: OperatorAction,
    pub issued_at: Tick,
    /// `None`: still running.
    pub outcome: Option<Result<(), String>>,
}

impl DriverHandle {
    /// A driver over this platform, and the handle to it. `first` is told to the fleet before anything else; `events`
    /// is where the platform's own come from.
    pub fn new(
        platform: Arc<dyn Platform>,
        events: mpsc::Receiver<Event>,
        journal: Journal,
        metrics: Arc<Metrics>,
        clock: TickClock,
    ) -> (Self, Driver) {
        let (asks, received) = mpsc::unbounded_channel();
        let shared = Arc::new(DriverState {
            clock,
            routes: ArcSwap::default(),
            view: ArcSwap::default(),
            report: ArcSwap::default(),
            requests: asks,
            parked: AtomicUsize::new(0),
            max_parked: AtomicUsize::new(MAX_IN_TRANSIT),
            ids: AtomicU64::new(1),
            operations: Mutex::default(),
            journal: journal.lines(),
            metrics: Arc::clone(&metrics),
            served_tokens: ServedTokens::default(),
        });
        let driver = Driver {
            fleet: Fleet::new(),
            gates: EngineGates::new(clock),
            platform,
            shared: Arc::clone(&shared),
            requests: received,
            events,
            queue: ParkedReplies::default(),
            journal,
            recorder: TransitionRecorder::new(metrics),
            plan: Plan::default(),
            refresh_waiters: Vec::new(),
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

    /// Where to count what a key's requests are served.
    pub fn served_tokens(&self) -> &ServedTokens {
        &self.0.served_tokens
    }

    /// Waits for a lease until the deadline. Dropping the future leaves the queue.
    pub async fn park(&self, parking: ParkRequest) -> Result<GrantedLease, Fault> {
        let place = QueuePositionGuard::new(&self.0)?;
        let (reply, answer) = oneshot::channel();
        let waiter = Waiter {
            id: place.id,
            model: parking.model,
            band: parking.band,
            key: parking.key,
            client: parking.client,
            arrived: parking.arrived,
            deadline: parking.deadline,
            stream: parking.stream,
            required_engine: parking.required_engine,
        };
        self.0.requests.send(DriverRequest::Park { waiter, reply }).map_err(|_| Fault::ShuttingDown)?;
        answer.await.unwrap_or(Err(Fault::ShuttingDown))
    }

    /// Lets the driver take a turn, so that [`Self::view`] and [`Self::report`] show the present. Returns at once when
    /// the driver has ended.
    pub async fn refresh(&self) {
        let (reply, done) = oneshot::channel();
        if self.0.requests.send(DriverRequest::Refresh(reply)).is_ok() {
            // An error is a driver that ended in between: what it left is the present.
            drop(done.await);
        }
    }

    /// The state of the fleet, as of the last [`Self::refresh`].
    pub fn view(&self) -> Arc<FleetView> {
        self.0.view.load_full()
    }

    /// Why it is so, as of the last [`Self::refresh`].
    pub fn report(&self) -> Arc<Report> {
        self.0.report.load_full()
    }

    /// What was learned of every model, to be kept over restarts.
    pub async fn learned(&self) -> BTreeMap<ModelName, LearnedMeasurements> {
        self.inspect(|fleet, _, _| fleet.learned()).await.unwrap_or_else(|| {
            self.view().models.iter().map(|model| (model.name.clone(), model.learned)).collect()
        })
    }

    /// Sets every gauge that follows from the state of the fleet and of its routes, as of the last turn; leases as of now.
    pub async fn update_gauges(&self) {
        let view = self.inspect(|fleet, plan, gates| {
            let (mut view, used) = (fleet.view(&fleet.report(plan)), gates.lease_usage());
            for model in &mut view.models {
                model.leases = used.get(&model.name).map_or(0, |(leases, _)| *leases);
            }
            Arc::new(view)
        });
        let view = view.await;
        let metrics = self.metrics();
        metrics.observe_fleet(&view.unwrap_or_else(|| self.view()));
        for (model, route) in &self.routes().models {
            if let Some(metrics) = metrics.configured_model(model) {
                metrics.set_ejected(route.ejected_count());
            }
        }
    }

    /// What is read of the state and of the last plan, without a turn; `None` when the driver has ended.
    async fn inspect<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Fleet, &Plan, &EngineGates) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let read = move |fleet: &Fleet, plan: &Plan, gates: &EngineGates| {
            drop(reply.send(read(fleet, plan, gates)));
        };
        self.0.requests.send(DriverRequest::Inspect(Box::new(read))).ok()?;
        answer.await.ok()
    }

    /// What this gateway's requests want of each model: those that wait as of the last turn, those at an engine as of now.
    pub async fn demand(&self) -> BTreeMap<ModelName, GatewayDemand> {
        let demand = self.inspect(|fleet, _, gates| {
            let mut demand = fleet.demand();
            let used = gates
                .lease_usage()
                .into_iter()
                .filter(|(model, used)| *used != <(u32, Tick)>::default() && fleet.spec(model).is_some());
            for (model, (leases, last_end)) in used {
                let own = demand.entry(model).or_default();
                (own.in_flight, own.last_request) = (leases, own.last_request.max(last_end));
            }
            demand
        });
        demand.await.unwrap_or_default()
    }

    /// How an order went; `None` when unknown or older than an hour.
    pub fn operation(&self, id: OperationId) -> Option<OperationStatus> {
        self.0.operations().get(&id).cloned()
    }

    /// The journal from now on, line by line (JSON). Slow readers miss lines rather than hold up the driver.
    pub fn journal(&self) -> broadcast::Receiver<Arc<str>> {
        self.0.journal.subscribe()
    }

    /// Gives an order; its outcome is found under the returned id for an hour. `Err`: why an invariant forbids it.
    pub async fn submit_order(&self, model: ModelName, order: OperatorAction) -> Result<OperationId, String> {
        let gone = || "the gateway is shutting down".to_owned();
        let (reply, answer) = oneshot::channel();
        self.0.requests.send(DriverRequest::SubmitOrder { model, order, reply }).map_err(|_| gone())?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Tells the driver something that no platform observes: a configuration, a shutdown. Lost when it has ended.
    pub fn send_event(&self, event: Event) {
        drop(self.0.requests.send(DriverRequest::Event(event)));
    }
}

impl DriverState {
    fn operations(&self) -> std::sync::MutexGuard<'_, BTreeMap<OperationId, OperationStatus>> {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, model: ModelName, order: OperatorAction) -> OperationId {
        let id = OperationId(self.ids.fetch_add(1, Ordering::Relaxed));
        let given = self.clock.now();
        let mut operations = self.operations();
        operations.retain(|_, o| o.issued_at + OPERATION_RETENTION > given);
        operations.insert(id, OperationStatus { model, order, issued_at: given, outcome: None });
        id
    }

    pub(super) fn finish(&self, id: OperationId, outcome: Result<(), String>) {
        if let Err(why) = &outcome {
            tracing::warn!(operation = id.0, why, "an operator's order failed");
        }
        if let Some(operation) = self.operations().get_mut(&id) {
            operation.outcome = Some(outcome);
        }
    }

    /// Swaps what requests read, when it differs.
    pub(super) fn publish(&self, fleet: &Fleet, changes: &RoutingChanges, gates: &EngineGates) {
        self.max_parked.store(fleet.max_waiting() + MAX_IN_TRANSIT, Ordering::Relaxed);
        if let Some(routes) = route_updates::updated_routes(&self.routes.load(), fleet, changes, gates) {
            self.routes.store(Arc::new(routes));
        }
    }

    /// No change was missed: whoever looked everywhere would find the same.
    pub(super) fn is_current(&self, fleet: &Fleet, gates: &EngineGates) -> bool {
        let everything = RoutingChanges { reconfigured: true, ..RoutingChanges::default() };
        route_updates::updated_routes(&self.routes.load(), fleet, &everything, gates).is_none()
    }

    /// Swaps what people read: for those who look, and at the end.
    pub(super) fn publish_view(&self, fleet: &Fleet, plan: &Plan) {
        let report = fleet.report(plan);
        self.view.store(Arc::new(fleet.view(&report)));
        self.report.store(Arc::new(report));
    }
}

/// A place in the queue, left when dropped.
struct QueuePositionGuard<'a> {
    shared: &'a DriverState,
    id: WaiterId,
}

impl<'a> QueuePositionGuard<'a> {
    fn new(shared: &'a DriverState) -> Result<Self, Fault> {
        if shared.parked.fetch_add(1, Ordering::Relaxed) >= shared.max_parked.load(Ordering::Relaxed) {
            shared.parked.fetch_sub(1, Ordering::Relaxed);
            let message = "too many requests wait (queue.maxWaiting)".to_owned();
            return Err(Fault::QueueFull { message, wait: WaitDetails::default() });
        }
        let id = WaiterId(shared.ids.fetch_add(1, Ordering::Relaxed));
        Ok(Self { shared, id })
    }
}

impl Drop for QueuePositionGuard<'_> {
    fn drop(&mut self) {
        self.shared.parked.fetch_sub(1, Ordering::Relaxed);
        // After a grant or a refusal the driver no longer knows the waiter, and ignores this.
        drop(self.shared.requests.send(DriverRequest::CancelPark(self.id)));
    }
}

impl CanaryGuard {
    pub(super) fn new(shared: &Arc<DriverState>, engine: EngineId, generation: Generation) -> Self {
        Self { shared: Arc::clone(shared), engine, generation, reported: false }
    }

    /// The first byte of an answer came, or why none did.
    pub fn report(mut self, verdict: CanaryVerdict) {
        self.send(verdict);
    }

    fn send(&mut self, verdict: CanaryVerdict) {
        if !std::mem::replace(&mut self.reported, true) {
            let event = Event::Canary { engine: self.engine.clone(), generation: self.generation, verdict };
            drop(self.shared.requests.send(DriverRequest::Event(event)));
        }
    }
}

impl Drop for CanaryGuard {
    fn drop(&mut self) {
        self.send(CanaryVerdict::Inconclusive);
    }
}

impl WaitBreakdown {
    pub(super) fn of(waiter: &Waiter, engine: &Engine, canary: bool, now: Tick) -> Self {
        let queue = now.since(waiter.arrived);
        // It became awake while this one waited, or this one is what proves it.
        if !canary && engine.turn_start < waiter.arrived {
            return Self { cold_start: None, queue, wake: Millis::ZERO };
        }
        let ready = if canary { now } else { engine.turn_start };
        let wake = ready.since(engine.startup_began.max(waiter.arrived));
        let cold_start = Some(if engine.cold_start { ColdStart::Cold } else { ColdStart::Hot });
        Self { cold_start, queue, wake }
    }
}
