//! `GET /v1/models`: every model and alias, awake or not, and what state it is in.

use bytes::Bytes;
use rouse::{fleet::report::ModelState, model::ModelName};
use serde::Serialize;

use crate::{keys::Key, routes::Routes};

#[derive(Serialize)]
struct Model<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    state: ModelState,
}

#[derive(Serialize)]
struct List<'a> {
    object: &'static str,
    data: Vec<Model<'a>>,
}

/// All that the key may use. `created` is when this gateway started, in seconds since the epoch: the SDKs want a number.
pub(crate) fn list(routes: &Routes, key: Option<&Key>, created: u64) -> Bytes {
    let usable = |model: &ModelName| key.is_none_or(|key| key.may_use(model));
    let models = routes.registry.iter().filter(|(_, model)| usable(model));
    json(&List {
        object: "list",
        data: models.map(|(name, model)| describe(routes, name, model, created)).collect(),
    })
}

/// One, under the name it was asked for.
pub(crate) fn one(routes: &Routes, name: &str, model: &ModelName, created: u64) -> Bytes {
    json(&describe(routes, name, model, created))
}

fn describe<'a>(routes: &Routes, name: &'a str, model: &ModelName, created: u64) -> Model<'a> {
    Model {
        id: name,
        object: "model",
        created,
        owned_by: "rouse",
        state: routes.models.get(model).map_or_else(ModelState::default, |route| route.state),
    }
}

fn json(value: &impl Serialize) -> Bytes {
    // Plain data into memory: this cannot fail.
    serde_json::to_vec(value).unwrap_or_default().into()
}
