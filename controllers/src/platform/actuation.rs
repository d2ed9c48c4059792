//! Puts an engine to sleep and wakes it through the stub beside it. The Pod stays and keeps its accelerators.
//!
//! Engines do not report how deep they sleep, and the next leader must send no request to a sleeping engine. So this
//! gateway writes the level on the Pod before it orders the sleep, and removes it once the engine is awake again.

use std::{future::pending, net::SocketAddr, sync::Arc, time::Duration};

use rouse::{fault::FailureCause, fleet::event::Event, model::SleepLevel};
use rouse_platform::{engine_client::EngineClient, readiness};
use serde_json::json;

use super::{
    engine_steps::{self, StepOutcome},
    engine_task::{EngineContext, PodReceiver, RetryBackoff},
};
use crate::{stub_client::StubClientError, workload::ASLEEP, writer::Error};

/// Timeout of a sleep or wake. Longer than any deadline of the fleet, which limits both.
const ACTUATION_TIMEOUT: Duration = Duration::from_secs(15 * 60);

pub(super) async fn sleep(
    client: Arc<EngineClient>,
    context: Arc<EngineContext>,
    pod: PodReceiver,
    level: SleepLevel,
) -> StepOutcome {
    record_level(&context, &pod, Some(level)).await;
    let (engine, generation) = (context.id.clone(), context.generation);
    let (event, done) = match actuate(&client, &context, false, level).await {
        Ok(()) => (Event::Slept { engine, generation, level }, StepOutcome::Asleep),
        Err(cause) => {
            let awake = cause == FailureCause::SleepDenied;
            if awake {
                // Must precede reopening the gate.
                record_level(&context, &pod, None).await;
            }
            let done = if awake { StepOutcome::Ready } else { StepOutcome::Asleep };
            (Event::SleepFailed { engine, generation, cause }, done)
        }
    };
    context.shared.common.send_event(event).await;
    done
}

/// Resumes a sleep that a former leader ordered.
///
/// The stub accepts an order again that it has already executed. The drain cuts requests that are still inside.
pub(super) async fn resume_sleep(
    client: Arc<EngineClient>,
    context: Arc<EngineContext>,
    pod: PodReceiver,
    level: SleepLevel,
) -> StepOutcome {
    engine_steps::close_and_drain(&client, &context, true).await;
    sleep(client, context, pod, level).await
}

pub(super) async fn wake(
    client: Arc<EngineClient>,
    context: Arc<EngineContext>,
    pod: PodReceiver,
    level: SleepLevel,
) -> StepOutcome {
    let (engine, generation) = (context.id.clone(), context.generation);
    let woken = async {
        actuate(&client, &context, true, level).await?;
        record_level(&context, &pod, None).await;
        engine_steps::open_stub(&context, client.address).await
    };
    if let Err(cause) = woken.await {
        context.shared.common.send_event(Event::WakeFailed { engine, generation, cause }).await;
        return StepOutcome::Asleep;
    }
    readiness::wait_until_ready(&client, None).await;
    context.shared.common.send_event(Event::Ready { engine, generation }).await;
    engine_steps::set_readiness(&context, client.address, true).await;
    StepOutcome::Ready
}

/// Sends the order until the stub has executed it.
///
/// A silent stub gets the order again and continues where it was; the fleet sets the deadline.
async fn actuate(
    client: &EngineClient,
    context: &EngineContext,
    wake: bool,
    level: SleepLevel,
) -> Result<(), FailureCause> {
    let target = SocketAddr::new(client.address.ip(), context.placement.pod_template.port);
    let mut pauses = RetryBackoff::new();
    loop {
        if let Some(stub) = context.stub(client.address) {
            let done = async {
                // A restarted stub container has no target.
                stub.set_target(target).await?;
                stub.actuate(wake, level, ACTUATION_TIMEOUT).await
            };
            match done.await {
                Ok(_) => return Ok(()),
                Err(StubClientError::Conflict { .. }) => engine_steps::superseded(context).await,
                Err(StubClientError::StaysAwake(_)) => return Err(FailureCause::SleepDenied),
                Err(error @ (StubClientError::Unauthorized(_) | StubClientError::Refused { .. })) => {
                    tracing::warn!(engine = %context.id, wake, %error, "the stub rejected the sleep or wake order");
                    return Err(FailureCause::Refused);
                }
                Err(error) => {
                    tracing::debug!(engine = %context.id, %error, "the stub did not execute the order, retrying")
                }
            }
        }
        pauses.pause().await;
    }
}

async fn record_level(context: &EngineContext, pod: &PodReceiver, level: Option<SleepLevel>) {
    let mut pauses = RetryBackoff::new();
    loop {
        let engine_pod = pod.borrow().clone();
        let Some(engine_pod) = engine_pod else {
            // The Pod is gone; the engine task is about to learn that.
            return pending().await;
        };
        let text = level.map(|level| level.number().to_string());
        match engine_steps::annotate_pod(context, &engine_pod, &json!({ ASLEEP: text })).await {
            Ok(()) => return,
            Err(Error::Gone) => return pending().await,
            Err(error) => {
                tracing::debug!(pod = %engine_pod.name, %error, "cannot record the sleep level on the Pod, retrying")
            }
        }
        pauses.pause().await;
    }
}
