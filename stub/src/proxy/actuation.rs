//! Puts the engine behind the relays to sleep and wakes it.
//!
//! An order completes even if its caller disconnects, since an interrupted sleep is worse than an unobserved one. So
//! each order runs as its own task. A caller that returns finds the engine as the order left it, and can safely retry.
//!
//! An engine cannot change its sleep level while it sleeps: vLLM accepts such an order, does nothing, and then
//! truthfully reports that it sleeps. Only a full wake leads to the other level, and the accelerator's memory may
//! belong to another engine by then, so the leader, which keeps the ledger, must order it. The stub therefore refuses
//! such an order. Engines do not report their sleep level, so the stub remembers the level that it ordered. For an
//! engine that another client put to sleep, or that slept before the stub restarted, the level is unknown; the stub
//! then assumes level 1, which public controllers use.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Json,
    extract::State,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use http::StatusCode;
use rouse::{fault::FailureCause, model::SleepLevel, units::Millis};
use rouse_net::{
    adapter::{Adapter, EngineKind, EngineProfile, ProbeTask, SleepApi},
    stub_api::{ActuateRequest, ActuationFailure, ActuationResult},
};
use tokio::time::{Instant, sleep as pause, timeout};

use super::{
    admin::{parse_body, text_response},
    gate::GateRejection,
    state::Proxy,
};

/// Timeout of one short query to the engine.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// An engine that accepted a wake order must be up within this time, else it has failed.
const WAKE_TIMEOUT: Duration = Duration::from_secs(120);
/// The weights of the largest engines move to host memory within this time.
const SLEEP_TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Actuation {
    Sleep,
    Wake,
}

/// The sleep level that this stub last ordered.
#[derive(Debug, Default)]
pub(crate) struct SleepLevelRecord(Mutex<Option<(SocketAddr, SleepLevel)>>);

impl SleepLevelRecord {
    fn record(&self, engine: SocketAddr, level: Option<SleepLevel>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = level.map(|level| (engine, level));
    }

    fn level_of(&self, engine: SocketAddr) -> Option<SleepLevel> {
        let recorded = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        recorded.filter(|(target, _)| *target == engine).map(|(_, level)| level)
    }
}

