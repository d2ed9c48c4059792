//! Who changes the ledger of one pool: one after the other, and what waits together in one write.
//!
//! An order of things is kept that the decisions rely on: what was given back is given back before the same engine books
//! again. A booking whose write failed may stand all the same; it is given back, and the decisions ask anew.

use std::{convert::Infallible, sync::Arc, time::Duration};

use rouse::{
    fleet::event::Event,
    model::EngineId,
    units::{Bytes, Generation, Tick},
};
use tokio::{
    sync::{mpsc, oneshot},
    time,
};

use super::KubernetesContext;
use crate::controllers::{
    crd::ledger::{Ledger, ObjectName},
    index::AcceleratorCapacities,
    ledger::{
        Error, LocationError, ReservationLocation, ReservationRefusal, ReservationRequest, SleepingMemory,
    },
};

/// So many changes go into one write.
const MAX_BATCH: usize = 64;
const MIN_RETRY_DELAY: Duration = Duration::from_millis(100);
/// What a sleeper lacks is asked for so often.
const SLEEPER_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);

/// A change of the ledger.
#[derive(Debug)]
pub(super) enum LedgerChange {
    /// Outcome: `Placed` or `Conflict`. `keeps`: of an engine that sleeps, what it has should nothing come of it.
    Reserve {
        engine: EngineId,
        generation: Generation,
        request: ReservationRequest,
        sleeping_memory: Option<SleepingMemory>,
    },
    /// The engine sleeps, and keeps no more than this.
    MarkAsleep { model: ObjectName, replica: u32, sleeping_memory: SleepingMemory },
    /// The engine was told to go; what it has stays booked.
    MarkReleasing { model: ObjectName, replica: u32 },
    /// It runs there: what it takes is booked, whether or not there is room.
    Adopt { request: ReservationRequest, location: Option<ReservationLocation> },
    /// The engine came to these accelerators; whether it fits there is told.
    SetLocation {
        model: ObjectName,
        replica: u32,
        location: ReservationLocation,
        capacities: AcceleratorCapacities,
        done: oneshot::Sender<Result<(), LocationError>>,
    },
    /// Its memory is free.
    Release { model: ObjectName, replica: u32, done: Option<oneshot::Sender<()>> },
}

/// Until nobody has entries any more.
pub(super) async fn run(
    shared: Arc<KubernetesContext>,
    pool: String,
    mut entries: mpsc::UnboundedReceiver<LedgerChange>,
) {
    let mut open = Vec::new();
    let mut pause = MIN_RETRY_DELAY;
    loop {
        if open.is_empty() && entries.recv_many(&mut open, MAX_BATCH).await == 0 {
            return;
        }
        let now = shared.common.clock.now();
        let change = |ledger: &mut Ledger, total| {
            Ok::<_, Infallible>(open.iter().map(|entry| entry.apply(ledger, total, now)).collect::<Vec<_>>())
        };
        match shared.pool_ledger.change(&pool, change).await {
            Ok(outcomes) => {
                pause = MIN_RETRY_DELAY;
                for (entry, outcome) in open.drain(..).zip(outcomes) {
                    entry.finish(&shared, &pool, outcome).await;
                }
            }
            Err(Error::NotLeading | Error::Replaced { .. } | Error::NoPool(_)) => {
                // Whoever leads now books from what there is; in a pool that is gone nothing is booked.
                for entry in open.drain(..) {
                    entry.finish(&shared, &pool, LedgerOutcome::Dropped).await;
                }
            }
            Err(error) => {
                tracing::warn!(pool, %error, "the ledger was not written; it is tried again");
                let mut again = Vec::new();
                for entry in open.drain(..) {
                    again.push(entry.compensate(&shared).await);
                }
                open = again;
                time::sleep(pause).await;
                pause = (pause * 2).min(MAX_RETRY_DELAY);
            }
        }
    }
}

/// What came of an entry.
enum LedgerOutcome {
    Done,
    /// It was not looked at, and never will be.
    Dropped,
    /// Nothing is booked for it.
    Refused(ReservationRefusal),
    /// Its engine came to where there is no room.
    DoesNotFit(LocationError),
}

impl LedgerChange {
    fn apply(&self, ledger: &mut Ledger, total: Bytes, now: Tick) -> LedgerOutcome {
        match self {
            Self::Reserve { engine, request: wanted, .. } => {
                if let Err(reason) = ledger.reserve(wanted, total, now) {
                    tracing::info!(%engine, %reason, "not reserved");
                    return LedgerOutcome::Refused(reason);
                }
            }
            Self::MarkAsleep { model, replica, sleeping_memory: keeps } => {
                ledger.mark_asleep(model, *replica, *keeps, now)
            }
            Self::MarkReleasing { model, replica } => {
                if let Some(id) = ledger.reservation(model, *replica).map(|known| known.id) {
                    ledger.mark_releasing(id, now);
                }
            }
            Self::Adopt { request: wanted, location: spot } => {
                ledger.adopt(wanted, now);
                if let Some(spot) = spot {
                    ledger.set_location(&wanted.model, wanted.replica, spot, now);
                }
            }
            Self::SetLocation { model, replica, location: spot, capacities: room, .. } => {
                match ledger.check_fit(model, *replica, spot, room) {
                    Ok(()) => ledger.set_location(model, *replica, spot, now),
                    Err(why) => return LedgerOutcome::DoesNotFit(why),
                }
            }
            Self::Release { model, replica, .. } => {
                if let Some(id) = ledger.reservation(model, *replica).map(|known| known.id) {
                    ledger.release(id);
                }
            }
        }
        LedgerOutcome::Done
    }

    async fn finish(self, shared: &KubernetesContext, pool: &str, outcome: LedgerOutcome) {
        match self {
            Self::Reserve { engine, generation, sleeping_memory: keeps, .. } => {
                if let LedgerOutcome::Refused(why @ ReservationRefusal::Quota { .. }) = &outcome {
                    shared.report_failure(&engine, generation, &why.to_string()).await;
                }
                if keeps.is_some() && !matches!(outcome, LedgerOutcome::Done) {
                    // It stays asleep, and is reserved for again as soon as this is told.
                    let common = Arc::clone(&shared.common);
                    tokio::spawn(async move {
                        time::sleep(SLEEPER_RETRY_DELAY).await;
                        common.send_event(Event::Conflict { engine, generation }).await;
                    });
                    return;
                }
                let event = match outcome {
                    LedgerOutcome::Done => {
                        Event::Placed { engine, generation, accelerators: vec![pool.into()] }
                    }
                    _ => Event::Conflict { engine, generation },
                };
                shared.common.send_event(event).await;
            }
            // Whoever waited for it may be gone.
            Self::Release { done, .. } => drop(done.map(|done| done.send(()))),
            Self::SetLocation { done, .. } => drop(done.send(match outcome {
                LedgerOutcome::DoesNotFit(why) => Err(why),
                _ => Ok(()),
            })),
            Self::MarkReleasing { .. } | Self::Adopt { .. } | Self::MarkAsleep { .. } => {}
        }
    }

    /// What is to be written instead, where it is not known whether this was.
    async fn compensate(self, shared: &KubernetesContext) -> Self {
        match self {
            Self::Reserve {
                engine,
                generation,
                request: ReservationRequest { model, replica, .. },
                sleeping_memory: keeps,
            } => {
                shared.common.send_event(Event::Conflict { engine, generation }).await;
                match keeps {
                    Some(keeps) => Self::MarkAsleep { model, replica, sleeping_memory: keeps },
                    None => Self::Release { model, replica, done: None },
                }
            }
            entry => entry,
        }
    }
}
