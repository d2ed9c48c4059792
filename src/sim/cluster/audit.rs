//! An independent audit that knows what every process really holds and judges the controller by it.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    SimulatedCluster,
    execute::CommandKey,
    pods::{PodProcess, PodProcessPhase, VanishedProcess},
};
use crate::{
    model::AcceleratorId,
    pairing::{
        PairingPlan,
        command::PairingCommand,
        event::{PairingEvent, WantedState},
        ids::{NodeName, PairingEngineId, ProviderId, ProviderMode, RequesterId, Uid},
        node::PairingEngineState,
        vanished::VanishedEngine,
    },
    units::{Bytes, Millis, Tick},
};

#[derive(Clone, Debug, Default)]
pub(super) struct ClusterAudit {
    pub(super) replies_to_drop: BTreeSet<CommandKey>,
    pub(super) in_flight: BTreeMap<CommandKey, PairingCommand>,
    /// The Pod that a call was sent to, and its restart count. A late call does not reach the next Pod or container.
    pub(super) target_containers: BTreeMap<CommandKey, (Uid, u32)>,
    /// When an engine last fell asleep on an accelerator.
    last_sleep: BTreeMap<(NodeName, AcceleratorId), Tick>,
    /// Since when the sleepers exceed their budget on an accelerator with an awake engine.
    over_budget_since: BTreeMap<(NodeName, AcceleratorId), Tick>,
    /// What the gateway wants, as far as the present leader has received it.
    pub(super) wants: BTreeMap<RequesterId, WantedState>,
    /// When the present leader began to lead.
    leader_since: Tick,
}

impl ClusterAudit {
    pub(super) fn record_sleep(&mut self, node: &NodeName, engine: &PairingEngineId, now: Tick) {
        for accelerator in engine.accelerators.iter() {
            self.last_sleep.insert((node.clone(), accelerator.clone()), now);
        }
    }

    /// Records what the present leader learns of the gateway's wants, and what it forgets.
    pub(super) fn record_want(&mut self, event: &PairingEvent) {
        match event {
            PairingEvent::LeadershipGained { .. } => self.wants.clear(),
            PairingEvent::Want { requester, wanted, .. } => {
                self.wants.insert(requester.clone(), *wanted);
            }
            PairingEvent::WantWithdrawn { requester, .. }
                if self.wants.get(requester) != Some(&WantedState::Awake) => {}
            PairingEvent::RequesterGone { requester, .. } | PairingEvent::WantWithdrawn { requester, .. } => {
                self.wants.remove(requester);
            }
            _ => {}
        }
    }

    /// Restarts the time limits for a new leader.
    pub(super) fn reset_for_leader(&mut self, now: Tick) {
        self.leader_since = now;
        self.over_budget_since.clear();
    }
}

impl SimulatedCluster {
    pub(super) fn all_accelerators(&self) -> Vec<(NodeName, AcceleratorId)> {
        let all = self.nodes.iter().flat_map(|(node, machine)| {
            machine.accelerators.keys().map(move |accelerator| (node.clone(), accelerator.clone()))
        });
        all.collect()
    }

    /// The memory really in use on an accelerator.
    pub(super) fn memory_in_use(&self, node: &NodeName, accelerator: &AcceleratorId) -> Bytes {
        let on = self
            .processes()
            .filter(|(at, engine, _)| *at == node && engine.accelerators.contains(accelerator));
        let vanished = self
            .vanished_processes
            .iter()
            .filter(|g| g.node == *node && g.engine.accelerators.contains(accelerator));
        on.map(|(.., process)| process.memory_held())
            .chain(vanished.map(|vanished| vanished.process.memory_held()))
            .sum()
    }

    pub(super) fn check_invariants(&mut self) {
        let mut broken = self.check_memory();
        if self.listed {
            broken.extend(self.check_reservations());
            broken.extend(self.check_hold_times());
            broken.extend(self.check_open_gates());
            self.check_budget(&mut broken);
        }
        self.violations.extend(broken);
    }

