//! One simulated run of a recorded machine.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    MachineActivity, MachineRecord, MachineReport, RecordedEnd, RecordedRequest, TransitionTimes,
    accelerator_use::{AcceleratorUse, AcceleratorUseMeter},
    median,
};
use crate::{
    model::{EngineId, ModelName},
    sim::{
        InvariantViolation, Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld,
        process::{ProcessStep, SimulatedProcessPhase},
    },
    units::{Generation, Millis, Tick},
};

/// A recorded duration includes the time to the first byte.
const FIRST_BYTE: Millis = Millis(1);
/// Nothing fails here, so health probes would only cost turns.
const HEALTH_INTERVAL: Millis = Millis::secs(3600);
/// For requests that no engine served, if no request was served at all.
const UNKNOWN_DURATION: Millis = Millis::secs(1);

/// Refusals in the tally.
const REFUSALS: [&str; 7] = [
    "refused: insufficient memory",
    "refused: queue full",
    "refused: model not ready",
    "refused: model not found",
    "refused: shutting down",
    "refused: engine failed",
    "refused: another fault",
];

struct MachineRun {
    world: SimulatedWorld,
    times: BTreeMap<ModelName, TransitionTimes>,
    /// The phase, by generation and serial, that was last scheduled by its model's times.
    timed_phases: BTreeMap<EngineId, (Generation, u32)>,
    meter: AcceleratorUseMeter,
}

/// Simulates the machine with these requests, which are in the order of their arrival.
///
/// No engine runs at first. Engines without measured times take the `assumed` ones. A request that was refused takes
/// the median duration of its model, and a client that left leaves again after the same wait.
///
/// # Errors
/// A broken invariant, which is a defect of the decisions.
pub fn simulate_machine(
    machine: &MachineRecord,
    requests: &[RecordedRequest],
    assumed: TransitionTimes,
) -> Result<MachineReport, InvariantViolation> {
    let models = &machine.configuration.models;
    let times = models.iter().map(|spec| (spec.name.clone(), machine.transition_times(spec, assumed)));
    let mut run = MachineRun {
        times: times.collect(),
        world: SimulatedWorld::new(scenario(machine, requests)),
        timed_phases: BTreeMap::new(),
        meter: AcceleratorUseMeter::default(),
    };
    run.run_until_served(requests)?;
    Ok(run.report(requests))
}

fn scenario(machine: &MachineRecord, requests: &[RecordedRequest]) -> Scenario {
    let mut configuration = machine.configuration.clone();
    for model in &mut configuration.models {
        // Simulated engines report no load, so nothing would ever set a target: the model has its engines as spares.
        model.scaled = false;
    }
    let mut scenario = Scenario::new("one machine", configuration);
    let start = requests.first().map_or(scenario.start, |first| first.at);
    scenario.start = start;
    scenario.hardware.first_byte = (FIRST_BYTE, FIRST_BYTE);
    scenario.hardware.health_interval = HEALTH_INTERVAL;
    if let Some(stop_time) = machine.stop_time {
        scenario.hardware.stop_time = (stop_time, stop_time);
    }
    let durations = usual_durations(requests);
    let actions = requests.iter().map(|request| {
        let usual = durations.get(&Some(&request.model)).or_else(|| durations.get(&None)).copied();
        let simulated = simulated_request(request, usual.unwrap_or(UNKNOWN_DURATION));
        (request.at.since(start), ScenarioAction::SendRequest(simulated))
    });
    scenario.actions = actions.collect();
    scenario
}

/// The median time that engines had a request, by model; `None` is the median over all models.
fn usual_durations(requests: &[RecordedRequest]) -> BTreeMap<Option<&ModelName>, Millis> {
    let mut durations: BTreeMap<Option<&ModelName>, Vec<Millis>> = BTreeMap::new();
    for request in requests {
        if let RecordedEnd::Served(duration) = request.end {
            for group in [Some(&request.model), None] {
                durations.entry(group).or_default().push(duration);
            }
        }
    }
    let medians = durations.into_iter().filter_map(|(group, durations)| Some((group, median(durations)?)));
    medians.collect()
}

fn simulated_request(request: &RecordedRequest, usual: Millis) -> SimulatedRequest {
    let duration = if let RecordedEnd::Served(duration) = request.end { duration } else { usual };
    let exchange = Millis(duration.0.saturating_sub(FIRST_BYTE.0));
    SimulatedRequest {
        band: request.key_priority,
        key: request.key.clone(),
        client: request.client,
        tokens: request.tokens,
        max_park_time: (request.end == RecordedEnd::Left).then_some(request.wait),
        ..SimulatedRequest::stream(request.model.as_str(), exchange)
    }
}

