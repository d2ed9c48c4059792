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

use super::Shared;
use crate::controllers::{
    booking::{Error, Keeps, NoRoom, Refused, Spot, Wanted},
    crd::ledger::{Ledger, ObjectName},
    index::Room,
};

/// So many changes go into one write.
const TOGETHER: usize = 64;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// What a sleeper lacks is asked for so often.
const ASLEEP_AGAIN: Duration = Duration::from_secs(1);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// A change of the ledger.
#[derive(Debug)]
pub(super) enum Entry {
    /// Outcome: `Placed` or `Conflict`. `keeps`: of an engine that sleeps, what it has should nothing come of it.
    Reserve { engine: EngineId, generation: Generation, wanted: Wanted, keeps: Option<Keeps> },
    /// The engine sleeps, and keeps no more than this.
    FallsAsleep { model: ObjectName, replica: u32, keeps: Keeps },
    /// The engine was told to go; what it has stays booked.
    Releasing { model: ObjectName, replica: u32 },
    /// It runs there: what it takes is booked, whether or not there is room.
    Adopt { wanted: Wanted, spot: Option<Spot> },
    /// The engine came to these accelerators; whether it fits there is told.
    Place {
        model: ObjectName,
        replica: u32,
        spot: Spot,
        room: Room,
        done: oneshot::Sender<Result<(), NoRoom>>,
    },
    /// Its memory is free.
    Release { model: ObjectName, replica: u32, done: Option<oneshot::Sender<()>> },
}

/// Until nobody has entries any more.
pub(super) async fn keep(shared: Arc<Shared>, pool: String, mut entries: mpsc::UnboundedReceiver<Entry>) {
    let mut open = Vec::new();
    let mut pause = FIRST_PAUSE;
    loop {
        if open.is_empty() && entries.recv_many(&mut open, TOGETHER).await == 0 {
            return;
        }
        let now = shared.common.clock.now();
        let change = |ledger: &mut Ledger, total| {
            Ok::<_, Infallible>(open.iter().map(|entry| entry.enter(ledger, total, now)).collect::<Vec<_>>())
        };
        match shared.books.change(&pool, change).await {
            Ok(outcomes) => {
                pause = FIRST_PAUSE;
                for (entry, outcome) in open.drain(..).zip(outcomes) {
                    entry.done(&shared, &pool, outcome).await;
                }
            }
            Err(Error::NotLeading | Error::Replaced { .. } | Error::NoPool(_)) => {
                // Whoever leads now books from what there is; in a pool that is gone nothing is booked.
                for entry in open.drain(..) {
                    entry.done(&shared, &pool, Outcome::Nothing).await;
                }
            }
            Err(error) => {
                tracing::warn!(pool, %error, "the ledger was not written; it is tried again");
                let mut again = Vec::new();
                for entry in open.drain(..) {
                    again.push(entry.undone(&shared).await);
                }
                open = again;
                time::sleep(pause).await;
                pause = (pause * 2).min(LAST_PAUSE);
            }
        }
    }
}

/// What came of an entry.
enum Outcome {
    Done,
    /// It was not looked at, and never will be.
    Nothing,
    /// Nothing is booked for it.
    Refused(Refused),
    /// Its engine came to where there is no room.
    NoRoom(NoRoom),
}

impl Entry {
    fn enter(&self, ledger: &mut Ledger, total: Bytes, now: Tick) -> Outcome {
        match self {
            Self::Reserve { engine, wanted, .. } => {
                if let Err(reason) = ledger.reserve(wanted, total, now) {
                    tracing::info!(%engine, %reason, "not reserved");
                    return Outcome::Refused(reason);
                }
            }
            Self::FallsAsleep { model, replica, keeps } => ledger.falls_asleep(model, *replica, *keeps, now),
            Self::Releasing { model, replica } => {
                if let Some(id) = ledger.of(model, *replica).map(|known| known.id) {
                    ledger.releasing(id, now);
                }
            }
            Self::Adopt { wanted, spot } => {
                ledger.adopt(wanted, now);
                if let Some(spot) = spot {
                    ledger.place(&wanted.model, wanted.replica, spot, now);
                }
            }
            Self::Place { model, replica, spot, room, .. } => {
                match ledger.fits(model, *replica, spot, room) {
                    Ok(()) => ledger.place(model, *replica, spot, now),
                    Err(why) => return Outcome::NoRoom(why),
                }
            }
            Self::Release { model, replica, .. } => {
                if let Some(id) = ledger.of(model, *replica).map(|known| known.id) {
                    ledger.release(id);
                }
            }
        }
        Outcome::Done
    }

    async fn done(self, shared: &Shared, pool: &str, outcome: Outcome) {
        match self {
            Self::Reserve { engine, generation, keeps, .. } => {
                if let Outcome::Refused(why @ Refused::Quota { .. }) = &outcome {
                    shared.fails(&engine, generation, &why.to_string()).await;
                }
                if keeps.is_some() && !matches!(outcome, Outcome::Done) {
                    // It stays asleep, and is reserved for again as soon as this is told.
                    let common = Arc::clone(&shared.common);
                    tokio::spawn(async move {
                        time::sleep(ASLEEP_AGAIN).await;
                        common.tell(Event::Conflict { engine, generation }).await;
                    });
                    return;
                }
                let event = match outcome {
                    Outcome::Done => Event::Placed { engine, generation, accelerators: vec![pool.into()] },
                    _ => Event::Conflict { engine, generation },
                };
                shared.common.tell(event).await;
            }
            // Whoever waited for it may be gone.
            Self::Release { done, .. } => drop(done.map(|done| done.send(()))),
            Self::Place { done, .. } => drop(done.send(match outcome {
                Outcome::NoRoom(why) => Err(why),
                _ => Ok(()),
            })),
            Self::Releasing { .. } | Self::Adopt { .. } | Self::FallsAsleep { .. } => {}
        }
    }

    /// What is to be written instead, where it is not known whether this was.
    async fn undone(self, shared: &Shared) -> Self {
        match self {
            Self::Reserve { engine, generation, wanted: Wanted { model, replica, .. }, keeps } => {
                shared.common.tell(Event::Conflict { engine, generation }).await;
                match keeps {
                    Some(keeps) => Self::FallsAsleep { model, replica, keeps },
                    None => Self::Release { model, replica, done: None },
                }
            }
            entry => entry,
        }
    }
}
