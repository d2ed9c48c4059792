use super::*;

/// A breaker, and the current time.
struct BreakerFixture {
    standing: Arc<CircuitBreaker>,
    now: Tick,
}

impl BreakerFixture {
    fn new() -> Self {
        Self { standing: CircuitBreaker::new(1, Arc::default()), now: Tick(1_000_000) }
    }

    /// Records this many failures of requests that are sent now.
    fn fail(&self, times: u32) -> Vec<BreakerTransition> {
        (0..times).filter_map(|_| self.standing.record_failure(self.now, self.now)).collect()
    }

    fn succeed(&self) -> Option<BreakerTransition> {
        self.standing.record_success(self.now, || self.now)
    }

    fn pass(&mut self, span: Millis) {
        self.now = self.now + span;
    }

    fn is_due(&self) -> bool {
        self.standing.is_trial_due(self.now)
    }

    fn try_again(&self) -> bool {
        self.standing.start_trial(self.now)
    }
}

fn is_about(pause: Millis, whole: Millis) -> bool {
    (whole.0 * 9 / 10..=whole.0 * 11 / 10).contains(&pause.0)
}

#[test]
fn failures_in_a_row_leave_it_out_and_a_success_between_them_does_not() {
    let mut fixture = BreakerFixture::new();
    for _ in 0..4 {
        assert_eq!(fixture.fail(MAX_CONSECUTIVE_FAILURES - 1), []);
        assert_eq!(fixture.succeed(), None);
        fixture.pass(Millis::secs(31));
    }
    let changes = fixture.fail(MAX_CONSECUTIVE_FAILURES + 3);
    assert!(
        matches!(changes.as_slice(), [BreakerTransition::Ejected(pause)] if is_about(*pause, BASE_EJECTION_TIME)),
        "{changes:?}"
    );
    assert!(fixture.standing.is_ejected() && !fixture.is_due() && !fixture.try_again());
}

#[test]
fn half_of_many_outcomes_leave_it_out_and_less_do_not() {
    let left_out = |bad_of_ten: u32| {
        let mut fixture = BreakerFixture::new();
        (0..200).any(|n| {
            fixture.pass(Millis(100));
            // Spread the failures, so that they are not consecutive.
            if n * bad_of_ten % 10 < bad_of_ten {
                fixture.fail(1)
            } else {
                fixture.succeed().into_iter().collect()
            }
            .iter()
            .any(|change| matches!(change, BreakerTransition::Ejected(_)))
        })
    };
    assert!(left_out(5) && left_out(7) && !left_out(4) && !left_out(1));
    // Few outcomes are not enough for an ejection.
    let few = BreakerFixture::new();
    for _ in 0..9 {
        assert_eq!((few.fail(1), few.succeed()), (vec![], None));
    }
}

#[test]
fn one_request_tries_it_when_its_time_is_over_and_each_time_it_is_longer_up_to_a_bound() {
    let mut fixture = BreakerFixture::new();
    fixture.fail(MAX_CONSECUTIVE_FAILURES);
    let mut whole = BASE_EJECTION_TIME;
    for _ in 0..8 {
        fixture.pass(Millis(whole.0 * 11 / 10));
        assert!(fixture.is_due() && fixture.try_again());
        assert!(!fixture.is_due() && !fixture.try_again(), "one at a time");
        whole = Millis(whole.0 * 2).min(MAX_EJECTION_TIME);
        // A failed trial does not double the pause again.
        assert_eq!(fixture.fail(1), []);
        fixture.pass(Millis(whole.0 * 8 / 10));
        assert!(!fixture.is_due());
    }
    assert_eq!(whole, MAX_EJECTION_TIME);
}

#[test]
fn only_what_went_out_afterwards_brings_it_back() {
    let mut fixture = BreakerFixture::new();
    let before = fixture.now;
    fixture.pass(Millis(1));
    fixture.fail(MAX_CONSECUTIVE_FAILURES);
    assert_eq!(fixture.standing.record_success(before, || fixture.now), None);
    assert!(fixture.standing.is_ejected());
    fixture.pass(Millis::secs(11));
    assert!(fixture.try_again());
    assert_eq!(fixture.succeed(), Some(BreakerTransition::Restored));
    assert!(!fixture.standing.is_ejected());
    // The breaker has forgotten earlier failures.
    assert_eq!(fixture.fail(MAX_CONSECUTIVE_FAILURES - 1), []);
}

#[test]
fn failures_of_what_went_out_before_do_not_lengthen_the_pause() {
    let mut fixture = BreakerFixture::new();
    let before = fixture.now;
    fixture.pass(Millis(1));
    fixture.fail(MAX_CONSECUTIVE_FAILURES);
    fixture.pass(Millis(BASE_EJECTION_TIME.0 * 11 / 10));
    assert_eq!(fixture.standing.record_failure(before, fixture.now), None);
    assert!(fixture.is_due());
}