    pub(super) fn check_turn(&mut self, plan: &PairingPlan) {
        let again = self.pairing.plan_everywhere(self.now);
        if let Some(command) = again.commands.first() {
            let previous = plan.commands.iter().map(|c| c.action.to_string()).collect::<Vec<_>>();
            self.record_violation(format!(
                "planning again at the same moment gives {} after {previous:?}",
                command.action
            ));
        }
        self.check_evictions(plan);
        for broken in self.pairing.check() {
            self.record_violation(broken);
        }
        if let Some(at) = self.pairing.next_deadline().filter(|at| *at <= self.now) {
            self.record_violation(format!("the next deadline is {at}, which is not after {}", self.now));
        }
    }

    fn check_memory(&self) -> Vec<String> {
        let mut broken = Vec::new();
        let mut used: BTreeMap<(&NodeName, &AcceleratorId), Bytes> = BTreeMap::new();
        let mut host: BTreeMap<&NodeName, Bytes> = BTreeMap::new();
        let vanished = self.known_vanished_processes().map(|vanished_process| {
            (&vanished_process.node, &vanished_process.engine, &vanished_process.process)
        });
        for (node, engine, process) in self.processes().chain(vanished) {
            for accelerator in engine.accelerators.iter() {
                *used.entry((node, accelerator)).or_default() += process.memory_held();
            }
            *host.entry(node).or_default() += process.host_memory_held();
        }
        for ((node, accelerator), used) in used {
            let facts = self.nodes.get(node).and_then(|machine| machine.accelerators.get(accelerator));
            if facts.is_some_and(|facts| used > facts.capacity) {
                broken.push(format!("{used} are in use on {accelerator} of {node}"));
            }
        }
        for (node, used) in host {
            if self.nodes.get(node).is_some_and(|machine| used > machine.facts.host_sleep_memory) {
                broken.push(format!("sleepers hold {used} of the host RAM of {node}"));
            }
        }
        for ((node, id), provider) in &self.providers {
            let used = provider.processes.values().map(PodProcess::host_memory_held).sum::<Bytes>();
            if let Some(limit) = provider.memory_limit.filter(|limit| used > *limit) {
                broken.push(format!(
                    "sleepers hold {used} of host RAM in {id} of {node}, whose limit is {limit}"
                ));
            }
        }
        broken
    }

    /// Every process has a reservation for what it holds.
    fn check_reservations(&self) -> Vec<String> {
        let short = self.processes().filter_map(|(node, engine, process)| {
            let engine_record = self.pairing.node(node).and_then(|pairing_node| pairing_node.engines.get(engine));
            let reserved = engine_record.map_or(Bytes::ZERO, |engine_record| engine_record.reserved);
            (process.memory_held() > reserved).then(|| {
                let state =
                    engine_record.map_or_else(|| "unknown".to_owned(), |record| record.state.to_string());
                let (phase, holds) = (process.phase, process.memory_held());
                format!(
                    "{engine} on {node} is {phase:?} with {holds}, but {reserved} are reserved, and it is {state}"
                )
            })
        });
        short.chain(self.check_vanished_processes()).collect()
    }

    /// Memory of vanished Pods is reserved, too.
    fn check_vanished_processes(&self) -> impl Iterator<Item = String> {
        self.known_vanished_processes().filter_map(
            |VanishedProcess { node, engine, pod, process, .. }| {
                let pairing_node = self.pairing.node(node)?;
                let unseen = pairing_node.engines.get(engine).filter(|e| {
                    pairing_node
                        .providers
                        .get(&e.provider)
                        .is_some_and(|p| p.uid.as_ref().is_none_or(|uid| uid == pod))
                });
                let remains = || {
                    pairing_node
                        .vanished
                        .iter()
                        .find(|r| r.engine == *engine && (r.pod == *pod || r.pod.as_str().is_empty()))
                };
                let least = |r: &VanishedEngine| r.reserved.values().copied().min().unwrap_or_default();
                let reserved =
                    unseen.map(|e| e.reserved).or_else(|| remains().map(least)).unwrap_or_default();
                (process.memory_held() > reserved).then(|| {
                    format!(
                        "{engine} vanished on {node} with {}, but {reserved} are reserved",
                        process.memory_held()
                    )
                })
            },
        )
    }

