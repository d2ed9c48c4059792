//! The controller of dual pods: what is seen of the cluster goes to the decisions ([`rouse::pairing`]), and what they order is
//! carried out.
//!
//! ```text
//!   Pods ──▶ directory ──▶ events ──▶ Pairing ──▶ orders ──▶ hands: one task each
//!   nodes, pools, gpu-map ──▶ facts ──▶ │                      │ Pods, stubs, engines
//!                                       ◀────── outcomes ──────┘
//! ```
//!
//! Only the gateway that leads decides. A new leader lists the Pods before it decides anything, since its watch may show what
//! was before the last writes of the one it follows; the truth is on the Pods, and its memory begins empty.

mod ask;
mod directory;
mod facts;
mod hands;
mod notes;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::Client;
use rouse::{
    lease::Clock,
    pairing::{
        Pairing,
        command::{Command, Order},
        event::{Epoch, Event, Target},
        ids::{EngineId, Mode, NodeName, ProviderId, RequesterId},
        node::State,
        settings::Settings as Core,
    },
    units::Tick,
};
use tokio::{
    sync::{mpsc, watch},
    task::{JoinError, JoinSet},
    time,
};

use self::{
    directory::Directory,
    facts::Facts,
    hands::{Done, Hands, Job},
    notes::Notes,
};
use crate::controllers::{
    dual::provider::Make,
    election::Claim,
    index::Settled,
    watch::{self as watched, Change, Watched},
    writer::Writer,
};

/// The ConfigMap in the gateways' namespace that numbers the accelerators of nodes.
pub const GPU_MAP: &str = "gpu-map";
/// A new leader's list of Pods that failed is asked for again after this.
const AGAIN: Duration = Duration::from_secs(1);

/// What is the same for all requesters.
#[derive(Clone, Debug)]
pub struct Settings {
    pub core: Core,
    /// How requesters are served that do not say it themselves.
    pub mode: Mode,
    pub make: Make,
}

/// What the controller is made of.
pub struct Parts {
    pub client: Client,
    pub writer: Writer,
    pub claim: watch::Receiver<Option<Claim>>,
    pub clock: Clock,
    pub settings: Settings,
    pub seen: Seen,
    pub settled: watch::Receiver<Option<Arc<Settled>>>,
}

/// What it sees of the cluster.
pub struct Seen {
    /// Of whatever kind.
    pub pods: mpsc::Receiver<Change<Pod>>,
    /// Where they are, to be listed.
    pub listed: Vec<Watched<Pod>>,
    pub nodes: mpsc::Receiver<Change<Node>>,
    /// Of the ConfigMap [`GPU_MAP`].
    pub map: mpsc::Receiver<Change<ConfigMap>>,
}

/// Runs until it is dropped.
pub struct Controller {
    core: Pairing,
    directory: Directory,
    facts: Facts,
    notes: Notes,
    hands: Arc<Hands>,
    listed: Arc<Vec<Watched<Pod>>>,
    /// As this leader, once it has listed everything.
    epoch: Option<u64>,
    /// What was listed, until all nodes have been seen as well.
    came: Option<(u64, Vec<Change<Pod>>)>,
    /// In which namespace Pods were ordered.
    ordered: BTreeMap<(NodeName, EngineId), String>,
    /// Orders that are being carried out; what came of them.
    tasks: JoinSet<Finished>,
}

/// What came to an end.
enum Finished {
    Order(Box<Done>),
    /// All Pods, for who leads with this epoch.
    Listed(u64, Vec<Change<Pod>>),
    /// A requester may be told something again.
    Noted(RequesterId),
}

