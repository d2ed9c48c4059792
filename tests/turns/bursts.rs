//! Bursts: a few questions, each soon after the answer, then a rest. Two people who work like that come in each other's way, and
//! a swap for each answer would be thrash.

use rouse::model::Protect;

use super::{
    protection::{EXCHANGE, by, two},
    *,
};

/// Questions in a burst, the pauses between them, and the rest until the next one.
const BURST: usize = 6;
const THINKS: (u64, u64) = (200, 1000);
const RESTS: (u64, u64) = (5_000, 20_000);
const HOUR: Millis = Millis::secs(3600);

/// What an hour of it came to.
struct Hour {
    bursts: u64,
    swaps: u64,
    longest: Millis,
}

fn hour(protect: Protect) -> Hour {
    let mut scenario = two("bursts", protect);
    let mut random = Random::new(19);
    for n in 0..2 {
        let Deed::Ask(request) = by(n + 1, n) else { unreachable!("it asks") };
        let mut pause = |at: usize| {
            let (low, high) = if (at + 1).is_multiple_of(BURST) { RESTS } else { THINKS };
            Millis(random.between(low, high))
        };
        let again = (0..50 * BURST).map(&mut pause).collect();
        scenario = scenario.at(Millis::secs(1 + n), Deed::Ask(Request { again, ..request }));
    }
    let mut world = World::new(scenario);
    if let Err(failure) = world.run_until(HOUR) {
        panic!("{failure}");
    }
    // Engines start, instead of waking, while the first requests wait and the second ones do.
    let waits: Vec<Millis> = ["0", "1"].iter().flat_map(|key| world.waits(key)[2..].to_vec()).collect();
    let hour = Hour {
        bursts: world.tally().of("requests served") / BURST as u64,
        swaps: world.tally().of("swaps"),
        longest: waits.iter().copied().max().unwrap_or_default(),
    };
    let Hour { bursts, swaps, longest } = &hour;
    println!("{protect:?}: {bursts} bursts, {swaps} swaps, {} waits, the longest {longest}", waits.len());
    hour
}

#[test]
fn a_burst_is_served_whole_and_whoever_waits_for_it_waits_for_no_more() {
    let [expected, always, never] = [Protect::Expected, Protect::Always, Protect::Never].map(hour);
    // The other's burst, as long again as bringing that model back would take, and a swap. Whoever comes just as his own model's
    // gate closes waits for a swap to the other's before all that.
    let (wake, sleep) = (Millis::secs(2), Millis::secs(1));
    let burst = Millis((EXCHANGE.0 + THINKS.1) * BURST as u64);
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
