//! The admin API: fleet state and decisions, orders, events, logs, metrics, and the page that shows all of these.
//!
//! Reads are cheap and take no part in decisions: they return what the driver last published. Orders go to the driver,
//! and the response holds the id under which their outcome can be read.

use std::{collections::BTreeMap, net::SocketAddr, path::PathBuf, sync::Arc};

use arc_swap::ArcSwap;
use axum::{
    Json, Router,
    body::Body,
    extract::{Query, State, rejection::QueryRejection},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
    routing::{MethodRouter, any, get, post},
};
use http::{HeaderValue, Method, Request, StatusCode, Uri, header};
use rouse::{
    fault::Fault,
    fleet::event::{OperationId, OperatorAction},
    model::{ModelName, SleepLevel},
};
use rouse_config::Config;
use rouse_controllers::warmup_list::WarmupSummary;
use rouse_net::openai;
use rouse_platform::ReadinessCheck;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{broadcast, watch};
use tower_service::Service as _;

use super::{DriverApi, client_text, driver_api, route, suggestions};
use crate::{
    metrics::TrafficTotals,
    serve::{ApiWorkers, ShutdownStage},
};

mod chat;
pub(super) mod guard;
mod live;
mod logs;
mod openapi;
mod page;

use live::LiveFeed;

/// Data sources of the admin API.
#[derive(Clone)]
pub struct AdminSources {
    pub driver: Arc<dyn DriverApi>,
    pub config: Arc<ArcSwap<Config>>,
    /// Renders the metrics in Prometheus' text format.
    pub metrics: Arc<dyn Fn() -> driver_api::DriverFuture<'static, String> + Send + Sync>,
    /// Finds the log of a model's engine. `None`: there is no log.
    pub logs: Arc<EngineLogLookup>,
    pub not_ready_reason: Arc<ReadinessCheck>,
    /// What the gateway serves without because it has no permission to see it. `None`: nothing is missing.
    pub degraded_reason: Arc<ReadinessCheck>,
    /// Lists the Warmups. `None`: the gateway runs on one machine, which has none.
    pub warmups: Option<Arc<WarmupSource>>,
    /// The gateway's name, as the page shows it.
    pub name: String,
    /// The threads that serve requests.
    pub workers: Arc<ApiWorkers>,
    pub traffic: Arc<TrafficSource>,
}

/// Returns what each model has served since the gateway started.
pub type TrafficSource = dyn Fn() -> BTreeMap<ModelName, TrafficTotals> + Send + Sync;

/// Lists the Warmups, or says why it cannot.
pub type WarmupSource =
    dyn Fn() -> driver_api::DriverFuture<'static, Result<Vec<WarmupSummary>, String>> + Send + Sync;

/// Finds the log file of one of a model's engines, counted from 0.
pub type EngineLogLookup = dyn Fn(&ModelName, u32) -> Option<PathBuf> + Send + Sync;

/// Handles admin requests.
#[derive(Clone)]
pub(crate) struct AdminService {
    sources: AdminSources,
    router: Router,
}

/// The subresources of a model, by the last part of their path: reads and orders.
const READ_SUBRESOURCES: [&str; 2] = ["explain", "logs"];
const ORDER_SUBRESOURCES: [&str; 5] = ["wake", "sleep", "stop", "pin", "unpin"];

#[derive(Clone)]
struct AdminState {
    sources: AdminSources,
    stage: watch::Receiver<ShutdownStage>,
    live: Arc<LiveFeed>,
}

#[derive(Debug, Default, Deserialize)]
struct ModelQuery {
    level: Option<String>,
    follow: Option<String>,
    replica: Option<String>,
}

/// The parsed query. An error: the query is malformed or repeats a parameter.
type ModelQueryResult = Result<Query<ModelQuery>, QueryRejection>;

