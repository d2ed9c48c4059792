//! Writes the ledger of one pool, one write at a time; a write contains all changes that wait.
//!
//! The fleet relies on the order of changes: a release is written before the same engine reserves again. A reservation
//! whose write failed may still stand, so the writer reverts it, and the fleet requests it again.

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
use crate::{
    crd::ledger::{Ledger, ReservationOwner},
    index::AcceleratorCapacities,
    ledger::{
        Error, LocationError, ReservationLocation, ReservationRefusal, ReservationRequest, SleepingMemory,
    },
};

/// Maximum number of changes in one write.
const MAX_BATCH: usize = 64;
/// How long changes for which nothing waits are held back, to share a write with later ones.
///
/// The engines of a large start report their accelerators one by one, and every gateway reads every version of a pool.
const SHARE_DELAY: Duration = Duration::from_millis(100);
const MIN_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Delay before an asleep engine's refused reservation is reported, and so retried.
const SLEEPER_RETRY_DELAY: Duration = Duration::from_secs(1);
const MAX_RETRY_DELAY: Duration = Duration::from_secs(5);

/// A change of the ledger.
#[derive(Debug)]
pub(super) enum LedgerChange {
    /// Outcome: `Placed` or `Conflict`. `capacities`: those of the accelerators of the request's node, if the request
    /// has a location. `sleeping_memory`: for an asleep engine, what it keeps if the reservation fails.
    Reserve {
        engine: EngineId,
        generation: Generation,
        request: ReservationRequest,
        capacities: AcceleratorCapacities,
        sleeping_memory: Option<SleepingMemory>,
    },
    /// The engine sleeps and keeps only this much.
    MarkAsleep { engine: ReservationOwner, sleeping_memory: SleepingMemory },
    /// The engine sleeps, and is declared to keep this much. If more is reserved for the sleeper, that was measured.
    AdoptAsleep { engine: ReservationOwner, declared: SleepingMemory },
    /// The engine has been ordered to stop; its memory stays reserved.
    MarkReleasing { engine: ReservationOwner },
    /// The engine runs there: reserve its memory whether or not there is room.
    Adopt { request: ReservationRequest, location: Option<ReservationLocation> },
    /// The engine got these accelerators. `done` receives whether it fits there.
    SetLocation {
        engine: ReservationOwner,
        location: ReservationLocation,
        capacities: AcceleratorCapacities,
        done: oneshot::Sender<Result<(), LocationError>>,
    },
    /// The engine's memory is free.
    Release { engine: ReservationOwner, done: Option<oneshot::Sender<()>> },
}

