//! Random clusters: every seed gives other nodes, owners and faults.

use std::collections::BTreeMap;

use super::{ClusterEvent, SimulatedCluster, TimedClusterAction, builds::first_build, pods::SimulatedNode};
use crate::{
    model::SleepLevelPolicy,
    pairing::{
        event::{AcceleratorFacts, MemorySizes, PairingNodeFacts, RequestedEngine},
        ids::{EngineFingerprint, NodeName, ProviderMode},
        settings::PairingSettings,
    },
    sim::random::SplitMix64,
    units::{Bytes, Millis},
};

/// A cluster, its owners and its faults.
#[derive(Clone, Debug)]
pub struct ClusterScenario {
    pub seed: u64,
    pub settings: PairingSettings,
    pub nodes: usize,
    pub accelerators: u32,
    pub capacity: Bytes,
    pub sleeping_memory: Option<Bytes>,
    pub host_memory: Bytes,
    /// The memory limit of each provider.
    pub provider_memory_limit: Option<Bytes>,
    /// How many accelerators of each node always want a launcher.
    pub launchers_per_node: u32,
    /// For each LauncherConfig, how many engines its launchers may hold.
    pub launcher_max_engines: Vec<Option<u32>>,
    pub owners: Vec<SimulatedOwner>,
    /// How many requesters may have an accelerator. If more than one, the gateway decides whose engine is awake.
    pub slots: usize,
    /// Mean time between the gateway's wants.
    pub want_interval: Option<Millis>,
    pub fault_rates: ClusterFaultRates,
    /// A stub ordered to terminate holds on until it is released.
    pub stubs_await_release: bool,
    pub metered: bool,
    /// An engine that is queried while asleep reports its level.
    pub reports_sleep_level: bool,
    // All in milliseconds, from and to.
    pub watch_delay: (u64, u64),
    pub network_delay: (u64, u64),
    pub meter_lag: (u64, u64),
    pub pod_start_time: (u64, u64),
    pub load_time: (u64, u64),
    pub sleep_time: (u64, u64),
    pub wake_time: (u64, u64),
    /// Mean time between an owner's changes of mind.
    pub toggle_interval: Option<Millis>,
    pub actions: Vec<TimedClusterAction>,
}

/// An owner, which wants one requester of a kind, or none.
#[derive(Clone, Debug)]
pub struct SimulatedOwner {
    pub requested: RequestedEngine,
    /// How many accelerators each of its requesters has.
    pub accelerator_count: usize,
    pub node: Option<NodeName>,
    pub wants_requester: bool,
}

/// The probability of each fault.
#[derive(Clone, Copy, Debug, Default)]
pub struct ClusterFaultRates {
    pub mean_interval: Option<Millis>,
    /// Commands without effect, and commands whose reply is lost.
    pub calls_lost: f64,
    pub replies_lost: f64,
    pub starts_late: f64,
    pub start_fails: f64,
    pub sleep_fails: f64,
    /// The engine accepts the sleep command and stays awake.
    pub sleep_denied: f64,
    pub wake_fails: f64,
    pub canary_fails: f64,
    pub hangs: f64,
    pub oversized_residue: f64,
}

