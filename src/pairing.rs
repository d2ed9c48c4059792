//! Dual pods: which requester gets which engine, and what is done to engines and Pods for it.
//!
//! A *requester* is the Pod that a user asks with; the kubelet gives it accelerators, and it holds a stub. The engine runs in a
//! *provider*, which has no accelerators of its own and uses those of the requester. When the requester goes, the engine falls
//! asleep and stays; the next requester with the same accelerators that asks for the same wakes it. Seed 1 describes three modes,
//! which differ in how an engine is made and ended ([`ids::Mode`]); everything else is common to them.
//!
//! Nothing holds an accelerator that the kubelet wants to hand on: no finalizer, no stub. So the guarantee is in the ledger.
//! Every engine that is known has a *reservation* on each of its accelerators. None is launched or woken unless its own fits
//! beside all others there, whoever the kubelet says has the accelerator; and a reservation shrinks only when its engine is
//! confirmed asleep or seen gone: what is left of a Pod whose object vanished is a matter of its own ([`remains`]).
//!
//! ```text
//!   watches, meters, outcomes ─▶ Pairing::on(event, now)
//!                                Pairing::plan(now) ──▶ commands ──▶ Pods, stubs, launchers
//!                                Pairing::issued(commands, now)           │
//!            ▲                   Pairing::next_deadline()                 │
//!            └──────────────── outcomes come back as events ◀─────────────┘
//! ```
//!
//! Every node is decided by itself, and a plan looks only at nodes of which something was seen, or where a deadline has passed.
//! The truth is in the Pods: what is bound is written on the provider before anything is launched or woken, and taken off after it
//! is asleep. So an engine found unbound after a restart sleeps or is idle, and one found bound may be anything: until it has
//! been asked it counts as awake.

pub mod command;
pub mod cover;
pub mod event;
pub mod ids;
pub mod node;
pub mod remains;
pub mod settings;

mod apply;
mod check;
mod deadlines;
mod decide;
mod observe;
mod outcome;
mod places;
mod room;
mod serve;
mod steps;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use apply::Rules;
use command::Command;
use decide::Draft;
use event::{Epoch, Event, Standing, Terms};
use ids::{Build, Fingerprint, NodeName, RequesterId};
use node::Node;
use settings::Settings;

use crate::units::{Generation, Tick};

/// Everything that is decided about dual pods. Pure: the same events at the same moments give the same commands. A clone shares
/// the nodes, until one of the two changes them.
#[derive(Clone, Debug, Default)]
pub struct Pairing {
    settings: Settings,
    epoch: Epoch,
    listed: bool,
    /// Another one leads: nothing is decided, and nothing is taken note of.
    deposed: bool,
    standings: BTreeMap<Fingerprint, Standing>,
    builds: BTreeMap<Build, Terms>,
    nodes: BTreeMap<NodeName, Arc<Node>>,
    /// Of these something was seen since they were last planned.
    touched: BTreeSet<NodeName>,
    /// The next deadline of each node that has one, by time and by node.
    due: BTreeSet<(Tick, NodeName)>,
    due_of: BTreeMap<NodeName, Tick>,
    serial: u64,
    generation: Generation,
}

/// What to do now.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub commands: Vec<Command>,
    /// Why there is no engine yet that serves a requester, of the nodes that were looked at.
    pub reasons: BTreeMap<(NodeName, RequesterId), String>,
    /// The nodes that were looked at.
    pub looked: Vec<NodeName>,
}

impl Pairing {
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// Takes note of an observation. Decides nothing.
    pub fn on(&mut self, event: &Event, now: Tick) {
        if !self.deposed || matches!(event, Event::Led { .. }) {
            self.observe(event, now);
        }
    }

    /// What should be done at this moment. Changes nothing: call [`Self::issued`] with the plan, then carry it out.
    #[must_use]
    pub fn plan(&self, now: Tick) -> Plan {
        if !self.decides() {
            return Plan::default();
        }
        let due = self.due.iter().take_while(|(at, _)| *at <= now).map(|(_, node)| node.clone());
        self.plan_for(due.chain(self.touched.iter().cloned()).collect(), now)
    }

