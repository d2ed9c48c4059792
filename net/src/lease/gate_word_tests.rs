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
    assert!(!count.is_open() && !count.take(1, true));
    count.open();
    assert!(count.is_open() && count.take(1, false));
    assert_eq!(count.close(), 1);
    assert!(!count.take(9, true));
    assert_eq!(count.release(), ReleaseEffect::Drained);
    assert_eq!(count.close(), 0);
}

#[test]
fn the_limit_holds_for_all_and_those_who_queue_go_first() {
    let count = open();
    assert!(count.take(2, false) && count.take(2, false) && !count.take(2, true));
    count.set_queued(true);
    assert_eq!(count.release(), ReleaseEffect::Freed);
    assert!(!count.take(2, false), "a newcomer must not overtake");
    assert!(count.take(2, true));
    count.set_queued(false);
    assert_eq!(count.release(), ReleaseEffect::NoEffect);
    assert!(count.take(2, false));
    assert_eq!(count.leases(), 2);
}

#[test]
fn the_last_release_of_a_closed_gate_is_the_drain_even_when_somebody_queues() {
    let count = open();
    assert!(count.take(2, false) && count.take(2, false));
    count.set_queued(true);
    count.close();
    assert_eq!(count.release(), ReleaseEffect::Freed);
    assert_eq!(count.release(), ReleaseEffect::Drained);
    assert_eq!(count.leases(), 0);
}
