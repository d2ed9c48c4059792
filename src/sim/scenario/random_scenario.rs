//! Random worlds: every seed gives another machine, other models, clients and faults.

use super::{FaultRates, HardwareProfile, Scenario};
use crate::{
    model::{
        Accelerator, AcceleratorId, AcceleratorRequirement, DrainDeadlinePolicy, EngineMemory,
        EngineTimeouts, EvictionPolicy, FleetConfig, FleetSettings, IdlePolicy, ModelName, ModelSpec,
        ProtectionPolicy, QueueOverrides, QueuePolicy, QueueSettings, RehearsalPolicy, ScaleUpEviction,
        SleepLevelPolicy, TurnSettings,
    },
    saturation::Thresholds,
    sim::{
        demand::{ArrivalPattern, ClientBehaviour, RequestSource},
        random::SplitMix64,
    },
    units::{Bytes, Millis, Tick},
};

impl Scenario {
    /// A random scenario, determined by the seed.
    #[must_use]
    pub fn from_seed(seed: u64) -> Self {
        let mut random = SplitMix64::new(seed);
        // The first numbers of neighbouring seeds are alike in some bits.
        let _ = random.next_u64();
        let mut configuration = configuration(&mut random);
        let faults = fault_rates(&mut random);
        let sources = configuration.models.iter().flat_map(|spec| sources(&spec.name, &mut random)).collect();
        let hardware = hardware_profile(&mut random, &faults);
        let gated = random.chance(0.25).then(|| Millis::secs(random.between(5, 40)));
        if random.chance(0.25) {
            configuration.models.iter_mut().for_each(|spec| randomize_policy(spec, &mut random));
        }
        if random.chance(0.25) {
            add_pool(&mut configuration, &mut random);
        }
        if random.chance(0.25) {
            set_min_replicas(&mut configuration.models, &mut random);
        }
        if random.chance(0.3) {
            let names: Vec<ModelName> = configuration.models.iter().map(|spec| spec.name.clone()).collect();
            add_dependencies(&mut configuration.models, &names, &mut random);
        }
        let sleep_denied = if random.chance(0.2) { 0.3 } else { 0.0 };
        // Last, so that the worlds without such a pool are what they were before there was any.
        if random.chance(0.25) {
            add_pool_with_slots(&mut configuration, &mut random);
        }
        if random.chance(0.3) {
            configuration.models.iter_mut().for_each(|spec| spec.idle.rehearse = rehearsal(&mut random));
        }
        Self {
            name: format!("seed {seed}"),
            seed,
            start: Tick(1_000_000_000),
            hardware,
            configuration,
            fault_rates: FaultRates { stub_gate_closes: gated, sleep_denied, ..faults },
            sources,
            actions: Vec::new(),
        }
    }
}

fn configuration(random: &mut SplitMix64) -> FleetConfig {
    let metered = random.chance(0.8);
    let size = random.between(20, 80);
    let accelerators: Vec<_> = (0..random.between(1, 4))
        .map(|i| Accelerator { metered, ..Accelerator::new(format!("gpu-{i}").into(), Bytes::gib(size)) })
        .collect();
    let models = (0..random.between(1, 6))
        .map(|i| model(&format!("model-{i}"), size, &accelerators, random))
        .collect();
    FleetConfig { settings: settings(random), accelerators, models }
}

fn settings(random: &mut SplitMix64) -> FleetSettings {
    let on_deadline = if random.chance(0.5) { DrainDeadlinePolicy::Cut } else { DrainDeadlinePolicy::Wait };
    FleetSettings {
        host_memory: Bytes::gib(random.between(0, 64)),
        queue: QueueSettings {
            policy: if random.chance(0.8) { QueuePolicy::Wait } else { QueuePolicy::Reject },
            max_waiting: random.between(4, 200) as u32,
            max_wait: Millis::secs(random.between(5, 120)),
        },
        turns: TurnSettings {
            protection: match random.between(0, 3) {
                0 => ProtectionPolicy::Always,
                1 => ProtectionPolicy::Never,
                _ => ProtectionPolicy::Expected,
            },
            residency: Millis(random.between(0, 10_000)),
            max_turn: Millis(random.between(2000, 20_000)),
            drain_deadline: Millis(random.between(500, 10_000)),
            on_deadline,
        },
        eviction: match random.between(0, 9) {
            0 => EvictionPolicy::Never,
            1 | 2 => EvictionPolicy::Cooldown,
            _ => EvictionPolicy::Residency,
        },
        timeouts: EngineTimeouts {
            progress: Millis::secs(10),
            sleep: Millis::secs(10),
            wake: Millis::secs(10),
            stop_grace: Millis::secs(random.between(1, 5)),
            meter_lag: Millis(random.between(500, 3000)),
            first_byte: Millis::secs(60),
        },
    }
}