    /// No requester is held longer than allowed.
    fn check_hold_times(&self) -> Vec<String> {
        // Allows 70 s more: failed calls are retried, and the watch may be broken for a while.
        let overdue = self.requesters.iter().filter(|(_, requester)| {
            let most = self.scenario.settings.max_hold(&requester.requested.sizes) + Millis::secs(70);
            let since = requester.deleting_since.map(|since| since.max(self.audit.leader_since));
            requester.finalizer && since.is_some_and(|since| since + most < self.now)
        });
        overdue.map(|(id, _)| format!("{id} is held for too long")).collect()
    }

    fn check_budget(&mut self, broken: &mut Vec<String>) {
        let settings = &self.scenario.settings;
        // A sleeper that its requester leaves during a launch beside it counts at once, and stays until the launch ends.
        let launch = if self.is_shared() { settings.start_timeout } else { Millis::ZERO };
        let meter_lag = settings.meter_lag;
        let (now, over) = (self.now, self.accelerators_over_budget());
        let settles = |slept: &Tick| *slept + meter_lag > now;
        let over: BTreeSet<_> =
            over.into_iter().filter(|at| !self.audit.last_sleep.get(at).is_some_and(settles)).collect();
        self.audit.over_budget_since.retain(|at, _| over.contains(at));
        for (node, accelerator) in over {
            let message = format!("the sleepers of {accelerator} of {node} are over their budget");
            let since = *self.audit.over_budget_since.entry((node, accelerator)).or_insert(now);
            // A new leader counts its sleepers from its start, and a watch may be broken.
            if since + meter_lag + launch + Millis::secs(30) < now {
                broken.push(format!("{message} since {since}"));
            }
        }
    }

    /// Accelerators with an awake engine where the sleepers that are not being stopped exceed the budget.
    fn accelerators_over_budget(&self) -> Vec<(NodeName, AcceleratorId)> {
        // Whether an engine is awake there, and what the sleepers hold.
        let mut usage: BTreeMap<(&NodeName, &AcceleratorId), (bool, Bytes)> = BTreeMap::new();
        for (node, engine, process) in self.processes() {
            let is_awake = process.has_full_memory();
            if !is_awake && !self.is_staying_sleeper(node, engine) {
                continue;
            }
            for accelerator in engine.accelerators.iter() {
                let (some_awake, sleepers) = usage.entry((node, accelerator)).or_default();
                *some_awake |= is_awake;
                *sleepers += if is_awake { Bytes::ZERO } else { process.memory_held() };
            }
        }
        let exceeds = |(at, (some_awake, sleepers)): ((&NodeName, &AcceleratorId), (bool, Bytes))| {
            let (node, accelerator) = at;
            let facts = self.nodes.get(node).and_then(|machine| machine.accelerators.get(accelerator))?;
            let is_over = some_awake && sleepers > facts.sleeping_memory?;
            is_over.then(|| (node.clone(), accelerator.clone()))
        };
        usage.into_iter().filter_map(exceeds).collect()
    }

    /// Whether the controller knows this engine as asleep and unbound, and so counts it against the budget.
    fn is_staying_sleeper(&self, node: &NodeName, engine: &PairingEngineId) -> bool {
        let engine_record = self.pairing.node(node).and_then(|pairing_node| pairing_node.engines.get(engine));
        engine_record.is_some_and(|engine_record| {
            matches!(engine_record.state, PairingEngineState::Asleep { .. })
                && engine_record.binding.is_none()
        })
    }

