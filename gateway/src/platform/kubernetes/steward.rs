//! Who keeps the lives of a cluster's engines: the one task that knows which Pod is whose.
//!
//! Pods of a Deployment have names that nobody chose, so which engine runs in which is decided here, by one task, and
//! written to the Pod before anything is done with it. Commands, what is seen of Pods, and what lives ask for come on three
//! channels to this task alone; whatever takes time is done by others (`life`, `crew`, `clerk`).
//!
//! All of it exists only while this gateway leads. When it gets the lease it takes over what it finds (`takeover`); when it
//! loses it, lives, crews and clerks are dropped as they are.

mod housing;
mod starts;
mod strays;
mod words;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    fault::Cause,
    fleet::{
        command::Command,
        event::{Event, Verdict},
    },
    model::{EngineId, Level},
    units::{Bytes, Generation},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
    time,
};

use super::{
    Place, Shared,
    clerk::{self, Entry},
    crew::Desired,
    life::{Order, Pauses},
    takeover::{self, Booked},
};
use crate::controllers::{
    booking::Keeps,
    crd::ledger::ObjectName,
    election::Claim,
    pods::{self, Seen},
    published::Published,
    watch::{self as watches, Change},
};

/// So often the Pods of a namespace are asked for, and so long it may take.
const LOOKS: u32 = 10;
const LIST: Duration = Duration::from_secs(10);
/// Bits of a generation below those of its leader's epoch: so many lives can one engine have under one leader.
const LIVES: u32 = 16;

/// What a life or a crew wants of the steward.
#[derive(Debug)]
pub(super) enum Request {
    /// The Pod that it was given is its own from now on: when that goes, it gets no other.
    Bound { engine: EngineId, generation: Generation },
    /// No Pod is to be kept for it; `done`, once that is written and no Pod is left that could be its own and is not.
    Leave { engine: EngineId, generation: Generation, done: oneshot::Sender<()> },
    /// It is over.
    Over { engine: EngineId, generation: Generation },
    /// The API server does not take this Deployment.
    Refused { deployment: ObjectName, why: String },
    /// A Deployment was written.
    Applied,
    /// It is known for the first time where models run.
    Placed,
    /// Something for the ledger of this pool.
    Enter { pool: String, entry: Entry },
}

/// Where the steward hears from.
pub(super) struct Inputs {
    pub(super) commands: mpsc::UnboundedReceiver<Command>,
    pub(super) pods: mpsc::Receiver<Change<Pod>>,
    pub(super) requests: mpsc::UnboundedReceiver<Request>,
    pub(super) published: mpsc::UnboundedReceiver<Published>,
    pub(super) claim: watch::Receiver<Option<Claim>>,
}

pub(super) struct Steward {
    pub(super) shared: Arc<Shared>,
    pub(super) lives: BTreeMap<EngineId, Life>,
    pub(super) pods: BTreeMap<ObjectName, Arc<Seen>>,
    pub(super) crews: BTreeMap<ObjectName, Crew>,
    clerks: BTreeMap<String, mpsc::UnboundedSender<Entry>>,
    /// Deployments whose numbers are to be written once everything is taken over.
    pending: BTreeMap<ObjectName, Arc<Place>>,
    /// Where engines that are not launched yet have something booked.
    booked: BTreeMap<EngineId, Arc<Place>>,
    pub(super) tasks: JoinSet<()>,
    requests: mpsc::UnboundedSender<Request>,
    /// Its place in the cluster was taken over: commands are carried out.
    leading: bool,
    /// Pods that were nobody's and were given up, by their uids.
    sent_away: BTreeSet<String>,
    /// What is booked for models that are not served, until their Pods are gone.
    pub(super) orphans: Vec<Booked>,
    /// What statuses say.
    pub(super) published: BTreeMap<ObjectName, Published>,
    /// Namespaces whose Pods were listed.
    listed: BTreeSet<Option<String>>,
}

/// One life, as the steward knows it.
pub(super) struct Life {
    generation: Generation,
    /// `None` of a backend.
    place: Option<Arc<Place>>,
    deployment: ObjectName,
    orders: mpsc::UnboundedSender<Order>,
    pod: Option<ObjectName>,
    shown: watch::Sender<Option<Arc<Seen>>>,
    bound: bool,
    leaving: Leaving,
}

