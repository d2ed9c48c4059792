//! Executes commands about requesters.

use rouse::{
    pairing::{
        command::RequesterStep,
        event::{CommandFailure, CommandReply},
    },
    units::Generation,
};
use serde_json::{Value, json};

use super::{CommandContext, ExecutionError, ExecutionOutcome, Executor};
use crate::{
    dual_pods::{
        index::{ProviderPod, RequesterPod},
        keys::{ACCELERATORS, DUAL, REQUESTER_FINALIZER, SERVER_IP, join_ids},
    },
    stub_client::{StubClient, StubClientError},
    workload::merge,
};

impl Executor {
    pub(super) async fn execute_requester_step(
        &self,
        context: &CommandContext,
        step: &RequesterStep,
    ) -> ExecutionOutcome {
        let requester = context.requester()?;
        match step {
            RequesterStep::QueryAccelerators { close_gate: gate } => {
                let stub = stub(context, requester, Generation::default())?;
                let (found, gated) = tokio::join!(accelerators(&stub), async {
                    if *gate { close(&stub).await } else { Ok(CommandReply::Done) }
                });
                gated.and(found)
            }
            RequesterStep::CloseGate => close(&stub(context, requester, Generation::default())?).await,
            RequesterStep::Delete { .. } => {
                self.delete(&requester.name, &context.fence(&requester.seen)).await
            }
            RequesterStep::SetFinalizer { present } => self.set_finalizer(context, requester, *present).await,
            RequesterStep::Release => {
                stub(context, requester, Generation::default())?.release().await?;
                Ok(CommandReply::Done)
            }
        }
    }

    /// Adds or removes the requester's finalizer.
    ///
    /// Adding it also records the stub's accelerators, so that the next leader need not query them, and the provider,
    /// which saves a write once the engine serves.
    async fn set_finalizer(
        &self,
        context: &CommandContext,
        requester: &RequesterPod,
        present: bool,
    ) -> ExecutionOutcome {
        let mut metadata = json!({});
        if present {
            if let Ok(provider) = context.provider() {
                metadata = provider_metadata(provider);
            }
            let written = json!({ACCELERATORS: join_ids(&context.accelerators)});
            let more = json!({"finalizers": [REQUESTER_FINALIZER], "annotations": written});
            merge::into(&mut metadata, &more);
        } else {
            merge::into(
                &mut metadata,
                &json!({"$deleteFromPrimitiveList/finalizers": [REQUESTER_FINALIZER]}),
            );
        }
        self.patch_requester(context, requester, &json!({"metadata": metadata})).await
    }
}

/// Builds a requester's metadata: its provider and its engine's address.
pub(super) fn provider_metadata(provider: &ProviderPod) -> Value {
    json!({
        "labels": {DUAL: provider.name.name},
        "annotations": {SERVER_IP: provider.ip()},
    })
}

async fn close(stub: &StubClient) -> ExecutionOutcome {
    stub.set_ready(false).await?;
    stub.ensure_gate_closed().await?;
    Ok(CommandReply::Done)
}

async fn accelerators(stub: &StubClient) -> ExecutionOutcome {
    let found = stub.accelerators().await?;
    if found.is_empty() {
        return Err(ExecutionError::user_error(
            "the stub reports that its Pod has no accelerator: request some in resources.limits",
        ));
    }
    Ok(CommandReply::Accelerators(found))
}

/// Returns a client of the requester's stub.
pub(super) fn stub(
    context: &CommandContext,
    requester: &RequesterPod,
    generation: Generation,
) -> Result<StubClient, ExecutionError> {
    let address = requester.stub_address.ok_or_else(|| ExecutionError::unknown("the stub's address"))?;
    let stub = StubClient::new(address, context.token.clone(), context.command.epoch.0, generation);
    Ok(stub.for_requester(context.call_metrics()))
}

impl From<StubClientError> for ExecutionError {
    fn from(error: StubClientError) -> Self {
        let (status, text) = match error {
            StubClientError::Unreachable(failure) => return failure.into(),
            StubClientError::GateReopened | StubClientError::Overtaken => {
                return Self::refused(error.to_string());
            }
            StubClientError::Conflict { newer_epoch: true, .. } => return Self::superseded(),
            StubClientError::Conflict { text, .. } | StubClientError::Busy(text) => (409, text),
            StubClientError::Unauthorized(text) => (401, text),
            StubClientError::StaysAwake(text) => (502, text),
            StubClientError::Refused { status, text } => (status, text),
        };
        let cause = if status == 409 { CommandFailure::Conflict } else { CommandFailure::Refused };
        Self { cause, ..Self::refused(format!("the stub answered {status}: {}", text.trim())) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_409_is_a_conflict_and_only_a_newer_epoch_supersedes() {
        let conflict = |newer_epoch| StubClientError::Conflict { newer_epoch, text: "no\n".to_owned() };
        let superseded = ExecutionError::from(conflict(true));
        assert!(superseded.superseded, "{superseded:?}");
        for (error, cause, status) in [
            (conflict(false), CommandFailure::Conflict, 409),
            (StubClientError::Busy("no".to_owned()), CommandFailure::Conflict, 409),
            (StubClientError::Unauthorized("no".to_owned()), CommandFailure::Refused, 401),
            (StubClientError::StaysAwake("no".to_owned()), CommandFailure::Refused, 502),
            (StubClientError::Refused { status: 404, text: "no".to_owned() }, CommandFailure::Refused, 404),
        ] {
            let failed = ExecutionError::from(error);
            assert_eq!((failed.cause, failed.superseded), (cause, false));
            assert_eq!(failed.text, format!("the stub answered {status}: no"));
        }
    }
}
