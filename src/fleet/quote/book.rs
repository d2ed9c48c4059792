//! The record of quotes: compares quotes with the waits that followed, and corrects later quotes by that.
//!
//! An estimate knows neither tomorrow's load nor every fault, so the ranges correct themselves: an end that a wait lay
//! beyond moves away from the likely wait at once, and an end that held moves a little towards it. An end is at rest
//! when about one wait in fourteen lies beyond it, whatever the waits are like, so both ends together hold more than
//! four of five. Of each model, one quote is followed at a time: the requests that wait for the same start end
//! together, and would count as one surprise many times.
//!
//! The record is not kept over a restart: it is as good again after some dozens of waits.

use super::{TimeEstimate, WaitRange};
use crate::{
    fleet::event::{CanaryVerdict, Waiter, WaiterId},
    model::{EngineId, ModelName},
    shared_map::SharedMap,
    units::{Millis, Tick},
};

/// The record of each model that had a parked request. Each plan copies it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::fleet) struct QuoteBook {
    models: SharedMap<ModelName, QuoteRecord>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct QuoteRecord {
    lower: EndCorrection,
    upper: EndCorrection,
    /// How long a request waits for a place at the model's full engines, for each request before it and itself.
    place_time: Option<TimeEstimate>,
    followed: Option<FollowedQuote>,
}

/// The quote that is compared with its wait.
#[derive(Clone, Debug, PartialEq, Eq)]
struct FollowedQuote {
    waiter: WaiterId,
    given_at: Tick,
    range: Option<WaitRange>,
    /// The request waits for so many places at full engines.
    places: Option<u32>,
    /// The request is this engine's canary: its wait ends with the first byte.
    canary_of: Option<EngineId>,
}

/// A factor for the distance of a range's end from the likely wait, in thousandths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EndCorrection(u64);

impl EndCorrection {
    /// Those of a model without a record, as the simulator's worlds have them: load and faults delay more waits than
    /// the measured times show.
    const FIRST_LOWER: Self = Self(1500);
    const FIRST_UPPER: Self = Self(2000);
    const MIN: u64 = 250;
    const MAX: u64 = 16_000;

    /// Moves the end out by three tenths after a miss, and in by a fiftieth after a hit.
    ///
    /// The ratio of the two steps sets how many waits lie beyond the end in the long run.
    fn record(&mut self, missed: bool) {
        let moved = if missed { self.0 * 13 / 10 } else { self.0 * 49 / 50 };
        self.0 = moved.clamp(Self::MIN, Self::MAX);
    }
}

impl Default for QuoteRecord {
    fn default() -> Self {
        Self {
            lower: EndCorrection::FIRST_LOWER,
            upper: EndCorrection::FIRST_UPPER,
            place_time: None,
            followed: None,
        }
    }
}

impl QuoteRecord {
    fn record_wait(&mut self, range: Option<WaitRange>, waited: Millis) {
        if let Some(range) = range {
            self.lower.record(waited < range.low);
            self.upper.record(waited > range.high);
        }
    }
}

impl QuoteBook {
    /// Corrects an estimate by what became of the model's earlier quotes.
    pub(in crate::fleet) fn corrected(&self, model: &ModelName, estimate: WaitRange) -> WaitRange {
        let record = self.models.get(model);
        let (lower, upper) = record
            .map_or((EndCorrection::FIRST_LOWER, EndCorrection::FIRST_UPPER), |record| {
                (record.lower, record.upper)
            });
        estimate.scaled(lower.0, upper.0)
    }

    /// The expected time until so many places at the model's full engines have become free; `None` if unknown.
    pub(in crate::fleet) fn place_range(&self, model: &ModelName, places: u32) -> Option<WaitRange> {
        Some(self.models.get(model)?.place_time?.repeated(places).range())
    }

    /// Whether a change would follow this waiter's quote.
    pub(in crate::fleet) fn follows(&self, model: &ModelName, waiter: WaiterId) -> bool {
        self.followed(model).is_some_and(|quote| quote.waiter == waiter)
    }