    /// As [`Self::plan`], with a look at every node: for tests, which want to see that nothing was overlooked.
    #[must_use]
    pub fn plan_everywhere(&self, now: Tick) -> Plan {
        if self.decides() {
            self.plan_for(self.nodes.keys().cloned().collect(), now)
        } else {
            Plan::default()
        }
    }

    const fn decides(&self) -> bool {
        self.listed && !self.deposed
    }

    fn plan_for(&self, names: BTreeSet<NodeName>, now: Tick) -> Plan {
        let mut plan = Plan::default();
        let (mut serial, mut generation) = (self.serial, self.generation);
        for name in names {
            plan.looked.push(name.clone());
            let Some(node) = self.nodes.get(&name) else { continue };
            let mut draft = Draft {
                node: Node::clone(node),
                rules: Rules {
                    settings: &self.settings,
                    standings: &self.standings,
                    builds: &self.builds,
                    now,
                },
                epoch: self.epoch,
                serial,
                generation,
                commands: Vec::new(),
                reasons: BTreeMap::new(),
            };
            draft.node.bury_ended(&self.settings, now);
            draft.decide();
            (serial, generation) = (draft.serial, draft.generation);
            plan.commands.append(&mut draft.commands);
            let reasons = draft.reasons.into_iter().map(|(requester, why)| ((name.clone(), requester), why));
            plan.reasons.extend(reasons);
        }
        plan
    }

    /// Records a plan as given, before it is carried out. Planning again at the same moment yields nothing.
    pub fn issued(&mut self, plan: &Plan, now: Tick) {
        for name in &plan.looked {
            if let Some(node) = self.nodes.get_mut(name).filter(|node| !node.remains.is_empty()) {
                Arc::make_mut(node).bury_ended(&self.settings, now);
            }
        }
        let rules = Rules { settings: &self.settings, standings: &self.standings, builds: &self.builds, now };
        for command in &plan.commands {
            self.serial = self.serial.max(command.serial);
            if let command::Order::Engine { generation, .. } = &command.order {
                self.generation = self.generation.max(*generation);
            }
            if let Some(node) = self.nodes.get_mut(&command.node) {
                rules.apply(Arc::make_mut(node), command);
            }
        }
        for name in &plan.looked {
            self.touched.remove(name);
            let next = self.nodes.get(name).and_then(|node| deadlines::next(node, &self.settings, now));
            self.set_due(name, next);
            if self.nodes.get(name).is_none_or(|node| node.is_empty()) {
                self.nodes.remove(name);
                self.set_due(name, None);
            }
        }
    }

    /// The next moment at which planning may give something without an event in between.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        self.due.first().map(|(at, _)| *at)
    }

    #[must_use]
    pub fn node(&self, name: &NodeName) -> Option<&Node> {
        self.nodes.get(name).map(|node| &**node)
    }

    /// What is to become of engines with this fingerprint.
    #[must_use]
    pub fn standing(&self, fingerprint: Fingerprint) -> Standing {
        self.standings.get(&fingerprint).copied().unwrap_or(Standing::Current)
    }

    pub fn nodes(&self) -> impl Iterator<Item = &Node> {
        self.nodes.values().map(|node| &**node)
    }

    fn set_due(&mut self, name: &NodeName, next: Option<Tick>) {
        if let Some(before) = self.due_of.remove(name) {
            self.due.remove(&(before, name.clone()));
        }
        if let Some(next) = next {
            self.due.insert((next, name.clone()));
            self.due_of.insert(name.clone(), next);
        }
    }

    /// The node, which will be looked at.
    fn touch(&mut self, name: &NodeName) -> &mut Node {
        self.touched.insert(name.clone());
        let node = self.nodes.entry(name.clone()).or_insert_with(|| Arc::new(Node::new(name.clone())));
        Arc::make_mut(node)
    }
}
