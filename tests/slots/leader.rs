//! The leader's decisions, with an API server whose objects have versions.

use std::collections::{BTreeMap, BTreeSet};

use rouse::{
    pairing::ids::{NodeName, Uid},
    slots::{
        ConfigurationFacts, ConfigurationName, InstanceFacts, InstanceName, InstanceUsage, NodeState,
        RejectedPod, SlotsCommand, SlotsController, SlotsEvent, SlotsSettings,
    },
    units::{Millis, Tick},
};

use crate::harness::START;

/// The instances that the kubelet of each node offers, unless a test says otherwise.
const OFFERED: [&str; 3] = ["cam-1", "cam-2", "cam-3"];

/// Instances of the configuration `cams`, nodes and rejected Pods.
pub(crate) struct LeaderHarness {
    pub(crate) controller: SlotsController,
    pub(crate) now: Tick,
    pub(crate) instances: BTreeMap<InstanceName, StoredInstance>,
    /// Capacity of the configuration, while it exists.
    capacity: Option<u32>,
    nodes: BTreeMap<NodeName, NodeState>,
    pub(crate) rejected: BTreeMap<Uid, RejectedPod>,
    version: u64,
}

pub(crate) struct StoredInstance {
    pub(crate) version: String,
    pub(crate) usage: InstanceUsage,
}

impl LeaderHarness {
    /// A leader that knows the configuration with this capacity and these nodes, which are ready.
    pub(crate) fn new(capacity: u32, nodes: &[&str]) -> Self {
        let mut harness = Self {
            controller: SlotsController::new(SlotsSettings::default()),
            now: START,
            instances: BTreeMap::new(),
            capacity: Some(capacity),
            nodes: nodes.iter().map(|node| ((*node).into(), offering(true, &OFFERED))).collect(),
            rejected: BTreeMap::new(),
            version: 0,
        };
        harness.change_leader();
        harness
    }

    pub(crate) fn send(&mut self, event: SlotsEvent) {
        self.controller.on(event, self.now);
    }

    /// The next leader finds what exists.
    pub(crate) fn change_leader(&mut self) {
        self.controller = SlotsController::new(SlotsSettings::default());
        self.send(SlotsEvent::LeadershipGained);
        self.send_configuration();
        let names: Vec<InstanceName> = self.instances.keys().cloned().collect();
        names.iter().for_each(|name| self.send_instance(name));
        for (name, state) in self.nodes.clone() {
            self.send(SlotsEvent::Node { name, state: Some(state) });
        }
        for pod in self.rejected.values().cloned().collect::<Vec<_>>() {
            self.send(SlotsEvent::Rejected { pod });
        }
        self.send(SlotsEvent::Listed);
    }

    pub(crate) fn set_capacity(&mut self, capacity: Option<u32>) {
        self.capacity = capacity;
        self.send_configuration();
    }

    fn send_configuration(&mut self) {
        let facts = self.capacity.map(|capacity| ConfigurationFacts { capacity });
        self.send(SlotsEvent::Configuration { name: "cams".into(), facts });
    }

    /// Creates or changes an instance, as an agent does.
    pub(crate) fn set_instance(&mut self, name: &str, usage: InstanceUsage) {
        self.store(&name.into(), usage);
        self.send_instance(&name.into());
    }

    pub(crate) fn edit_instance(&mut self, name: &str, edit: impl FnOnce(&mut InstanceUsage)) {
        let mut usage = self.usage(name).clone();
        edit(&mut usage);
        self.set_instance(name, usage);
    }

    pub(crate) fn usage(&self, name: &str) -> &InstanceUsage {
        &self.instances[name].usage
    }

    fn store(&mut self, name: &InstanceName, usage: InstanceUsage) {
        self.version += 1;
        self.instances.insert(name.clone(), StoredInstance { version: self.version.to_string(), usage });
    }

    fn send_instance(&mut self, name: &InstanceName) {
        let observed = self.instances.get(name).map(|stored| {
            let configuration = ConfigurationName::from("cams");
            (InstanceFacts { configuration, version: stored.version.clone() }, stored.usage.clone())
        });
        self.send(SlotsEvent::Instance { name: name.clone(), observed });
    }

    /// The node is ready or not, or does not exist. Its agent is there.
    pub(crate) fn set_node(&mut self, name: &str, ready: Option<bool>) {
        self.set_state(name, ready.map(|ready| offering(ready, &OFFERED)));
    }

