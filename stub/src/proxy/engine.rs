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
use rouse::{
    adapter::{Adapter, Kind, Manner, SleepApi, Task},
    fault::Cause,
    model::Level,
    units::Millis,
    wire::{Actuate, Actuated, NotActuated},
};
use tokio::time::{Instant, sleep as pause, timeout};

use super::{
    admin::{parse, text},
    gate::Refused,
    state::Proxy,
};

/// One small question to the engine.
const MOMENT: Duration = Duration::from_secs(5);
/// After it has taken the order to wake, an engine that does not come up within this will not.
const RISES: Duration = Duration::from_secs(120);
/// The weights of the largest engines go to the host's memory within this.
const FALLS: Duration = Duration::from_secs(300);

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Sleep,
    Wake,
}

/// How deep an engine was put to sleep from here.
#[derive(Debug, Default)]
pub(crate) struct Depth(Mutex<Option<(SocketAddr, Level)>>);

impl Depth {
    fn note(&self, engine: SocketAddr, level: Option<Level>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = level.map(|level| (engine, level));
    }

    fn of(&self, engine: SocketAddr) -> Option<Level> {
        let noted = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        noted.filter(|(noted, _)| *noted == engine).map(|(_, level)| level)
    }
}

/// Why an order was not carried out.
enum Failed {
    Engine(Cause),
    /// It sleeps, and not as was ordered.
    Otherwise(&'static str),
}

impl From<Cause> for Failed {
    fn from(cause: Cause) -> Self {
        Self::Engine(cause)
    }
}

pub(super) async fn sleep(state: State<Arc<Proxy>>, body: Bytes) -> Response {
    actuate(state, Order::Sleep, &body).await
}

pub(super) async fn wake(state: State<Arc<Proxy>>, body: Bytes) -> Response {
    actuate(state, Order::Wake, &body).await
}

async fn actuate(State(proxy): State<Arc<Proxy>>, order: Order, body: &[u8]) -> Response {
    let said: Actuate = match parse(body) {
        Ok(said) => said,
        Err(refusal) => return refusal,
    };
    let Some(level) = level(said.level) else {
        return text(StatusCode::BAD_REQUEST, "level must be 1 or 2");
    };
    if let Err(refused) = proxy.keeper.hear(said.epoch, said.generation) {
        return refused.into_response();
    }
    let Some(target) = proxy.keeper.target() else {
        return text(StatusCode::CONFLICT, "no target was configured yet: there is no engine to ask");
    };
    let bar = match order {
        Order::Sleep => "the engine is being put to sleep",
        Order::Wake => "the engine is being woken",
    };
    if let Err(refused) = proxy.keeper.bar(bar, order == Order::Sleep) {
        return refused.into_response();
    }
    let barred = Barred(Arc::clone(&proxy));
    let task = tokio::spawn(async move {
        let began = Instant::now();
        let done = carry_out(&proxy, target, order, level).await;
        let took = Millis::from(began.elapsed()).0;
        drop(barred);
        match done {
            Ok(()) => {
                let memory = memory(&proxy).await;
                Json(Actuated { asleep: order == Order::Sleep, took, memory }).into_response()
            }
            Err(Failed::Otherwise(why)) => Refused::Barred(proxy.keeper.view(), why).into_response(),
            Err(Failed::Engine(cause)) => {
                tracing::warn!(%cause, "{bar}, and did not follow");
                let error = format!("the engine did not follow: {}", cause.words());
                let refusal = NotActuated { error, stays_awake: cause == Cause::StaysAwake };
                (StatusCode::BAD_GATEWAY, Json(refusal)).into_response()
            }
        }
    });
    task.await.unwrap_or_else(|_| text(StatusCode::INTERNAL_SERVER_ERROR, "a defect of the stub"))
}

/// The gate may not be opened while this is there.
struct Barred(Arc<Proxy>);

impl Drop for Barred {
    fn drop(&mut self) {
        self.0.keeper.unbar();
    }
}

async fn carry_out(proxy: &Proxy, target: SocketAddr, order: Order, level: Level) -> Result<(), Failed> {
    let (engine, depth) = (adapter(proxy, target), &proxy.depth);
    let asleep = engine.asleep(MOMENT).await;
    match order {
        Order::Sleep if asleep == Some(true) => asleep_as(depth.of(target), level).map_err(Failed::Otherwise),
        Order::Sleep => {
            // Before it is done: an order whose answer is lost may be carried out all the same.
            depth.note(target, Some(level));
            Ok(timeout(FALLS, engine.sleep(level)).await.map_err(|_| Cause::Timeout)??)
        }
        Order::Wake => {
            if asleep != Some(false) {
                // What wakes a deep sleeper wakes a light one too; the other way round its answers would be noise.
                engine.wake(depth.of(target).map_or(level, |deep| deep.max(level))).await?;
                timeout(RISES, up(&engine)).await.map_err(|_| Cause::Timeout)?;
            }
            depth.note(target, None);
            Ok(())
        }
    }
}

/// Whether an engine that sleeps at `now`, where that is known, sleeps as it was ordered.
fn asleep_as(now: Option<Level>, ordered: Level) -> Result<(), &'static str> {
    match (now, ordered) {
        (Some(Level::One) | None, Level::One) | (Some(Level::Two), Level::Two) => Ok(()),
        (Some(Level::One), Level::Two) => {
            Err("the engine sleeps at level 1, and gets to level 2 only when it is awake: wake it first")
        }
        (Some(Level::Two), Level::One) => {
            Err("the engine sleeps at level 2, and gets to level 1 only when it is awake: wake it first")
        }
        (None, Level::Two) => Err(
            "the engine sleeps, and this stub has not seen at which level: wake it before it is put to sleep at level 2",
        ),
    }
}

async fn up(engine: &Adapter) {
    let mut gap = Duration::from_millis(2);
    while engine.up(MOMENT).await.is_err() {
        pause(gap).await;
        gap = (gap * 2).min(Duration::from_millis(100));
    }
}

fn adapter(proxy: &Proxy, target: SocketAddr) -> Adapter {
    let kind = proxy.settings.kind;
    let manner = Manner {
        kind,
        sleep: match kind {
            Kind::Vllm => SleepApi::Vllm,
            Kind::Sglang => SleepApi::Sglang,
            Kind::LlamaCpp | Kind::Custom => SleepApi::None,
        },
        served_name: proxy.settings.model.as_str().to_owned(),
        task: Task::Generate,
        api_key: None,
    };
    Adapter::new(manner, target)
}

fn level(said: Option<u8>) -> Option<Level> {
    said.map_or(Some(Level::One), Level::numbered)
}

/// As it is read now, where it can be read.
async fn memory(proxy: &Proxy) -> Option<BTreeMap<String, u64>> {
    let read = proxy.memory.read().await;
    read.inspect_err(|error| tracing::warn!(%error, "the memory is not known")).ok()
}
