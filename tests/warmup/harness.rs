//! A cluster with one Warmup whose Pods do what the test says. Commands take effect at once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use rouse::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
    warmup::{
        CommandError, ImageName, NodeItems, WarmPodName, WarmupCause, WarmupCommand, WarmupEvent, WarmupId,
        WarmupItem, WarmupLimits, WarmupNodeFacts, WarmupPod, WarmupPodState, WarmupProgress, WarmupReport,
        WarmupRequest, WarmupTargets, Warmups,
    },
};

pub(crate) const START: Tick = Tick(1_000_000_000);
pub(crate) const SET: &str = "00112233aabbccdd";

pub(crate) struct WarmupHarness {
    pub(crate) warmups: Warmups,
    pub(crate) now: Tick,
    pub(crate) id: WarmupId,
    pub(crate) request: WarmupRequest,
    pub(crate) targets: WarmupTargets,
    pub(crate) nodes: BTreeMap<NodeName, WarmupNodeFacts>,
    pub(crate) pods: BTreeMap<WarmPodName, WarmupPod>,
    pub(crate) stored: Arc<WarmupProgress>,
    pub(crate) report: Option<Arc<WarmupReport>>,
    /// Reports are stored at once.
    pub(crate) stores: bool,
    /// Deleted Pods stay for as long as the test wants.
    pub(crate) keeps_terminating: bool,
    pub(crate) is_deleted: bool,
}

pub(crate) fn image(name: &str) -> WarmupItem {
    WarmupItem::Image(name.into())
}

pub(crate) fn action() -> WarmupItem {
    WarmupItem::Action("a1".into())
}

pub(crate) fn items(images: &[&str], has_action: bool) -> Arc<NodeItems> {
    let images = images.iter().map(|name| ImageName::from(*name)).collect();
    Arc::new(NodeItems { images, action: has_action.then(|| "a1".into()) })
}

/// Targets that all should have the image `app:1`.
pub(crate) fn targets(names: &[&str]) -> WarmupTargets {
    let items = items(&["app:1"], false);
    WarmupTargets::Nodes(names.iter().map(|name| ((*name).into(), Arc::clone(&items))).collect())
}

pub(crate) fn ready() -> WarmupNodeFacts {
    WarmupNodeFacts { ready: true, ..WarmupNodeFacts::default() }
}

impl WarmupHarness {
    /// Nodes that are ready and should all have the image `app:1`.
    pub(crate) fn new(names: &[&str], limits: WarmupLimits) -> Self {
        Self::with_targets(names, targets(names), limits)
    }

    pub(crate) fn with_targets(names: &[&str], targets: WarmupTargets, limits: WarmupLimits) -> Self {
        let request = WarmupRequest {
            generation: 1,
            spec_hash: "generation 1".into(),
            created: START,
            paused: false,
            limits,
            keep_warm: false,
            set: SET.into(),
            tolerations: Vec::new(),
        };
        let mut harness = Self {
            warmups: Warmups::new(),
            now: START,
            id: "ns/w".into(),
            request,
            targets,
            nodes: names.iter().map(|name| ((*name).into(), ready())).collect(),
            pods: BTreeMap::new(),
            stored: Arc::default(),
            report: None,
            stores: true,
            keeps_terminating: false,
            is_deleted: false,
        };
        harness.restart();
        harness
    }

    pub(crate) fn send(&mut self, event: WarmupEvent) {
        self.warmups.on(event, self.now);
    }

    /// A new leader, which knows what is stored and what exists.
    pub(crate) fn restart(&mut self) {
        self.warmups = Warmups::new();
        self.send(WarmupEvent::LeadershipGained);
        self.send_warmup();
        self.send(WarmupEvent::Targets { id: self.id.clone(), targets: self.targets.clone() });
        for (name, facts) in self.nodes.clone() {
            self.send(WarmupEvent::Node { name, facts: Some(facts) });
        }
        for (name, pod) in self.pods.clone() {
            self.send(WarmupEvent::Pod { name, pod: Some(pod) });
        }
        self.send(WarmupEvent::Listed);
    }

