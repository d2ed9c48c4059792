//! Runs an inference request from its body to the head of its response.

use std::{borrow::Cow, net::IpAddr, rc::Rc, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Response};
use rouse::{
    fault::Fault,
    units::{Millis, Tick},
};
use rouse_config::{Config, EngineKind, OnDisconnect};
use rouse_net::{
    openai::{self, routing_fields::RoutingFields},
    relay::headers::{REQUEST_ID, is_uuid, remove_hop_by_hop},
};
use tokio::{sync::Notify, time::Instant};

use super::{
    RequestHandler,
    access::AdmissionRequest,
    affinity,
    body::{self, BodyBytesGuard, ChargedBodyCounters, ClientBody},
    client_text,
    engine_request::EngineRequest,
    response_body::{
        self, ClientResponseBody, EngineResponse, RemainingWait, StreamingBody, StreamingBodyContext,
    },
    response_head::{add_wait_headers, event_stream_response},
    routed_request::RoutedRequest,
};
use crate::{
    keys::{self, ApiKey},
    serve::socket::ConnectionExchangeGuard,
};

/// A request whose head is evaluated and whose body is still to be read.
pub(super) struct PendingRequest {
    pub(super) routed: RoutedRequest,
    /// How long the client is willing to wait, if it sent a limit.
    pub(super) timeout: Option<Millis>,
    /// Whether the client gets heartbeats while its stream waits.
    pub(super) sends_heartbeats: bool,
    /// Whether the head has a `Connection` header, which may name any other header.
    pub(super) has_connection_header: bool,
    pub(super) headers: HeaderMap,
    pub(super) body: ClientBody,
    pub(super) key: Option<Arc<ApiKey>>,
    pub(super) config: Arc<Config>,
}

/// A completely received body.
struct ReceivedBody {
    body: Bytes,
    guard: BodyBytesGuard,
    received_at: Tick,
}

impl RequestHandler {
    pub(super) async fn infer(
        self,
        pending: PendingRequest,
        exchange: ConnectionExchangeGuard,
    ) -> Response<ClientResponseBody> {
        let PendingRequest {
            routed: call,
            timeout,
            sends_heartbeats: beats,
            has_connection_header: names_hops,
            mut headers,
            body,
            key,
            config,
        } = pending;
        if names_hops {
            // Before the gateway adds its own headers, since the client's `Connection` may name those too.
            remove_hop_by_hop(&mut headers);
        }
        let counters = ChargedBodyCounters {
            total: Arc::clone(&self.worker.server.body_bytes),
            address: self.client_body_bytes(),
            key: key.as_ref().map(|key| Arc::clone(&key.body_bytes)),
        };
        let (body, charge) = match body::read(body, &config.limits, counters).await {
            Ok(read) => read,
            Err(fault) => {
                let response = self.refuse_unread(&fault, exchange);
                return self.finish(response);
            }
        };
        let at = self.context.body_received(body.len());
        let received = ReceivedBody { body, guard: charge, received_at: at };
        let request = self.build_engine_request(call, headers, received, key.clone(), config, timeout).await;
        let (mut response, now) = match request {
            Ok(request) => self.run(request, beats, exchange).await,
            Err(fault) => (self.refuse(&fault, exchange), Instant::now()),
        };
        let now = self.worker.server.driver.clock().tick_at(now);
        if let Some(key) = &key {
            keys::add_limit_headers(key, now, response.headers_mut());
        }
        self.finish_at(response, now)
    }

