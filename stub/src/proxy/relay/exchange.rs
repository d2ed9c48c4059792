//! One request: may it pass, is the gate open, and then it is the engine's.

use std::{
    pin::Pin,
    rc::Rc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{HeaderValue, Request, Response, StatusCode, header, request::Parts, uri::PathAndQuery};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use rouse::{
    client::Answer,
    fault::Fault,
    model::EngineId,
    openai::{Form, error, sse::Facts},
    relay::{self, Broken, Exchange, Look, Observer, Outcome, Outgoing, Piece, RelayBody, Target, Timeouts},
    units::Millis,
    wire::{GATED, NOT_READY},
};
use tokio::time::Instant;

use super::{
    Core, body, policy,
    socket::{InExchange, Socket},
};
use crate::proxy::{
    gate::Part,
    metrics::{Direction, Present},
    state::Proxy,
};

/// How long an engine may take is for whoever asked to say: it hangs up.
const ANY_TIME: Millis = Millis::secs(30 * 24 * 3600);

/// What a client gets.
pub(super) struct Reply {
    content: Content,
    /// Ends with it.
    _exchange: InExchange,
}

enum Content {
    /// A refusal of ours.
    Text(Option<Bytes>),
    Engine(Box<RelayBody<Watcher>>),
}

/// Counts how an exchange ends.
pub(super) struct Watcher {
    core: Rc<Core>,
    part: Part,
    /// While the answer is passed on.
    stream: Option<Present>,
}

/// Why a request sees no engine.
enum Refusal {
    Fault(Fault),
    /// With the methods that there are.
    Method(Fault, &'static str),
    /// Marked, for whoever can have it wait.
    Marked(&'static str, &'static str),
}

/// Serves one request. With the answer goes whether all of the request was read.
pub(super) fn serve(
    core: &Rc<Core>,
    socket: &Rc<Socket>,
    request: Request<Incoming>,
) -> impl Future<Output = (Response<Reply>, bool)> + use<> {
    let (core, socket) = (Rc::clone(core), Rc::clone(socket));
    let exchange = socket.begin();
    async move {
        let (head, body) = request.into_parts();
        let form = form(head.uri.path());
        socket.set_unread(true);
        let mut response = match answer(&core, &socket, &exchange, &head, body, form).await {
            Ok(response) => response.map(|body| Reply::engine(body, exchange)),
            Err(refusal) => refused(&core.proxy, refusal, form)
                .map(|text| Reply { content: Content::Text(Some(text)), _exchange: exchange }),
        };
        let whole = !socket.is_unread();
        if !whole {
            // What comes behind this answer is not the next request.
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        (response, whole)
    }
}

/// The engine's answer, or why there is none.
async fn answer(
    core: &Rc<Core>,
    socket: &Rc<Socket>,
    exchange: &InExchange,
    head: &Parts,
    body: Incoming,
    form: Form,
) -> Result<Response<RelayBody<Watcher>>, Refusal> {
    match may_pass(core, head) {
        Ok(()) => relay(core, socket, exchange, head, body, form).await,
        Err(refusal) => {
            socket.set_unread(!body::is_over(body).await);
            Err(refusal)
        }
    }
}

fn may_pass(core: &Core, head: &Parts) -> Result<(), Refusal> {
    policy::check(core.proxy.settings.kind, &head.method, &head.uri).map_err(
        |(fault, allow)| match allow {
            Some(allow) => Refusal::Method(fault, allow),
            None => Refusal::Fault(fault),
        },
    )?;
    let route = core.proxy.keeper.route();
    // Looked at before the body comes; what decides is the lease that is taken when it has.
    if !route.life.gate.is_open() {
        return Err(closed());
    }
    route.target.map(drop).ok_or_else(nowhere)
}

const fn closed() -> Refusal {
    Refusal::Marked(GATED, "the gate before the engine is closed")
}

const fn nowhere() -> Refusal {
    Refusal::Marked(NOT_READY, "no engine was named to this stub yet")
}

/// The engine's answer, which may come before all of the request was read.
async fn relay(
    core: &Rc<Core>,
    socket: &Rc<Socket>,
    exchange: &InExchange,
    head: &Parts,
    body: Incoming,
    form: Form,
) -> Result<Response<RelayBody<Watcher>>, Refusal> {
    let settings = &core.proxy.settings;
    let gathered = body::gather(body, core, socket).await;
    let (body, upload) = gathered.map_err(Refusal::Fault)?;
    let (target, lease, part) = {
        let route = core.proxy.keeper.route();
        let (lease, part) = route.life.take().ok_or_else(closed)?;
        let address = route.target.ok_or_else(nowhere)?;
        exchange.holds(&route.life);
        let target = Target {
            engine: EngineId::new(settings.model.clone(), 0),
            generation: route.life.generation,
            address,
            // The client's own: a relay stands for its engine.
            authorization: head.headers.get(header::AUTHORIZATION).cloned(),
            origin: None,
        };
        (target, lease, part)
    };
    core.traffic.passed(Direction::ToEngine, body.len());
    let path = head.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let order = Exchange {
        now: Instant::now(),
        target,
        outgoing: Outgoing {
            method: &head.method,
            path: &path,
            headers: &head.headers,
            request_id: None,
            body: body.into(),
            stream: false,
            form,
            look: Look::Ends,
        },
        upload,
        lease,
        timeouts: Timeouts {
            connect: settings.dial.into(),
            first_byte: ANY_TIME,
            non_stream: ANY_TIME,
            idle: ANY_TIME,
            death: Millis::ZERO,
        },
        observer: Watcher { core: Rc::clone(core), part, stream: None },
    };
    relay::exchange(&core.pool, order).await.map_err(|failed| Refusal::Fault(failed.fault))
}

fn refused(proxy: &Proxy, refusal: Refusal, form: Form) -> Response<Bytes> {
    let (fault, mark) = match refusal {
        Refusal::Fault(fault) => (fault, None),
        Refusal::Method(fault, allow) => (fault, Some((header::ALLOW.as_str(), allow))),
        Refusal::Marked(mark, why) => (Fault::NotServing { why: why.into() }, Some((mark, "1"))),
    };
    match mark {
        Some((GATED, _)) => proxy.counts.gated.add(),
        Some((NOT_READY, _)) => proxy.counts.not_ready.add(),
        _ if error::status(&fault).is_client_error() => proxy.counts.refused.add(),
        // The engine did not answer: that was counted as a failed exchange.
        _ => {}
    }
    let mut response = error::response(&fault, form).map(|_| error::body(&fault, form));
    if let Some((name, value)) = mark {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    response
}

/// In whose words a client of this path is answered.
fn form(path: &str) -> Form {
    match path {
        "/v1/responses" => Form::Responses,
        path if path.starts_with("/v1/messages") => Form::Anthropic,
        _ => Form::OpenAi,
    }
}

impl Observer for Watcher {
    fn head(&mut self, _: StatusCode) {
        self.stream = Some(self.core.proxy.metrics.stream());
    }

    fn frame(&mut self, bytes: usize, _: Option<&Facts>) {
        self.core.traffic.passed(Direction::ToClient, bytes);
    }

    fn end(&mut self, outcome: Outcome, _: Instant) {
        self.stream = None;
        let counts = &self.core.proxy.counts;
        match outcome {
            Outcome::Complete => counts.complete.add(),
            _ if self.part.broke() => counts.cut.add(),
            Outcome::ClientLeft(_) => counts.left.add(),
            Outcome::Failed(_) => counts.failed.add(),
        }
    }
}

impl Reply {
    fn engine(body: RelayBody<Watcher>, exchange: InExchange) -> Self {
        Self { content: Content::Engine(Box::new(body)), _exchange: exchange }
    }
}

impl Body for Reply {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        match &mut self.content {
            Content::Text(text) => Poll::Ready(text.take().map(|text| Ok(Frame::data(text)))),
            Content::Engine(body) => Pin::new(&mut **body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.content {
            Content::Text(text) => text.is_none(),
            Content::Engine(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Text(text) => SizeHint::with_exact(text.as_ref().map_or(0, |text| text.len() as u64)),
            Content::Engine(body) => body.size_hint(),
        }
    }
}

impl Answer for Reply {
    fn is_relayed(&self) -> bool {
        matches!(self.content, Content::Engine(_))
    }

    fn poll_piece(
        &mut self,
        memory: Option<&mut [u8]>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Piece, Broken>>> {
        match &mut self.content {
            Content::Text(text) => Poll::Ready(text.take().map(|text| Ok(Piece::Own(text)))),
            Content::Engine(body) => Answer::poll_piece(&mut **body, memory, cx),
        }
    }
}
