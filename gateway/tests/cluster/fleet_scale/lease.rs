//! Every revision of the Lease: who holds it since when, and how late it was renewed.

use futures_util::StreamExt as _;
use k8s_openapi::{api::coordination::v1::Lease, jiff::Timestamp};
use kube::{
    Api,
    runtime::{WatchStreamExt as _, watcher},
};
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::election::RENEW_DEADLINE;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Duration, Instant, timeout},
};

use crate::site::LEASE_NAME;

/// The leader renews every two seconds. A renewal later than this was held up.
const LATEST_RENEWAL: Duration = Duration::from_secs(3);
/// The same for an unoptimised program.
const LATEST_RENEWAL_UNOPTIMISED: Duration = Duration::from_secs(5);

/// Watches the Lease until it is dropped.
pub(super) struct LeaseWatch {
    revisions: watch::Receiver<Vec<LeaseRevision>>,
    task: JoinHandle<()>,
}

#[derive(Clone, Debug)]
pub(super) struct LeaseRevision {
    /// When the test saw the revision.
    pub(super) seen: Instant,
    /// Empty when the Lease is free.
    pub(super) holder: String,
    /// When the holder sent it, by its own clock.
    renewed: Timestamp,
}

impl Drop for LeaseWatch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl LeaseWatch {
    pub(super) fn start(leases: Api<Lease>) -> Self {
        let (tx, revisions) = watch::channel(Vec::new());
        Self { revisions, task: tokio::spawn(follow(leases, tx)) }
    }

    /// Waits until a gateway holds the Lease, and returns its identity.
    pub(super) async fn holder(&self) -> String {
        let mut revisions = self.revisions.clone();
        let is_held = |all: &Vec<LeaseRevision>| all.last().is_some_and(|last| !last.holder.is_empty());
        let seen = timeout(WAIT_TIMEOUT, revisions.wait_for(is_held)).await;
        let last = seen.expect("no gateway leads").unwrap().last().cloned();
        last.unwrap().holder
    }

    /// Waits until a gateway other than this one holds the Lease, and returns the first such revision.
    pub(super) async fn holder_after(&self, former: &str) -> LeaseRevision {
        let is_other = |revision: &LeaseRevision| !revision.holder.is_empty() && revision.holder != former;
        let mut revisions = self.revisions.clone();
        let seen = timeout(WAIT_TIMEOUT, revisions.wait_for(|all| all.last().is_some_and(is_other))).await;
        let all = seen.expect("no other gateway leads").unwrap().clone();
        let first = all.iter().rev().take_while(|revision| is_other(revision)).last();
        first.unwrap().clone()
    }

    /// The number of revisions so far.
    pub(super) fn count(&self) -> usize {
        self.revisions.borrow().len()
    }

    /// The holders of the revisions from this number on, each once for each time in a row.
    pub(super) fn holders_since(&self, first: usize) -> Vec<String> {
        let all = self.revisions.borrow();
        let mut holders: Vec<String> = all[first..].iter().map(|revision| revision.holder.clone()).collect();
        holders.retain(|holder| !holder.is_empty());
        holders.dedup();
        holders
    }

    /// Asserts that no holder was late with a renewal.
    pub(super) fn check_renewals(&self, optimised: bool) {
        let all = self.revisions.borrow();
        let pairs = all.windows(2).filter(|pair| !pair[0].holder.is_empty());
        let own = pairs.filter(|pair| pair[0].holder == pair[1].holder);
        let gaps = own.map(|pair| pair[1].renewed.duration_since(pair[0].renewed).unsigned_abs());
        let longest: Duration = gaps.max().expect("the Lease was never renewed");
        let latest = if optimised { LATEST_RENEWAL } else { LATEST_RENEWAL_UNOPTIMISED };
        println!(
            "{} revisions of the Lease, the latest renewal {longest:.2?} after the one before (a leader without \
             renewals stops after {RENEW_DEADLINE:?})",
            all.len()
        );
        assert!(longest <= latest, "{longest:?} from one renewal to the next");
    }
}

async fn follow(leases: Api<Lease>, tx: watch::Sender<Vec<LeaseRevision>>) {
    let config = watcher::Config::default().fields(&format!("metadata.name={LEASE_NAME}"));
    let mut events = watcher(leases, config).default_backoff().applied_objects().boxed();
    while let Some(event) = events.next().await {
        // An error is one of the connection, from which the watcher recovers.
        let Some(spec) = event.ok().and_then(|lease| lease.spec) else { continue };
        let Some(renewed) = spec.renew_time else { continue };
        let holder = spec.holder_identity.unwrap_or_default();
        let revision = LeaseRevision { seen: Instant::now(), holder, renewed: renewed.0 };
        tx.send_modify(|all| all.push(revision));
    }
}