/// From which version of its Deployment no Pod is kept for it, and who waits for that.
type Leaving = Option<(u64, Option<oneshot::Sender<()>>)>;

/// One Deployment.
pub(super) struct Crew {
    /// Its Pods' labels.
    model: String,
    template: String,
    desired: watch::Sender<Desired>,
    applied: watch::Receiver<u64>,
}

impl Steward {
    pub(super) fn new(shared: Arc<Shared>, requests: mpsc::UnboundedSender<Request>) -> Self {
        Self {
            shared,
            lives: BTreeMap::new(),
            pods: BTreeMap::new(),
            crews: BTreeMap::new(),
            clerks: BTreeMap::new(),
            pending: BTreeMap::new(),
            booked: BTreeMap::new(),
            tasks: JoinSet::new(),
            requests,
            leading: false,
            sent_away: BTreeSet::new(),
            orphans: Vec::new(),
            published: BTreeMap::new(),
            listed: BTreeSet::new(),
        }
    }

    /// Until nobody can give commands any more.
    pub(super) async fn run(mut self, inputs: Inputs) {
        let Inputs { mut commands, mut pods, mut requests, mut published, mut claim } = inputs;
        let mut epoch = None;
        loop {
            tokio::select! {
                biased;
                changed = claim.changed() => {
                    if changed.is_err() {
                        break;
                    }
                }
                // Before commands: that a life is over was said before its engine was given the next one.
                Some(request) = requests.recv() => self.grant(request).await,
                command = commands.recv() => match command {
                    Some(command) => self.carry_out(command).await,
                    None => break,
                },
                Some(change) = pods.recv() => self.see(change),
                Some(said) = published.recv() => self.hear(said).await,
                Some(ended) = self.tasks.join_next() => {
                    if let Err(error) = ended
                        && !error.is_cancelled()
                    {
                        tracing::error!(%error, "a task of the platform died");
                    }
                }
            }
            let claimed = claim.borrow_and_update().filter(Claim::holds).map(|claim| claim.epoch);
            // Whoever has not seen everything would take what it has not seen for gone.
            let now = claimed.filter(|_| epoch.is_some() || self.has_seen_all());
            if now != epoch {
                epoch = now;
                self.turn(now, &mut commands, &mut published).await;
            }
        }
        self.tasks.shutdown().await;
    }

    fn has_seen_all(&self) -> bool {
        self.shared.is_placed() && self.shared.watched.iter().all(|namespace| self.listed.contains(namespace))
    }

    /// This gateway leads from now on, or does no longer.
    async fn turn(
        &mut self,
        epoch: Option<u64>,
        commands: &mut mpsc::UnboundedReceiver<Command>,
        published: &mut mpsc::UnboundedReceiver<Published>,
    ) {
        let leads = epoch.is_some();
        self.leading = false;
        self.tasks.shutdown().await;
        let own: Vec<(EngineId, Generation)> =
            self.lives.iter().map(|(id, life)| (id.clone(), life.generation)).collect();
        self.lives.clear();
        self.crews.clear();
        self.clerks.clear();
        self.booked.clear();
        self.pending.clear();
        self.sent_away.clear();
        self.orphans.clear();
        // Also between two leads that followed each other at once: what was under way in the first is over.
        self.shared.common.tell(Event::Led { leads: false }).await;
        if let Some(epoch) = epoch {
            // Who comes to lead as soon as it begins may not have looked at what the former leader said of engines, by which it
            // knows those that serve.
            while let Ok(said) = published.try_recv() {
                self.hear(said).await;
            }
            self.pass_on_all().await;
            self.shared.common.tell(Event::Led { leads }).await;
            // Lives that no gateway of today has heard of are older.
            let generation = Generation(epoch << LIVES);
            self.shared.common.tell(Event::LivesFrom { generation }).await;
            self.look_anew().await;
            takeover::take_over(self).await;
            // What was ordered before it was heard what runs was meant for another world, but for looking after a stub.
            let mut holds = Vec::new();
            while let Ok(command) = commands.try_recv() {
                holds.extend(Some(command).filter(|command| matches!(command, Command::Hold { .. })));
            }
            self.shared.common.tell(Event::AdoptionDone).await;
            self.leading = true;
            for hold in holds {
                self.carry_out(hold).await;
            }
            for (deployment, place) in std::mem::take(&mut self.pending) {
                self.recount(&deployment, Some(place));
                self.assign(&deployment);
            }
        } else {
            self.pass_on_all().await;
            // What this gateway had begun and nobody speaks of is nothing that runs.
            for (engine, generation) in own.into_iter().filter(|(engine, _)| !self.is_published(engine)) {
                self.shared.common.tell(Event::Published { engine, generation, published: None }).await;
            }
        }
    }