    /// An open gate points to an engine that is awake, or was when it died.
    fn check_open_gates(&self) -> Vec<String> {
        let open = self.requesters.iter().filter_map(|(id, requester)| {
            let (engine, pod) = requester.stub.as_ref()?.open_to.as_ref()?;
            let phase =
                self.providers.values().find(|provider| provider.uid == *pod)?.processes.get(engine)?.phase;
            (phase != PodProcessPhase::Awake)
                .then(|| format!("the gate of {id} is open to {engine}, which is {phase:?}"))
        });
        open.collect()
    }

    /// No engine is put to sleep behind an open gate.
    pub(super) fn check_gate_before_sleep(&mut self, command: &PairingCommand, engine: &PairingEngineId) {
        let open = self.requesters.iter().find(|(_, requester)| {
            let stub = requester.stub.as_ref().filter(|_| requester.node == command.node);
            stub.and_then(|stub| stub.open_to.as_ref()).is_some_and(|(open, _)| open == engine)
        });
        if let Some((id, _)) = open {
            let message = format!("{engine} is put to sleep behind the open gate of {id}");
            self.record_violation(message);
        }
    }

    /// The cluster has come to rest: every wanted requester exists and is served, unless it is too large.
    pub(super) fn check_quiescent(&mut self) {
        let mut broken = Vec::new();
        for (id, requester) in &self.requesters {
            if requester.deleting_since.is_some() || requester.terminated {
                broken.push(format!("{id} still exists"));
                continue;
            }
            let node = self.pairing.node(&requester.node);
            let engine = node.and_then(|node| node.engine_of(id));
            let container = requester.stub.as_ref().map(|stub| &stub.container);
            let serves = engine
                .is_some_and(|e| e.state == PairingEngineState::Awake && e.opened_stub.as_ref() == container);
            if matches!(requester.wanted, Some(WantedState::Asleep { .. })) {
                if engine.is_some_and(|e| !e.awaits_want) {
                    broken.push(format!("the engine of {id} is not asleep"));
                }
                continue;
            }
            if !serves && !self.is_too_large(requester) {
                let reason = self.reason(&requester.node, id).unwrap_or("no reason given").to_owned();
                broken.push(format!("{id} is not served: {reason}"));
            }
        }
        for ((node, provider), pod) in &self.providers {
            if pod.deleting {
                broken.push(format!("{provider} of {node} still exists"));
            }
            if provider.is_launcher() && !self.is_launcher_needed(node, provider) {
                broken.push(format!("no engine needs {provider} of {node}"));
            }
        }
        broken.extend(self.check_builds());
        self.violations.extend(broken);
    }

    /// Whether policy, an engine in the launcher, or a requester needs the launcher.
    fn is_launcher_needed(&self, node: &NodeName, launcher: &ProviderId) -> bool {
        let Some(pairing_node) = self.pairing.node(node) else { return false };
        let mut waiting = pairing_node
            .requesters
            .values()
            .filter(|r| r.stays() && r.observed.requested.mode == ProviderMode::Launcher);
        let mut accelerators = launcher.accelerators.iter().filter_map(|a| pairing_node.accelerators.get(a));
        accelerators.any(|accelerator| accelerator.facts.wants_launcher)
            || pairing_node.engines_in(launcher).next().is_some()
            || waiting.any(|r| pairing_node.provider_for(&pairing_node.requested_engine_id(r)) == *launcher)
    }

    fn is_too_large(&self, requester: &super::SimulatedRequester) -> bool {
        let accelerator_facts = |a: &AcceleratorId| self.nodes.get(&requester.node)?.accelerators.get(a);
        let small = |a: &AcceleratorId| {
            let beside = self.bound_sleepers_on(&requester.node, a, requester.requested.fingerprint);
            let needed = requester.requested.sizes.awake + beside;
            accelerator_facts(a).is_none_or(|facts| facts.capacity < needed)
        };
        requester.accelerators.iter().any(small)
    }

    /// Why this requester is not served, according to the last plan.
    #[must_use]
    pub fn reason(&self, node: &NodeName, requester: &RequesterId) -> Option<&str> {
        self.reasons.get(&(node.clone(), requester.clone())).map(String::as_str)
    }
}
