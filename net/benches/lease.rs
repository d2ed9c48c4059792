//! Cost of a lease: taken and released alone, beside other threads, and at a closed gate.

use std::{
    hint::black_box,
    sync::{
        Arc, Barrier,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use criterion::{Criterion, criterion_group, criterion_main};
use rouse::units::Tick;
use rouse_net::lease::{Gate, TickClock};
use tokio::{sync::Notify, time::Instant};

fn gate() -> Arc<Gate> {
    let gate = Gate::new(None, TickClock::new(Instant::now(), Tick(1)), Arc::new(Notify::new()));
    gate.open();
    gate
}

fn alone(c: &mut Criterion) {
    let open = gate();
    c.bench_function("lease/taken and given back", |b| b.iter(|| drop(black_box(open.take()))));
    let closed = gate();
    closed.close();
    c.bench_function("lease/refused by a closed gate", |b| b.iter(|| drop(black_box(closed.take()))));
    let lease = open.take();
    c.bench_function("lease/progress noted", |b| {
        b.iter(|| lease.as_ref().inspect(|lease| lease.progress(Instant::now())).is_some());
    });
}

/// Measures one thread while others do the same on the same gate.
fn contended(c: &mut Criterion) {
    for threads in [2, 3, 4] {
        let gate = gate();
        let stop = Arc::new(AtomicBool::new(false));
        let ready = Arc::new(Barrier::new(threads));
        let others: Vec<_> = (1..threads)
            .map(|_| {
                let (gate, stop, ready) = (Arc::clone(&gate), Arc::clone(&stop), Arc::clone(&ready));
                thread::spawn(move || {
                    ready.wait();
                    while !stop.load(Ordering::Relaxed) {
                        drop(black_box(gate.take()));
                    }
                })
            })
            .collect();
        ready.wait();
        c.bench_function(&format!("lease/taken and given back, {threads} threads"), |b| {
            b.iter(|| drop(black_box(gate.take())));
        });
        stop.store(true, Ordering::Relaxed);
        for other in others {
            assert!(other.join().is_ok());
        }
        assert_eq!(gate.leases(), 0);
    }
}

criterion_group!(benches, alone, contended);
criterion_main!(benches);
