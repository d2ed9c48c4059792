//! `GET /v1/models`: every model and alias, awake or not, and what state it is in.

use bytes::Bytes;
use rouse::{engine::last_outcome::LastFailure, fleet::report::ModelState, model::ModelName};
use serde::Serialize;

use crate::{keys::ApiKey, routing::RouteTable};

#[derive(Serialize)]
struct ModelObject<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    state: ModelState,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<ModelFailureObject>,
}

/// How it last failed, where it has not served since. What its engine wrote is for the admin alone.
#[derive(Serialize)]
struct ModelFailureObject {
    cause: String,
    /// In seconds since the epoch.
    at: u64,
    /// Failures in a row.
    count: u32,
}

#[derive(Serialize)]
struct ModelListObject<'a> {
    object: &'static str,
    data: Vec<ModelObject<'a>>,
}

/// All that the key may use. `created` is when this gateway started, in seconds since the epoch: the SDKs want a number.
pub(crate) fn list(routes: &RouteTable, key: Option<&ApiKey>, created: u64) -> Bytes {
    let usable = |model: &ModelName| key.is_none_or(|key| key.may_use(model));
    let models = routes.registry.iter().filter(|(_, model)| usable(model));
    json(&ModelListObject {
        object: "list",
        data: models.map(|(name, model)| describe(routes, name, model, created)).collect(),
    })
}

/// One, under the name it was asked for.
pub(crate) fn single(routes: &RouteTable, name: &str, model: &ModelName, created: u64) -> Bytes {
    json(&describe(routes, name, model, created))
}

fn describe<'a>(routes: &RouteTable, name: &'a str, model: &ModelName, created: u64) -> ModelObject<'a> {
    let route = routes.models.get(model);
    let failed = |LastFailure { at, cause, count }: &LastFailure| ModelFailureObject {
        cause: cause.class(),
        at: at.0 / 1000,
        count: *count,
    };
    ModelObject {
        id: name,
        object: "model",
        created,
        owned_by: "rouse",
        state: route.map_or_else(ModelState::default, |route| route.state),
        last_failure: route.and_then(|route| route.last_failure.as_ref()).map(failed),
    }
}

fn json(value: &impl Serialize) -> Bytes {
    // Plain data into memory: this cannot fail.
    serde_json::to_vec(value).unwrap_or_default().into()
}