    /// Whether this engine's canary ends a followed wait.
    pub(in crate::fleet) fn follows_canary(&self, engine: &EngineId) -> bool {
        self.followed(&engine.model).is_some_and(|quote| quote.canary_of.as_ref() == Some(engine))
    }

    /// Whether the next quote of this model will be followed.
    pub(in crate::fleet) fn is_free(&self, model: &ModelName) -> bool {
        self.followed(model).is_none()
    }

    fn followed(&self, model: &ModelName) -> Option<&FollowedQuote> {
        self.models.get(model)?.followed.as_ref()
    }

    /// Follows the quote of a waiter. `places`: it waits for so many places at full engines.
    pub(in crate::fleet) fn follow(
        &mut self,
        waiter: &Waiter,
        range: Option<WaitRange>,
        places: Option<u32>,
        now: Tick,
    ) {
        let quote = FollowedQuote { waiter: waiter.id, given_at: now, range, places, canary_of: None };
        let mut record = self.models.get(&waiter.model).cloned().unwrap_or_default();
        record.followed = Some(quote);
        self.models.insert(waiter.model.clone(), record);
    }

    /// Records the grant of the followed waiter. The wait of a canary ends with its verdict.
    pub(in crate::fleet) fn record_grant(&mut self, engine: &EngineId, is_canary: bool, now: Tick) {
        let Some(record) = self.models.get_mut(&engine.model) else { return };
        if is_canary {
            if let Some(quote) = &mut record.followed {
                quote.canary_of = Some(engine.clone());
            }
            return;
        }
        let Some(quote) = record.followed.take() else { return };
        let waited = now.since(quote.given_at);
        record.record_wait(quote.range, waited);
        if let Some(places) = quote.places {
            TimeEstimate::learn(&mut record.place_time, Millis(waited.0 / u64::from(places.max(1))));
        }
    }

    /// Records the verdict of the canary whose wait is followed.
    pub(in crate::fleet) fn record_canary(&mut self, model: &ModelName, verdict: &CanaryVerdict, now: Tick) {
        let Some(record) = self.models.get_mut(model) else { return };
        let Some(quote) = record.followed.take() else { return };
        match verdict {
            CanaryVerdict::Passed => record.record_wait(quote.range, now.since(quote.given_at)),
            // The request queues again. Nearly always its wait outlasts the range.
            CanaryVerdict::Failed(_) => record.record_wait(quote.range, Millis::FOREVER),
            CanaryVerdict::Inconclusive => {}
        }
    }

    /// Records that the followed waiter was refused or has left. What its wait would have been is known only if it has
    /// outlasted the range.
    pub(in crate::fleet) fn record_departure(&mut self, model: &ModelName, now: Tick) {
        let Some(record) = self.models.get_mut(model) else { return };
        let Some(quote) = record.followed.take() else { return };
        let waited = now.since(quote.given_at);
        if quote.range.is_some_and(|range| waited > range.high) {
            record.record_wait(quote.range, waited);
        }
    }

