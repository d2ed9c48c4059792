//! What already runs when the gateway starts.
//!
//! The state file names engines; it is a hint, not evidence. An engine is adopted when its process lives with the
//! recorded start time, when whoever listens on its port belongs to it, and when it does not answer against what was
//! recorded. What fails this, or matches no configured model, is stopped and reported, and so is every process that
//! carries our mark without being in the file (the gateway died between starting and noting it).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use rouse::{
    fleet::event::{AdoptedEngine, Event},
    model::{EngineId, SleepLevel},
};
use rouse_net::{
    adapter::EngineHealth,
    process::{self, ProcessGroup, table},
};
use tokio::{task, time};

use super::{
    LocalContext,
    engine_task::{LocalEngine, LocalEngineStart},
    launch::{self, MARK_VAR},
    state_store::{StoredEngine, StoredPhase},
};

/// For all questions to one engine. The whole adoption takes little longer: engines are asked side by side.
const PROBE_TIMEOUT: Duration = Duration::from_millis(1200);

type AdoptedProcess = (Arc<LocalEngine>, ProcessGroup, LocalEngineStart);

#[derive(Debug, thiserror::Error)]
enum NotAdopted {
    #[error("its model is not configured")]
    NotConfigured,
    #[error("its process is gone")]
    Gone,
    #[error("its port belongs to another process")]
    PortTaken,
    #[error("it does not answer as an engine does")]
    Unhealthy,
    #[error("a sleep or wake was interrupted, and what it holds is not known")]
    Interrupted,
}

/// Looks at everything that was recorded, sends `Adopted` for what is taken over, and ends the rest.
pub(super) async fn adopt_all(shared: &Arc<LocalContext>) -> Vec<AdoptedProcess> {
    let entries = shared.store.engines();
    let mut looks: FuturesUnordered<_> =
        entries.iter().map(|(engine, entry)| adopt_one(shared, engine.clone(), entry.clone())).collect();
    let mut adopted = Vec::new();
    while let Some(found) = looks.next().await {
        adopted.extend(found);
    }
    end_unrecorded(shared).await;
    adopted
}

async fn adopt_one(
    shared: &Arc<LocalContext>,
    engine: EngineId,
    entry: StoredEngine,
) -> Option<AdoptedProcess> {
    match examine(shared, &engine, &entry).await {
        Ok((tenant, process, start, asleep)) => {
            shared.reserve_port(entry.address.port());
            let ready = start != LocalEngineStart::Starting;
            tracing::info!(%engine, pid = entry.pid, ?start, "adopted");
            // One that had been ready and is silent has all of a start's time to answer, not what is left of its own.
            let silent = start == LocalEngineStart::Starting && entry.phase != StoredPhase::Starting;
            let started = if silent { shared.common.clock.now() } else { entry.started };
            let found = AdoptedEngine {
                address: entry.address,
                accelerators: entry.accelerators,
                asleep,
                ready,
                fingerprint: entry.fingerprint,
                last_lease_end: entry.last_lease_end,
                started,
            };
            let generation = entry.generation;
            let event = Event::Adopted { engine, generation, found };
            shared.common.send_event(event).await;
            Some((tenant, process, start))
        }
        Err(reason) => {
            tracing::warn!(%engine, pid = entry.pid, %reason, "left over: ended");
            end(shared, &engine, &entry).await;
            shared.store.remove(&engine, entry.generation).await;
            None
        }
    }
}

async fn examine(
    shared: &Arc<LocalContext>,
    engine: &EngineId,
    entry: &StoredEngine,
) -> Result<(Arc<LocalEngine>, ProcessGroup, LocalEngineStart, Option<SleepLevel>), NotAdopted> {
    let config = shared.common.config.load_full();
    let model = config.engines.get(&engine.model).ok_or(NotAdopted::NotConfigured)?;
    let tenant = LocalEngine::new(shared, engine.clone(), entry.generation, entry.address, Arc::clone(model));
    let process = ProcessGroup::adopt(entry.pid, tenant.mark()).map_err(|_| NotAdopted::Gone)?;
    // Asked after the descriptor is held: from here on the pid cannot become another process unnoticed.
    if !is_same_process(entry) {
        return Err(NotAdopted::Gone);
    }
    if !listens(entry, tenant.mark()).await? {
        return match entry.phase {
            StoredPhase::Starting => Ok((tenant, process, LocalEngineStart::Starting, None)),
            StoredPhase::Awake | StoredPhase::Transitioning(_) | StoredPhase::Asleep(_) => {
                Err(NotAdopted::Unhealthy)
            }
        };
    }
    let (start, asleep) = probe_start(&tenant, entry.phase).await?;
    Ok((tenant, process, start, asleep))
}

