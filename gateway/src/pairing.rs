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
mod census;
mod configs;
mod directory;
mod editions;
mod facts;
mod hands;
mod heard;
mod job;
mod launchers;
mod notes;
mod population;
mod proof;
mod tidings;
mod waits;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::api::core::v1::{ConfigMap, Node, Pod};
use kube::Client;
use rouse::{
    lease::Clock,
    pairing::{
        Pairing,
        event::{Epoch, Event},
        ids::{EngineId, Mode, NodeName, RequesterId},
        settings::Settings as Core,
    },
    units::Tick,
};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time,
};

pub use self::facts::READY;
use self::{
    census::{Census, Sight},
    configs::Configs,
    directory::Directory,
    facts::Facts,
    hands::{Done, Hands},
    launchers::{Ears, Ports},
    notes::Notes,
    proof::Proofs,
    tidings::Tidings,
    waits::Waits,
};
use crate::{
    controllers::{
        crd::fma::{InferenceServerConfig, LauncherConfig, LauncherPopulationPolicy},
        dual::provider::Make,
        election::Claim,
        index::Settled,
        recorder::{Herald, Notice},
        stub_key::StubKey,
        watch::{self as watched, Awaited, Change, Watched},
        writer::Writer,
    },
    metrics::Duals,
    platform::kubernetes::dcgm::{Dcgm, Samples},
};

/// The ConfigMap in the gateways' namespace that numbers the accelerators of nodes.
pub const GPU_MAP: &str = "gpu-map";
/// A policy whose status was not written is told again after this: the right to do so may be missing.
const LATER: Duration = Duration::from_secs(10);
/// A new leader's list of Pods that failed is asked for again after this.
const AGAIN: Duration = Duration::from_secs(1);

/// What is the same for all requesters.
#[derive(Clone, Debug)]
pub struct Settings {
    pub core: Core,
    /// How requesters are served that do not say it themselves.
    pub mode: Mode,
    pub make: Make,
    /// Of which the tokens of models' requesters and of launchers are made.
    pub key: StubKey,
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
    pub metrics: Duals,
    pub herald: Herald,
    /// Where it is read what is in use of accelerators, and which have faults, if that is configured.
    pub meter: Option<Arc<Dcgm>>,
}

/// What it sees of the cluster.
pub struct Seen {
    /// Of whatever kind.
    pub pods: mpsc::Receiver<Change<Pod>>,
    /// Where they are, to be listed.
    pub listed: Vec<Watched<Pod>>,
    /// Which lists are left out.
    pub awaited: Awaited,
    pub nodes: mpsc::Receiver<Change<Node>>,
    /// Of the ConfigMap [`GPU_MAP`].
    pub map: mpsc::Receiver<Change<ConfigMap>>,
    /// What launchers and their engines are made from; nothing comes where the API server has no such kinds.
    pub engines: mpsc::Receiver<Change<InferenceServerConfig>>,
    pub launchers: mpsc::Receiver<Change<LauncherConfig>>,
    /// Which accelerators have launchers before anybody asks.
    pub policies: mpsc::Receiver<Change<LauncherPopulationPolicy>>,
}

/// Runs until it is dropped.
pub struct Controller {
    core: Pairing,
    directory: Directory,
    facts: Facts,
    notes: Notes,
    waits: Waits,
    tidings: Tidings,
    census: Census,
    ears: Ears,
    ports: Ports,
    meter: Option<Arc<Dcgm>>,
    hands: Arc<Hands>,
    listed: Arc<Vec<Watched<Pod>>>,
    awaited: Awaited,
    /// As this leader, once it has listed everything.
    epoch: Option<u64>,
    /// What was listed, until all nodes have been seen as well.
    came: Option<(u64, Vec<Change<Pod>>)>,
    /// In which namespace Pods were ordered.
    ordered: BTreeMap<(NodeName, EngineId), String>,
    proofs: Proofs,
    /// Orders that are being carried out; what came of them.
    tasks: JoinSet<Finished>,
}

/// What came to an end.
enum Finished {
    /// With what is told of it where it was carried out.
    Order(Box<(Done, Vec<Notice>)>),
    /// All Pods, for who leads with this epoch.
    Listed(u64, Vec<Change<Pod>>),
    /// An engine that a launcher did not list was asked for.
    Asked(Option<Event>),
    /// A requester may be told something again.
    Noted(RequesterId),
    /// What is in use of accelerators was asked for, if there was an answer.
    Read(Option<Arc<Samples>>),
    /// A requester has waited for some time.
    Waited(RequesterId),
    /// What a policy was to be told was written, or is to be tried again.
    Judged { again: bool },
}

