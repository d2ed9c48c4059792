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
    fault::{Fault, Wait},
    fleet::{
        Changes, Fleet, Plan,
        event::{Elsewhere, Event, Learned, OperationId, Order, Verdict, Waiter, WaiterId},
        report::{Report, View},
    },
    lease::{Clock, Lease},
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};
use tokio::sync::{broadcast, mpsc, oneshot};

use super::{Driver, Journal, Served, gates::Gates, publish, queue::Queue, record::Recorder};
use crate::{metrics::Metrics, platform::Platform, routes::Routes};

/// Parked requests beyond `queue.maxWaiting` that may be on their way to the driver or from it: a bound on memory, not
/// a policy; the fleet refuses what is above the configured number.
const IN_TRANSIT: usize = 4096;
/// Outcomes of orders are kept so long.
const OPERATIONS_KEPT: Millis = Millis::secs(3600);

/// Cheap to clone.
#[derive(Clone)]
pub struct Handle(Arc<Shared>);

pub(super) struct Shared {
    pub(super) clock: Clock,
    routes: ArcSwap<Routes>,
    view: ArcSwap<View>,
    report: ArcSwap<Report>,
    /// Unbounded by type, bounded by use: three messages for each parked request, which `parked` bounds, and one for
    /// each canary and order.
    asks: mpsc::UnboundedSender<Ask>,
    parked: AtomicUsize,
    most_parked: AtomicUsize,
    ids: AtomicU64,
    operations: Mutex<BTreeMap<OperationId, Operation>>,
    journal: broadcast::Sender<Arc<str>>,
    metrics: Arc<Metrics>,
    pub(super) served: Served,
}

/// Looks at the state, at the last plan and at the gates.
pub(super) type Reading = dyn FnOnce(&Fleet, &Plan, &Gates) + Send;

pub(super) enum Ask {
    Park {
        waiter: Waiter,
        reply: super::queue::Reply,
    },
    Leave(WaiterId),
    Order {
        model: ModelName,
        order: Order,
        reply: oneshot::Sender<Result<OperationId, String>>,
    },
    Event(Event),
    /// A turn is wanted, so that what is shown is of now.
    Look(oneshot::Sender<()>),
    /// What the last turn left is enough.
    Read(Box<Reading>),
}

/// A request that must wait.
pub struct Parking {
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
    pub only: Option<(EngineId, Generation)>,
}

/// The end of a wait: a lease, and where to go with it.
pub struct Granted {
    pub lease: Lease,
    pub engine: EngineId,
    pub generation: Generation,
    /// Of what it was started with: other than when the request began to wait, maybe.
    pub fingerprint: u64,
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
    shared: Arc<Shared>,
    engine: EngineId,
    generation: Generation,
    told: bool,
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

impl Handle {
    /// A driver over this platform, and the handle to it. `first` is told to the fleet before anything else; `events`
    /// is where the platform's own come from.
    pub fn new(
        platform: Arc<dyn Platform>,
        events: mpsc::Receiver<Event>,
        journal: Journal,
        metrics: Arc<Metrics>,
        clock: Clock,
    ) -> (Self, Driver) {
        let (asks, received) = mpsc::unbounded_channel();
        let shared = Arc::new(Shared {
            clock,
            routes: ArcSwap::default(),
            view: ArcSwap::default(),
            report: ArcSwap::default(),
            asks,
            parked: AtomicUsize::new(0),
            most_parked: AtomicUsize::new(IN_TRANSIT),
            ids: AtomicU64::new(1),
            operations: Mutex::default(),
            journal: journal.lines(),
            metrics: Arc::clone(&metrics),
            served: Served::default(),
        });
        let driver = Driver {
            fleet: Fleet::new(),
            gates: Gates::new(clock),
            platform,
            shared: Arc::clone(&shared),
            asks: received,
            events,
            queue: Queue::default(),
            journal,
            recorder: Recorder::new(metrics),
            plan: Plan::default(),
            looking: Vec::new(),
            held: None,
        };
        (Self(shared), driver)
    }

