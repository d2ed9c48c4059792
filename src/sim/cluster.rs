//! A simulated cluster with the real [`Pairing`] in it.
//!
//! Pods and nodes; a kubelet that hands an accelerator on as soon as a Pod has ended, whoever still holds memory there; owners
//! that make a new requester for each one that goes; stubs, launchers and engines that take their time, fail, hang, or do what they
//! were told and lose the answer; a watch that is late or breaks off; a meter that lags; nodes that are cordoned, cut off or lost;
//! and a controller that is replaced by another while its last calls are still under way.
//!
//! After each step a second bookkeeper looks (`books`), who knows what every process really holds.

mod books;
mod builds;
mod chance;
mod evictions;
mod execute;
mod kubelet;
mod pods;
mod scripts;
mod trouble;
mod watch;

use std::collections::{BTreeMap, BTreeSet};

pub use chance::{Owner, Plot, Troubles};
use pods::{Ghost, Machine, Provider, ProviderKey, Requester};
pub use scripts::{Deed, Script};
pub use trouble::Trouble;

use super::{agenda::Agenda, random::Random};
use crate::{
    pairing::{
        Pairing, Plan,
        command::Command,
        event::{Epoch, Event, Standing},
        ids::{EngineId, Fingerprint, NodeName, ProviderId, RequesterId, Uid},
    },
    units::{Generation, Millis, Tick},
};

/// The cluster, its controller, and what is noted about both.
#[derive(Clone, Debug)]
pub struct Cluster {
    plot: Plot,
    now: Tick,
    random: Random,
    machines: BTreeMap<NodeName, Machine>,
    requesters: BTreeMap<RequesterId, Requester>,
    providers: BTreeMap<ProviderKey, Provider>,
    ghosts: Vec<Ghost>,
    /// Pods whose objects went before their containers had ended.
    vanished: BTreeSet<Uid>,
    agenda: Agenda<Happening>,
    made: u64,

    // The controller
    pairing: Pairing,
    epoch: Epoch,
    /// The one before, which was only paused and thinks that it still leads; and its epoch.
    paused: Option<(Epoch, Pairing)>,
    /// It has been told of everything that is there.
    listed: bool,
    reasons: BTreeMap<(NodeName, RequesterId), String>,
    watch: watch::Watch,
    /// What has been said of templates, which every leader is told.
    standings: BTreeMap<Fingerprint, Standing>,
    /// How often each LauncherConfig has been edited.
    editions: Vec<u64>,

    calm: bool,
    books: books::Books,
    violations: Vec<String>,
    tally: BTreeMap<&'static str, u64>,
    story: Option<Vec<String>>,
}

#[derive(Clone, Debug)]
enum Happening {
    /// The watch delivers, to the controller of this epoch.
    Deliver(Epoch, Event),
    /// A command reaches whom it is for.
    Arrive(Command),
    /// What a command started is over.
    Finish(Command),
    StubStarts(RequesterId),
    StubEnds(RequesterId),
    PodRuns(ProviderKey, Uid),
    PodIsReady(ProviderKey, Uid),
    PodEnds(ProviderKey, Uid),
    GhostEnds(u64),
    /// The control plane notices that a node's kubelet is silent, if it still is.
    Silent(NodeName),
    Loaded(ProviderKey, EngineId, Generation),
    /// The owner with this number looks whether its requester is there.
    Own(usize),
    /// The owner with this number wants a requester, or no longer.
    Toggle(usize),
    Meter,
    Relist,
    Lead,
    /// The leader before goes on where it was paused.
    Continue,
    Heal(NodeName),
    Sweep(NodeName),
    Trouble,
    Deed(Deed),
}

/// A broken promise.
#[derive(Clone, Debug)]
pub struct Broken {
    pub seed: u64,
    pub at: Tick,
    pub messages: Vec<String>,
}

impl Cluster {
    #[must_use]
    pub fn new(plot: Plot) -> Self {
        let start = Tick(1_000_000_000);
        let mut cluster = Self {
            now: start,
            random: Random::new(plot.seed ^ 0xd0a1_90d5),
            machines: plot.machines(),
            requesters: BTreeMap::new(),
            providers: BTreeMap::new(),
            ghosts: Vec::new(),
            vanished: BTreeSet::new(),
            agenda: Agenda::default(),
            made: 0,
            pairing: Pairing::new(plot.settings),
            epoch: Epoch(1),
            paused: None,
            listed: false,
            reasons: BTreeMap::new(),
            watch: watch::Watch::default(),
            standings: BTreeMap::new(),
            editions: vec![0; plot.launchers_hold.len()],
            calm: false,
            books: books::Books::default(),
            violations: Vec::new(),
            tally: BTreeMap::new(),
            story: None,
            plot,
        };
        cluster.begin();
        cluster
    }

    /// Keeps a story of what is told and ordered: call it before the first step.
    #[must_use]
    pub fn told(mut self) -> Self {
        self.story = Some(Vec::new());
        self
    }

    #[must_use]
    pub fn story(&self) -> String {
        self.story.as_deref().unwrap_or_default().join("\n")
    }

