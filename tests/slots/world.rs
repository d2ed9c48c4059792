//! Agents that share devices through objects with test-and-replace, and see them late.
//!
//! Each step is followed by a check of what must always hold: a container that runs has its slot in the object, and no
//! other container has it.

use std::{
    collections::{BTreeMap, BTreeSet},
    slice,
};

use rouse::{
    pairing::ids::NodeName,
    slots::{
        ClaimKind, ConfigurationName, InstanceName, InstanceUsage, Reclaimer, SlotChange, SlotName,
        SlotUsage, VirtualId, instance_name, slot_number, virtual_devices,
    },
    units::{Millis, Tick},
};

use crate::harness::{Instances, START};

const UNUSED_AFTER: Millis = Millis::secs(300);
const ROUND: Millis = Millis::secs(10);
/// Time after which the kubelet reports the slots of a container.
const REPORTED_AFTER: Millis = Millis::secs(30);
/// Time for which no container has had a slot that is freed. An agent that has restarted marks a slot whose container
/// the kubelet does not report yet.
const MIN_UNUSED: Millis = Millis::secs(270);

/// One thing that happens. Nodes and containers are counted modulo those that there are.
#[derive(Clone, Debug)]
pub(crate) enum SharingStep {
    /// The node sees all changes.
    Watch {
        node: usize,
    },
    /// The kubelet starts a container on the first healthy slot of an instance from this number on.
    Start {
        node: usize,
        instance: usize,
        from: u32,
    },
    /// The kubelet starts a container on so many virtual devices.
    StartVirtual {
        node: usize,
        devices: usize,
    },
    End {
        node: usize,
        container: usize,
    },
    /// So many rounds of reclaims on all nodes.
    Pass {
        rounds: u32,
    },
    RestartAgent {
        node: usize,
    },
    /// The node disappears with its containers, and the leader frees its slots. It returns with its next restart.
    Lose {
        node: usize,
    },
    SetCapacity {
        capacity: u32,
    },
}

pub(crate) struct SharingWorld {
    now: Tick,
    configuration: ConfigurationName,
    capacity: u32,
    objects: Instances,
    nodes: Vec<SharingNode>,
    /// When a container last ended that had the slot.
    ended: BTreeMap<SlotName, Tick>,
    /// Writes that the objects refused.
    pub(crate) lost_races: usize,
    /// Containers that have started.
    pub(crate) started: usize,
}

struct SharingNode {
    name: NodeName,
    /// What the agent has seen.
    seen: Instances,
    reclaimer: Reclaimer,
    containers: Vec<SharingContainer>,
}

struct SharingContainer {
    started: Tick,
    held: Vec<HeldSlot>,
}

/// The slot behind an id that the kubelet allocated.
struct HeldSlot {
    id: String,
    instance: InstanceName,
    slot: SlotName,
}

impl SharingNode {
    fn new(name: NodeName, seen: &Instances) -> Self {
        let reclaimer = Reclaimer::new(name.clone(), UNUSED_AFTER);
        Self { name, seen: seen.clone(), reclaimer, containers: Vec::new() }
    }

    /// Ids that the kubelet has allocated.
    fn allocated(&self) -> BTreeSet<String> {
        self.ids(|_| true)
    }

    fn ids(&self, is_listed: impl Fn(&SharingContainer) -> bool) -> BTreeSet<String> {
        let containers = self.containers.iter().filter(|container| is_listed(container));
        containers.flat_map(|container| &container.held).map(|held| held.id.clone()).collect()
    }
}

impl HeldSlot {
    fn usage(&self, node: &NodeName) -> SlotUsage {
        if self.id == self.slot.as_str() {
            SlotUsage::Instance { node: node.clone() }
        } else {
            SlotUsage::Configuration { virtual_id: VirtualId::from(self.id.as_str()), node: node.clone() }
        }
    }
}

impl SharingWorld {
    pub(crate) fn new(nodes: usize, devices: usize, capacity: u32) -> Self {
        let configuration = ConfigurationName::from("appliance");
        let names: Vec<NodeName> = (0..nodes).map(|node| NodeName::from(format!("node-{node}"))).collect();
        let mut objects = Instances::new();
        for device in 0..devices {
            let name = instance_name(&configuration, &format!("http://10.0.0.{device}/"), None);
            let nodes = names.iter().cloned().collect();
            let mut usage = InstanceUsage { capacity, nodes, ..InstanceUsage::default() };
            let layout = usage.layout(&name, capacity);
            usage.apply_layout(&layout);
            objects.insert(name, usage);
        }
        let nodes = names.into_iter().map(|name| SharingNode::new(name, &objects)).collect();
        Self {
            now: START,
            configuration,
            capacity,
            objects,
            nodes,
            ended: BTreeMap::new(),
            lost_races: 0,
            started: 0,
        }
    }