    /// What runs is taken over as it is now. A watch may have been cut without anybody's notice.
    async fn look_anew(&mut self) {
        for namespace in self.shared.watched.clone() {
            let pods = pods::watched(&self.shared.client, namespace);
            let mut pauses = Pauses::new();
            for _ in 0..LOOKS {
                match time::timeout(LIST, watches::list(&pods)).await {
                    Ok(Ok(all)) => {
                        self.see(all);
                        break;
                    }
                    Ok(Err(_))
                        if pods.namespace.as_ref().is_some_and(|n| self.shared.awaited.is_left_out(n)) =>
                    {
                        break;
                    }
                    Ok(Err(error)) => tracing::warn!(%error, "the Pods were not listed; it is tried again"),
                    Err(_) => tracing::warn!("the Pods were not listed in time; it is tried again"),
                }
                pauses.pause().await;
            }
        }
    }

    async fn carry_out(&mut self, command: Command) {
        if !self.leading {
            return;
        }
        match command {
            Command::Reserve { engine, generation, .. } => self.reserve(engine, generation).await,
            Command::Shrink { engine, bytes: Bytes::ZERO, .. } => {
                if let Some(place) = self.booked.remove(&engine) {
                    let model = place.owner.object.clone();
                    self.enter(&place, Entry::Release { model, replica: engine.replica, done: None });
                }
            }
            Command::Shrink { engine, generation, bytes, host } => {
                if let Some(place) = self.life(&engine, generation).and_then(|life| life.place.clone()) {
                    let bytes =
                        Bytes(bytes.0.div_ceil(u64::from(place.variant.spec.accelerators.count().max(1))));
                    let (model, keeps) = (place.owner.object.clone(), Keeps { bytes, host_bytes: host });
                    self.enter(&place, Entry::FallsAsleep { model, replica: engine.replica, keeps });
                }
            }
            Command::Launch { engine, generation, .. } => self.launch(engine, generation).await,
            Command::Probe { engine, generation } => self.order(engine, generation, Order::Probe).await,
            Command::Hold { engine, generation } => self.order(engine, generation, Order::Hold).await,
            Command::CloseGate { engine, generation, .. } => {
                self.order(engine, generation, Order::Close).await;
            }
            Command::OpenGate { engine, generation, .. } => {
                self.order(engine, generation, Order::Open).await;
            }
            Command::Revoke { engine, generation, .. } => self.order(engine, generation, Order::Cut).await,
            Command::Stop { engine, generation, .. } => self.order(engine, generation, Order::Stop).await,
            Command::Sleep { engine, generation, level } => {
                self.order(engine, generation, Order::Sleep(level)).await;
            }
            Command::Wake { engine, generation, level } => {
                self.order(engine, generation, Order::Wake(level)).await;
            }
            // No meter of a pool is read at once; the rest is the driver's.
            Command::Meter { .. }
            | Command::Grant { .. }
            | Command::Refuse { .. }
            | Command::Finish { .. } => {}
        }
    }