    pub(crate) fn send_warmup(&mut self) {
        let (id, request) = (self.id.clone(), Arc::new(self.request.clone()));
        let stored = Arc::clone(&self.stored);
        self.send(WarmupEvent::Warmup { id, request, stored });
    }

    /// Edits the spec.
    pub(crate) fn edit(&mut self, edit: impl FnOnce(&mut WarmupRequest)) {
        edit(&mut self.request);
        self.change_spec();
        self.send_warmup();
    }

    /// Gives the spec another generation and hash, which the leader does not see yet.
    pub(crate) fn change_spec(&mut self) {
        self.request.generation += 1;
        self.request.spec_hash = format!("generation {}", self.request.generation).into();
    }

    pub(crate) fn set_targets(&mut self, targets: WarmupTargets) {
        self.targets = targets.clone();
        self.send(WarmupEvent::Targets { id: self.id.clone(), targets });
    }

    pub(crate) fn set_node(&mut self, name: &str, facts: Option<WarmupNodeFacts>) {
        match facts.clone() {
            Some(facts) => drop(self.nodes.insert(name.into(), facts)),
            None => drop(self.nodes.remove(name)),
        }
        self.send(WarmupEvent::Node { name: name.into(), facts });
    }

    pub(crate) fn edit_node(&mut self, name: &str, edit: impl FnOnce(&mut WarmupNodeFacts)) {
        let mut facts = self.nodes[name].clone();
        edit(&mut facts);
        self.set_node(name, Some(facts));
    }

    pub(crate) fn set_paused(&mut self, is_paused: bool) {
        self.request.paused = is_paused;
        self.request.generation += 1;
        self.send_warmup();
    }

    /// Plans once and lets the commands take effect.
    pub(crate) fn plan(&mut self) -> Vec<WarmupCommand> {
        let mut plan = self.warmups.plan(self.now);
        self.warmups.issued(&plan.commands, self.now);
        for command in &plan.commands {
            self.execute(command);
        }
        if let Some(report) = plan.reports.remove(&self.id) {
            self.report = Some(report);
            if self.stores {
                self.store();
            }
        }
        plan.commands
    }

    /// Writes the last report into the status.
    pub(crate) fn store(&mut self) {
        let progress = &self.report().progress;
        if *self.stored != *progress {
            self.stored = Arc::new(progress.clone());
            self.send_warmup();
        }
    }

    /// Plans until nothing is left to do at this moment. Returns all commands.
    pub(crate) fn settle(&mut self) -> Vec<WarmupCommand> {
        let mut all = Vec::new();
        for _ in 0..100 {
            let before = Arc::clone(&self.stored);
            let mut commands = self.plan();
            if commands.is_empty() && before == self.stored {
                return all;
            }
            all.append(&mut commands);
        }
        panic!("the plans do not end: {all:?}");
    }

