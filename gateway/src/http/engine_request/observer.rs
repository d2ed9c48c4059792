//! Records an exchange with an engine in its request's context.

use std::{rc::Rc, sync::Arc};

use http::StatusCode;
use rouse::{
    fault::{DisconnectPhase, ExchangeTimeout, Fault},
    units::Millis,
};
use rouse_net::{
    engine_load::EngineLoad,
    openai::{self, sse::ResponseFacts},
    relay::{ExchangeOutcome, RelayObserver},
};
use rouse_platform::EngineActivity;
use tokio::time::Instant;

use crate::{
    http::{WorkerContext, affinity::EndpointAttempt, request_context::RequestContext},
    keys::QuotaCharge,
};

pub(crate) struct RequestExchangeObserver {
    pub(super) worker: Rc<WorkerContext>,
    pub(super) context: Rc<RequestContext>,
    pub(super) attempt: Option<Box<EndpointAttempt>>,
    /// Where the load report of the engine's stub goes, if the request asks for one.
    pub(super) report_target: Option<Arc<EngineActivity>>,
    pub(super) quota_charge: Option<Rc<QuotaCharge>>,
    /// Whether the engine's head has arrived. A later failure is visible to the client; an earlier one may still be
    /// retried.
    pub(super) head_received: bool,
}

impl RequestExchangeObserver {
    /// Records that the engine sent nothing within the allowed time. Looks the endpoint up by name, so no request has
    /// to carry a reference to it. An engine that has left the routes meanwhile needs no record.
    fn record_unanswered(&self, allowed: Millis, now: Instant) {
        let control = &self.worker.server.driver;
        let Some(model) = self.context.model_name() else { return };
        let routes = control.routes();
        let Some(route) = routes.models.get(model) else { return };
        let endpoint = match &self.attempt {
            Some(attempted) => route.endpoint_of(attempted.engine()),
            None => route.endpoints.first(),
        };
        if let Some(endpoint) = endpoint {
            endpoint.record_unanswered(allowed, control.clock().tick_at(now));
        }
    }
}

impl RelayObserver for RequestExchangeObserver {
    fn connected(&mut self) {
        self.context.set_phase(DisconnectPhase::Headers);
    }

    fn replayed(&mut self) {
        self.context.retried();
        self.context.set_phase(DisconnectPhase::Connecting);
    }

    fn head(&mut self, status: StatusCode) {
        self.head_received = true;
        if let Some(charge) = &self.quota_charge {
            charge.head_received(status.is_success());
        }
        self.context.set_phase(DisconnectPhase::Streaming);
        if let Some(attempted) = &mut self.attempt {
            attempted.head(status, &self.context);
        }
    }

    fn load_report(&mut self, load: &EngineLoad) {
        if let Some(activity) = &self.report_target {
            activity.record_load(load, self.worker.now());
        }
    }

    fn first_byte(&mut self) {
        if let Some(attempted) = &mut self.attempt {
            attempted.first_byte(&self.context);
        }
    }

    fn frame(&mut self, bytes: usize, facts: Option<&ResponseFacts>) {
        if let Some(charge) = &self.quota_charge {
            charge.add_bytes_out(bytes);
        }
        let Some(facts) = facts else { return };
        self.context.set_tokens(match facts.usage {
            Some(usage) if facts.done => usage.completion,
            // Some engines count only at the beginning and at the end.
            Some(usage) => usage.completion.max(facts.events),
            None => facts.events,
        });
        if let Some(usage) = facts.usage {
            self.context.record_usage(usage);
        }
        if let Some(attempted) = &mut self.attempt {
            attempted.frame(facts);
        }
        if let Some(charge) = &self.quota_charge {
            charge.record_facts(facts);
        }
    }

    fn end(&mut self, outcome: ExchangeOutcome, now: Instant) {
        if let Some(attempted) = &mut self.attempt {
            attempted.ended(&outcome, &self.context);
        }
        if let Some(charge) = &self.quota_charge {
            charge.exchange_ended(&outcome, now);
        }
        if let ExchangeOutcome::Failed(Fault::EngineTimeout { timeout: which, limit, .. }) = &outcome
            && matches!(which, ExchangeTimeout::FirstByte | ExchangeTimeout::NonStream)
        {
            self.record_unanswered(*limit, now);
        }
        match outcome {
            ExchangeOutcome::Failed(fault) if self.head_received => self.context.record_fault(&fault),
            ExchangeOutcome::ClientLeft(phase) => self.context.set_phase(phase),
            ExchangeOutcome::Failed(fault) => self.context.record_failed_attempt(openai::error::code(&fault)),
            ExchangeOutcome::Complete => {}
        }
    }
}
