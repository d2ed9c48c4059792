//! What ties a request to an engine, and what its attempt tells those who choose for the next ones.
//!
//! Only for models that may have several engines; for all others nothing here is more than a look at a number.

use std::rc::Rc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, uri::PathAndQuery};
use rouse::{
    lease::Lease,
    model::EngineId,
    openai::{
        self,
        head::{Beginning, Head, OFF_CORE},
        sse::Facts,
    },
    relay::Outcome,
    units::Generation,
};

use super::{Core, track::Track};
use crate::{
    config::Affinity,
    routes::{Author, Change, Endpoint, Route, Wanted, Witness},
};

/// By which a client says what belongs together: the field that routers in front of inference servers look at.
const SESSION: HeaderName = HeaderName::from_static("x-session-id");
const FORWARDED: HeaderName = HeaderName::from_static("x-forwarded-for");
/// Whose answers are gone on from.
const RESPONSES: &str = "/v1/responses";

/// What a request's body says that it belongs to, as hashes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ties {
    previous: Option<u64>,
    session: Option<u64>,
    prefix: Option<u64>,
    affinity: Affinity,
}

impl Ties {
    /// `plural`: its model may have several engines.
    pub(super) async fn of(head: &Head<'_>, body: &Bytes, plural: bool, affinity: Affinity) -> Self {
        let prefix =
            if affinity == Affinity::Prefix && plural { prefix(&head.beginning, body).await } else { None };
        Self { previous: head.previous, session: head.session, prefix, affinity }
    }

    /// A lease on the engine that suits best.
    pub(super) fn take<'r>(
        &self,
        core: &Core,
        route: &'r Route,
        headers: &HeaderMap,
        avoid: Option<&EngineId>,
    ) -> Option<(&'r Endpoint, Lease)> {
        let now = || core.now();
        let lots = &core.lots;
        let mut wanted = Wanted { author: None, session: None, prefix: None, avoid, lots, now: &now };
        if route.endpoints.len() < 2 {
            return route.take(&wanted);
        }
        if self.affinity != Affinity::None {
            // The field is the client's own word on it; the key in the body is for the engine's cache.
            wanted.session = session(headers).or(self.session);
        }
        if self.affinity == Affinity::Prefix {
            wanted.prefix = self.prefix;
        }
        let author = self.author(core);
        wanted.author = author.as_ref();
        route.take(&wanted)
    }

    /// The one life of an engine that can answer it, if there is one and it is here.
    pub(super) fn only(&self, core: &Core, route: &Route) -> Option<Author> {
        let author = is_plural(route).then(|| self.author(core))??;
        route.author(&author).is_some().then_some(author)
    }

    fn author(&self, core: &Core) -> Option<Author> {
        self.previous.and_then(|previous| core.shared.authors.of(previous, core.now()))
    }
}

/// One attempt at one of several engines. Boxed, since most models have one and their streams no attempt to hold.
pub(crate) struct Attempted {
    core: Rc<Core>,
    author: Author,
    /// An engine that is not in the routes is not chosen, and needs no opinion.
    witness: Option<Witness>,
    /// Its answer can be gone on from, and is not known yet.
    learns: bool,
}

impl Attempted {
    /// `None` for a model that never has a choice.
    pub(super) fn new(
        core: &Rc<Core>,
        route: &Route,
        endpoint: &Endpoint,
        path: &PathAndQuery,
    ) -> Option<Box<Self>> {
        is_plural(route).then(|| {
            Box::new(Self {
                core: Rc::clone(core),
                author: (endpoint.engine.clone(), endpoint.generation),
                witness: Some(Witness::new(endpoint, core.now())),
                learns: path.path() == RESPONSES,
            })
        })
    }

    /// The same, for an engine that the driver chose.
    pub(super) fn of_granted(
        core: &Rc<Core>,
        engine: &EngineId,
        generation: Generation,
        path: &PathAndQuery,
    ) -> Option<Box<Self>> {
        let routes = core.shared.control.routes();
        let route = routes.models.get(&engine.model).filter(|route| is_plural(route))?;
        let is = |e: &&Endpoint| e.engine == *engine && e.generation == generation;
        Some(Box::new(Self {
            core: Rc::clone(core),
            author: (engine.clone(), generation),
            witness: route.endpoints.iter().find(is).map(|endpoint| Witness::new(endpoint, core.now())),
            learns: path.path() == RESPONSES,
        }))
    }

    /// Its answer must be read for its id.
    pub(super) const fn learns(&self) -> bool {
        self.learns
    }

    pub(super) fn head(&mut self, status: StatusCode, track: &Track) {
        self.learns &= status.is_success();
        let change = self.witness.as_mut().and_then(|witness| witness.head(status, || self.core.now()));
        self.note(change, track);
    }

    pub(super) fn first_byte(&mut self, track: &Track) {
        let change = self.witness.as_mut().and_then(|witness| witness.first_byte(|| self.core.now()));
        self.note(change, track);
    }

    pub(super) fn frame(&mut self, facts: &Facts) {
        if let Some(response) = facts.id
            && std::mem::take(&mut self.learns)
        {
            self.core.shared.authors.remember(response, self.author.clone(), self.core.now());
        }
    }

    /// Where it went.
    pub(super) const fn author(&self) -> &Author {
        &self.author
    }

    pub(super) fn ended(&mut self, outcome: &Outcome, track: &Track) {
        let change = self.witness.as_mut().and_then(|witness| witness.ended(outcome, || self.core.now()));
        self.note(change, track);
    }

    fn note(&self, change: Option<Change>, track: &Track) {
        let Some(change) = change else { return };
        let engine = &self.author.0;
        match change {
            Change::LeftOut(pause) => tracing::warn!(
                %engine,
                %pause,
                "its requests fail: new ones go to the model's other engines, as long as half of them are left"
            ),
            Change::Back => tracing::info!(%engine, "answers again: it gets its share of requests"),
        }
        let routes = self.core.shared.control.routes();
        let left_out = routes.models.get(&engine.model).map_or(0, |route| route.left_out());
        track.left_out(left_out, change != Change::Back);
    }
}

/// The hash of the session that the client says it belongs to.
pub(super) fn session(headers: &HeaderMap) -> Option<u64> {
    headers.get(SESSION).map(|value| openai::hash(value.as_bytes()))
}

/// The hash of what a proxy says of whom it asks for. A hint that anybody can give: nothing but turns may go by it.
pub(super) fn forwarded(headers: &HeaderMap) -> Option<u64> {
    headers.get(FORWARDED).map(|value| openai::hash(value.as_bytes()))
}

async fn prefix(beginning: &Beginning, body: &Bytes) -> Option<u64> {
    if body.len() <= OFF_CORE {
        return beginning.hash(body);
    }
    // The first message may be nearly all of it: away from this core's streams.
    let (beginning, body) = (beginning.clone(), body.clone());
    tokio::task::spawn_blocking(move || beginning.hash(&body)).await.ok()?
}

/// Its model may have several engines.
pub(super) fn is_plural(route: &Route) -> bool {
    route.replicas > 1 || route.endpoints.len() > 1
}

#[cfg(test)]
mod tests;