    pub(crate) fn step(&mut self, step: &SharingStep) {
        let nodes = self.nodes.len();
        match step {
            SharingStep::Watch { node } => self.watch(node % nodes),
            SharingStep::Start { node, instance, from } => self.start(node % nodes, *instance, *from),
            SharingStep::StartVirtual { node, devices } => self.start_virtual(node % nodes, *devices),
            SharingStep::End { node, container } => self.end(node % nodes, *container),
            SharingStep::Pass { rounds } => self.pass(*rounds),
            SharingStep::RestartAgent { node } => self.restart_agent(node % nodes),
            SharingStep::Lose { node } => self.lose(node % nodes),
            SharingStep::SetCapacity { capacity } => self.capacity = *capacity,
        }
        self.lay_out();
        self.check();
    }

    /// Ends all containers and waits until every slot is free.
    pub(crate) fn drain(&mut self) {
        for node in 0..self.nodes.len() {
            while !self.nodes[node].containers.is_empty() {
                self.end(node, 0);
            }
            self.watch(node);
        }
        // A minute until the youngest claim counts as unused, and five until it is freed.
        self.pass(37);
        self.lay_out();
        for usage in self.objects.values() {
            let capacity = usize::try_from(self.capacity).unwrap();
            assert_eq!((usage.used(), usage.slots.len()), (0, capacity), "{usage:?}");
            assert!(usage.unused_since.is_empty(), "{usage:?}");
        }
    }

    fn watch(&mut self, node: usize) {
        self.nodes[node].seen = self.objects.clone();
    }

    fn start(&mut self, node: usize, instance: usize, from: u32) {
        let at = &self.nodes[node];
        let Some((name, usage)) = at.seen.iter().nth(instance % at.seen.len()) else { return };
        let allocated = at.allocated();
        let mut usable: Vec<(u32, SlotName)> = Vec::new();
        for (slot, is_healthy) in usage.health(name, &at.name, true) {
            if is_healthy && !allocated.contains(slot.as_str()) {
                usable.push((slot_number(name, &slot).unwrap(), slot));
            }
        }
        usable.sort();
        let next = usable.iter().find(|(number, _)| *number >= from).or_else(|| usable.first());
        let Some((_, slot)) = next.cloned() else { return };
        let name = name.clone();
        let changes = usage.claim(slice::from_ref(&slot), &at.name, &ClaimKind::Instance);
        // The list came from what the agent has seen, so it knows nothing against the claim.
        let changes = changes.unwrap();
        if self.write(node, &name, &changes) {
            let held = HeldSlot { id: slot.to_string(), instance: name, slot };
            self.run(node, vec![held]);
        }
    }

    fn start_virtual(&mut self, node: usize, devices: usize) {
        let at = &self.nodes[node];
        let healthy: BTreeSet<InstanceName> = at.seen.keys().cloned().collect();
        let allocated = at.allocated();
        let offered = virtual_devices::offered(&self.configuration, &at.seen, &at.name, &healthy);
        let free = offered.into_iter().filter(|id| !allocated.contains(id.as_str()));
        let ids: Vec<VirtualId> = free.take(devices).collect();
        let Ok(claims) = virtual_devices::choose(&ids, &at.seen, &at.name, &healthy) else { return };
        let instances: BTreeSet<&InstanceName> = claims.iter().map(|claim| &claim.instance).collect();
        assert_eq!(instances.len(), ids.len(), "each device once: {claims:?}");
        let mut written: Vec<(&InstanceName, &SlotChange)> = Vec::new();
        for claim in &claims {
            let Some(change) = &claim.change else { continue };
            if !self.write(node, &claim.instance, slice::from_ref(change)) {
                for (name, change) in written.into_iter().filter(|(_, change)| change.from.is_free()) {
                    let undo = SlotChange {
                        slot: change.slot.clone(),
                        from: change.to.clone(),
                        to: SlotUsage::Free,
                        unused_since: None,
                    };
                    assert!(self.write(node, name, &[undo]), "nobody else has the slot");
                }
                return;
            }
            written.push((&claim.instance, change));
        }
        for (name, release) in claims.iter().flat_map(|claim| &claim.releases) {
            assert!(self.write(node, name, slice::from_ref(release)), "nobody else has the slot");
        }
        let held = claims.into_iter().map(|claim| HeldSlot {
            id: claim.virtual_id.to_string(),
            instance: claim.instance,
            slot: claim.slot,
        });
        let held = held.collect::<Vec<_>>();
        if !held.is_empty() {
            self.run(node, held);
        }
    }

