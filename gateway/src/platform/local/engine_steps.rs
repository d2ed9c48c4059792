//! The steps of an engine task with its engine. Each is a future that the task polls and may drop at any await.

use std::{pin::Pin, sync::Arc};

use rouse::{fault::FailureCause, fleet::event::Event, model::SleepLevel};
use rouse_platform::{
    health::{self, InitialHealth},
    readiness,
};

use super::{engine_task::LocalEngine, start_checks, state_store::StoredPhase};

/// A step under way; its result tells whether the health watch starts next.
pub(super) type LocalStepFuture = Pin<Box<dyn Future<Output = AfterStep> + Send>>;
pub(super) type HealthWatchFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterStep {
    StartHealthWatch,
    Unchanged,
}

pub(super) async fn become_ready(tenant: Arc<LocalEngine>) -> AfterStep {
    let (engine, generation) = (tenant.client.id.clone(), tenant.client.generation);
    let profiled = Event::Profiled { engine: engine.clone(), generation };
    // An engine with an explicit cache size does not measure free memory, so other engines may start beside it at once.
    let explicit = tenant.client.explicit_memory();
    if explicit {
        tenant.client.common.send_event(profiled.clone()).await;
    }
    let expected = tenant.learned().and_then(|learned| learned.start);
    readiness::wait_until_ready(&tenant.client, expected).await;
    let fit = start_checks::check_start(&tenant).await;
    if !explicit {
        tenant.client.common.send_event(profiled).await;
    }
    match fit {
        Ok(()) => {
            tenant.client.common.send_event(Event::Ready { engine, generation }).await;
            tenant.set_phase(StoredPhase::Awake).await;
            AfterStep::StartHealthWatch
        }
        Err(cause) => {
            let failed = Event::StartFailed { engine, generation, cause };
            tenant.client.common.send_event(failed).await;
            AfterStep::Unchanged
        }
    }
}

pub(super) async fn probe(tenant: Arc<LocalEngine>) -> AfterStep {
    health::run_canary(&tenant.client).await;
    AfterStep::Unchanged
}

pub(super) async fn sleep(tenant: Arc<LocalEngine>, level: SleepLevel) -> AfterStep {
    tenant.set_phase(StoredPhase::Transitioning(level)).await;
    let outcome = tenant.client.adapter.sleep(level).await;
    let (engine, generation) = (tenant.client.id.clone(), tenant.client.generation);
    let (event, after) = match outcome {
        Ok(()) => {
            tenant.set_phase(StoredPhase::Asleep(level)).await;
            (Event::Slept { engine, generation, level }, AfterStep::Unchanged)
        }
        Err(cause) => {
            // The engine is still awake, and the fleet may grant it to waiters.
            let awake = cause == FailureCause::SleepDenied;
            if awake {
                tenant.set_phase(StoredPhase::Awake).await;
            }
            let after = if awake { AfterStep::StartHealthWatch } else { AfterStep::Unchanged };
            (Event::SleepFailed { engine, generation, cause }, after)
        }
    };
    tenant.client.common.send_event(event).await;
    after
}

pub(super) async fn wake(tenant: Arc<LocalEngine>, level: SleepLevel) -> AfterStep {
    tenant.set_phase(StoredPhase::Transitioning(level)).await;
    let outcome = tenant.client.adapter.wake(level).await;
    let (engine, generation) = (tenant.client.id.clone(), tenant.client.generation);
    if let Err(cause) = outcome {
        let failed = Event::WakeFailed { engine, generation, cause };
        tenant.client.common.send_event(failed).await;
        return AfterStep::Unchanged;
    }
    // The wake call returns when the wake is done: what is left takes milliseconds.
    readiness::wait_until_ready(&tenant.client, None).await;
    tenant.client.common.send_event(Event::Ready { engine, generation }).await;
    tenant.set_phase(StoredPhase::Awake).await;
    AfterStep::StartHealthWatch
}

pub(super) async fn watch_health(tenant: Arc<LocalEngine>, held: bool) {
    let known = if held { InitialHealth::StubGateClosed } else { InitialHealth::Healthy };
    health::watch_health(&tenant.client, known).await;
}
