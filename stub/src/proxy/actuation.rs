//! Sleep and wake of the engine behind the relays.
//!
//! An order goes on when its caller hangs up: half a sleep is worse than one that nobody waits for. So it is a task of
//! its own, and a caller that comes back finds the engine as the order left it, and asks again without harm.
//!
//! A sleeping engine cannot be put to sleep at another level: vLLM takes such an order and does nothing, and says
//! afterwards that it sleeps, which is true and not what was meant. The only way leads over a full wake, for which the
//! accelerator's memory may long be somebody else's; whoever keeps the accounts must order it. So such an order is
//! refused. Engines do not tell at which level they sleep, so the stub remembers what it did. Of an engine that was put
//! to sleep by others, or before a restart of the stub, it knows nothing; level 1 is believed of it, which is how
//! public controllers order sleep.

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

/// One small question to the engine.
const QUERY_TIMEOUT: Duration = Duration::from_secs(5);
/// After it has taken the order to wake, an engine that does not come up within this will not.
const WAKE_TIMEOUT: Duration = Duration::from_secs(120);
/// The weights of the largest engines go to the host's memory within this.
const SLEEP_TIMEOUT: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Actuation {
    Sleep,
    Wake,
}

/// How deep an engine was put to sleep from here.
#[derive(Debug, Default)]
pub(crate) struct SleepLevelRecord(Mutex<Option<(SocketAddr, SleepLevel)>>);

impl SleepLevelRecord {
    fn record(&self, engine: SocketAddr, level: Option<SleepLevel>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = level.map(|level| (engine, level));
    }

    fn level_of(&self, engine: SocketAddr) -> Option<SleepLevel> {
        let noted = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        noted.filter(|(noted, _)| *noted == engine).map(|(_, level)| level)
    }
}

/// Why an order was not carried out.
enum ActuationError {
    Engine(FailureCause),
    /// It sleeps, and not as was ordered.
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
    let said: ActuateRequest = match parse_body(body) {
        Ok(said) => said,
        Err(refusal) => return refusal,
    };
    let Some(level) = parse_level(said.level) else {
        return text_response(StatusCode::BAD_REQUEST, "level must be 1 or 2");
    };
    if let Err(refused) = proxy.gate.accept(said.epoch, said.generation) {
        return refused.into_response();
    }
    let Some(target) = proxy.gate.target() else {
        return text_response(
            StatusCode::CONFLICT,
            "no target was configured yet: there is no engine to ask",
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
        let began = Instant::now();
        let done = execute(&proxy, target, order, level).await;
        let took = Millis::from(began.elapsed()).0;
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
                tracing::warn!(%cause, "{bar}, and did not follow");
                let error = format!("the engine did not follow: {}", cause.describe());
                let refusal = ActuationFailure { error, stays_awake: cause == FailureCause::SleepDenied };
                (StatusCode::BAD_GATEWAY, Json(refusal)).into_response()
            }
        }
    });
    task.await.unwrap_or_else(|_| text_response(StatusCode::INTERNAL_SERVER_ERROR, "a defect of the stub"))
}

/// The gate may not be opened while this is there.
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
            // Before it is done: an order whose answer is lost may be carried out all the same.
            depth.record(target, Some(level));
            Ok(timeout(SLEEP_TIMEOUT, engine.sleep(level)).await.map_err(|_| FailureCause::Timeout)??)
        }
        Actuation::Wake => {
            if asleep != Some(false) {
                // What wakes a deep sleeper wakes a light one too; the other way round its answers would be noise.
                engine.wake(depth.level_of(target).map_or(level, |deep| deep.max(level))).await?;
                timeout(WAKE_TIMEOUT, wait_until_up(&engine)).await.map_err(|_| FailureCause::Timeout)?;
            }
            depth.record(target, None);
            Ok(())
        }
    }
}

/// Whether an engine that sleeps at `now`, where that is known, sleeps as it was ordered.
fn check_sleep_level(now: Option<SleepLevel>, ordered: SleepLevel) -> Result<(), &'static str> {
    match (now, ordered) {
        (Some(SleepLevel::One) | None, SleepLevel::One) | (Some(SleepLevel::Two), SleepLevel::Two) => Ok(()),
        (Some(SleepLevel::One), SleepLevel::Two) => {
            Err("the engine sleeps at level 1, and gets to level 2 only when it is awake: wake it first")
        }
        (Some(SleepLevel::Two), SleepLevel::One) => {
            Err("the engine sleeps at level 2, and gets to level 1 only when it is awake: wake it first")
        }
        (None, SleepLevel::Two) => Err(
            "the engine sleeps, and this stub has not seen at which level: wake it before it is put to sleep at level 2",
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

fn adapter(proxy: &Proxy, target: SocketAddr) -> Adapter {
    let kind = proxy.settings.engine_kind;
    let manner = EngineProfile {
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
    Adapter::new(manner, target)
}

fn parse_level(said: Option<u8>) -> Option<SleepLevel> {
    said.map_or(Some(SleepLevel::One), SleepLevel::from_number)
}

/// As it is read now, where it can be read.
async fn read_memory(proxy: &Proxy) -> Option<BTreeMap<String, u64>> {
    let read = proxy.memory.read().await;
    read.inspect_err(|error| tracing::warn!(%error, "the memory is not known")).ok()
}