    fn run(&mut self, node: usize, held: Vec<HeldSlot>) {
        let at = &mut self.nodes[node];
        for held in &held {
            at.reclaimer.claimed(&held.slot, self.now);
        }
        at.containers.push(SharingContainer { started: self.now, held });
        self.started += 1;
    }

    fn end(&mut self, node: usize, container: usize) {
        let containers = &mut self.nodes[node].containers;
        if containers.is_empty() {
            return;
        }
        let ended = containers.remove(container % containers.len());
        self.ended.extend(ended.held.into_iter().map(|held| (held.slot, self.now)));
    }

    fn pass(&mut self, rounds: u32) {
        for _ in 0..rounds {
            self.now = self.now + ROUND;
            for node in 0..self.nodes.len() {
                self.reclaim(node);
            }
            self.check();
        }
    }

    fn reclaim(&mut self, node: usize) {
        let now = self.now;
        let at = &mut self.nodes[node];
        let in_use = at.ids(|container| now.since(container.started) >= REPORTED_AFTER);
        for (name, changes) in at.reclaimer.plan(&at.seen, &in_use, now) {
            for change in changes.iter().filter(|change| change.to.is_free()) {
                let unused = self.ended.get(&change.slot).map(|ended| now.since(*ended));
                assert!(unused.is_none_or(|unused| unused >= MIN_UNUSED), "{change:?} after {unused:?}");
            }
            self.write(node, &name, &changes);
        }
    }

    fn restart_agent(&mut self, node: usize) {
        let name = self.nodes[node].name.clone();
        for usage in self.objects.values_mut() {
            usage.nodes.insert(name.clone());
        }
        self.nodes[node].reclaimer = Reclaimer::new(name, UNUSED_AFTER);
        self.watch(node);
    }

    fn lose(&mut self, node: usize) {
        let name = self.nodes[node].name.clone();
        for usage in self.objects.values_mut() {
            let freed = usage.freed_of(&name);
            usage.apply(&freed).unwrap();
            usage.nodes.remove(&name);
        }
        self.nodes[node] = SharingNode::new(name, &self.objects);
    }

    /// The leader gives the objects the slots that the capacity asks for.
    fn lay_out(&mut self) {
        for (name, usage) in &mut self.objects {
            let used: Vec<SlotName> = usage
                .slots
                .iter()
                .filter(|(_, usage)| !usage.is_free())
                .map(|(slot, _)| slot.clone())
                .collect();
            let layout = usage.layout(name, self.capacity);
            usage.apply_layout(&layout);
            usage.capacity = self.capacity;
            assert!(
                used.iter().all(|slot| usage.slots.contains_key(slot)),
                "a used slot was dropped: {usage:?}"
            );
            assert!(usage.layout(name, self.capacity).is_empty(), "{usage:?}");
        }
    }

    /// Writes changes as the agent of this node. A refused write changes nothing, and the agent reads again.
    fn write(&mut self, node: usize, name: &InstanceName, changes: &[SlotChange]) -> bool {
        let object = self.objects.get_mut(name).unwrap();
        let before = object.clone();
        let is_written = object.apply(changes).is_ok();
        if !is_written {
            assert_eq!(*object, before);
            self.lost_races += 1;
        }
        self.nodes[node].seen.insert(name.clone(), object.clone());
        is_written
    }

    fn check(&self) {
        let mut users: BTreeMap<&SlotName, &NodeName> = BTreeMap::new();
        for node in &self.nodes {
            for held in node.containers.iter().flat_map(|container| &container.held) {
                let usage = self.objects[&held.instance].slots.get(&held.slot);
                assert_eq!(usage, Some(&held.usage(&node.name)), "{}", held.slot);
                let other = users.insert(&held.slot, &node.name);
                assert_eq!(other, None, "two containers have {}", held.slot);
            }
        }
    }
}
