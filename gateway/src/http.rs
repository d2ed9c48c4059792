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
    openai::{self, Form},
    relay::{
        Pool,
        headers::{REQUEST_ID, RequestIds, is_uuid, remove_hop_by_hop},
    },
    units::Tick,
};
use tokio::sync::{Notify, watch};

use crate::{
    config::{Config, Kind},
    driver::Known,
    keys::{self, Key, Keys},
    routes::{Authors, Lots},
    serve::{
        Stage,
        socket::{InExchange, Socket},
    },
    telemetry::{Ids, Seen, Telemetry},
};

mod access;
pub mod admin;
mod affinity;
mod answer;
mod call;
mod control;
mod cors;
mod exchange;
mod framing;
mod head;
mod intake;
mod models;
mod origin;
mod passage;
pub(crate) mod reply;
pub(crate) mod route;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod text;
mod track;

use access::Wish;
pub(crate) use answer::bare;
use answer::{close, note_wait, streaming};
use call::Call;
pub use control::{Asked, Control};
pub(crate) use intake::InFlight;
use intake::Payers;
use reply::{Answer, Live, LiveParts, Reply};
use route::Route;
use track::Track;
pub use track::{Finished, Meter, Unmetered};

/// What all cores share.
pub struct Shared {
    pub(crate) control: Arc<dyn Control>,
    pub(crate) config: Arc<ArcSwap<Config>>,
    pub(crate) meter: Arc<dyn Meter>,
    telemetry: Arc<Telemetry>,
    bodies: Arc<InFlight>,
    authors: Authors,
    keys: Keys,
    started: Tick,
}

/// What one core has for itself.
pub(crate) struct Core {
    pub(crate) shared: Arc<Shared>,
    pub(crate) pool: Pool,
    pub(crate) stage: watch::Receiver<Stage>,
    ids: RequestIds,
    lots: Lots,
    /// Where the decisions hear what keys are served.
    served: Known,
    trace_ids: Ids,
}

impl Shared {
    /// `config` is read anew for every request, so a reload holds from the next one on.
    #[must_use]
    pub fn new(control: Arc<dyn Control>, config: Arc<ArcSwap<Config>>, meter: Arc<dyn Meter>) -> Arc<Self> {
        Self::told(control, config, meter, Arc::default())
    }

    /// With somebody to tell of single requests.
    #[must_use]
    pub fn told(
        control: Arc<dyn Control>,
        config: Arc<ArcSwap<Config>>,
        meter: Arc<dyn Meter>,
        telemetry: Arc<Telemetry>,
    ) -> Arc<Self> {
        let started = control.clock().now();
        let (bodies, keys, authors) = (Arc::default(), Keys::new(), Authors::default());
        Arc::new(Self { control, config, meter, telemetry, bodies, authors, keys, started })
    }
}

impl Core {
    pub(crate) fn new(shared: Arc<Shared>, stage: watch::Receiver<Stage>) -> Rc<Self> {
        Rc::new(Self {
            shared,
            pool: Pool::default(),
            stage,
            ids: RequestIds::new(),
            lots: Lots::new(),
            served: Known::default(),
            trace_ids: Ids::default(),
        })
    }

    fn now(&self) -> Tick {
        self.shared.control.clock().now()
    }

    fn draining(&self) -> bool {
        *self.stage.borrow() > Stage::Serving
    }
}

