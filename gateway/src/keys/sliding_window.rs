//! Sliding window of exact counters over the last minute.
//!
//! A bucket that refills (GCRA and its kin) is a single number, but it lets an idle key take twice its limit within one
//! minute: the bucket and the refill. A sliding window over exact counts does not: at every moment, the amount taken in
//! the 60 s before it is at most the limit. Time is cut into slots of 250 ms, and a slot counts until all of it is over
//! a minute old, so the window spans 60 to 60.25 s: a key under constant pressure gets at least 99.58 % of its limit,
//! and never more.
//!
//! The amount used may exceed the amount taken. The window then charges the excess, up to the limit; the rest is a debt
//! that fills freed slots before any new request does. So over a longer time every used unit has counted in the window
//! for its minute, whatever the estimate was.
//!
//! The window is plain data behind its owner's lock, not a set of atomics. A request checks two windows and takes from
//! both or none. The lock is held for some tens of nanoseconds, twice a request, and never across an await.

use rouse::units::{Millis, Tick};

/// The period of all limits.
pub(super) const MINUTE: Millis = Millis::secs(60);
/// Milliseconds of a slot.
const SLOT_MILLIS: u64 = 250;
/// The slots of a minute, and one more because the oldest slot is only partly over.
const SLOT_COUNT: u64 = MINUTE.0 / SLOT_MILLIS + 1;

/// The amount of one quantity taken in the last minute.
#[derive(Debug)]
pub(super) struct SlidingWindow {
    /// Empty until something is taken: most keys of a long list are idle, and the slots are 2 KB.
    slots: Box<[u64]>,
    /// The current slot, counted from time zero.
    newest: u64,
    sum: u64,
    debt: u64,
}

/// The slot in which an amount was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WindowSlot(u64);

impl SlidingWindow {
    pub(super) fn new() -> Self {
        Self { slots: Box::default(), newest: 0, sum: 0, debt: 0 }
    }

    /// Drops slots over a minute old, and charges debt to the freed room. Call this before any other method.
    pub(super) fn advance(&mut self, limit: u64, now: Tick) {
        // Another core may pass an older clock reading than the last call did.
        let present = (now.0 / SLOT_MILLIS).max(self.newest);
        let passed = present - self.newest;
        self.newest = present;
        if self.sum > 0 {
            for back in 0..passed.min(SLOT_COUNT) {
                let freed = std::mem::take(self.slot(present - back));
                self.sum -= freed;
            }
        }
        let due = self.debt.min(limit.saturating_sub(self.sum));
        self.debt -= due;
        self.add(due);
    }

    /// The amount that counts against the limit now.
    pub(super) const fn used(&self) -> u64 {
        self.sum.saturating_add(self.debt)
    }

    /// Whether `amount` more may be taken.
    pub(super) const fn has_room(&self, limit: u64, amount: u64) -> bool {
        amount <= limit.saturating_sub(self.used())
    }

    /// Takes `amount`; the part above the limit becomes debt.
    pub(super) fn take(&mut self, limit: u64, amount: u64) -> WindowSlot {
        let fits = amount.min(limit.saturating_sub(self.used()));
        self.add(fits);
        self.debt = self.debt.saturating_add(amount - fits);
        WindowSlot(self.newest)
    }

    /// Returns an amount taken in this slot. False: that minute is over.
    pub(super) fn refund(&mut self, slot: WindowSlot, amount: u64) -> bool {
        if slot.0 + SLOT_COUNT <= self.newest {
            return false;
        }
        let mut remaining = amount - self.remove(slot.0, amount);
        let owed = remaining.min(self.debt);
        self.debt -= owed;
        remaining -= owed;
        // The rest was debt at that time and has been charged to later slots since.
        for number in (self.newest.saturating_sub(SLOT_COUNT - 1)..=self.newest).rev() {
            if remaining == 0 {
                break;
            }
            remaining -= self.remove(number, remaining);
        }
        true
    }

    /// Removes up to `most` from a slot and returns the removed amount.
    fn remove(&mut self, number: u64, most: u64) -> u64 {
        let counted = self.slot(number);
        let cleared = most.min(*counted);
        *counted -= cleared;
        self.sum -= cleared;
        cleared
    }

    /// The time until `amount` may be taken, if no other request takes anything. An amount above the limit may be taken
    /// when nothing else counts.
    pub(super) fn time_until_room(&self, limit: u64, amount: u64, now: Tick) -> Millis {
        let needed = amount.min(limit).saturating_add(self.debt);
        // Debt beyond a minute's limit takes whole minutes.
        let minutes = needed.saturating_sub(1) / limit.max(1);
        let needed = needed - minutes * limit;
        let mut used = self.sum;
        let mut wait = Millis::ZERO;
        for slot in (self.newest + 1).saturating_sub(SLOT_COUNT)..=self.newest {
            if needed <= limit.saturating_sub(used) {
                break;
            }
            used -= self.counted(slot);
            wait = Millis(((slot + SLOT_COUNT) * SLOT_MILLIS).saturating_sub(now.0));
        }
        Millis(wait.0 + minutes * (SLOT_COUNT * SLOT_MILLIS))
    }

    /// The time until nothing counts, if no request takes anything.
    pub(super) fn time_until_empty(&self, limit: u64, now: Tick) -> Millis {
        if self.used() == 0 {
            return Millis::ZERO;
        }
        if self.debt > 0 {
            return self.time_until_room(limit, limit, now);
        }
        // Every response calls this. Searching from the newest slot usually visits one slot; from the oldest, all.
        let oldest = (self.newest + 1).saturating_sub(SLOT_COUNT);
        let last = (oldest..=self.newest).rev().find(|slot| self.counted(*slot) > 0);
        last.map_or(Millis::ZERO, |slot| Millis(((slot + SLOT_COUNT) * SLOT_MILLIS).saturating_sub(now.0)))
    }

