//! The inference API: what is done with one request, from its head to the response's body.
//!
//! ```text
//!   head ─▶ route, key, encoding ─▶ body (bounded) ─▶ model, stream ─▶ exchange ─▶ reply
//!           404 405 415 501 400     413 408 429       400 404          429 502 503 504
//! ```
//!
//! Everything before the body is decided on the head alone, so that a refusal costs nothing; such a refusal closes the
//! connection, since what follows on it is a body that nobody wants. A request whose client leaves is not told so: its
//! future is dropped, and everything it holds goes with it.

use std::{rc::Rc, sync::Arc};

use arc_swap::ArcSwap;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header, request};
use hyper::body::Incoming;
use rouse::{
    fault::Fault,
    openai,
    relay::{
        Payload, Pool,
        headers::{REQUEST_ID, RequestIds, is_uuid},
    },
    units::Tick,
};
use tokio::sync::{Notify, watch};

use crate::{
    config::{Config, Kind},
    serve::{
        Stage,
        socket::{InExchange, Socket},
    },
};

pub mod admin;
mod answer;
mod control;
mod cors;
mod exchange;
mod framing;
mod head;
mod intake;
mod models;
pub(crate) mod reply;
pub(crate) mod route;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod text;
mod track;

pub(crate) use answer::bare;
use answer::{close, note_wait, streaming};
pub use control::{Asked, Control};
use reply::{Answer, Live, LiveParts, Reply};
use route::{Inference, Route};
use track::Track;
pub use track::{Finished, Meter, Unmetered};

/// What all cores share.
pub struct Shared {
    pub(crate) control: Arc<dyn Control>,
    pub(crate) config: Arc<ArcSwap<Config>>,
    pub(crate) meter: Arc<dyn Meter>,
    bodies: Arc<intake::InFlight>,
    started: Tick,
}

/// What one core has for itself.
pub(crate) struct Core {
    pub(crate) shared: Arc<Shared>,
    pub(crate) pool: Pool,
    pub(crate) stage: watch::Receiver<Stage>,
    ids: RequestIds,
}

impl Shared {
    /// `config` is read anew for every request, so a reload holds from the next one on.
    #[must_use]
    pub fn new(control: Arc<dyn Control>, config: Arc<ArcSwap<Config>>, meter: Arc<dyn Meter>) -> Arc<Self> {
        let started = control.clock().now();
        Arc::new(Self { control, config, meter, bodies: Arc::default(), started })
    }
}

impl Core {
    pub(crate) fn new(shared: Arc<Shared>, stage: watch::Receiver<Stage>) -> Rc<Self> {
        Rc::new(Self { shared, pool: Pool::default(), stage, ids: RequestIds::new() })
    }

    fn draining(&self) -> bool {
        *self.stage.borrow() > Stage::Serving
    }
}

/// Serves one request.
pub(crate) async fn serve(core: Rc<Core>, socket: Rc<Socket>, request: Request<Incoming>) -> Response<Reply> {
    let exchange = socket.begin();
    let (parts, body) = request.into_parts();
    let id = core.ids.keep_or_make(&parts.headers);
    let path = parts.uri.path();
    let origin = cors::Origin::of(&core.shared.config.load().cors, &parts);
    let framed = framing::check(&parts);
    let ambiguous = framed.is_err();
    let found =
        framed.map_err(|fault| (fault, None)).and_then(|()| route::find(&parts.method, path, &parts.headers));
    let track = Track::new(
        &core.shared.meter,
        core.shared.control.clock(),
        id,
        found.as_ref().map_or("other", Route::label),
        &parts,
    );
    let request = Served { core: Rc::clone(&core), socket: Rc::clone(&socket), track: Rc::clone(&track) };
    let unread = !hyper::body::Body::is_end_stream(&body);
    let preflight = if ambiguous { None } else { origin.preflight(&parts) };
    let mut response = match (preflight, found) {
        (Some(headers), _) => {
            let mut response = request.preflight(headers, exchange);
            request.close_unread(&mut response, unread);
            response
        }
        (None, Err((fault, allow))) => {
            let mut response = request.refuse(&fault, exchange);
            if let Some(allow) = allow {
                response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
            }
            request.close_unread(&mut response, unread);
            response
        }
        (None, Ok(Route::Inference(api))) => request.infer(api, parts, body, exchange).await,
        (None, Ok(route)) => {
            let mut response = request.look_up(&route, exchange);
            request.close_unread(&mut response, unread);
            response
        }
    };
    track.head(response.status().as_u16());
    response.headers_mut().insert(REQUEST_ID, track.id.clone());
    origin.note(response.headers_mut());
    if ambiguous {
        socket.offends();
    }
    if (ambiguous || core.draining()) && !socket.is_multiplexed() {
        close(&mut response);
    }
    response
}

