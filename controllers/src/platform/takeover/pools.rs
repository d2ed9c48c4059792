//! Takes over the pools' ledgers.

use std::{collections::BTreeSet, sync::Arc};

use futures_util::{StreamExt as _, stream};

use super::{EngineReservation, MAX_CONCURRENT_CHECKS};
use crate::{
    crd::ledger::ReservationState,
    ledger::Error,
    platform::{KubernetesContext, engine_task::RetryBackoff},
};

/// Maximum number of tries to read a pool's ledger, with pauses of up to a second.
const MAX_STAMP_TRIES: u32 = 10;

/// Writes the epoch into every pool's ledger; returns which engines have a reservation.
pub(super) async fn stamp(shared: &Arc<KubernetesContext>) -> Vec<EngineReservation> {
    let placements = shared.placements();
    let mut pools: BTreeSet<String> =
        placements.values().filter_map(|placement| placement.pool.clone()).collect();
    pools.extend(reserved_pools(shared).await);
    let stamped =
        stream::iter(pools).map(|pool| stamp_one(shared, pool)).buffer_unordered(MAX_CONCURRENT_CHECKS);
    stamped.collect::<Vec<_>>().await.concat()
}

async fn stamp_one(shared: &Arc<KubernetesContext>, pool: String) -> Vec<EngineReservation> {
    let mut pauses = RetryBackoff::new();
    for _ in 0..MAX_STAMP_TRIES {
        match shared.pool_ledger.take_over(&BTreeSet::from([pool.clone()])).await {
            Ok(ledgers) => {
                let booked = ledgers.into_values().flat_map(|ledger| ledger.reservations);
                let booked = booked.map(|entry| EngineReservation {
                    pool: pool.clone(),
                    asleep: entry.state == ReservationState::Asleep,
                    placed: entry.state == ReservationState::Placed,
                    location: entry.location(),
                    engine: entry.owner(),
                });
                return booked.collect();
            }
            // The current leader has written its epoch, or will.
            Err(Error::NotLeading) => return Vec::new(),
            Err(error @ Error::Replaced { .. }) => {
                tracing::error!(pool, %error, "cannot take over the pool: nothing can be reserved in it");
                return Vec::new();
            }
            // An unreadable pool must not block the other pools. Nothing can be reserved in it either.
            Err(error) => tracing::warn!(pool, %error, "pool takeover failed, retrying"),
        }
        pauses.pause().await;
    }
    Vec::new()
}

/// Returns the pools with reservations of models in watched namespaces. Models need not name them today.
async fn reserved_pools(shared: &Arc<KubernetesContext>) -> BTreeSet<String> {
    let watched = |namespace: &String| {
        shared.namespaces.iter().any(|watched| watched.as_ref().is_none_or(|watched| watched == namespace))
    };
    let mut pauses = RetryBackoff::new();
    for _ in 0..MAX_STAMP_TRIES {
        match shared.pool_ledger.pools_with_reservations().await {
            Ok(pools) => {
                let of_ours = |(_, namespaces): &(String, BTreeSet<String>)| namespaces.iter().any(watched);
                return pools.into_iter().filter(of_ours).map(|(pool, _)| pool).collect();
            }
            Err(error) => tracing::warn!(%error, "pool list failed, retrying"),
        }
        pauses.pause().await;
    }
    BTreeSet::new()
}
