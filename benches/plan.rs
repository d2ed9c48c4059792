//! Measures what a turn of the driver costs the decisions, at 10 to 10,000 engines: `cargo bench --bench plan`.
//!
//! The targets are 50 µs for a plan at 100 engines, and growth no worse than linear.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use worlds::{NOW, WaitingLoad, used_event};

#[path = "plan/worlds.rs"]
mod worlds;

fn turns(c: &mut Criterion) {
    for engines in [10, 100, 1000, 10_000] {
        let mut group = c.benchmark_group(format!("{engines} engines"));
        group.throughput(Throughput::Elements(engines as u64)).sample_size(20);
        for waiting in WaitingLoad::ALL {
            let fleet = worlds::fleet(engines, waiting);
            group.bench_function(format!("plan, {}", name(waiting)), |b| {
                b.iter(|| fleet.plan(black_box(NOW)))
            });
        }
        let mut fleet = worlds::fleet(engines, WaitingLoad::One);
        group.bench_function("next_deadline", |b| b.iter(|| fleet.next_deadline()));
        let mut leases = 3;
        group.bench_function("on", |b| {
            b.iter(|| {
                leases = 5 - leases;
                fleet.on(&used_event(1, leases), NOW);
            });
        });
        group.bench_function("a turn with an event, one waits", |b| {
            b.iter(|| {
                leases = 5 - leases;
                fleet.on(&used_event(1, leases), NOW);
                let plan = fleet.plan(NOW);
                fleet.issued(&plan.commands, NOW);
                fleet.next_deadline()
            });
        });
        let fleet = worlds::fleet(engines, WaitingLoad::Evicting);
        group.bench_function("a turn that makes room", |b| {
            b.iter_with_large_drop(|| {
                let mut fleet = fleet.clone();
                let plan = fleet.plan(NOW);
                fleet.issued(&plan.commands, NOW);
                fleet
            });
        });
        group.finish();
    }
}

const fn name(waiting: WaitingLoad) -> &'static str {
    match waiting {
        WaitingLoad::Nobody => "nobody waits",
        WaitingLoad::One => "one waits",
        WaitingLoad::Thousand => "1000 wait",
        WaitingLoad::Evicting => "makes room",
    }
}

criterion_group!(benches, turns);
criterion_main!(benches);
