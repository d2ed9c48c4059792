//! Bursts: a few requests, each soon after the previous response, then a rest. Two clients with this pattern conflict,
//! and a swap for each response would be thrashing.

use rouse::model::ProtectionPolicy;

use super::{
    protection::{EXCHANGE_TIME, request_by, two_models},
    *,
};

/// Requests in a burst, the pauses between them, and the rest until the next burst.
const BURST_QUESTIONS: usize = 6;
const THINK_TIME_MS: (u64, u64) = (200, 1000);
const REST_TIME_MS: (u64, u64) = (5_000, 20_000);
const HOUR: Millis = Millis::secs(3600);

/// Statistics of one hour.
struct BurstStats {
    bursts: u64,
    swaps: u64,
    longest: Millis,
}

fn run_bursts(protect: ProtectionPolicy) -> BurstStats {
    let mut scenario = two_models("bursts", protect);
    let mut random = SplitMix64::new(19);
    for n in 0..2 {
        let ScenarioAction::SendRequest(request) = request_by(n + 1, n) else { unreachable!("it asks") };
        let mut pause = |at: usize| {
            let (low, high) =
                if (at + 1).is_multiple_of(BURST_QUESTIONS) { REST_TIME_MS } else { THINK_TIME_MS };
            Millis(random.between(low, high))
        };
        let again = (0..50 * BURST_QUESTIONS).map(&mut pause).collect();
        scenario = scenario.at(
            Millis::secs(1 + n),
            ScenarioAction::SendRequest(SimulatedRequest { repeat_pauses: again, ..request }),
        );
    }
    let mut world = SimulatedWorld::new(scenario);
    if let Err(failure) = world.run_until(HOUR) {
        panic!("{failure}");
    }
    // Skip the first two waits, during which engines start instead of waking.
    let waits: Vec<Millis> = ["0", "1"].iter().flat_map(|key| world.waits(key)[2..].to_vec()).collect();
    let hour = BurstStats {
        bursts: world.tally().count("requests served") / BURST_QUESTIONS as u64,
        swaps: world.tally().count("swaps"),
        longest: waits.iter().copied().max().unwrap_or_default(),
    };
    let BurstStats { bursts, swaps, longest } = &hour;
    println!("{protect:?}: {bursts} bursts, {swaps} swaps, {} waits, the longest {longest}", waits.len());
    hour
}

#[test]
fn a_burst_is_served_whole_and_whoever_waits_for_it_waits_for_no_more() {
    let [expected, always, never] =
        [ProtectionPolicy::Expected, ProtectionPolicy::Always, ProtectionPolicy::Never].map(run_bursts);
    // The other client's burst, the expected time to bring that model back, and a swap. A request that arrives just as
    // its own model's gate closes first waits for a swap to the other model.
    let (wake, sleep) = (Millis::secs(2), Millis::secs(1));
    let burst = Millis((EXCHANGE_TIME.0 + THINK_TIME_MS.1) * BURST_QUESTIONS as u64);
    let swap = sleep + wake + SLACK;
    let bound = swap + burst + wake + swap;
    assert!(expected.longest <= bound, "waited {}, a burst and a swap take {bound}", expected.longest);
    assert!(expected.swaps <= expected.bursts, "{} swaps for {} bursts", expected.swaps, expected.bursts);
    assert!(
        never.swaps * 2 >= expected.swaps * 3,
        "protection saves {} of {} swaps",
        expected.swaps,
        never.swaps
    );
    assert!(always.longest >= Millis::secs(30), "residency alone costs {}", always.longest);
}
