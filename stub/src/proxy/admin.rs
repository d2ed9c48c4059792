//! The SPI for controllers, served on the SPI port and the admin port.

use std::sync::Arc;

use axum::{
    Extension, Json, Router,
    body::Body,
    extract::{Query, Request, State},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use bytes::Bytes;
use http::{HeaderMap, StatusCode, Uri, header};
use rouse_net::stub_api::{self, CloseGateRequest, Epoch, EpochAnnouncement, OpenGateRequest};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use tokio::time::Instant;

use super::{actuation, gate, state::Proxy, target};
use crate::{browser_guard, serve::PeerDisconnect};

/// Why an order was refused, with the current gate.
#[derive(Debug, Serialize)]
struct GateRejectionBody {
    reason: String,
    #[serde(flatten)]
    gate: stub_api::GateStatus,
}

/// The query of an order about the gate. Apart from the body, in which a stub refuses a field that it does not know.
#[derive(Debug, Default, Deserialize)]
struct GateOrderQuery {
    #[serde(default)]
    wait: bool,
    /// Number of the order, which later orders of the same leader exceed.
    #[serde(default)]
    sequence: Option<u64>,
}

/// Builds the router; `more` holds the routes of the proxy's other parts.
pub(super) fn router(proxy: &Arc<Proxy>, more: Router) -> Router {
    Router::new()
        .route("/v1/gate", get(get_gate).post(close_gate).delete(open_gate))
        .route(stub_api::EPOCH_PATH, post(announce_epoch))
        .route("/v1/engine/wake", post(actuation::wake))
        .route("/v1/engine/sleep", post(actuation::sleep))
        .route("/v1/release", post(release))
        .route("/v1/proxy/config", get(target::get).put(target::put))
        .with_state(Arc::clone(proxy))
        .merge(more)
        .layer(middleware::from_fn_with_state(Arc::clone(proxy), guard))
}

/// Refuses web pages and requires the token if one is configured.
async fn guard(State(proxy): State<Arc<Proxy>>, request: Request, next: Next) -> Response {
    if let Some(reason) = browser_guard::refusal_reason(request.headers(), proxy.token.is_some()) {
        return text_response(StatusCode::FORBIDDEN, reason);
    }
    match &proxy.token {
        Some(token) if !token.is_presented(request.headers()) => {
            let wanted = [(header::WWW_AUTHENTICATE, "Bearer")];
            let text = "the request has no valid bearer token: send 'Authorization: Bearer TOKEN'\n";
            (StatusCode::UNAUTHORIZED, wanted, text).into_response()
        }
        _ => next.run(request).await,
    }
}

/// Reports the gate. Ignores any epoch in the request.
async fn get_gate(State(proxy): State<Arc<Proxy>>) -> Json<stub_api::GateStatus> {
    Json(proxy.gate.view())
}

/// Records the epoch that a new leader announces before its first order. Lower epochs are refused from then on.
async fn announce_epoch(State(proxy): State<Arc<Proxy>>, body: Bytes) -> Response {
    match accept_epoch(&proxy, &body) {
        Ok(()) => Json(proxy.gate.view()).into_response(),
        Err(refusal) => refusal,
    }
}

async fn close_gate(
    State(proxy): State<Arc<Proxy>>,
    query: Query<GateOrderQuery>,
    disconnect: Option<Extension<PeerDisconnect>>,
    body: Bytes,
) -> Response {
    let order: CloseGateRequest = match parse_body(&body) {
        Ok(order) => order,
        Err(refusal) => return refusal,
    };
    match proxy.gate.close(&order, query.sequence, Instant::now()) {
        Ok(view) if query.wait => {
            // The drain continues if the caller disconnects.
            let view = match disconnect {
                None => proxy.gate.wait_drained().await,
                Some(Extension(gone)) => tokio::select! {
                    drained = proxy.gate.wait_drained() => drained,
                    () = gone.wait() => view,
                },
            };
            Json(view).into_response()
        }
        Ok(view) => (StatusCode::ACCEPTED, Json(view)).into_response(),
        Err(refused) => refused.into_response(),
    }
}

async fn open_gate(
    State(proxy): State<Arc<Proxy>>,
    query: Query<GateOrderQuery>,
    uri: Uri,
    body: Bytes,
) -> Response {
    let order = if body.is_empty() {
        Query::<OpenGateRequest>::try_from_uri(&uri).map(|query| query.0).map_err(IntoResponse::into_response)
    } else {
        parse_body(&body)
    };
    match order.map(|order| proxy.gate.open(&order, query.sequence)) {
        Ok(Ok(view)) => {
            proxy.released.send_replace(false);
            Json(view).into_response()
        }
        Ok(Err(refused)) => refused.into_response(),
        Err(refusal) => refusal,
    }
}

async fn release(State(proxy): State<Arc<Proxy>>, body: Bytes) -> Response {
    if let Err(refusal) = accept_epoch(&proxy, &body) {
        return refusal;
    }
    proxy.released.send_replace(true);
    Json(proxy.gate.view()).into_response()
}

/// Accepts the epoch of a body that holds nothing else.
fn accept_epoch(proxy: &Proxy, body: &[u8]) -> Result<(), Response> {
    let EpochAnnouncement { epoch } = parse_body(body)?;
    proxy.gate.accept_epoch(epoch).map_err(IntoResponse::into_response)
}

/// Parses an order's body, or returns a response that describes the problem.
pub(super) fn parse_body<T: DeserializeOwned>(body: &[u8]) -> Result<T, Response> {
    serde_json::from_slice(body)
        .map_err(|error| text_response(StatusCode::BAD_REQUEST, format!("the body is invalid: {error}")))
}

/// Builds a plain text response.
pub(super) fn text_response(status: StatusCode, text: impl Into<String>) -> Response {
    let mut text = text.into();
    text.push('\n');
    (status, text).into_response()
}

/// Accepts the epoch of a request's header. Returns a refusal for an older leader's order. A request without the header
/// passes, as public controllers send none.
pub(super) fn accept_epoch_header(proxy: &Proxy, headers: &HeaderMap) -> Result<(), Response> {
    let Some(value) = headers.get(stub_api::EPOCH_HEADER) else { return Ok(()) };
    let epoch: Option<Epoch> = value.to_str().ok().and_then(|value| value.parse().ok());
    let Some(epoch) = epoch else {
        return Err(text_response(
            StatusCode::BAD_REQUEST,
            format!("{} must be a number", stub_api::EPOCH_HEADER),
        ));
    };
    proxy.gate.accept_epoch(epoch).map_err(IntoResponse::into_response)
}

impl IntoResponse for gate::GateRejection {
    fn into_response(self) -> Response<Body> {
        let reason = self.to_string();
        let (status, gate) = match self {
            Self::Stale(gate) | Self::OpenBlocked(gate, _) => (StatusCode::CONFLICT, gate),
            Self::Overtaken(gate) => (StatusCode::PRECONDITION_FAILED, gate),
            Self::EpochTooFarAhead(gate, _) => (StatusCode::BAD_REQUEST, gate),
        };
        (status, Json(GateRejectionBody { reason, gate })).into_response()
    }
}

#[cfg(test)]
mod tests;
