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

use std::{pin::Pin, rc::Rc, sync::Arc};

use arc_swap::{ArcSwap, Guard};
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header, request};
use hyper::body::Incoming;
use rouse::{
    client::Dates,
    fault::Fault,
    openai::{self, Form},
    relay::{
        Pool,
        headers::{REQUEST_ID, RequestIds},
    },
    units::Tick,
};
use tokio::{sync::watch, time::Instant};

use crate::{
    config::Config,
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
mod fields;
mod framing;
mod head;
mod infer;
mod intake;
mod models;
mod near;
mod origin;
mod passage;
pub(crate) mod reply;
pub(crate) mod route;
#[cfg(test)]
pub(crate) mod testing;
pub(crate) mod text;
mod track;

pub(crate) use answer::bare;
use answer::{close, note_wait};
use call::Call;
pub use control::{Asked, Control};
use fields::{Field, Fields};
use infer::Asking;
pub(crate) use intake::InFlight;
use reply::Reply;
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
    pub(crate) dates: Rc<Dates>,
    /// What the stage was when this core began to look at it.
    began_serving: bool,
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
        // With many keys this takes as long as many requests: the first one is not to wait for it.
        drop(keys.table(&config.load().keys, |name| meter.key(name)));
        Arc::new(Self { control, config, meter, telemetry, bodies, authors, keys, started })
    }
}

impl Core {
    pub(crate) fn new(shared: Arc<Shared>, stage: watch::Receiver<Stage>) -> Rc<Self> {
        let began_serving = *stage.borrow() == Stage::Serving;
        Rc::new(Self {
            shared,
            pool: Pool::default(),
            stage,
            dates: Rc::default(),
            began_serving,
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
        // Which locks, and so writes where all cores read. Until the stage changes there is nothing new to see.
        let unchanged = self.began_serving && matches!(self.stage.has_changed(), Ok(false));
        !unchanged && *self.stage.borrow() > Stage::Serving
    }
}

/// Serves one request. All that its head decides is decided at once; what is left for later, and kept by the connection
/// until then, is small where there is nothing to wait for.
pub(crate) fn serve(
    core: &Rc<Core>,
    socket: &Rc<Socket>,
    request: Request<Incoming>,
) -> impl Future<Output = Response<Reply>> + use<> {
    let begun = begin(core, socket, request);
    async move {
        match begun {
            Begun::Answered(response) => response,
            Begun::Asking(answer) => answer.await,
        }
    }
}

/// A request whose head was looked at.
enum Begun {
    Answered(Response<Reply>),
    Asking(Pin<Box<dyn Future<Output = Response<Reply>>>>),
}

fn begin(core: &Rc<Core>, socket: &Rc<Socket>, request: Request<Incoming>) -> Begun {
    let arrived = Instant::now();
    let exchange = socket.begin(arrived);
    let (parts, body) = request.into_parts();
    let fields = Fields::of(&parts.headers);
    let shared = &core.shared;
    let config = shared.config.load();
    let id = core.ids.keep_or_make(fields.first(Field::RequestId));
    let path = parts.uri.path();
    let framed = framing::check(&parts, &fields);
    let ambiguous = framed.is_err();
    let upgrades = fields.all(Field::Upgrade).any(route::is_websocket);
    let found =
        framed.map_err(|fault| (fault, None)).and_then(|()| route::find(&parts.method, path, upgrades));
    let label = found.as_ref().map_or("other", Route::label);
    let track = Track::new(&shared.meter, shared.control.clock(), arrived, id, label);
    let probe = matches!(found, Ok(Route::Healthz | Route::Readyz));
    let seen = Seen { peer: socket.peer(), secure: socket.is_secure(), probe };
    track.keep_notes(shared.telemetry.begin(&core.trace_ids, &parts, seen));
    let request = Served {
        core: Rc::clone(core),
        socket: Rc::clone(socket),
        track,
        form: route::form(path),
        origin: cors::Origin::of(&config, &parts),
        ambiguous,
        is_head: parts.method == Method::HEAD,
    };
    let unread = !hyper::body::Body::is_end_stream(&body);
    let preflight = if ambiguous { None } else { request.origin.preflight(&parts) };
    if let Some(headers) = preflight {
        let mut response = request.preflight(headers, exchange);
        request.close_unread(&mut response, unread);
        return Begun::Answered(request.finish(response));
    }
    let admitted = found.and_then(|route| {
        let key = request.authenticate(&route, &parts, &fields, &config).map_err(|fault| (fault, None))?;
        Ok((route, key))
    });
    let call = match admitted {
        Ok((Route::Inference(inference), key)) => {
            Call::on_route(inference, &parts).map(|call| (call, key)).map_err(|fault| (fault, None))
        }
        Ok((Route::Passage(_), key)) => {
            request.through(&parts, key.as_deref(), &config).map(|call| (call, key))
        }
        Ok((route, key)) => {
            let mut response = request.look_up(&route, key.as_deref(), exchange);
            request.close_unread(&mut response, unread);
            return Begun::Answered(request.finish(response));
        }
        Err(misrouted) => Err(misrouted),
    };
    let (call, key) = match call {
        Ok(called) => called,
        Err((fault, allow)) => {
            let response = request.refuse_route(&fault, allow, unread, exchange);
            return Begun::Answered(request.finish(response));
        }
    };
    let wishes = head::check(&fields)
        .and_then(|()| head::timeout(&fields))
        .and_then(|timeout| Ok((timeout, head::heartbeat(&fields)?)));
    match wishes {
        Ok((timeout, heartbeat)) => {
            let config = Guard::into_inner(config);
            let names_hops = fields.first(Field::Connection).is_some();
            let beats = heartbeat.unwrap_or_else(|| key.as_ref().is_none_or(|key| key.heartbeat));
            let headers = parts.headers;
            let asking = Asking { call, timeout, beats, names_hops, headers, body, key, config };
            Begun::Asking(Box::pin(request.infer(asking, exchange)))
        }
        Err(fault) => {
            let response = request.refuse_unread(&fault, exchange);
            Begun::Answered(request.finish(response))
        }
    }
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
    origin: cors::Origin,
    /// Where its connection's next request begins is a matter of opinion.
    ambiguous: bool,
    is_head: bool,
}

impl Served {
    /// What every answer says, whoever gave it.
    fn finish(self, response: Response<Reply>) -> Response<Reply> {
        let now = self.core.now();
        self.finish_at(response, now)
    }

    /// The same, by a clock that was read just before.
    fn finish_at(self, mut response: Response<Reply>, now: Tick) -> Response<Reply> {
        let Self { core, socket, track, form, origin, ambiguous, is_head } = self;
        track.head(response.status().as_u16(), now);
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
                    let name = route::unescape(escaped).unwrap_or_else(|| escaped.clone());
                    return self.refuse(&near::not_found(&routes.registry, key, &name), exchange);
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
    fn through(&self, parts: &request::Parts, key: Option<&Key>, config: &Config) -> Result<Call, Misrouted> {
        let routes = self.core.shared.control.routes();
        let found = passage::find(&parts.method, &parts.uri, &routes.registry, config, key)?;
        Call::through(found, parts).map_err(|fault| (fault, None))
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
        if matches!(fault, Fault::MissingApiKey | Fault::InvalidApiKey { .. }) {
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
