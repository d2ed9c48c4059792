//! The simulated model: replicas that start, serve and end, and the requests between them, second by second.
//!
//! Requests go to the replica with the shortest queue, as of the last second and what it got since. All policies share
//! this rule and the rest of the world, so they differ in the number of replicas alone.

use std::{cmp::Reverse, collections::VecDeque};

use super::{
    AutoscalerKind, LoadScenario,
    engine::{QueuedRequest, SimulatedEngine},
    hpa::{HpaScaler, QueueMetric},
    load_report::{LoadRecorder, LoadReport, SecondReading},
    request_trace::{RequestTrace, TracedRequest},
    scaling_policy::{
        LoadReading, ModelObservation, ReplicaObservation, RouseScaler, ScalingPolicy, SimulatedVariant,
        VariantObservation,
    },
};
use crate::units::{Millis, Tick};

/// Seconds between two decisions, and between two scrapes.
const INTERVAL: u64 = 15;
/// Seconds over which the highest load counts, as in `max_over_time[1m]`.
const PEAK_WINDOW: usize = 60;
/// Seconds after the load for which requests that still wait are served.
const AFTERMATH: u64 = 3600;

struct SimulatedReplica {
    number: u32,
    /// Index of its variant.
    variant: usize,
    ready_at: u64,
    /// It gets no further requests, and ends with its last one.
    draining: bool,
    engine: SimulatedEngine,
    /// Its load in each of the last seconds.
    loads: VecDeque<LoadReading>,
}

struct LoadWorld<'a> {
    scenario: &'a LoadScenario,
    policy: Box<dyn ScalingPolicy>,
    replicas: Vec<SimulatedReplica>,
    /// Indices of the replicas that get requests.
    serving: Vec<usize>,
    /// Requests that wait for a first replica.
    parked: VecDeque<QueuedRequest>,
    /// Replicas started so far.
    started: u32,
    /// Seconds after the start.
    now: u64,
    /// When a request last came or was in an engine.
    used_at: u64,
    recorder: LoadRecorder,
}

/// Simulates a trace under an autoscaler. Saturation, hours and cost count until the end of the trace.
#[must_use]
pub fn simulate(trace: &RequestTrace, scenario: &LoadScenario, autoscaler: AutoscalerKind) -> LoadReport {
    let mut world = LoadWorld::new(scenario, autoscaler);
    let mut requests = trace.requests.iter().peekable();
    let length = trace.lasts.0 / 1000 + 1;
    while world.now < length {
        let end = (world.now + 1) * 1000;
        while let Some(request) = requests.next_if(|request| request.at.0 < end) {
            world.receive(request);
        }
        world.pass_second();
        let reading = world.read();
        world.recorder.add(&reading);
        if world.now.is_multiple_of(INTERVAL) {
            world.recorder.sample(&reading);
        }
        world.scale_when_due();
    }
    while world.now < length + AFTERMATH && world.unanswered().next().is_some() {
        world.pass_second();
        world.scale_when_due();
    }
    world.finish(autoscaler)
}

impl<'a> LoadWorld<'a> {
    fn new(scenario: &'a LoadScenario, autoscaler: AutoscalerKind) -> Self {
        let policy: Box<dyn ScalingPolicy> = match autoscaler {
            AutoscalerKind::Rouse => Box::new(RouseScaler::new(scenario.policy, scenario.thresholds)),
            AutoscalerKind::Hpa => Box::new(HpaScaler::new(QueueMetric::Pods)),
            AutoscalerKind::Keda => Box::new(HpaScaler::new(QueueMetric::External)),
        };
        let mut world = Self {
            scenario,
            policy,
            replicas: Vec::new(),
            serving: Vec::new(),
            parked: VecDeque::new(),
            started: 0,
            now: 0,
            used_at: 0,
            recorder: LoadRecorder::default(),
        };
        for (index, variant) in scenario.variants.iter().enumerate() {
            (0..variant.min).for_each(|_| world.start(index, 0));
        }
        world.refresh_serving();
        world
    }

    fn receive(&mut self, request: &TracedRequest) {
        self.used_at = self.now;
        self.send(QueuedRequest {
            arrived: request.at.0 as f64 / 1000.0,
            prompt: f64::from(request.prompt),
            output: f64::from(request.output),
            answered: false,
        });
    }

    fn send(&mut self, request: QueuedRequest) {
        let engine = |index: usize| &self.replicas[index].engine;
        let least = self.serving.iter().copied().min_by(|a, b| engine(*a).compare_load(engine(*b)));
        match least {
            Some(index) => self.replicas[index].engine.enqueue(request, self.recorder.ttfts()),
            None => self.parked.push_back(request),
        }
    }

