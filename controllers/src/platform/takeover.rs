//! A new leader's takeover: adopts running engines and ends what belongs to no engine.
//!
//! 1. Write this leader's epoch into every pool's ledger: a late write of a former leader then fails on its version.
//!    That begins with the term (`pools`), while the lists of Pods arrive.
//! 2. Report each engine that a former leader bound to a Pod as `Adopted`. An engine that serves by all records
//!    (`evidence`) is not asked first: its task confirms it after the takeover (`confirmation`). The others are queried
//!    through their stubs meanwhile, which obey the new epoch from then on.
//! 3. Release the reservations of engines that do not exist.
//!
//! Then `AdoptionDone` is sent, and decisions begin.
//!
//! Unbound Pods go when their Deployment's replica count is written again. The engine that such a Pod was made for
//! starts again in its turn.

mod evidence;
mod pools;
mod reservations;
mod running;
mod task;

use std::sync::Arc;

use rouse::{
    fleet::event::{AdoptedEngine, Event},
    model::EngineId,
    units::{Generation, Tick},
};

use self::{reservations::EngineReservations, running::RunningEngine, task::TakeoverTask};
use super::{
    KubernetesContext, engine_manager::EngineManager, engine_task::EngineTaskStart,
    ledger_writer::LedgerChange,
};
use crate::{condition::tick, crd::inference_model::EngineState};

pub(super) use self::{
    pools::{LedgerTakeover, start as start_ledgers},
    reservations::EngineReservation,
};

/// What a takeover found.
#[derive(Clone, Copy, Debug)]
pub(super) struct TakeoverOutcome {
    pub(super) pools: usize,
    /// Engines that ran.
    pub(super) engines: usize,
    /// Those of them that did not serve by all records, and were asked.
    pub(super) asked: usize,
    /// When the last ledger was written.
    pub(super) ledgers_taken: Tick,
}

pub(super) async fn take_over(manager: &mut EngineManager, ledgers: LedgerTakeover) -> TakeoverOutcome {
    let shared = Arc::clone(&manager.shared);
    let taken = pools::finish(&shared, ledgers).await;
    let booked = EngineReservations::new(taken.reservations);
    let found = running::find(&shared, &booked, manager.pods.values(), &manager.published);
    let (asked, serving): (Vec<_>, Vec<_>) = found.into_iter().partition(|running| running.asked);
    let outcome = TakeoverOutcome {
        pools: taken.pools.len(),
        engines: asked.len() + serving.len(),
        asked: asked.len(),
        ledgers_taken: taken.at,
    };
    let answers = running::ask(&shared, manager.epoch(), asked);
    for running in serving {
        adopt(manager, &shared, &booked, running).await;
    }
    for running in answers.finish().await {
        adopt(manager, &shared, &booked, running).await;
    }
    adopt_externals(manager, &shared).await;
    end_unadopted(manager, &shared, &booked).await;
    outcome
}

async fn adopt(
    manager: &mut EngineManager,
    shared: &Arc<KubernetesContext>,
    reservations: &EngineReservations,
    running: RunningEngine,
) {
    let RunningEngine {
        engine,
        generation,
        placement,
        pod,
        address,
        asked,
        ready,
        served,
        unauthorized,
        location,
    } = running;
    // The Pod records the order to sleep before it is sent, and the ledger that the engine sleeps. In between it may be
    // awake.
    let own_entries = reservations.of(&placement.reservation_owner(engine.replica));
    let sleeps = placement.pool.is_none() || own_entries.first().is_some_and(|entry| entry.asleep);
    if unauthorized {
        tracing::warn!(%engine, pod = %pod.name, "replacing the engine: its stub was started with another key");
        return manager.stop_unadopted(&placement, engine.replica, generation, Some(pod)).await;
    }
    if !placement.is_placed() {
        tracing::warn!(%engine, pod = %pod.name, "replacing the engine: its accelerators are not known");
        return manager.stop_unadopted(&placement, engine.replica, generation, Some(pod)).await;
    }
    tracing::debug!(%engine, pod = %pod.name, ready, asked, "engine adopted");
    let accelerators = placement.accounts();
    let event = Event::Adopted {
        engine: engine.clone(),
        generation,
        found: AdoptedEngine {
            address,
            accelerators,
            asleep: pod.asleep,
            ready: if pod.asleep.is_some() { sleeps } else { ready },
            fingerprint: pod.fingerprint,
            last_lease_end: manager.last_request(&placement.owner.object).max(pod.created),
            started: pod.created,
        },
    };
    if let (Some(request), Some(pool)) =
        (placement.reservation_request(engine.replica), placement.pool.clone())
    {
        // What the leader chose stays reserved, whatever a stub reports.
        let location = location.filter(|_| placement.location().is_none());
        // The engine runs, whatever is reserved. If the ledger already has all of this, the change would write nothing
        // and only cost a read before the pool's first decision.
        if location.is_some() || !reservations.has(&request.engine, &pool) {
            manager.change_pool_ledger(&pool, LedgerChange::Adopt { request, location });
        }
        if let Some(level) = pod.asleep.filter(|_| sleeps) {
            let owner = placement.reservation_owner(engine.replica);
            let declared = placement.sleeping_memory(level);
            manager.change_pool_ledger(&pool, LedgerChange::AdoptAsleep { engine: owner, declared });
        }
    }
    shared.status_inputs.set_pod(&engine, generation, &pod.name.name);
    shared.common.send_event(event).await;
    let start = match pod.asleep {
        Some(_) if sleeps => EngineTaskStart::Asleep,
        Some(level) => EngineTaskStart::FallingAsleep(level),
        None => awake_start(asked, ready, served),
    };
    manager.start_task(engine, generation, placement, Some(pod), start);
}

