//! Requests into metrics.

use std::sync::Arc;

use rouse::model::ModelName;

use crate::{
    http::{Finished, Meter},
    metrics::{Metrics, Route, Status},
};

pub(super) struct Counted {
    metrics: Arc<Metrics>,
}

impl Counted {
    pub(super) fn new(metrics: &Arc<Metrics>) -> Self {
        Self { metrics: Arc::clone(metrics) }
    }
}

impl Meter for Counted {
    fn finished(&self, finished: &Finished<'_>) {
        let model = match finished.model {
            Some(name) => {
                let model = self.metrics.model(name);
                model.in_flight(-1);
                model
            }
            None => self.metrics.other(),
        };
        let route = match finished.route {
            "chat" => Route::Chat,
            "completions" => Route::Completions,
            "embeddings" => Route::Embeddings,
            "models" => Route::Models,
            _ => Route::Other,
        };
        model.ended(route, Status::of(finished.status), finished.cold_start, finished.duration);
        if let Some(after) = finished.first_byte {
            model.first_byte(after);
        }
        if finished.parked.0 > 0 {
            model.waited(finished.parked);
        }
        for _ in 0..finished.replays {
            model.replayed();
        }
        model.bytes_in(finished.bytes_in);
        model.bytes_out(finished.bytes_out);
        if let Some(phase) = finished.left {
            self.metrics.client_left(phase);
        }
        if let Some(code) = finished.code {
            self.metrics.refused(code);
        }
    }

    fn began(&self, model: &ModelName) {
        self.metrics.model(model).in_flight(1);
    }

    fn parked(&self, model: &ModelName, change: i64) {
        self.metrics.model(model).parked(change);
    }

    fn refused(&self, status: u16) {
        self.metrics.other().ended(Route::Other, Status::of(status), None, rouse::units::Millis::ZERO);
    }
}