    /// Serves for another second.
    fn pass_second(&mut self) {
        self.now += 1;
        for replica in self.replicas.iter_mut().filter(|replica| replica.ready_at < self.now) {
            replica.engine.advance(self.now as f64, self.recorder.ttfts());
            if !replica.engine.is_idle() {
                self.used_at = self.now;
            }
            if replica.loads.len() == PEAK_WINDOW {
                replica.loads.pop_front();
            }
            let load = replica.load();
            replica.loads.push_back(load);
        }
    }

    fn read(&self) -> SecondReading {
        let in_engines = self.replicas.iter().map(|replica| replica.engine.waiting()).sum::<usize>();
        let hourly_cost = |replica: &SimulatedReplica| self.scenario.variants[replica.variant].cost;
        SecondReading {
            serving: self.serving.iter().map(|index| self.replicas[*index].load()).collect(),
            replicas: self.replicas.len() as u32,
            waiting: (in_engines + self.parked.len()) as u32,
            hourly_cost: self.replicas.iter().map(hourly_cost).sum(),
        }
    }

    /// Ends drained replicas, asks the policy at the end of each interval, and lets new replicas serve.
    fn scale_when_due(&mut self) {
        if self.now.is_multiple_of(INTERVAL) {
            let observed = self.observe();
            let wanted = self.policy.decide(&observed, Tick(self.now * 1000));
            for (variant, replicas) in wanted.into_iter().enumerate() {
                self.resize(variant, replicas);
            }
        }
        self.replicas.retain(|replica| !(replica.draining && replica.engine.is_idle()));
        self.refresh_serving();
        if !self.serving.is_empty() {
            for request in std::mem::take(&mut self.parked) {
                self.send(request);
            }
        }
    }

    fn observe(&self) -> ModelObservation<'a> {
        let scenario: &'a LoadScenario = self.scenario;
        let variants = scenario.variants.iter().enumerate();
        let observe = |(index, variant): (usize, &'a SimulatedVariant)| {
            let own = || self.replicas.iter().filter(move |own| own.variant == index && !own.draining);
            let serving = own().filter(|replica| replica.serves(self.now));
            let current = own().count() as u32;
            let serving = serving.map(SimulatedReplica::observe).collect();
            VariantObservation { variant, current, serving }
        };
        ModelObservation {
            variants: variants.map(observe).collect(),
            parked: self.parked.len() as u32,
            idle_for: Millis::secs(self.now - self.used_at),
        }
    }

    fn resize(&mut self, variant: usize, wanted: u32) {
        let own = self.replicas.iter_mut().filter(|own| own.variant == variant && !own.draining);
        let mut live: Vec<&mut SimulatedReplica> = own.collect();
        let current = live.len() as u32;
        // As Kubernetes does: first those that do not serve yet, then the youngest.
        live.sort_by_key(|replica| Reverse((replica.ready_at, replica.number)));
        let surplus = current.saturating_sub(wanted);
        live.into_iter().take(surplus as usize).for_each(|replica| replica.draining = true);
        let ready_at = self.now + self.scenario.start_time.0.div_ceil(1000);
        (current..wanted).for_each(|_| self.start(variant, ready_at));
    }

    fn start(&mut self, variant: usize, ready_at: u64) {
        self.replicas.push(SimulatedReplica {
            number: self.started,
            variant,
            ready_at,
            draining: false,
            engine: SimulatedEngine::new(self.scenario.variants[variant].speed, ready_at as f64),
            loads: VecDeque::new(),
        });
        self.started += 1;
    }

    fn refresh_serving(&mut self) {
        let serves = |index: &usize| self.replicas[*index].serves(self.now);
        self.serving = (0..self.replicas.len()).filter(serves).collect();
    }

    /// When the requests arrived whose clients still wait for their first token. Seconds.
    fn unanswered(&self) -> impl Iterator<Item = f64> {
        let parked = self.parked.iter().map(|request| request.arrived);
        self.replicas.iter().flat_map(|replica| replica.engine.unanswered()).chain(parked)
    }

    /// Requests without an answer by now count with the time that they have waited so far.
    fn finish(mut self, autoscaler: AutoscalerKind) -> LoadReport {
        let so_far: Vec<f64> = self.unanswered().map(|arrived| self.now as f64 - arrived).collect();
        self.recorder.ttfts().extend(so_far);
        self.recorder.finish(autoscaler)
    }
}

impl SimulatedReplica {
    const fn serves(&self, now: u64) -> bool {
        !self.draining && self.ready_at <= now
    }

    fn load(&self) -> LoadReading {
        LoadReading { kv_use: self.engine.kv_use(), waiting: self.engine.waiting() as u32 }
    }

    fn observe(&self) -> ReplicaObservation {
        let peak = self.loads.iter().copied().fold(self.load(), LoadReading::max);
        ReplicaObservation { number: self.number, waiting: self.engine.waiting() as u32, peak }
    }
}