impl ClusterScenario {
    /// A random scenario, determined by the seed.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        let _ = random.next_u64();
        let capacity = random.between(24, 80);
        let residues = random.between(1, 3);
        let accelerators = random.between(1, 4) as u32;
        let mode = [ProviderMode::Plain, ProviderMode::Sleep, ProviderMode::Launcher];
        // Some clusters use one mode, most mix them.
        let only = random.chance(0.4).then(|| random.pick(&mode).copied()).flatten();
        let owners = (0..random.between(3, 8))
            .map(|i| {
                let mode = only.or_else(|| random.pick(&mode).copied()).unwrap_or(ProviderMode::Sleep);
                owner(i, mode, capacity, residues, accelerators, &mut random)
            })
            .collect();
        let budget = Bytes::gib(residues * random.between(1, 2));
        let mut plot = Self {
            seed,
            settings: settings(&mut random),
            nodes: random.between(1, 2) as usize,
            accelerators,
            capacity: Bytes::gib(capacity),
            sleeping_memory: random.chance(0.9).then_some(budget),
            host_memory: Bytes::gib(random.between(0, 100)),
            provider_memory_limit: None,
            launchers_per_node: if random.chance(0.3) {
                random.between(1, u64::from(accelerators)) as u32
            } else {
                0
            },
            launcher_max_engines: Vec::new(),
            owners,
            slots: 1,
            want_interval: None,
            fault_rates: fault_rates(&mut random),
            stubs_await_release: random.chance(0.5),
            metered: random.chance(0.6),
            watch_delay: (1, if random.chance(0.3) { 3000 } else { 60 }),
            network_delay: (1, 40),
            meter_lag: (0, random.between(10, 9000)),
            pod_start_time: (50, random.between(100, 3000)),
            load_time: (500, random.between(1000, 9000)),
            sleep_time: (20, random.between(50, 3000)),
            wake_time: (20, random.between(50, 3000)),
            toggle_interval: random.chance(0.9).then(|| Millis::secs(random.between(5, 40))),
            actions: Vec::new(),
            reports_sleep_level: random.chance(0.7),
        };
        let limit = |random: &mut SplitMix64| random.chance(0.6).then(|| random.between(1, 3) as u32);
        plot.launcher_max_engines = (0..random.between(1, 2)).map(|_| limit(&mut random)).collect();
        let configs = plot.launcher_max_engines.len() as u64;
        for (i, owner) in
            (0..).zip(&mut plot.owners).filter(|(_, owner)| owner.requested.mode == ProviderMode::Launcher)
        {
            owner.requested.build = Some(first_build(i % configs));
        }
        plot.provider_memory_limit = random.chance(0.3).then(|| Bytes::gib(random.between(8, 60)));
        if plot.fault_rates.mean_interval.is_some() && random.chance(0.1) {
            plot.fault_rates.sleep_denied = 0.1;
        }
        // Without slots, launchers have events that are rare enough to need most of the worlds with launchers.
        let has_launchers = plot.owners.iter().any(|owner| owner.requested.build.is_some());
        if random.chance(if has_launchers { 0.03 } else { 0.5 }) {
            plot.share_accelerators(&mut random);
        }
        plot
    }

    /// Gives each accelerator several slots. All launchers are of one LauncherConfig and hold any number of engines:
    /// bound engines stay in a launcher, so others would wait in it for ever.
    fn share_accelerators(&mut self, random: &mut SplitMix64) {
        self.slots = random.between(2, 4) as usize;
        self.want_interval = Some(Millis(random.between(500, 8000)));
        self.launcher_max_engines = vec![None];
        let launched = self.owners.iter_mut().filter(|owner| owner.requested.build.is_some());
        launched.for_each(|owner| owner.requested.build = Some(first_build(0)));
    }

    /// One node without faults, on which only the scripted actions happen.
    #[must_use]
    pub fn quiet(accelerators: u32, owners: Vec<SimulatedOwner>, actions: Vec<TimedClusterAction>) -> Self {
        Self {
            seed: 0,
            settings: PairingSettings::default(),
            nodes: 1,
            accelerators,
            capacity: Bytes::gib(80),
            sleeping_memory: Some(Bytes::gib(8)),
            host_memory: Bytes::gib(200),
            provider_memory_limit: None,
            launchers_per_node: 0,
            launcher_max_engines: Vec::new(),
            owners,
            slots: 1,
            want_interval: None,
            fault_rates: ClusterFaultRates::default(),
            stubs_await_release: false,
            metered: false,
            reports_sleep_level: true,
            watch_delay: (1, 20),
            network_delay: (1, 10),
            meter_lag: (0, 0),
            pod_start_time: (200, 400),
            load_time: (4000, 6000),
            sleep_time: (500, 1000),
            wake_time: (500, 1000),
            toggle_interval: None,
            actions,
        }
    }

    pub(super) fn build_nodes(&self) -> BTreeMap<NodeName, SimulatedNode> {
        let facts = |index| AcceleratorFacts {
            index,
            capacity: self.capacity,
            healthy: true,
            sleeping_memory: self.sleeping_memory,
            wants_launcher: index < self.launchers_per_node,
        };
        let machine = || SimulatedNode {
            facts: PairingNodeFacts { cordoned: false, host_sleep_memory: self.host_memory },
            exists: true,
            cut_off: false,
            kubelet_silent: false,
            accelerators: (0..self.accelerators).map(|i| (format!("gpu-{i}").into(), facts(i))).collect(),
            allocated: BTreeMap::new(),
        };
        (0..self.nodes).map(|i| (format!("node-{i}").into(), machine())).collect()
    }

    /// Time without faults after which nothing is in flight any more.
    pub(super) fn quiescence_timeout(&self) -> Millis {
        let settings = &self.settings;
        let most = MemorySizes { awake: self.capacity, asleep: Bytes::ZERO, host: self.capacity };
        let spans = [
            settings.start_timeout,
            settings.start_timeout,
            settings.stop_timeout,
            settings.stop_timeout,
            settings.max_hold(&most),
            settings.vanished_retention,
            settings.launcher_idle_timeout,
        ];
        spans.into_iter().fold(Millis::secs(400), |sum, span| sum + span)
    }
}