    /// Resolves the model and assembles the request for its engine.
    async fn build_engine_request(
        &self,
        routed: RoutedRequest,
        mut headers: HeaderMap,
        received: ReceivedBody,
        key: Option<Arc<ApiKey>>,
        config: Arc<Config>,
        timeout: Option<Millis>,
    ) -> Result<EngineRequest, Fault> {
        let ReceivedBody { body, guard: charge, received_at: at } = received;
        let head = routed.read_routing_fields(&body).await?;
        let (model, plural, max_wait) = {
            let routes = self.worker.server.driver.routes();
            let model = routed.resolve_model(&head, &routes.registry, key.as_deref())?;
            let route = routes.models.get(&model);
            let plural = route.is_some_and(|route| affinity::is_multi_engine(route));
            let max_wait = route.and_then(|route| route.max_wait);
            (model, plural, max_wait)
        };
        let longest = max_wait.unwrap_or(config.core.settings.queue.max_wait);
        let deadline = self.context.arrived + timeout.map_or(longest, |asked| asked.min(longest));
        self.context.set_model(&model);
        self.context.set_active(self.worker.active_requests.add(&self.context));
        let spec = config.engines.get(&model).cloned();
        let gone = || Fault::ModelNotFound {
            model: client_text::sanitize(routed.requested_name(&head)),
            suggestions: Vec::new(),
        };
        let spec = spec.ok_or_else(gone)?;
        // llama-cpp-python answers 400, without a message, to an id that is not a UUID.
        let names_id = spec.kind != EngineKind::LlamaCpp || is_uuid(&self.context.id);
        if !names_id {
            headers.remove(REQUEST_ID);
        }
        self.context.set_trace_headers(&mut headers);
        let stream = head.stream;
        let client = self.client_hash(key.as_deref(), &head, &headers);
        let affinity_keys = affinity::AffinityKeys::from_request(&head, &body, plural, config.affinity).await;
        let request = AdmissionRequest {
            requested_name: routed.requested_name(&head),
            model: &model,
            max_tokens: head.max_tokens,
            generates: routed.may_stream,
            runs_model: routed.runs_model,
            stream,
        };
        let quota_charge = self.admit(key.as_ref(), request, (&headers, &body), at).await?;
        let name = if let Cow::Owned(name) = head.model { Some(name) } else { None };
        let range = head.model_range;
        Ok(EngineRequest {
            worker: Rc::clone(&self.worker),
            context: Rc::clone(&self.context),
            config,
            model,
            body: routed.routed_body(body, range, name),
            spec,
            method: routed.method,
            path: routed.path,
            headers,
            sends_request_id: names_id,
            _body_guard: charge,
            stream,
            form: self.form,
            affinity: affinity_keys,
            key,
            client_hash: client,
            quota_charge,
            deadline,
            may_park: routed.may_park,
            parked_notify: stream.then(|| Rc::new(Notify::new())),
        })
    }

    /// The hash that identifies the client for turns and idle protection. 0: nothing identifies the client.
    fn client_hash(&self, key: Option<&ApiKey>, head: &RoutingFields<'_>, headers: &HeaderMap) -> u64 {
        let address = || match self.client_key() {
            Some(IpAddr::V4(address)) => openai::stable_hash(&address.octets()),
            Some(IpAddr::V6(address)) => openai::stable_hash(&address.octets()),
            None => 0,
        };
        key.map(|key| key.client_hash)
            .or(head.user_hash)
            .or_else(|| affinity::session_hash(headers))
            .or(head.session_hash)
            .unwrap_or_else(address)
    }

    /// Runs the request. A stream that parks beyond `stream.grace` gets its head at once, and heartbeats if `beats`.
    /// Also returns when the head was ready.
    async fn run(
        &self,
        request: EngineRequest,
        beats: bool,
        exchange: ConnectionExchangeGuard,
    ) -> (Response<ClientResponseBody>, Instant) {
        let body_context = StreamingBodyContext {
            socket: Rc::clone(&self.socket),
            context: Rc::clone(&self.context),
            on_disconnect: request.spec.on_disconnect,
            form: self.form,
            stall_timeout: request.config.limits.client_stall.duration(),
        };
        let stream = request.config.stream;
        let answer = if let Some(parked) = request.parked_notify.clone() {
            let mut response: response_body::EngineResponseFuture = Box::pin(request.run());
            let grace = async {
                parked.notified().await;
                tokio::time::sleep(stream.grace.duration()).await;
            };
            tokio::select! {
                biased;
                answer = &mut response => answer,
                () = grace => {
                    let beats = beats.then(|| (&stream, self.remaining_wait()));
                    let body = StreamingBody::waiting(response, beats, body_context);
                    return (event_stream_response(ClientResponseBody::streaming(body, exchange)), Instant::now());
                }
            }
        } else if request.spec.on_disconnect == OnDisconnect::Drain {
            request.run().await
        } else {
            request.run_inline().await
        };
        let now = Instant::now();
        let response = match answer {
            Ok(answer) => self.relay_response(answer, body_context, exchange, now),
            Err(fault) => self.refuse(&fault, exchange),
        };
        (response, now)
    }

    /// What the heartbeats of this request say about its wait.
    fn remaining_wait(&self) -> RemainingWait {
        let (server, model) = (Arc::clone(&self.worker.server), self.context.model_name().cloned());
        Box::new(move || {
            let model = model.as_ref()?;
            Some((model.to_string(), server.driver.expected_wait(model)?))
        })
    }

    fn relay_response(
        &self,
        mut response: Box<EngineResponse>,
        body_context: StreamingBodyContext,
        exchange: ConnectionExchangeGuard,
        now: Instant,
    ) -> Response<ClientResponseBody> {
        let mut head = Response::new(());
        *head.status_mut() = response.response.status();
        std::mem::swap(head.headers_mut(), response.response.headers_mut());
        if let Some(waited) = self.context.wait() {
            add_wait_headers(&mut head, waited, &self.context);
        }
        head.map(|()| {
            ClientResponseBody::streaming(StreamingBody::relayed(response, body_context, now), exchange)
        })
    }
}

#[cfg(test)]
mod tests;
