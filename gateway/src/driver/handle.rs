//! The gateway's interface to the driver.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use arc_swap::{ArcSwap, Guard};
use rouse::{
    driver::{DriverCore, TurnChain},
    engine::Engine,
    fault::{Fault, WaitDetails},
    fleet::{
        Fleet, Plan, RoutingChanges,
        event::{
            CanaryVerdict, Event, GatewayDemand, LearnedMeasurements, OperationId, OperatorAction, Waiter,
            WaiterId,
        },
        quote::WaitRange,
        report::{FleetView, Report},
    },
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};
use rouse_net::lease::{Lease, TickClock};
use rouse_platform::DriverClient;
use rouse_platform::Platform;
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
    waits::{QuotedWait, WaitBoard, WaitForecasts, WaitRenewal},
};
use crate::{metrics::Metrics, routing::RouteTable};

/// Parked requests beyond `queue.maxWaiting` that may be in transit to or from the driver.
///
/// This bounds memory and is no policy; the fleet refuses requests above the configured number.
pub(super) const MAX_IN_TRANSIT: usize = 4096;
/// Requests that may wait in the driver's channel: those of four turns. Further senders wait.
///
/// They are few: parked requests, which [`DriverState::parked`] bounds, and requests of operators, which the admin
/// listener's limit of connections bounds.
pub(super) const REQUEST_QUEUE_CAPACITY: usize = 1024;
/// How long a list of models waits for the driver. Without the driver, it shows older waits, or none.
const FORECAST_TIMEOUT: Duration = Duration::from_secs(1);
/// How long outcomes of orders are kept.
const OPERATION_RETENTION: Millis = Millis::secs(3600);

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

/// Reports the result of the first exchange after a start or wake.
///
/// A drop without a report counts as inconclusive: the client left, and the next request is tried.
pub struct CanaryGuard {
    shared: Arc<DriverState>,
    engine: EngineId,
    generation: Generation,
    reported: bool,
}

/// The fleet's state as of the driver's last turn, for readers that ask often.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveView {
    pub fleet: Arc<FleetView>,
    /// Whether this gateway leads, and so takes orders.
    pub leads: bool,
}

/// An operator's order and its outcome.
#[derive(Clone, Debug)]
pub struct OperationStatus {
    pub model: ModelName,
    pub order: OperatorAction,
    pub issued_at: Tick,
    /// `None` while it runs.
    pub outcome: Option<Result<(), String>>,
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
            chain: TurnChain::default(),
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

    /// The rest of the expected wait of requests for this model; `None` if it is unknown, or none waits.
    pub fn expected_wait(&self, model: &ModelName) -> Option<WaitRange> {
        self.0.waits.of(model, self.0.clock.now())
    }

    /// Forecasts the waits for all models. Causes no turn, and at most one reading in half a second.
    pub async fn expected_waits(&self) -> Arc<WaitForecasts> {
        let made = async {
            let made = self.inspect(|fleet, plan, _| fleet.expected_waits(plan));
            tokio::time::timeout(FORECAST_TIMEOUT, made).await.ok().flatten()
        };
        self.0.waits.all(self.0.clock.now(), made).await
    }

    /// Makes the driver take a turn, so that [`Self::view`] and [`Self::report`] are current.
    ///
    /// Returns at once when the driver has ended.
    pub async fn refresh(&self) {
        let (reply, done) = oneshot::channel();
        if self.0.requests.send(DriverRequest::Refresh(reply)).await.is_ok() {
            // On an error the driver ended meanwhile, and its final view is current.
            drop(done.await);
        }
    }

    /// Makes the driver take a turn. Returns at once when the driver has ended.
    async fn take_turn(&self) {
        let (reply, done) = oneshot::channel();
        if self.0.requests.send(DriverRequest::TakeTurn(reply)).await.is_ok() {
            // An error means that the driver ended meanwhile.
            drop(done.await);
        }
    }

    /// Returns the fleet's state as of the last [`Self::refresh`].
    pub fn view(&self) -> Arc<FleetView> {
        self.0.view.load_full()
    }

    /// Returns the reasons for the state as of the last [`Self::refresh`].
    pub fn report(&self) -> Arc<Report> {
        self.0.report.load_full()
    }

    /// Returns the learned values of every model, to be kept over restarts.
    pub async fn learned(&self) -> BTreeMap<ModelName, LearnedMeasurements> {
        self.inspect(|fleet, _, _| fleet.learned()).await.unwrap_or_else(|| {
            self.view().models.iter().map(|model| (model.name.clone(), model.learned)).collect()
        })
    }