    pub fn routes(&self) -> Guard<Arc<Routes>> {
        self.0.routes.load()
    }

    pub fn clock(&self) -> Clock {
        self.0.clock
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.0.metrics
    }

    /// Where to count what a key's requests are served.
    pub fn served(&self) -> &Served {
        &self.0.served
    }

    /// Waits for a lease until the deadline. Dropping the future leaves the queue.
    pub async fn park(&self, parking: Parking) -> Result<Granted, Fault> {
        let place = Place::new(&self.0)?;
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
            only: parking.only,
        };
        self.0.asks.send(Ask::Park { waiter, reply }).map_err(|_| Fault::ShuttingDown)?;
        answer.await.unwrap_or(Err(Fault::ShuttingDown))
    }

    /// Lets the driver take a turn, so that [`Self::view`] and [`Self::report`] show the present. Returns at once when
    /// the driver has ended.
    pub async fn refresh(&self) {
        let (reply, done) = oneshot::channel();
        if self.0.asks.send(Ask::Look(reply)).is_ok() {
            // An error is a driver that ended in between: what it left is the present.
            drop(done.await);
        }
    }

    /// The state of the fleet, as of the last [`Self::refresh`].
    pub fn view(&self) -> Arc<View> {
        self.0.view.load_full()
    }

    /// Why it is so, as of the last [`Self::refresh`].
    pub fn report(&self) -> Arc<Report> {
        self.0.report.load_full()
    }

    /// What was learned of every model, to be kept over restarts.
    pub async fn learned(&self) -> BTreeMap<ModelName, Learned> {
        self.read(|fleet, _, _| fleet.learned()).await.unwrap_or_else(|| {
            self.view().models.iter().map(|model| (model.name.clone(), model.learned)).collect()
        })
    }

    /// Sets every gauge that follows from the state of the fleet and of its routes, as of the last turn; leases as of now.
    pub async fn measure(&self) {
        let view = self.read(|fleet, plan, gates| {
            let (mut view, used) = (fleet.view(&fleet.report(plan)), gates.used());
            for model in &mut view.models {
                model.leases = used.get(&model.name).map_or(0, |(leases, _)| *leases);
            }
            Arc::new(view)
        });
        let view = view.await;
        let metrics = self.metrics();
        metrics.observe_view(&view.unwrap_or_else(|| self.view()));
        for (model, route) in &self.routes().models {
            if let Some(metrics) = metrics.known(model) {
                metrics.left_out(route.left_out());
            }
        }
    }