pub(in crate::sim) fn model(
    name: &str,
    size: u64,
    accelerators: &[Accelerator],
    random: &mut SplitMix64,
) -> ModelSpec {
    let awake = Bytes::gib(random.between(2, size));
    let asleep = Bytes::mib(random.between(200, 2000));
    let can_sleep = random.chance(0.85);
    ModelSpec {
        name: ModelName::from(name),
        aliases: Vec::new(),
        accelerators: accelerator_requirement(accelerators, random),
        memory: EngineMemory { awake, asleep, host: Bytes::gib(awake.0 >> 31) },
        idle: IdlePolicy {
            sleep_after: random.chance(0.8).then(|| Millis::secs(random.between(2, 60))),
            stop_after: random.chance(0.5).then(|| Millis::secs(random.between(30, 120))),
            level: match random.between(0, 5) {
                0 => SleepLevelPolicy::Two,
                1 => SleepLevelPolicy::One,
                2 => SleepLevelPolicy::Never,
                _ => SleepLevelPolicy::Auto,
            },
            rehearse: RehearsalPolicy::Never,
        },
        replicas: if random.chance(0.3) { random.between(2, 3) as u32 } else { 1 },
        pinned: random.chance(0.06),
        min_replicas: 0,
        dependencies: Vec::new(),
        priority: if random.chance(0.2) { 1 } else { 0 },
        max_concurrency: random.chance(0.4).then(|| random.between(1, 8) as u32),
        start_timeout: Millis::secs(random.between(15, 40)),
        explicit_memory: random.chance(0.3),
        can_sleep,
        fingerprint: random.next_u64() >> 1,
        eviction: None,
        queue: QueueOverrides::default(),
        variants: Vec::new(),
        may_evict: ScaleUpEviction::default(),
        scaled: false,
        saturation_thresholds: Thresholds::default(),
    }
}

fn rehearsal(random: &mut SplitMix64) -> RehearsalPolicy {
    match random.between(0, 2) {
        0 => RehearsalPolicy::Never,
        1 => RehearsalPolicy::Start,
        _ => RehearsalPolicy::Idle,
    }
}

fn randomize_policy(spec: &mut ModelSpec, random: &mut SplitMix64) {
    let policy = if random.chance(0.5) { QueuePolicy::Wait } else { QueuePolicy::Reject };
    spec.queue = QueueOverrides {
        policy: random.chance(0.4).then_some(policy),
        max_wait: random.chance(0.4).then(|| Millis::secs(random.between(5, 120))),
        max_waiting: random.chance(0.4).then(|| random.between(0, 20) as u32),
    };
    let evictions = [EvictionPolicy::Residency, EvictionPolicy::Cooldown, EvictionPolicy::Never];
    spec.eviction = random.pick(&evictions).copied().filter(|_| random.chance(0.5));
}

/// Some models keep some or all of their engines awake without requests.
fn set_min_replicas(models: &mut [ModelSpec], random: &mut SplitMix64) {
    for spec in models {
        if random.chance(0.3) {
            spec.min_replicas = random.between(1, u64::from(spec.replicas)) as u32;
        }
    }
}

/// Makes some models depend on others: all on earlier ones or all on later ones, so that no cycle forms.
fn add_dependencies(models: &mut [ModelSpec], names: &[ModelName], random: &mut SplitMix64) {
    let forwards = random.chance(0.5);
    for (at, spec) in models.iter_mut().enumerate() {
        let (before, after) = names.split_at(at);
        let candidates = if forwards { before } else { after.get(1..).unwrap_or_default() };
        for name in candidates {
            if random.chance(0.4) {
                spec.dependencies.push(name.clone());
            }
        }
    }
}

/// Adds a pool with most of the models in it. Some other models need no accelerator.
fn add_pool(configuration: &mut FleetConfig, random: &mut SplitMix64) {
    let each = configuration.accelerators.first().map_or(Bytes::ZERO, |a| a.capacity);
    let units = random.between(1, 6);
    // In some pools there is less memory than the accelerators could hold.
    let tenths = if random.chance(0.3) { 7 } else { 10 };
    let pool = AcceleratorId::from("pool-0");
    let capacity = Bytes(each.0 / 10 * tenths * units);
    configuration.accelerators.push(Accelerator {
        metered: random.chance(0.3),
        units: u32::try_from(units).ok(),
        ..Accelerator::new(pool.clone(), capacity)
    });
    for spec in &mut configuration.models {
        if random.chance(0.7) {
            let max_units = if random.chance(0.3) { units } else { 1 };
            let count = random.between(1, max_units) as u32;
            spec.accelerators = AcceleratorRequirement::InPool { pool: pool.clone(), count };
        } else if random.chance(0.2) {
            spec.accelerators = AcceleratorRequirement::Count(0);
        }
    }
}

