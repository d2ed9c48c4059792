//! Adopts engines that already run when the gateway starts.
//!
//! The state file names engines, but proves nothing. An engine is adopted if its process lives with the recorded start
//! time, if the listener on its port belongs to it, and if its answers do not contradict the record. An engine that
//! fails a check, or that matches no configured model, is stopped and reported. So is every process with our mark that
//! is not in the file: the gateway died between its start and its record.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::{StreamExt, future::join_all, stream::FuturesUnordered};
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

/// Timeout of all probes of one engine. Engines are probed concurrently.
const PROBE_TIMEOUT: Duration = Duration::from_millis(1200);

/// Longest wait for killed processes to end. Their memory is not booked, so nothing may start there before it is free:
/// the kernel takes seconds to release 100 GB of pinned RAM.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);

type AdoptedProcess = (Arc<LocalEngine>, ProcessGroup, LocalEngineStart);

#[derive(Debug, thiserror::Error)]
enum NotAdopted {
    #[error("the model is not configured")]
    NotConfigured,
    #[error("the engine's process is gone")]
    Gone,
    #[error("another process listens on the engine's port")]
    PortTaken,
    #[error("the engine is unhealthy or not in its recorded state")]
    Unhealthy,
    #[error("a sleep or wake was interrupted, so the engine's state is unknown")]
    Interrupted,
}

