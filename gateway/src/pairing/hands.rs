//! Carrying out what was decided.
//!
//! Each order is a task of its own, so that one Pod that hangs delays nobody. Every call has a deadline, says which leader it is
//! from, and has exactly one outcome; a leader that was replaced has its tasks dropped, and stubs and objects refuse what it had
//! on its way.

mod engine;
mod inside;
mod prove;
mod provider;
mod record;
mod requester;
mod spi;

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use rouse::{
    caller::Failure,
    lease::Clock,
    pairing::{
        command::{Command, OfRequester, Order, Step},
        event::{Answer, Cause, Event},
        ids::RequesterId,
    },
    units::{Millis, Tick},
};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{job::Job, proof::Before};
use crate::{
    controllers::{
        crd::{
            fma::{GROUP, LauncherPopulationPolicy, Status},
            ledger::ObjectName,
        },
        dual::{denied, keys},
        writer::{self, Writer},
    },
    metrics::Duals,
};

/// What a task needs to carry out any order.
pub(super) struct Hands {
    pub(super) client: Client,
    pub(super) writer: Writer,
    pub(super) clock: Clock,
    pub(super) settings: super::Settings,
    pub(super) metrics: Duals,
}

/// What became of an order, in the decisions' words; what the requester's user should know of it.
#[derive(Debug)]
pub(super) struct Done {
    pub(super) event: Event,
    /// For whom it was done.
    pub(super) requester: Option<RequesterId>,
    pub(super) error: Option<String>,
    /// Nothing is in its way any more.
    pub(super) mended: bool,
    /// Its gate was opened.
    pub(super) served: bool,
    /// What was in use of its accelerators before an engine was started.
    pub(super) before: Option<Before>,
}

/// Why an order had no effect that is known, and what its user is told.
#[derive(Debug)]
pub(super) struct Failed {
    cause: Cause,
    /// For the log, and for the user where `tell` says so.
    text: String,
    tell: bool,
    /// Somebody obeys a younger leader.
    deposed: bool,
}

type Outcome = Result<Answer, Failed>;

impl Done {
    /// The order was carried out.
    pub(super) const fn is_well(&self) -> bool {
        matches!(self.event, Event::Outcome { result: Ok(_), .. })
    }
}

impl Hands {
    /// Does it, whatever it takes.
    pub(super) async fn carry_out(self: Arc<Self>, job: Job) -> Done {
        let begun = Instant::now();
        let before = self.before(&job).await;
        let outcome = match &job.command.order {
            Order::Requester { step, .. } => self.requester(&job, step).await,
            Order::Engine { engine, generation, step } => self.engine(&job, engine, *generation, step).await,
            Order::Provider { provider, step } => self.launcher(&job, provider, step).await,
        };
        let Command { node, serial, order, .. } = &job.command;
        let requester = job.requester.as_ref().map(|own| own.id.clone());
        let (mut error, took) = (None, begun.elapsed());
        if outcome.is_ok() {
            record::carried_out(&job, took);
        }
        if matches!(outcome, Err(Failed { deposed: true, .. })) {
            tracing::warn!(%node, %order, "a younger leader is obeyed: nothing more is decided here");
            let event = Event::Deposed { epoch: job.command.epoch };
            return Done { event, requester, error, mended: false, served: false, before: None };
        }
        let result = outcome.map_err(|failed| {
            let Failed { cause, text, tell, .. } = failed;
            let took = Millis::from(took);
            tracing::warn!(%node, %order, ?cause, text, %took, "an order was not carried out");
            error = tell.then_some(text);
            cause
        });
        let mended = result.is_ok() && serves(order);
        let served = result.is_ok() && matches!(order, Order::Engine { step: Step::Open { .. }, .. });
        let event = Event::Outcome { node: node.clone(), target: order.target(), serial: *serial, result };
        Done { event, requester, error, mended, served, before }
    }

    /// What a requester's user is told; not told, it is found out again.
    pub(super) async fn note(&self, name: &ObjectName, patch: &Value) {
        if let Err(failed) = self.patch(name, patch).await {
            tracing::debug!(%name, text = failed.text, "a requester was not told");
        }
    }

