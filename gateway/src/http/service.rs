//! The service that a connection calls for each request: decides on the head, and leads the request on.

use std::{pin::Pin, rc::Rc};

use arc_swap::Guard;
use http::{Method, Request, Response};
use http_body::Body as _;
use tokio::time::Instant;

use super::{
    ClientBody, RequestHandler, WorkerContext, cors, framing, head,
    infer::PendingRequest,
    known_headers::{KnownHeader, KnownHeaders},
    request_context::RequestContext,
    response_body::ClientResponseBody,
    route::{self, ApiRoute},
    routed_request::RoutedRequest,
};
use crate::{
    serve::{client_address, socket::ClientSocket},
    telemetry::RequestOrigin,
};

/// Serves one request. The head is handled at once, before the returned future is polled. The connection stores that
/// future, so it stays small for a request that needs no wait.
pub(crate) fn serve(
    worker: &Rc<WorkerContext>,
    socket: &Rc<ClientSocket>,
    request: Request<ClientBody>,
) -> impl Future<Output = Response<ClientResponseBody>> + use<> {
    let outcome = handle_head(worker, socket, request);
    async move {
        match outcome {
            HeadOutcome::Responded(response) => response,
            HeadOutcome::Pending(answer) => answer.await,
        }
    }
}

/// The outcome of handling a request's head.
enum HeadOutcome {
    Responded(Response<ClientResponseBody>),
    Pending(Pin<Box<dyn Future<Output = Response<ClientResponseBody>>>>),
}

fn handle_head(
    worker: &Rc<WorkerContext>,
    socket: &Rc<ClientSocket>,
    request: Request<ClientBody>,
) -> HeadOutcome {
    let arrived = Instant::now();
    let exchange = socket.begin_exchange(arrived);
    let (parts, body) = request.into_parts();
    let fields = KnownHeaders::scan(&parts.headers);
    let shared = &worker.server;
    let config = shared.config.load();
    let id = worker.ids.keep_or_make(fields.first(KnownHeader::RequestId));
    let path = parts.uri.path();
    let framed = framing::check(&parts, &fields);
    let ambiguous = framed.is_err();
    let upgrades = fields.all(KnownHeader::Upgrade).any(route::is_websocket);
    let found = framed
        .map_err(|fault| (fault, None))
        .and_then(|()| route::match_route(&parts.method, path, upgrades));
    let label = found.as_ref().map_or("other", ApiRoute::label);
    let context = RequestContext::new(&shared.request_environment, arrived, id, label);
    let probe = matches!(found, Ok(ApiRoute::Healthz | ApiRoute::Readyz));
    let client = client_address::client_of_request(&config.proxies, socket, &parts.headers);
    let origin = RequestOrigin { client, is_tls: socket.is_secure(), is_health_check: probe };
    context.set_recorder(shared.telemetry.start_recording(&worker.trace_ids, &parts, origin));
    let request = RequestHandler {
        worker: Rc::clone(worker),
        socket: Rc::clone(socket),
        context,
        form: route::api_schema(path),
        cors: cors::CorsDecision::for_request(&config, &parts),
        ambiguous_framing: ambiguous,
        is_head: parts.method == Method::HEAD,
    };
    let unread = !body.is_end_stream();
    let preflight = if ambiguous { None } else { request.cors.preflight(&parts) };
    if let Some(headers) = preflight {
        let mut response = request.preflight(headers, exchange);
        request.close_unread(&mut response, unread);
        return HeadOutcome::Responded(request.finish(response));
    }
    // A health check must not fail for the requests of others.
    let counted = if probe { Ok(()) } else { request.count_client(client, &config) };
    let admitted = counted.map_err(|fault| (fault, None)).and(found).and_then(|route| {
        let key = request.authenticate(&route, &parts, &fields, &config).map_err(|fault| (fault, None))?;
        Ok((route, key))
    });
    let call = match admitted {
        Ok((ApiRoute::Inference(inference), key)) => RoutedRequest::for_inference(inference, &parts)
            .map(|call| (call, key))
            .map_err(|fault| (fault, None)),
        Ok((ApiRoute::Passthrough(_), key)) => {
            request.route_passthrough(&parts, key.as_deref(), &config).map(|call| (call, key))
        }
        Ok((route @ (ApiRoute::Models | ApiRoute::Model(_)), key)) => {
            return HeadOutcome::Pending(Box::pin(request.list_models(route, key, unread, exchange)));
        }
        Ok((route, _)) => {
            let mut response = request.serve_builtin_route(&route, exchange);
            request.close_unread(&mut response, unread);
            return HeadOutcome::Responded(request.finish(response));
        }
        Err(misrouted) => Err(misrouted),
    };
    let (call, key) = match call {
        Ok(called) => called,
        Err((fault, allow)) => {
            let response = request.refuse_route(&fault, allow, unread, exchange);
            return HeadOutcome::Responded(request.finish(response));
        }
    };
    let wishes = head::check_content_encoding(&fields)
        .and_then(|()| head::request_timeout(&fields))
        .and_then(|timeout| Ok((timeout, head::wants_heartbeat(&fields)?)));
    match wishes {
        Ok((timeout, heartbeat)) => {
            let config = Guard::into_inner(config);
            let names_hops = fields.first(KnownHeader::Connection).is_some();
            let beats = heartbeat.unwrap_or_else(|| key.as_ref().is_none_or(|key| key.heartbeat));
            let headers = parts.headers;
            let pending = PendingRequest {
                routed: call,
                timeout,
                sends_heartbeats: beats,
                has_connection_header: names_hops,
                headers,
                body,
                key,
                config,
            };
            HeadOutcome::Pending(Box::pin(request.infer(pending, exchange)))
        }
        Err(fault) => {
            let response = request.refuse_unread(&fault, exchange);
            HeadOutcome::Responded(request.finish(response))
        }
    }
}