/// Returns where the task of an engine begins that no leader ordered to sleep. See [`RunningEngine`].
const fn awake_start(asked: bool, ready: bool, served: bool) -> EngineTaskStart {
    match (asked, ready, served) {
        (true, true, true) => EngineTaskStart::Awake,
        // Nothing is confirmed by records alone, nor by an answer that did not come.
        (_, _, true) => EngineTaskStart::Unconfirmed,
        // An engine that never served proves itself first, even if it answers.
        (_, _, false) => EngineTaskStart::Starting,
    }
}

/// Adopts backends that the former leader saw serving.
async fn adopt_externals(manager: &mut EngineManager, shared: &Arc<KubernetesContext>) {
    let externals = shared.externals();
    for (model, external) in externals.iter() {
        let published_model = manager.published.of_model(model).next();
        let awake = published_model.and_then(|published_model| {
            published_model
                .engines
                .iter()
                .find(|status| status.state == EngineState::Awake && status.replica == 0)
                .cloned()
        });
        let Some((status, address)) = awake.and_then(|status| {
            let address = status.address.as_ref()?.parse().ok()?;
            Some((status, address))
        }) else {
            continue;
        };
        let engine = EngineId::new(model.clone(), 0);
        let generation = Generation(status.generation);
        let found = AdoptedEngine {
            address,
            accelerators: Vec::new(),
            asleep: None,
            ready: true,
            fingerprint: external.engine.fingerprint,
            last_lease_end: Tick(0),
            started: status.since.as_ref().map(tick).unwrap_or_default(),
        };
        shared.common.send_event(Event::Adopted { engine: engine.clone(), generation, found }).await;
        manager.start_external(engine, generation, Arc::clone(external), Some(address));
    }
}

/// Ends what belongs to no adopted engine: Pods that leave or are unbound, and reservations.
async fn end_unadopted(
    manager: &mut EngineManager,
    shared: &Arc<KubernetesContext>,
    reservations: &EngineReservations,
) {
    let placements = shared.placements();
    let leaving_pods =
        manager.pods.values().filter(|pod| pod.terminating || pod.finished).cloned().collect::<Vec<_>>();
    for pod in leaving_pods {
        let Some(placement) = placements.of_pod(&pod) else { continue };
        if let Some((replica, generation)) = pod.engine {
            let placement = reservations.reserved_placement(placement, replica, &shared.sidecar);
            manager.stop_unadopted(&placement, replica, generation, Some(pod)).await;
        }
    }
    let entries: Vec<EngineReservation> = reservations.iter().cloned().collect();
    for entry in &entries {
        let EngineReservation { pool, engine, .. } = entry;
        if shared.initial_lists.is_skipped(&engine.model.namespace) {
            // Its Pods are not visible, so assume that they run and hold their reservations.
            continue;
        }
        if let Some(placement) = placements.of_owner(engine) {
            let reserved_placement =
                reservations.reserved_placement(placement, engine.replica, &shared.sidecar);
            if reserved_placement.pool.as_ref() == Some(pool) {
                manager.stop_unadopted(&reserved_placement, engine.replica, Generation(0), None).await;
            } else {
                // An engine is in one pool only: nothing of it is left in this pool.
                let entry = LedgerChange::Release { engine: engine.clone(), done: None };
                manager.change_pool_ledger(pool, entry);
            }
            continue;
        }
        manager.keep_orphan(entry.clone());
    }
    manager.scale_down_orphans();
    manager.release_orphans();
    // Writing a Deployment's replica count gives up its unknown Pods.
    for labels in manager.pods.labels().cloned().collect::<Vec<_>>() {
        if let Some(placement) = placements.of_labels(&labels.namespace, &labels.model, &labels.variant) {
            let deployment = placement.deployment_of(&labels.template_hash);
            manager.update_replicas(&deployment, Some(Arc::clone(placement)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_an_engine_that_served_and_answers_is_awake_without_a_check() {
        for (asked, ready) in [(false, false), (false, true), (true, false), (true, true)] {
            assert_eq!(awake_start(asked, ready, false), EngineTaskStart::Starting);
            let expected = if asked && ready { EngineTaskStart::Awake } else { EngineTaskStart::Unconfirmed };
            assert_eq!(awake_start(asked, ready, true), expected, "asked: {asked}, ready: {ready}");
        }
    }
}