    /// Its status: under Rouse's own name where a policy keeps the public project's for others.
    pub(super) async fn tell_status(&self, name: &ObjectName, id: &RequesterId, text: &str) {
        let patch =
            |annotations: Value| json!({"metadata": {"uid": id.as_str(), "annotations": annotations}});
        let public = patch(json!({keys::STATUS: text, keys::OWN_STATUS: null}));
        match self.patch(name, &public).await {
            Err(Failed { tell: true, .. }) => self.note(name, &patch(json!({keys::OWN_STATUS: text}))).await,
            Err(failed) => tracing::debug!(%name, text = failed.text, "a requester was not told"),
            Ok(_) => {}
        }
    }

    /// Writes the status of a LauncherPopulationPolicy; false: it may be tried again.
    pub(super) async fn judge(&self, policy: &ObjectName, status: &Status) -> bool {
        let api: Api<LauncherPopulationPolicy> = Api::namespaced(self.client.clone(), &policy.namespace);
        let object = json!({
            "apiVersion": format!("{GROUP}/v1alpha1"),
            "kind": "LauncherPopulationPolicy",
            "metadata": {"name": policy.name, "namespace": policy.namespace},
            "status": status,
        });
        match self.writer.apply_status(&api, &policy.name, &object).await {
            Ok(_) | Err(writer::Error::Gone | writer::Error::NotLeading) => true,
            Err(error) => {
                tracing::warn!(%policy, %error, "the status of a LauncherPopulationPolicy was not written");
                false
            }
        }
    }

    fn pods(&self, name: &ObjectName) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &name.namespace)
    }

    async fn look(&self, name: &ObjectName) -> Result<Option<Pod>, Failed> {
        Ok(self.writer.look(&self.pods(name), &name.name).await?)
    }

    /// Merges as Kubernetes does it, so that finalizers of others stay. A Pod that is gone needs no change.
    async fn patch(&self, name: &ObjectName, patch: &Value) -> Outcome {
        match self.writer.strategic(&self.pods(name), &name.name, patch).await {
            Ok(_) | Err(writer::Error::Gone) => Ok(Answer::Done),
            Err(error) => Err(error.into()),
        }
    }

    fn now(&self) -> Tick {
        self.clock.now()
    }
}

/// Once this was carried out, nothing is in the way of what a requester asks for: to end what failed is no such order, and a
/// process that was launched may end at once.
const fn serves(order: &Order) -> bool {
    use Step::{Create, Open, Prove, Wake};
    matches!(
        order,
        Order::Engine { step: Create { .. } | Prove | Open { .. } | Wake { .. }, .. }
            | Order::Requester { step: OfRequester::Accelerators { .. }, .. }
    )
}

impl Failed {
    pub(super) fn lost(what: &str) -> Self {
        Self { cause: Cause::Unreachable, text: format!("{what} is not known"), tell: false, deposed: false }
    }

    fn refused(text: impl Into<String>) -> Self {
        Self { cause: Cause::Refused, text: text.into(), tell: false, deposed: false }
    }

    fn deposed() -> Self {
        Self { deposed: true, ..Self::refused("a younger leader is obeyed") }
    }

    /// The requester's user has to mend it.
    fn user(text: impl Into<String>) -> Self {
        Self { tell: true, ..Self::refused(text) }
    }
}

impl From<writer::Error> for Failed {
    fn from(error: writer::Error) -> Self {
        let cause = match &error {
            writer::Error::Conflict => Cause::Conflict,
            writer::Error::Gone | writer::Error::Invalid(_) => Cause::Refused,
            writer::Error::NotLeading | writer::Error::Late | writer::Error::Api(_) => Cause::Unreachable,
        };
        let advice = match &error {
            writer::Error::Invalid(refusal) => denied::advice(refusal),
            _ => None,
        };
        let tell = advice.is_some();
        Self { cause, text: advice.unwrap_or_else(|| error.to_string()), tell, deposed: false }
    }
}

impl From<Failure> for Failed {
    fn from(failure: Failure) -> Self {
        Self { cause: Cause::Unreachable, text: failure.to_string(), tell: false, deposed: false }
    }
}
