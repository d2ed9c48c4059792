//! Executes commands of the pairing logic.
//!
//! Each command is a task of its own, so one hanging Pod delays no other. Every call has a deadline, names its leader,
//! and has exactly one outcome. A replaced leader's tasks are dropped, and stubs and objects refuse its late calls.

mod canary;
mod engine;
mod execution_log;
mod launcher_engine;
mod launcher_pod;
mod requester;
mod stub_orders;

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use kube::{Api, Client};
use rouse::{
    pairing::{
        command::{EngineStep, PairingAction, PairingCommand, RequesterStep},
        event::{CommandFailure, CommandReply, PairingEvent},
        ids::RequesterId,
    },
    units::{Millis, Tick},
};
use rouse_net::{http_client::HttpClientError, lease::TickClock};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    command_context::CommandContext,
    index::{ProviderPod, RequesterPod},
    memory_baseline::MemoryBaseline,
};
use crate::{
    crd::{
        fma::{FmaStatus, GROUP, LauncherPopulationPolicy},
        ledger::ObjectName,
    },
    dual_pods::{admission_denial, keys},
    metrics::DualPodMetrics,
    writer::{
        self, ObjectWriter,
        fence::{Fence, SeenObject},
    },
};

/// Shared parts for executing any command.
pub(super) struct Executor {
    pub(super) client: Client,
    pub(super) writer: ObjectWriter,
    pub(super) clock: TickClock,
    pub(super) settings: super::PairingControllerSettings,
    pub(super) metrics: DualPodMetrics,
}

/// A command's outcome as an event, with what the requester's user should know.
#[derive(Debug)]
pub(crate) struct ExecutionResult {
    pub(super) event: PairingEvent,
    /// The requester that the command served.
    pub(super) requester: Option<RequesterId>,
    pub(super) error: Option<String>,
    /// The requester's error no longer applies.
    pub(super) clears_error: bool,
    /// The requester's gate was opened.
    pub(super) served: bool,
    /// Memory in use on the accelerators before an engine was started.
    pub(super) baseline: Option<MemoryBaseline>,
}

/// Why a command had no known effect, and what its user should know.
#[derive(Debug)]
pub(super) struct ExecutionError {
    cause: CommandFailure,
    /// For the log, and for the user if `user_facing`.
    text: String,
    user_facing: bool,
    /// A newer leader gives orders.
    superseded: bool,
}

type ExecutionOutcome = Result<CommandReply, ExecutionError>;

impl ExecutionResult {
    /// Whether the command succeeded.
    pub(super) const fn is_success(&self) -> bool {
        matches!(self.event, PairingEvent::Outcome { result: Ok(_), .. })
    }
}

impl Executor {
    /// Executes a command to its one outcome.
    pub(super) async fn execute(self: Arc<Self>, context: CommandContext) -> ExecutionResult {
        let started = Instant::now();
        let baseline = self.memory_baseline(&context).await;
        let outcome = match &context.command.action {
            PairingAction::Requester { step, .. } => self.execute_requester_step(&context, step).await,
            PairingAction::Engine { engine, generation, step } => {
                self.execute_engine_step(&context, engine, *generation, step).await
            }
            PairingAction::Provider { provider, step } => {
                self.execute_launcher_step(&context, provider, step).await
            }
        };
        let PairingCommand { node, serial, action, .. } = &context.command;
        let requester = context.requester.as_ref().map(|requester| requester.id.clone());
        let (mut error, took) = (None, started.elapsed());
        if outcome.is_ok() {
            execution_log::log_executed(&context, took);
        }
        if matches!(outcome, Err(ExecutionError { superseded: true, .. })) {
            tracing::warn!(
                %node,
                command = %action,
                "command rejected: a newer leader is active, this gateway stops deciding"
            );
            let event = PairingEvent::Superseded { epoch: context.command.epoch };
            return ExecutionResult {
                event,
                requester,
                error,
                clears_error: false,
                served: false,
                baseline: None,
            };
        }
        let result = outcome.map_err(|failed| {
            let ExecutionError { cause, text, user_facing, .. } = failed;
            let took = Millis::from(took);
            tracing::warn!(%node, command = %action, ?cause, error = text, duration = %took, "command failed");
            error = user_facing.then_some(text);
            cause
        });
        let mended = result.is_ok() && unblocks_requester(action);
        let served = result.is_ok()
            && matches!(action, PairingAction::Engine { step: EngineStep::OpenGate { .. }, .. });
        let event =
            PairingEvent::Outcome { node: node.clone(), target: action.target(), serial: *serial, result };
        ExecutionResult { event, requester, error, clears_error: mended, served, baseline }
    }

    /// Writes a requester's annotations. A failure is only logged: the content can be determined again.
    pub(super) async fn annotate(&self, name: &ObjectName, seen: &SeenObject, annotations: &Value) {
        if let Err(failed) = self.write_annotations(name, seen, annotations).await {
            tracing::debug!(%name, error = failed.text, "requester annotations not written");
        }
    }

    /// Writes a requester's status; under Rouse's own key if an admission policy reserves the public project's.
    pub(super) async fn write_status(&self, name: &ObjectName, seen: &SeenObject, text: &str) {
        let public = json!({keys::STATUS: text, keys::OWN_STATUS: null});
        match self.write_annotations(name, seen, &public).await {
            Err(ExecutionError { user_facing: true, .. }) => {
                self.annotate(name, seen, &json!({keys::OWN_STATUS: text})).await
            }
            Err(failed) => tracing::debug!(%name, error = failed.text, "requester status not written"),
            Ok(_) => {}
        }
    }