/// Serves one request.
pub(crate) async fn serve(core: Rc<Core>, socket: Rc<Socket>, request: Request<Incoming>) -> Response<Reply> {
    let exchange = socket.begin();
    let (parts, body) = request.into_parts();
    let is_head = parts.method == Method::HEAD;
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
    );
    let probe = matches!(found, Ok(Route::Healthz | Route::Readyz));
    let seen = Seen { peer: socket.peer(), secure: socket.is_secure(), probe };
    track.keep_notes(core.shared.telemetry.begin(&core.trace_ids, &parts, seen));
    let form = route::form(path);
    let request =
        Served { core: Rc::clone(&core), socket: Rc::clone(&socket), track: Rc::clone(&track), form };
    let unread = !hyper::body::Body::is_end_stream(&body);
    let preflight = if ambiguous { None } else { origin.preflight(&parts) };
    let admitted = found.map(|route| (request.authenticate(&route, &parts), route));
    let mut response = match (preflight, admitted) {
        (Some(headers), _) => {
            let mut response = request.preflight(headers, exchange);
            request.close_unread(&mut response, unread);
            response
        }
        (None, Err((fault, allow))) => request.refuse_route(&fault, allow, unread, exchange),
        (None, Ok((Err(fault), _))) => request.refuse_route(&fault, None, unread, exchange),
        (None, Ok((Ok(key), Route::Inference(inference)))) => {
            let call = Call::on_route(inference, &parts).map_err(|fault| (fault, None));
            request.infer(call, parts, body, key, exchange).await
        }
        (None, Ok((Ok(key), Route::Passage(_)))) => {
            let call = request.through(&parts, key.as_deref());
            request.infer(call, parts, body, key, exchange).await
        }
        (None, Ok((Ok(key), route))) => {
            let mut response = request.look_up(&route, key.as_deref(), exchange);
            request.close_unread(&mut response, unread);
            response
        }
    };
    track.head(response.status().as_u16());
    response.headers_mut().insert(REQUEST_ID, track.id.clone());
    if form == Form::Anthropic {
        // Under this name its SDKs look for it.
        response.headers_mut().entry("request-id").or_insert_with(|| track.id.clone());
    }
    origin.note(response.headers_mut());
    if ambiguous {
        socket.offends();
    }
    if (ambiguous || core.draining()) && !socket.is_multiplexed() {
        close(&mut response);
    }
    if is_head && socket.is_multiplexed() { headless(response) } else { response }
}

/// What hyper does by itself on HTTP/1.1 only: an answer to HEAD has the length of its body, and not the body.
fn headless(response: Response<Reply>) -> Response<Reply> {
    let (mut parts, body) = response.into_parts();
    if let Some(length) = hyper::body::Body::size_hint(&body).exact().filter(|length| *length > 0) {
        parts.headers.entry(header::CONTENT_LENGTH).or_insert_with(|| HeaderValue::from(length));
    }
    Response::from_parts(parts, body.without_text())
}

