//! What one choice costs beside another: `cargo test -p rouse-gateway --lib --release -- --nocapture the_cost_of`.

use std::{hint::black_box, time::Duration};

use tokio::time::Instant;

use super::*;

const TIMES: u32 = 1_000;
/// The shortest of so many rounds is what a choice costs; the others shared the processor.
const ROUNDS: usize = 7;

/// Of one choice, in nanoseconds.
fn cost(take: impl Fn(u32)) -> u128 {
    let round = || {
        let begun = Instant::now();
        (0..TIMES).for_each(&take);
        begun.elapsed()
    };
    let shortest = (0..ROUNDS).map(|_| round()).min();
    shortest.map_or(0, |shortest: Duration| shortest.as_nanos() / u128::from(TIMES))
}

/// Among so many engines, each of which has some load so that no short cut is taken; for a request with a key, or without.
fn choice(engines: u32, keyed: bool) -> u128 {
    let lots = Rng::seeded(1);
    let route = route(endpoints(0..engines));
    let held: Vec<_> = (0..engines * 8).map(|_| taken(&route, &wanted(&lots))).collect();
    let each = cost(|key| {
        let prefix = keyed.then(|| u64::from(key).wrapping_mul(0x9E37_79B9_7F4A_7C15));
        black_box(route.take_lease(&EndpointCriteria { prefix, ..wanted(&lots) }));
    });
    drop(held);
    println!("{engines} engines, {}: {each} ns", if keyed { "a key" } else { "no key" });
    each
}

/// Two engines are drawn and compared, however many there are. For a key the mean of all is taken, which costs one look at each.
#[test]
fn the_cost_of_a_choice_does_not_grow_with_the_engines() {
    let (two, many) = (choice(2, false), choice(128, false));
    assert!(many < 4 * two, "{many} ns among 128 engines, {two} ns between two");
    let (two, many) = (choice(2, true), choice(128, true));
    // Sixty-four times as many looks, and not sixty-four times as many at each of them.
    assert!(many < 512 * two, "{many} ns among 128 engines, {two} ns between two, for a key");
}
