//! The inference API: handles one request from its head to the end of the response body.
//!
//! ```text
//!   head ─▶ route, key, encoding ─▶ body (bounded) ─▶ model, stream ─▶ exchange ─▶ reply
//!           404 405 415 501 400     413 408 429       400 404          429 502 503 504
//! ```
//!
//! Everything before the body is decided on the head alone, so a refusal is cheap. Such a refusal closes the
//! connection, because the unread body would follow on it. When a client disconnects, its connection drops the
//! request's future, and every resource that the future holds is released.
//!
//! `http/service.rs` decides on the head. This file has the contexts of the server and its cores, and the responses
//! that need no engine.

use std::{
    rc::Rc,
    sync::{Arc, OnceLock},
};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header, request};
use http_body::Body;
use rouse::{fault::Fault, units::Tick};
use rouse_config::Config;
use rouse_net::{
    openai::{self, ApiSchema},
    relay::{
        ConnectionPool,
        headers::{REQUEST_ID, RequestIdGenerator},
    },
    server::DateCache,
};
use tokio::{sync::watch, time::Instant};

use crate::{
    driver::ServedTokensCache,
    keys::{self, ApiKey, ApiKeyStore},
    routing::{ResponseOwners, Rng},
    serve::{
        ShutdownStage,
        socket::{ClientSocket, ConnectionExchangeGuard},
    },
    telemetry::{Telemetry, TraceIdGenerator},
};

mod access;
pub(crate) mod active_requests;
pub mod admin;
mod affinity;
mod body;
pub(crate) mod client_text;
mod cors;
mod driver_api;
mod engine_request;
mod framing;
mod head;
mod infer;
mod known_headers;
mod metrics_sink;
mod models;
mod origin;
mod passthrough;
mod request_context;
pub(crate) mod response_body;
mod response_head;
pub(crate) mod route;
mod routed_request;
mod service;
mod suggestions;
#[cfg(test)]
pub(crate) mod testing;

use active_requests::ActiveRequests;
pub use active_requests::{ActiveRequest, ActiveRequestList, RequestPhase};
pub(crate) use body::{BodyByteCounter, ClientBody};
pub use driver_api::{DriverApi, DriverFuture};
pub use metrics_sink::{FinishedRequest, NoopMetricsSink, RequestMetricsSink};
use request_context::{RequestContext, RequestEnvironment};
use response_body::ClientResponseBody;
pub(crate) use response_head::error_response_bytes;
use response_head::{add_expected_wait, add_wait_headers, set_connection_close};
use route::ApiRoute;
use routed_request::RoutedRequest;
pub(crate) use service::serve;

/// State shared by all cores.
pub struct ServerContext {
    pub(crate) driver: Arc<dyn DriverApi>,
    pub(crate) config: Arc<ArcSwap<Config>>,
    telemetry: Arc<Telemetry>,
    body_bytes: Arc<BodyByteCounter>,
    response_owners: ResponseOwners,
    keys: ApiKeyStore,
    /// The key of requests that come through the admin API, made for the first of them.
    operator_key: OnceLock<Arc<ApiKey>>,
    request_environment: Arc<RequestEnvironment>,
    started: Tick,
}

/// State of one core.
pub(crate) struct WorkerContext {
    pub(crate) server: Arc<ServerContext>,
    pub(crate) pool: ConnectionPool,
    pub(crate) stage: watch::Receiver<ShutdownStage>,
    pub(crate) dates: Rc<DateCache>,
    pub(crate) active_requests: Rc<ActiveRequests>,
    /// Whether the gateway was serving when this core took its stage receiver.
    serving_at_start: bool,
    ids: RequestIdGenerator,
    rng: Rng,
    /// This core's cached counters, through which the decisions learn the tokens served to keys.
    served_tokens: ServedTokensCache,
    trace_ids: TraceIdGenerator,
}

impl ServerContext {
    /// Creates the context without telemetry of single requests. Every request reads `config` anew, so a reload applies
    /// from the next request on.
    #[must_use]
    pub fn new(
        driver: Arc<dyn DriverApi>,
        config: Arc<ArcSwap<Config>>,
        meter: Arc<dyn RequestMetricsSink>,
    ) -> Arc<Self> {
        Self::with_telemetry(driver, config, meter, Arc::default())
    }

    /// Creates the context with a telemetry sink for single requests.
    #[must_use]
    pub fn with_telemetry(
        driver: Arc<dyn DriverApi>,
        config: Arc<ArcSwap<Config>>,
        metrics_sink: Arc<dyn RequestMetricsSink>,
        telemetry: Arc<Telemetry>,
    ) -> Arc<Self> {
        let clock = driver.clock();
        let (bodies, keys, authors) = (Arc::default(), ApiKeyStore::new(), ResponseOwners::default());
        // Building the table of many keys takes as long as many requests, so build it before the first request.
        drop(keys.table(&config.load().keys, |name| metrics_sink.key_metrics(name)));
        Arc::new(Self {
            driver,
            config,
            telemetry,
            body_bytes: bodies,
            response_owners: authors,
            keys,
            operator_key: OnceLock::new(),
            request_environment: Arc::new(RequestEnvironment { metrics_sink, clock }),
            started: clock.now(),
        })
    }

