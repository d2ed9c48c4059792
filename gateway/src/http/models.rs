//! `GET /v1/models`: lists every model and alias, awake or not, with its state.

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

/// Lists all models that the key may use. `created` is the start of this gateway in seconds since the epoch: the SDKs
/// require a number.
pub(crate) fn list(routes: &RouteTable, key: Option<&ApiKey>, created: u64) -> Bytes {
    let usable = |model: &ModelName| key.is_none_or(|key| key.may_use(model));
    let models = routes.registry.iter().filter(|(_, model)| usable(model));
    json(&ModelListObject {
        object: "list",
        data: models.map(|(name, model)| describe(routes, name, model, created)).collect(),
    })
}

/// Describes one model, under the name that the client requested.
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
