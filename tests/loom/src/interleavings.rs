//! Every interleaving of concurrent operations by the driver and the lease holders.
//!
//! This includes every reordering that the memory model allows.

use loom::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    thread,
};

use super::count::*;

const AMPLE_LIMIT: u32 = 8;

fn open_with(leases: u32) -> Arc<GateWord> {
    let count = GateWord::closed();
    count.open();
    for _ in 0..leases {
        assert!(count.take(AMPLE_LIMIT, true).is_taken());
    }
    Arc::new(count)
}

fn count_drained(releases: impl IntoIterator<Item = ReleaseEffect>) -> usize {
    releases.into_iter().filter(|released| *released == ReleaseEffect::Drained).count()
}

#[test]
fn once_closed_no_take_succeeds_and_those_before_are_counted() {
    loom::model(|| {
        let count = open_with(0);
        let takers: Vec<_> = (0..2)
            .map(|_| {
                let count = Arc::clone(&count);
                thread::spawn(move || count.take(AMPLE_LIMIT, false).is_taken())
            })
            .collect();
        let leases = count.close();
        assert!(!count.take(AMPLE_LIMIT, true).is_taken() && !count.take(AMPLE_LIMIT, false).is_taken());
        assert_eq!(count.leases(), leases, "nobody got in after the close");
        let taken = takers.into_iter().map(|taker| taker.join().unwrap());
        assert_eq!(taken.filter(|taken| *taken).count(), leases as usize);
    });
}

#[test]
fn a_close_over_leases_is_drained_exactly_once() {
    loom::model(|| {
        let count = open_with(2);
        let holders: Vec<_> = (0..2)
            .map(|_| {
                let count = Arc::clone(&count);
                thread::spawn(move || count.release())
            })
            .collect();
        let leases = count.close();
        let drains = count_drained(holders.into_iter().map(|holder| holder.join().unwrap()));
        assert_eq!(drains, usize::from(leases > 0));
        assert_eq!(count.leases(), 0);
    });
}

#[test]
fn a_request_beside_the_close_is_drained_or_never_was() {
    loom::model(|| {
        let count = open_with(0);
        let requests: Vec<_> = (0..2)
            .map(|_| {
                let count = Arc::clone(&count);
                thread::spawn(move || count.take(AMPLE_LIMIT, false).is_taken().then(|| count.release()))
            })
            .collect();
        let leases = count.close();
        let releases = requests.into_iter().filter_map(|request| request.join().unwrap());
        assert_eq!(count_drained(releases), usize::from(leases > 0));
        assert_eq!(count.leases(), 0);
        assert!(!count.is_open());
    });
}

#[test]
fn whoever_queues_gets_the_place_or_hears_that_it_came_free() {
    loom::model(|| {
        let count = open_with(1);
        let holder = {
            let count = Arc::clone(&count);
            thread::spawn(move || count.release())
        };
        count.set_queued(true);
        let at_once = count.take(1, true).is_taken();
        let released = holder.join().unwrap();
        assert!(at_once || released == ReleaseEffect::Freed, "a place was lost");
        assert!(at_once || count.take(1, true).is_taken());
    });
}

#[test]
fn newcomers_never_overtake_those_who_queue() {
    loom::model(|| {
        let count = open_with(1);
        count.set_queued(true);
        let newcomer = {
            let count = Arc::clone(&count);
            thread::spawn(move || count.take(1, false).is_taken())
        };
        let holder = {
            let count = Arc::clone(&count);
            thread::spawn(move || count.release())
        };
        assert!(!newcomer.join().unwrap());
        assert_eq!(holder.join().unwrap(), ReleaseEffect::Freed);
        assert!(count.take(1, true).is_taken());
    });
}

#[test]
fn the_limit_is_never_exceeded() {
    loom::model(|| {
        let count = open_with(0);
        let takers: Vec<_> = (0..2)
            .map(|_| {
                let count = Arc::clone(&count);
                thread::spawn(move || count.take(1, false).is_taken())
            })
            .collect();
        let taken_here = count.take(1, true).is_taken();
        let there = takers.into_iter().map(|taker| taker.join().unwrap());
        assert_eq!(there.filter(|taken| *taken).count() + usize::from(taken_here), 1);
        assert_eq!(count.leases(), 1);
    });
}

#[test]
fn a_drain_called_off_by_opening_leaves_no_lease_behind() {
    loom::model(|| {
        let count = open_with(1);
        let holder = {
            let count = Arc::clone(&count);
            thread::spawn(move || count.release())
        };
        let leases = count.close();
        count.open();
        let released = holder.join().unwrap();
        // A drain from before the opening is stale, which the driver detects by checking the gate.
        assert!(released == ReleaseEffect::NoEffect || leases == 1);
        assert!(count.is_open());
        assert_eq!(count.leases(), 0);
        assert!(count.take(1, false).is_taken());
    });
}

#[test]
fn what_was_done_before_the_opening_is_seen_by_whoever_gets_in() {
    loom::model(|| {
        let count = Arc::new(GateWord::closed());
        let routed = Arc::new(AtomicU32::new(0));
        let request = {
            let (count, routed) = (Arc::clone(&count), Arc::clone(&routed));
            thread::spawn(move || count.take(1, false).is_taken().then(|| routed.load(Ordering::Relaxed)))
        };
        routed.store(1, Ordering::Relaxed);
        count.open();
        assert_ne!(request.join().unwrap(), Some(0));
    });
}

#[test]
fn what_a_holder_did_is_seen_by_whoever_finds_the_gate_drained() {
    loom::model(|| {
        let count = open_with(1);
        let last_end = Arc::new(AtomicU32::new(0));
        let holder = {
            let (count, last_end) = (Arc::clone(&count), Arc::clone(&last_end));
            thread::spawn(move || {
                last_end.store(1, Ordering::Relaxed);
                count.release()
            })
        };
        if count.close() == 0 || count.leases() == 0 {
            assert_eq!(last_end.load(Ordering::Relaxed), 1);
        }
        holder.join().unwrap();
    });
}

#[test]
fn the_end_of_a_use_that_was_seen_is_told_once() {
    loom::model(|| {
        let count = open_with(1);
        let holder = {
            let count = Arc::clone(&count);
            thread::spawn(move || count.release())
        };
        let other = {
            let count = Arc::clone(&count);
            thread::spawn(move || count.take(AMPLE_LIMIT, false).is_taken().then(|| count.release()))
        };
        let seen = count.watch();
        let released = [Some(holder.join().unwrap()), other.join().unwrap()];
        let told = released.into_iter().flatten().filter(|r| *r == ReleaseEffect::Idle).count();
        assert_eq!(told, usize::from(seen > 0), "seen with {seen}: {released:?}");
        assert_eq!(count.leases(), 0);
    });
}

#[test]
fn a_use_is_seen_by_the_driver_or_announced_to_it() {
    loom::model(|| {
        let count = open_with(1);
        assert_eq!(count.release(), ReleaseEffect::NoEffect);
        let last_end = Arc::new(AtomicU32::new(0));
        let user = {
            let (count, last_end) = (Arc::clone(&count), Arc::clone(&last_end));
            thread::spawn(move || {
                let effect = count.take(AMPLE_LIMIT, false);
                last_end.store(1, Ordering::Relaxed);
                count.release();
                effect
            })
        };
        let leases = count.watch();
        let is_seen = leases > 0 || last_end.load(Ordering::Relaxed) == 1;
        let is_announced = user.join().unwrap() == TakeEffect::FirstUse;
        assert!(is_seen || is_announced);
    });
}
