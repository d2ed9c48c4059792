//! Access control of one request: identifies its key and checks what the key may use.

use std::{net::IpAddr, rc::Rc, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, request};
use rouse::{fault::Fault, model::ModelName, units::Tick};
use rouse_config::Config;

use super::{
    BodyByteCounter, RequestHandler, client_text, head, known_headers::KnownHeaders, origin, route::ApiRoute,
};
use crate::{
    keys::{self, ApiKey, QuotaCharge, TokenEstimateInput},
    serve::{RequestPermit, limiter_key},
};

/// What a request needs from a model.
pub(super) struct AdmissionRequest<'a> {
    /// The model's name as the client spelled it.
    pub(super) requested_name: &'a str,
    pub(super) model: &'a ModelName,
    pub(super) max_tokens: Option<u32>,
    /// Whether the response is text that a model generates.
    pub(super) generates: bool,
    /// Whether the request consumes tokens. Counting tokens consumes none.
    pub(super) runs_model: bool,
    pub(super) stream: bool,
}

impl RequestHandler {
    /// Counts a request of a trusted proxy against its client, in the place of a connection. Any other request is
    /// counted by its connection.
    pub(super) fn count_client(&self, client: Option<IpAddr>, config: &Config) -> Result<(), Fault> {
        let Some((client, limiter)) = client.zip(self.socket.proxy_limiter()) else { return Ok(()) };
        let permit = limiter.admit_request(client, &config.limits).map_err(|refusal| refusal.fault())?;
        self.context.set_client_permit(permit);
        Ok(())
    }

    /// The address that stands for the request's client. `None`: the request came through the admin API.
    pub(super) fn client_key(&self) -> Option<IpAddr> {
        let connection = || self.socket.peer().map(|peer| limiter_key(peer.ip()));
        self.context.client_permit().map(RequestPermit::address).or_else(connection)
    }

    /// The body bytes held by the request's client.
    pub(super) fn client_body_bytes(&self) -> Option<Arc<BodyByteCounter>> {
        self.context.client_permit().map(RequestPermit::body_bytes).or_else(|| self.socket.body_bytes())
    }

    /// Identifies the key of a request. `None`: no keys are configured, or the route needs none.
    pub(super) fn authenticate(
        &self,
        route: &ApiRoute,
        parts: &request::Parts,
        fields: &KnownHeaders<'_>,
        config: &Config,
    ) -> Result<Option<Arc<ApiKey>>, Fault> {
        if matches!(route, ApiRoute::Healthz | ApiRoute::Readyz) {
            return Ok(None);
        }
        if let Some(key) = self.socket.operator_key() {
            self.context.set_key(&key.name);
            return Ok(Some(Arc::clone(key)));
        }
        let shared = &self.worker.server;
        let table = shared.keys.table(&config.keys, |name| shared.metrics_sink().key_metrics(name));
        let key = table.authenticate(head::presented_key(fields)?, &self.socket.auth_cache)?;
        match &key {
            Some(key) => self.context.set_key(&key.name),
            None => origin::check_origin(config, parts)?,
        }
        Ok(key)
    }

    /// Admits a request if its key may use the model and is within its limits. `now`: when the body was complete.
    pub(super) async fn admit(
        &self,
        key: Option<&Arc<ApiKey>>,
        request: AdmissionRequest<'_>,
        (headers, body): (&HeaderMap, &Bytes),
        now: Tick,
    ) -> Result<Option<Rc<QuotaCharge>>, Fault> {
        let Some(key) = key else { return Ok(None) };
        let AdmissionRequest {
            requested_name: spelled,
            model,
            max_tokens,
            generates,
            runs_model: computes,
            stream,
        } = request;
        if !key.authorize_model(model) {
            return Err(Fault::ModelForbidden { model: client_text::sanitize(spelled) });
        }
        let text = if computes { keys::prompt_text_bytes(headers, body).await } else { 0 };
        let need = TokenEstimateInput { text_bytes: text, max_tokens, generates };
        let control = &self.worker.server.driver;
        let served = self.worker.served_tokens.counter(control.served_tokens(), model, &key.name);
        QuotaCharge::admit(key, model, need, stream, (served, control.clock(), now)).map(Some)
    }
}
