//! Leader election: the gateway that holds the Lease makes the decisions.
//!
//! All gateways serve; one leads. The leader holds a Lease object and renews it. Another gateway takes the Lease once
//! it was not renewed for its whole duration. The election never compares clocks of two machines: a candidate counts
//! from when it *saw* the record change, by its own clock, and the leader counts from when it *sent* its last
//! successful renewal. So the leader gives up first: it stops at [`RENEW_DEADLINE`], and candidates start at
//! [`LEASE_DURATION`].
//!
//! A process can be suspended at any instruction, and a write can be in flight for long. So a [`Leadership`] is not
//! only revoked on loss: each write checks whether it is still valid by the clock. That clock stops while a machine is
//! suspended, and then only the epoch protects. Each write carries its *epoch*, which grows with every change of
//! leader. Stubs and launchers refuse an older epoch, and object writes carry the version that was read.

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

/// Time without renewal after which candidates take the lease.
pub const LEASE_DURATION: Duration = Duration::from_secs(15);
/// Age of the last sent renewal at which the leader stops deciding.
pub const RENEW_DEADLINE: Duration = Duration::from_secs(10);
/// Interval between the leader's renewals.
const RENEW_INTERVAL: Duration = Duration::from_secs(2);
/// Interval between a candidate's checks.
///
/// A candidate counts from when it sees a change, so a slow check delays it. A new leader should follow within two
/// seconds of the lease's end.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Timeout of one API call; the election retries it.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// The leader's claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leadership {
    /// Grows with every change of leader.
    pub epoch: u64,
    /// Send time of the last successful renewal.
    renewed: Instant,
}

impl Leadership {
    /// Whether this gateway may act on the claim now.
    ///
    /// False in a process that was suspended for too long, even before it learns of the loss.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.age() < RENEW_DEADLINE
    }

    /// Whether a call may start whose receiver cannot check the epoch: it ends long before another gateway may lead.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.age() < LEASE_DURATION / 3
    }

    /// Whether this gateway has sent a successful renewal since that time, and so led then.
    #[must_use]
    pub fn is_renewed_since(&self, time: Instant) -> bool {
        self.renewed >= time
    }

    /// Time that the claim stays valid without a renewal.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        RENEW_DEADLINE.saturating_sub(self.age())
    }

    fn age(&self) -> Duration {
        Instant::now() - self.renewed
    }

    /// Builds a claim that was last renewed `age` ago.
    #[cfg(test)]
    pub(super) fn aged(epoch: u64, age: Duration) -> Self {
        Self { epoch, renewed: Instant::now() - age }
    }
}

/// A candidacy that lasts until it is dropped or released.
#[derive(Debug)]
pub struct Election {
    leadership: watch::Receiver<Option<Leadership>>,
    api_reachable: watch::Receiver<bool>,
    participation: watch::Sender<Participation>,
    task: JoinHandle<()>,
}

/// How this process takes part in the election.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Participation {
    Active,
    /// This gateway no longer decides and still holds the lease.
    Stopping,
    Releasing,
}

impl Election {
    /// Starts the election. `name` must be unique to this process: a restarted container is a new candidate.
    pub fn start<S: LeaseStore>(store: S, name: String) -> Self {
        let (leadership_tx, leadership) = watch::channel(None);
        let (api_reachable_tx, api_reachable) = watch::channel(true);
        let (participation_tx, participation) = watch::channel(Participation::Active);
        let runner = ElectionTask {
            store,
            state: ElectionState::new(name),
            leadership: leadership_tx,
            api_reachable: api_reachable_tx,
            participation,
            failing: false,
        };
        Self { leadership, api_reachable, participation: participation_tx, task: tokio::spawn(runner.run()) }
    }

    /// Returns the current claim, which changes with every renewal; `None` while this gateway does not lead.
    #[must_use]
    pub fn leadership(&self) -> watch::Receiver<Option<Leadership>> {
        self.leadership.clone()
    }

    /// Whether the API server answers. The election calls it every second or two, so it notices first.
    #[must_use]
    pub fn api_reachable(&self) -> watch::Receiver<bool> {
        self.api_reachable.clone()
    }

    /// Completes when the election's task ends, which happens on its own only by a panic.
    ///
    /// The gateway must end with it, since it would never learn that it lost the lease.
    pub async fn ended(&mut self) {
        if let Err(error) = (&mut self.task).await {
            tracing::error!(%error, "leader election task panicked");
        }
    }

