//! Tests drains with a clock that only the tests advance, and drains during shutdown.

use std::time::Duration;

use rouse_net::lease::Lease;

use super::*;

const KEEP: DrainDeadlineAction = DrainDeadlineAction::Keep;
const CUT: DrainDeadlineAction = DrainDeadlineAction::Cut;
/// Length of the hold, in milliseconds.
const HOLD: u64 = 25_000;

/// A gate and the time of its creation.
struct GateFixture {
    keeper: GateController,
    start: Instant,
}

impl GateFixture {
    fn open() -> Self {
        Self { keeper: GateController::new("m".into(), true), start: Instant::now() }
    }

    /// The instant `ms` milliseconds after the start.
    fn at(&self, ms: u64) -> Instant {
        self.start + Duration::from_millis(ms)
    }

    fn request(&self) -> (Lease, ExchangeTracker) {
        self.keeper.route().current.take_lease().expect("the gate is open")
    }

    fn order(
        &self,
        epoch: Epoch,
        deadline: Option<u64>,
        on_deadline: DrainDeadlineAction,
    ) -> Result<stub_api::GateStatus, GateRejection> {
        let generation = Generation(1);
        let order = CloseGateRequest { epoch, generation, drain_deadline: deadline, on_deadline };
        self.keeper.close(&order, None, self.start)
    }

    fn close(&self, deadline: Option<u64>, on_deadline: DrainDeadlineAction) {
        assert!(self.order(1, deadline, on_deadline).unwrap().gated);
    }

    fn shut(&self) {
        self.keeper.close_for_shutdown(self.at(HOLD));
    }

    /// When to check the drain after `ms`, in milliseconds from the start.
    fn advance_drain(&self, ms: u64) -> Option<u64> {
        let now = self.at(ms);
        let due = self.keeper.update(|inner| self.keeper.advance_drain(inner, now))?;
        Some(u64::try_from((due - self.start).as_millis()).unwrap())
    }

    fn is_revoked(&self) -> bool {
        self.keeper.route().current.gate.revoked().is_some()
    }

    fn is_drain_resolved(&self) -> bool {
        self.keeper.update(|inner| inner.is_drain_resolved())
    }
}

/// Ends an exchange like a revoked request: dropped and recorded.
fn assert_cut((lease, part): (Lease, ExchangeTracker)) {
    drop(lease);
    assert!(part.record_abnormal_end());
}

#[test]
fn the_end_shuts_an_open_gate_and_cuts_what_is_under_way_when_the_hold_is_over() {
    let stub = GateFixture::open();
    let request = stub.request();
    stub.shut();
    assert!(!stub.keeper.is_open() && stub.keeper.route().current.take_lease().is_none());
    assert_eq!((stub.advance_drain(0), stub.advance_drain(HOLD - 1)), (Some(HOLD), Some(HOLD)));
    assert!(!stub.is_revoked() && !stub.is_drain_resolved());
    assert_eq!(stub.advance_drain(HOLD), None);
    assert!(stub.is_revoked() && !stub.is_drain_resolved(), "it is over when it has heard of it");
    assert_cut(request);
    stub.advance_drain(HOLD);
    assert!(stub.is_drain_resolved());
    assert_eq!((stub.keeper.view().cut, stub.keeper.view().leases), (Some(1), 0));
}

#[test]
fn a_drain_that_is_to_cut_has_the_earlier_of_its_deadline_and_the_holds() {
    for (deadline, due) in [(Some(100), 100), (Some(HOLD + 1), HOLD), (None, HOLD)] {
        let stub = GateFixture::open();
        let _request = stub.request();
        stub.close(deadline, CUT);
        assert_eq!(stub.advance_drain(0), deadline);
        stub.shut();
        assert_eq!(stub.advance_drain(1), Some(due), "{deadline:?}");
        assert_eq!(stub.advance_drain(due), None);
        assert!(stub.is_revoked(), "{deadline:?}");
    }
}

#[test]
fn what_is_to_be_kept_beyond_a_deadline_is_cut_at_the_end_of_the_hold_and_not_before() {
    for deadline in [Some(100), Some(HOLD + 1), None] {
        for lapsed in [false, true] {
            let stub = GateFixture::open();
            let _request = stub.request();
            stub.close(deadline, KEEP);
            if let Some(at) = deadline.filter(|_| lapsed) {
                assert_eq!(stub.advance_drain(at), None);
                assert!(stub.is_drain_resolved() && !stub.is_revoked());
            }
            stub.shut();
            assert_eq!(stub.advance_drain(101), Some(HOLD), "{deadline:?}");
            assert!(!stub.is_revoked() && !stub.is_drain_resolved());
            stub.advance_drain(HOLD);
            assert!(stub.is_revoked(), "{deadline:?}");
        }
    }
}