/// Whether the recorded process is the one that has its pid now.
fn is_same_process(entry: &StoredEngine) -> bool {
    table::stat(entry.pid).is_some_and(|stat| stat.start == entry.process_start_ticks && !stat.zombie)
}

/// Whether the engine itself listens on its port yet.
async fn listens(entry: &StoredEngine, mark: String) -> Result<bool, NotAdopted> {
    let (port, group) = (entry.address.port(), entry.pid);
    let look = task::spawn_blocking(move || {
        let all = table::listeners(port);
        let own = table::owned_by(&all, &table::members(Some(group), &mark));
        (all.is_empty(), own.is_empty())
    });
    match look.await {
        Ok((true, _)) => Ok(false),
        Ok((false, false)) => Ok(true),
        Ok((false, true)) | Err(_) => Err(NotAdopted::PortTaken),
    }
}

/// How the engine answers, held against what was recorded. One that is silent (it may be starting, or busy) is taken
/// over as not ready: the decisions' deadline for starts ends it when it stays so.
async fn probe_start(
    tenant: &Arc<LocalEngine>,
    recorded: StoredPhase,
) -> Result<(LocalEngineStart, Option<SleepLevel>), NotAdopted> {
    let health = async {
        tokio::join!(
            tenant.client.adapter.health(PROBE_TIMEOUT),
            tenant.client.adapter.is_asleep(PROBE_TIMEOUT)
        )
    };
    let (health, says_asleep) =
        time::timeout(PROBE_TIMEOUT, health).await.unwrap_or((EngineHealth::Unreachable, None));
    let health = match health {
        // Before it closed its gate the stub was there for an engine that served: it is watched as one that does.
        EngineHealth::Gated if tenant.client.model.stub => EngineHealth::Healthy,
        EngineHealth::Gated => EngineHealth::Unhealthy,
        health => health,
    };
    match (recorded, says_asleep, health) {
        (StoredPhase::Starting, _, _) => Ok((LocalEngineStart::Starting, None)),
        (
            StoredPhase::Asleep(level),
            Some(true) | None,
            EngineHealth::Healthy | EngineHealth::Unreachable,
        )
        | (StoredPhase::Transitioning(level), Some(true), _) => {
            tenant.set_phase(StoredPhase::Asleep(level)).await;
            Ok((LocalEngineStart::Asleep, Some(level)))
        }
        // Half awake, and at level 2 perhaps with noise for weights: not to be guessed at.
        (StoredPhase::Transitioning(_), _, _) => Err(NotAdopted::Interrupted),
        (StoredPhase::Asleep(_), Some(false), _)
        | (StoredPhase::Awake, Some(true), _)
        | (_, _, EngineHealth::Unhealthy | EngineHealth::Gated) => Err(NotAdopted::Unhealthy),
        (StoredPhase::Awake, _, EngineHealth::Healthy) => Ok((LocalEngineStart::Awake, None)),
        (StoredPhase::Awake, _, EngineHealth::Unreachable) => Ok((LocalEngineStart::Starting, None)),
    }
}

/// Ends what is left of a recorded engine. When its first process is no longer the recorded one its group may be
/// somebody else's by now, and only the mark counts.
async fn end(shared: &Arc<LocalContext>, engine: &EngineId, entry: &StoredEngine) {
    let mark = format!("{MARK_VAR}={}", launch::mark(shared, engine, entry.generation));
    let group = is_same_process(entry).then_some(entry.pid);
    clear(group, mark).await;
}

/// Ends every process that carries the mark of this state directory and belongs to no recorded engine.
async fn end_unrecorded(shared: &Arc<LocalContext>) {
    let known: BTreeSet<String> = shared
        .store
        .engines()
        .iter()
        .map(|(engine, entry)| launch::mark(shared, engine, entry.generation))
        .collect();
    let ours = format!("{}|", shared.store.folder().display());
    let find = move || -> BTreeSet<String> {
        let marks = table::pids().filter_map(|pid| table::env_value(pid, MARK_VAR));
        marks.filter(|mark| mark.starts_with(&ours) && !known.contains(mark)).collect()
    };
    for mark in task::spawn_blocking(find).await.unwrap_or_default() {
        tracing::warn!(%mark, "left over and not recorded: ended");
        clear(None, format!("{MARK_VAR}={mark}")).await;
    }
}

/// A process that cannot die (its driver hangs) must not keep the gateway from serving: the memory it holds shows on
/// the meter as in use, and it is tried again at the next start.
async fn clear(group: Option<i32>, mark: String) {
    let cleared = time::timeout(PROBE_TIMEOUT, process::kill_all(group, mark.clone())).await;
    if cleared.is_err() {
        tracing::error!(?group, %mark, "cannot be ended");
    }
}
