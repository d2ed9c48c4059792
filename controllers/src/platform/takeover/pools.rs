//! Takes over the pools' ledgers.
//!
//! That needs none of the lists that a term begins with, and so goes on while they arrive. An earlier stamp is no worse
//! than a later one: what a former leader has written before it is in the ledger that is returned, and nothing is
//! written after it. A former leader reserves before it starts an engine, so each engine of a list has its reservation.

use std::{collections::BTreeSet, sync::Arc};

use futures_util::{StreamExt as _, stream};
use rouse::units::Tick;

use super::{EngineReservation, TakeoverTask};
use crate::{
    crd::ledger::ReservationState,
    ledger::Error,
    platform::{KubernetesContext, engine_task::RetryBackoff},
};

/// Maximum number of tries to read a pool's ledger while the lists arrive, with pauses of up to a second.
const MAX_STAMP_TRIES: u32 = 10;
/// The same once the lists are complete, with pauses of 0.6 s in all: the API server answers, and decisions wait.
const MAX_LATE_STAMP_TRIES: u32 = 6;
/// Maximum number of pools that are written at once.
const MAX_CONCURRENT_STAMPS: usize = 64;

/// The takeover of all ledgers, which has begun with the term.
pub(in crate::platform) type LedgerTakeover = TakeoverTask<TakenLedgers>;

/// Ledgers that have this leader's epoch.
#[derive(Debug, Default)]
pub(in crate::platform) struct TakenLedgers {
    /// The pools that need no other try.
    pub(super) pools: BTreeSet<String>,
    /// The engines that have a reservation.
    pub(super) reservations: Vec<EngineReservation>,
    /// When the last ledger was written.
    pub(super) at: Tick,
    /// The pools with reservations, once they were listed.
    reserved: Option<BTreeSet<String>>,
}

/// Writes the epoch into every pool's ledger, in a task of its own.
pub(in crate::platform) fn start(shared: &Arc<KubernetesContext>) -> LedgerTakeover {
    let shared = Arc::clone(shared);
    TakeoverTask::start(async move {
        let mut taken = TakenLedgers::default();
        taken.take_rest(&shared, MAX_STAMP_TRIES).await;
        taken
    })
}

/// Returns all ledgers, also those of pools that a model has named only since the start.
///
/// The API server may have failed for a while meanwhile. Now that the lists are complete, it answers again. Without the
/// reservations of a pool, the takeover would miss engines.
pub(super) async fn finish(shared: &Arc<KubernetesContext>, started: LedgerTakeover) -> TakenLedgers {
    let mut taken = started.finish().await;
    taken.take_rest(shared, MAX_LATE_STAMP_TRIES).await;
    taken
}

impl TakenLedgers {
    /// Takes over the ledgers that are still missing.
    async fn take_rest(&mut self, shared: &Arc<KubernetesContext>, max_tries: u32) {
        let is_listed = self.reserved.is_some();
        if !is_listed {
            self.reserved = reserved_pools(shared, max_tries).await;
        }
        let mut wanted = placed_pools(shared);
        wanted.extend(self.reserved.iter().flatten().cloned());
        let missing: BTreeSet<String> = wanted.difference(&self.pools).cloned().collect();
        if is_listed && missing.is_empty() {
            return;
        }
        for (pool, reservations) in stamp(shared, missing, max_tries).await {
            self.pools.insert(pool);
            self.reservations.extend(reservations);
        }
        self.at = shared.common.clock.now();
    }
}

fn placed_pools(shared: &KubernetesContext) -> BTreeSet<String> {
    shared.placements().values().filter_map(|placement| placement.pool.clone()).collect()
}

/// A pool that needs no other try, and which engines have a reservation in it.
type StampedPool = (String, Vec<EngineReservation>);

/// Writes the epoch into these pools' ledgers. Leaves out pools that another try may write.
async fn stamp(shared: &Arc<KubernetesContext>, pools: BTreeSet<String>, max_tries: u32) -> Vec<StampedPool> {
    let stamped = stream::iter(pools)
        .map(|pool| stamp_one(shared, pool, max_tries))
        .buffer_unordered(MAX_CONCURRENT_STAMPS);
    stamped.collect::<Vec<_>>().await.into_iter().flatten().collect()
}

async fn stamp_one(shared: &Arc<KubernetesContext>, pool: String, max_tries: u32) -> Option<StampedPool> {
    let mut pauses = RetryBackoff::new();
    for attempt in 0..max_tries {
        if attempt > 0 {
            pauses.pause().await;
        }
        match shared.pool_ledger.take_over(&BTreeSet::from([pool.clone()])).await {
            Ok(mut ledgers) => {
                // A pool that does not exist may be created until the next try.
                let ledger = ledgers.remove(&pool)?;
                let booked = ledger.reservations.into_iter().map(|entry| EngineReservation {
                    pool: pool.clone(),
                    asleep: entry.state == ReservationState::Asleep,
                    placed: entry.state == ReservationState::Placed,
                    location: entry.location(),
                    engine: entry.owner(),
                });
                let booked: Vec<EngineReservation> = booked.collect();
                return Some((pool, booked));
            }
            // The current leader has written its epoch, or will.
            Err(Error::NotLeading) => return None,
            Err(error @ Error::Replaced { .. }) => {
                tracing::error!(pool, %error, "cannot take over the pool: nothing can be reserved in it");
                return Some((pool, Vec::new()));
            }
            // An unreadable pool must not block the other pools. Nothing can be reserved in it either.
            Err(error) => tracing::warn!(pool, %error, "pool takeover failed, retrying"),
        }
    }
    None
}

/// Returns the pools with reservations of models in watched namespaces. Models need not name them today.
///
/// `None` if they cannot be listed.
async fn reserved_pools(shared: &Arc<KubernetesContext>, max_tries: u32) -> Option<BTreeSet<String>> {
    let watched = |namespace: &String| {
        shared.namespaces.iter().any(|watched| watched.as_ref().is_none_or(|watched| watched == namespace))
    };
    let mut pauses = RetryBackoff::new();
    for attempt in 0..max_tries {
        if attempt > 0 {
            pauses.pause().await;
        }
        match shared.pool_ledger.pools_with_reservations().await {
            Ok(pools) => {
                let of_ours = |(_, namespaces): &(String, BTreeSet<String>)| namespaces.iter().any(watched);
                return Some(pools.into_iter().filter(of_ours).map(|(pool, _)| pool).collect());
            }
            Err(error) => tracing::warn!(%error, "pool list failed, retrying"),
        }
    }
    None
}