/// The routes with fixed paths that are read. The OpenAPI document lists these, the chat, and each of
/// [`READ_SUBRESOURCES`] and [`ORDER_SUBRESOURCES`].
fn fixed_routes() -> [(&'static str, MethodRouter<AdminState>); 9] {
    [
        ("/healthz", get(|| async { "ok\n" })),
        ("/readyz", get(ready)),
        ("/metrics", get(metrics)),
        (openapi::PATH, get(openapi::document)),
        ("/admin/v1/fleet", get(fleet)),
        ("/admin/v1/events", get(events)),
        ("/admin/v1/live", get(live::live)),
        ("/admin/v1/operations/{id}", get(operation)),
        ("/admin/v1/warmups", get(warmups)),
    ]
}

impl AdminService {
    pub(crate) fn new(sources: AdminSources, stage: watch::Receiver<ShutdownStage>) -> Self {
        let router = fixed_routes()
            .into_iter()
            .fold(Router::new(), |router, (path, route)| router.route(path, route))
            // A model's name may hold slashes, so the handler splits the path itself.
            .route("/admin/v1/models/{*rest}", any(model_subresource))
            .route(chat::PATH, post(chat::chat))
            .route("/", get(page::redirect))
            .route(page::PATH, get(page::index))
            .route("/ui/{name}", get(page::file))
            .fallback(|method: Method, uri: Uri| async move { no_route(method.as_str(), uri.path()) })
            // The router adds the `Allow` header; this fallback adds the message.
            .method_not_allowed_fallback(|| async {
                not_allowed("this path does not support the method: use a method from the Allow header")
            })
            .with_state(AdminState { sources: sources.clone(), stage, live: LiveFeed::new(sources.clone()) });
        Self { sources, router }
    }

    /// Refuses a request that may not use this API, and routes every other request.
    pub(crate) async fn handle<B>(self, request: Request<B>, peer: SocketAddr) -> Response
    where
        B: http_body::Body<Data = bytes::Bytes> + Send + 'static,
        B::Error: Into<axum::BoxError>,
    {
        let admin = self.sources.config.load().admin.clone();
        if let Err(refusal) = guard::check(&admin, &request, peer) {
            return refusal.into_response();
        }
        let mut router = self.router;
        match router.call(request.map(Body::new)).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }
}

async fn ready(State(shared): State<AdminState>) -> Response {
    let not_yet = match (shared.sources.not_ready_reason)() {
        Some(waits) => format!("not ready: {waits}\n"),
        None if shared.sources.driver.routes().ready && *shared.stage.borrow() == ShutdownStage::Serving => {
            let lacks = (shared.sources.degraded_reason)();
            return lacks
                .map_or_else(|| "ok\n".to_owned(), |lacks| format!("ok\ndegraded: {lacks}\n"))
                .into_response();
        }
        None => "not ready\n".to_owned(),
    };
    (StatusCode::SERVICE_UNAVAILABLE, not_yet).into_response()
}

async fn metrics(State(shared): State<AdminState>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, (shared.sources.metrics)().await).into_response()
}

async fn fleet(State(shared): State<AdminState>) -> Response {
    shared.sources.driver.refresh().await;
    Json(&*shared.sources.driver.view()).into_response()
}

async fn events(State(shared): State<AdminState>) -> Response {
    let journal = shared.sources.driver.journal();
    let stream = futures_util::stream::unfold(journal, |mut journal| async move {
        let event = match journal.recv().await {
            Ok(line) => Event::default().data(&*line),
            Err(broadcast::error::RecvError::Lagged(missed)) => {
                Event::default().event("missed").data(missed.to_string())
            }
            Err(broadcast::error::RecvError::Closed) => return None,
        };
        Some((Ok::<_, std::convert::Infallible>(event), journal))
    });
    Sse::new(stream).keep_alive(KeepAlive::default()).into_response()
}

async fn operation(State(shared): State<AdminState>, uri: Uri) -> Response {
    let id = uri.path().rsplit('/').next().unwrap_or_default();
    let found =
        id.parse().ok().map(OperationId).and_then(|id| Some((id, shared.sources.driver.operation(id)?)));
    let Some((id, operation)) = found else {
        return error(
            StatusCode::NOT_FOUND,
            "operation_not_found",
            "no such operation, or the operation is older than an hour",
        );
    };
    let (state, reason) = match &operation.outcome {
        None => ("running", None),
        Some(Ok(())) => ("done", None),
        Some(Err(reason)) => ("failed", Some(reason)),
    };
    Json(json!({
        "operation": id,
        "model": operation.model,
        "order": operation.order,
        "given": operation.issued_at,
        "state": state,
        "reason": reason,
    }))
    .into_response()
}

async fn warmups(State(shared): State<AdminState>) -> Response {
    let Some(source) = &shared.sources.warmups else {
        return error(
            StatusCode::NOT_FOUND,
            "no_warmups",
            "this gateway runs on one machine, and Warmups exist only in a cluster",
        );
    };
    match source().await {
        Ok(warmups) => Json(json!({ "warmups": warmups })).into_response(),
        Err(reason) => error(
            StatusCode::SERVICE_UNAVAILABLE,
            "warmups_unavailable",
            &format!("the Warmups cannot be listed: {reason}"),
        ),
    }
}

/// Handles a read or an order of one model.
async fn model_subresource(
    State(shared): State<AdminState>,
    method: Method,
    query: ModelQueryResult,
    uri: Uri,
) -> Response {
    let what = uri.path().rsplit('/').next().unwrap_or_default();
    let reads = matches!(method, Method::GET | Method::HEAD);
    if READ_SUBRESOURCES.contains(&what) && !reads {
        return with_allow_header("GET, HEAD", not_allowed("this path does not support the method: use GET"));
    }
    if ORDER_SUBRESOURCES.contains(&what) && method != Method::POST {
        return with_allow_header(
            "POST",
            not_allowed("this path does not support the method: send orders with POST"),
        );
    }
    let model = match resolve_model(&shared, method.as_str(), uri.path()) {
        Ok(model) => model,
        Err(response) => return response,
    };
    match query {
        Ok(Query(asked)) if reads => read_model(&shared, &model, what, &asked).await,
        Ok(Query(asked)) => submit_order(&shared, model, what, &asked).await,
        Err(_) => invalid("the query is malformed or repeats a parameter"),
    }
}

