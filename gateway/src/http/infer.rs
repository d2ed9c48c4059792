//! A request for an engine, from its body to the head of its answer.

use std::{borrow::Cow, net::IpAddr, rc::Rc, sync::Arc};

use bytes::Bytes;
use http::{HeaderMap, Response};
use hyper::body::Incoming;
use rouse::{
    fault::Fault,
    openai::{self, head::Head},
    relay::headers::{REQUEST_ID, is_uuid, remove_hop_by_hop},
    units::{Millis, Tick},
};
use tokio::{sync::Notify, time::Instant};

use super::{
    Served,
    access::Wish,
    affinity,
    answer::{note_wait, streaming},
    call::Call,
    exchange::Job,
    intake::{self, Charge, Payers},
    reply::{self, Answer, Live, LiveParts, Reply},
    text,
};
use crate::{
    config::{Config, Kind, OnDisconnect},
    keys::{self, Key},
    serve::socket::InExchange,
};

/// What a head asked for, and the body that is to come.
pub(super) struct Asking {
    pub(super) call: Call,
    /// How long the client would wait, if it said so.
    pub(super) timeout: Option<Millis>,
    /// It gets heartbeats while its stream waits.
    pub(super) beats: bool,
    /// There is a `Connection`, which may name any field.
    pub(super) names_hops: bool,
    pub(super) headers: HeaderMap,
    pub(super) body: Incoming,
    pub(super) key: Option<Arc<Key>>,
    pub(super) config: Arc<Config>,
}

/// A body that is here.
struct Received {
    body: Bytes,
    charge: Charge,
    at: Tick,
}

impl Served {
    pub(super) async fn infer(self, asking: Asking, exchange: InExchange) -> Response<Reply> {
        let Asking { call, timeout, beats, names_hops, mut headers, body, key, config } = asking;
        if names_hops {
            // Before anything of ours is added: a client may name that as well.
            remove_hop_by_hop(&mut headers);
        }
        let payers = Payers {
            all: Arc::clone(&self.core.shared.bodies),
            address: self.socket.bodies(),
            key: key.as_ref().map(|key| Arc::clone(&key.bodies)),
        };
        let (body, charge) = match intake::read(body, &config.limits, payers).await {
            Ok(read) => read,
            Err(fault) => {
                let response = self.refuse_unread(&fault, exchange);
                return self.finish(response);
            }
        };
        let at = self.track.received(body.len());
        let received = Received { body, charge, at };
        let job = self.job(call, headers, received, key.clone(), config, timeout).await;
        let (mut response, now) = match job {
            Ok(job) => self.run(job, beats, exchange).await,
            Err(fault) => (self.refuse(&fault, exchange), Instant::now()),
        };
        let now = self.core.shared.control.clock().at(now);
        if let Some(key) = &key {
            keys::note_limits(key, now, response.headers_mut());
        }
        self.finish_at(response, now)
    }

    /// Finds out which model is meant and what exactly is to be sent.
    async fn job(
        &self,
        call: Call,
        mut headers: HeaderMap,
        received: Received,
        key: Option<Arc<Key>>,
        config: Arc<Config>,
        timeout: Option<Millis>,
    ) -> Result<Job, Fault> {
        let Received { body, charge, at } = received;
        let head = call.read(&body).await?;
        let (model, plural, max_wait) = {
            let routes = self.core.shared.control.routes();
            let model = call.model(&head, &routes.registry, key.as_deref())?;
            let route = routes.models.get(&model);
            let plural = route.is_some_and(|route| affinity::is_plural(route));
            let max_wait = route.and_then(|route| route.max_wait);
            (model, plural, max_wait)
        };
        let longest = max_wait.unwrap_or(config.core.settings.queue.max_wait);
        let deadline = self.track.arrived + timeout.map_or(longest, |asked| asked.min(longest));
        self.track.model(&model);
        let spec = config.models.get(&model).cloned();
        let gone = || Fault::ModelNotFound { model: text::cut(call.spelled(&head)), near: Vec::new() };
        let spec = spec.ok_or_else(gone)?;
        // llama-cpp-python answers 400, without a word, to an id that is no UUID.
        let names_id = spec.kind != Kind::LlamaCpp || is_uuid(&self.track.id);
        if !names_id {
            headers.remove(REQUEST_ID);
        }
        self.track.place_in_trace(&mut headers);
        let stream = head.stream;
        let client = self.client(key.as_deref(), &head, &headers);
        let ties = affinity::Ties::of(&head, &body, plural, config.affinity).await;
        let wish = Wish {
            spelled: call.spelled(&head),
            model: &model,
            max_tokens: head.max_tokens,
            generates: call.streams,
            computes: call.computes,
            stream,
        };
        let bill = self.admit(key.as_ref(), wish, (&headers, &body), at).await?;
        let name = if let Cow::Owned(name) = head.model { Some(name) } else { None };
        let range = head.range;
        Ok(Job {
            core: Rc::clone(&self.core),
            track: Rc::clone(&self.track),
            config,
            model,
            body: call.content(body, range, name),
            spec,
            method: call.method,
            path: call.path,
            headers,
            names_id,
            _charge: charge,
            stream,
            form: self.form,
            ties,
            key,
            client,
            bill,
            deadline,
            waits: call.waits,
            parked: stream.then(|| Rc::new(Notify::new())),
        })
    }

    /// The hash of the client, as [`Job::client`] describes it; 0 where nothing identifies the client.
    fn client(&self, key: Option<&Key>, head: &Head<'_>, headers: &HeaderMap) -> u64 {
        let address = || match self.socket.peer().map(|peer| peer.ip()) {
            Some(IpAddr::V4(address)) => openai::hash(&address.octets()),
            Some(IpAddr::V6(address)) => openai::hash(&address.octets()),
            None => 0,
        };
        key.map(|key| key.client)
            .or(head.user)
            .or_else(|| affinity::session(headers))
            .or(head.session)
            .or_else(|| affinity::forwarded(headers))
            .unwrap_or_else(address)
    }

    /// Runs the request; a stream that is parked for long gets its head meanwhile, and heartbeats if it `beats`. Tells as well when
    /// the head was there.
    async fn run(&self, job: Job, beats: bool, exchange: InExchange) -> (Response<Reply>, Instant) {
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
                    let reply = Reply::live(Live::waiting(running, beats.then_some(&stream), live), exchange);
                    return (streaming(reply), Instant::now());
                }
            }
        } else if job.spec.on_disconnect == OnDisconnect::Drain {
            job.run().await
        } else {
            job.run_here().await
        };
        let now = Instant::now();
        let response = match answer {
            Ok(answer) => self.pass_on(answer, live, exchange, now),
            Err(fault) => self.refuse(&fault, exchange),
        };
        (response, now)
    }

    fn pass_on(
        &self,
        mut answer: Box<Answer>,
        live: LiveParts,
        exchange: InExchange,
        now: Instant,
    ) -> Response<Reply> {
        let mut head = Response::new(());
        *head.status_mut() = answer.response.status();
        std::mem::swap(head.headers_mut(), answer.response.headers_mut());
        if let Some(waited) = self.track.was_parked() {
            note_wait(&mut head, waited, &self.track);
        }
        head.map(|()| Reply::live(Live::relayed(answer, live, now), exchange))
    }
}

#[cfg(test)]
mod tests;
