//! The expected waits, for requests that must not make the driver work for each of them.
//!
//! A waiting request reads the board: the driver writes there the models whose requests arrived in a turn, and after a
//! change of an engine all models with waiting requests, at most once in [`RENEWAL_INTERVAL`]. A model leaves the board
//! with its last waiter. A list of all models is made at most once in [`MAX_AGE`], for the first of its readers.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use rouse::{
    fleet::quote::{WaitForecast, WaitRange},
    model::ModelName,
    units::{Millis, Tick},
};

/// The forecasts of all models that have one.
pub type WaitForecasts = BTreeMap<ModelName, WaitForecast>;

/// The wait that a parked request was quoted at its arrival. Empty if it was not, or not yet.
pub type QuotedWait = Arc<OnceLock<WaitRange>>;

/// How old a list of all models may be.
const MAX_AGE: Millis = Millis(500);
/// The shortest time between two renewals of all waits on the board.
const RENEWAL_INTERVAL: Millis = Millis(250);

#[derive(Default)]
pub(super) struct WaitBoard {
    waiting: Mutex<WaitForecasts>,
    /// The latest list of all models. Its lock is held while a new one is made, so that all readers wait for the same.
    all: tokio::sync::Mutex<Option<(Tick, Arc<WaitForecasts>)>>,
}

impl WaitBoard {
    /// The rest of the expected wait of requests for this model; `None` if it is unknown, or none waits.
    pub(super) fn of(&self, model: &ModelName, now: Tick) -> Option<WaitRange> {
        Some(self.waiting().get(model)?.at(now))
    }

    pub(super) fn set(&self, model: ModelName, forecast: WaitForecast) {
        self.waiting().insert(model, forecast);
    }

    /// Removes a model for which no request waits any more.
    pub(super) fn remove(&self, model: &ModelName) {
        self.waiting().remove(model);
    }

    /// Replaces all forecasts.
    pub(super) fn replace(&self, forecasts: WaitForecasts) {
        *self.waiting() = forecasts;
    }

    /// Returns a list of all models that is young enough, or else what `make` returns. Without that, the old list.
    pub(super) async fn all(
        &self,
        now: Tick,
        make: impl Future<Output = Option<WaitForecasts>>,
    ) -> Arc<WaitForecasts> {
        let mut latest = self.all.lock().await;
        if let Some((made_at, forecasts)) = &*latest
            && now.since(*made_at) < MAX_AGE
        {
            return Arc::clone(forecasts);
        }
        let forecasts = match make.await {
            Some(forecasts) => Arc::new(forecasts),
            None => latest.take().map(|(_, forecasts)| forecasts).unwrap_or_default(),
        };
        // Even an old list is kept for so long: readers that wait for the lock must not each wait for the driver.
        *latest = Some((now, Arc::clone(&forecasts)));
        forecasts
    }

    fn waiting(&self) -> MutexGuard<'_, WaitForecasts> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// When the waits on the board are renewed.
///
/// Engines may change in every turn, and a forecast for every queued model in each of them would hold up the driver.
#[derive(Default)]
pub(super) struct WaitRenewal {
    renewed_at: Tick,
    /// An engine has changed since.
    is_stale: bool,
}

impl WaitRenewal {
    pub(super) const fn mark_stale(&mut self) {
        self.is_stale = true;
    }

    /// The moment of the next renewal; `None` while the waits on the board hold.
    pub(super) fn due(&self) -> Option<Tick> {
        self.is_stale.then(|| self.renewed_at + RENEWAL_INTERVAL)
    }

    /// Returns whether the waits are to be renewed now. They then count as renewed.
    pub(super) fn begin(&mut self, now: Tick) -> bool {
        let is_due = self.due().is_some_and(|at| at <= now);
        if is_due {
            *self = Self { renewed_at: now, is_stale: false };
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    fn forecasts(likely: u64) -> WaitForecasts {
        let range = WaitRange::exactly(Millis(likely));
        let forecast = WaitForecast { made_at: Tick(1000), range, is_under_way: true };
        BTreeMap::from([(ModelName::from("m"), forecast)])
    }

    #[test]
    fn a_wait_on_the_board_gets_shorter_with_time_until_it_is_replaced() {
        let board = WaitBoard::default();
        let model = ModelName::from("m");
        assert_eq!(board.of(&model, Tick(1000)), None);
        forecasts(9000).into_iter().for_each(|(model, forecast)| board.set(model, forecast));
        assert_eq!(board.of(&model, Tick(5000)), Some(WaitRange::exactly(Millis(5000))));
        board.replace(WaitForecasts::new());
        assert_eq!(board.of(&model, Tick(5000)), None);
        board.replace(forecasts(9000));
        board.remove(&model);
        assert_eq!(board.of(&model, Tick(5000)), None);
    }

    #[test]
    fn waits_are_renewed_at_once_after_a_pause_and_then_four_times_a_second_at_most() {
        let mut renewal = WaitRenewal::default();
        assert!(!renewal.begin(Tick(1000)), "nothing has changed");
        renewal.mark_stale();
        assert!(renewal.begin(Tick(1000)));
        assert_eq!(renewal.due(), None);
        renewal.mark_stale();
        assert!(!renewal.begin(Tick(1249)));
        assert_eq!(renewal.due(), Some(Tick(1250)), "the change is not forgotten");
        assert!(renewal.begin(Tick(1250)));
    }

    #[tokio::test]
    async fn a_list_of_all_models_serves_all_readers_of_half_a_second_and_outlives_a_driver_that_is_gone() {
        let board = WaitBoard::default();
        assert!(board.all(Tick(500), ready(None)).await.is_empty());
        let first = board.all(Tick(1000), ready(Some(forecasts(1)))).await;
        assert_eq!(*first, forecasts(1));
        let again = board.all(Tick(1499), ready(Some(forecasts(2)))).await;
        assert!(Arc::ptr_eq(&first, &again));
        let next = board.all(Tick(1500), ready(Some(forecasts(2)))).await;
        assert_eq!(*next, forecasts(2));
        let gone = board.all(Tick(9000), ready(None)).await;
        assert!(Arc::ptr_eq(&next, &gone));
        let waited = board.all(Tick(9000), ready(Some(forecasts(3)))).await;
        assert!(Arc::ptr_eq(&gone, &waited), "a reader that waited meanwhile does not ask again");
    }
}
