//! The simulated data path: gates, leases, and each request from its arrival to its end.

use std::collections::BTreeSet;

use super::{
    client::{ExchangeEnd, SimulatedClient, SimulatedClientId, SimulatedClientState, SimulatedRequest},
    platform_defect::PlatformDefect,
    process::SimulatedProcessPhase,
    world::{SimulatedWorld, WorldEvent},
};
use crate::{
    engine::turn_clients::{MAX_DISTINCT_CLIENTS, TurnClients},
    fault::FailureCause,
    fleet::event::{CanaryVerdict, Event, WaiterId},
    model::EngineId,
    units::{Generation, Millis, Tick},
};

/// The gate of one engine generation.
#[derive(Clone, Debug)]
pub(super) struct SimulatedGate {
    pub(super) generation: Generation,
    pub(super) open: bool,
    pub(super) public: bool,
    /// Closed while the engine's stub keeps its own gate closed; the platform polls the stub.
    pub(super) awaiting_stub: bool,
    pub(super) stub_gate_watched: bool,
    /// The gate was open at some time.
    pub(super) was_opened: bool,
    /// Whether `Drained` was sent, and delivered, since the gate last closed.
    pub(super) drained_sent: bool,
    pub(super) drained_delivered: bool,
    pub(super) leases: BTreeSet<SimulatedClientId>,
    pub(super) limit: Option<u32>,
    pub(super) last_lease_end: Tick,
    pub(super) last_byte: Tick,
    /// Clients that held a lease since the gate last closed.
    pub(super) clients: TurnClients,
    pub(super) idle_gap: Option<Millis>,
    /// The driver saw the gate in use or granted a lease on it, and must be notified when it becomes idle.
    pub(super) seen_busy: bool,
    /// The last sample that the fleet received.
    pub(super) last_sample: (u32, Tick, Tick),
}

/// How long a client waits for a byte from a silent engine.
const SILENCE_TIMEOUT: Millis = Millis::secs(60);
/// How long a canary may take to its first byte.
const CANARY_TIMEOUT: Millis = Millis::secs(10);
/// How long a stub takes to reject a request, and the interval between polls of its gate.
const STUB_REJECT_DELAY: Millis = Millis(1);
const STUB_POLL_INTERVAL: (Millis, Millis) = (Millis(10), Millis(500));

impl SimulatedGate {
    pub(super) const fn new(generation: Generation, limit: Option<u32>) -> Self {
        Self {
            generation,
            open: false,
            public: false,
            awaiting_stub: false,
            stub_gate_watched: false,
            was_opened: false,
            drained_sent: false,
            drained_delivered: false,
            leases: BTreeSet::new(),
            limit,
            last_lease_end: Tick(0),
            last_byte: Tick(0),
            clients: TurnClients([0; MAX_DISTINCT_CLIENTS]),
            idle_gap: None,
            seen_busy: false,
            last_sample: (0, Tick(0), Tick(0)),
        }
    }

    /// Forces a new sample. The fleet counts a lease when it grants it, so its state no longer equals the last sample.
    pub(super) const fn invalidate_sample(&mut self) {
        self.last_sample.0 = u32::MAX;
    }

    pub(super) fn is_full(&self) -> bool {
        self.limit.is_some_and(|limit| self.leases.len() >= limit as usize)
    }
}

impl SimulatedWorld {
    /// Routes an arriving request to the hot path or the queue.
    pub(super) fn request_arrives(&mut self, request: SimulatedRequest) {
        self.tally.add("requests");
        if !self.is_configured(&request.model) {
            self.tally.add("requests for unknown models");
            return;
        }
        let configuration = &self.scenario.configuration;
        let spec = configuration.models.iter().find(|spec| spec.name == request.model);
        let settings = &configuration.settings;
        let mut wait = spec.map_or(settings.queue.max_wait, |spec| settings.max_wait_of(spec));
        if let Some(timeout) = request.timeout {
            wait = Millis(wait.0.min(timeout.0));
        }
        let client = SimulatedClient {
            request,
            arrived: self.now,
            deadline: self.now + wait,
            state: SimulatedClientState::Parked(WaiterId(0)),
            serial: 0,
        };
        self.next_client += 1;
        let id = SimulatedClientId(self.next_client);
        match self.route(&client.request.model) {
            Some((engine, generation)) => {
                self.clients.insert(id, client);
                self.tally.add("requests on the hot path");
                self.begin_exchange(id, engine, generation, false);
            }
            None => self.park(id, client),
        }
    }