    pub(crate) fn metrics_sink(&self) -> &dyn RequestMetricsSink {
        &*self.request_environment.metrics_sink
    }

    /// The key of requests that come through the admin API. It may use all models, without limits.
    pub(crate) fn operator_key(&self) -> Arc<ApiKey> {
        let key = || {
            let metrics = self.metrics_sink().key_metrics(keys::OPERATOR_KEY_NAME);
            Arc::new(ApiKey::for_operators(metrics))
        };
        Arc::clone(self.operator_key.get_or_init(key))
    }
}

impl WorkerContext {
    pub(crate) fn new(shared: Arc<ServerContext>, stage: watch::Receiver<ShutdownStage>) -> Rc<Self> {
        let began_serving = *stage.borrow() == ShutdownStage::Serving;
        Rc::new(Self {
            server: shared,
            pool: ConnectionPool::default(),
            stage,
            dates: Rc::default(),
            active_requests: Rc::default(),
            serving_at_start: began_serving,
            ids: RequestIdGenerator::new(),
            rng: Rng::new(),
            served_tokens: ServedTokensCache::default(),
            trace_ids: TraceIdGenerator::default(),
        })
    }

    fn now(&self) -> Tick {
        self.server.driver.clock().now()
    }

    /// Converts a moment that was already read to a tick.
    fn tick_at(&self, moment: Instant) -> Tick {
        self.server.driver.clock().tick_at(moment)
    }

    fn is_draining(&self) -> bool {
        // `borrow` takes a lock, and so writes to memory that all cores read. Skip it until the stage changes.
        let unchanged = self.serving_at_start && matches!(self.stage.has_changed(), Ok(false));
        !unchanged && *self.stage.borrow() > ShutdownStage::Serving
    }
}

/// Removes the body from a response to HEAD and keeps its length. HTTP/1.1's connection does this by itself.
fn strip_head_response_body(response: Response<ClientResponseBody>) -> Response<ClientResponseBody> {
    let (mut parts, body) = response.into_parts();
    if let Some(length) = body.size_hint().exact().filter(|length| *length > 0) {
        parts.headers.entry(header::CONTENT_LENGTH).or_insert_with(|| HeaderValue::from(length));
    }
    Response::from_parts(parts, body.without_body())
}