    #[must_use]
    pub const fn tally(&self) -> &BTreeMap<&'static str, u64> {
        &self.tally
    }

    #[must_use]
    pub const fn pairing(&self) -> &Pairing {
        &self.pairing
    }

    #[must_use]
    pub const fn now(&self) -> Tick {
        self.now
    }

    /// Runs for so long with all its troubles, then without, until everything has come to rest.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn run(&mut self, lasts: Millis) -> Result<(), Broken> {
        self.run_until(self.now + lasts)?;
        self.calm_down();
        self.run_until(self.now + self.plot.rest())?;
        self.check_rest();
        self.verdict()
    }

    /// # Errors
    /// The first broken promise.
    pub fn run_until(&mut self, end: Tick) -> Result<(), Broken> {
        while let Some(next) = self.next_moment().filter(|next| *next <= end) {
            self.now = next.max(self.now);
            let mut told = false;
            while let Some(happening) = self.agenda.pop_due(self.now) {
                told |= self.happen(happening);
            }
            if told || self.pairing.next_deadline().is_some_and(|at| at <= self.now) {
                self.turn();
            }
            self.check();
            self.verdict()?;
        }
        self.now = end;
        Ok(())
    }

    fn verdict(&mut self) -> Result<(), Broken> {
        if self.violations.is_empty() {
            return Ok(());
        }
        Err(Broken { seed: self.plot.seed, at: self.now, messages: std::mem::take(&mut self.violations) })
    }

    fn next_moment(&self) -> Option<Tick> {
        let deadline = self.pairing.next_deadline().filter(|_| self.listed);
        self.agenda.next_at().into_iter().chain(deadline).min()
    }

    /// One turn of the controller.
    fn turn(&mut self) {
        let plan = self.pairing.plan(self.now);
        self.pairing.issued(&plan, self.now);
        self.check_turn(&plan);
        let Plan { commands, reasons, looked } = plan;
        self.reasons.retain(|(node, _), _| !looked.contains(node));
        self.reasons.extend(reasons);
        for command in commands {
            self.narrate(|| format!("  {}: {}", command.node, command.order));
            self.send(command);
        }
    }

    fn happen(&mut self, happening: Happening) -> bool {
        match happening {
            Happening::Deliver(epoch, event) => return self.deliver(epoch, &event),
            Happening::Arrive(command) => self.arrive(command),
            Happening::Finish(command) => self.finish(command),
            Happening::StubStarts(requester) => self.stub_starts(&requester),
            Happening::StubEnds(requester) => self.stub_ends(&requester),
            Happening::PodRuns(key, uid) => self.pod_runs(&key, &uid),
            Happening::PodIsReady(key, uid) => self.pod_is_ready(&key, &uid),
            Happening::PodEnds(key, uid) => self.pod_ends(&key, &uid),
            Happening::GhostEnds(number) => self.ghost_ends(number),
            Happening::Silent(node) => self.show_silence(&node),
            Happening::Loaded(key, engine, generation) => self.loaded(&key, &engine, generation),
            Happening::Own(owner) => self.own(owner),
            Happening::Toggle(owner) => self.toggle(owner),
            Happening::Meter => self.read_meters(),
            Happening::Relist => self.relist(),
            Happening::Lead => self.lead(),
            Happening::Continue => self.continue_paused(),
            Happening::Heal(node) => self.heal(&node),
            Happening::Sweep(node) => self.sweep(&node),
            Happening::Trouble => self.trouble_by_chance(),
            Happening::Deed(deed) => self.deed(deed),
        }
        false
    }

    fn add(&mut self, after: Millis, happening: Happening) {
        self.agenda.add(self.now + after, happening);
    }

    fn uid(&mut self, what: &str) -> String {
        self.made += 1;
        format!("{what}-{}", self.made)
    }

    fn draw(&mut self, (low, high): (u64, u64)) -> Millis {
        Millis(self.random.between(low, high))
    }

    fn chance(&mut self, of: f64) -> bool {
        !self.calm && self.random.chance(of)
    }

    fn count(&mut self, what: &'static str) {
        *self.tally.entry(what).or_default() += 1;
    }

    fn narrate(&mut self, line: impl FnOnce() -> String) {
        let at = self.now;
        if let Some(story) = &mut self.story {
            story.push(format!("{at} {}", line()));
        }
    }

    fn violation(&mut self, message: String) {
        self.violations.push(message);
    }

    fn is_cut_off(&self, node: &NodeName) -> bool {
        self.machines.get(node).is_none_or(|machine| machine.cut_off)
    }

    fn key(node: &NodeName, provider: &ProviderId) -> ProviderKey {
        (node.clone(), provider.clone())
    }

    /// Everything that runs, with where it runs.
    fn processes(&self) -> impl Iterator<Item = (&NodeName, &EngineId, &pods::Process)> {
        self.providers.iter().flat_map(|((node, _), provider)| {
            provider.processes.iter().map(move |(engine, process)| (node, engine, process))
        })
    }

    /// What vanished Pods left running, as far as whoever leads can know of it.
    fn known_ghosts(&self) -> impl Iterator<Item = &Ghost> {
        self.ghosts.iter().filter(|ghost| ghost.seen_by == Some(self.epoch))
    }

    fn set_of_nodes(&self) -> BTreeSet<NodeName> {
        self.machines.keys().cloned().collect()
    }
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "seed {} breaks a promise at {}:", self.seed, self.at)?;
        for message in &self.messages {
            writeln!(f, "  {message}")?;
        }
        Ok(())
    }
}
