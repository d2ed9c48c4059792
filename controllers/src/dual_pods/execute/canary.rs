//! Sends an engine's canary, and checks that the engine uses its assigned accelerators.

use std::time::Duration;

use rouse::{
    fleet::event::CanaryVerdict,
    pairing::{
        command::{EngineStep, PairingAction},
        event::CommandReply,
    },
    units::Generation,
};
use rouse_net::{adapter::ProbeTask, http_client::HttpClient};
use serde_json::Value;

use super::{
    CommandContext, ExecutionError, ExecutionOutcome, Executor,
    engine::{ENGINE_CALL_TIMEOUT, adapter},
    requester::stub,
};
use crate::{
    dual_pods::memory_baseline::{AcceleratorUsedMib, MemoryBaseline},
    failpoint,
};

/// Timeout of a memory reading. A later reading is not about the moment in question, and a start does not wait for it.
const MEMORY_READ_TIMEOUT: Duration = Duration::from_secs(1);

impl Executor {
    /// Generates one token, or runs the minimal probe of an engine that lists no model.
    pub(super) async fn send_canary(&self, context: &CommandContext) -> ExecutionOutcome {
        let engine = context.engine_address()?;
        let timeout = self.settings.core.wake_timeout.duration();
        let caller = HttpClient::new(engine, None);
        let list: Value = serde_json::from_slice(&caller.get("/v1/models", ENGINE_CALL_TIMEOUT).await?.body)
            .unwrap_or_default();
        let served = list.pointer("/data/0/id").and_then(Value::as_str).map(str::to_owned);
        let task = if served.is_some() { ProbeTask::Generate } else { ProbeTask::None };
        failpoint::hit();
        match adapter(context, served, task)?.probe(timeout).await {
            CanaryVerdict::Passed if task == ProbeTask::Generate => self.check_device_access(context).await,
            CanaryVerdict::Passed => Ok(CommandReply::Done),
            CanaryVerdict::Inconclusive => {
                Err(ExecutionError::refused("a closed gate answered instead of the engine"))
            }
            CanaryVerdict::Failed(cause) => {
                Err(ExecutionError::refused(format!("the canary request failed: {cause}")))
            }
        }
    }

    /// Fails if the engine answered but took no memory of one of its accelerators.
    async fn check_device_access(&self, context: &CommandContext) -> ExecutionOutcome {
        let now = if context.baseline.is_some() { read_memory(context).await } else { None };
        let Some(accelerator) = now.as_ref().and_then(|now| context.unused_accelerator(now)) else {
            return Ok(CommandReply::Done);
        };
        Err(ExecutionError::user_error(format!(
            "NoDeviceAccess: the engine answered but uses no memory of {accelerator}, so its Pod has no access to \
             that accelerator: set gpuAccess or runtimeClassName of the AcceleratorPool to the way in which this \
             node gives Pods access to accelerators"
        )))
    }

    /// Reads the memory in use before a command that starts an engine; `None` for other commands.
    pub(super) async fn memory_baseline(&self, context: &CommandContext) -> Option<MemoryBaseline> {
        let PairingAction::Engine {
            engine,
            generation,
            step: EngineStep::Create { .. } | EngineStep::Launch,
        } = &context.command.action
        else {
            return None;
        };
        let used = if context.has_no_neighbours() { read_memory(context).await } else { None };
        Some(MemoryBaseline {
            location: (context.command.node.clone(), engine.clone()),
            generation: *generation,
            used,
        })
    }
}

/// Reads the memory in use from the requester's stub. Not every stub can read it.
async fn read_memory(context: &CommandContext) -> Option<AcceleratorUsedMib> {
    let requester = context.requester.as_ref()?;
    let read = stub(context, requester, Generation::default()).ok()?.usage_mib(MEMORY_READ_TIMEOUT).await;
    let log = |failed: &ExecutionError| {
        tracing::debug!(requester = %requester.name, error = failed.text, "accelerator memory could not be read");
    };
    read.map_err(ExecutionError::from).inspect_err(log).ok()
}
