//! The steps of an engine task with its engine. Each is a future that the task polls and may drop at any await.

use std::{pin::Pin, sync::Arc};

use rouse::{fault::FailureCause, fleet::event::Event, model::SleepLevel};
use rouse_platform::{
    health::{self, InitialHealth},
    readiness,
};

use super::{engine_task::LocalEngine, start_checks, state_store::StoredPhase};

/// A step under way. Its result decides whether the health watch starts next.
pub(super) type LocalStepFuture = Pin<Box<dyn Future<Output = AfterStep> + Send>>;
pub(super) type HealthWatchFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterStep {
    StartHealthWatch,
    Unchanged,
}

pub(super) async fn become_ready(local_engine: Arc<LocalEngine>) -> AfterStep {
    let (engine, generation) = (local_engine.client.id.clone(), local_engine.client.generation);
    let profiled = Event::Profiled { engine: engine.clone(), generation };
    // An engine with an explicit cache size does not measure free memory, so other engines may start beside it at once.
    let explicit = local_engine.client.explicit_memory();
    if explicit {
        local_engine.client.common.send_event(profiled.clone()).await;
    }
    let expected = local_engine.learned().and_then(|learned| learned.start);
    readiness::wait_until_ready(&local_engine.client, expected).await;
    let fit = start_checks::check_start(&local_engine).await;
    if !explicit {
        local_engine.client.common.send_event(profiled).await;
    }
    match fit {
        Ok(()) => {
            local_engine.client.common.send_event(Event::Ready { engine, generation }).await;
            local_engine.set_phase(StoredPhase::Awake).await;
            AfterStep::StartHealthWatch
        }
        Err(cause) => {
            let failed = Event::StartFailed { engine, generation, cause };
            local_engine.client.common.send_event(failed).await;
            AfterStep::Unchanged
        }
    }
}

pub(super) async fn probe(local_engine: Arc<LocalEngine>) -> AfterStep {
    health::run_canary(&local_engine.client).await;
    AfterStep::Unchanged
}

pub(super) async fn sleep(local_engine: Arc<LocalEngine>, level: SleepLevel) -> AfterStep {
    local_engine.set_phase(StoredPhase::Transitioning(level)).await;
    let outcome = local_engine.client.adapter.sleep(level).await;
    let (engine, generation) = (local_engine.client.id.clone(), local_engine.client.generation);
    let (event, after) = match outcome {
        Ok(()) => {
            local_engine.set_phase(StoredPhase::Asleep(level)).await;
            (Event::Slept { engine, generation, level }, AfterStep::Unchanged)
        }
        Err(cause) => {
            // The engine is still awake, and the fleet may grant it to waiters.
            let awake = cause == FailureCause::SleepDenied;
            if awake {
                local_engine.set_phase(StoredPhase::Awake).await;
            }
            let after = if awake { AfterStep::StartHealthWatch } else { AfterStep::Unchanged };
            (Event::SleepFailed { engine, generation, cause }, after)
        }
    };
    local_engine.client.common.send_event(event).await;
    after
}

pub(super) async fn wake(local_engine: Arc<LocalEngine>, level: SleepLevel) -> AfterStep {
    local_engine.set_phase(StoredPhase::Transitioning(level)).await;
    let outcome = local_engine.client.adapter.wake(level).await;
    let (engine, generation) = (local_engine.client.id.clone(), local_engine.client.generation);
    if let Err(cause) = outcome {
        let failed = Event::WakeFailed { engine, generation, cause };
        local_engine.client.common.send_event(failed).await;
        return AfterStep::Unchanged;
    }
    // The wake call returns when the wake is done: what is left takes milliseconds.
    readiness::wait_until_ready(&local_engine.client, None).await;
    local_engine.client.common.send_event(Event::Ready { engine, generation }).await;
    local_engine.set_phase(StoredPhase::Awake).await;
    AfterStep::StartHealthWatch
}

pub(super) async fn watch_health(local_engine: Arc<LocalEngine>, is_gated: bool) {
    let known = if is_gated { InitialHealth::StubGateClosed } else { InitialHealth::Healthy };
    health::watch_health(&local_engine.client, known).await;
}