/// Why a request has no route. For a 405, the second field lists the allowed methods.
type RouteRejection = (Fault, Option<&'static str>);

/// One request being served.
struct RequestHandler {
    worker: Rc<WorkerContext>,
    socket: Rc<ClientSocket>,
    context: Rc<RequestContext>,
    form: ApiSchema,
    cors: cors::CorsDecision,
    /// Parsers may disagree about where the next request on this connection begins.
    ambiguous_framing: bool,
    is_head: bool,
}

impl RequestHandler {
    /// Adds the headers common to all responses and records that the head was sent.
    fn finish(self, response: Response<ClientResponseBody>) -> Response<ClientResponseBody> {
        let now = self.worker.now();
        self.finish_at(response, now)
    }

    /// Like [`Self::finish`], with the time that the caller has just read.
    fn finish_at(
        self,
        mut response: Response<ClientResponseBody>,
        now: Tick,
    ) -> Response<ClientResponseBody> {
        let Self { worker, socket, context, form, cors: origin, ambiguous_framing: ambiguous, is_head } =
            self;
        context.head_sent(response.status().as_u16(), now);
        response.headers_mut().insert(REQUEST_ID, context.id.clone());
        if let Some(expected) = context.expected_wait() {
            add_expected_wait(response.headers_mut(), expected);
        }
        if form == ApiSchema::Anthropic {
            // Anthropic's SDKs read the request id from this header.
            response.headers_mut().entry("request-id").or_insert_with(|| context.id.clone());
        }
        origin.apply(response.headers_mut());
        if ambiguous {
            match context.client_permit() {
                Some(client) => client.record_offence(),
                None => socket.record_offence(),
            }
        }
        if (ambiguous || worker.is_draining()) && !socket.is_multiplexed() {
            set_connection_close(&mut response);
        }
        if is_head && socket.is_multiplexed() { strip_head_response_body(response) } else { response }
    }

    /// Serves the list of models, or one of them.
    async fn list_models(
        self,
        route: ApiRoute,
        key: Option<Arc<ApiKey>>,
        unread: bool,
        exchange: ConnectionExchangeGuard,
    ) -> Response<ClientResponseBody> {
        let server = &self.worker.server;
        let waits = server.driver.expected_waits().await;
        let (routes, now) = (server.driver.routes(), self.worker.now());
        let list =
            models::ModelList { routes: &routes, waits: &waits, now, created: server.started.0 / 1000 };
        let body = match &route {
            ApiRoute::Model(escaped) => match route::find_model(&routes.registry, escaped) {
                Some((name, model)) if key.as_ref().is_none_or(|key| key.may_use(model)) => {
                    Ok(list.single(&name, model))
                }
                _ => {
                    let name = route::percent_decode(escaped).unwrap_or_else(|| escaped.clone());
                    Err(suggestions::model_not_found(&routes.registry, key.as_deref(), &name))
                }
            },
            _ => Ok(list.all(key.as_deref())),
        };
        let mut response = match body {
            Ok(body) => self.text(StatusCode::OK, "application/json", body, exchange),
            Err(fault) => self.refuse(&fault, exchange),
        };
        self.close_unread(&mut response, unread);
        self.finish(response)
    }

    /// Serves the health checks.
    fn serve_builtin_route(
        &self,
        route: &ApiRoute,
        exchange: ConnectionExchangeGuard,
    ) -> Response<ClientResponseBody> {
        let is_ready = self.worker.server.driver.routes().ready && !self.worker.is_draining();
        let (status, body) = match route {
            ApiRoute::Readyz if !is_ready => (StatusCode::SERVICE_UNAVAILABLE, "not ready\n"),
            _ => (StatusCode::OK, "ok\n"),
        };
        self.text(status, "text/plain", Bytes::from_static(body.as_bytes()), exchange)
    }

    fn text(
        &self,
        status: StatusCode,
        kind: &'static str,
        body: Bytes,
        exchange: ConnectionExchangeGuard,
    ) -> Response<ClientResponseBody> {
        let mut response = Response::new(ClientResponseBody::text(body, Rc::clone(&self.context), exchange));
        *response.status_mut() = status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }

    fn preflight(
        &self,
        headers: HeaderMap,
        exchange: ConnectionExchangeGuard,
    ) -> Response<ClientResponseBody> {
        let mut response =
            Response::new(ClientResponseBody::text(Bytes::new(), Rc::clone(&self.context), exchange));
        *response.status_mut() = StatusCode::NO_CONTENT;
        *response.headers_mut() = headers;
        response
    }

    /// Routes a request on an engine's own path.
    fn route_passthrough(
        &self,
        parts: &request::Parts,
        key: Option<&ApiKey>,
        config: &Config,
    ) -> Result<RoutedRequest, RouteRejection> {
        let routes = self.worker.server.driver.routes();
        let found = passthrough::find(&parts.method, &parts.uri, &routes.registry, config, key)?;
        RoutedRequest::for_passthrough(found, parts).map_err(|fault| (fault, None))
    }

    /// Refuses a request without a route. `allow`: the methods that its path allows, for a 405.
    fn refuse_route(
        &self,
        fault: &Fault,
        allow: Option<&'static str>,
        unread: bool,
        exchange: ConnectionExchangeGuard,
    ) -> Response<ClientResponseBody> {
        let mut response = self.refuse(fault, exchange);
        if let Some(allow) = allow {
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        self.close_unread(&mut response, unread);
        response
    }

    fn refuse(&self, fault: &Fault, exchange: ConnectionExchangeGuard) -> Response<ClientResponseBody> {
        self.context.record_fault(fault);
        let mut response = openai::error::response(fault, self.form);
        // Challenge only for the gateway's own verdict: an engine that refuses the gateway's key proves nothing about
        // the client.
        if matches!(fault, Fault::MissingApiKey | Fault::InvalidApiKey { .. }) {
            keys::add_challenge(response.headers_mut());
        }
        let (mut parts, _) = response.into_parts();
        if let Some(waited) = self.context.wait() {
            let mut head = Response::from_parts(parts, ());
            add_wait_headers(&mut head, waited, &self.context);
            (parts, ()) = head.into_parts();
        }
        let reply = ClientResponseBody::text(
            openai::error::body(fault, self.form),
            Rc::clone(&self.context),
            exchange,
        );
        Response::from_parts(parts, reply)
    }

    /// Refuses while the client may still be sending its body.
    fn refuse_unread(
        &self,
        fault: &Fault,
        exchange: ConnectionExchangeGuard,
    ) -> Response<ClientResponseBody> {
        let mut response = self.refuse(fault, exchange);
        self.close_unread(&mut response, true);
        response
    }

    fn close_unread(&self, response: &mut Response<ClientResponseBody>, unread: bool) {
        if unread && !self.socket.is_multiplexed() {
            set_connection_close(response);
        }
    }
}

#[cfg(test)]
mod tests;