async fn read_model(shared: &AdminState, model: &ModelName, what: &str, query: &ModelQuery) -> Response {
    if what == "explain" {
        return explain(shared, model).await;
    }
    let follow = match query.follow.as_deref() {
        None | Some("false" | "0") => false,
        Some("true" | "1") => true,
        Some(_) => return invalid("follow must be true or false"),
    };
    let replica = match query.replica.as_deref() {
        None => 0,
        Some(text) => match text.parse() {
            Ok(replica) => replica,
            Err(_) => return invalid("replica must be the number of an engine of the model, from 0"),
        },
    };
    match (shared.sources.logs)(model, replica) {
        Some(path) => logs::stream(path, follow).await,
        None => error(StatusCode::NOT_FOUND, "no_logs", logs::NO_LOGS_MESSAGE),
    }
}

async fn explain(shared: &AdminState, model: &ModelName) -> Response {
    shared.sources.driver.refresh().await;
    let report = shared.sources.driver.report();
    let Some(line) = report.models.get(model) else {
        return error(
            StatusCode::NOT_FOUND,
            "no_decision",
            "the gateway has not made a decision about this model yet",
        );
    };
    Json(json!({
        "model": model,
        "state": line.state,
        "waiting": line.waiting,
        "leases": line.leases,
        "reason": line.reason,
        "lastOutcome": line.last_outcome,
        "variants": line.variants,
        "wait": line.wait,
        "at": shared.sources.driver.clock().now(),
    }))
    .into_response()
}

async fn submit_order(shared: &AdminState, model: ModelName, what: &str, query: &ModelQuery) -> Response {
    let level = match query.level.as_deref() {
        None => None,
        Some("1") => Some(SleepLevel::One),
        Some("2") => Some(SleepLevel::Two),
        Some(_) => return invalid("level must be 1 or 2"),
    };
    let order = match what {
        "wake" => OperatorAction::Wake,
        "sleep" => OperatorAction::Sleep { level },
        "stop" => OperatorAction::Stop,
        "pin" => OperatorAction::Pin,
        _ => OperatorAction::Unpin,
    };
    match shared.sources.driver.submit_order(model, order).await {
        Ok(id) => (StatusCode::ACCEPTED, Json(json!({ "operation": id }))).into_response(),
        Err(reason) => error(StatusCode::CONFLICT, "conflict", &reason),
    }
}

/// Resolves the model in the path: everything before the last slash is its name, raw or percent-encoded.
fn resolve_model(shared: &AdminState, method: &str, path: &str) -> Result<ModelName, Response> {
    let rest = path.strip_prefix("/admin/v1/models/").unwrap_or_default();
    let Some((name, what)) = rest.rsplit_once('/') else {
        return Err(no_route(method, path));
    };
    let routes = shared.sources.driver.routes();
    match route::find_model(&routes.registry, name) {
        Some((_, model)) if READ_SUBRESOURCES.contains(&what) || ORDER_SUBRESOURCES.contains(&what) => {
            Ok(model.clone())
        }
        Some(_) => Err(no_route(method, path)),
        None => Err(fault(&suggestions::model_not_found(&routes.registry, None, name))),
    }
}

fn no_route(method: &str, path: &str) -> Response {
    fault(&Fault::RouteNotFound {
        method: method.to_owned(),
        path: client_text::sanitize(path),
        suggested_path: None,
    })
}

fn invalid(message: &str) -> Response {
    error(StatusCode::BAD_REQUEST, "invalid_request", message)
}

fn not_allowed(message: &str) -> Response {
    error(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

fn with_allow_header(methods: &'static str, mut response: Response) -> Response {
    response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(methods));
    response
}

fn fault(fault: &Fault) -> Response {
    openai::error::response(fault, openai::ApiSchema::OpenAi).map(Body::new)
}

/// Whether this is a health check. Health checks end at once, and a crowd of readers must not block them.
pub(crate) fn is_health_check<B>(request: &Request<B>) -> bool {
    matches!(request.uri().path(), "/healthz" | "/readyz")
}

/// The 503 for a connection beyond the listener's limit.
pub(crate) fn too_many_connections() -> Response {
    let message = "the admin listener is at its connection limit: close a client that follows events or logs, then retry";
    let mut response = error(StatusCode::SERVICE_UNAVAILABLE, "too_many_connections", message);
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    response
}

fn error(status: StatusCode, code: &str, message: &str) -> Response {
    let kind = match status.as_u16() {
        401 => "authentication_error",
        403 => "permission_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    };
    let body = json!({ "error": { "message": message, "type": kind, "param": null, "code": code } });
    (status, Json(body)).into_response()
}

#[cfg(test)]
mod tests;
