//! Dual pods: assigns engines to requesters, and orders the steps on engines and Pods.
//!
//! A *requester* is the Pod that requests an engine. The kubelet gives it accelerators, and it runs a stub. The engine
//! runs in a *provider*, which has no accelerators of its own and uses those of the requester. When the requester goes,
//! the engine falls asleep and stays. The next requester with the same accelerators that requests the same engine wakes
//! it. Seed 1 describes three modes, which differ in how an engine is created and stopped ([`ids::ProviderMode`]);
//! everything else is common to them.
//!
//! No finalizer and no stub can hold an accelerator that the kubelet wants to hand on, so the ledger carries the
//! guarantee. Every known engine has a *reservation* on each of its accelerators. An engine is launched or woken only
//! if its reservation fits beside all others there, whichever Pod the kubelet gives the accelerator to. A reservation
//! shrinks only when its engine is confirmed asleep or seen gone. Memory of a Pod whose object vanished is accounted
//! separately ([`vanished`]).
//!
//! ```text
//!   watches, meters, outcomes ─▶ Pairing::on(event, now)
//!                                Pairing::plan(now) ──▶ commands ──▶ Pods, stubs, launchers
//!                                Pairing::issued(commands, now)           │
//!            ▲                   Pairing::next_deadline()                 │
//!            └──────────────── outcomes come back as events ◀─────────────┘
//! ```
//!
//! With slots, several requesters share an accelerator and stay while their engines sleep. Then the gateway decides
//! which of these engines are awake ([`event::PairingEvent::Want`], [`EngineReport`]), and the same reservations hold.
//!
//! Every node is planned by itself. A plan covers only nodes with a new event or an expired deadline. The Pods hold the
//! truth: a binding is written on the provider before anything is launched or woken, and removed after the engine is
//! asleep and its requester leaves. So an engine found unbound after a restart is asleep or idle. An engine found bound
//! may be in any state and counts as awake until it has been queried.

pub mod command;
pub mod event;
pub mod eviction_set;
pub mod ids;
pub mod node;
pub mod settings;
pub mod vanished;

mod actuation;
mod assign;
mod assignment_queue;
mod check;
mod deadlines;
mod engine_steps;
mod fit;
mod launcher_capacity;
mod node_plan;
mod observe;
mod outcome;
mod plan_context;

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

pub use actuation::{EngineReport, EngineWant};
use command::PairingCommand;
use event::{LauncherBuildPolicy, LeaderEpoch, PairingEvent, TemplateStatus};
use ids::{EngineFingerprint, LauncherBuild, NodeName, RequesterId};
use node::PairingNode;
use node_plan::NodePlanBuilder;
use plan_context::PlanContext;
use settings::PairingSettings;

use crate::{
    due_times::DueTimes,
    units::{Generation, Tick},
};

/// Decides everything about dual pods. Pure: the same events at the same moments give the same commands. A clone shares
/// the nodes until either of the two changes them.
#[derive(Clone, Debug, Default)]
pub struct Pairing {
    settings: PairingSettings,
    epoch: LeaderEpoch,
    listed: bool,
    /// A newer leader exists: plans nothing and ignores events until [`PairingEvent::LeadershipGained`].
    superseded: bool,
    template_statuses: BTreeMap<EngineFingerprint, TemplateStatus>,
    build_policies: BTreeMap<LauncherBuild, LauncherBuildPolicy>,
    nodes: BTreeMap<NodeName, Arc<PairingNode>>,
    /// Nodes with events since they were last planned.
    dirty: BTreeSet<NodeName>,
    /// The next deadline of each node that has one.
    due: DueTimes<NodeName>,
    serial: u64,
    generation: Generation,
}

/// The commands to execute now.
#[derive(Clone, Debug, Default)]
pub struct PairingPlan {
    pub commands: Vec<PairingCommand>,
    /// Why a requester has no engine that serves it yet, for the nodes in this plan.
    pub reasons: BTreeMap<(NodeName, RequesterId), String>,
    /// The nodes that this plan covers.
    pub planned_nodes: Vec<NodeName>,
}

impl Pairing {
    #[must_use]
    pub fn new(settings: PairingSettings) -> Self {
        Self { settings, ..Self::default() }
    }

    /// Records an observation. Decides nothing.
    pub fn on(&mut self, event: &PairingEvent, now: Tick) {
        if !self.superseded || matches!(event, PairingEvent::LeadershipGained { .. }) {
            self.observe(event, now);
        }
    }

