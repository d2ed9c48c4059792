//! Orders that reach an engine through its requester's stub: about the gate, and to sleep or wake.

use std::time::Duration;

use rouse::{
    fault::FailureCause as EngineCause,
    model::SleepLevel,
    pairing::{
        event::{CommandFailure, CommandReply},
        ids::RequesterId,
    },
    units::{Generation, Millis, Tick},
};
use rouse_net::{
    adapter::{Adapter, ProbeTask},
    stub_api::ActuationResult,
};
use serde_json::json;
use tokio::time::{self, Instant};

use super::{
    CommandContext, ExecutionError, ExecutionOutcome, Executor,
    engine::adapter,
    launcher_engine,
    requester::{provider_metadata, stub},
};
use crate::{failpoint, stub_client::StubClientError};

/// How long a sleep or wake is repeated to a stub that is busy.
const BUSY_TIMEOUT: Duration = Duration::from_secs(10);
const BUSY_RETRY_DELAY: Duration = Duration::from_millis(20);

impl Executor {
    /// Opens the gate to clients, then updates the readiness, then the Pods' labels.
    pub(super) async fn open_gate(
        &self,
        context: &CommandContext,
        generation: Generation,
    ) -> ExecutionOutcome {
        let (requester, engine, provider) =
            (context.requester()?, context.engine_address()?, context.provider()?);
        let stub = stub(context, requester, generation)?;
        if let Err(failed) = stub.set_target(engine).await.map_err(ExecutionError::from) {
            if failed.cause == CommandFailure::Conflict {
                // The stub relays to an earlier engine and accepts no other. Its owner creates a new requester.
                self.delete(&requester.name, &context.fence(&requester.seen)).await?;
            }
            return Err(failed);
        }
        stub.open().await?;
        stub.set_ready(true).await?;
        if !requester.has_provider_metadata(provider) {
            let patch = json!({"metadata": provider_metadata(provider)});
            self.patch_requester(context, requester, &patch).await?;
        }
        if !provider.is_launcher() {
            return Ok(CommandReply::Done);
        }
        match launcher_engine::serving_patch(context, requester, provider)? {
            Some(patch) => self.patch_provider(context, provider, &patch).await,
            None => Ok(CommandReply::Done),
        }
    }

    pub(super) async fn close_gate(
        &self,
        context: &CommandContext,
        generation: Generation,
        deadline: Tick,
    ) -> ExecutionOutcome {
        let stub = stub(context, context.requester()?, generation)?;
        // Both to their end: an order about the readiness has no number, and one that was dropped may still arrive.
        let (unready, closed) =
            tokio::join!(stub.set_ready(false), stub.close_and_drain(deadline.since(self.now())));
        unready?;
        closed?;
        Ok(CommandReply::Done)
    }

    pub(super) async fn sleep(
        &self,
        context: &CommandContext,
        generation: Generation,
        level: SleepLevel,
        via: Option<&RequesterId>,
    ) -> ExecutionOutcome {
        if via.is_some() {
            match self.actuate_through_stub(context, generation, false, level).await {
                Ok(Some(done)) => {
                    let residue = done.memory.and_then(|memory| context.residue(&memory));
                    return Ok(CommandReply::Asleep { residue });
                }
                // A stub that dies meanwhile must not cost the engine.
                Ok(None) | Err(ExecutionError { cause: CommandFailure::Unreachable, .. }) => {}
                Err(failed) => return Err(failed),
            }
        }
        // No gate has requests to wait for.
        self.direct_adapter(context).await?.sleep(level).await.map_err(engine_error)?;
        Ok(CommandReply::Asleep { residue: None })
    }

    pub(super) async fn wake(
        &self,
        context: &CommandContext,
        generation: Generation,
        level: SleepLevel,
    ) -> ExecutionOutcome {
        if self.actuate_through_stub(context, generation, true, level).await?.is_some() {
            return Ok(CommandReply::Done);
        }
        self.direct_adapter(context).await?.wake(level).await.map_err(engine_error)?;
        Ok(CommandReply::Done)
    }

    /// Returns a client of the engine itself, for an order that no stub can refuse: only a confirmed leader sends it, in
    /// the term that decided on it.
    ///
    /// Waits for a late renewal, because the pairing logic counts an unsent command as failed and stops the engine.
    async fn direct_adapter(&self, context: &CommandContext) -> Result<Adapter, ExecutionError> {
        self.writer.wait_leadership().await?;
        self.writer.leadership_in(context.command.epoch.0)?;
        failpoint::hit();
        adapter(context, None, ProbeTask::None)
    }

    /// Actuates through the requester's stub, which refuses a replaced leader. `None`: the stub has no such call.
    async fn actuate_through_stub(
        &self,
        context: &CommandContext,
        generation: Generation,
        wake: bool,
        level: SleepLevel,
    ) -> Result<Option<ActuationResult>, ExecutionError> {
        let (requester, engine) = (context.requester()?, context.engine_address()?);
        let stub = stub(context, requester, generation)?;
        let core = &self.settings.core;
        let sizes = &context.record()?.sizes;
        let timeout = if wake { core.wake_timeout_for(sizes) } else { core.sleep_timeout_for(sizes) };
        // This short call finds a stub that hangs. The next one may take as long as the engine does.
        stub.set_target(engine).await?;
        let mut may_be_open = !wake;
        let given_up = Instant::now() + BUSY_TIMEOUT;
        loop {
            match stub.actuate(wake, level, timeout.duration()).await {
                // No earlier command closed the gate.
                Err(StubClientError::Busy(_)) if may_be_open => {
                    stub.close_and_drain(Millis::ZERO).await?;
                    may_be_open = false;
                }
                // It still executes an order of a former leader, or is just refusing a request. The pairing logic would
                // take the refusal for a failure of the engine, and stop it.
                Err(StubClientError::Busy(text)) if Instant::now() < given_up => {
                    tracing::debug!(command = %context.command.action, text, "the stub is busy, retrying");
                    time::sleep(BUSY_RETRY_DELAY).await;
                }
                outcome => return Ok(outcome?),
            }
        }
    }
}

fn engine_error(cause: EngineCause) -> ExecutionError {
    let reached = !matches!(cause, EngineCause::Unreachable | EngineCause::Timeout);
    let text = format!("the engine call failed: {cause}");
    ExecutionError {
        cause: if reached { CommandFailure::Refused } else { CommandFailure::Unreachable },
        text,
        user_facing: false,
        superseded: false,
    }
}
