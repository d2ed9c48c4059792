//! Serves one request: checks the policy and the gate, then relays to the engine.

use std::{
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header, request::Parts, uri::PathAndQuery};
use http_body::{Body, Frame, SizeHint};
use rouse::{fault::Fault, model::EngineId, units::Millis};
use rouse_net::{
    engine_load::orca,
    openai::{ApiSchema, error, sse::ResponseFacts},
    relay::{
        self, Exchange, ExchangeOutcome, RelayBody, RelayBodyError, RelayObserver, RelayTarget,
        RelayTimeouts, ResponseInspection, ScratchFrame, UpstreamRequest,
    },
    server::ScratchBody,
    stub_api::{GATED_HEADER, NOT_READY_HEADER},
};
use tokio::time::Instant;

use super::{
    RelayThreadContext,
    body::{self, RelayRequestBody},
    policy,
    socket::{RelayExchangeGuard, RelaySocket},
};
use crate::proxy::{
    gate::ExchangeTracker,
    metrics::{ByteDirection, GaugeGuard},
    state::Proxy,
};

/// Effectively no timeout. The client decides how long to wait for the engine, and disconnects.
const NO_TIMEOUT: Millis = Millis::secs(30 * 24 * 3600);

/// The response body for a client.
pub(super) struct RelayReplyBody {
    content: RelayReplyContent,
    /// Ends together with the body.
    _exchange: RelayExchangeGuard,
}

enum RelayReplyContent {
    /// A refusal by the stub.
    Text(Option<Bytes>),
    Engine(Box<RelayBody<RelayMetricsObserver>>),
}

/// Counts how an exchange ends.
pub(super) struct RelayMetricsObserver {
    context: Rc<RelayThreadContext>,
    tracker: ExchangeTracker,
    /// Set while the response is relayed.
    stream_gauge: Option<GaugeGuard>,
}

