//! What already runs when the gateway starts.
//!
//! The state file names engines; it is a hint, not evidence. An engine is adopted when its process lives with the
//! recorded start time, when whoever listens on its port belongs to it, and when it does not answer against what was
//! recorded. What fails this, or matches no configured model, is stopped and reported, and so is every process that
//! carries our mark without being in the file (the gateway died between starting and noting it).

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use rouse::{
    adapter::Health,
    fleet::event::{Event, Found},
    model::{EngineId, Level},
    process::{self, Process, table},
};
use tokio::{task, time};

use super::{
    Shared,
    launch::{self, MARK},
    life::{Start, Tenant},
    store::{Entry, Phase},
};

/// For all questions to one engine. The whole adoption takes little longer: engines are asked side by side.
const DEADLINE: Duration = Duration::from_millis(1200);

type Adopted = (Arc<Tenant>, Process, Start);

#[derive(Debug, thiserror::Error)]
enum Leftover {
    #[error("its model is not configured")]
    NotConfigured,
    #[error("its process is gone")]
    Gone,
    #[error("its port belongs to another process")]
    Foreign,
    #[error("it does not answer as an engine does")]
    Unhealthy,
    #[error("a sleep or wake was interrupted, and what it holds is not known")]
    Interrupted,
}

/// Looks at everything that was recorded, sends `Adopted` for what is taken over, and ends the rest.
pub(super) async fn all(shared: &Arc<Shared>) -> Vec<Adopted> {
    let entries = shared.store.engines();
    let mut looks: FuturesUnordered<_> =
        entries.iter().map(|(engine, entry)| one(shared, engine.clone(), entry.clone())).collect();
    let mut adopted = Vec::new();
    while let Some(found) = looks.next().await {
        adopted.extend(found);
    }
    end_strays(shared).await;
    adopted
}

