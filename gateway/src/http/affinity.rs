//! Engine affinity of a request, and the feedback of each attempt to later choices.
//!
//! Applies only to models that may have several engines. All other requests pay for one comparison.

use std::rc::Rc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, uri::PathAndQuery};
use rouse::model::EngineId;
use rouse_config::AffinityPolicy;
use rouse_net::{
    lease::Lease,
    openai::{
        self,
        routing_fields::{ConversationKey, ConversationPrefix, MAX_ON_CORE_BYTES, RoutingFields},
        sse::ResponseFacts,
    },
    relay::ExchangeOutcome,
};

use super::{WorkerContext, request_context::RequestContext};
use crate::routing::{
    BreakerTransition, Endpoint, EndpointCriteria, EngineGeneration, ModelRoute, OutlierReporter,
};

/// The header that names a client's session. Other routers in front of inference servers read it too.
const SESSION_HEADER: HeaderName = HeaderName::from_static("x-session-id");
/// The path whose responses a later request may continue.
const RESPONSES_PATH: &str = "/v1/responses";

/// Hashes of what a request's body refers to: a previous response, a session, a prefix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AffinityKeys {
    previous_response: Option<u64>,
    session: Option<u64>,
    prefix: Option<ConversationKey>,
    affinity: AffinityPolicy,
}

impl AffinityKeys {
    /// Extracts the keys from the body. `plural`: its model may have several engines.
    pub(super) async fn from_request(
        head: &RoutingFields<'_>,
        body: &Bytes,
        plural: bool,
        affinity: AffinityPolicy,
    ) -> Self {
        let prefix = if affinity == AffinityPolicy::Prefix && plural {
            conversation_key(&head.prefix, body).await
        } else {
            None
        };
        Self { previous_response: head.previous_response_hash, session: head.session_hash, prefix, affinity }
    }

    /// Takes a lease on the engine that fits best. `may_park`: whether the request waits if there is none.
    pub(super) fn take_lease<'r>(
        &self,
        worker: &WorkerContext,
        route: &'r ModelRoute,
        headers: &HeaderMap,
        avoid: Option<&EngineId>,
        may_park: bool,
    ) -> Option<(&'r Endpoint, Lease)> {
        let now = || worker.now();
        let rng = &worker.rng;
        let (owner, session, prefix) = (None, None, None);
        let mut criteria =
            EndpointCriteria { owner, session, prefix, exclude: avoid, may_park, rng, now: &now };
        if route.endpoints.len() < 2 {
            return route.take_lease(&criteria);
        }
        if self.affinity != AffinityPolicy::None {
            // The header is an explicit session of the client; the body's key is meant for the engine's cache.
            criteria.session = session_hash(headers).or(self.session);
        }
        if self.affinity == AffinityPolicy::Prefix {
            criteria.prefix = self.prefix;
        }
        let owner = self.owner(worker);
        criteria.owner = owner.as_ref();
        route.take_lease(&criteria)
    }

    /// The only engine generation that can answer this request. `None`: any engine can, or that generation is not in
    /// the routes.
    pub(super) fn required_owner(
        &self,
        worker: &WorkerContext,
        route: &ModelRoute,
    ) -> Option<EngineGeneration> {
        let owner = is_multi_engine(route).then(|| self.owner(worker))??;
        route.endpoint_of(&owner).is_some().then_some(owner)
    }

    fn owner(&self, worker: &WorkerContext) -> Option<EngineGeneration> {
        self.previous_response
            .and_then(|previous| worker.server.response_owners.owner_of(previous, worker.now()))
    }
}

/// One attempt at one of several engines. Boxed, because most models have one engine and their streams hold no attempt.
pub(crate) struct EndpointAttempt {
    worker: Rc<WorkerContext>,
    engine: EngineGeneration,
    /// `None`: the engine is not in the routes, so no request chooses it and its outcomes need no record.
    outlier_reporter: Option<OutlierReporter>,
    /// The response can be continued, and its id is not known yet.
    records_response_id: bool,
}

