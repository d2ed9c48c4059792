//! `GET /v1/models`: lists every model and alias, awake or not, with its state and the wait to expect.

use bytes::Bytes;
use rouse::{
    engine::last_outcome::LastFailure,
    fleet::{quote::WaitRange, report::ModelState},
    model::ModelName,
    units::{Millis, Tick},
};
use serde::Serialize;

use crate::{driver::WaitForecasts, keys::ApiKey, routing::RouteTable};

#[derive(Serialize)]
struct ModelObject<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    state: ModelState,
    /// How long a request that arrives now is expected to wait. `null`: that is unknown.
    expected_wait: Option<ExpectedWaitObject>,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<ModelFailureObject>,
}

/// An expected wait in seconds.
#[derive(Serialize)]
struct ExpectedWaitObject {
    low: f64,
    likely: f64,
    high: f64,
}

/// A model's last failure, while it has not served since. The engine's own output is for the admin API only.
#[derive(Serialize)]
struct ModelFailureObject {
    cause: String,
    /// When it failed, in seconds since the epoch.
    at: u64,
    /// Consecutive failures.
    count: u32,
}

#[derive(Serialize)]
struct ModelListObject<'a> {
    object: &'static str,
    data: Vec<ModelObject<'a>>,
}

/// What the objects of models are made from.
pub(crate) struct ModelList<'a> {
    pub(crate) routes: &'a RouteTable,
    pub(crate) waits: &'a WaitForecasts,
    pub(crate) now: Tick,
    /// Start of this gateway in seconds since the epoch: the SDKs require a number.
    pub(crate) created: u64,
}

impl ModelList<'_> {
    /// Lists all models that the key may use.
    pub(crate) fn all(&self, key: Option<&ApiKey>) -> Bytes {
        let usable = |model: &ModelName| key.is_none_or(|key| key.may_use(model));
        let models = self.routes.registry.iter().filter(|(_, model)| usable(model));
        json(&ModelListObject {
            object: "list",
            data: models.map(|(name, model)| self.describe(name, model)).collect(),
        })
    }

    /// Describes one model, under the name that the client requested.
    pub(crate) fn single(&self, name: &str, model: &ModelName) -> Bytes {
        json(&self.describe(name, model))
    }

    fn describe<'n>(&self, name: &'n str, model: &ModelName) -> ModelObject<'n> {
        let route = self.routes.models.get(model);
        let failed = |LastFailure { at, cause, count }: &LastFailure| ModelFailureObject {
            cause: cause.class(),
            at: at.0 / 1000,
            count: *count,
        };
        ModelObject {
            id: name,
            object: "model",
            created: self.created,
            owned_by: "rouse",
            state: route.map_or_else(ModelState::default, |route| route.state),
            expected_wait: self.waits.get(model).map(|forecast| forecast.at(self.now).into()),
            last_failure: route.and_then(|route| route.last_failure.as_ref()).map(failed),
        }
    }
}

impl From<WaitRange> for ExpectedWaitObject {
    fn from(WaitRange { low, likely, high }: WaitRange) -> Self {
        let seconds = |span: Millis| span.duration().as_secs_f64();
        Self { low: seconds(low), likely: seconds(likely), high: seconds(high) }
    }
}

fn json(value: &impl Serialize) -> Bytes {
    // Plain data into memory: this cannot fail.
    serde_json::to_vec(value).unwrap_or_default().into()
}