async fn one(shared: &Arc<Shared>, engine: EngineId, entry: Entry) -> Option<Adopted> {
    match examine(shared, &engine, &entry).await {
        Ok((tenant, process, start, asleep)) => {
            shared.keep_port(entry.address.port());
            let ready = start != Start::Starting;
            tracing::info!(%engine, pid = entry.pid, ?start, "adopted");
            // One that had been ready and is silent has all of a start's time to answer, not what is left of its own.
            let silent = start == Start::Starting && entry.phase != Phase::Starting;
            let started = if silent { shared.common.clock.now() } else { entry.started };
            let found = Found {
                address: entry.address,
                accelerators: entry.accelerators,
                asleep,
                ready,
                fingerprint: entry.fingerprint,
                last_end: entry.last_end,
                started,
            };
            let generation = entry.generation;
            let event = Event::Adopted { engine, generation, found };
            shared.common.tell(event).await;
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
    shared: &Arc<Shared>,
    engine: &EngineId,
    entry: &Entry,
) -> Result<(Arc<Tenant>, Process, Start, Option<Level>), Leftover> {
    let config = shared.common.config.load_full();
    let model = config.models.get(&engine.model).ok_or(Leftover::NotConfigured)?;
    let tenant = Tenant::new(shared, engine.clone(), entry.generation, entry.address, Arc::clone(model));
    let process = Process::adopted(entry.pid, tenant.mark()).map_err(|_| Leftover::Gone)?;
    // Asked after the descriptor is held: from here on the pid cannot become another process unnoticed.
    if !same(entry) {
        return Err(Leftover::Gone);
    }
    if !listens(entry, tenant.mark()).await? {
        return match entry.phase {
            Phase::Starting => Ok((tenant, process, Start::Starting, None)),
            Phase::Awake | Phase::Moving(_) | Phase::Asleep(_) => Err(Leftover::Unhealthy),
        };
    }
    let (start, asleep) = ask(&tenant, entry.phase).await?;
    Ok((tenant, process, start, asleep))
}

/// Whether the recorded process is the one that has its pid now.
fn same(entry: &Entry) -> bool {
    table::stat(entry.pid).is_some_and(|stat| stat.start == entry.start && !stat.zombie)
}

/// Whether the engine itself listens on its port yet.
async fn listens(entry: &Entry, mark: String) -> Result<bool, Leftover> {
    let (port, group) = (entry.address.port(), entry.pid);
    let look = task::spawn_blocking(move || {
        let all = table::listeners(port);
        let own = table::owned(&all, &table::members(Some(group), &mark));
        (all.is_empty(), own.is_empty())
    });
    match look.await {
        Ok((true, _)) => Ok(false),
        Ok((false, false)) => Ok(true),
        Ok((false, true)) | Err(_) => Err(Leftover::Foreign),
    }
}

/// How the engine answers, held against what was recorded. One that is silent (it may be starting, or busy) is taken
/// over as not ready: the decisions' deadline for starts ends it when it stays so.
async fn ask(tenant: &Arc<Tenant>, recorded: Phase) -> Result<(Start, Option<Level>), Leftover> {
    let health = async {
        tokio::join!(tenant.contact.adapter.health(DEADLINE), tenant.contact.adapter.asleep(DEADLINE))
    };
    let (health, says_asleep) = time::timeout(DEADLINE, health).await.unwrap_or((Health::Silent, None));
    let health = match health {
        // Before it closed its gate the stub was there for an engine that served: it is watched as one that does.
        Health::Gated if tenant.contact.model.stub => Health::Good,
        Health::Gated => Health::Bad,
        health => health,
    };
    match (recorded, says_asleep, health) {
        (Phase::Starting, _, _) => Ok((Start::Starting, None)),
        (Phase::Asleep(level), Some(true) | None, Health::Good | Health::Silent)
        | (Phase::Moving(level), Some(true), _) => {
            tenant.enter(Phase::Asleep(level)).await;
            Ok((Start::Asleep, Some(level)))
        }
        // Half awake, and at level 2 perhaps with noise for weights: not to be guessed at.
        (Phase::Moving(_), _, _) => Err(Leftover::Interrupted),
        (Phase::Asleep(_), Some(false), _)
        | (Phase::Awake, Some(true), _)
        | (_, _, Health::Bad | Health::Gated) => Err(Leftover::Unhealthy),
        (Phase::Awake, _, Health::Good) => Ok((Start::Awake, None)),
        (Phase::Awake, _, Health::Silent) => Ok((Start::Starting, None)),
    }
}

/// Ends what is left of a recorded engine. When its first process is no longer the recorded one its group may be
/// somebody else's by now, and only the mark counts.
async fn end(shared: &Arc<Shared>, engine: &EngineId, entry: &Entry) {
    let mark = format!("{MARK}={}", launch::mark(shared, engine, entry.generation));
    let group = same(entry).then_some(entry.pid);
    clear(group, mark).await;
}

/// Ends every process that carries the mark of this state directory and belongs to no recorded engine.
async fn end_strays(shared: &Arc<Shared>) {
    let known: BTreeSet<String> = shared
        .store
        .engines()
        .iter()
        .map(|(engine, entry)| launch::mark(shared, engine, entry.generation))
        .collect();
    let ours = format!("{}|", shared.store.folder().display());
    let find = move || -> BTreeSet<String> {
        let marks = table::pids().filter_map(|pid| table::mark_of(pid, MARK));
        marks.filter(|mark| mark.starts_with(&ours) && !known.contains(mark)).collect()
    };
    for mark in task::spawn_blocking(find).await.unwrap_or_default() {
        tracing::warn!(%mark, "left over and not recorded: ended");
        clear(None, format!("{MARK}={mark}")).await;
    }
}

/// A process that cannot die (its driver hangs) must not keep the gateway from serving: the memory it holds shows on
/// the meter as in use, and it is tried again at the next start.
async fn clear(group: Option<i32>, mark: String) {
    let cleared = time::timeout(DEADLINE, process::clear(group, mark.clone())).await;
    if cleared.is_err() {
        tracing::error!(?group, %mark, "cannot be ended");
    }
}
