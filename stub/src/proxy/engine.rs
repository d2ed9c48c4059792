//! Sleep and wake of the engine behind the relays.
//!
//! An order goes on when its caller hangs up: half a sleep is worse than one that nobody waits for. So it is a task of
//! its own, and a caller that comes back finds the engine as the order left it, and asks again without harm.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

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
    wire::{Actuate, Actuated},
};
use tokio::time::{Instant, sleep as pause, timeout};

use super::{
    admin::{parse, text},
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
        let done = carry_out(&adapter(&proxy, target), order, level).await;
        let took = Millis::from(began.elapsed()).0;
        drop(barred);
        match done {
            Ok(()) => {
                let memory = memory(&proxy).await;
                Json(Actuated { asleep: order == Order::Sleep, took, memory }).into_response()
            }
            Err(cause) => {
                tracing::warn!(%cause, "{bar}, and did not follow");
                text(StatusCode::BAD_GATEWAY, format!("the engine did not follow: {cause}"))
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

async fn carry_out(engine: &Adapter, order: Order, level: Level) -> Result<(), Cause> {
    match order {
        Order::Sleep if engine.asleep(MOMENT).await == Some(true) => Ok(()),
        Order::Sleep => timeout(FALLS, engine.sleep(level)).await.map_err(|_| Cause::Timeout)?,
        Order::Wake if engine.asleep(MOMENT).await == Some(false) => Ok(()),
        Order::Wake => {
            engine.wake(level).await?;
            timeout(RISES, up(engine)).await.map_err(|_| Cause::Timeout)
        }
    }
}

async fn up(engine: &Adapter) {
    let mut gap = Duration::from_millis(2);
    while !engine.up(MOMENT).await {
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
    match said {
        None | Some(1) => Some(Level::One),
        Some(2) => Some(Level::Two),
        Some(_) => None,
    }
}

/// As it is read now, where it can be read.
async fn memory(proxy: &Proxy) -> Option<BTreeMap<String, u64>> {
    let read = proxy.memory.read().await;
    read.inspect_err(|error| tracing::warn!(%error, "the memory is not known")).ok()
}