#[test]
fn a_drain_that_is_over_is_over_and_one_that_cuts_just_now_cuts() {
    let stub = GateFixture::open();
    let request = stub.request();
    stub.close(Some(100), CUT);
    stub.advance_drain(100);
    assert!(stub.is_revoked());
    stub.shut();
    assert_eq!(stub.advance_drain(101), None);
    assert!(!stub.is_drain_resolved());
    assert_cut(request);
    stub.advance_drain(102);
    let over = stub.keeper.view();
    assert_eq!((stub.is_drain_resolved(), over.cut), (true, Some(1)));
    stub.shut();
    assert_eq!((stub.advance_drain(103), stub.is_drain_resolved(), stub.keeper.view()), (None, true, over));
}

#[test]
fn after_the_signal_an_order_may_hasten_the_end_and_not_put_it_off_and_nobody_opens() {
    let stub = GateFixture::open();
    let _request = stub.request();
    stub.close(None, KEEP);
    stub.shut();
    // The leader that does not know of the signal, then a newer leader.
    for epoch in [1, 2] {
        for (deadline, on_deadline) in [(None, CUT), (Some(HOLD + 1), CUT), (None, KEEP), (Some(0), KEEP)] {
            assert!(stub.order(epoch, deadline, on_deadline).unwrap().gated);
            assert_eq!(stub.advance_drain(1), Some(HOLD), "{epoch} {deadline:?} {on_deadline:?}");
        }
    }
    assert!(matches!(stub.order(1, Some(0), CUT), Err(GateRejection::Stale(_))), "the newer one was heard");
    assert_eq!(stub.advance_drain(1), Some(HOLD));
    let open = |epoch| stub.keeper.open(&OpenGateRequest { epoch, generation: Generation(9) }, None);
    assert!(matches!(open(1), Err(GateRejection::Stale(_))));
    assert!(matches!(open(3), Err(GateRejection::OpenBlocked(_, "the stub is shutting down"))));
    assert!(!stub.keeper.is_open() && !stub.is_revoked());
    stub.order(2, Some(500), CUT).unwrap();
    assert_eq!(stub.advance_drain(1), Some(500));
    stub.advance_drain(500);
    assert!(stub.is_revoked());
}

#[test]
fn an_order_that_is_repeated_hastens_a_drain_of_its_kind_and_cuts_only_when_it_says() {
    for (first, again, due, cut) in [
        ((Some(300), CUT), (Some(900), CUT), Some(300), true),
        ((Some(900), CUT), (Some(300), CUT), Some(300), true),
        ((None, CUT), (Some(300), CUT), Some(300), true),
        ((Some(300), CUT), (None, CUT), Some(300), true),
        ((Some(900), KEEP), (Some(300), KEEP), Some(300), false),
        // No order asked to cut at 300 ms.
        ((Some(300), KEEP), (Some(900), CUT), Some(900), true),
        ((Some(900), CUT), (Some(300), KEEP), Some(900), true),
        ((Some(300), KEEP), (None, CUT), None, false),
    ] {
        let stub = GateFixture::open();
        let _request = stub.request();
        stub.close(first.0, first.1);
        stub.close(again.0, again.1);
        assert_eq!(stub.advance_drain(1), due, "{first:?} {again:?}");
        stub.advance_drain(10_000);
        assert_eq!(stub.is_revoked(), cut, "{first:?} {again:?}");
    }
}

#[test]
fn an_order_that_a_later_one_of_its_leader_has_overtaken_changes_nothing() {
    let stub = GateFixture::open();
    let open = |epoch, generation, sequence| {
        stub.keeper.open(&OpenGateRequest { epoch, generation: Generation(generation) }, sequence)
    };
    let close = |epoch, sequence| {
        let generation = Generation(1);
        let order = CloseGateRequest { epoch, generation, drain_deadline: None, on_deadline: KEEP };
        stub.keeper.close(&order, sequence, stub.start)
    };
    open(1, 1, Some(5)).unwrap();
    close(1, Some(7)).unwrap();
    assert!(matches!(open(1, 1, Some(6)), Err(GateRejection::Overtaken(_))), "the engine may sleep by now");
    assert!(!stub.keeper.is_open());
    open(1, 1, Some(7)).unwrap();
    assert!(stub.keeper.is_open(), "none came later");
    // Orders without a number are obeyed as they arrive, and the numbers before them still count.
    close(1, None).unwrap();
    assert!(matches!(open(1, 1, Some(6)), Err(GateRejection::Overtaken(_))));
    assert!(!stub.keeper.is_open());
    open(1, 1, None).unwrap();
    assert!(matches!(close(1, Some(6)), Err(GateRejection::Overtaken(_))));
    assert!(stub.keeper.is_open());
    // The numbers are those of one leader, and about one generation.
    open(1, 2, Some(1)).unwrap();
    close(2, Some(1)).unwrap();
    assert!(!stub.keeper.is_open());
    assert!(matches!(open(1, 3, Some(9)), Err(GateRejection::Stale(_))));
}
