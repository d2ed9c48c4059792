//! A cluster by chance: every seed other nodes, other wishes, other troubles.

use std::collections::BTreeMap;

use super::{Cluster, Deed, Happening, builds::build, pods::Machine};
use crate::{
    model::LevelPolicy,
    pairing::{
        event::{AcceleratorFacts, Ask, NodeFacts, Sizes},
        ids::{Fingerprint, Mode, NodeName},
        settings::Settings,
    },
    sim::random::Random,
    units::{Bytes, Millis},
};

/// What a cluster is like, and what happens in it.
#[derive(Clone, Debug)]
pub struct Plot {
    pub seed: u64,
    pub settings: Settings,
    pub nodes: usize,
    pub accelerators: u32,
    pub capacity: Bytes,
    pub sleeping: Option<Bytes>,
    pub host: Bytes,
    /// The memory limit of each provider.
    pub provider_host: Option<Bytes>,
    /// So many accelerators of each node are to have a launcher, whether somebody asks for it or not.
    pub launchers: u32,
    /// For each LauncherConfig how many engines its launchers may hold.
    pub launchers_hold: Vec<Option<u32>>,
    pub owners: Vec<Owner>,
    pub troubles: Troubles,
    /// Stubs hold on when they are told to end, until they are released.
    pub stub_holds: bool,
    pub metered: bool,
    /// An engine that is asked whether it sleeps says how deeply.
    pub knows_level: bool,
    // All in milliseconds, from and to.
    pub watch: (u64, u64),
    pub network: (u64, u64),
    pub meter_lag: (u64, u64),
    pub pod_start: (u64, u64),
    pub load: (u64, u64),
    pub sleep: (u64, u64),
    pub wake: (u64, u64),
    /// How often an owner changes its mind.
    pub toggle: Option<Millis>,
    pub deeds: Vec<Deed>,
}

/// Somebody who wants one requester of a kind, or none.
#[derive(Clone, Debug)]
pub struct Owner {
    pub ask: Ask,
    /// How many accelerators each of its requesters has.
    pub count: usize,
    pub node: Option<NodeName>,
    pub wants: bool,
}

/// How probable each thing is to go wrong.
#[derive(Clone, Copy, Debug, Default)]
pub struct Troubles {
    pub every: Option<Millis>,
    /// Commands without effect, and those whose effect nobody hears of.
    pub calls_lost: f64,
    pub answers_lost: f64,
    pub starts_late: f64,
    pub start_fails: f64,
    pub sleep_fails: f64,
    /// The order to sleep is taken, and the engine stays awake.
    pub sleep_denied: f64,
    pub wake_fails: f64,
    pub canary_fails: f64,
    pub hangs: f64,
    pub fat_residue: f64,
}