    /// Lets time pass and plans at every deadline.
    pub(crate) fn pass(&mut self, seconds: u64) -> Vec<WarmupCommand> {
        let end = self.now + Millis::secs(seconds);
        let mut all = self.settle();
        while let Some(at) = self.warmups.next_deadline().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            all.append(&mut self.settle());
        }
        self.now = end;
        all.append(&mut self.settle());
        all
    }

    fn execute(&mut self, command: &WarmupCommand) {
        match command {
            WarmupCommand::CreatePod { id, node, item, generation, items_hash, attempt } => {
                let name = WarmPodName::from(format!("{node}/{item}/{generation}/{attempt}"));
                let pod = WarmupPod {
                    warmup: id.clone(),
                    node: node.clone(),
                    item: item.clone(),
                    generation: *generation,
                    items_hash: *items_hash,
                    attempt: *attempt,
                    created: self.now,
                    terminating: false,
                    state: WarmupPodState::Pending { cause: None },
                };
                assert!(!self.pods.contains_key(&name), "{name} exists");
                self.pods.insert(name.clone(), pod.clone());
                self.send(WarmupEvent::Executed(command.clone()));
                self.send(WarmupEvent::Pod { name, pod: Some(pod) });
            }
            WarmupCommand::DeletePod { name, .. } if self.keeps_terminating => {
                self.pods.get_mut(name).unwrap().terminating = true;
                let pod = Some(self.pods[name].clone());
                self.send(WarmupEvent::Pod { name: name.clone(), pod });
            }
            WarmupCommand::DeletePod { name, .. } => self.remove_pod(name),
            WarmupCommand::SetWarm { node, set } => {
                let set = set.clone();
                self.edit_node(node.as_str(), |facts| drop(facts.labels_warm.replace(set)));
            }
            WarmupCommand::RemoveWarm { node, set } => {
                let set = set.clone();
                self.edit_node(node.as_str(), |facts| facts.labels_warm.retain(|known| *known != set));
            }
            WarmupCommand::DeleteWarmup { id } => {
                self.is_deleted = true;
                self.send(WarmupEvent::WarmupDeleted(id.clone()));
            }
        }
    }

    /// Plans once. A quota refuses all commands.
    pub(crate) fn refuse(&mut self) -> Vec<WarmupCommand> {
        let commands = self.warmups.plan(self.now).commands;
        self.warmups.issued(&commands, self.now);
        for command in commands.clone() {
            let error = CommandError::Refused("exceeded quota: pods=0".to_owned());
            self.send(WarmupEvent::Failed { command, error });
        }
        commands
    }

    pub(crate) fn remove_pod(&mut self, name: &WarmPodName) {
        self.pods.remove(name).unwrap();
        self.send(WarmupEvent::Pod { name: name.clone(), pod: None });
    }

    /// The name of the unfinished Pod of this item on the node.
    pub(crate) fn pod_name(&self, node: &str, item: &WarmupItem) -> WarmPodName {
        let mut pods = self.pods.iter();
        let found =
            pods.find(|(_, pod)| pod.node.as_str() == node && pod.item == *item && pod.is_unfinished());
        found.unwrap_or_else(|| panic!("no Pod of {item} on {node}: {:?}", self.pods)).0.clone()
    }

    pub(crate) fn play(&mut self, node: &str, item: &WarmupItem, state: WarmupPodState) {
        let name = self.pod_name(node, item);
        let pod = self.pods.get_mut(&name).unwrap();
        pod.state = state;
        let pod = Some(pod.clone());
        self.send(WarmupEvent::Pod { name, pod });
    }

    /// The node has pulled the image `app:1`.
    pub(crate) fn pulled(&mut self, node: &str) {
        self.play(node, &image("app:1"), present(self.now));
    }

    /// A pull of `app:1` has failed.
    pub(crate) fn pull_fails(&mut self, node: &str, cause: WarmupCause) {
        self.play(node, &image("app:1"), WarmupPodState::Pending { cause: Some(cause) });
    }

    pub(crate) fn action_fails(&mut self, node: &str, exit_code: i32) {
        let cause = WarmupCause::ActionFailed { exit_code };
        self.play(node, &action(), WarmupPodState::Failed { cause, at: self.now });
    }

    pub(crate) fn report(&self) -> &WarmupReport {
        self.report.as_ref().unwrap()
    }

    /// Desired, succeeded, failed and active nodes.
    pub(crate) fn counts(&self) -> [u32; 4] {
        let report = self.report();
        [report.desired, report.succeeded, report.failed, report.active]
    }

    /// The cause that the report names for the node.
    pub(crate) fn cause(&self, node: &str) -> Option<WarmupCause> {
        let nodes = &self.report().nodes;
        nodes.iter().find(|listed| listed.node.as_str() == node).and_then(|listed| listed.cause.clone())
    }

    /// Nodes on which a Pod exists.
    pub(crate) fn nodes_with_pods(&self) -> BTreeSet<&str> {
        self.pods.values().map(|pod| pod.node.as_str()).collect()
    }
}

pub(crate) fn present(at: Tick) -> WarmupPodState {
    WarmupPodState::Present { digest: Some("sha256:1".to_owned()), note: None, at }
}

/// The nodes on which the commands create Pods.
pub(crate) fn created(commands: &[WarmupCommand]) -> Vec<&str> {
    let nodes = commands.iter().filter_map(|command| match command {
        WarmupCommand::CreatePod { node, .. } => Some(node.as_str()),
        _ => None,
    });
    nodes.collect()
}