    /// The node is ready, and its kubelet offers these instances.
    pub(crate) fn set_offered(&mut self, name: &str, instances: &[&str]) {
        self.set_state(name, Some(offering(true, instances)));
    }

    fn set_state(&mut self, name: &str, state: Option<NodeState>) {
        match &state {
            Some(state) => self.nodes.insert(name.into(), state.clone()),
            None => self.nodes.remove(name),
        };
        self.send(SlotsEvent::Node { name: name.into(), state });
    }

    /// Pods on the node request these resources.
    pub(crate) fn set_requested(&mut self, node: &str, resources: &[&str]) {
        let requested: BTreeSet<String> = resources.iter().map(|resource| (*resource).to_owned()).collect();
        self.send(SlotsEvent::NodePods { node: node.into(), requested });
    }

    pub(crate) fn reject(&mut self, name: &str, owner: &str) {
        let pod = RejectedPod {
            namespace: "default".to_owned(),
            name: name.to_owned(),
            uid: name.into(),
            owner: owner.into(),
        };
        self.rejected.insert(pod.uid.clone(), pod.clone());
        self.send(SlotsEvent::Rejected { pod });
    }

    /// Plans once and issues the commands, without executing them.
    pub(crate) fn plan(&mut self) -> Vec<SlotsCommand> {
        let commands = self.controller.plan(self.now);
        assert_eq!(self.controller.plan(self.now), commands, "what is not issued comes again");
        self.controller.issued(&commands, self.now);
        assert_eq!(self.controller.plan(self.now), [], "what is issued does not");
        commands
    }

    /// Plans and executes until nothing is left to do at this moment. Returns all commands.
    pub(crate) fn settle(&mut self) -> Vec<SlotsCommand> {
        let mut all = Vec::new();
        for _ in 0..100 {
            let commands = self.plan();
            if commands.is_empty() {
                return all;
            }
            commands.iter().for_each(|command| self.execute(command));
            all.extend(commands);
        }
        panic!("the plans do not end: {all:?}");
    }

    /// Lets time pass and plans at every deadline.
    pub(crate) fn pass(&mut self, span: Millis) -> Vec<SlotsCommand> {
        let end = self.now + span;
        let mut all = self.settle();
        while let Some(at) = self.controller.next_deadline().filter(|at| *at <= end) {
            assert!(at > self.now, "a deadline at {at} comes again and again");
            self.now = at;
            all.extend(self.settle());
        }
        self.now = end;
        all.extend(self.settle());
        all
    }

    /// Executes a command as the API server does: in the version on which it was decided, or not at all.
    pub(crate) fn execute(&mut self, command: &SlotsCommand) {
        let (instance, version) = match command {
            SlotsCommand::FreeNode { instance, version, .. }
            | SlotsCommand::SetLayout { instance, version, .. }
            | SlotsCommand::DeleteInstance { instance, version, .. } => (instance, version),
            SlotsCommand::DeletePod { pod } => {
                self.rejected.remove(&pod.uid).unwrap();
                self.send(SlotsEvent::Executed(command.clone()));
                return self.send(SlotsEvent::RejectedGone { uid: pod.uid.clone() });
            }
        };
        let current = self.instances.get(instance).filter(|stored| stored.version == *version);
        let Some(mut usage) = current.map(|stored| stored.usage.clone()) else {
            return self.fail(command, false);
        };
        match command {
            SlotsCommand::FreeNode { node, changes, .. } => {
                usage.apply(changes).unwrap();
                usage.nodes.remove(node);
                self.store(instance, usage);
            }
            SlotsCommand::SetLayout { changes, .. } => {
                usage.apply_layout(changes);
                self.store(instance, usage);
            }
            _ => drop(self.instances.remove(instance)),
        }
        self.send(SlotsEvent::Executed(command.clone()));
        self.send_instance(instance);
    }

    pub(crate) fn fail(&mut self, command: &SlotsCommand, is_refused: bool) {
        self.send(SlotsEvent::Failed { command: command.clone(), is_refused });
    }
}

fn offering(ready: bool, instances: &[&str]) -> NodeState {
    NodeState { ready, offered: instances.iter().map(|name| InstanceName::from(*name)).collect() }
}