    /// Stops deciding, then gives the lease back.
    ///
    /// A successor then need not wait for the lease to expire. `quiet` completes once no write of this leadership is in
    /// flight.
    pub async fn release(mut self, quiet: impl Future<Output = ()>) {
        self.participation.send_replace(Participation::Stopping);
        // The task may already have ended on its own.
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
    /// Whether the last attempt failed.
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
            // A dropped election closes the channel, so this wait ends at once.
            drop(self.participation.wait_for(|part| *part == Participation::Releasing).await);
            match self.release_lease().await {
                Ok(()) => tracing::info!("leader lease released"),
                Err(error) => tracing::warn!(%error, "leader lease not released, it expires on its own"),
            }
        }
    }

    async fn release_lease(&mut self) -> Result<(), LeaseError> {
        self.refresh().await?;
        match self.state.release_record() {
            Some((record, version)) => with_timeout(self.store.replace(&record, &version)).await.map(drop),
            // The lease belongs to another gateway by now, or was deleted.
            None => Ok(()),
        }
    }

    /// Runs one pass of the election and returns the pause until the next.
    async fn step(&mut self) -> Duration {
        let begun = Instant::now();
        let mut outcome = self.attempt().await;
        // Another gateway wrote first, or the lease was deleted: read the current state at once.
        if matches!(outcome, Err(LeaseError::Conflict)) {
            outcome = self.attempt().await;
        }
        let answers = !outcome.as_ref().is_err_and(LeaseError::is_unreachable);
        self.api_reachable.send_if_modified(|before| std::mem::replace(before, answers) != answers);
        match outcome {
            Ok(()) => self.failing = false,
            Err(error) if self.failing => {
                tracing::debug!(%error, "leader lease could not be read or written again")
            }
            // Warns once per row of failures: without the rights to the Lease no gateway ever leads, and this line has
            // the cause.
            Err(error) => {
                tracing::warn!(%error, "leader lease could not be read or written, retrying");
                self.failing = true;
            }
        }
        self.publish();
        let pause = pause_after(begun.elapsed(), self.leadership.borrow().is_some());
        // No event announces the end of a claim or of a lease, so the pause ends at that time.
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

    /// Reads the lease unless this gateway knows its version.
    ///
    /// The leader knows the version it wrote and renews without a read. After a write with an unknown outcome it reads
    /// first.
    async fn refresh(&mut self) -> Result<(), LeaseError> {
        if !self.state.is_sure(Instant::now()) {
            let found = with_timeout(self.store.get()).await?;
            self.state.observe(found, Instant::now());
        }
        Ok(())
    }

    fn publish(&mut self) {
        let now = Instant::now();
        let claim = self.state.leadership(now).map(|(epoch, renewed)| Leadership { epoch, renewed });
        let (before, published) = replace_claim(&self.leadership, claim);
        if claim.is_some() && published.is_none() {
            self.state.end_claim();
        }
        match (before, published) {
            (Some(before), Some(claim)) if before.epoch == claim.epoch => {}
            (_, Some(claim)) => tracing::info!(epoch = claim.epoch, "this gateway became the leader"),
            (Some(before), None) => {
                tracing::warn!(
                    epoch = before.epoch,
                    "this gateway lost the leadership: the lease was not renewed in time, or another gateway took it"
                );
            }
            (None, None) => {}
        }
    }
}

/// Returns the pause behind a pass that took this long.
///
/// Renewals keep their rhythm however long the API server takes for one. Each call has a timeout, so a pass that leaves
/// no pause was itself as long as the interval.
fn pause_after(pass: Duration, leads: bool) -> Duration {
    if leads { RENEW_INTERVAL.saturating_sub(pass) } else { POLL_INTERVAL }
}

/// Publishes a claim, or `None` if the published claim of the same epoch has expired. Returns the former claim and the
/// new one.
///
/// While a renewal is on its way the claim may expire. A reader that sees this ends its term, and other readers may not
/// see it, so the same epoch must not begin again. All of them read the clock under the channel's lock: a claim that a
/// reader saw expired is expired here, too.
fn replace_claim(
    published: &watch::Sender<Option<Leadership>>,
    claim: Option<Leadership>,
) -> (Option<Leadership>, Option<Leadership>) {
    let mut replaced = (None, None);
    published.send_modify(|current| {
        let before = *current;
        let expired = before.filter(|before| !before.is_valid()).map(|before| before.epoch);
        *current = claim.filter(|claim| expired != Some(claim.epoch));
        replaced = (before, *current);
    });
    replaced
}

/// Returns the time since 1970 in units of ten seconds; a lease's transition count holds 600 years of them.
fn floor() -> u64 {
    u64::try_from(Timestamp::now().as_second() / 10).unwrap_or(1)
}

async fn with_timeout<T>(call: impl Future<Output = Result<T, LeaseError>>) -> Result<T, LeaseError> {
    time::timeout(CALL_TIMEOUT, call).await.unwrap_or(Err(LeaseError::Timeout))
}