    pub(super) fn repeat_request(&mut self, mut request: SimulatedRequest) {
        if let Some(pause) = request.repeat_pauses.first().copied().filter(|_| !self.quiescing) {
            request.repeat_pauses.rotate_left(1);
            self.event_queue.schedule(self.now + pause, WorldEvent::RequestArrives(request));
        }
    }

    pub(super) fn park(&mut self, id: SimulatedClientId, mut client: SimulatedClient) {
        self.next_waiter += 1;
        let waiter = WaiterId(self.next_waiter);
        client.state = SimulatedClientState::Parked(waiter);
        client.serial += 1;
        let request = &client.request;
        let arrived = client.as_waiter(waiter, self.priority(&request.model));
        self.send_event(Event::Arrived { waiter: arrived });
        let parked = self.parked.entry(request.model.clone()).or_default();
        if *parked == 0 {
            self.waiting_since.insert(request.model.clone(), self.now);
        }
        *parked += 1;
        self.waiters.insert(waiter, id);
        let serial = client.serial;
        if let Some(patience) = request.max_park_time {
            self.event_queue.schedule(self.now + patience, WorldEvent::ClientLeaves { client: id, serial });
        }
        self.event_queue
            .schedule(client.deadline + Millis(1), WorldEvent::CheckWaitDeadline { client: id, serial });
        self.clients.insert(id, client);
    }

    /// Removes the client from the queue, however its wait ended.
    pub(super) fn unpark(&mut self, waiter: WaiterId) -> Option<SimulatedClientId> {
        let id = self.waiters.remove(&waiter)?;
        if let Some(client) = self.clients.get(&id)
            && let Some(n) = self.parked.get_mut(&client.request.model)
        {
            *n -= 1;
        }
        Some(id)
    }

    /// Gives the client a lease on an engine and begins its exchange.
    pub(super) fn begin_exchange(
        &mut self,
        id: SimulatedClientId,
        engine: EngineId,
        generation: Generation,
        canary: bool,
    ) {
        self.check_traffic(&engine, generation);
        let first = self.random_duration(self.scenario.hardware.first_byte);
        let Some(gate) = self.gates.get_mut(&engine) else {
            return;
        };
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        gate.leases.insert(id);
        gate.clients.record(client.request.client);
        if gate.leases.len() == 1 && gate.last_lease_end > Tick(0) {
            gate.idle_gap = Some(self.now.since(gate.last_lease_end));
        }
        gate.invalidate_sample();
        client.serial += 1;
        client.state = SimulatedClientState::HoldsLease { engine: engine.clone(), generation, canary };
        let (serial, request) = (client.serial, &client.request);
        let ends = if request.stalls { SILENCE_TIMEOUT } else { first + request.exchange };
        let leaves = request.leaves_after;
        if self.machine.process(&engine, generation).is_some_and(|process| process.stub_gate_closed) {
            return self
                .event_queue
                .schedule(self.now + STUB_REJECT_DELAY, WorldEvent::StubRejects { client: id, serial });
        }
        if canary {
            self.event_queue.schedule(self.now + first, WorldEvent::CanaryFirstByte { client: id, serial });
        }
        self.event_queue.schedule(self.now + ends, WorldEvent::ExchangeEnds { client: id, serial });
        if let Some(after) = leaves {
            self.event_queue.schedule(self.now + after, WorldEvent::ClientLeaves { client: id, serial });
        }
    }

    /// Gives the canary's verdict at its first byte.
    pub(super) fn canary_first_byte(&mut self, id: SimulatedClientId, serial: u32) {
        let Some(client) = self.clients.get_mut(&id).filter(|c| c.serial == serial) else {
            return;
        };
        let SimulatedClientState::HoldsLease { engine, generation, canary: canary @ true } =
            &mut client.state
        else {
            return;
        };
        let (engine, generation) = (engine.clone(), *generation);
        match self.machine.process(&engine, generation) {
            Some(process) if process.corrupt => self.end_exchange(id, ExchangeEnd::EngineFailed),
            Some(process) if process.hung => {
                let timeout_event = WorldEvent::SilenceTimeout { client: id, serial };
                self.event_queue.schedule(self.now + CANARY_TIMEOUT, timeout_event);
            }
            _ => {
                *canary = false;
                self.end_quoted_wait(id);
                self.send_event(Event::Canary { engine, generation, verdict: CanaryVerdict::Passed });
            }
        }
    }