impl Controller {
    /// For as long as somebody says who leads.
    pub async fn run(parts: Parts) {
        let Parts { client, writer, mut claim, clock, settings, seen, mut settled, metrics, herald, meter } =
            parts;
        let Seen { mut pods, listed, awaited, mut nodes, mut map, mut engines, mut launchers, mut policies } =
            seen;
        let mut own = Self {
            core: Pairing::new(settings.core),
            directory: Directory::new(settings.mode),
            facts: Facts::new(Configs::new(lists(&listed))),
            notes: Notes::default(),
            waits: Waits::new(metrics.clone()),
            tidings: Tidings::new(herald),
            census: Census::new(metrics.clone()),
            ears: Ears::new(),
            ports: Ports::default(),
            meter,
            hands: Arc::new(Hands { client, writer, clock, settings, metrics }),
            listed: Arc::new(listed),
            awaited,
            epoch: None,
            came: None,
            ordered: BTreeMap::new(),
            proofs: Proofs::default(),
            tasks: JoinSet::new(),
        };
        let mut leads = None;
        loop {
            let due = own.core.next_deadline().into_iter().chain(own.census.due()).min();
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
                Some(change) = engines.recv() => own.facts.configs.engines(change),
                Some(change) = launchers.recv() => own.facts.configs.launchers(change),
                Some(change) = policies.recv() => own.facts.configs.policies(change),
                Some(heard) = own.ears.heard.recv() => own.heard(&heard),
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
        self.proofs.forget();
        self.tasks = JoinSet::new();
        self.notes = Notes::default();
        self.waits.forget();
        self.tidings.forget();
        self.census.close();
        self.ears.close();
        self.ports = Ports::default();
        self.core = Pairing::new(self.hands.settings.core);
        self.directory.catch_up(&self.facts);
        if let Some(epoch) = epoch {
            self.directory.await_lists();
            let (listed, awaited) = (Arc::clone(&self.listed), self.awaited.clone());
            self.tasks.spawn(async move { Finished::Listed(epoch, list(&listed, &awaited).await) });
        }
    }

    fn listed(&mut self, epoch: u64, all: Vec<Change<Pod>>) {
        self.directory.list(all, &self.facts);
        self.epoch = Some(epoch);
        self.tell(vec![Event::Led { epoch: Epoch(epoch) }]);
        self.facts.forget_told();
        self.tell_facts();
        self.tell(vec![Event::Listed]);
        self.waits.listed();
        let sight = Sight { directory: &self.directory, facts: &self.facts, now: self.hands.clock.now() };
        self.census.begin(sight);
        self.measure(Duration::ZERO);
    }

    fn decide(&mut self) {
        if self.facts.are_complete()
            && let Some((epoch, all)) = self.came.take()
        {
            self.listed(epoch, all);
        }
        let Some(epoch) = self.epoch else { return };
        self.tell_facts();
        let Hands { settings, metrics, .. } = &*self.hands;
        self.ears.listen(&self.directory, Epoch(epoch), &settings.key, metrics);
        let now = self.hands.clock.now();
        self.census.look_at_due(Sight { directory: &self.directory, facts: &self.facts, now });
        let mut plan = self.core.plan(now);
        self.core.issued(&plan, now);
        if !plan.looked.is_empty() {
            let core = &self.core;
            let lives = |(node, engine): &proof::Place| {
                core.node(node).is_some_and(|node| node.engines.contains_key(engine))
            };
            self.ordered.retain(|place, _| lives(place));
            self.proofs.retain(lives);
            self.facts.forget_unused(&self.core);
        }
        for command in plan.commands {
            let job = self.job(command);
            if let Some(own) = &job.requester {
                self.waits.ordered(&own.id, &job.command.order);
            }
            let hands = Arc::clone(&self.hands);
            self.tasks.spawn(async move {
                let notices = tidings::once_done(&job);
                let done = Box::pin(hands.carry_out(job)).await;
                let notices = if done.is_well() { notices } else { Vec::new() };
                Finished::Order(Box::new((done, notices)))
            });
        }
        for ((node, requester), why) in &mut plan.reasons {
            for more in
                [self.notes.error_of(requester), self.trouble_of(node, requester)].into_iter().flatten()
            {
                *why = format!("{why}; {more}");
            }
        }
        self.tidings.wait(&plan.looked, &plan.reasons, &mut self.tasks);
        for ((node, requester), why) in plan.reasons {
            tracing::debug!(%requester, why, "a requester waits");
            let known = self.core.node(&node).filter(|known| known.engine_of(&requester).is_none());
            let waiting = known.and_then(|known| known.requesters.get(&requester));
            if let (Some(waiting), Some(own)) = (waiting, self.directory.requester(&requester)) {
                self.notes.waits(own, &waiting.accelerators, &self.hands, &mut self.tasks);
                if waiting.accelerators.is_empty() {
                    self.notes.unheard(own, waiting.retry.failures);
                }
            }
        }
        self.notes.write(&self.directory, &self.facts, &self.hands, &self.tidings, &mut self.tasks);
    }

    /// What the kubelet says of the provider that failed this requester last: its own, or the launcher where it is.
    fn trouble_of(&self, node: &NodeName, requester: &RequesterId) -> Option<&str> {
        let known = self.core.node(node)?;
        let own = known.requesters.get(requester)?;
        let crashed =
            own.accelerators.iter().filter_map(|on| known.accelerators.get(on)).any(|on| on.crashes > 0);
        if own.failures == 0 && !crashed {
            return None;
        }
        self.directory.trouble(node, &own.accelerators)
    }
}

/// Every Pod there is that may be seen. An API server that does not answer is asked again.
async fn list(all: &[Watched<Pod>], awaited: &Awaited) -> Vec<Change<Pod>> {
    let mut found = Vec::new();
    for watched in all {
        loop {
            match watched::list(watched).await {
                Ok(change) => break found.push(change),
                Err(_) if watched.namespace.as_ref().is_some_and(|within| awaited.is_left_out(within)) => {
                    break;
                }
                Err(error) => {
                    tracing::warn!(%error, "Pods were not listed; they are asked for again");
                    time::sleep(AGAIN).await;
                }
            }
        }
    }
    found
}

/// How many there are of each kind: one for each namespace.
fn lists(all: &[Watched<Pod>]) -> usize {
    all.iter().map(|watched| &watched.namespace).collect::<BTreeSet<_>>().len()
}

async fn until(due: Option<Tick>, clock: Clock) {
    match due {
        Some(due) => time::sleep(due.since(clock.now()).duration()).await,
        None => std::future::pending().await,
    }
}
