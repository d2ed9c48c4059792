//! Compares choices by the time to the first token, in simulated time: engines with prefix caches, and three loads
//! whose requests share beginnings.
//!
//! `cargo test -p rouse-gateway --lib -- --nocapture first_token` prints the figures.

mod engine;
mod loads;

use std::{cmp::Reverse, collections::BinaryHeap};

use rouse::units::Millis;

use self::{
    engine::{CachingEngine, StartedPrefill},
    loads::{ConversationSource, REQUESTS, SimulatedConversation},
};
use super::*;

const ENGINES: u32 = 4;
const SEEDS: [u64; 3] = [1, 2, 3];

/// How requests get their engines.
#[derive(Clone, Copy)]
enum ComparedChoice {
    /// The load balancer, at this many gateways that each know their own leases and a report of each engine, which is
    /// this old at most.
    Rouse { gateways: usize, report_age: Millis },
    /// The first engine on the ring, whatever its load.
    Affinity,
    /// The engine with the fewest requests of all gateways.
    LeastLoaded,
}

const ONE_GATEWAY: ComparedChoice = ComparedChoice::Rouse { gateways: 1, report_age: Millis(250) };
const THREE_GATEWAYS: ComparedChoice = ComparedChoice::Rouse { gateways: 3, report_age: Millis::secs(2) };

/// A request and where it is served.
struct CachedRequest {
    conversation: SimulatedConversation,
    arrived: Tick,
    gateway: usize,
    engine: usize,
    lease: Option<Lease>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum CacheEvent {
    Arrives(usize),
    FirstToken(usize),
    LastToken(usize),
    /// An engine's report reaches a gateway.
    Report(usize, usize),
}

struct CacheSimulation {
    source: ConversationSource,
    choice: ComparedChoice,
    gateways: Vec<ModelRoute>,
    engines: Vec<CachingEngine>,
    requests: Vec<CachedRequest>,
    events: BinaryHeap<Reverse<(Tick, CacheEvent)>>,
    now: Tick,
    /// Times to the first token, in the order of these tokens.
    waits: Vec<u64>,
    rng: Rng,
}

impl CacheSimulation {
    /// Returns the mean time to the first token in milliseconds, without the first tenth, while the caches fill.
    fn mean_wait(choice: ComparedChoice, source: ConversationSource, seed: u64) -> f64 {
        let gateways = if let ComparedChoice::Rouse { gateways, .. } = choice { gateways } else { 1 };
        let mut simulation = Self {
            source,
            choice,
            gateways: (0..gateways).map(|_| route(endpoints(0..ENGINES))).collect(),
            engines: (0..ENGINES).map(|_| CachingEngine::default()).collect(),
            requests: Vec::new(),
            events: BinaryHeap::new(),
            now: Tick(1_000),
            waits: Vec::new(),
            rng: Rng::seeded(seed),
        };
        for conversation in simulation.source.arrivals() {
            simulation.add_request(conversation);
        }
        if let ComparedChoice::Rouse { report_age, .. } = choice {
            for (gateway, engine) in (0..gateways).flat_map(|g| (0..ENGINES as usize).map(move |e| (g, e))) {
                let first = Millis(simulation.rng.next_u64() % report_age.0);
                simulation.schedule(first, CacheEvent::Report(gateway, engine));
            }
        }
        simulation.run();
        let waits = simulation.waits.split_off(simulation.waits.len() / 10);
        waits.iter().sum::<u64>() as f64 / waits.len() as f64
    }

    fn add_request(&mut self, conversation: SimulatedConversation) {
        let arrived = conversation.next_at;
        self.events.push(Reverse((arrived, CacheEvent::Arrives(self.requests.len()))));
        let gateway = (self.rng.next_u64() % self.gateways.len() as u64) as usize;
        self.requests.push(CachedRequest { conversation, arrived, gateway, engine: 0, lease: None });
    }

    fn schedule(&mut self, after: Millis, event: CacheEvent) {
        self.events.push(Reverse((self.now + after, event)));
    }

    fn run(&mut self) {
        while self.waits.len() < REQUESTS {
            let Reverse((now, event)) = self.events.pop().unwrap();
            self.now = now;
            match event {
                CacheEvent::Arrives(request) => self.arrive(request),
                CacheEvent::FirstToken(request) => self.first_token(request),
                CacheEvent::LastToken(request) => self.last_token(request),
                CacheEvent::Report(gateway, engine) => self.report(gateway, engine),
            }
        }
    }