/// Runs until the sender of changes is dropped.
pub(super) async fn run(
    shared: Arc<KubernetesContext>,
    pool: String,
    mut entries: mpsc::Receiver<LedgerChange>,
) {
    let mut open = Vec::new();
    let mut pause = MIN_RETRY_DELAY;
    loop {
        if open.is_empty() && entries.recv_many(&mut open, MAX_BATCH).await == 0 {
            return;
        }
        gather(&mut entries, &mut open).await;
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
                // The current leader reserves on its own. A pool that is gone takes no reservations.
                for entry in open.drain(..) {
                    entry.finish(&shared, &pool, LedgerOutcome::Dropped).await;
                }
            }
            Err(error) => {
                tracing::warn!(pool, %error, "cannot write the ledger, retrying");
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

/// Adds the changes that arrive until one of them is awaited, for [`SHARE_DELAY`] at most.
async fn gather(entries: &mut mpsc::Receiver<LedgerChange>, open: &mut Vec<LedgerChange>) {
    let until = time::Instant::now() + SHARE_DELAY;
    while open.len() < MAX_BATCH && !open.iter().any(LedgerChange::is_awaited) {
        match time::timeout_at(until, entries.recv()).await {
            Ok(Some(entry)) => open.push(entry),
            Ok(None) | Err(_) => return,
        }
    }
    while open.len() < MAX_BATCH
        && let Ok(entry) = entries.try_recv()
    {
        open.push(entry);
    }
}

/// Outcome of a change.
enum LedgerOutcome {
    Done,
    /// The change was not applied and never will be.
    Dropped,
    /// Nothing is reserved for the engine.
    Refused(ReservationRefusal),
    /// The engine got accelerators without enough room.
    DoesNotFit(LocationError),
}

impl LedgerChange {
    /// Whether an engine waits for the write: one that is to start or wake, or one that needs the memory.
    const fn is_awaited(&self) -> bool {
        match self {
            Self::Reserve { .. } | Self::Release { .. } => true,
            // A start goes on while its location is written. The engine that takes a sleeper's memory reserves it here,
            // a moment later in the same plan: so a switch between two engines costs one write.
            Self::MarkAsleep { .. }
            | Self::AdoptAsleep { .. }
            | Self::MarkReleasing { .. }
            | Self::Adopt { .. }
            | Self::SetLocation { .. } => false,
        }
    }

    fn apply(&self, ledger: &mut Ledger, total: Bytes, now: Tick) -> LedgerOutcome {
        match self {
            Self::Reserve { engine, request, capacities, .. } => {
                if let Err(reason) = ledger.reserve_at(request, capacities, total, now) {
                    tracing::info!(%engine, %reason, "reservation refused");
                    return LedgerOutcome::Refused(reason);
                }
            }
            Self::MarkAsleep { engine, sleeping_memory: keeps } => ledger.mark_asleep(engine, *keeps, now),
            Self::AdoptAsleep { engine, declared } => ledger.adopt_asleep(engine, *declared, now),
            Self::MarkReleasing { engine } => {
                if let Some(id) = ledger.reservation(engine).map(|known| known.id) {
                    ledger.mark_releasing(id, now);
                }
            }
            Self::Adopt { request, location } => {
                ledger.adopt(request, now);
                if let Some(location) = location {
                    ledger.set_location(&request.engine, location, now);
                }
            }
            Self::SetLocation { engine, location, capacities, .. } => {
                match ledger.check_fit(engine, location, capacities) {
                    Ok(()) => ledger.set_location(engine, location, now),
                    Err(error) => return LedgerOutcome::DoesNotFit(error),
                }
            }
            Self::Release { engine, .. } => {
                if let Some(id) = ledger.reservation(engine).map(|known| known.id) {
                    ledger.release(id);
                }
            }
        }
        LedgerOutcome::Done
    }

    async fn finish(self, shared: &KubernetesContext, pool: &str, outcome: LedgerOutcome) {
        match self {
            Self::Reserve { engine, generation, request, sleeping_memory: keeps, .. } => {
                if let LedgerOutcome::Refused(refusal @ ReservationRefusal::Quota { .. }) = &outcome {
                    shared.report_failure(&engine, generation, &refusal.to_string()).await;
                }
                if keeps.is_some() && !matches!(outcome, LedgerOutcome::Done) {
                    // The engine stays asleep. The fleet reserves for it again as soon as it receives this event.
                    let common = Arc::clone(&shared.common);
                    tokio::spawn(async move {
                        time::sleep(SLEEPER_RETRY_DELAY).await;
                        common.send_event(Event::Conflict { engine, generation }).await;
                    });
                    return;
                }
                let event = match outcome {
                    LedgerOutcome::Done => {
                        let chosen = request.location.map(|location| location.accelerators);
                        let accelerators = chosen.unwrap_or_else(|| vec![pool.into()]);
                        Event::Placed { engine, generation, accelerators }
                    }
                    _ => Event::Conflict { engine, generation },
                };
                shared.common.send_event(event).await;
            }
            // The receiver may be gone.
            Self::Release { done, .. } => drop(done.map(|done| done.send(()))),
            Self::SetLocation { done, .. } => drop(done.send(match outcome {
                LedgerOutcome::DoesNotFit(error) => Err(error),
                _ => Ok(()),
            })),
            Self::MarkReleasing { .. }
            | Self::Adopt { .. }
            | Self::MarkAsleep { .. }
            | Self::AdoptAsleep { .. } => {}
        }
    }

    /// Returns the change to write instead, if it is unknown whether this one was written.
    async fn compensate(self, shared: &KubernetesContext) -> Self {
        match self {
            Self::Reserve { engine, generation, request, sleeping_memory: keeps, .. } => {
                shared.common.send_event(Event::Conflict { engine, generation }).await;
                let engine = request.engine;
                match keeps {
                    Some(declared) => Self::AdoptAsleep { engine, declared },
                    None => Self::Release { engine, done: None },
                }
            }
            entry => entry,
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use rouse::model::VariantName;

    use super::*;
    use crate::crd::ledger::ObjectName;

    fn engine(replica: u32) -> ReservationOwner {
        let (model, variant) = (ObjectName::new("chat", "qwen"), VariantName::default());
        ReservationOwner { model, variant, replica }
    }

    fn releasing(replica: u32) -> LedgerChange {
        LedgerChange::MarkReleasing { engine: engine(replica) }
    }

    fn release(replica: u32) -> LedgerChange {
        LedgerChange::Release { engine: engine(replica), done: None }
    }

    fn replicas(changes: &[LedgerChange]) -> Vec<u32> {
        let replica = |change: &LedgerChange| match change {
            LedgerChange::MarkReleasing { engine } | LedgerChange::Release { engine, .. } => engine.replica,
            other => panic!("{other:?}"),
        };
        changes.iter().map(replica).collect()
    }

    #[tokio::test]
    async fn an_awaited_change_is_written_at_once_with_all_that_wait_and_in_order() {
        let (tx, mut entries) = mpsc::channel(MAX_BATCH * 2);
        for change in [releasing(1), release(2), releasing(3)] {
            tx.try_send(change).unwrap();
        }
        let mut open = vec![releasing(0)];
        assert!(gather(&mut entries, &mut open).now_or_never().is_some());
        assert_eq!(replicas(&open), [0, 1, 2, 3]);
        assert!(gather(&mut entries, &mut open).now_or_never().is_some(), "the awaited change is among them");
    }

    #[tokio::test]
    async fn a_sleeper_shares_its_write_with_the_engine_that_takes_its_memory() {
        let (tx, mut entries) = mpsc::channel(MAX_BATCH);
        let sleeping_memory = SleepingMemory { bytes: Bytes::gib(1), host_bytes: Bytes::ZERO };
        let mut open = vec![LedgerChange::MarkAsleep { engine: engine(0), sleeping_memory }];
        assert!(gather(&mut entries, &mut open).now_or_never().is_none(), "no engine waits for this alone");
        let request = ReservationRequest {
            engine: engine(1),
            count: 1,
            bytes: Bytes::gib(1),
            host_bytes: Bytes::ZERO,
            quota: None,
            location: None,
        };
        let wakes = LedgerChange::Reserve {
            engine: EngineId::new("m".into(), 1),
            generation: Generation(1),
            request,
            capacities: AcceleratorCapacities::default(),
            sleeping_memory: None,
        };
        tx.try_send(wakes).unwrap();
        assert!(gather(&mut entries, &mut open).now_or_never().is_some(), "an engine is about to wake");
        assert!(matches!(open[..], [LedgerChange::MarkAsleep { .. }, LedgerChange::Reserve { .. }]));
    }

    #[tokio::test]
    async fn changes_that_nothing_awaits_wait_for_others_and_not_for_long() {
        let (tx, mut entries) = mpsc::channel(MAX_BATCH * 2);
        let mut open = vec![releasing(0)];
        assert!(gather(&mut entries, &mut open).now_or_never().is_none());
        gather(&mut entries, &mut open).await;
        assert_eq!(replicas(&open), [0], "the delay has an end");

        let all: Vec<u32> = (0..u32::try_from(MAX_BATCH).unwrap()).collect();
        for replica in &all[1..] {
            tx.try_send(releasing(*replica)).unwrap();
        }
        assert!(gather(&mut entries, &mut open).now_or_never().is_some(), "a whole batch waits for nothing");
        assert_eq!(replicas(&open), all);

        drop(tx);
        let mut open = vec![releasing(0)];
        assert!(gather(&mut entries, &mut open).now_or_never().is_some(), "no change will come");
    }
}