    async fn reserve(&mut self, engine: EngineId, generation: Generation) {
        if self.shared.external(&engine.model).is_some() {
            let accelerators = Vec::new();
            return self.shared.common.tell(Event::Placed { engine, generation, accelerators }).await;
        }
        let own = self.life(&engine, generation).and_then(|life| life.place.clone());
        let sleeps = own.is_some();
        let Some(place) = own.or_else(|| self.shared.place(&engine.model)) else {
            return self.shared.common.tell(Event::Conflict { engine, generation }).await;
        };
        let Some(wanted) = place.wanted(engine.replica) else {
            // It takes no memory of any pool.
            let accelerators = Vec::new();
            return self.shared.common.tell(Event::Placed { engine, generation, accelerators }).await;
        };
        if sleeps {
            let keeps = Some(place.keeps(Level::One));
            return self.enter(&place, Entry::Reserve { engine, generation, wanted, keeps });
        }
        // What it had before is its own until that is seen gone: it would share that booking, and lose it with it.
        let had = |entry: &Booked| entry.model == place.owner.object && entry.replica == engine.replica;
        if self.lives.contains_key(&engine) || self.orphans.iter().any(had) {
            return self.shared.common.tell(Event::Conflict { engine, generation }).await;
        }
        self.booked.insert(engine.clone(), Arc::clone(&place));
        self.enter(&place, Entry::Reserve { engine, generation, wanted, keeps: None });
    }

    /// To the one who changes this pool's ledger.
    fn enter(&mut self, place: &Place, entry: Entry) {
        let Some(pool) = place.pool.clone() else { return };
        self.clerk(&pool).send(entry).unwrap_or_default();
    }

    /// Who changes this pool's ledger; hired when first needed.
    pub(super) fn clerk(&mut self, pool: &str) -> mpsc::UnboundedSender<Entry> {
        if let Some(known) = self.clerks.get(pool) {
            return known.clone();
        }
        let (entries, received) = mpsc::unbounded_channel();
        self.tasks.spawn(clerk::keep(Arc::clone(&self.shared), pool.to_owned(), received));
        self.clerks.insert(pool.to_owned(), entries.clone());
        entries
    }

    /// An order to a life that is over has the outcome that it has for something that is gone.
    async fn order(&mut self, engine: EngineId, generation: Generation, order: Order) {
        let life = self.lives.get(&engine).filter(|life| life.generation == generation);
        if life.is_some_and(|life| life.orders.send(order).is_ok()) {
            return;
        }
        let outcome = match order {
            Order::Probe => {
                Event::Canary { engine, generation, verdict: Verdict::Failed(Cause::Unreachable) }
            }
            Order::Close | Order::Cut => Event::Drained { engine, generation },
            Order::Sleep(_) => Event::SleepFailed { engine, generation, cause: Cause::Unreachable },
            Order::Wake(_) => Event::WakeFailed { engine, generation, cause: Cause::Unreachable },
            Order::Stop => Event::Gone { engine, generation, cause: Cause::Stopped },
            Order::Hold | Order::Open => return,
        };
        self.shared.common.tell(outcome).await;
    }

    async fn grant(&mut self, request: Request) {
        match request {
            Request::Bound { engine, generation } => {
                if let Some(life) = self.life(&engine, generation) {
                    life.bound = true;
                }
            }
            Request::Leave { engine, generation, done } => {
                let Some(life) = self.life(&engine, generation) else { return };
                life.leaving = Some((u64::MAX, Some(done)));
                let deployment = life.deployment.clone();
                let version = self.recount(&deployment, None);
                if let Some((from, _)) = self.life(&engine, generation).and_then(|life| life.leaving.as_mut())
                {
                    *from = version;
                }
                self.let_go();
            }
            Request::Over { engine, generation } => {
                if self.life(&engine, generation).is_some() {
                    self.lives.remove(&engine);
                }
            }
            Request::Refused { deployment, why } => self.refused(&deployment, &why).await,
            Request::Applied => self.let_go(),
            Request::Placed if self.leading => {}
            Request::Placed => self.pass_on_all().await,
            Request::Enter { pool, entry } => {
                self.clerk(&pool).send(entry).unwrap_or_default();
            }
        }
    }

    fn life(&mut self, engine: &EngineId, generation: Generation) -> Option<&mut Life> {
        self.lives.get_mut(engine).filter(|life| life.generation == generation)
    }
}