    /// Sets every gauge of the fleet and its routes, as of the last turn; leases as of now.
    ///
    /// No gauge shows an expected wait, so none is computed for it.
    pub async fn update_gauges(&self) {
        let metrics = self.metrics();
        metrics.observe_fleet(&self.live_view_with(Fleet::report).await.fleet);
        for (model, route) in self.routes().models.iter() {
            if let Some(metrics) = metrics.configured_model(model) {
                metrics.set_ejected(route.ejected_count());
            }
        }
    }

    /// Returns the fleet's state as of the last turn, and leases as of now. Unlike [`Self::refresh`], causes no turn.
    pub async fn live_view(&self) -> LiveView {
        self.live_view_with(Fleet::report_with_waits).await
    }

    async fn live_view_with(&self, report: fn(&Fleet, &Plan) -> Report) -> LiveView {
        let view = self.inspect(move |fleet, plan, gates| {
            let (mut view, used) = (fleet.view(&report(fleet, plan)), gates.lease_usage());
            for model in &mut view.models {
                model.leases = used.get(&model.name).map_or(0, |(leases, _)| *leases);
            }
            LiveView { fleet: Arc::new(view), leads: fleet.leads() }
        });
        view.await.unwrap_or_else(|| LiveView { fleet: self.view(), leads: false })
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

    /// Returns an order's status; `None` when it is unknown or older than an hour.
    pub fn operation(&self, id: OperationId) -> Option<OperationStatus> {
        self.0.operations().get(&id).cloned()
    }

    /// Subscribes to the journal's future lines (JSON). Slow readers miss lines and do not delay the driver.
    pub fn journal(&self) -> broadcast::Receiver<Arc<str>> {
        self.0.journal.subscribe()
    }

    /// Submits an order. [`Self::operation`] has its outcome for an hour. `Err` names the invariant that forbids it.
    pub async fn submit_order(
        &self,
        model: ModelName,
        action: OperatorAction,
    ) -> Result<OperationId, String> {
        let shutting_down = || "the gateway is shutting down".to_owned();
        let (reply, answer) = oneshot::channel();
        self.0
            .requests
            .send(DriverRequest::SubmitOrder { model, order: action, reply })
            .await
            .map_err(|_| shutting_down())?;
        answer.await.unwrap_or_else(|_| Err(shutting_down()))
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
                (model_demand.in_flight, model_demand.last_request) =
                    (leases, model_demand.last_request.max(last_end));
            }
            demand.retain(|_, demand| *demand != GatewayDemand::default());
            demand
        });
        demand.await.unwrap_or_default()
    }
}

impl DriverState {
    fn operations(&self) -> std::sync::MutexGuard<'_, BTreeMap<OperationId, OperationStatus>> {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, model: ModelName, action: OperatorAction) -> OperationId {
        let id = OperationId(self.ids.fetch_add(1, Ordering::Relaxed));
        let given = self.clock.now();
        let mut operations = self.operations();
        operations.retain(|_, o| o.issued_at + OPERATION_RETENTION > given);
        operations.insert(id, OperationStatus { model, order: action, issued_at: given, outcome: None });
        id
    }

    pub(super) fn finish(&self, id: OperationId, outcome: Result<(), String>) {
        if let Err(error) = &outcome {
            tracing::warn!(operation = id.0, reason = error, "operator order failed");
        }
        if let Some(operation) = self.operations().get_mut(&id) {
            operation.outcome = Some(outcome);
        }
    }

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

    /// Replaces the view and report: for a refresh, and at the end.
    pub(super) fn publish_view(&self, fleet: &Fleet, plan: &Plan) {
        let report = fleet.report_with_waits(plan);
        self.view.store(Arc::new(fleet.view(&report)));
        self.report.store(Arc::new(report));
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

impl CanaryGuard {
    pub(super) fn new(shared: &Arc<DriverState>, engine: EngineId, generation: Generation) -> Self {
        Self { shared: Arc::clone(shared), engine, generation, reported: false }
    }

    /// Reports that the first byte of a response came, or why none did.
    pub fn report(mut self, verdict: CanaryVerdict) {
        self.send(verdict);
    }

    fn send(&mut self, verdict: CanaryVerdict) {
        if !std::mem::replace(&mut self.reported, true) {
            let event = Event::Canary { engine: self.engine.clone(), generation: self.generation, verdict };
            self.shared.reports.add_event(event);
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
