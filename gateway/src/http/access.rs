//! What keys decide about one request: who asks, and whether it may.

use std::{rc::Rc, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, request};
use rouse::{fault::Fault, model::ModelName, units::Tick};

use super::{Served, fields::Fields, head, origin, route::Route, text};
use crate::{
    config::Config,
    keys::{self, Bill, Key, Need},
};

/// What a request wants of a model.
pub(super) struct Wish<'a> {
    /// The model's name as the client spelled it.
    pub(super) spelled: &'a str,
    pub(super) model: &'a ModelName,
    pub(super) max_tokens: Option<u32>,
    /// It is answered with text that a model makes.
    pub(super) generates: bool,
    /// It takes tokens at all: to count them takes none.
    pub(super) computes: bool,
    pub(super) stream: bool,
}

impl Served {
    /// Whose request it is; `None` for everybody, where no keys are configured or the route needs none.
    pub(super) fn authenticate(
        &self,
        route: &Route,
        parts: &request::Parts,
        fields: &Fields<'_>,
        config: &Config,
    ) -> Result<Option<Arc<Key>>, Fault> {
        if matches!(route, Route::Healthz | Route::Readyz) {
            return Ok(None);
        }
        let shared = &self.core.shared;
        let table = shared.keys.table(&config.keys, |name| shared.meter.key(name));
        let key = table.authenticate(head::key(fields)?, &self.socket.key)?;
        match &key {
            Some(key) => self.track.key(&key.name),
            None => origin::check(config, parts)?,
        }
        Ok(key)
    }

    /// Lets a request in, if its key may use the model and has used less than its limits. `now`: when its body was there.
    pub(super) async fn admit(
        &self,
        key: Option<&Arc<Key>>,
        wish: Wish<'_>,
        (headers, body): (&HeaderMap, &Bytes),
        now: Tick,
    ) -> Result<Option<Rc<Bill>>, Fault> {
        let Some(key) = key else { return Ok(None) };
        let Wish { spelled, model, max_tokens, generates, computes, stream } = wish;
        if !key.lets_use(model) {
            return Err(Fault::ModelForbidden { model: text::cut(spelled) });
        }
        let text = if computes { keys::text(headers, body).await } else { 0 };
        let need = Need { text, max_tokens, generates };
        let control = &self.core.shared.control;
        let served = self.core.served.counter(control.served(), model, &key.name);
        Bill::open(key, model, need, stream, (served, control.clock(), now)).map(Some)
    }
}
