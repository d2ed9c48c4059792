//! Simulates slow, full, broken or silent engines in virtual time.

use std::{cmp::Reverse, collections::BinaryHeap};

use http::StatusCode;
use rouse::{
    fault::{ExchangeTimeout, Fault},
    units::Millis,
};
use rouse_net::relay::ExchangeOutcome;

use super::{super::super::OutlierReporter, *};

/// An engine's behavior towards a request.
#[derive(Clone, Copy)]
enum EngineBehavior {
    /// Sends a head and bytes after this time.
    Answers(u16, Millis),
    Refuses,
    /// Sends nothing until the deadline.
    Swallows(Millis),
}

struct BalancerSimulation {
    route: ModelRoute,
    lots: Rng,
    now: Tick,
    ends: BinaryHeap<Reverse<(Tick, usize)>>,
    open: Vec<Option<(OutlierReporter, usize, Lease, EngineBehavior)>>,
    /// The requests that each engine got, and the parked requests.
    got: Vec<u32>,
    parked: u32,
    max_ejected: usize,
    /// Whether every request prefers an engine, or none does.
    keyed: bool,
}

impl BalancerSimulation {
    fn new(seed: u64, engines: u32, limit: Option<u32>) -> Self {
        Self {
            route: route((0..engines).map(|replica| limited(replica, limit)).collect()),
            lots: Rng::seeded(seed),
            now: Tick(1_000_000),
            ends: BinaryHeap::new(),
            open: Vec::new(),
            got: vec![0; engines as usize],
            parked: 0,
            max_ejected: 0,
            keyed: seed.is_multiple_of(2),
        }
    }

    /// Runs for `span`, with one request every `every`.
    fn run(&mut self, span: Millis, every: Millis, behavior: impl Fn(usize, u64) -> EngineBehavior) {
        let end = self.now + span;
        while self.now < end {
            self.arrive(&behavior);
            let until = self.now + every;
            while let Some(Reverse((at, index))) = self.ends.peek().copied().filter(|r| r.0.0 <= until) {
                self.ends.pop();
                self.now = at;
                let open = self.open.get_mut(index).and_then(Option::take).unwrap();
                self.end(open);
            }
            self.now = until;
            self.max_ejected = self.max_ejected.max(self.route.ejected_count());
        }
    }

    fn arrive(&mut self, behavior: impl Fn(usize, u64) -> EngineBehavior) {
        let prefix = self.keyed.then(|| self.lots.next_u64()).and_then(first_turn);
        let now = || self.now;
        let wanted = EndpointCriteria { prefix, now: &now, ..wanted(&self.lots) };
        let Some((endpoint, lease)) = self.route.take_lease(&wanted) else {
            self.parked += 1;
            return;
        };
        let at = endpoint.engine.replica as usize;
        *self.got.get_mut(at).unwrap() += 1;
        let behavior = behavior(at, self.lots.next_u64());
        let span = match behavior {
            EngineBehavior::Answers(_, span) | EngineBehavior::Swallows(span) => span,
            EngineBehavior::Refuses => Millis(1),
        };
        self.ends.push(Reverse((self.now + span, self.open.len())));
        self.open.push(Some((OutlierReporter::new(endpoint, self.now), at, lease, behavior)));
    }

    fn end(&self, (mut reporter, at, lease, behavior): (OutlierReporter, usize, Lease, EngineBehavior)) {
        let now = || self.now;
        let fault = match behavior {
            EngineBehavior::Answers(status, _) => {
                reporter.head(StatusCode::from_u16(status).unwrap(), now);
                // A gate records this with its own clock, but this test's time is virtual.
                self.route.endpoints.get(at).unwrap().activity.note_progress(self.now);
                reporter.first_byte(now);
                reporter.ended(&ExchangeOutcome::Complete, now);
                return;
            }
            EngineBehavior::Refuses => Fault::EngineUnreachable { model: "m".into() },
            EngineBehavior::Swallows(limit) => {
                Fault::EngineTimeout { model: "m".into(), timeout: ExchangeTimeout::FirstByte, limit }
            }
        };
        reporter.ended(&ExchangeOutcome::Failed(fault), now);
        drop(lease);
    }

    fn ejected(&self) -> Vec<bool> {
        self.route.endpoints.iter().map(|e| e.circuit_breaker.is_ejected()).collect()
    }