    fn add(&mut self, amount: u64) {
        if amount > 0 {
            *self.slot(self.newest) += amount;
            self.sum += amount;
        }
    }

    fn counted(&self, number: u64) -> u64 {
        self.slots.get((number % SLOT_COUNT) as usize).copied().unwrap_or_default()
    }

    #[expect(clippy::indexing_slicing, reason = "a remainder is less than what it is the remainder of")]
    fn slot(&mut self, number: u64) -> &mut u64 {
        if self.slots.is_empty() {
            self.slots = vec![0; SLOT_COUNT as usize].into();
        }
        &mut self.slots[(number % SLOT_COUNT) as usize]
    }
}

#[cfg(test)]
mod tests {
    use rouse_testing::random::TestRng;

    use super::*;

    #[test]
    fn in_no_minute_is_more_taken_than_the_limit_and_a_wait_is_as_long_as_it_says() {
        for seed in 0..40 {
            let mut random = TestRng(seed);
            let limit = 1 + random.below(5000);
            let (mut window, mut now) = (SlidingWindow::new(), Tick(1_700_000_000_000 + random.below(1000)));
            let mut taken: Vec<(Tick, u64)> = Vec::new();
            for _ in 0..3000 {
                now = now + Millis(random.below(700));
                window.advance(limit, now);
                let amount = 1 + random.below(limit.div_ceil(10));
                if window.has_room(limit, amount) {
                    window.take(limit, amount);
                    taken.push((now, amount));
                } else {
                    let wait = window.time_until_room(limit, amount, now);
                    assert!(wait > Millis::ZERO && wait.0 <= SLOT_COUNT * SLOT_MILLIS);
                    now = now + Millis(wait.0 - 1);
                    window.advance(limit, now);
                    assert!(!window.has_room(limit, amount), "seed {seed}: there was room before");
                    now = now + Millis(1);
                    window.advance(limit, now);
                    assert!(window.has_room(limit, amount), "seed {seed}: there is no room after the wait");
                }
                let minute: u64 =
                    taken.iter().rev().take_while(|(at, _)| now.since(*at) <= MINUTE).map(|(_, n)| n).sum();
                assert!(minute <= limit, "seed {seed}: {minute} of {limit}");
            }
        }
    }

    #[test]
    fn what_is_owed_takes_its_minutes_like_everything_else() {
        let (limit, start) = (100, Tick(1_000_000));
        let mut window = SlidingWindow::new();
        window.advance(limit, start);
        window.take(limit, 350);
        assert_eq!(window.used(), 350);
        let mut now = start;
        let wait = window.time_until_room(limit, 1, now);
        let mut waited = Millis::ZERO;
        while !window.has_room(limit, 1) {
            now = now + Millis(SLOT_MILLIS);
            waited = now.since(start);
            window.advance(limit, now);
            assert!(window.sum <= limit);
        }
        assert!((180_000..182_000).contains(&waited.0), "{waited}");
        assert!(wait.0.abs_diff(waited.0) <= 2 * SLOT_MILLIS, "{wait} was said, {waited} it took");
    }

    #[test]
    fn what_is_given_back_in_time_may_be_taken_again_and_what_is_over_may_not() {
        let (limit, start) = (10, Tick(500));
        let mut window = SlidingWindow::new();
        window.advance(limit, start);
        let slot = window.take(limit, 10);
        assert!(!window.has_room(limit, 1));
        assert!(window.refund(slot, 4));
        assert!(window.has_room(limit, 4) && !window.has_room(limit, 5));
        window.advance(limit, start + Millis::secs(61));
        assert_eq!(window.used(), 0);
        assert!(!window.refund(slot, 6));
        assert_eq!(window.used(), 0);
    }

    #[test]
    fn a_window_is_empty_when_there_is_room_for_all_of_it() {
        let (limit, mut random) = (50, TestRng(7));
        let (mut window, mut now) = (SlidingWindow::new(), Tick(1_700_000_000_000));
        for _ in 0..3000 {
            now = now + Millis(random.below(60) * random.below(60) * 20);
            window.advance(limit, now);
            let wait = window.time_until_empty(limit, now);
            let as_room =
                if window.used() == 0 { Millis::ZERO } else { window.time_until_room(limit, limit, now) };
            assert_eq!(wait, as_room);
            window.take(limit, random.below(20));
        }
    }

    #[test]
    fn a_window_of_which_nothing_was_taken_has_no_slots() {
        let mut window = SlidingWindow::new();
        window.advance(5, Tick(10_000));
        window.take(5, 0);
        assert!(window.slots.is_empty() && window.has_room(5, 5));
        window.take(5, 1);
        assert!(!window.slots.is_empty() && !window.has_room(5, 5));
    }

    #[test]
    fn a_clock_that_reads_a_little_earlier_on_another_core_changes_nothing() {
        let mut window = SlidingWindow::new();
        window.advance(5, Tick(10_000));
        window.take(5, 5);
        window.advance(5, Tick(9_000));
        assert_eq!(window.used(), 5);
        assert_eq!(window.time_until_empty(5, Tick(10_000)), Millis(SLOT_COUNT * SLOT_MILLIS));
    }
}
