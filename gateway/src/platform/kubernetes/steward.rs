//! Who keeps the lives of a cluster's engines: the one task that knows which Pod is whose.
//!
//! Pods of a Deployment have names that nobody chose, so which engine runs in which is decided here, by one task, and
//! written to the Pod before anything is done with it. Commands, what is seen of Pods, and what lives ask for come on three
//! channels to this task alone; whatever takes time is done by others (`life`, `crew`, `clerk`).
//!
//! All of it exists only while this gateway leads. When it gets the lease it takes over what it finds (`takeover`); when it
//! loses it, lives, crews and clerks are dropped as they are.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    sync::Arc,
};

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    fault::Cause,
    fleet::{
        command::Command,
        event::{Event, Published as Told, Verdict},
    },
    model::{EngineId, ModelName},
    units::{Bytes, Generation, Tick},
};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};

use super::{
    Place, Shared,
    clerk::{self, Entry},
    crew::{self, Desired},
    external::{External, Visit},
    life::{self, Berth, Order, Start},
    takeover,
};
use crate::controllers::{
    crd::{
        inference_model::{EngineState, EngineStatus},
        ledger::ObjectName,
    },
    election::Claim,
    label,
    pods::Seen,
    published::{self, Published},
    watch::Change,
};

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
    /// What statuses say.
    pub(super) published: BTreeMap<ObjectName, Published>,
    /// Namespaces whose Pods were listed.
    listed: BTreeSet<Option<String>>,
}

