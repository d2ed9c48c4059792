//! Compares the cost of choices: `cargo test -p rouse-gateway --lib --release -- --nocapture the_cost_of`.

use std::{hint::black_box, time::Duration};

use tokio::time::Instant;

use super::*;

const TIMES: u32 = 1_000;
/// The shortest of these rounds is the cost of a choice; the others shared the processor.
const ROUNDS: usize = 7;

/// The cost of one choice, in nanoseconds.
fn cost(take: impl Fn(u32)) -> u128 {
    let round = || {
        let begun = Instant::now();
        (0..TIMES).for_each(&take);
        begun.elapsed()
    };
    let shortest = (0..ROUNDS).map(|_| round()).min();
    shortest.map_or(0, |shortest: Duration| shortest.as_nanos() / u128::from(TIMES))
}

/// The cost of a choice among loaded engines, with or without a key. The load rules out shortcuts.
fn choice(engines: u32, keyed: bool) -> u128 {
    let rng = Rng::seeded(1);
    let route = route(endpoints(0..engines));
    let held_leases: Vec<_> = (0..engines * 8).map(|_| taken(&route, &wanted(&rng))).collect();
    let each = cost(|key| {
        let hash = keyed.then(|| u64::from(key).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let prefix = hash.and_then(first_turn);
        black_box(route.take_lease(&EndpointCriteria { prefix, ..wanted(&rng) }));
    });
    drop(held_leases);
    println!("{engines} engines, {}: {each} ns", if keyed { "a key" } else { "no key" });
    each
}

/// The choice compares two random engines, however many there are. With a key it needs the mean of all, and so visits
/// each engine.
#[test]
fn the_cost_of_a_choice_does_not_grow_with_the_engines() {
    let (two, many) = (choice(2, false), choice(128, false));
    assert!(many < 4 * two, "{many} ns among 128 engines, {two} ns between two");
    let (two, many) = (choice(2, true), choice(128, true));
    // It visits 64 times as many engines, but does not do 64 times as much at each.
    assert!(many < 512 * two, "{many} ns among 128 engines, {two} ns between two, for a key");
}