    async fn write_annotations(
        &self,
        name: &ObjectName,
        seen: &SeenObject,
        annotations: &Value,
    ) -> ExecutionOutcome {
        let epoch = self.writer.leadership()?.epoch;
        let patch = json!({"metadata": {"annotations": annotations}});
        self.patch(name, &Fence::new(seen.clone(), epoch), &patch).await
    }

    /// Writes a LauncherPopulationPolicy's status. Returns false if a retry may help.
    pub(super) async fn write_policy_status(&self, policy: &ObjectName, status: &FmaStatus) -> bool {
        match self.replace_policy_status(policy, status).await {
            Ok(()) | Err(writer::Error::Gone | writer::Error::NotLeading) => true,
            Err(error) => {
                tracing::warn!(%policy, %error, "LauncherPopulationPolicy status not written");
                false
            }
        }
    }

    async fn replace_policy_status(
        &self,
        policy: &ObjectName,
        status: &FmaStatus,
    ) -> Result<(), writer::Error> {
        let api: Api<LauncherPopulationPolicy> = Api::namespaced(self.client.clone(), &policy.namespace);
        let found = self.writer.get(&api, &policy.name).await?.ok_or(writer::Error::Gone)?;
        // A newer generation gets a status of its own.
        if found.metadata.generation != status.observed_generation {
            return Ok(());
        }
        let object = json!({
            "apiVersion": format!("{GROUP}/v1alpha1"),
            "kind": "LauncherPopulationPolicy",
            "metadata": {
                "name": policy.name,
                "namespace": policy.namespace,
                "resourceVersion": found.metadata.resource_version,
            },
            "status": status,
        });
        self.writer.apply_status(&api, &policy.name, &object).await.map(drop)
    }

    fn pods(&self, name: &ObjectName) -> Api<Pod> {
        Api::namespaced(self.client.clone(), &name.namespace)
    }

    async fn get_pod(&self, name: &ObjectName) -> Result<Option<Pod>, ExecutionError> {
        Ok(self.writer.get(&self.pods(name), &name.name).await?)
    }

    async fn patch_requester(
        &self,
        context: &CommandContext,
        requester: &RequesterPod,
        patch: &Value,
    ) -> ExecutionOutcome {
        self.patch(&requester.name, &context.fence(&requester.seen), patch).await
    }

    async fn patch_provider(
        &self,
        context: &CommandContext,
        provider: &ProviderPod,
        patch: &Value,
    ) -> ExecutionOutcome {
        self.patch(&provider.name, &context.fence(&provider.seen), patch).await
    }

    /// Applies a strategic merge patch, which keeps others' finalizers. A Pod that is gone needs no change.
    async fn patch(&self, name: &ObjectName, fence: &Fence, patch: &Value) -> ExecutionOutcome {
        match Box::pin(self.writer.patch_fenced(&self.pods(name), &name.name, fence, patch)).await {
            Ok(()) | Err(writer::Error::Gone) => Ok(CommandReply::Done),
            Err(error) => Err(error.into()),
        }
    }

    /// Deletes this Pod, unless another leader has written it since the decision.
    async fn delete(&self, name: &ObjectName, fence: &Fence) -> ExecutionOutcome {
        Box::pin(self.writer.delete_fenced(&self.pods(name), &name.name, fence)).await?;
        Ok(CommandReply::Done)
    }

    fn now(&self) -> Tick {
        self.clock.now()
    }
}

/// Whether the success of this command clears its requester's error.
///
/// A stop of a failed engine does not, and neither does a launch: the launched process may end at once.
const fn unblocks_requester(action: &PairingAction) -> bool {
    use EngineStep::{Create, OpenGate, SendCanary, Wake};
    matches!(
        action,
        PairingAction::Engine { step: Create { .. } | SendCanary | OpenGate { .. } | Wake { .. }, .. }
            | PairingAction::Requester { step: RequesterStep::QueryAccelerators { .. }, .. }
    )
}

impl ExecutionError {
    pub(super) fn unknown(what: &str) -> Self {
        Self {
            cause: CommandFailure::Unreachable,
            text: format!("{what} is unknown"),
            user_facing: false,
            superseded: false,
        }
    }

    fn refused(text: impl Into<String>) -> Self {
        Self { cause: CommandFailure::Refused, text: text.into(), user_facing: false, superseded: false }
    }

    fn superseded() -> Self {
        Self { superseded: true, ..Self::refused("a newer leader is active") }
    }

    /// An error that the requester's user has to fix.
    fn user_error(text: impl Into<String>) -> Self {
        Self { user_facing: true, ..Self::refused(text) }
    }
}

impl From<writer::Error> for ExecutionError {
    fn from(error: writer::Error) -> Self {
        let cause = match &error {
            writer::Error::Conflict => CommandFailure::Conflict,
            writer::Error::Gone | writer::Error::Invalid(_) => CommandFailure::Refused,
            writer::Error::NotLeading | writer::Error::Timeout | writer::Error::Api(_) => {
                CommandFailure::Unreachable
            }
        };
        let advice = match &error {
            writer::Error::Invalid(refusal) => admission_denial::advice(refusal),
            _ => None,
        };
        let user_facing = advice.is_some();
        Self { cause, text: advice.unwrap_or_else(|| error.to_string()), user_facing, superseded: false }
    }
}

impl From<HttpClientError> for ExecutionError {
    fn from(failure: HttpClientError) -> Self {
        Self {
            cause: CommandFailure::Unreachable,
            text: failure.to_string(),
            user_facing: false,
            superseded: false,
        }
    }
}