/// One life, as the steward knows it.
pub(super) struct Life {
    generation: Generation,
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
                command = commands.recv() => match command {
                    Some(command) => self.carry_out(command).await,
                    None => break,
                },
                Some(request) = requests.recv() => self.grant(request).await,
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
                self.turn(now).await;
            }
        }
        self.tasks.shutdown().await;
    }

    fn has_seen_all(&self) -> bool {
        self.shared.is_placed() && self.shared.watched.iter().all(|namespace| self.listed.contains(namespace))
    }

    /// This gateway leads from now on, or does no longer.
    async fn turn(&mut self, epoch: Option<u64>) {
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
        // Also between two leads that followed each other at once: what was under way in the first is over.
        self.shared.common.tell(Event::Led { leads: false }).await;
        if let Some(epoch) = epoch {
            self.shared.common.tell(Event::Led { leads }).await;
            // Lives that no gateway of today has heard of are older.
            let generation = Generation(epoch << LIVES);
            self.shared.common.tell(Event::LivesFrom { generation }).await;
            takeover::take_over(self).await;
            self.leading = true;
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

    async fn pass_on_all(&self) {
        for said in self.published.values() {
            self.pass_on(said, &[]).await;
        }
    }

    fn is_published(&self, engine: &EngineId) -> bool {
        let of_model = self.published.values().filter(|said| said.model == engine.model);
        of_model.flat_map(|said| &said.engines).any(|status| status.replica == engine.replica)
    }

    /// What a status says is how an engine is, for whoever does not lead.
    async fn hear(&mut self, said: Published) {
        let before = self.published.insert(said.object.clone(), said.clone());
        if !self.leading && self.shared.is_placed() {
            self.pass_on(&said, before.as_ref().map_or(&[], |before| &before.engines)).await;
        }
    }

    async fn pass_on(&self, said: &Published, before: &[EngineStatus]) {
        let place = self.shared.place(&said.model);
        let fingerprint = place.as_ref().map_or(0, |place| place.variant.spec.fingerprint);
        let pool = place.as_ref().and_then(|place| place.pool.clone());
        for status in &said.engines {
            let accelerators = pool.iter().map(|pool| pool.as_str().into()).collect();
            self.say(&said.model, status, published::engine(status, fingerprint, accelerators)).await;
        }
        let gone = |known: &&EngineStatus| !said.engines.iter().any(|status| status.replica == known.replica);
        for status in before.iter().filter(gone) {
            self.say(&said.model, status, None).await;
        }
    }

    async fn say(&self, model: &ModelName, status: &EngineStatus, published: Option<Told>) {
        let engine = EngineId::new(model.clone(), status.replica);
        let generation = Generation(status.generation);
        self.shared.common.tell(Event::Published { engine, generation, published }).await;
    }

    pub(super) fn is_published_awake(
        &self,
        object: &ObjectName,
        replica: u32,
        generation: Generation,
    ) -> bool {
        let engines = self.published.get(object).map(|said| said.engines.as_slice()).unwrap_or_default();
        engines.iter().any(|status| {
            (status.replica, status.generation, status.state) == (replica, generation.0, EngineState::Awake)
        })
    }

    pub(super) fn last_request(&self, object: &ObjectName) -> Tick {
        self.published.get(object).map(|said| said.last_request).unwrap_or_default()
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
            // Whoever is asleep in a Pod of its own keeps its accelerators from all others: such models are not told to
            // sleep.
            Command::Sleep { engine, generation, .. } => {
                self.shared
                    .common
                    .tell(Event::SleepFailed { engine, generation, cause: Cause::Refused })
                    .await;
            }
            Command::Wake { engine, generation, .. } => {
                self.shared
                    .common
                    .tell(Event::WakeFailed { engine, generation, cause: Cause::Refused })
                    .await;
            }
            // No meter of a pool is read at once; the rest is the driver's.
            Command::Shrink { .. }
            | Command::Meter { .. }
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
        let Some(place) = self.shared.place(&engine.model) else {
            return self.shared.common.tell(Event::Conflict { engine, generation }).await;
        };
        let Some(wanted) = place.wanted(engine.replica) else {
            // It takes no memory of any pool.
            let accelerators = Vec::new();
            return self.shared.common.tell(Event::Placed { engine, generation, accelerators }).await;
        };
        self.booked.insert(engine.clone(), Arc::clone(&place));
        self.enter(&place, Entry::Reserve { engine, generation, wanted });
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

    async fn launch(&mut self, engine: EngineId, generation: Generation) {
        if let Some(external) =
            self.shared.external(&engine.model).filter(|_| !self.lives.contains_key(&engine))
        {
            return self.visit(engine, generation, external, None);
        }
        // What was booked is what it runs by, also where the objects say something else by now.
        let place = self.booked.remove(&engine).or_else(|| self.shared.place(&engine.model));
        let runs = self.lives.contains_key(&engine);
        let Some(place) = place.filter(|_| !runs) else {
            tracing::error!(%engine, %generation, runs, "cannot be launched");
            let cause = Cause::Refused;
            return self.shared.common.tell(Event::Gone { engine, generation, cause }).await;
        };
        self.enlist(engine, generation, place, None, Start::Launch);
    }

    /// Begins a life.
    pub(super) fn enlist(
        &mut self,
        id: EngineId,
        generation: Generation,
        place: Arc<Place>,
        pod: Option<Arc<Seen>>,
        start: Start,
    ) {
        self.begin(id, generation, place, pod, start, None);
    }

    /// `leaving`: no Pod is to be kept for it from the start.
    fn begin(
        &mut self,
        id: EngineId,
        generation: Generation,
        place: Arc<Place>,
        pod: Option<Arc<Seen>>,
        start: Start,
        leaving: Leaving,
    ) {
        let deployment = match &pod {
            Some(pod) => place.deployment_of(&pod.template),
            None => place.deployment(),
        };
        let (orders, received) = mpsc::unbounded_channel();
        let (shown, seen) = watch::channel(pod.clone());
        let berth = Berth {
            shared: Arc::clone(&self.shared),
            id: id.clone(),
            generation,
            place: Arc::clone(&place),
            requests: self.requests.clone(),
        };
        self.tasks.spawn(life::live(Arc::new(berth), received, seen, start));
        let life = Life {
            generation,
            deployment: deployment.clone(),
            orders,
            bound: pod.is_some(),
            pod: pod.map(|pod| pod.name.clone()),
            shown,
            leaving,
        };
        self.lives.insert(id, life);
        self.recount(&deployment, Some(place));
        self.assign(&deployment);
    }

    /// Begins dealings with a backend; `known`: where it is, when it serves already.
    pub(super) fn visit(
        &mut self,
        id: EngineId,
        generation: Generation,
        external: Arc<External>,
        known: Option<SocketAddr>,
    ) {
        let (orders, received) = mpsc::unbounded_channel();
        let shared = Arc::clone(&self.shared);
        let requests = self.requests.clone();
        let visit = Visit { shared, id: id.clone(), generation, external, requests };
        self.tasks.spawn(visit.live(received, known));
        let (shown, _) = watch::channel(None);
        let deployment = ObjectName::new("", "");
        let life = Life { generation, deployment, orders, pod: None, shown, bound: true, leaving: None };
        self.lives.insert(id, life);
    }

    /// Ends an engine that nobody took over: what it has is seen to its end, and given back.
    pub(super) async fn dismiss(
        &mut self,
        place: &Arc<Place>,
        replica: u32,
        generation: Generation,
        pod: Option<Arc<Seen>>,
    ) {
        let engine = EngineId::new(place.engine.name.clone(), replica);
        if self.lives.contains_key(&engine) {
            return;
        }
        let start = if pod.is_some() { Start::Starting } else { Start::Launch };
        let leaving = Some((u64::MAX, None));
        self.begin(engine.clone(), generation, Arc::clone(place), pod, start, leaving);
        self.order(engine, generation, Order::Stop).await;
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
            Order::Stop => Event::Gone { engine, generation, cause: Cause::Stopped },
            Order::Hold | Order::Open => return,
        };
        self.shared.common.tell(outcome).await;
    }

    /// How many Pods this Deployment is to have follows from who lives in them.
    pub(super) fn recount(&mut self, deployment: &ObjectName, place: Option<Arc<Place>>) -> u64 {
        let members =
            self.lives.values().filter(|life| life.deployment == *deployment && life.leaving.is_none());
        let replicas = u32::try_from(members.count()).unwrap_or(u32::MAX);
        if !self.leading {
            // While things are taken over their number is not known yet.
            self.pending.extend(place.map(|place| (deployment.clone(), place)));
            return 0;
        }
        if let Some(crew) = self.crews.get(deployment) {
            crew.desired.send_modify(|desired| {
                desired.version += 1;
                desired.replicas = replicas;
                if let Some(place) = place {
                    desired.place = place;
                }
            });
            return crew.desired.borrow().version;
        }
        let Some(place) = place else { return 0 };
        let model = label::value(place.engine.name.as_str());
        let template = deployment.name.rsplit('-').next().unwrap_or_default().to_owned();
        let (desired, wanted) = watch::channel(Desired { version: 1, replicas, place });
        let (told, applied) = watch::channel(0);
        let shared = Arc::clone(&self.shared);
        self.tasks.spawn(crew::keep(shared, deployment.clone(), wanted, told, self.requests.clone()));
        self.crews.insert(deployment.clone(), Crew { model, template, desired, applied });
        1
    }

    /// Gives Pods that are nobody's to lives that have none, the lowest first.
    fn assign(&mut self, deployment: &ObjectName) {
        let taken: BTreeSet<ObjectName> = self.lives.values().filter_map(|life| life.pod.clone()).collect();
        let mut free = self.free(deployment);
        free.retain(|pod| !taken.contains(&pod.name));
        // The oldest first, which is the nearest to being of use.
        free.sort_by(|a, b| (b.created, &b.name).cmp(&(a.created, &a.name)));
        for life in self.lives.values_mut() {
            if life.deployment != *deployment || life.pod.is_some() || life.bound || life.leaving.is_some() {
                continue;
            }
            let Some(pod) = free.pop() else { return };
            life.pod = Some(pod.name.clone());
            life.shown.send_replace(Some(pod));
        }
    }

    /// Pods of this Deployment that are no engine's yet.
    fn free(&self, deployment: &ObjectName) -> Vec<Arc<Seen>> {
        let Some(crew) = self.crews.get(deployment) else { return Vec::new() };
        let of = |pod: &&Arc<Seen>| {
            pod.is_free()
                && pod.name.namespace == deployment.namespace
                && (&pod.model, &pod.template) == (&crew.model, &crew.template)
        };
        self.pods.values().filter(of).cloned().collect()
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

    /// Tells lives that leave that no Pod is kept for them any more. One that never had a Pod of its own waits as well until
    /// none is left that was made for it.
    fn let_go(&mut self) {
        let names: Vec<ObjectName> = self.crews.keys().cloned().collect();
        for deployment in names {
            let applied = self.crews.get(&deployment).map_or(0, |crew| *crew.applied.borrow());
            let spare = self.free(&deployment).len();
            let seeking = self
                .lives
                .values()
                .filter(|life| life.deployment == deployment && !life.bound && life.leaving.is_none());
            let surplus = spare > seeking.count();
            for life in self.lives.values_mut().filter(|life| life.deployment == deployment) {
                let Some((from, done)) = &mut life.leaving else { continue };
                // What takes the place of a Pod that is gone is nobody's, and has to go as well.
                if *from <= applied
                    && (life.pod.is_some() || !surplus)
                    && let Some(done) = done.take()
                {
                    // Whoever asked may have been dropped.
                    done.send(()).unwrap_or_default();
                }
            }
        }
    }

    async fn refused(&mut self, deployment: &ObjectName, why: &str) {
        tracing::error!(%deployment, why, "the API server refuses the Deployment");
        let starts: Vec<(EngineId, Generation)> = self
            .lives
            .iter()
            .filter(|(_, life)| life.deployment == *deployment && !life.bound)
            .map(|(id, life)| (id.clone(), life.generation))
            .collect();
        for (engine, generation) in starts {
            let cause = Cause::Unrunnable;
            self.shared.common.tell(Event::StartFailed { engine, generation, cause }).await;
        }
    }

    fn see(&mut self, change: Change<Pod>) {
        let moved = match change {
            Change::All { namespace, objects } => {
                let there: Vec<Arc<Seen>> =
                    objects.into_iter().filter_map(|found| Seen::of(&found.good()?)).map(Arc::new).collect();
                let names: BTreeSet<&ObjectName> = there.iter().map(|pod| &pod.name).collect();
                let within = |name: &ObjectName| namespace.as_ref().is_none_or(|n| *n == name.namespace);
                let gone: Vec<ObjectName> =
                    self.pods.keys().filter(|name| within(name) && !names.contains(name)).cloned().collect();
                gone.iter().for_each(|name| self.vanished(name));
                there.into_iter().for_each(|pod| self.appeared(pod));
                self.listed.insert(namespace);
                true
            }
            Change::Applied(found) => match found.good().as_ref().and_then(Seen::of) {
                Some(pod) => {
                    self.appeared(Arc::new(pod));
                    true
                }
                None => false,
            },
            Change::Deleted(name) => {
                self.vanished(&name);
                true
            }
        };
        if moved && self.leading {
            let names: Vec<ObjectName> = self.crews.keys().cloned().collect();
            names.iter().for_each(|name| self.assign(name));
            self.let_go();
        }
    }

    fn appeared(&mut self, pod: Arc<Seen>) {
        // Another Pod of the same name is another.
        if self.pods.get(&pod.name).is_some_and(|known| known.uid != pod.uid) {
            self.vanished(&pod.name.clone());
        }
        for life in self.lives.values_mut().filter(|life| life.pod.as_ref() == Some(&pod.name)) {
            life.shown.send_replace(Some(Arc::clone(&pod)));
        }
        self.pods.insert(pod.name.clone(), pod);
    }

    fn vanished(&mut self, name: &ObjectName) {
        self.pods.remove(name);
        for life in self.lives.values_mut().filter(|life| life.pod.as_ref() == Some(name)) {
            life.pod = None;
            life.shown.send_replace(None);
        }
    }
}