    /// What is read of the state and of the last plan, without a turn; `None` when the driver has ended.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Fleet, &Plan, &Gates) -> T + Send + 'static,
    ) -> Option<T> {
        let (reply, answer) = oneshot::channel();
        let read = move |fleet: &Fleet, plan: &Plan, gates: &Gates| {
            drop(reply.send(read(fleet, plan, gates)));
        };
        self.0.asks.send(Ask::Read(Box::new(read))).ok()?;
        answer.await.ok()
    }

    /// What this gateway's requests want of each model: those that wait as of the last turn, those at an engine as of now.
    pub async fn demand(&self) -> BTreeMap<ModelName, Elsewhere> {
        let demand = self.read(|fleet, _, gates| {
            let mut demand = fleet.demand();
            let used = gates
                .used()
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
    pub fn operation(&self, id: OperationId) -> Option<Operation> {
        self.0.operations().get(&id).cloned()
    }

    /// The journal from now on, line by line (JSON). Slow readers miss lines rather than hold up the driver.
    pub fn journal(&self) -> broadcast::Receiver<Arc<str>> {
        self.0.journal.subscribe()
    }

    /// Gives an order; its outcome is found under the returned id for an hour. `Err`: why an invariant forbids it.
    pub async fn order(&self, model: ModelName, order: Order) -> Result<OperationId, String> {
        let gone = || "the gateway is shutting down".to_owned();
        let (reply, answer) = oneshot::channel();
        self.0.asks.send(Ask::Order { model, order, reply }).map_err(|_| gone())?;
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Tells the driver something that no platform observes: a configuration, a shutdown. Lost when it has ended.
    pub fn tell(&self, event: Event) {
        drop(self.0.asks.send(Ask::Event(event)));
    }
}

impl Shared {
    fn operations(&self) -> std::sync::MutexGuard<'_, BTreeMap<OperationId, Operation>> {
        self.operations.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn begin(&self, model: ModelName, order: Order) -> OperationId {
        let id = OperationId(self.ids.fetch_add(1, Ordering::Relaxed));
        let given = self.clock.now();
        let mut operations = self.operations();
        operations.retain(|_, o| o.given + OPERATIONS_KEPT > given);
        operations.insert(id, Operation { model, order, given, outcome: None });
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
    pub(super) fn publish(&self, fleet: &Fleet, changes: &Changes, gates: &Gates) {
        self.most_parked.store(fleet.max_waiting() + IN_TRANSIT, Ordering::Relaxed);
        if let Some(routes) = publish::routes(&self.routes.load(), fleet, changes, gates) {
            self.routes.store(Arc::new(routes));
        }
    }

    /// No change was missed: whoever looked everywhere would find the same.
    pub(super) fn is_current(&self, fleet: &Fleet, gates: &Gates) -> bool {
        let everything = Changes { configured: true, ..Changes::default() };
        publish::routes(&self.routes.load(), fleet, &everything, gates).is_none()
    }

    /// Swaps what people read: for those who look, and at the end.
    pub(super) fn show(&self, fleet: &Fleet, plan: &Plan) {
        let report = fleet.report(plan);
        self.view.store(Arc::new(fleet.view(&report)));
        self.report.store(Arc::new(report));
    }
}

/// A place in the queue, left when dropped.
struct Place<'a> {
    shared: &'a Shared,
    id: WaiterId,
}

impl<'a> Place<'a> {
    fn new(shared: &'a Shared) -> Result<Self, Fault> {
        if shared.parked.fetch_add(1, Ordering::Relaxed) >= shared.most_parked.load(Ordering::Relaxed) {
            shared.parked.fetch_sub(1, Ordering::Relaxed);
            let message = "too many requests wait (queue.maxWaiting)".to_owned();
            return Err(Fault::QueueFull { message, wait: Wait::default() });
        }
        let id = WaiterId(shared.ids.fetch_add(1, Ordering::Relaxed));
        Ok(Self { shared, id })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.shared.parked.fetch_sub(1, Ordering::Relaxed);
        // After a grant or a refusal the driver no longer knows the waiter, and ignores this.
        drop(self.shared.asks.send(Ask::Leave(self.id)));
    }
}

impl Canary {
    pub(super) fn new(shared: &Arc<Shared>, engine: EngineId, generation: Generation) -> Self {
        Self { shared: Arc::clone(shared), engine, generation, told: false }
    }

    /// The first byte of an answer came, or why none did.
    pub fn tell(mut self, verdict: Verdict) {
        self.send(verdict);
    }

    fn send(&mut self, verdict: Verdict) {
        if !std::mem::replace(&mut self.told, true) {
            let event = Event::Canary { engine: self.engine.clone(), generation: self.generation, verdict };
            drop(self.shared.asks.send(Ask::Event(event)));
        }
    }
}

impl Drop for Canary {
    fn drop(&mut self) {
        self.send(Verdict::Inconclusive);
    }
}

impl Waited {
    pub(super) fn of(waiter: &Waiter, engine: &Engine, canary: bool, now: Tick) -> Self {
        let queue = now.since(waiter.arrived);
        // It became awake while this one waited, or this one is what proves it.
        if !canary && engine.turn < waiter.arrived {
            return Self { cold_start: None, queue, wake: Millis::ZERO };
        }
        let ready = if canary { now } else { engine.turn };
        let wake = ready.since(engine.began.max(waiter.arrived));
        let cold_start = Some(if engine.cold { ColdStart::Cold } else { ColdStart::Hot });
        Self { cold_start, queue, wake }
    }
}
