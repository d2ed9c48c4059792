//! Whether an engine answers, from the accelerators that it was given.

use std::time::Duration;

use rouse::{
    adapter::Task,
    caller::Caller,
    fleet::event::Verdict,
    pairing::{
        command::{Order, Step},
        event::Answer,
    },
    units::Generation,
};
use serde_json::Value;

use super::{
    Failed, Hands, Job, Outcome,
    engine::{MOMENT, adapter},
    requester::stub,
};
use crate::{
    controllers::fault,
    pairing::proof::{Before, Usage},
};

/// What is read later than this says nothing of the moment that is meant, and a start does not wait for it.
const LOOK: Duration = Duration::from_secs(1);

impl Hands {
    /// One token, or the least that an engine of another task does.
    pub(super) async fn prove(&self, job: &Job) -> Outcome {
        let engine = job.engine()?;
        let within = self.settings.core.wake.duration();
        let caller = Caller::new(engine, None);
        let list: Value =
            serde_json::from_slice(&caller.get("/v1/models", MOMENT).await?.body).unwrap_or_default();
        let served = list.pointer("/data/0/id").and_then(Value::as_str).map(str::to_owned);
        let task = if served.is_some() { Task::Generate } else { Task::None };
        fault::point();
        match adapter(job, served, task)?.probe(within).await {
            Verdict::Passed if task == Task::Generate => self.proven(job).await,
            Verdict::Passed => Ok(Answer::Done),
            Verdict::Inconclusive => Err(Failed::refused("a closed gate answered in its place")),
            Verdict::Failed(cause) => Err(Failed::refused(format!("it was asked for a token: {cause}"))),
        }
    }

    /// It has answered, and so has memory of each accelerator that it can get at.
    async fn proven(&self, job: &Job) -> Outcome {
        let now = if job.before.is_some() { used(job).await } else { None };
        let Some(accelerator) = now.as_ref().and_then(|now| job.untouched(now)) else {
            return Ok(Answer::Done);
        };
        Err(Failed::user(format!(
            "NoDeviceAccess: its engine answered and had taken no memory of {accelerator}, so its Pod cannot get at that: set \
             gpuAccess or runtimeClassName of the AcceleratorPool to how this node lets Pods at accelerators"
        )))
    }

    /// What is in use before an engine is started, whatever the order is.
    pub(super) async fn before(&self, job: &Job) -> Option<Before> {
        let Order::Engine { engine, generation, step: Step::Create { .. } | Step::Launch } =
            &job.command.order
        else {
            return None;
        };
        let used = if job.is_alone() { used(job).await } else { None };
        Some(Before { place: (job.command.node.clone(), engine.clone()), generation: *generation, used })
    }
}

/// As its requester's stub reads it at once; not every one can.
async fn used(job: &Job) -> Option<Usage> {
    let own = job.requester.as_ref()?;
    let read = stub(job, own, Generation::default()).ok()?.memory(LOOK).await;
    let log =
        |failed: &Failed| tracing::debug!(requester = %own.name, text = failed.text, "no memory was read");
    read.inspect_err(log).ok()
}
