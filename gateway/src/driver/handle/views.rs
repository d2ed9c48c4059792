//! Reads the fleet for display: views, reports, expected waits and gauges.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use rouse::{
    fleet::{
        Fleet, Plan,
        event::LearnedMeasurements,
        quote::WaitRange,
        report::{FleetView, Report},
    },
    model::ModelName,
};
use tokio::sync::oneshot;

use super::{DriverHandle, DriverRequest, DriverState};
use crate::driver::WaitForecasts;

/// How long a list of models waits for the driver. Without the driver, it shows older waits, or none.
const FORECAST_TIMEOUT: Duration = Duration::from_secs(1);

/// The fleet's state as of the driver's last turn, for readers that ask often.
#[derive(Clone, Debug, PartialEq)]
pub struct LiveView {
    pub fleet: Arc<FleetView>,
    /// Whether this gateway leads, and so takes orders.
    pub leads: bool,
}

impl DriverHandle {
    /// The rest of the expected wait of requests for this model; `None` if it is unknown, or none waits.
    pub fn expected_wait(&self, model: &ModelName) -> Option<WaitRange> {
        self.0.waits.of(model, self.0.clock.now())
    }

    /// Forecasts the waits for all models. Causes no turn, and at most one reading in half a second.
    pub async fn expected_waits(&self) -> Arc<WaitForecasts> {
        let made = async {
            let made = self.inspect(|fleet, plan, _| fleet.expected_waits(plan));
            tokio::time::timeout(FORECAST_TIMEOUT, made).await.ok().flatten()
        };
        self.0.waits.all(self.0.clock.now(), made).await
    }

    /// Makes the driver take a turn, so that [`Self::view`] and [`Self::report`] are current.
    ///
    /// Returns at once when the driver has ended.
    pub async fn refresh(&self) {
        let (reply, done) = oneshot::channel();
        if self.0.requests.send(DriverRequest::Refresh(reply)).await.is_ok() {
            // On an error the driver ended meanwhile, and its final view is current.
            drop(done.await);
        }
    }

    /// Returns the fleet's state as of the last [`Self::refresh`].
    pub fn view(&self) -> Arc<FleetView> {
        self.0.view.load_full()
    }

    /// Returns the reasons for the state as of the last [`Self::refresh`].
    pub fn report(&self) -> Arc<Report> {
        self.0.report.load_full()
    }

    /// Returns the learned values of every model, to be kept over restarts.
    pub async fn learned(&self) -> BTreeMap<ModelName, LearnedMeasurements> {
        self.inspect(|fleet, _, _| fleet.learned()).await.unwrap_or_else(|| {
            self.view().models.iter().map(|model| (model.name.clone(), model.learned)).collect()
        })
    }

    /// Sets every gauge of the fleet and its routes, as of the last turn; leases as of now.
    ///
    /// No gauge shows an expected wait, so none is computed for it.
    pub async fn update_gauges(&self) {
        let metrics = self.metrics();
        metrics.observe_fleet(&self.live_view_with(Fleet::report).await.fleet);
        for (model, route) in self.routes().models.iter() {
            if let Some(metrics) = metrics.configured_model(model) {
                metrics.set_ejected(route.ejected_count());
            }
        }
    }

    /// Returns the fleet's state as of the last turn, and leases as of now. Unlike [`Self::refresh`], causes no turn.
    pub async fn live_view(&self) -> LiveView {
        self.live_view_with(Fleet::report_with_waits).await
    }

    async fn live_view_with(&self, report: fn(&Fleet, &Plan) -> Report) -> LiveView {
        let view = self.inspect(move |fleet, plan, gates| {
            let (mut view, used) = (fleet.view(&report(fleet, plan)), gates.lease_usage());
            for model in &mut view.models {
                model.leases = used.get(&model.name).map_or(0, |(leases, _)| *leases);
            }
            LiveView { fleet: Arc::new(view), leads: fleet.leads() }
        });
        view.await.unwrap_or_else(|| LiveView { fleet: self.view(), leads: false })
    }
}

impl DriverState {
    /// Replaces the view and report: for a refresh, and at the end.
    pub(in crate::driver) fn publish_view(&self, fleet: &Fleet, plan: &Plan) {
        let report = fleet.report_with_waits(plan);
        self.view.store(Arc::new(fleet.view(&report)));
        self.report.store(Arc::new(report));
    }
}
