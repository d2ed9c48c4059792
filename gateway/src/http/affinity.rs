//! What ties a request to an engine, and what its attempt tells those who choose for the next ones.
//!
//! Only for models that may have several engines; for all others nothing here is more than a look at a number.

use std::rc::Rc;

use http::{HeaderMap, HeaderName, StatusCode};
use rouse::{model::EngineId, relay::Outcome, units::Generation};

use super::{Core, track::Track};
use crate::{
    config::Affinity,
    routes::{Author, Change, Endpoint, Route, Wanted, Witness},
};

/// By which a client says what belongs together: the field that routers in front of inference servers look at.
pub(crate) const SESSION: HeaderName = HeaderName::from_static("x-session-id");
/// Whose answers are gone on from.
const RESPONSES: &str = "/v1/responses";

/// What a request belongs to, as hashes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ties {
    session: Option<u64>,
    prefix: Option<u64>,
    previous: Option<u64>,
}

impl Ties {
    pub(crate) fn of(headers: &HeaderMap, affinity: Affinity) -> Self {
        let said = headers.get(SESSION).map(|value| hash(value.as_bytes()));
        Self { session: said.filter(|_| affinity != Affinity::None), prefix: None, previous: None }
    }

    /// Looks the author up, and gives what a choice needs.
    pub(super) fn wanted<R>(
        &self,
        core: &Core,
        avoid: Option<&EngineId>,
        choose: impl FnOnce(&Wanted<'_>) -> R,
    ) -> R {
        let known = |previous| core.shared.authors.of(previous, core.shared.control.clock().now());
        let author = self.previous.and_then(known);
        let (session, prefix) = (self.session, self.prefix);
        choose(&Wanted { author: author.as_ref(), session, prefix, avoid, lots: &core.lots })
    }
}

/// One attempt at one of several engines.
pub(crate) struct Attempted {
    core: Rc<Core>,
    track: Rc<Track>,
    author: Author,
    /// An engine that is not in the routes is not chosen, and needs no opinion.
    witness: Option<Witness>,
    /// Its answer can be gone on from, and is not known yet.
    learns: bool,
}

impl Attempted {
    pub(super) fn new(
        core: &Rc<Core>,
        track: &Rc<Track>,
        engine: &EngineId,
        generation: Generation,
        path: &str,
    ) -> Option<Self> {
        let routes = core.shared.control.routes();
        let route = routes.models.get(&engine.model).filter(|route| is_plural(route))?;
        let is = |e: &&Endpoint| e.engine == *engine && e.generation == generation;
        Some(Self {
            core: Rc::clone(core),
            track: Rc::clone(track),
            author: (engine.clone(), generation),
            witness: route.endpoints.iter().find(is).map(Witness::new),
            learns: path == RESPONSES,
        })
    }

    pub(super) fn head(&mut self, status: StatusCode) {
        self.learns &= status.is_success();
        let change = self.witness.as_mut().and_then(|witness| witness.head(status));
        self.note(change);
    }

    pub(super) fn first_byte(&mut self) {
        let change = self.witness.as_mut().and_then(Witness::first_byte);
        self.note(change);
    }

    /// The answer was seen to have this id.
    pub(super) fn made(&mut self, response: u64) {
        if std::mem::take(&mut self.learns) {
            let now = self.core.shared.control.clock().now();
            self.core.shared.authors.remember(response, self.author.clone(), now);
        }
    }

    pub(super) fn ended(&mut self, outcome: &Outcome) {
        let change = self.witness.as_mut().and_then(|witness| witness.ended(outcome));
        self.note(change);
    }

    fn note(&self, change: Option<Change>) {
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
        let left_out = routes.models.get(&engine.model).map_or(0, Route::left_out);
        self.track.left_out(left_out, change != Change::Back);
    }
}

fn is_plural(route: &Route) -> bool {
    route.replicas > 1 || route.endpoints.len() > 1
}

fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}
