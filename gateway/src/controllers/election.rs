//! Who decides: the one gateway that holds the Lease.
//!
//! Any number of gateways serve; one decides. It holds a Lease object, which it renews, and which another takes when it
//! was not renewed for its whole duration. Times of two machines are never compared: whoever does not hold the lease
//! counts from when it *saw* the record change, by its own clock, and the holder counts from when it *sent* its last
//! successful renewal. So the holder gives up first: it stops at [`RENEW_DEADLINE`], others start at [`LEASE_DURATION`].
//!
//! A process can be stopped and continued at any instruction, and a write may be on its way for long. So a [`Leadership`] is
//! not only told when it is lost: it is asked at each write whether it still holds, by the clock (which stands still with a
//! machine that is suspended, when nothing but the epoch is left). What is written
//! carries its *epoch*, which grows with every change of holder; stubs and launchers refuse an older one, and objects
//! are written with the version that was read.

mod state;
mod store;

#[cfg(test)]
mod tests;

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{self, Instant},
};

pub use state::{LeaseRecord, LeaseVersion};
pub use store::{KubeLeaseStore, LeaseError, LeaseStore};

use state::{ElectionState, LeaseAction};

/// Others take the lease when it was not renewed for so long.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// The holder stops deciding when its last renewal was sent so long ago.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// How often the holder renews.
const RENEW_INTERVAL: Duration = Duration::from_secs(2);
/// How often the others look: what they see late they count late, and a new leader is wanted within two seconds of the
/// lease's end.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// A call that takes longer has failed; it is made again.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// The right to decide.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leadership {
    /// Grows with every change of holder.
    pub epoch: u64,
    /// When the last renewal that succeeded was sent.
    renewed: Instant,
}

impl Leadership {
    /// Whether it may be acted on now. False for a process that was stopped for too long, before anybody told it.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.age() < RENEW_DEADLINE
    }

    /// Whether a call may be started that nobody can refuse for its epoch: it ends long before another may decide.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.age() < LEASE_DURATION / 3
    }

    /// How long the claim holds from now on if it is not renewed.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        RENEW_DEADLINE.saturating_sub(self.age())
    }

    fn age(&self) -> Duration {
        Instant::now() - self.renewed
    }

    /// A claim that was last renewed `age` ago.
    #[cfg(test)]
    pub(super) fn aged(epoch: u64, age: Duration) -> Self {
        Self { epoch, renewed: Instant::now() - age }
    }
}

/// Takes part until it is dropped or released.
#[derive(Debug)]
pub struct Election {
    leadership: watch::Receiver<Option<Leadership>>,
    api_reachable: watch::Receiver<bool>,
    participation: watch::Sender<Participation>,
    task: JoinHandle<()>,
}

/// What a process still has to do with the lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Participation {
    Active,
    /// It decides nothing any more, and keeps others from it.
    Stopping,
    Releasing,
}

impl Election {
    /// `name`: this process, and no other before or after it: two lives of one Pod's container are two.
    pub fn start<S: LeaseStore>(store: S, name: String) -> Self {
        let (told, claim) = watch::channel(None);
        let (heard, answers) = watch::channel(true);
        let (part, parts) = watch::channel(Participation::Active);
        let runner = ElectionTask {
            store,
            state: ElectionState::new(name),
            leadership: told,
            api_reachable: heard,
            participation: parts,
            failing: false,
        };
        Self {
            leadership: claim,
            api_reachable: answers,
            participation: part,
            task: tokio::spawn(runner.run()),
        }
    }

    /// The claim as it stands; changes with every renewal. `None`: another decides, or nobody.
    #[must_use]
    pub fn leadership(&self) -> watch::Receiver<Option<Leadership>> {
        self.leadership.clone()
    }

    /// Whether the API server answers, as whoever takes part is the first to know: it asks every second or two.
    #[must_use]
    pub fn api_reachable(&self) -> watch::Receiver<bool> {
        self.api_reachable.clone()
    }

    /// Ends when the task does, which it does by itself only when it panics: whoever runs an election ends with it, or
    /// would never hear that it lost.
    pub async fn ended(&mut self) {
        if let Err(error) = (&mut self.task).await {
            tracing::error!(%error, "the task that holds the lease died");
        }
    }

    /// Stops deciding, then gives the lease back, so that another need not wait for its end. `quiet` completes once nothing is
    /// being written any more by who has heard that.
    pub async fn release(mut self, quiet: impl Future<Output = ()>) {
        self.participation.send_replace(Participation::Stopping);
        // The task may have ended by itself.
        drop(self.leadership.wait_for(Option::is_none).await);
        quiet.await;
        self.participation.send_replace(Participation::Releasing);
        drop(self.task.await);
    }
}