    /// Ends the exchange at its last byte. If the engine hangs, the silence timeout ends it.
    pub(super) fn exchange_ends(&mut self, id: SimulatedClientId, serial: u32) {
        let Some(client) = self.clients.get(&id).filter(|c| c.serial == serial) else {
            return;
        };
        let SimulatedClientState::HoldsLease { engine, generation, .. } = &client.state else {
            return;
        };
        let stalls = client.request.stalls;
        let (engine, generation) = (engine.clone(), *generation);
        let process = self.machine.process(&engine, generation);
        if process.as_ref().is_some_and(|p| p.hung) {
            self.event_queue
                .schedule(self.now + SILENCE_TIMEOUT, WorldEvent::SilenceTimeout { client: id, serial });
        } else if process.is_some_and(|p| p.corrupt) {
            self.end_exchange(id, ExchangeEnd::EngineFailed);
        } else {
            self.end_exchange(id, if stalls { ExchangeEnd::Stalled } else { ExchangeEnd::Served });
        }
    }

    /// Ends the lease. A canary without an answer gets its verdict. The request waits again if it was a streamed canary
    /// whose engine failed or lease was revoked, or if the stub rejected it.
    pub(super) fn end_exchange(&mut self, id: SimulatedClientId, end: ExchangeEnd) {
        let Some(mut client) = self.clients.remove(&id) else {
            return;
        };
        let SimulatedClientState::HoldsLease { engine, generation, canary } = client.state.clone() else {
            self.clients.insert(id, client);
            return;
        };
        self.release_lease(id, &engine, generation);
        let turned_away = end == ExchangeEnd::StubRejected;
        let again = turned_away
            || canary
                && client.request.stream
                && matches!(end, ExchangeEnd::EngineFailed | ExchangeEnd::Revoked);
        if turned_away {
            self.send_event(Event::StubGateClosed { engine: engine.clone(), generation });
        }
        if canary {
            let verdict = match end {
                ExchangeEnd::EngineFailed => CanaryVerdict::Failed(FailureCause::Unhealthy),
                ExchangeEnd::Served | ExchangeEnd::Stalled => CanaryVerdict::Passed,
                ExchangeEnd::ClientLeft | ExchangeEnd::Revoked | ExchangeEnd::StubRejected => {
                    CanaryVerdict::Inconclusive
                }
            };
            self.send_event(Event::Canary { engine, generation, verdict });
        }
        if again && self.now < client.deadline && self.is_configured(&client.request.model) {
            self.tally.add(if turned_away { "requests turned away by a stub" } else { "canaries replayed" });
            client.request.max_park_time = None;
            self.park(id, client);
        } else {
            self.tally.add(end.name());
            if end == ExchangeEnd::Served && client.request.tokens > 0 {
                self.record_served(&client.request.model, &client.request.key, client.request.tokens);
            }
            self.repeat_request(client.request);
        }
    }

    fn release_lease(&mut self, id: SimulatedClientId, engine: &EngineId, generation: Generation) {
        let now = self.now;
        let flowing = self.bytes_flow(engine, generation);
        let queued = self.parked.get(&engine.model).is_some_and(|n| *n > 0);
        let is_noticed = !self.has_defect(PlatformDefect::MissedLeaseEnd);
        let Some(gate) = self.gates.get_mut(engine).filter(|g| g.generation == generation) else {
            return;
        };
        gate.leases.remove(&id);
        gate.last_lease_end = now;
        if flowing {
            gate.last_byte = now;
        }
        if !gate.open && !gate.awaiting_stub && gate.leases.is_empty() {
            self.send_drained(engine);
        } else if queued || (gate.leases.is_empty() && std::mem::take(&mut gate.seen_busy) && is_noticed) {
            self.wakeup_pending = true;
        }
    }