    fn arrive(&mut self, request: usize) {
        let CachedRequest { conversation, gateway, .. } = &self.requests[request];
        let route = &self.gateways[*gateway];
        let now = || self.now;
        // These gateways have no queue: if all engines are saturated, the request goes to one of them at once.
        let forced = EndpointCriteria { may_park: false, now: &now, ..wanted(&self.rng) };
        let on = |at: usize| (at, route.endpoints[at].gate.take().unwrap());
        let (engine, lease) = match self.choice {
            ComparedChoice::Rouse { .. } => {
                let wanted = EndpointCriteria { prefix: Some(conversation.key), may_park: true, ..forced };
                let taken = route.take_lease(&wanted).or_else(|| route.take_lease(&forced));
                let (endpoint, lease) = taken.unwrap();
                (endpoint.engine.replica as usize, lease)
            }
            ComparedChoice::Affinity => {
                on(route.ring.as_ref().unwrap().walk(conversation.key.hash).next().unwrap())
            }
            ComparedChoice::LeastLoaded => {
                let load = |at: &usize| (route.endpoints[*at].gate.leases(), self.rng.next_u64());
                on((0..ENGINES as usize).min_by_key(load).unwrap())
            }
        };
        let prompt = conversation.prompt();
        let found = &mut self.requests[request];
        (found.engine, found.lease) = (engine, Some(lease));
        self.engines[engine].enqueue(request, prompt);
        self.advance(engine);
    }

    /// Lets the engine begin what it can.
    fn advance(&mut self, engine: usize) {
        if let Some(StartedPrefill { request, after }) = self.engines[engine].begin() {
            self.schedule(after, CacheEvent::FirstToken(request));
        }
    }

    fn first_token(&mut self, request: usize) {
        let CachedRequest { arrived, engine, conversation, .. } = &self.requests[request];
        self.waits.push(self.now.since(*arrived).0);
        let (engine, generation) = (*engine, conversation.generation_time());
        self.engines[engine].end_prefill();
        self.schedule(generation, CacheEvent::LastToken(request));
        self.advance(engine);
    }

    fn last_token(&mut self, request: usize) {
        let found = &mut self.requests[request];
        found.lease = None;
        let (engine, conversation) = (found.engine, found.conversation.clone());
        self.engines[engine].end(request);
        self.advance(engine);
        if let Some(next) = conversation.next_turn(self.now) {
            self.add_request(next);
        }
    }

    fn report(&mut self, gateway: usize, engine: usize) {
        let endpoint = &self.gateways[gateway].endpoints[engine];
        endpoint.activity.record_load(&self.engines[engine].load(), self.now);
        if let ComparedChoice::Rouse { report_age, .. } = self.choice {
            self.schedule(report_age, CacheEvent::Report(gateway, engine));
        }
    }
}

/// Returns the mean over all seeds, in milliseconds.
fn mean_wait(choice: ComparedChoice, load: fn(u64) -> ConversationSource) -> f64 {
    let waits = SEEDS.map(|seed| CacheSimulation::mean_wait(choice, load(seed), seed));
    waits.iter().sum::<f64>() / waits.len() as f64
}

/// The load balancer's first tokens come as early as those of the better of the two simple choices, and those of three
/// gateways as early as those of one. Both within 5 %.
fn compare_first_tokens(name: &str, load: fn(u64) -> ConversationSource) {
    let [rouse, affinity, least, three] =
        [ONE_GATEWAY, ComparedChoice::Affinity, ComparedChoice::LeastLoaded, THREE_GATEWAYS]
            .map(|choice| mean_wait(choice, load));
    let figures = format!(
        "{name}: {rouse:.0} ms, affinity {affinity:.0} ms, least loaded {least:.0} ms, three gateways {three:.0} ms"
    );
    println!("{figures}");
    assert!(rouse <= 1.05 * affinity.min(least), "{figures}");
    assert!(three <= 1.05 * rouse, "{figures}");
}

#[test]
fn first_tokens_come_early_with_few_large_system_prompts_of_different_popularity() {
    compare_first_tokens("system prompts", ConversationSource::system_prompts);
}

#[test]
fn first_tokens_come_early_with_conversations_of_many_turns() {
    compare_first_tokens("conversations", ConversationSource::conversations);
}

#[test]
fn first_tokens_come_early_with_prompts_of_which_most_are_unique() {
    compare_first_tokens("mixed", ConversationSource::mixed);
}
