//! The results of a gate's word on a single thread; `rouse-loom` checks every interleaving.

use super::count::*;

fn open() -> GateWord {
    let count = GateWord::closed();
    count.open();
    count
}

#[test]
fn a_gate_is_closed_until_it_is_opened_and_again_afterwards() {
    let count = GateWord::closed();
    assert!(!count.is_open() && !count.take(1, true).is_taken());
    count.open();
    assert!(count.is_open() && count.take(1, false).is_taken());
    assert_eq!(count.close(), 1);
    assert!(!count.take(9, true).is_taken());
    assert_eq!(count.release(), ReleaseEffect::Drained);
    assert_eq!(count.close(), 0);
}

#[test]
fn the_limit_holds_for_all_and_those_who_queue_go_first() {
    let count = open();
    assert!(
        count.take(2, false).is_taken() && count.take(2, false).is_taken() && !count.take(2, true).is_taken()
    );
    count.set_queued(true);
    assert_eq!(count.release(), ReleaseEffect::Freed);
    assert!(!count.take(2, false).is_taken(), "a newcomer must not overtake");
    assert!(count.take(2, true).is_taken());
    count.set_queued(false);
    assert_eq!(count.release(), ReleaseEffect::NoEffect);
    assert!(count.take(2, false).is_taken());
    assert_eq!(count.leases(), 2);
}

#[test]
fn the_last_release_of_a_closed_gate_is_the_drain_even_when_somebody_queues() {
    let count = open();
    assert!(count.take(2, false).is_taken() && count.take(2, false).is_taken());
    count.set_queued(true);
    count.close();
    assert_eq!(count.release(), ReleaseEffect::Freed);
    assert_eq!(count.release(), ReleaseEffect::Drained);
    assert_eq!(count.leases(), 0);
}

#[test]
fn only_the_first_use_since_the_gate_was_found_unused_is_announced() {
    let count = open();
    assert_eq!(count.take(9, false), TakeEffect::FirstUse);
    assert_eq!(count.take(9, false), TakeEffect::Taken);
    assert_eq!(count.watch(), 2);
    count.release();
    assert_eq!(count.release(), ReleaseEffect::Idle);
    assert_eq!(count.take(9, false), TakeEffect::Taken, "the driver has not looked since");
    assert_eq!(count.release(), ReleaseEffect::NoEffect);
    assert_eq!(count.watch(), 0);
    assert_eq!(count.take(9, false), TakeEffect::FirstUse);
}
