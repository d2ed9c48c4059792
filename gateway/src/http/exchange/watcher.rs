//! What an exchange with an engine tells the account of its request.

use std::rc::Rc;

use http::StatusCode;
use rouse::{
    fault::{Fault, Phase, Timer},
    openai::{self, sse::Facts},
    relay::{Observer, Outcome},
    units::Millis,
};
use tokio::time::Instant;

use crate::{
    http::{Core, affinity::Attempted, track::Track},
    keys::Bill,
};

/// Tells the account of a request what its exchange does.
pub(crate) struct Watcher {
    pub(super) core: Rc<Core>,
    pub(super) track: Rc<Track>,
    pub(super) attempted: Option<Box<Attempted>>,
    pub(super) bill: Option<Rc<Bill>>,
    /// The engine's head came: a failure from here on is the client's to see, one before may yet be made good.
    pub(super) answered: bool,
}

impl Watcher {
    /// Nothing came in the time that was allowed. Looked for by its name, so that no request has to carry the way to it: an
    /// engine that was taken out of the routes meanwhile needs no opinion.
    fn unanswered(&self, allowed: Millis, now: Instant) {
        let control = &self.core.shared.control;
        let Some(model) = self.track.names() else { return };
        let routes = control.routes();
        let Some(route) = routes.models.get(&model) else { return };
        let endpoint = match &self.attempted {
            Some(attempted) => route.author(attempted.author()),
            None => route.endpoints.first(),
        };
        if let Some(endpoint) = endpoint {
            endpoint.unanswered(allowed, control.clock().at(now));
        }
    }
}

impl Observer for Watcher {
    fn connected(&mut self) {
        self.track.phase(Phase::Headers);
    }

    fn replayed(&mut self) {
        self.track.replayed();
        self.track.phase(Phase::Connecting);
    }

    fn head(&mut self, status: StatusCode) {
        self.answered = true;
        if let Some(bill) = &self.bill {
            bill.answered(status.is_success());
        }
        self.track.phase(Phase::Streaming);
        if let Some(attempted) = &mut self.attempted {
            attempted.head(status, &self.track);
        }
    }

    fn first_byte(&mut self) {
        if let Some(attempted) = &mut self.attempted {
            attempted.first_byte(&self.track);
        }
    }

    fn frame(&mut self, bytes: usize, facts: Option<&Facts>) {
        if let Some(bill) = &self.bill {
            bill.passes(bytes);
        }
        let Some(facts) = facts else { return };
        if let Some(usage) = facts.usage {
            self.track.usage(usage);
        }
        if let Some(attempted) = &mut self.attempted {
            attempted.frame(facts);
        }
        if let Some(bill) = &self.bill {
            bill.shows(facts);
        }
    }

    fn end(&mut self, outcome: Outcome, now: Instant) {
        if let Some(attempted) = &mut self.attempted {
            attempted.ended(&outcome, &self.track);
        }
        if let Some(bill) = &self.bill {
            bill.ended(&outcome, now);
        }
        if let Outcome::Failed(Fault::EngineTimeout { which, limit, .. }) = &outcome
            && matches!(which, Timer::FirstByte | Timer::NonStream)
        {
            self.unanswered(*limit, now);
        }
        match outcome {
            Outcome::Failed(fault) if self.answered => self.track.fault(&fault),
            Outcome::ClientLeft(phase) => self.track.phase(phase),
            Outcome::Failed(fault) => self.track.failed(openai::error::code(&fault)),
            Outcome::Complete => {}
        }
    }
}