impl EndpointAttempt {
    /// Starts an attempt. `None`: the model never has a choice of engines.
    pub(super) fn new(
        worker: &Rc<WorkerContext>,
        route: &ModelRoute,
        endpoint: &Endpoint,
        path: &PathAndQuery,
    ) -> Option<Box<Self>> {
        is_multi_engine(route).then(|| {
            Box::new(Self {
                worker: Rc::clone(worker),
                engine: (endpoint.engine.clone(), endpoint.generation),
                outlier_reporter: Some(OutlierReporter::new(endpoint, worker.now())),
                records_response_id: path.path() == RESPONSES_PATH,
            })
        })
    }

    /// Like [`Self::new`], for an engine that the driver chose. `endpoint`: its endpoint, if it is in the routes.
    pub(super) fn for_granted(
        worker: &Rc<WorkerContext>,
        route: &ModelRoute,
        engine: EngineGeneration,
        endpoint: Option<&Endpoint>,
        path: &PathAndQuery,
    ) -> Option<Box<Self>> {
        is_multi_engine(route).then(|| {
            Box::new(Self {
                worker: Rc::clone(worker),
                engine,
                outlier_reporter: endpoint.map(|endpoint| OutlierReporter::new(endpoint, worker.now())),
                records_response_id: path.path() == RESPONSES_PATH,
            })
        })
    }

    /// Whether the response must be parsed for its id.
    pub(super) const fn records_response_id(&self) -> bool {
        self.records_response_id
    }

    pub(super) fn head(&mut self, status: StatusCode, context: &RequestContext) {
        self.records_response_id &= status.is_success();
        let change =
            self.outlier_reporter.as_mut().and_then(|reporter| reporter.head(status, || self.worker.now()));
        self.report_transition(change, context);
    }

    pub(super) fn first_byte(&mut self, context: &RequestContext) {
        let change =
            self.outlier_reporter.as_mut().and_then(|reporter| reporter.first_byte(|| self.worker.now()));
        self.report_transition(change, context);
    }

    pub(super) fn frame(&mut self, facts: &ResponseFacts) {
        if let Some(response) = facts.id
            && std::mem::take(&mut self.records_response_id)
        {
            self.worker.server.response_owners.remember(response, self.engine.clone(), self.worker.now());
        }
    }

    /// The engine generation of this attempt.
    pub(super) const fn engine(&self) -> &EngineGeneration {
        &self.engine
    }

    pub(super) fn ended(&mut self, outcome: &ExchangeOutcome, context: &RequestContext) {
        let change =
            self.outlier_reporter.as_mut().and_then(|reporter| reporter.ended(outcome, || self.worker.now()));
        self.report_transition(change, context);
    }

    fn report_transition(&self, transition: Option<BreakerTransition>, context: &RequestContext) {
        let Some(change) = transition else { return };
        let engine = &self.engine.0;
        match change {
            BreakerTransition::Ejected(pause) => tracing::warn!(
                %engine,
                %pause,
                "engine ejected: its requests fail, so new requests go to the model's other engines while at least half of them remain"
            ),
            BreakerTransition::Restored => {
                tracing::info!(%engine, "engine restored: it answers again and gets its share of requests")
            }
        }
        let routes = self.worker.server.driver.routes();
        let left_out = routes.models.get(&engine.model).map_or(0, |route| route.ejected_count());
        context.set_ejected(left_out, change != BreakerTransition::Restored);
    }
}

/// The hash of the session that the client names.
pub(super) fn session_hash(headers: &HeaderMap) -> Option<u64> {
    headers.get(SESSION_HEADER).map(|value| openai::stable_hash(value.as_bytes()))
}

async fn conversation_key(prefix: &ConversationPrefix, body: &Bytes) -> Option<ConversationKey> {
    if body.len() <= MAX_ON_CORE_BYTES {
        return prefix.key(body);
    }
    // The first message may be most of the body: hash it off this core, which serves streams.
    let (beginning, body) = (prefix.clone(), body.clone());
    tokio::task::spawn_blocking(move || beginning.key(&body)).await.ok()?
}

/// Whether the route's model may have several engines.
pub(super) fn is_multi_engine(route: &ModelRoute) -> bool {
    route.replicas > 1 || route.endpoints.len() > 1
}

#[cfg(test)]
mod tests;