/// Why an order failed.
enum ActuationError {
    Engine(FailureCause),
    /// The engine sleeps at another level than ordered.
    WrongLevel(&'static str),
}

impl From<FailureCause> for ActuationError {
    fn from(cause: FailureCause) -> Self {
        Self::Engine(cause)
    }
}

pub(super) async fn sleep(state: State<Arc<Proxy>>, body: Bytes) -> Response {
    actuate(state, Actuation::Sleep, &body).await
}

pub(super) async fn wake(state: State<Arc<Proxy>>, body: Bytes) -> Response {
    actuate(state, Actuation::Wake, &body).await
}

async fn actuate(State(proxy): State<Arc<Proxy>>, order: Actuation, body: &[u8]) -> Response {
    let order_body: ActuateRequest = match parse_body(body) {
        Ok(order_body) => order_body,
        Err(refusal) => return refusal,
    };
    let Some(level) = parse_level(order_body.level) else {
        return text_response(StatusCode::BAD_REQUEST, "level must be 1 or 2");
    };
    if let Err(refused) = proxy.gate.accept(order_body.epoch, order_body.generation) {
        return refused.into_response();
    }
    let Some(target) = proxy.gate.target() else {
        return text_response(
            StatusCode::CONFLICT,
            "no target is configured yet, so there is no engine to put to sleep or wake",
        );
    };
    let bar = match order {
        Actuation::Sleep => "the engine is being put to sleep",
        Actuation::Wake => "the engine is being woken",
    };
    if let Err(refused) = proxy.gate.block_open(bar, order == Actuation::Sleep) {
        return refused.into_response();
    }
    let barred = OpenBlockGuard(Arc::clone(&proxy));
    let task = tokio::spawn(async move {
        let started_at = Instant::now();
        let done = execute(&proxy, target, order, level).await;
        let took = Millis::from(started_at.elapsed()).0;
        drop(barred);
        match done {
            Ok(()) => {
                let memory = read_memory(&proxy).await;
                Json(ActuationResult { asleep: order == Actuation::Sleep, took, memory }).into_response()
            }
            Err(ActuationError::WrongLevel(why)) => {
                GateRejection::OpenBlocked(proxy.gate.view(), why).into_response()
            }
            Err(ActuationError::Engine(cause)) => {
                tracing::warn!(%cause, "engine call failed while {bar}");
                let error = format!("the call failed while {bar}: {}", cause.describe());
                let refusal = ActuationFailure { error, stays_awake: cause == FailureCause::SleepDenied };
                (StatusCode::BAD_GATEWAY, Json(refusal)).into_response()
            }
        }
    });
    task.await
        .unwrap_or_else(|_| text_response(StatusCode::INTERNAL_SERVER_ERROR, "internal error in the stub"))
}

/// Blocks opening the gate until dropped.
struct OpenBlockGuard(Arc<Proxy>);

impl Drop for OpenBlockGuard {
    fn drop(&mut self) {
        self.0.gate.unblock_open();
    }
}

async fn execute(
    proxy: &Proxy,
    target: SocketAddr,
    order: Actuation,
    level: SleepLevel,
) -> Result<(), ActuationError> {
    let (engine, depth) = (adapter(proxy, target), &proxy.sleep_level);
    let asleep = engine.is_asleep(QUERY_TIMEOUT).await;
    match order {
        Actuation::Sleep if asleep == Some(true) => {
            check_sleep_level(depth.level_of(target), level).map_err(ActuationError::WrongLevel)
        }
        Actuation::Sleep => {
            // Record the level before the order: an order whose response is lost may still take effect.
            depth.record(target, Some(level));
            Ok(timeout(SLEEP_TIMEOUT, engine.sleep(level)).await.map_err(|_| FailureCause::Timeout)??)
        }
        Actuation::Wake => {
            if asleep != Some(false) {
                // The level-2 wake also wakes a level-1 sleeper. A level-1 wake would make a level-2 sleeper answer
                // with noise.
                engine.wake(depth.level_of(target).map_or(level, |deep| deep.max(level))).await?;
                timeout(WAKE_TIMEOUT, wait_until_up(&engine)).await.map_err(|_| FailureCause::Timeout)?;
            }
            depth.record(target, None);
            Ok(())
        }
    }
}

/// Checks whether an engine that sleeps at level `now`, if known, sleeps as ordered.
fn check_sleep_level(now: Option<SleepLevel>, ordered: SleepLevel) -> Result<(), &'static str> {
    match (now, ordered) {
        (Some(SleepLevel::One) | None, SleepLevel::One) | (Some(SleepLevel::Two), SleepLevel::Two) => Ok(()),
        (Some(SleepLevel::One), SleepLevel::Two) => {
            Err("the engine sleeps at level 1 and can go to level 2 only after a wake: wake the engine first")
        }
        (Some(SleepLevel::Two), SleepLevel::One) => {
            Err("the engine sleeps at level 2 and can go to level 1 only after a wake: wake the engine first")
        }
        (None, SleepLevel::Two) => Err(
            "the engine sleeps at a level that this stub does not know: wake the engine before putting it to sleep at level 2",
        ),
    }
}

async fn wait_until_up(engine: &Adapter) {
    let mut gap = Duration::from_millis(2);
    while engine.check_awake(QUERY_TIMEOUT).await.is_err() {
        pause(gap).await;
        gap = (gap * 2).min(Duration::from_millis(100));
    }
}

/// Returns a client for the engine at this address.
pub(super) fn adapter(proxy: &Proxy, target: SocketAddr) -> Adapter {
    let kind = proxy.settings.engine_kind;
    let profile = EngineProfile {
        kind,
        sleep: match kind {
            EngineKind::Vllm => SleepApi::Vllm,
            EngineKind::Sglang => SleepApi::Sglang,
            EngineKind::LlamaCpp | EngineKind::Custom => SleepApi::None,
        },
        served_name: proxy.settings.model.as_str().to_owned(),
        task: ProbeTask::Generate,
        api_key: None,
    };
    Adapter::new(profile, target)
}

fn parse_level(level: Option<u8>) -> Option<SleepLevel> {
    level.map_or(Some(SleepLevel::One), SleepLevel::from_number)
}

/// Reads the memory in use; `None` if the read fails.
async fn read_memory(proxy: &Proxy) -> Option<BTreeMap<String, u64>> {
    let read = proxy.memory.read().await;
    read.inspect_err(|error| tracing::warn!(%error, "reading the accelerators' memory failed")).ok()
}