/// One request being served.
struct Served {
    core: Rc<Core>,
    socket: Rc<Socket>,
    track: Rc<Track>,
}

impl Served {
    /// The routes that need no body.
    fn look_up(&self, route: &Route, exchange: InExchange) -> Response<Reply> {
        let routes = self.core.shared.control.routes();
        let created = self.core.shared.started.0 / 1000;
        let json = |body| (StatusCode::OK, "application/json", body);
        let (status, kind, body) = match route {
            Route::Models => json(models::list(&routes, created)),
            Route::Model(escaped) => match route::named(&routes.registry, escaped) {
                Some((name, model)) => json(models::one(&routes, &name, model, created)),
                None => {
                    let fault = Fault::ModelNotFound { model: text::cut(escaped) };
                    return self.refuse(&fault, exchange);
                }
            },
            Route::Readyz if !routes.ready || self.core.draining() => {
                (StatusCode::SERVICE_UNAVAILABLE, "text/plain", Bytes::from_static(b"not ready\n"))
            }
            _ => (StatusCode::OK, "text/plain", Bytes::from_static(b"ok\n")),
        };
        let mut response = Response::new(Reply::text(body, Rc::clone(&self.track), exchange));
        *response.status_mut() = status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }

    fn preflight(&self, headers: HeaderMap, exchange: InExchange) -> Response<Reply> {
        let mut response = Response::new(Reply::text(Bytes::new(), Rc::clone(&self.track), exchange));
        *response.status_mut() = StatusCode::NO_CONTENT;
        *response.headers_mut() = headers;
        response
    }

    /// A request whose body names a model.
    async fn infer(
        &self,
        api: Inference,
        parts: request::Parts,
        body: Incoming,
        exchange: InExchange,
    ) -> Response<Reply> {
        let config = self.core.shared.config.load_full();
        let early = head::check(&parts.headers).and_then(|()| head::timeout(&parts.headers));
        let timeout = match early {
            Ok(timeout) => timeout,
            Err(fault) => return self.refuse_unread(&fault, exchange),
        };
        let (body, charge) = match intake::read(body, &config.limits, &self.core.shared.bodies).await {
            Ok(read) => read,
            Err(fault) => return self.refuse_unread(&fault, exchange),
        };
        self.track.received(body.len());
        let longest = config.core.settings.queue.max_wait;
        let wait = timeout.map_or(longest, |asked| asked.min(longest));
        let deadline = self.track.arrived + wait;
        let job = match self.job(api, parts, (body, charge), config, deadline).await {
            Ok(job) => job,
            Err(fault) => return self.refuse(&fault, exchange),
        };
        self.run(job, exchange).await
    }

