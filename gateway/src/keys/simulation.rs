//! Ten minutes of one key under a load of three times its limit, in virtual time. Prints what the documents state:
//! `cargo test -p rouse-gateway --lib keys::simulation -- --nocapture`.

use std::{cmp::Reverse, collections::BinaryHeap, rc::Rc, sync::Arc};

use rouse::{
    fault::DisconnectPhase,
    units::{Millis, Tick},
};
use rouse_net::{
    lease::TickClock,
    openai::sse::{ResponseFacts, TokenUsage},
    relay::ExchangeOutcome,
};
use tokio::time::Instant;

use super::{ApiKey, QuotaCharge, RateLimits, TokenEstimateInput};
use crate::config::ModelAccess;

const LIMIT: u64 = 400_000;
const MINUTES: u64 = 10;
/// After so many, what is admitted and what is served are the same in the mean.
const WARMUP_MINUTES: u64 = 5;
const STEP: Millis = Millis(250);

/// What engines and clients are like.
#[derive(Clone, Copy)]
struct LoadProfile {
    /// Streams end with a usage frame.
    usage: bool,
    /// Of a hundred streams, those whose engine sends one to four tokens in an event.
    bundled_percent: u64,
    /// Of a hundred clients, those that leave halfway.
    leave_percent: u64,
}

/// What came of it, each as a share of the limit.
struct QuotaSimulationResult {
    /// Tokens read and made in the first ten minutes.
    served: f64,
    /// The most that were in any one of 60 s.
    worst: f64,
    /// What the requests that were admitted in ten later minutes used in the end.
    admitted: f64,
}

struct SimulationRng(u64);

impl SimulationRng {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % limit
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Skewed, as the lengths of texts are: most are short, a few are eight times the median.
    fn around(&mut self, median: u64) -> u64 {
        let eighths = (0..3).map(|_| self.below(3)).sum::<u64>();
        let base = (median >> 3) << eighths.min(6);
        base / 2 + self.below(base.max(1)) + 1
    }
}

struct SimulatedStream {
    quota_charge: Rc<QuotaCharge>,
    admitted: Tick,
    prompt: u64,
    answer: u64,
    /// It ends after so many, because its client leaves.
    taken: u64,
    shown: u64,
    per_second: u64,
    tokens_per_event: u64,
    usage: bool,
}

impl SimulatedStream {
    /// Tokens that were made by now.
    fn made(&self, now: Tick) -> u64 {
        (now.since(self.admitted).0 * self.per_second / 1000).min(self.taken)
    }

    fn facts(&self, made: u64) -> ResponseFacts {
        let ended = made == self.answer;
        let usage =
            (self.usage && ended).then_some(TokenUsage { prompt: self.prompt, completion: self.answer });
        // The role comes in an event of its own.
        ResponseFacts { events: 1 + made.div_ceil(self.tokens_per_event), usage, ..ResponseFacts::default() }
    }
}

fn run(world: LoadProfile, seed: u64) -> QuotaSimulationResult {
    let mut random = SimulationRng(seed);
    let start = Tick(1_700_000_000_000);
    let mut now = start;
    let limits = RateLimits { requests: None, tokens: Some(LIMIT) };
    let key = Arc::new(ApiKey { limits, ..ApiKey::for_tests("k", ModelAccess::All) });
    let mut running: BinaryHeap<Reverse<(Tick, usize)>> = BinaryHeap::new();
    let mut streams: Vec<Option<SimulatedStream>> = Vec::new();
    let mut used = vec![0_u64; usize::try_from(60 * (WARMUP_MINUTES + MINUTES)).unwrap()];
    let mut admitted = 0;
    let passed = |now: Tick| usize::try_from(now.since(start).0 / 1000).unwrap();
    while passed(now) < used.len() {
        // A minute's limit is some 250 of these requests.
        for _ in 0..1 + random.below(6) {
            if let Some(stream) = arrive(&key, now, &mut random, world) {
                if now.since(start) >= Millis::secs(60 * WARMUP_MINUTES) {
                    admitted += stream.prompt + stream.taken;
                }
                used[passed(now)] += stream.prompt;
                running.push(Reverse((now + STEP, streams.len())));
                streams.push(Some(stream));
            }
        }
        while let Some(Reverse((due, number))) = running.peek().copied()
            && due <= now
        {
            running.pop();
            let (made, goes_on) = step(&mut streams[number], now);
            used[passed(now)] += made;
            if goes_on {
                running.push(Reverse((due + Millis(1000), number)));
            }
        }
        now = now + STEP;
    }
    let of = |tokens: u64, minutes: u64| tokens as f64 / (LIMIT * minutes) as f64;
    let first = usize::try_from(60 * MINUTES).unwrap();
    QuotaSimulationResult {
        served: of(used[..first].iter().sum(), MINUTES),
        worst: of(used.windows(60).map(|minute| minute.iter().sum()).max().unwrap_or_default(), 1),
        admitted: of(admitted, MINUTES),
    }
}

