//! Measures what a turn of the driver costs the decisions, at 10 to 10,000 engines: `cargo bench --bench plan`.
//!
//! The targets are 50 µs for a plan at 100 engines, and growth no worse than linear. For expected waits they are 10 ms
//! for all of 1000 models, and 50 µs for the quote of one request that arrives among 1000 others.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use rouse::{
    fleet::{
        Fleet,
        event::{Event, LearnedMeasurements, WaiterId},
        quote::{LearnedTimes, TimeEstimate},
    },
    units::Millis,
};
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

fn expected_waits(c: &mut Criterion) {
    let mut group = c.benchmark_group("1000 models");
    group.sample_size(20);
    for waiting in [WaitingLoad::Nobody, WaitingLoad::Thousand] {
        let mut fleet = worlds::fleet(1000, waiting);
        learn_times(&mut fleet, 1000);
        let plan = fleet.plan(NOW);
        let load = name(waiting);
        group.bench_function(format!("report, {load}"), |b| b.iter(|| fleet.report(black_box(&plan))));
        group.bench_function(format!("report with waits, {load}"), |b| {
            b.iter(|| fleet.report_with_waits(black_box(&plan)))
        });
        group.bench_function(format!("expected waits, {load}"), |b| {
            b.iter(|| fleet.expected_waits(black_box(&plan)))
        });
    }
    let mut fleet = worlds::fleet(1000, WaitingLoad::Thousand);
    learn_times(&mut fleet, 1000);
    let plan = fleet.plan(NOW);
    // A model whose engine is cold.
    let arrived = [WaiterId(700)];
    group.bench_function("quote of an arrival, 1000 wait", |b| {
        b.iter(|| fleet.quote_arrivals(black_box(&plan), &arrived, NOW))
    });
    group.finish();
}

const fn name(waiting: WaitingLoad) -> &'static str {
    match waiting {
        WaitingLoad::Nobody => "nobody waits",
        WaitingLoad::One => "one waits",
        WaitingLoad::Thousand => "1000 wait",
        WaitingLoad::Evicting => "makes room",
    }
}

/// Teaches the fleet how long each model's engines take.
fn learn_times(fleet: &mut Fleet, engines: usize) {
    let known = |mean| Some(TimeEstimate { mean: Millis(mean), deviation: Millis(mean / 8) });
    for n in 0..engines {
        let times = LearnedTimes {
            start: known(40_000 + n as u64),
            wake_one: known(900),
            sleep: known(400),
            stop: known(300),
            ..LearnedTimes::default()
        };
        let learned = LearnedMeasurements { times, ..LearnedMeasurements::default() };
        let (model, variant) = (worlds::name(n), Default::default());
        fleet.on(&Event::MeasurementsRestored { model, variant, learned }, NOW);
    }
    worlds::plan_until_quiescent(fleet);
}

criterion_group!(benches, turns, expected_waits);
criterion_main!(benches);