/// Why a request reaches no engine.
enum RelayRejection {
    Fault(Fault),
    /// With the allowed methods.
    Method(Fault, &'static str),
    /// Marked with a header, so that the gateway can make the request wait.
    Marked(&'static str, &'static str),
}

/// Serves one request.
pub(super) fn serve(
    context: &Rc<RelayThreadContext>,
    socket: &Rc<RelaySocket>,
    request: Request<RelayRequestBody>,
) -> impl Future<Output = Response<RelayReplyBody>> + use<> {
    let (context, socket) = (Rc::clone(context), Rc::clone(socket));
    let exchange = socket.begin_exchange();
    async move {
        let (head, body) = request.into_parts();
        let schema = api_schema(head.uri.path());
        let relayed = match check_allowed(&context, &head) {
            Ok(()) => relay(&context, &socket, &exchange, &head, body, schema).await,
            Err(refusal) => {
                // The connection goes on if all of the body is there, and closes otherwise.
                drop(body);
                Err(refusal)
            }
        };
        let mut response = match relayed {
            Ok(response) => response.map(|body| RelayReplyBody::from_engine(body, exchange)),
            Err(refusal) => rejection_response(&context.proxy, refusal, schema).map(|text| RelayReplyBody {
                content: RelayReplyContent::Text(Some(text)),
                _exchange: exchange,
            }),
        };
        // The bytes behind an early response are the rest of the request. In a shutdown, a client that keeps its
        // connection could not know whether its next request began.
        if socket.is_upload_open() || socket.is_closing() {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

fn check_allowed(context: &RelayThreadContext, head: &Parts) -> Result<(), RelayRejection> {
    policy::check(context.proxy.settings.engine_kind, &head.method, &head.uri).map_err(
        |(fault, allow)| match allow {
            Some(allow) => RelayRejection::Method(fault, allow),
            None => RelayRejection::Fault(fault),
        },
    )?;
    let route = context.proxy.gate.route();
    // An early check before the body arrives. The lease, taken after the body, decides.
    if !route.current.gate.is_open() {
        return Err(gate_closed());
    }
    route.target.map(drop).ok_or_else(no_target)
}

const fn gate_closed() -> RelayRejection {
    RelayRejection::Marked(GATED_HEADER, "the engine's gate is closed")
}

const fn no_target() -> RelayRejection {
    RelayRejection::Marked(NOT_READY_HEADER, "no engine is configured at this stub yet")
}

/// Returns the engine's response, which may come before the whole request was read.
async fn relay(
    context: &Rc<RelayThreadContext>,
    socket: &Rc<RelaySocket>,
    exchange: &RelayExchangeGuard,
    head: &Parts,
    body: RelayRequestBody,
    schema: ApiSchema,
) -> Result<Response<RelayBody<RelayMetricsObserver>>, RelayRejection> {
    let settings = &context.proxy.settings;
    let gathered = body::buffer_body(body, context, socket).await;
    let (body, upload) = gathered.map_err(RelayRejection::Fault)?;
    let (target, lease, part) = {
        let route = context.proxy.gate.route();
        let (lease, part) = route.current.take_lease().ok_or_else(gate_closed)?;
        let address = route.target.ok_or_else(no_target)?;
        exchange.set_generation(&route.current);
        let target = RelayTarget {
            engine: EngineId::new(settings.model.clone(), 0),
            generation: route.current.generation,
            address,
            // The client's own header, because a relay stands for its engine.
            authorization: head.headers.get(header::AUTHORIZATION).cloned(),
            origin: None,
        };
        (target, lease, part)
    };
    context.traffic.add(ByteDirection::ToEngine, body.len());
    let wants_report = orca::is_requested(&head.headers);
    if wants_report {
        context.proxy.load_reporter.request(Instant::now());
    }
    let path = head.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let order = Exchange {
        now: Instant::now(),
        target,
        request: UpstreamRequest {
            method: &head.method,
            path: &path,
            headers: &head.headers,
            request_id: None,
            body: body.into(),
            stream: false,
            schema,
            inspection: ResponseInspection::StreamEnd,
            // The stub reads the engine in the background: few engines report by themselves, and none in streams.
            wants_load_report: false,
        },
        upload,
        lease,
        timeouts: RelayTimeouts {
            connect: settings.dial_timeout.into(),
            first_byte: NO_TIMEOUT,
            non_stream: NO_TIMEOUT,
            idle: NO_TIMEOUT,
            exit_wait: Millis::ZERO,
        },
        observer: RelayMetricsObserver { context: Rc::clone(context), tracker: part, stream_gauge: None },
    };
    let answered = relay::exchange(&context.pool, order).await;
    let mut response = answered.map_err(|failed| RelayRejection::Fault(failed.fault))?;
    if wants_report && let Some(report) = context.proxy.load_reporter.report(Instant::now()) {
        response.headers_mut().insert(orca::REPORT_HEADER, report);
    }
    Ok(response)
}

/// Returns the response to a head that could not be read.
pub(super) fn head_rejection(proxy: &Proxy, fault: Fault) -> Response<Bytes> {
    rejection_response(proxy, RelayRejection::Fault(fault), ApiSchema::OpenAi)
}

fn rejection_response(proxy: &Proxy, refusal: RelayRejection, schema: ApiSchema) -> Response<Bytes> {
    let (fault, mark) = match refusal {
        RelayRejection::Fault(fault) => (fault, None),
        RelayRejection::Method(fault, allow) => (fault, Some((header::ALLOW.as_str(), allow))),
        RelayRejection::Marked(mark, reason) => {
            (Fault::StubNotServing { why: reason.into() }, Some((mark, "1")))
        }
    };
    match mark {
        Some((GATED_HEADER, _)) => proxy.counts.gated.add(),
        Some((NOT_READY_HEADER, _)) => proxy.counts.not_ready.add(),
        _ if error::status(&fault).is_client_error() => proxy.counts.refused.add(),
        // The engine did not respond, which is already counted as a failed exchange.
        _ => {}
    }
    let mut response = error::response(&fault, schema).map(|_| error::body(&fault, schema));
    if let Some((name, value)) = mark {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Returns the API schema for errors on this path.
fn api_schema(path: &str) -> ApiSchema {
    match path {
        "/v1/responses" => ApiSchema::Responses,
        path if path.starts_with("/v1/messages") => ApiSchema::Anthropic,
        _ => ApiSchema::OpenAi,
    }
}

impl RelayObserver for RelayMetricsObserver {
    fn head(&mut self, _: StatusCode) {
        self.stream_gauge = Some(self.context.proxy.metrics.stream());
    }

    fn frame(&mut self, bytes: usize, _: Option<&ResponseFacts>) {
        self.context.traffic.add(ByteDirection::ToClient, bytes);
    }

    fn end(&mut self, outcome: ExchangeOutcome, _: Instant) {
        self.stream_gauge = None;
        let counts = &self.context.proxy.counts;
        match outcome {
            ExchangeOutcome::Complete => counts.complete.add(),
            _ if self.tracker.record_abnormal_end() => counts.cut.add(),
            ExchangeOutcome::ClientLeft(_) => counts.client_left.add(),
            ExchangeOutcome::Failed(_) => counts.failed.add(),
        }
    }
}

impl RelayReplyBody {
    fn from_engine(body: RelayBody<RelayMetricsObserver>, exchange: RelayExchangeGuard) -> Self {
        Self { content: RelayReplyContent::Engine(Box::new(body)), _exchange: exchange }
    }
}

impl Body for RelayReplyBody {
    type Data = Bytes;
    type Error = RelayBodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, RelayBodyError>>> {
        match &mut self.content {
            RelayReplyContent::Text(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            RelayReplyContent::Engine(body) => Pin::new(&mut **body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            RelayReplyContent::Text(text) => text.is_none(),
            RelayReplyContent::Engine(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            RelayReplyContent::Text(text) => {
                SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64))
            }
            RelayReplyContent::Engine(body) => body.size_hint(),
        }
    }
}

impl ScratchBody for RelayReplyBody {
    fn uses_scratch(&self) -> bool {
        matches!(self.content, RelayReplyContent::Engine(_))
    }

    fn poll_frame_into(
        &mut self,
        memory: Option<&mut [u8]>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ScratchFrame, RelayBodyError>>> {
        match &mut self.content {
            RelayReplyContent::Text(text) => {
                Poll::Ready(text.take().map(|text| Ok(ScratchFrame::Owned(text))))
            }
            RelayReplyContent::Engine(body) => ScratchBody::poll_frame_into(&mut **body, memory, cx),
        }
    }
}