/// Adds a pool whose accelerators have slots, with most of the models in it.
fn add_pool_with_slots(configuration: &mut FleetConfig, random: &mut SplitMix64) {
    let each = configuration.accelerators.first().map_or(Bytes::ZERO, |a| a.capacity);
    let pool = AcceleratorId::from("slots-0");
    let (nodes, per_node) = (random.between(1, 3), random.between(1, 3));
    let slots = u32::try_from(random.between(1, 4)).ok();
    let metered = random.chance(0.2);
    let host_memory = random.chance(0.5).then(|| Bytes::gib(random.between(0, 32)));
    for node in 0..nodes {
        configuration.accelerators.extend((0..per_node).map(|n| Accelerator {
            metered,
            units: slots,
            pool: Some(pool.clone()),
            node: Some(format!("node-{node}")),
            host_memory,
            ..Accelerator::new(format!("slots-0-{node}-{n}").into(), each)
        }));
    }
    for spec in &mut configuration.models {
        if random.chance(0.7) {
            let most = if random.chance(0.3) { per_node } else { 1 };
            let count = random.between(1, most) as u32;
            spec.accelerators = AcceleratorRequirement::Slots { pool: pool.clone(), count };
        }
    }
}

fn accelerator_requirement(accelerators: &[Accelerator], random: &mut SplitMix64) -> AcceleratorRequirement {
    let all = accelerators.len() as u64;
    if random.chance(0.1) {
        let ids: Vec<AcceleratorId> = random.pick(accelerators).map(|a| a.id.clone()).into_iter().collect();
        return AcceleratorRequirement::Ids(ids);
    }
    let many = random.chance(0.25);
    AcceleratorRequirement::Count(if many { random.between(1, all) as u32 } else { 1 })
}

fn sources(model: &ModelName, random: &mut SplitMix64) -> Vec<RequestSource> {
    let behaviour = ClientBehaviour {
        stream_share: random.fraction(),
        exchange: (Millis(20), Millis(random.between(50, 6000))),
        long_share: if random.chance(0.3) { 0.05 } else { 0.0 },
        long_exchange: Millis::secs(random.between(20, 90)),
        leave_parked_share: if random.chance(0.4) { 0.2 } else { 0.0 },
        leave_streaming_share: if random.chance(0.4) { 0.2 } else { 0.0 },
        stall_share: if random.chance(0.2) { 0.05 } else { 0.0 },
        short_timeout_share: if random.chance(0.2) { 0.2 } else { 0.0 },
        keyed: random.chance(0.3),
    };
    let every = Millis(random.between(2000, 40_000));
    let pattern = match random.between(0, 3) {
        0 => ArrivalPattern::Poisson { mean_gap: Millis(random.between(100, 10_000)) },
        1 => ArrivalPattern::Poisson { mean_gap: Millis(random.between(5000, 60_000)) },
        _ => ArrivalPattern::Bursts {
            size: random.between(1, 12) as u32,
            spread: Millis(random.between(0, 1000)),
            period: every,
        },
    };
    let source = RequestSource {
        model: model.clone(),
        pattern,
        behaviour,
        offset: Millis(random.between(0, every.0)),
    };
    // A model without requests still competes with the others.
    if random.chance(0.1) { Vec::new() } else { vec![source] }
}

fn hardware_profile(random: &mut SplitMix64, faults: &FaultRates) -> HardwareProfile {
    let wake = random.between(20, 1500);
    let sleep = random.between(20, 1500);
    HardwareProfile {
        start_time: (Millis::secs(1), Millis::secs(random.between(2, 12))),
        wake_time: (Millis(wake), Millis(wake * 3)),
        sleep_time: (Millis(sleep), Millis(sleep * 3)),
        stop_time: (Millis(20), Millis(900)),
        first_byte: (Millis(5), Millis(200)),
        placement_time: if random.chance(0.2) {
            (Millis(1), Millis(50))
        } else {
            (Millis::ZERO, Millis::ZERO)
        },
        release_time: (Millis::ZERO, Millis(30)),
        health_interval: Millis::secs(5),
        // Without this, changing foreign memory cannot be told from ours.
        meter_per_process: faults.foreign_memory.is_some() || random.chance(0.6),
        meter_period: random.chance(0.5).then(|| Millis::secs(10)),
    }
}

/// Each seed has some of the faults, so that each fault occurs with and without the others.
fn fault_rates(random: &mut SplitMix64) -> FaultRates {
    if random.chance(0.15) {
        return FaultRates::default();
    }
    let mut some = |p: f64| if random.chance(0.3) { p } else { 0.0 };
    let mut faults = FaultRates {
        exit_at_start: some(0.15),
        out_of_memory_at_start: some(0.1),
        start_failed: some(0.1),
        hang_at_start: some(0.1),
        canary_fails: some(0.1),
        wake_refused: some(0.1),
        wake_hangs: some(0.1),
        sleep_refused: some(0.1),
        sleep_hangs: some(0.1),
        late_memory: some(0.3),
        oversized_residue: some(0.2),
        ignores_term: some(0.3),
        reservation_conflict: some(0.2),
        leaves_at_grant: some(0.1),
        ..FaultRates::default()
    };
    let mut every = |low: u64, high: u64| random.chance(0.2).then(|| Millis::secs(random.between(low, high)));
    faults.engine_dies = every(10, 60);
    faults.engine_hangs = every(20, 90);
    faults.accelerator_lost = every(30, 120);
    faults.foreign_memory = every(20, 60);
    faults.reload = every(15, 60);
    faults.operator_action = every(5, 30);
    faults.gateway_restart = every(30, 120);
    faults
}