    /// Forgets models that are no longer known.
    pub(in crate::fleet) fn retain(&mut self, is_known: impl Fn(&ModelName) -> bool) {
        let unknown: Vec<ModelName> = self.models.keys().filter(|model| !is_known(model)).cloned().collect();
        for model in unknown {
            self.models.remove(&model);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::FailureCause;

    const RANGE: WaitRange = WaitRange { low: Millis(500), likely: Millis(1000), high: Millis(1500) };
    /// The range that a model without a record is quoted for it.
    const FIRST: WaitRange = WaitRange { low: Millis(250), likely: Millis(1000), high: Millis(2000) };

    fn engine() -> EngineId {
        EngineId::new("m".into(), 0)
    }

    fn waiter(id: u64) -> Waiter {
        Waiter {
            id: WaiterId(id),
            model: "m".into(),
            band: 0,
            key: String::new(),
            client: 0,
            arrived: Tick(0),
            deadline: Tick(60_000),
            stream: true,
            required_engine: None,
        }
    }

    /// Quotes an estimate and ends its wait after so long.
    fn wait_for(book: &mut QuoteBook, estimate: WaitRange, waited: u64) -> WaitRange {
        let quoted = book.corrected(&"m".into(), estimate);
        book.follow(&waiter(1), Some(quoted), None, Tick(0));
        book.record_grant(&engine(), false, Tick(waited));
        quoted
    }

    #[test]
    fn an_end_moves_away_from_a_wait_beyond_it_and_back_while_it_holds() {
        let mut book = QuoteBook::default();
        assert_eq!(wait_for(&mut book, RANGE, 2100), FIRST);
        let late = wait_for(&mut book, RANGE, 200);
        assert_eq!((late.low, late.high), (Millis(265), Millis(2300)));
        let early = wait_for(&mut book, RANGE, 1000);
        assert!(early.low < FIRST.low && early.high > FIRST.high, "{early:?}");
        (0..300).for_each(|_| {
            wait_for(&mut book, RANGE, 1000);
        });
        let narrow = book.corrected(&"m".into(), RANGE);
        assert_eq!(narrow, WaitRange { low: Millis(875), likely: Millis(1000), high: Millis(1125) });
        assert_eq!(book.corrected(&"other".into(), RANGE), FIRST);
    }

    /// The estimates are a quarter of the real waits, and the waits are spread.
    #[test]
    fn of_estimates_that_are_far_off_four_of_five_ranges_hold_in_the_long_run() {
        let mut book = QuoteBook::default();
        let waits = (0..600_u64).map(|n| 2000 + n.wrapping_mul(2_654_435_761) % 4000);
        let held: Vec<bool> =
            waits.map(|waited| wait_for(&mut book, RANGE, waited).contains(Millis(waited))).collect();
        let later = held.iter().skip(100).filter(|held| **held).count();
        assert!((400..=490).contains(&later), "{later} of 500");
    }

    #[test]
    fn a_canarys_wait_ends_with_its_first_byte_and_a_failed_one_counts_as_late() {
        let mut book = QuoteBook::default();
        book.follow(&waiter(1), Some(RANGE), None, Tick(0));
        assert!(book.follows(&"m".into(), WaiterId(1)) && !book.is_free(&"m".into()));
        book.record_grant(&engine(), true, Tick(400));
        assert!(book.follows_canary(&engine()) && !book.follows_canary(&EngineId::new("m".into(), 1)));
        book.record_canary(&"m".into(), &CanaryVerdict::Passed, Tick(600));
        assert!(book.is_free(&"m".into()));
        assert!(book.corrected(&"m".into(), RANGE).low > FIRST.low, "it ended after the lower end");
        book.follow(&waiter(2), Some(RANGE), None, Tick(0));
        book.record_grant(&engine(), true, Tick(400));
        book.record_canary(&"m".into(), &CanaryVerdict::Failed(FailureCause::Unhealthy), Tick(500));
        assert!(book.corrected(&"m".into(), RANGE).high > FIRST.high);
    }

    #[test]
    fn who_leaves_early_says_nothing_and_who_leaves_late_says_that_the_range_was_too_short() {
        let mut book = QuoteBook::default();
        book.follow(&waiter(1), Some(RANGE), None, Tick(0));
        book.record_departure(&"m".into(), Tick(100));
        assert_eq!(book.corrected(&"m".into(), RANGE), FIRST);
        book.follow(&waiter(1), Some(RANGE), None, Tick(0));
        book.record_departure(&"m".into(), Tick(1501));
        assert!(book.corrected(&"m".into(), RANGE).high > FIRST.high);
    }

    #[test]
    fn the_time_of_a_place_is_learned_from_the_waits_for_places() {
        let (mut book, model) = (QuoteBook::default(), ModelName::from("m"));
        assert_eq!(book.place_range(&model, 1), None);
        book.follow(&waiter(1), None, Some(4), Tick(0));
        book.record_grant(&engine(), false, Tick(8000));
        let four = book.place_range(&model, 4).unwrap();
        assert_eq!(four, WaitRange { low: Millis(4000), likely: Millis(8000), high: Millis(12_000) });
        book.retain(|_| false);
        assert_eq!(book.place_range(&model, 1), None);
    }
}