/// Why a request has no route; with a 405, what would be allowed.
type Misrouted = (Fault, Option<&'static str>);

/// One request being served.
struct Served {
    core: Rc<Core>,
    socket: Rc<Socket>,
    track: Rc<Track>,
    form: Form,
}

impl Served {
    /// The routes that need no body.
    fn look_up(&self, route: &Route, key: Option<&Key>, exchange: InExchange) -> Response<Reply> {
        let routes = self.core.shared.control.routes();
        let created = self.core.shared.started.0 / 1000;
        let json = |body| (StatusCode::OK, "application/json", body);
        let (status, kind, body) = match route {
            Route::Models => json(models::list(&routes, key, created)),
            Route::Model(escaped) => match route::named(&routes.registry, escaped) {
                Some((name, model)) if key.is_none_or(|key| key.may_use(model)) => {
                    json(models::one(&routes, &name, model, created))
                }
                _ => {
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

    /// A request on a path of an engine's own.
    fn through(&self, parts: &request::Parts, key: Option<&Key>) -> Result<Call, Misrouted> {
        let config = self.core.shared.config.load();
        let routes = self.core.shared.control.routes();
        let found = passage::find(&parts.method, &parts.uri, &routes.registry, &config, |model| {
            key.is_none_or(|key| key.lets_use(model))
        })?;
        Call::through(found, parts).map_err(|fault| (fault, None))
    }

    /// A request for an engine.
    async fn infer(
        &self,
        call: Result<Call, Misrouted>,
        parts: request::Parts,
        body: Incoming,
        key: Option<Arc<Key>>,
        exchange: InExchange,
    ) -> Response<Reply> {
        let call = match call {
            Ok(call) => call,
            Err((fault, allow)) => {
                return self.refuse_route(&fault, allow, !hyper::body::Body::is_end_stream(&body), exchange);
            }
        };
        let config = self.core.shared.config.load_full();
        let early = head::check(&parts.headers).and_then(|()| head::timeout(&parts.headers));
        let timeout = match early {
            Ok(timeout) => timeout,
            Err(fault) => return self.refuse_unread(&fault, exchange),
        };
        let payers = Payers {
            all: Arc::clone(&self.core.shared.bodies),
            address: self.socket.bodies(),
            key: key.as_ref().map(|key| Arc::clone(&key.bodies)),
        };
        let (body, charge) = match intake::read(body, &config.limits, payers).await {
            Ok(read) => read,
            Err(fault) => return self.refuse_unread(&fault, exchange),
        };
        self.track.received(body.len());
        let longest = config.core.settings.queue.max_wait;
        let wait = timeout.map_or(longest, |asked| asked.min(longest));
        let deadline = self.track.arrived + wait;
        let job = self.job(call, parts, (body, charge), key.clone(), config, deadline).await;
        let mut response = match job {
            Ok(job) => self.run(job, exchange).await,
            Err(fault) => self.refuse(&fault, exchange),
        };
        if let Some(key) = &key {
            keys::note_limits(key, self.core.shared.control.clock().now(), response.headers_mut());
        }
        response
    }

    /// Finds out which model is meant and what exactly is to be sent.
    async fn job(
        &self,
        call: Call,
        mut parts: request::Parts,
        (body, charge): (Bytes, intake::Charge),
        key: Option<Arc<Key>>,
        config: Arc<Config>,
        deadline: Tick,
    ) -> Result<exchange::Job, Fault> {
        let head = call.read(&body).await?;
        let model = call.model(&head, &self.core.shared.control.routes().registry)?;
        self.track.model(&model);
        let spec = config.models.get(&model).cloned();
        let spec = spec.ok_or_else(|| Fault::ModelNotFound { model: text::cut(call.spelled(&head)) })?;
        remove_hop_by_hop(&mut parts.headers);
        parts.headers.remove(REQUEST_ID);
        // llama-cpp-python answers 400, without a word, to an id that is no UUID.
        if spec.kind != Kind::LlamaCpp || is_uuid(&self.track.id) {
            parts.headers.insert(REQUEST_ID, self.track.id.clone());
        }
        self.track.place_in_trace(&mut parts.headers);
        let stream = head.stream;
        let ties = affinity::Ties::of(&head, config.affinity);
        let wish = Wish {
            spelled: call.spelled(&head),
            model: &model,
            max_tokens: head.max_tokens,
            generates: call.streams,
            computes: call.computes,
            stream,
        };
        let bill = self.admit(key.as_ref(), wish, (&parts.headers, &body)).await?;
        Ok(exchange::Job {
            core: Rc::clone(&self.core),
            track: Rc::clone(&self.track),
            config,
            model,
            body: call.content(body, &head),
            spec,
            method: call.method,
            path: call.path,
            headers: parts.headers,
            _charge: charge,
            stream,
            form: self.form,
            ties,
            key,
            bill,
            deadline,
            waits: call.waits,
            parked: stream.then(|| Rc::new(Notify::new())),
        })
    }

    /// Runs the request; a stream that is parked for long gets its head meanwhile.
    async fn run(&self, job: exchange::Job, exchange: InExchange) -> Response<Reply> {
        let live = LiveParts {
            socket: Rc::clone(&self.socket),
            track: Rc::clone(&self.track),
            on_disconnect: job.spec.on_disconnect,
            form: self.form,
            patience: job.config.limits.client_stall.duration(),
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
                    return streaming(Reply::live(Live::waiting(running, &stream, live), exchange));
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

    /// There is no such route, or not with this method; `allow`: with which.
    fn refuse_route(
        &self,
        fault: &Fault,
        allow: Option<&'static str>,
        unread: bool,
        exchange: InExchange,
    ) -> Response<Reply> {
        let mut response = self.refuse(fault, exchange);
        if let Some(allow) = allow {
            response.headers_mut().insert(header::ALLOW, HeaderValue::from_static(allow));
        }
        self.close_unread(&mut response, unread);
        response
    }

    fn refuse(&self, fault: &Fault, exchange: InExchange) -> Response<Reply> {
        self.track.fault(fault);
        let mut response = openai::error::response(fault, self.form);
        // By our own word: an engine that refuses the gateway's key says nothing of the client.
        if matches!(fault, Fault::InvalidApiKey) {
            keys::challenge(response.headers_mut());
        }
        let (mut parts, _) = response.into_parts();
        if let Some(waited) = self.track.was_parked() {
            let mut head = Response::from_parts(parts, ());
            note_wait(&mut head, waited, &self.track);
            (parts, ()) = head.into_parts();
        }
        let reply = Reply::text(openai::error::body(fault, self.form), Rc::clone(&self.track), exchange);
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

#[cfg(test)]
mod tests;