impl Controller {
    /// For as long as somebody says who leads.
    pub async fn run(parts: Parts) {
        let Parts { client, writer, mut claim, clock, settings, seen, mut settled } = parts;
        let Seen { mut pods, listed, mut nodes, mut map } = seen;
        let mut own = Self {
            core: Pairing::new(settings.core),
            directory: Directory::new(settings.mode),
            facts: Facts::default(),
            notes: Notes::default(),
            hands: Arc::new(Hands { client, writer, clock, settings }),
            listed: Arc::new(listed),
            epoch: None,
            came: None,
            ordered: BTreeMap::new(),
            tasks: JoinSet::new(),
        };
        let mut leads = None;
        loop {
            let due = own.core.next_deadline();
            tokio::select! {
                changed = claim.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    let now = claim.borrow_and_update().filter(Claim::holds).map(|claim| claim.epoch);
                    if now != leads {
                        leads = now;
                        own.lead(now);
                    }
                }
                Some(change) = pods.recv() => own.pods(change),
                Some(change) = nodes.recv() => own.facts.nodes(change),
                Some(change) = map.recv() => own.facts.map(change),
                Ok(()) = settled.changed() => {
                    own.facts.settled(settled.borrow_and_update().clone().unwrap_or_default());
                }
                Some(finished) = own.tasks.join_next() => own.finished(finished),
                () = until(due, clock) => {}
            }
            own.decide();
        }
    }

    /// Begins to lead, or ends. What the former leader ordered is found out about, and what this one ordered before is over.
    fn lead(&mut self, epoch: Option<u64>) {
        (self.epoch, self.came) = (None, None);
        self.ordered.clear();
        self.tasks = JoinSet::new();
        self.notes = Notes::default();
        self.core = Pairing::new(self.hands.settings.core);
        if let Some(epoch) = epoch {
            let listed = Arc::clone(&self.listed);
            self.tasks.spawn(async move { Finished::Listed(epoch, list(&listed).await) });
        }
    }

    fn listed(&mut self, epoch: u64, all: Vec<Change<Pod>>) {
        all.into_iter().for_each(|change| self.directory.list(change, &self.facts));
        self.epoch = Some(epoch);
        self.tell(vec![Event::Led { epoch: Epoch(epoch) }]);
        self.facts.forget_told();
        self.tell_facts();
        self.tell(vec![Event::Listed]);
    }

    fn pods(&mut self, change: Change<Pod>) {
        let mut events = Vec::new();
        // The decisions hear nothing of who asks for what cannot be: its user does.
        let one = match &change {
            Change::Applied(found) => found.metadata().uid.clone().map(RequesterId::from),
            Change::All { .. } | Change::Deleted(_) => None,
        };
        let all = matches!(change, Change::All { .. });
        self.directory.take(change, &self.facts, &mut |event| events.push(event));
        let one = one.as_ref().and_then(|id| self.directory.requester(id));
        let looked = self.directory.requesters().filter(|_| all).chain(one);
        looked.for_each(|own| self.notes.look(own.id.clone()));
        self.tell(events);
    }

    fn finished(&mut self, finished: Result<Finished, JoinError>) {
        match finished {
            Ok(Finished::Order(done)) => {
                let Done { event, error } = *done;
                match (self.blamed(&event), error) {
                    (Some(id), Some(error)) => self.notes.error(id, error),
                    (Some(id), None) if serves(&event) => self.notes.mended(&id),
                    _ => {}
                }
                self.tell(vec![event]);
            }
            Ok(Finished::Listed(epoch, all)) => self.came = Some((epoch, all)),
            Ok(Finished::Noted(id)) => self.notes.may_write(id),
            Err(error) if error.is_cancelled() => {}
            Err(error) => tracing::error!(%error, "an order's task died"),
        }
    }

    /// Whose user is told what became of this.
    fn blamed(&self, event: &Event) -> Option<RequesterId> {
        let Event::Outcome { node, target, .. } = event else { return None };
        match target {
            Target::Requester(id) => Some(id.clone()),
            Target::Engine(engine, _) => self.core.node(node)?.engines.get(engine)?.requester().cloned(),
            Target::Provider(_) => None,
        }
    }

    /// The decisions hear of it, if they are this gateway's.
    fn tell(&mut self, events: Vec<Event>) {
        let now = self.hands.clock.now();
        for event in events {
            self.facts.meet(&event);
            match &event {
                Event::SeenRequester { requester, .. } => self.notes.look(requester.clone()),
                Event::RequesterGone { requester, .. } => self.notes.gone(requester),
                _ => {}
            }
            if self.epoch.is_some() {
                self.core.on(&event, now);
            }
        }
    }

    /// News of nodes may complete what is known of those who are on them.
    fn tell_facts(&mut self) {
        let mut events = Vec::new();
        self.facts.tell(&mut |event| events.push(event));
        if !events.is_empty() {
            self.directory.again(&self.facts, &mut |event| events.push(event));
            self.directory.requesters().for_each(|own| self.notes.look(own.id.clone()));
        }
        self.tell(events);
    }

    fn decide(&mut self) {
        if self.facts.are_complete()
            && let Some((epoch, all)) = self.came.take()
        {
            self.listed(epoch, all);
        }
        if self.epoch.is_none() {
            return;
        }
        self.tell_facts();
        let now = self.hands.clock.now();
        let plan = self.core.plan(now);
        self.core.issued(&plan, now);
        if !plan.looked.is_empty() {
            let core = &self.core;
            let lives = |(node, engine): &(NodeName, EngineId)| {
                core.node(node).is_some_and(|node| node.engines.contains_key(engine))
            };
            self.ordered.retain(|place, _| lives(place));
        }
        for command in plan.commands {
            let job = self.job(command);
            let hands = Arc::clone(&self.hands);
            self.tasks.spawn(async move { Finished::Order(Box::new(hands.carry_out(job).await)) });
        }
        for ((_, requester), why) in plan.reasons {
            tracing::debug!(%requester, why, "a requester waits");
        }
        self.notes.write(&self.directory, &self.facts, &self.hands, &mut self.tasks);
    }

    fn job(&mut self, command: Command) -> Job {
        let node = &command.node;
        let mut asleep = None;
        let mut place = None;
        let (requester, provider, numbers) = match &command.order {
            Order::Requester { requester, .. } => (Some(requester), None, None),
            Order::Engine { engine, .. } => {
                let known = self.core.node(node).and_then(|known| known.engines.get(engine));
                asleep = known.and_then(|known| match known.state {
                    State::Asleep { level } | State::FallingAsleep { level } => Some(level),
                    _ => None,
                });
                place = Some((node.clone(), engine.clone()));
                let provider = self.directory.provider(node, &ProviderId::direct(engine));
                (
                    known.and_then(|known| known.requester()),
                    provider,
                    self.facts.numbers(node, &engine.accelerators),
                )
            }
            Order::Provider { .. } => (None, None, None),
        };
        let requester = requester.and_then(|id| self.directory.requester(id));
        let namespace = place.and_then(|place| match requester {
            Some(own) => {
                self.ordered.insert(place, own.name.namespace.clone());
                Some(own.name.namespace.clone())
            }
            None => self.ordered.get(&place).cloned(),
        });
        Job {
            slept: asleep,
            namespace,
            requester: requester.cloned(),
            provider: provider.cloned(),
            numbers,
            command,
        }
    }
}

/// An order about an engine was carried out: nothing is in its requester's way any more.
const fn serves(event: &Event) -> bool {
    matches!(event, Event::Outcome { target: Target::Engine(..), result: Ok(_), .. })
}

/// Every Pod there is. An API server that does not answer is asked again.
async fn list(all: &[Watched<Pod>]) -> Vec<Change<Pod>> {
    let mut found = Vec::new();
    for watched in all {
        loop {
            match watched::list(watched).await {
                Ok(change) => break found.push(change),
                Err(error) => {
                    tracing::warn!(%error, "Pods were not listed; they are asked for again");
                    time::sleep(AGAIN).await;
                }
            }
        }
    }
    found
}

async fn until(due: Option<Tick>, clock: Clock) {
    match due {
        Some(due) => time::sleep(due.since(clock.now()).duration()).await,
        None => std::future::pending().await,
    }
}