    fn all(&self) -> u32 {
        self.got.iter().sum()
    }
}

/// Slow responses, full engines, overload refusals, and clients that time out in a queue are no failures.
#[test]
fn load_alone_leaves_nothing_out() {
    for seed in 0..40 {
        let mut simulation = BalancerSimulation::new(seed, 2 + u32::try_from(seed % 4).unwrap(), Some(40));
        let overload = |_: usize, lot: u64| match lot % 100 {
            0..25 => EngineBehavior::Answers(503, Millis(lot % 50)),
            25..45 => EngineBehavior::Answers(429, Millis(lot % 50)),
            45..60 => EngineBehavior::Answers(529, Millis(5)),
            60..63 => EngineBehavior::Answers(501, Millis(5)),
            63..70 => EngineBehavior::Answers(400, Millis(5)),
            // The request waits in the engine's queue until its deadline, while the engine serves others.
            70..90 => EngineBehavior::Swallows(Millis::secs(30)),
            _ => EngineBehavior::Answers(200, Millis(lot % 29_000)),
        };
        simulation.run(Millis::secs(240), Millis(20), overload);
        assert!(simulation.parked > 0 && simulation.max_ejected == 0, "{:?}", simulation.ejected());
    }
}

/// Also an engine that only refuses with overload, and an engine that is slow with every request.
#[test]
fn an_engine_that_only_says_it_is_overloaded_is_not_left_out() {
    for seed in 0..6 {
        let mut simulation = BalancerSimulation::new(seed, 3, None);
        let behavior = |at: usize, _: u64| match at {
            0 => EngineBehavior::Answers(503, Millis(1)),
            1 => EngineBehavior::Answers(200, Millis::secs(100)),
            _ => EngineBehavior::Answers(200, Millis(100)),
        };
        simulation.run(Millis::secs(300), Millis(50), behavior);
        assert_eq!(simulation.max_ejected, 0);
    }
}

#[test]
fn an_engine_that_fails_gets_few_requests_and_its_share_again_once_it_recovers() {
    let kinds = [
        EngineBehavior::Refuses,
        EngineBehavior::Answers(500, Millis(2)),
        EngineBehavior::Swallows(Millis::secs(5)),
    ];
    for (seed, bad) in (0..).zip(kinds.into_iter().cycle().take(12)) {
        let mut simulation = BalancerSimulation::new(seed, 4, None);
        let good = |lot: u64| EngineBehavior::Answers(200, Millis(50 + lot % 100));
        let broken = |at: usize, lot: u64| if at == 2 { bad } else { good(lot) };
        // Until its ejection the engine gets its share at most: failures are quick, or pile up as leases.
        simulation.run(Millis::secs(6), Millis(5), broken);
        assert_eq!(simulation.ejected(), [false, false, true, false], "{seed}");
        let (before, all) = (simulation.got[2], simulation.all());
        simulation.run(Millis::secs(120), Millis(5), broken);
        let (got, of) = (simulation.got[2] - before, simulation.all() - all);
        assert!(got * 1000 < of, "{got} of {of}");
        assert_eq!((simulation.parked, simulation.max_ejected), (0, 1));
        simulation.run(Millis::secs(400), Millis(20), |_, lot| good(lot));
        assert_eq!(simulation.ejected(), [false; 4]);
        let (before, all) = (simulation.got[2], simulation.all());
        simulation.run(Millis::secs(60), Millis(20), |_, lot| good(lot));
        let share = (simulation.got[2] - before) * 100 / (simulation.all() - all);
        assert!((15..35).contains(&share), "{share} %");
    }
}

#[test]
fn at_most_half_are_left_out_and_the_others_go_on_although_all_fail() {
    for (seed, engines) in [(0, 2), (1, 2), (2, 3), (3, 3), (4, 5), (5, 8)] {
        let mut simulation = BalancerSimulation::new(seed, engines, None);
        simulation.run(Millis::secs(60), Millis(10), |_, _| EngineBehavior::Refuses);
        assert_eq!((simulation.max_ejected, simulation.parked), (engines as usize / 2, 0));
        // The last engine returns too, whichever was ejected.
        simulation
            .run(Millis::secs(400), Millis(20), |_, lot| EngineBehavior::Answers(200, Millis(lot % 100)));
        assert_eq!(simulation.ejected(), vec![false; engines as usize]);
    }
}