impl Plot {
    /// Any plot; the seed says which.
    #[must_use]
    pub fn by_chance(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let _ = random.draw();
        let capacity = random.between(24, 80);
        let residues = random.between(1, 3);
        let accelerators = random.between(1, 4) as u32;
        let mode = [Mode::Plain, Mode::Sleep, Mode::Launcher];
        // Some clusters have one mode, most a mixture.
        let only = random.chance(0.4).then(|| random.pick(&mode).copied()).flatten();
        let owners = (0..random.between(3, 8))
            .map(|i| {
                let mode = only.or_else(|| random.pick(&mode).copied()).unwrap_or(Mode::Sleep);
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
            sleeping: random.chance(0.9).then_some(budget),
            host: Bytes::gib(random.between(0, 100)),
            provider_host: None,
            launchers: if random.chance(0.3) { random.between(1, u64::from(accelerators)) as u32 } else { 0 },
            launchers_hold: Vec::new(),
            owners,
            troubles: troubles(&mut random),
            stub_holds: random.chance(0.5),
            metered: random.chance(0.6),
            watch: (1, if random.chance(0.3) { 3000 } else { 60 }),
            network: (1, 40),
            meter_lag: (0, random.between(10, 9000)),
            pod_start: (50, random.between(100, 3000)),
            load: (500, random.between(1000, 9000)),
            sleep: (20, random.between(50, 3000)),
            wake: (20, random.between(50, 3000)),
            toggle: random.chance(0.9).then(|| Millis::secs(random.between(5, 40))),
            deeds: Vec::new(),
            knows_level: random.chance(0.7),
        };
        let limit = |random: &mut Random| random.chance(0.6).then(|| random.between(1, 3) as u32);
        plot.launchers_hold = (0..random.between(1, 2)).map(|_| limit(&mut random)).collect();
        let configs = plot.launchers_hold.len() as u64;
        for (i, owner) in (0..).zip(&mut plot.owners).filter(|(_, owner)| owner.ask.mode == Mode::Launcher) {
            owner.ask.build = Some(build(i % configs));
        }
        plot.provider_host = random.chance(0.3).then(|| Bytes::gib(random.between(8, 60)));
        if plot.troubles.every.is_some() && random.chance(0.1) {
            plot.troubles.sleep_denied = 0.1;
        }
        plot
    }

    /// One node without troubles, on which only what a script says happens.
    #[must_use]
    pub fn quiet(accelerators: u32, owners: Vec<Owner>, deeds: Vec<Deed>) -> Self {
        Self {
            seed: 0,
            settings: Settings::default(),
            nodes: 1,
            accelerators,
            capacity: Bytes::gib(80),
            sleeping: Some(Bytes::gib(8)),
            host: Bytes::gib(200),
            provider_host: None,
            launchers: 0,
            launchers_hold: Vec::new(),
            owners,
            troubles: Troubles::default(),
            stub_holds: false,
            metered: false,
            knows_level: true,
            watch: (1, 20),
            network: (1, 10),
            meter_lag: (0, 0),
            pod_start: (200, 400),
            load: (4000, 6000),
            sleep: (500, 1000),
            wake: (500, 1000),
            toggle: None,
            deeds,
        }
    }

    pub(super) fn machines(&self) -> BTreeMap<NodeName, Machine> {
        let facts = |index| AcceleratorFacts {
            index,
            capacity: self.capacity,
            healthy: true,
            sleeping: self.sleeping,
            launcher: index < self.launchers,
        };
        let machine = || Machine {
            facts: NodeFacts { cordoned: false, host: self.host },
            exists: true,
            cut_off: false,
            silent: false,
            accelerators: (0..self.accelerators).map(|i| (format!("gpu-{i}").into(), facts(i))).collect(),
            given: BTreeMap::new(),
        };
        (0..self.nodes).map(|i| (format!("node-{i}").into(), machine())).collect()
    }

    /// After so long without troubles nothing is under way any more.
    pub(super) fn rest(&self) -> Millis {
        let settings = &self.settings;
        let most = Sizes { awake: self.capacity, asleep: Bytes::ZERO, host: self.capacity };
        let spans = [
            settings.start,
            settings.start,
            settings.end,
            settings.end,
            settings.hold(&most),
            settings.remains,
            settings.idle,
        ];
        spans.into_iter().fold(Millis::secs(400), |sum, span| sum + span)
    }
}

fn settings(random: &mut Random) -> Settings {
    Settings {
        settle: Millis::secs(random.between(2, 20)),
        drain: Millis::secs(random.between(1, 5)),
        sleep: Millis::secs(random.between(4, 10)),
        wake: Millis::secs(random.between(4, 10)),
        start: Millis::secs(random.between(15, 40)),
        rate: Bytes::gib(16),
        relaunch: Millis::secs(random.between(1, 4)),
        lived: Millis::secs(random.between(5, 60)),
        idle: Millis::secs(random.between(10, 60)),
        base: Millis::secs(1),
        end: Millis::secs(random.between(10, 20)),
        call: Millis::secs(random.between(1, 5)),
        spare: Millis::secs(5),
        // A kubelet ends what vanished within ten seconds; a watch may be broken for twenty.
        remains: Millis::secs(45),
    }
}

fn owner(i: u64, mode: Mode, capacity: u64, residues: u64, accelerators: u32, random: &mut Random) -> Owner {
    let left = if random.chance(0.3) { 0 } else { 6 };
    let awake = random.between(capacity / 3, capacity - left);
    let levels = [LevelPolicy::One, LevelPolicy::Two, LevelPolicy::Auto, LevelPolicy::Never];
    let last = if random.chance(0.1) { 3 } else { 2 };
    let count = if random.chance(0.3) { random.between(1, u64::from(accelerators)) } else { 1 };
    Owner {
        ask: Ask {
            mode,
            fingerprint: Fingerprint(0xa0 + i),
            build: None,
            sizes: Sizes {
                awake: Bytes::gib(awake),
                asleep: Bytes::gib(residues),
                host: Bytes::gib(random.between(4, 40)),
            },
            level: levels.get(random.between(0, last) as usize).copied().unwrap_or(LevelPolicy::Auto),
            stop_after: random.chance(0.2).then(|| Millis::secs(random.between(1, 300))),
        },
        count: count as usize,
        node: None,
        wants: random.chance(0.7),
    }
}

/// Each seed has some of the troubles, so that each is met with and without the others.
fn troubles(random: &mut Random) -> Troubles {
    if random.chance(0.1) {
        return Troubles::default();
    }
    let mut some = |of: f64| if random.chance(0.35) { of } else { 0.0 };
    let mut troubles = Troubles {
        every: None,
        calls_lost: some(0.08),
        answers_lost: some(0.05),
        starts_late: some(0.3),
        start_fails: some(0.1),
        sleep_fails: some(0.1),
        wake_fails: some(0.15),
        canary_fails: some(0.1),
        hangs: some(0.06),
        fat_residue: some(0.3),
        ..Troubles::default()
    };
    troubles.every = random.chance(0.85).then(|| Millis::secs(random.between(3, 40)));
    troubles
}

impl Cluster {
    pub(super) fn begin(&mut self) {
        self.add(Millis(1), Happening::Lead);
        for owner in 0..self.plot.owners.len() {
            let after = self.draw((10, 3000));
            self.add(after, Happening::Own(owner));
            if let Some(every) = self.plot.toggle {
                let after = Millis(self.random.exponential(every.0));
                self.add(after, Happening::Toggle(owner));
            }
        }
        if self.plot.metered {
            self.add(Millis(5), Happening::Meter);
        }
        if let Some(every) = self.plot.troubles.every {
            self.add(every, Happening::Trouble);
        }
        for deed in self.plot.deeds.clone() {
            self.add(deed.after, Happening::Deed(deed));
        }
    }

    /// The owner wants its requester no more, or wants one again.
    pub(super) fn toggle(&mut self, number: usize) {
        if self.calm {
            return;
        }
        let Some(owner) = self.plot.owners.get_mut(number) else { return };
        owner.wants = !owner.wants;
        if owner.wants {
            self.own(number);
        } else {
            let of = |r: &super::Requester| r.owner == number;
            let ids: Vec<_> =
                self.requesters.iter().filter(|(_, r)| of(r)).map(|(id, _)| id.clone()).collect();
            ids.iter().for_each(|id| self.delete_requester(id));
        }
        if let Some(every) = self.plot.toggle {
            let after = Millis(self.random.exponential(every.0));
            self.add(after, Happening::Toggle(number));
        }
    }
}
