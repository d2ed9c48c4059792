//! The requests of a journal, as far as it has them.
//!
//! A journal has each request that waited, and of all others only the number of leases that the driver sampled at each
//! of its turns. Between two samples requests may come and go unseen, so the requests found here are fewer than there
//! were. The oldest lease of an engine is taken to end first.

use std::collections::{BTreeMap, VecDeque};

use super::{RecordedEnd, RecordedRequest};
use crate::{
    fleet::{
        Fleet,
        command::Command,
        event::{Event, Waiter, WaiterId},
    },
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};

/// Collects requests from the turns of a journal.
#[derive(Debug, Default)]
pub(super) struct LeaseSamples {
    pub(super) requests: Vec<RecordedRequest>,
    /// Requests among them that did not wait, and so are known by samples alone.
    pub(super) estimated: usize,
    /// Priorities of API keys whose requests waited.
    pub(super) key_priorities: BTreeMap<String, i32>,
    waiting: BTreeMap<WaiterId, RecordedRequest>,
    gates: BTreeMap<EngineId, SampledLeases>,
}

/// Leases on one engine generation.
#[derive(Debug, Default)]
struct SampledLeases {
    generation: Generation,
    /// Leases that have not ended, with the moment at which they began. The oldest is first.
    open: VecDeque<(Tick, RecordedRequest)>,
    last_lease_end: Tick,
}

/// The fields of [`Event::GateSampled`] that tell requests.
#[derive(Clone, Copy)]
struct GateSample {
    at: Tick,
    leases: usize,
    last_lease_end: Tick,
    idle_gap: Option<Millis>,
}

impl LeaseSamples {
    /// Drops what is under way: the next turn belongs to another run of the gateway, or follows a gap.
    pub(super) fn interrupt(&mut self) {
        self.waiting.clear();
        self.gates.clear();
    }

    pub(super) fn observe_event(&mut self, event: &Event, at: Tick, fleet: &Fleet) {
        match event {
            Event::Arrived { waiter } => {
                let model_priority = fleet.spec(&waiter.model).map_or(0, |spec| spec.priority);
                let request = RecordedRequest::waiting(waiter, waiter.band.saturating_sub(model_priority));
                self.key_priorities.insert(request.key.clone(), request.key_priority);
                self.waiting.insert(waiter.id, request);
            }
            Event::Left { waiter } => self.end_wait(*waiter, RecordedEnd::Left, at),
            Event::GateSampled { engine, generation, leases, last_lease_end, idle_gap, .. } => {
                let sample = GateSample {
                    at,
                    leases: *leases as usize,
                    last_lease_end: *last_lease_end,
                    idle_gap: *idle_gap,
                };
                self.apply_sample(engine, *generation, sample);
            }
            Event::Gone { engine, .. } => {
                let gate = self.gates.remove(engine).unwrap_or_default();
                self.requests.extend(gate.open.into_iter().map(|(began, request)| request.served(began, at)));
            }
            _ => {}
        }
    }

    pub(super) fn observe_command(&mut self, command: &Command, at: Tick) {
        match command {
            Command::Grant { waiter, engine, generation, .. } => {
                if let Some(mut request) = self.waiting.remove(waiter) {
                    request.wait = at.since(request.at);
                    self.gate(engine, *generation).open.push_back((at, request));
                }
            }
            Command::Refuse { waiter, .. } => self.end_wait(*waiter, RecordedEnd::Refused, at),
            _ => {}
        }
    }

    fn end_wait(&mut self, waiter: WaiterId, end: RecordedEnd, at: Tick) {
        if let Some(request) = self.waiting.remove(&waiter) {
            self.requests.push(RecordedRequest { wait: at.since(request.at), end, ..request });
        }
    }

    fn gate(&mut self, engine: &EngineId, generation: Generation) -> &mut SampledLeases {
        let gate = self.gates.entry(engine.clone()).or_default();
        if gate.generation != generation {
            *gate = SampledLeases { generation, ..SampledLeases::default() };
        }
        gate
    }

    fn apply_sample(&mut self, engine: &EngineId, generation: Generation, sample: GateSample) {
        let GateSample { at, leases, last_lease_end, idle_gap } = sample;
        let gate = self.gate(engine, generation);
        let previous_end = std::mem::replace(&mut gate.last_lease_end, last_lease_end);
        // The first sample of an adopted engine has the end of a lease from before.
        let has_ended = previous_end > Tick(0) && last_lease_end > previous_end;
        let mut ended = Vec::new();
        let mut estimated = 0;
        if has_ended && gate.open.is_empty() {
            let began = idle_gap.filter(|_| leases == 0).map_or(last_lease_end, |gap| previous_end + gap);
            let began = began.min(last_lease_end);
            ended.push(RecordedRequest::unseen(&engine.model, began).served(began, last_lease_end));
            estimated += 1;
        } else {
            let count = gate.open.len().saturating_sub(leases).max(usize::from(has_ended));
            let oldest = gate.open.drain(..count.min(gate.open.len()));
            ended.extend(oldest.map(|(began, request)| request.served(began, last_lease_end)));
        }
        while gate.open.len() < leases {
            gate.open.push_back((at, RecordedRequest::unseen(&engine.model, at)));
            estimated += 1;
        }
        self.requests.append(&mut ended);
        self.estimated += estimated;
    }
}

impl RecordedRequest {
    fn waiting(waiter: &Waiter, key_priority: i32) -> Self {
        Self {
            at: waiter.arrived,
            model: waiter.model.clone(),
            key: waiter.key.clone(),
            key_priority,
            client: waiter.client,
            tokens: 0,
            wait: Millis::ZERO,
            end: RecordedEnd::Refused,
        }
    }

    /// A request that went to an awake engine at once.
    fn unseen(model: &ModelName, at: Tick) -> Self {
        Self {
            at,
            model: model.clone(),
            key: String::new(),
            key_priority: 0,
            client: 0,
            tokens: 0,
            wait: Millis::ZERO,
            end: RecordedEnd::Refused,
        }
    }

    fn served(self, began: Tick, ended: Tick) -> Self {
        Self { end: RecordedEnd::Served(ended.since(began)), ..self }
    }
}