    /// Plans the commands for this moment. Changes nothing: pass the plan to [`Self::issued`], then execute it.
    #[must_use]
    pub fn plan(&self, now: Tick) -> PairingPlan {
        if !self.is_active() {
            return PairingPlan::default();
        }
        self.plan_for(self.due.due_by(now).chain(&self.dirty).cloned().collect(), now)
    }

    /// Plans as [`Self::plan`] does, but for every node. Tests use it to prove that no node was missed.
    #[must_use]
    pub fn plan_everywhere(&self, now: Tick) -> PairingPlan {
        if self.is_active() {
            self.plan_for(self.nodes.keys().cloned().collect(), now)
        } else {
            PairingPlan::default()
        }
    }

    const fn is_active(&self) -> bool {
        self.listed && !self.superseded
    }

    fn plan_for(&self, names: BTreeSet<NodeName>, now: Tick) -> PairingPlan {
        let mut plan = PairingPlan::default();
        let (mut serial, mut generation) = (self.serial, self.generation);
        for name in names {
            plan.planned_nodes.push(name.clone());
            let Some(node) = self.nodes.get(&name) else { continue };
            let mut builder = NodePlanBuilder {
                node: Cow::Borrowed(node.as_ref()),
                context: PlanContext {
                    settings: &self.settings,
                    template_statuses: &self.template_statuses,
                    build_policies: &self.build_policies,
                    now,
                },
                epoch: self.epoch,
                serial,
                generation,
                commands: Vec::new(),
                reasons: BTreeMap::new(),
            };
            if !builder.node.vanished.is_empty() {
                builder.node.to_mut().release_expired(&self.settings, now);
            }
            builder.decide();
            (serial, generation) = (builder.serial, builder.generation);
            plan.commands.append(&mut builder.commands);
            let reasons =
                builder.reasons.into_iter().map(|(requester, reason)| ((name.clone(), requester), reason));
            plan.reasons.extend(reasons);
        }
        plan
    }

    /// Records a plan as issued, before it is executed. Planning again at the same moment yields nothing.
    pub fn issued(&mut self, plan: &PairingPlan, now: Tick) {
        for name in &plan.planned_nodes {
            if let Some(node) = self.nodes.get_mut(name).filter(|node| !node.vanished.is_empty()) {
                Arc::make_mut(node).release_expired(&self.settings, now);
            }
        }
        let rules = PlanContext {
            settings: &self.settings,
            template_statuses: &self.template_statuses,
            build_policies: &self.build_policies,
            now,
        };
        for command in &plan.commands {
            self.serial = self.serial.max(command.serial);
            if let command::PairingAction::Engine { generation, .. } = &command.action {
                self.generation = self.generation.max(*generation);
            }
            if let Some(node) = self.nodes.get_mut(&command.node) {
                rules.apply(Arc::make_mut(node), command);
            }
        }
        for name in &plan.planned_nodes {
            self.dirty.remove(name);
            let next = self.nodes.get(name).and_then(|node| deadlines::next(node, &self.settings, now));
            self.due.set(name, next);
            if self.nodes.get(name).is_none_or(|node| node.is_empty()) {
                self.nodes.remove(name);
                self.due.set(name, None);
            }
        }
    }

    /// The next moment at which planning may yield commands without an event in between.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        self.due.first()
    }

    #[must_use]
    pub fn node(&self, name: &NodeName) -> Option<&PairingNode> {
        self.nodes.get(name).map(|node| &**node)
    }

    /// The status of the template with this fingerprint; `Current` unless an event set another.
    #[must_use]
    pub fn template_status(&self, fingerprint: EngineFingerprint) -> TemplateStatus {
        self.template_statuses.get(&fingerprint).copied().unwrap_or(TemplateStatus::Current)
    }

    pub fn nodes(&self) -> impl Iterator<Item = &PairingNode> {
        self.nodes.values().map(|node| &**node)
    }

    /// Returns the node after marking it for the next plan. Creates an unknown node.
    fn mark_dirty(&mut self, name: &NodeName) -> &mut PairingNode {
        self.dirty.insert(name.clone());
        let node = self.nodes.entry(name.clone()).or_insert_with(|| Arc::new(PairingNode::new(name.clone())));
        Arc::make_mut(node)
    }
}