/// Checks every recorded engine, sends `Adopted` for the ones that pass, and ends the rest.
pub(super) async fn adopt_all(shared: &Arc<LocalContext>) -> Vec<AdoptedProcess> {
    let entries = shared.store.engines();
    let mut adoptions: FuturesUnordered<_> =
        entries.iter().map(|(engine, entry)| adopt_one(shared, engine.clone(), entry.clone())).collect();
    let mut adopted = Vec::new();
    while let Some(found) = adoptions.next().await {
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
        Ok((local_engine, process, start, asleep)) => {
            let port = entry.address.port();
            shared.reserve_port(port, rouse_net::port::claim_number(port));
            let ready = start != LocalEngineStart::Starting;
            tracing::info!(%engine, pid = entry.pid, ?start, "engine adopted");
            // An engine that was ready and is silent now gets a whole start timeout, not the rest of its own.
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
            Some((local_engine, process, start))
        }
        Err(reason) => {
            tracing::warn!(%engine, pid = entry.pid, %reason, "left over engine not adopted, stopping its processes");
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
    let local_engine =
        LocalEngine::new(shared, engine.clone(), entry.generation, entry.address, Arc::clone(model));
    let process = ProcessGroup::adopt(entry.pid, local_engine.mark()).map_err(|_| NotAdopted::Gone)?;
    // Checked while the descriptor is held: from here on the pid cannot become another process unnoticed.
    if !is_same_process(entry) {
        return Err(NotAdopted::Gone);
    }
    if !listens(entry, local_engine.mark()).await? {
        return match entry.phase {
            StoredPhase::Starting => Ok((local_engine, process, LocalEngineStart::Starting, None)),
            StoredPhase::Awake | StoredPhase::Transitioning(_) | StoredPhase::Asleep(_) => {
                Err(NotAdopted::Unhealthy)
            }
        };
    }
    let (start, asleep) = probe_start(&local_engine, entry.phase).await?;
    Ok((local_engine, process, start, asleep))
}

/// Whether the pid still belongs to the recorded process.
fn is_same_process(entry: &StoredEngine) -> bool {
    table::stat(entry.pid).is_some_and(|stat| stat.start == entry.process_start_ticks && !stat.zombie)
}

/// Whether the engine itself already listens on its port.
async fn listens(entry: &StoredEngine, mark: String) -> Result<bool, NotAdopted> {
    let (port, group) = (entry.address.port(), entry.pid);
    let look = task::spawn_blocking(move || {
        let all = table::listeners(port);
        let own_ports = table::owned_by(&all, &table::members(Some(group), &mark));
        (all.is_empty(), own_ports.is_empty())
    });
    match look.await {
        Ok((true, _)) => Ok(false),
        Ok((false, false)) => Ok(true),
        Ok((false, true)) | Err(_) => Err(NotAdopted::PortTaken),
    }
}

/// Compares the engine's answers with its recorded phase.
///
/// A silent engine may be starting or busy, so it is adopted as not ready. If it stays silent, the fleet's start
/// deadline ends it.
async fn probe_start(
    local_engine: &Arc<LocalEngine>,
    recorded: StoredPhase,
) -> Result<(LocalEngineStart, Option<SleepLevel>), NotAdopted> {
    let health = async {
        tokio::join!(
            local_engine.client.adapter.health(PROBE_TIMEOUT),
            local_engine.client.adapter.is_asleep(PROBE_TIMEOUT)
        )
    };
    let (health, says_asleep) =
        time::timeout(PROBE_TIMEOUT, health).await.unwrap_or((EngineHealth::Unreachable, None));
    let health = match health {
        // The stub closed its gate in front of an engine that served, so the health watch begins as for a serving
        // engine.
        EngineHealth::Gated if local_engine.client.model.stub => EngineHealth::Healthy,
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
            local_engine.set_phase(StoredPhase::Asleep(level)).await;
            Ok((LocalEngineStart::Asleep, Some(level)))
        }
        // The engine is half awake, and at level 2 its weights may be noise: do not guess.
        (StoredPhase::Transitioning(_), _, _) => Err(NotAdopted::Interrupted),
        (StoredPhase::Asleep(_), Some(false), _)
        | (StoredPhase::Awake, Some(true), _)
        | (_, _, EngineHealth::Unhealthy | EngineHealth::Gated) => Err(NotAdopted::Unhealthy),
        (StoredPhase::Awake, _, EngineHealth::Healthy) => Ok((LocalEngineStart::Awake, None)),
        (StoredPhase::Awake, _, EngineHealth::Unreachable) => Ok((LocalEngineStart::Starting, None)),
    }
}

/// Ends what is left of a recorded engine.
///
/// If its first process is not the recorded one any more, the group may be another program's, and only the mark counts.
async fn end(shared: &Arc<LocalContext>, engine: &EngineId, entry: &StoredEngine) {
    let mark = format!("{MARK_VAR}={}", launch::mark(shared, engine, entry.generation));
    let group = is_same_process(entry).then_some(entry.pid);
    clear(group, mark).await;
}

/// Ends every process with this state directory's mark that belongs to no recorded engine.
async fn end_unrecorded(shared: &Arc<LocalContext>) {
    let known: BTreeSet<String> = shared
        .store
        .engines()
        .iter()
        .map(|(engine, entry)| launch::mark(shared, engine, entry.generation))
        .collect();
    let mark_prefix = format!("{}|", shared.store.folder().display());
    let find = move || -> BTreeSet<String> {
        let marks = table::pids().filter_map(|pid| table::env_value(pid, MARK_VAR));
        marks.filter(|mark| mark.starts_with(&mark_prefix) && !known.contains(mark)).collect()
    };
    let marks = task::spawn_blocking(find).await.unwrap_or_default();
    join_all(marks.into_iter().map(|mark| {
        tracing::warn!(%mark, "left over processes belong to no recorded engine, stopping them");
        clear(None, format!("{MARK_VAR}={mark}"))
    }))
    .await;
}

/// Kills the processes of a group or mark, and waits until they have ended or the timeout is over.
///
/// A process that cannot die (its driver hangs) must not keep the gateway from serving. Its memory shows on the meter
/// as in use, and the next start tries again.
async fn clear(group: Option<i32>, mark: String) {
    let cleared = time::timeout(KILL_TIMEOUT, process::kill_all(group, mark.clone())).await;
    if cleared.is_err() {
        tracing::error!(?group, %mark, "engine processes still run after SIGKILL");
    }
}