struct ElectionTask<S> {
    store: S,
    state: ElectionState,
    leadership: watch::Sender<Option<Leadership>>,
    api_reachable: watch::Sender<bool>,
    participation: watch::Receiver<Participation>,
    /// The last attempt failed.
    failing: bool,
}

impl<S: LeaseStore> ElectionTask<S> {
    async fn run(mut self) {
        loop {
            let pause = self.step().await;
            tokio::select! {
                () = time::sleep(pause) => {}
                _ = self.participation.wait_for(|part| *part > Participation::Active) => break,
            }
        }
        if self.leadership.send_replace(None).is_some() {
            // An election that is dropped waits for nobody.
            drop(self.participation.wait_for(|part| *part == Participation::Releasing).await);
            match self.release_lease().await {
                Ok(()) => tracing::info!("the lease is given back"),
                Err(error) => tracing::warn!(%error, "the lease was not given back: it runs out by itself"),
            }
        }
    }

    async fn release_lease(&mut self) -> Result<(), LeaseError> {
        self.refresh().await?;
        match self.state.release_record() {
            Some((record, version)) => with_timeout(self.store.replace(&record, &version)).await.map(drop),
            // Another's by now, or gone.
            None => Ok(()),
        }
    }

    /// One look and what follows from it. The pause until the next.
    async fn step(&mut self) -> Duration {
        let mut outcome = self.attempt().await;
        // Another was quicker, or it was deleted: what holds now is wanted at once.
        if matches!(outcome, Err(LeaseError::Conflict)) {
            outcome = self.attempt().await;
        }
        let answers = !outcome.as_ref().is_err_and(LeaseError::is_unreachable);
        self.api_reachable.send_if_modified(|before| std::mem::replace(before, answers) != answers);
        match outcome {
            Ok(()) => self.failing = false,
            Err(error) if self.failing => tracing::debug!(%error, "the lease could not be read or written"),
            // Told once in a row: where rights are missing, nobody ever decides, and this says why.
            Err(error) => {
                tracing::warn!(%error, "the lease could not be read or written; it is tried until it can");
                self.failing = true;
            }
        }
        self.publish();
        let pause = if self.leadership.borrow().is_some() { RENEW_INTERVAL } else { POLL_INTERVAL };
        // A claim that ends, and a lease that runs out, are no news that anybody sends.
        self.state.due(Instant::now()).map_or(pause, |due| due.min(pause))
    }

    async fn attempt(&mut self) -> Result<(), LeaseError> {
        self.refresh().await?;
        let sent = Instant::now();
        let written = match self.state.next_action(sent, floor()) {
            LeaseAction::Wait => return Ok(()),
            LeaseAction::Create(record) => {
                with_timeout(self.store.create(&record)).await.map(|version| (record, version))
            }
            LeaseAction::Replace(record, version) => {
                with_timeout(self.store.replace(&record, &version)).await.map(|version| (record, version))
            }
        };
        match written {
            Ok((record, version)) => {
                self.state.record_write(record, version, sent);
                Ok(())
            }
            Err(error) => {
                self.state.record_failure();
                Err(error)
            }
        }
    }

    /// A holder knows the version that it wrote: it need not read before each renewal. But it does behind one whose
    /// answer it did not hear.
    async fn refresh(&mut self) -> Result<(), LeaseError> {
        if !self.state.is_sure(Instant::now()) {
            let found = with_timeout(self.store.get()).await?;
            self.state.observe(found, Instant::now());
        }
        Ok(())
    }

    fn publish(&self) {
        let now = Instant::now();
        let claim = self.state.leadership(now).map(|(epoch, renewed)| Leadership { epoch, renewed });
        let before = self.leadership.send_replace(claim);
        match (before, claim) {
            (Some(before), Some(claim)) if before.epoch == claim.epoch => {}
            (_, Some(claim)) => tracing::info!(epoch = claim.epoch, "this gateway decides now"),
            (Some(before), None) => {
                tracing::warn!(
                    epoch = before.epoch,
                    "this gateway no longer decides: the lease was not renewed in time, or taken"
                );
            }
            (None, None) => {}
        }
    }
}

/// Tens of seconds since 1970, which fit into a lease's number of transitions for six hundred years.
fn floor() -> u64 {
    u64::try_from(Timestamp::now().as_second() / 10).unwrap_or(1)
}

async fn with_timeout<T>(call: impl Future<Output = Result<T, LeaseError>>) -> Result<T, LeaseError> {
    time::timeout(CALL_TIMEOUT, call).await.unwrap_or(Err(LeaseError::Timeout))
}