    /// Reports once per closing that a closed gate has no lease left.
    pub(super) fn send_drained(&mut self, engine: &EngineId) {
        if let Some(gate) = self.gates.get_mut(engine)
            && !gate.drained_sent
        {
            gate.drained_sent = true;
            let generation = gate.generation;
            self.send_event(Event::Drained { engine: engine.clone(), generation });
        }
    }

    pub(super) fn stub_rejects(&mut self, id: SimulatedClientId, serial: u32) {
        if self.clients.get(&id).is_some_and(|client| client.serial == serial) {
            self.end_exchange(id, ExchangeEnd::StubRejected);
        }
    }

    /// Polls whether an engine's stub admits requests.
    pub(super) fn poll_stub_gate(&mut self, engine: EngineId, generation: Generation) {
        let awake = self
            .machine
            .process(&engine, generation)
            .filter(|process| process.phase == SimulatedProcessPhase::Awake);
        let gated = awake.map(|process| process.stub_gate_closed);
        let again = self.now + self.random_duration(STUB_POLL_INTERVAL);
        let Some(gate) = self.gates.get_mut(&engine).filter(|gate| gate.generation == generation) else {
            return;
        };
        gate.stub_gate_watched = gated == Some(true);
        match gated {
            Some(true) => self.event_queue.schedule(again, WorldEvent::PollStubGate { engine, generation }),
            Some(false) => self.send_event(Event::StubGateOpened { engine, generation }),
            None => {}
        }
    }

    pub(super) fn client_leaves(&mut self, id: SimulatedClientId, serial: u32) {
        let Some(client) = self.clients.get(&id).filter(|c| c.serial == serial) else {
            return;
        };
        match client.state {
            SimulatedClientState::Parked(waiter) => {
                self.unpark(waiter);
                self.clients.remove(&id);
                self.tally.add("clients left while parked");
                self.send_event(Event::Left { waiter });
            }
            SimulatedClientState::HoldsLease { .. } => self.end_exchange(id, ExchangeEnd::ClientLeft),
        }
    }

    pub(super) fn lease_holders(&self, engine: &EngineId, generation: Generation) -> Vec<SimulatedClientId> {
        self.gates
            .get(engine)
            .filter(|gate| gate.generation == generation)
            .map(|gate| gate.leases.iter().copied().collect())
            .unwrap_or_default()
    }

    pub(super) fn lease_count(&self, engine: &EngineId, generation: Generation) -> u32 {
        self.gates
            .get(engine)
            .filter(|gate| gate.generation == generation)
            .map_or(0, |gate| gate.leases.len() as u32)
    }

    /// Whether bytes pass: the engine is healthy and some client reads.
    fn bytes_flow(&self, engine: &EngineId, generation: Generation) -> bool {
        let well = self.machine.processes.get(engine).is_some_and(|p| {
            p.generation == generation && !p.hung && p.phase == SimulatedProcessPhase::Awake
        });
        well && self.gates.get(engine).is_some_and(|gate| {
            let mut clients = gate.leases.iter().filter_map(|id| self.clients.get(id));
            clients.any(|client| !client.request.stalls)
        })
    }

    /// Samples every gate, as the driver does before it plans.
    pub(super) fn sample_gates(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let busy: Vec<_> = self
            .gates
            .iter()
            .filter(|(engine, gate)| !gate.leases.is_empty() && self.bytes_flow(engine, gate.generation))
            .map(|(engine, _)| engine.clone())
            .collect();
        for engine in busy {
            if let Some(gate) = self.gates.get_mut(&engine) {
                gate.last_byte = self.now;
            }
        }
        for (engine, gate) in &mut self.gates {
            let sample = (gate.leases.len() as u32, gate.last_lease_end, gate.last_byte);
            gate.seen_busy |= sample.0 > 0;
            if sample != gate.last_sample {
                gate.last_sample = sample;
                events.push(Event::GateSampled {
                    engine: engine.clone(),
                    generation: gate.generation,
                    leases: sample.0,
                    last_lease_end: sample.1,
                    last_byte: sample.2,
                    clients: gate.clients,
                    idle_gap: gate.idle_gap,
                });
            }
        }
        events
    }
}