fn settings(random: &mut SplitMix64) -> PairingSettings {
    PairingSettings {
        meter_lag: Millis::secs(random.between(2, 20)),
        drain_timeout: Millis::secs(random.between(1, 5)),
        sleep_timeout: Millis::secs(random.between(4, 10)),
        wake_timeout: Millis::secs(random.between(4, 10)),
        start_timeout: Millis::secs(random.between(15, 40)),
        min_transfer_rate: Bytes::gib(16),
        launcher_backoff: Millis::secs(random.between(1, 4)),
        launcher_proven_after: Millis::secs(random.between(5, 60)),
        launcher_idle_timeout: Millis::secs(random.between(10, 60)),
        transfer_startup: Millis::secs(1),
        stop_timeout: Millis::secs(random.between(10, 20)),
        call_timeout: Millis::secs(random.between(1, 5)),
        hold_margin: Millis::secs(5),
        replacement_time: Millis::secs(2),
        // A kubelet stops a vanished Pod within ten seconds; a watch may be broken for twenty.
        vanished_retention: Millis::secs(45),
    }
}

fn owner(
    i: u64,
    mode: ProviderMode,
    capacity: u64,
    residues: u64,
    accelerators: u32,
    random: &mut SplitMix64,
) -> SimulatedOwner {
    let remaining_slots = if random.chance(0.3) { 0 } else { 6 };
    let awake = random.between(capacity / 3, capacity - remaining_slots);
    let levels =
        [SleepLevelPolicy::One, SleepLevelPolicy::Two, SleepLevelPolicy::Auto, SleepLevelPolicy::Never];
    let last = if random.chance(0.1) { 3 } else { 2 };
    let count = if random.chance(0.3) { random.between(1, u64::from(accelerators)) } else { 1 };
    SimulatedOwner {
        requested: RequestedEngine {
            mode,
            fingerprint: EngineFingerprint(0xa0 + i),
            build: None,
            sizes: MemorySizes {
                awake: Bytes::gib(awake),
                asleep: Bytes::gib(residues),
                host: Bytes::gib(random.between(4, 40)),
            },
            level: levels.get(random.between(0, last) as usize).copied().unwrap_or(SleepLevelPolicy::Auto),
            stop_after: random.chance(0.2).then(|| Millis::secs(random.between(1, 300))),
        },
        accelerator_count: count as usize,
        node: None,
        wants_requester: random.chance(0.7),
    }
}

/// Each seed has some of the faults, so that each fault occurs with and without the others.
fn fault_rates(random: &mut SplitMix64) -> ClusterFaultRates {
    if random.chance(0.1) {
        return ClusterFaultRates::default();
    }
    let mut some = |of: f64| if random.chance(0.35) { of } else { 0.0 };
    let mut rates = ClusterFaultRates {
        mean_interval: None,
        calls_lost: some(0.08),
        replies_lost: some(0.05),
        starts_late: some(0.3),
        start_fails: some(0.1),
        sleep_fails: some(0.1),
        wake_fails: some(0.15),
        canary_fails: some(0.1),
        hangs: some(0.06),
        oversized_residue: some(0.3),
        ..ClusterFaultRates::default()
    };
    rates.mean_interval = random.chance(0.85).then(|| Millis::secs(random.between(3, 40)));
    rates
}

impl SimulatedCluster {
    pub(super) fn begin(&mut self) {
        self.schedule(Millis(1), ClusterEvent::LeaderStarts);
        for owner in 0..self.scenario.owners.len() {
            let after = self.random_duration((10, 3000));
            self.schedule(after, ClusterEvent::EnsureRequester(owner));
            if let Some(every) = self.scenario.toggle_interval {
                let after = Millis(self.random.exponential(every.0));
                self.schedule(after, ClusterEvent::ToggleOwner(owner));
            }
        }
        if self.scenario.metered {
            self.schedule(Millis(5), ClusterEvent::ReadMeters);
        }
        if let Some(every) = self.scenario.fault_rates.mean_interval {
            self.schedule(every, ClusterEvent::RandomFault);
        }
        if let Some(every) = self.scenario.want_interval {
            self.schedule(every, ClusterEvent::RandomWant);
        }
        for action in self.scenario.actions.clone() {
            self.schedule(action.after, ClusterEvent::Action(action));
        }
    }

    /// The owner stops wanting its requester, or wants one again.
    pub(super) fn toggle_owner(&mut self, number: usize) {
        if self.quiescing {
            return;
        }
        let Some(owner) = self.scenario.owners.get_mut(number) else { return };
        owner.wants_requester = !owner.wants_requester;
        if owner.wants_requester {
            self.ensure_requester(number);
        } else {
            let of = |r: &super::SimulatedRequester| r.owner == number;
            let ids: Vec<_> =
                self.requesters.iter().filter(|(_, r)| of(r)).map(|(id, _)| id.clone()).collect();
            ids.iter().for_each(|id| self.delete_requester(id));
        }
        if let Some(every) = self.scenario.toggle_interval {
            let after = Millis(self.random.exponential(every.0));
            self.schedule(after, ClusterEvent::ToggleOwner(number));
        }
    }
}