impl MachineRun {
    /// Runs until all requests have arrived and no client waits or has an engine. Accelerators are measured until the
    /// last arrival.
    fn run_until_served(&mut self, requests: &[RecordedRequest]) -> Result<(), InvariantViolation> {
        let last_arrival = requests.last().map_or(Tick(0), |last| last.at);
        let count = requests.len() as u64;
        while self.world.tally().count("requests") < count || !self.world.clients.is_empty() {
            let (since, state) = (self.world.now(), AcceleratorUse::of(&self.world));
            // One moment at a time, so that nothing changes between two of them.
            let next_event = self.world.event_queue.next_at();
            let has_turned = self.world.step_until(next_event.unwrap_or(Tick(u64::MAX)))?;
            self.meter.add(state, self.world.now().min(last_arrival).since(since));
            if !has_turned && next_event.is_none() {
                break;
            }
            self.apply_transition_times();
        }
        Ok(())
    }

    /// Schedules the steps of phases that have just begun by the times of their model.
    ///
    /// The world has scheduled them by its hardware profile, which is the same for all models. A phase that begins
    /// again makes those steps void.
    fn apply_transition_times(&mut self) {
        let processes = self.world.machine.processes.values();
        let begun = processes.filter(|process| {
            let takes_time = matches!(
                process.phase,
                SimulatedProcessPhase::Loading
                    | SimulatedProcessPhase::Waking(_)
                    | SimulatedProcessPhase::FallingAsleep(_)
            );
            let phase = (process.generation, process.serial);
            takes_time && self.timed_phases.get(&process.engine) != Some(&phase)
        });
        let begun: Vec<EngineId> = begun.map(|process| process.engine.clone()).collect();
        for engine in begun {
            let Some(times) = self.times.get(&engine.model).copied() else { continue };
            let Some(process) = self.world.machine.processes.get_mut(&engine) else { continue };
            let phase = process.phase;
            process.enter_phase(phase);
            let timed_phase = (process.generation, process.serial);
            for (after, step) in phase_steps(phase, times) {
                self.world.schedule_step(&engine, after, step);
            }
            self.timed_phases.insert(engine, timed_phase);
        }
    }

    fn report(&self, requests: &[RecordedRequest]) -> MachineReport {
        let tally = self.world.tally();
        let keys: BTreeSet<&str> = requests.iter().map(|request| request.key.as_str()).collect();
        let mut waits: Vec<Millis> = keys.iter().flat_map(|key| self.world.waits(key)).copied().collect();
        let at_once = usize::try_from(tally.count("requests on the hot path")).unwrap_or_default();
        waits.resize(waits.len() + at_once, Millis::ZERO);
        MachineReport {
            requests: requests.len(),
            refused: REFUSALS.iter().map(|refusal| tally.count(refusal)).sum(),
            left: tally.count("clients left while parked"),
            activity: Some(MachineActivity {
                swaps: tally.count("swaps"),
                starts: tally.count("launches"),
                wakes: tally.count("wakes"),
                hours: self.meter.hours(),
            }),
            ..MachineReport::with_waits(waits)
        }
    }
}

/// The steps that end a phase, with their times after its beginning.
fn phase_steps(phase: SimulatedProcessPhase, times: TransitionTimes) -> Vec<(Millis, ProcessStep)> {
    let TransitionTimes { start, wake, sleep } = times;
    // The process exists at once, and no other step comes before that.
    let of_start = |tenths: u64| Millis((start.0 * tenths / 10).max(1));
    match phase {
        SimulatedProcessPhase::Loading => vec![
            (Millis(1), ProcessStep::Spawned),
            (of_start(4), ProcessStep::WeightsLoaded),
            (of_start(7), ProcessStep::CacheAllocated),
            (of_start(10), ProcessStep::Ready),
        ],
        SimulatedProcessPhase::Waking(_) => {
            vec![(Millis(wake.0 / 3), ProcessStep::WakeWeightsLoaded), (wake, ProcessStep::Woken)]
        }
        SimulatedProcessPhase::FallingAsleep(_) => vec![(sleep, ProcessStep::Slept)],
        SimulatedProcessPhase::Awake | SimulatedProcessPhase::Asleep(_) | SimulatedProcessPhase::Exiting => {
            Vec::new()
        }
    }
}
