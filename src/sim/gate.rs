//! The simulated side of the data path: gates, leases, the way of a request from its arrival to its end.

use std::collections::BTreeSet;

use super::{
    client::{Client, ClientId, End, Request, State},
    process::Phase,
    world::{Happening, World},
};
use crate::{
    engine::clients::{Clients, TOLD_APART},
    fault::Cause,
    fleet::event::{Event, Verdict, Waiter, WaiterId},
    model::{EngineId, ModelName},
    units::{Generation, Millis, Tick},
};

/// The gate of one engine's life.
#[derive(Clone, Debug)]
pub(super) struct Gate {
    pub(super) generation: Generation,
    pub(super) open: bool,
    pub(super) public: bool,
    /// Closed for as long as the engine's stub lets nobody in, and the platform asks the stub about that.
    pub(super) held: bool,
    pub(super) watched: bool,
    /// It was open at some time.
    pub(super) served: bool,
    /// `Drained` has been sent, and delivered, since it was closed last.
    pub(super) told: bool,
    pub(super) drained: bool,
    pub(super) leases: BTreeSet<ClientId>,
    pub(super) limit: Option<u32>,
    pub(super) last_end: Tick,
    pub(super) last_byte: Tick,
    /// Who has held a lease since it was last closed.
    pub(super) clients: Clients,
    pub(super) pause: Option<Millis>,
    /// The driver has seen it in use, and wants to know when it no longer is.
    pub(super) seen_busy: bool,
    /// What the fleet knows.
    pub(super) sampled: (u32, Tick, Tick),
}

/// How long a client waits for a byte from an engine that says nothing.
const SILENCE: Millis = Millis::secs(60);
/// How long a canary may take to its first byte.
const CANARY: Millis = Millis::secs(10);
/// How long a stub takes to say that it lets nobody in, and how often it is asked.
const TURNED_AWAY: Millis = Millis(1);
const ASKED: (Millis, Millis) = (Millis(10), Millis(500));

impl Gate {
    pub(super) const fn new(generation: Generation, limit: Option<u32>) -> Self {
        Self {
            generation,
            open: false,
            public: false,
            held: false,
            watched: false,
            served: false,
            told: false,
            drained: false,
            leases: BTreeSet::new(),
            limit,
            last_end: Tick(0),
            last_byte: Tick(0),
            clients: Clients([0; TOLD_APART]),
            pause: None,
            seen_busy: false,
            sampled: (0, Tick(0), Tick(0)),
        }
    }

    /// The fleet counts a lease when it grants it, so what it knows is no longer what was sampled last.
    pub(super) const fn forget_sample(&mut self) {
        self.sampled.0 = u32::MAX;
    }

    pub(super) fn full(&self) -> bool {
        self.limit.is_some_and(|limit| self.leases.len() >= limit as usize)
    }
}

