//! What keys decide about one request: who asks, and whether it may.

use std::{rc::Rc, sync::Arc};

use bytes::Bytes;
use http::HeaderMap;
use rouse::{fault::Fault, model::ModelName};

use super::{Served, head, route::Route, text};
use crate::{
    keys::{self, Bill, Key, Need},
    metrics::KeyOutcome,
};

/// What a request wants of a model.
pub(super) struct Wish<'a> {
    /// The model's name as the client spelled it.
    pub(super) spelled: &'a str,
    pub(super) model: &'a ModelName,
    pub(super) max_tokens: Option<u32>,
    /// It is answered with text that a model makes.
    pub(super) generates: bool,
    pub(super) stream: bool,
}

impl Served {
    /// Whose request it is; `None` for everybody, where no keys are configured or the route needs none.
    pub(super) fn authenticate(&self, route: &Route, headers: &HeaderMap) -> Result<Option<Arc<Key>>, Fault> {
        if matches!(route, Route::Healthz | Route::Readyz) {
            return Ok(None);
        }
        let shared = &self.core.shared;
        let table = shared.keys.table(&shared.config.load().keys, |name| shared.meter.key(name));
        let key = table.authenticate(head::key(headers)?, &self.socket.key)?;
        if let Some(key) = &key {
            self.track.key(&key.name);
        }
        Ok(key)
    }

    /// Lets a request in, if its key may use the model and has used less than its limits.
    pub(super) async fn admit(
        &self,
        key: Option<&Arc<Key>>,
        wish: Wish<'_>,
        (headers, body): (&HeaderMap, &Bytes),
    ) -> Result<Option<Rc<Bill>>, Fault> {
        let Some(key) = key else { return Ok(None) };
        let Wish { spelled, model, max_tokens, generates, stream } = wish;
        if !key.may_use(model) {
            if let Some(metrics) = &key.metrics {
                metrics.request(KeyOutcome::Forbidden);
            }
            return Err(Fault::ModelForbidden { model: text::cut(spelled) });
        }
        let need = Need { text: keys::text(headers, body).await, max_tokens, generates };
        let control = &self.core.shared.control;
        let served = self.core.served.counter(control.served(), model, &key.name);
        Bill::open(key, model, need, stream, (served, control.clock())).map(Some)
    }
}