/// A request comes; `None` when it is refused.
fn arrive(
    key: &Arc<ApiKey>,
    now: Tick,
    random: &mut SimulationRng,
    world: LoadProfile,
) -> Option<SimulatedStream> {
    // Chats, questions about documents, and long texts, which run for more than a minute.
    let (prompt, answer) = match random.below(10) {
        0..6 => (random.around(300), random.around(250)),
        6..9 => (random.around(3000), random.around(150)),
        _ => (random.around(200), random.around(2000)),
    };
    // Three to five bytes a token, and the envelope.
    let text = usize::try_from(prompt * (30 + random.below(20)) / 10 + 200).ok()?;
    let max_tokens = match random.below(3) {
        0 => None,
        1 => Some(4096.max(answer as u32)),
        _ => Some((answer * 2) as u32),
    };
    let clock = TickClock::new(Instant::now(), now);
    let need = TokenEstimateInput { text_bytes: text, max_tokens, generates: true };
    let bill = QuotaCharge::admit(key, &"m".into(), need, true, (Arc::default(), clock, now)).ok()?;
    bill.head_received(true);
    let taken = if random.chance(world.leave_percent) { answer / 2 } else { answer };
    Some(SimulatedStream {
        quota_charge: bill,
        admitted: now,
        prompt,
        answer,
        taken,
        shown: 0,
        per_second: 15 + random.below(60),
        tokens_per_event: if random.chance(world.bundled_percent) { 1 + random.below(4) } else { 1 },
        usage: world.usage,
    })
}

/// Some tokens more: how many, and whether there will be others.
fn step(place: &mut Option<SimulatedStream>, now: Tick) -> (u64, bool) {
    let Some(stream) = place else { return (0, false) };
    let made = stream.made(now);
    stream.quota_charge.record_facts_at(&stream.facts(made), || now);
    let more = made - std::mem::replace(&mut stream.shown, made);
    if made < stream.taken {
        return (more, true);
    }
    let whole = stream.taken == stream.answer;
    let outcome = if whole {
        ExchangeOutcome::Complete
    } else {
        ExchangeOutcome::ClientLeft(DisconnectPhase::Streaming)
    };
    stream.quota_charge.exchange_ended(&outcome, Instant::now());
    stream.quota_charge.settle(|| now);
    *place = None;
    (more, false)
}

fn show(what: &str, QuotaSimulationResult { served, worst, admitted }: &QuotaSimulationResult) {
    let percent = |share: &f64| format!("{:.2} %", share * 100.0);
    println!(
        "{what}: served {} of the limit, in the worst minute {}; admitted {}",
        percent(served),
        percent(worst),
        percent(admitted)
    );
}

#[test]
fn with_usage_frames_ten_minutes_under_overload_are_within_two_percent_of_the_limit() {
    let seeds = 8;
    let mut admitted = 0.0;
    for seed in 0..seeds {
        let outcomes = run(LoadProfile { usage: true, bundled_percent: 20, leave_percent: 5 }, seed);
        show(&format!("usage frames, seed {seed}"), &outcomes);
        assert!((0.98..=1.02).contains(&outcomes.served), "seed {seed}: {}", outcomes.served);
        admitted += outcomes.admitted / seeds as f64;
    }
    // Which side of a border a long stream falls on moves one seed's share by some percent, and not their mean.
    assert!((0.98..=1.02).contains(&admitted), "{admitted}");
}

#[test]
fn without_usage_frames_the_error_is_that_of_counting_events() {
    for (bundled, most) in [(0, 0.02), (20, 0.05), (100, 0.25)] {
        for seed in 0..4 {
            let outcomes =
                run(LoadProfile { usage: false, bundled_percent: bundled, leave_percent: 5 }, seed);
            show(&format!("no usage frames, {bundled} % of streams bundled, seed {seed}"), &outcomes);
            assert!((outcomes.served - 1.0).abs() < most, "{bundled}: {}", outcomes.served);
        }
    }
}