    /// Finds out which model is meant and what exactly is to be sent.
    async fn job(
        &self,
        api: Inference,
        mut parts: request::Parts,
        (body, charge): (Bytes, intake::Charge),
        config: Arc<Config>,
        deadline: Tick,
    ) -> Result<exchange::Job, Fault> {
        let head = peek(&body).await?;
        let shared = &self.core.shared;
        let not_found = || Fault::ModelNotFound { model: text::cut(&head.model) };
        let model = {
            let routes = shared.control.routes();
            routes.registry.find(&head.model).cloned().ok_or_else(not_found)?
        };
        self.track.model(&model);
        let spec = Arc::clone(config.models.get(&model).ok_or_else(not_found)?);
        parts.headers.remove(REQUEST_ID);
        // llama-cpp-python answers 400, without a word, to an id that is no UUID.
        if spec.kind != Kind::LlamaCpp || is_uuid(&self.track.id) {
            parts.headers.insert(REQUEST_ID, self.track.id.clone());
        }
        let stream = api.streams() && head.stream;
        let payload = if spec.served_name == head.model {
            Payload::from(body)
        } else {
            Payload::from(openai::head::splice(&body, &head.range, &spec.served_name))
        };
        Ok(exchange::Job {
            core: Rc::clone(&self.core),
            track: Rc::clone(&self.track),
            config,
            model,
            spec,
            method: Method::POST,
            path: parts
                .uri
                .path_and_query()
                .cloned()
                .unwrap_or_else(|| http::uri::PathAndQuery::from_static("/")),
            headers: parts.headers,
            body: payload,
            _charge: charge,
            stream,
            deadline,
            parked: stream.then(|| Rc::new(Notify::new())),
        })
    }

    /// Runs the request; a stream that is parked for long gets its head meanwhile.
    async fn run(&self, job: exchange::Job, exchange: InExchange) -> Response<Reply> {
        let live = LiveParts {
            socket: Rc::clone(&self.socket),
            track: Rc::clone(&self.track),
            on_disconnect: job.spec.on_disconnect,
        };
        let stream = job.config.stream;
        let answer = if let Some(parked) = job.parked.clone() {
            let mut running: reply::Job = Box::pin(job.run());
            let grace = async {
                parked.notified().await;
                tokio::time::sleep(stream.grace.duration()).await;
            };
            tokio::select! {
                biased;
                answer = &mut running => answer,
                () = grace => {
                    let every = stream.heartbeat.duration();
                    return streaming(Reply::live(Live::waiting(running, every, live), exchange));
                }
            }
        } else {
            Box::pin(job.run()).await
        };
        match answer {
            Ok(answer) => self.pass_on(answer, live, exchange),
            Err(fault) => self.refuse(&fault, exchange),
        }
    }

    fn pass_on(&self, mut answer: Answer, live: LiveParts, exchange: InExchange) -> Response<Reply> {
        let mut head = Response::new(());
        *head.status_mut() = answer.response.status();
        std::mem::swap(head.headers_mut(), answer.response.headers_mut());
        if let Some(waited) = self.track.was_parked() {
            note_wait(&mut head, waited, &self.track);
        }
        head.map(|()| Reply::live(Live::relayed(answer, live), exchange))
    }

    fn refuse(&self, fault: &Fault, exchange: InExchange) -> Response<Reply> {
        self.track.fault(fault);
        // By our own word: an engine that refuses the gateway's key says nothing of the client.
        if matches!(fault, Fault::InvalidApiKey) {
            self.socket.offends();
        }
        let response = openai::error::response(fault);
        let (mut parts, _) = response.into_parts();
        if let Some(waited) = self.track.was_parked() {
            let mut head = Response::from_parts(parts, ());
            note_wait(&mut head, waited, &self.track);
            (parts, ()) = head.into_parts();
        }
        let reply = Reply::text(openai::error::body(fault), Rc::clone(&self.track), exchange);
        Response::from_parts(parts, reply)
    }

    /// Refuses while the client may still be sending its body.
    fn refuse_unread(&self, fault: &Fault, exchange: InExchange) -> Response<Reply> {
        let mut response = self.refuse(fault, exchange);
        self.close_unread(&mut response, true);
        response
    }

    fn close_unread(&self, response: &mut Response<Reply>, unread: bool) {
        if unread && !self.socket.is_multiplexed() {
            self.socket.leave_unread();
            close(response);
        }
    }
}

/// A large body is read away from this core's streams.
async fn peek(body: &Bytes) -> Result<openai::head::Head<'static>, Fault> {
    if body.len() <= openai::head::OFF_CORE {
        return Ok(openai::head::peek(body)?.into_owned());
    }
    let body = body.clone();
    tokio::task::spawn_blocking(move || openai::head::peek(&body).map(openai::head::Head::into_owned))
        .await
        .map_err(|_| Fault::Internal)?
        .map_err(Fault::from)
}

#[cfg(test)]
mod tests;