impl World {
    /// A request comes in: the hot path, or the queue.
    pub(super) fn ask(&mut self, request: Request) {
        self.tally.add("requests");
        if !self.spec_known(&request.model) {
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
        let client = Client {
            request,
            arrived: self.now,
            deadline: self.now + wait,
            state: State::Parked(WaiterId(0)),
            serial: 0,
        };
        self.next_client += 1;
        let id = ClientId(self.next_client);
        match self.route(&client.request.model) {
            Some((engine, generation)) => {
                self.clients.insert(id, client);
                self.tally.add("requests on the hot path");
                self.hold(id, engine, generation, false);
            }
            None => self.park(id, client),
        }
    }

    pub(super) fn ask_again(&mut self, mut request: Request) {
        if let Some(pause) = request.again.first().copied().filter(|_| !self.calm) {
            request.again.rotate_left(1);
            self.agenda.add(self.now + pause, Happening::Ask(request));
        }
    }

    /// An engine whose gate is open to everybody, when nobody queues.
    fn route(&self, model: &ModelName) -> Option<(EngineId, Generation)> {
        if self.parked.get(model).is_some_and(|n| *n > 0) {
            return None;
        }
        self.gates
            .iter()
            .filter(|(engine, gate)| engine.model == *model && gate.open && gate.public && !gate.full())
            .min_by_key(|(_, gate)| gate.leases.len())
            .map(|(engine, gate)| (engine.clone(), gate.generation))
    }

    pub(super) fn park(&mut self, id: ClientId, mut client: Client) {
        self.next_waiter += 1;
        let waiter = WaiterId(self.next_waiter);
        client.state = State::Parked(waiter);
        client.serial += 1;
        let request = &client.request;
        self.tell(Event::Arrived {
            waiter: Waiter {
                id: waiter,
                model: request.model.clone(),
                band: request.band + self.priority(&request.model),
                key: request.key.clone(),
                client: request.client,
                arrived: client.arrived,
                deadline: client.deadline,
                stream: request.stream,
                only: None,
            },
        });
        let parked = self.parked.entry(request.model.clone()).or_default();
        if *parked == 0 {
            self.waiting.insert(request.model.clone(), self.now);
        }
        *parked += 1;
        self.waiters.insert(waiter, id);
        let serial = client.serial;
        if let Some(patience) = request.patience {
            self.agenda.add(self.now + patience, Happening::Leave { client: id, serial });
        }
        self.agenda.add(client.deadline + Millis(1), Happening::Overdue { client: id, serial });
        self.clients.insert(id, client);
    }

    /// Takes the client out of the queue, however its wait ended.
    pub(super) fn unpark(&mut self, waiter: WaiterId) -> Option<ClientId> {
        let id = self.waiters.remove(&waiter)?;
        if let Some(client) = self.clients.get(&id)
            && let Some(n) = self.parked.get_mut(&client.request.model)
        {
            *n -= 1;
        }
        Some(id)
    }

    /// The client gets a lease on an engine, and its exchange begins.
    pub(super) fn hold(&mut self, id: ClientId, engine: EngineId, generation: Generation, canary: bool) {
        self.check_traffic(&engine, generation);
        let first = self.draw(self.scenario.nature.first_byte);
        let Some(gate) = self.gates.get_mut(&engine) else {
            return;
        };
        let Some(client) = self.clients.get_mut(&id) else {
            return;
        };
        gate.leases.insert(id);
        gate.clients.note(client.request.client);
        if gate.leases.len() == 1 && gate.last_end > Tick(0) {
            gate.pause = Some(self.now.since(gate.last_end));
        }
        gate.forget_sample();
        client.serial += 1;
        client.state = State::Holding { engine: engine.clone(), generation, canary };
        let (serial, request) = (client.serial, &client.request);
        let ends = if request.stalls { SILENCE } else { first + request.exchange };
        let leaves = request.leaves_after;
        if self.machine.process(&engine, generation).is_some_and(|process| process.gated) {
            return self.agenda.add(self.now + TURNED_AWAY, Happening::TurnedAway { client: id, serial });
        }
        if canary {
            self.agenda.add(self.now + first, Happening::FirstByte { client: id, serial });
        }
        self.agenda.add(self.now + ends, Happening::End { client: id, serial });
        if let Some(after) = leaves {
            self.agenda.add(self.now + after, Happening::Leave { client: id, serial });
        }
    }

    /// The canary's first byte is due: its verdict.
    pub(super) fn first_byte(&mut self, id: ClientId, serial: u32) {
        let Some(client) = self.clients.get_mut(&id).filter(|c| c.serial == serial) else {
            return;
        };
        let State::Holding { engine, generation, canary: canary @ true } = &mut client.state else {
            return;
        };
        let (engine, generation) = (engine.clone(), *generation);
        match self.machine.process(&engine, generation) {
            Some(process) if process.corrupt => self.end_exchange(id, End::Broken),
            Some(process) if process.hung => {
                let late = Happening::Silent { client: id, serial };
                self.agenda.add(self.now + CANARY, late);
            }
            _ => {
                *canary = false;
                self.tell(Event::Canary { engine, generation, verdict: Verdict::Passed });
            }
        }
    }

    /// The last byte is due, unless the engine hangs: then the silence ends it.
    pub(super) fn exchange_due(&mut self, id: ClientId, serial: u32) {
        let Some(client) = self.clients.get(&id).filter(|c| c.serial == serial) else {
            return;
        };
        let State::Holding { engine, generation, .. } = &client.state else {
            return;
        };
        let stalls = client.request.stalls;
        let (engine, generation) = (engine.clone(), *generation);
        let process = self.machine.process(&engine, generation);
        if process.as_ref().is_some_and(|p| p.hung) {
            self.agenda.add(self.now + SILENCE, Happening::Silent { client: id, serial });
        } else if process.is_some_and(|p| p.corrupt) {
            self.end_exchange(id, End::Broken);
        } else {
            self.end_exchange(id, if stalls { End::Stalled } else { End::Served });
        }
    }

    /// The lease ends; a canary that had not answered yet is judged, and waits again when it was not its fault.
    pub(super) fn end_exchange(&mut self, id: ClientId, end: End) {
        let Some(mut client) = self.clients.remove(&id) else {
            return;
        };
        let State::Holding { engine, generation, canary } = client.state.clone() else {
            self.clients.insert(id, client);
            return;
        };
        self.release(id, &engine, generation);
        let turned_away = end == End::TurnedAway;
        let again =
            turned_away || canary && client.request.stream && matches!(end, End::Broken | End::Revoked);
        if turned_away {
            self.tell(Event::Gated { engine: engine.clone(), generation });
        }
        if canary {
            let verdict = match end {
                End::Broken => Verdict::Failed(Cause::Unhealthy),
                End::Served | End::Stalled => Verdict::Passed,
                End::Left | End::Revoked | End::TurnedAway => Verdict::Inconclusive,
            };
            self.tell(Event::Canary { engine, generation, verdict });
        }
        if again && self.now < client.deadline && self.spec_known(&client.request.model) {
            self.tally.add(if turned_away { "requests turned away by a stub" } else { "canaries replayed" });
            client.request.patience = None;
            self.park(id, client);
        } else {
            self.tally.add(end.name());
            if end == End::Served && client.request.tokens > 0 {
                self.serve(&client.request.model, &client.request.key, client.request.tokens);
            }
            self.ask_again(client.request);
        }
    }

    fn release(&mut self, id: ClientId, engine: &EngineId, generation: Generation) {
        let now = self.now;
        let flowing = self.flowing(engine, generation);
        let queued = self.parked.get(&engine.model).is_some_and(|n| *n > 0);
        let Some(gate) = self.gates.get_mut(engine).filter(|g| g.generation == generation) else {
            return;
        };
        gate.leases.remove(&id);
        gate.last_end = now;
        if flowing {
            gate.last_byte = now;
        }
        if !gate.open && !gate.held && gate.leases.is_empty() {
            self.emptied(engine);
        } else if queued || (gate.leases.is_empty() && std::mem::take(&mut gate.seen_busy)) {
            self.notified = true;
        }
    }

    /// A closed gate has no lease left: said once per closing.
    pub(super) fn emptied(&mut self, engine: &EngineId) {
        if let Some(gate) = self.gates.get_mut(engine)
            && !gate.told
        {
            gate.told = true;
            let generation = gate.generation;
            self.tell(Event::Drained { engine: engine.clone(), generation });
        }
    }

    pub(super) fn turned_away(&mut self, id: ClientId, serial: u32) {
        if self.clients.get(&id).is_some_and(|client| client.serial == serial) {
            self.end_exchange(id, End::TurnedAway);
        }
    }

    /// The stub in front of an engine is asked whether it lets requests in.
    pub(super) fn ask_stub(&mut self, engine: EngineId, generation: Generation) {
        let awake = self.machine.process(&engine, generation).filter(|process| process.phase == Phase::Awake);
        let gated = awake.map(|process| process.gated);
        let again = self.now + self.draw(ASKED);
        let Some(gate) = self.gates.get_mut(&engine).filter(|gate| gate.generation == generation) else {
            return;
        };
        gate.watched = gated == Some(true);
        match gated {
            Some(true) => self.agenda.add(again, Happening::AskStub { engine, generation }),
            Some(false) => self.tell(Event::Ungated { engine, generation }),
            None => {}
        }
    }

    pub(super) fn leave(&mut self, id: ClientId, serial: u32) {
        let Some(client) = self.clients.get(&id).filter(|c| c.serial == serial) else {
            return;
        };
        match client.state {
            State::Parked(waiter) => {
                self.unpark(waiter);
                self.clients.remove(&id);
                self.tally.add("clients left while parked");
                self.tell(Event::Left { waiter });
            }
            State::Holding { .. } => self.end_exchange(id, End::Left),
        }
    }

    pub(super) fn holders(&self, engine: &EngineId, generation: Generation) -> Vec<ClientId> {
        self.gates
            .get(engine)
            .filter(|gate| gate.generation == generation)
            .map(|gate| gate.leases.iter().copied().collect())
            .unwrap_or_default()
    }

    pub(super) fn leases(&self, engine: &EngineId, generation: Generation) -> u32 {
        self.gates
            .get(engine)
            .filter(|gate| gate.generation == generation)
            .map_or(0, |gate| gate.leases.len() as u32)
    }

    /// Bytes pass: the engine is well and some client reads.
    fn flowing(&self, engine: &EngineId, generation: Generation) -> bool {
        let well = self
            .machine
            .processes
            .get(engine)
            .is_some_and(|p| p.generation == generation && !p.hung && p.phase == Phase::Awake);
        well && self.gates.get(engine).is_some_and(|gate| {
            let mut clients = gate.leases.iter().filter_map(|id| self.clients.get(id));
            clients.any(|client| !client.request.stalls)
        })
    }

    /// What the driver reads from every gate before it plans.
    pub(super) fn sample(&mut self) -> Vec<Event> {
        let mut events = Vec::new();
        let busy: Vec<_> = self
            .gates
            .iter()
            .filter(|(engine, gate)| !gate.leases.is_empty() && self.flowing(engine, gate.generation))
            .map(|(engine, _)| engine.clone())
            .collect();
        for engine in busy {
            if let Some(gate) = self.gates.get_mut(&engine) {
                gate.last_byte = self.now;
            }
        }
        for (engine, gate) in &mut self.gates {
            let seen = (gate.leases.len() as u32, gate.last_end, gate.last_byte);
            gate.seen_busy |= seen.0 > 0;
            if seen != gate.sampled {
                gate.sampled = seen;
                events.push(Event::Used {
                    engine: engine.clone(),
                    generation: gate.generation,
                    leases: seen.0,
                    last_end: seen.1,
                    last_byte: seen.2,
                    clients: gate.clients,
                    pause: gate.pause,
                });
            }
        }
        events
    }
}
