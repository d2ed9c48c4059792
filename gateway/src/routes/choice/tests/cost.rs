//! What one choice costs, printed: `cargo test -p rouse-gateway --lib --release -- --nocapture the_cost_of`.

use tokio::time::Instant;

use super::*;

const TIMES: u32 = 200_000;

#[test]
fn the_cost_of_a_choice_is_printed() {
    let lots = Lots::seeded(1);
    let mut lines = String::new();
    for n in [1, 2, 8] {
        let route = route(endpoints(0..n));
        // Some load, so that no short cut is taken.
        let held: Vec<_> = (0..n * 8).map(|_| taken(&route, &wanted(&lots))).collect();
        for (name, keyed) in [("no key", false), ("a key", true)] {
            let begun = Instant::now();
            for key in 0..TIMES {
                let prefix = keyed.then(|| u64::from(key).wrapping_mul(0x9E37_79B9_7F4A_7C15));
                std::hint::black_box(route.take(&Wanted { prefix, ..wanted(&lots) }));
            }
            let each = begun.elapsed().as_nanos() / u128::from(TIMES);
            lines += &format!("{n} engines, {name}: {each} ns with the lease's end\n");
        }
        let begun = Instant::now();
        for _ in 0..TIMES {
            std::hint::black_box(route.endpoints[0].gate.take());
        }
        let each = begun.elapsed().as_nanos() / u128::from(TIMES);
        lines += &format!("{n} engines, the lease alone: {each} ns\n");
        drop(held);
    }
    println!("{lines}");
}
