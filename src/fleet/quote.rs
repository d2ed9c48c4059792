//! Quotes: how long a request is expected to wait for its model, as a range.
//!
//! A range is made to hold four of five waits. It comes from the times that the model's engines took before, the steps
//! under way, the models ahead in line, and the engines that hold the memory. Where one of these is unknown, there is
//! no quote: an unmeasured number would only look like one.
//!
//! `range` calculates with ranges, `learned` has the measured times and their spread, `forecast` reads the state, and
//! `book` compares quotes with the waits that followed.
//!
//! No decision reads a quote, so quotes need no replay.

pub(in crate::fleet) mod book;
pub(in crate::fleet) mod forecast;

mod learned;
mod range;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use self::forecast::WaitForecaster;
pub use self::{
    forecast::WaitForecast,
    learned::{LearnedTimes, TimeEstimate},
    range::WaitRange,
};
use crate::{
    fleet::{
        Fleet, Plan,
        event::{CanaryVerdict, Waiter, WaiterId},
        plan::ReportInputs,
        report::Report,
    },
    model::{EngineId, ModelName},
    units::Tick,
};

impl Fleet {
    /// [`Self::report`] with the expected wait of each model that has one, for display.
    #[must_use]
    pub fn report_with_waits(&self, plan: &Plan) -> Report {
        let inputs = self.complete_report_inputs(plan);
        let mut report = self.planner.report(&inputs);
        for (model, forecast) in self.expected_waits_by(&inputs, self.planner.models.keys()) {
            if let Some(line) = report.models.get_mut(&model) {
                line.wait.expected_wait = Some(Box::new(forecast.range));
            }
        }
        report
    }

    /// Forecasts for each model how long a request that arrives now will wait; models without a forecast are left out.
    ///
    /// Call it after [`Self::issued`] and before any other change.
    #[must_use]
    pub fn expected_waits(&self, plan: &Plan) -> BTreeMap<ModelName, WaitForecast> {
        self.expected_waits_by(&self.complete_report_inputs(plan), self.planner.models.keys())
    }

    /// The same for these models.
    #[must_use]
    pub fn expected_waits_of<'m>(
        &self,
        plan: &Plan,
        models: impl Iterator<Item = &'m ModelName>,
    ) -> BTreeMap<ModelName, WaitForecast> {
        self.expected_waits_by(&plan.report_inputs, models)
    }

    fn expected_waits_by<'m>(
        &self,
        inputs: &ReportInputs,
        models: impl Iterator<Item = &'m ModelName>,
    ) -> BTreeMap<ModelName, WaitForecast> {
        let forecaster = self.forecaster(inputs);
        let forecast = |model: &ModelName| forecaster.forecast(model, self.waiting_everywhere(model));
        models.filter_map(|model| Some((model.clone(), forecast(model)?))).collect()
    }

    /// Quotes their waits to requests that have arrived since the plan before this one, and still wait.
    ///
    /// Call it once for each plan, after [`Self::issued`] and before any other change. Later quotes learn from these.
    pub fn quote_arrivals(
        &mut self,
        plan: &Plan,
        arrived: &[WaiterId],
        now: Tick,
    ) -> Vec<(WaiterId, ModelName, WaitForecast)> {
        let waiting: Vec<&Waiter> = arrived.iter().filter_map(|id| self.dispatch.waiter(*id)).collect();
        if waiting.is_empty() {
            return Vec::new();
        }
        let forecaster = self.forecaster(&plan.report_inputs);
        let mut followed = Vec::new();
        let mut quoted = BTreeMap::new();
        for waiter in &waiting {
            let model = &waiter.model;
            quoted.entry(model).or_insert_with(|| {
                let ahead = self.waiting_everywhere(model).saturating_sub(1);
                let forecast = forecaster.forecast(model, ahead);
                if self.quotes.is_free(model) {
                    let places = forecaster.is_full(model).then(|| ahead.saturating_add(1));
                    followed.push(((*waiter).clone(), forecast, places));
                }
                forecast
            });
        }
        let quote = |w: &&Waiter| Some((w.id, w.model.clone(), (*quoted.get(&w.model)?)?));
        let quotes: Vec<_> = waiting.iter().filter_map(quote).collect();
        drop(forecaster);
        for (waiter, forecast, places) in followed {
            let range = forecast.map(|forecast| forecast.range);
            self.quotes.follow(&waiter, range, places, now);
        }
        quotes
    }

    fn forecaster<'f>(&'f self, inputs: &'f ReportInputs) -> WaitForecaster<'f> {
        let ReportInputs { demand, turn_order, now, .. } = inputs;
        let (planner, clients) = (self.planner.clone(), self.dispatch.clients());
        WaitForecaster::new(planner, demand, clients, turn_order, &self.quotes, *now)
    }

    /// Ends the wait of a request whose first byte has come, if its quote is followed.
    pub(in crate::fleet) fn record_canary(&mut self, engine: &EngineId, verdict: &CanaryVerdict, now: Tick) {
        if self.quotes.follows_canary(engine) {
            self.quotes.record_canary(&engine.model, verdict, now);
        }
    }
}
