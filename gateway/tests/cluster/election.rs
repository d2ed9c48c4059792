//! Two gateways and one Lease, over links that fail: which gateway leads when, by one clock.

use std::{
    sync::{
        Arc, Mutex,
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use k8s_openapi::api::coordination::v1::Lease;
use kube::Api;
use kube::api::DeleteParams;
use rouse_cluster::{Link, LinkMode, wait::WAIT_TIMEOUT};
use rouse_controllers::election::{
    Election, LEASE_DURATION, Leadership, LeaseError, LeaseRecord, LeaseStore as _, RENEW_DEADLINE,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

use crate::{
    site::{GatewayNamespace, LEASE_NAME, until_leading},
    support::cluster,
};

type LeadershipReceiver = watch::Receiver<Option<Leadership>>;

/// A new leader must lead within this time after the lease's end.
const SOON: Duration = Duration::from_secs(2);

/// Reads every millisecond in which epoch each gateway leads.
pub(crate) struct LeaderWatcher {
    seen: Arc<Mutex<Vec<ObservedLeader>>>,
    stop: mpsc::Sender<()>,
    thread: JoinHandle<()>,
}

/// A period in which one gateway leads in one epoch, or none leads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ObservedLeader {
    /// When the last read with this result began. The result held at that moment, even if the watcher gets a core late.
    pub(crate) until: Instant,
    pub(crate) leader: Option<(usize, u64)>,
}

impl LeaderWatcher {
    pub(crate) fn of(claims: &[&Election]) -> Self {
        let claims: Vec<LeadershipReceiver> = claims.iter().map(|election| election.leadership()).collect();
        let first = ObservedLeader { until: Instant::now(), leader: leader(&claims) };
        let seen = Arc::new(Mutex::new(vec![first]));
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (stop, stopped) = mpsc::channel();
        let into = Arc::clone(&seen);
        let thread = thread::spawn(move || {
            let mut last = false;
            while !last {
                // After a stop, or when its owner is gone, the watcher reads once more.
                last = stopped.recv_timeout(Duration::from_millis(1)) != Err(RecvTimeoutError::Timeout);
                let until = Instant::now();
                let leader = leader(&claims);
                let mut into = into.lock().unwrap();
                match into.last_mut().filter(|last| last.leader == leader) {
                    Some(last) => last.until = until,
                    None => into.push(ObservedLeader { until, leader }),
                }
            }
        });
        Self { seen, stop, thread }
    }

    /// Returns all periods, and asserts that epochs only grow. Every test calls this, because this is where two leaders
    /// at once become visible.
    pub(crate) fn tell(self) -> Vec<ObservedLeader> {
        drop(self.stop);
        self.thread.join().expect("two led at once");
        let seen = self.seen.lock().unwrap().clone();
        let epochs: Vec<u64> = seen.iter().filter_map(|seen| Some(seen.leader?.1)).collect();
        assert!(epochs.is_sorted(), "{seen:?}");
        seen
    }
}

fn leader(claims: &[LeadershipReceiver]) -> Option<(usize, u64)> {
    let holds =
        |claims: &LeadershipReceiver| claims.borrow().filter(Leadership::is_valid).map(|claim| claim.epoch);
    let mut all = claims.iter().enumerate().filter_map(|(n, claims)| Some((n, holds(claims)?)));
    let first = all.next();
    let second = all.next();
    assert!(second.is_none(), "{first:?} and {second:?} lead at once");
    first
}

/// Two gateways, each with a link of its own; the first leads.
struct GatewayPair {
    elections: [Election; 2],
    links: [Link; 2],
    epoch: u64,
}

impl GatewayPair {
    async fn new(site: &GatewayNamespace<'_>) -> Self {
        let links = [site.cluster.link().await.unwrap(), site.cluster.link().await.unwrap()];
        let first = Election::start(site.leases(site.client_by(&links[0]).await), "first".to_owned());
        let epoch = until_leading(&mut first.leadership()).await.epoch;
        let second = Election::start(site.leases(site.client_by(&links[1]).await), "second".to_owned());
        Self { elections: [first, second], links, epoch }
    }

    fn witness(&self) -> LeaderWatcher {
        LeaderWatcher::of(&[&self.elections[0], &self.elections[1]])
    }

    /// Breaks the first gateway's link, waits until the second leads, and returns how long that took.
    async fn replaced(&self, how: LinkMode) -> Duration {
        self.links[0].set(how);
        let broken = Instant::now();
        until_leading(&mut self.elections[1].leadership()).await;
        broken.elapsed()
    }
}

/// Asserts that the first gateway led, and then the second with a higher epoch.
fn handed_over(seen: &[ObservedLeader], first: u64) {
    let mut leaders: Vec<_> = seen.iter().filter_map(|seen| seen.leader).collect();
    leaders.dedup();
    assert!(matches!(leaders[..], [(0, before), (1, after)] if before == first && after > first), "{seen:?}");
}

#[tokio::test]
async fn a_lease_that_is_given_back_is_taken_at_once_and_with_the_next_epoch() {
    let site = GatewayNamespace::new(cluster().await, "release").await;
    let GatewayPair { elections: [first, second], links: _links, epoch } = GatewayPair::new(&site).await;
    // The second gateway has read the lease and knows that the first holds it.
    sleep(SOON).await;
    let witness = LeaderWatcher::of(&[&first, &second]);
    first.release(async {}).await;
    let given = Instant::now();
    until_leading(&mut second.leadership()).await;
    assert!(given.elapsed() < LEASE_DURATION / 3, "{:?}", given.elapsed());
    println!("given back, and taken after {:?}", given.elapsed());
    let holder = site.lease().await.unwrap().spec.unwrap().holder_identity;
    assert_eq!(holder.as_deref(), Some("second"));
    drop(second);
    handed_over(&witness.tell(), epoch);
}

#[tokio::test]
async fn who_is_cut_off_gives_up_before_another_begins_and_does_not_come_back() {
    let site = GatewayNamespace::new(cluster().await, "cut").await;
    let pair = GatewayPair::new(&site).await;
    sleep(SOON).await;
    let witness = pair.witness();
    let cut = Instant::now();
    let taken = pair.replaced(LinkMode::Cut).await;
    pair.links[0].set(LinkMode::Pass);
    sleep(RENEW_DEADLINE / 2).await;
    let seen = witness.tell();
    let lost = seen[0].until - cut;
    println!("cut off: led for {lost:?}, taken after {taken:?}");
    handed_over(&seen, pair.epoch);
    assert!(lost <= RENEW_DEADLINE, "{lost:?}");
    assert!(taken <= LEASE_DURATION + SOON, "{taken:?}");
}

/// The link holds all bytes without an error, and delivers them in the end. The late renewals change nothing.
#[tokio::test]
async fn renewals_that_arrive_after_another_took_over_change_nothing() {
    let site = GatewayNamespace::new(cluster().await, "hold").await;
    let pair = GatewayPair::new(&site).await;
    let witness = pair.witness();
    let taken = pair.replaced(LinkMode::Hold).await;
    println!("held: taken after {taken:?}");
    assert!(taken <= LEASE_DURATION + SOON, "{taken:?}");
    pair.links[0].set(LinkMode::Pass);
    sleep(RENEW_DEADLINE / 2).await;
    handed_over(&witness.tell(), pair.epoch);
}

/// A renewal that takes longer than a call's timeout reaches the server, and its sender gets no answer.
#[tokio::test]
async fn who_writes_too_slowly_loses_and_who_writes_slowly_does_not() {
    let site = GatewayNamespace::new(cluster().await, "slow").await;
    let pair = GatewayPair::new(&site).await;
    let witness = pair.witness();
    pair.links[0].set(LinkMode::Slow(Duration::from_millis(300)));
    // Longer than the duration of a lease without renewals.
    sleep(LEASE_DURATION + SOON).await;
    assert_eq!(pair.elections[0].leadership().borrow().unwrap().epoch, pair.epoch);
    let taken = pair.replaced(LinkMode::Slow(Duration::from_millis(1500))).await;
    println!("slow: taken after {taken:?}");
    // One late renewal may have been written before the first gateway noticed.
    assert!(taken <= LEASE_DURATION + 3 * SOON, "{taken:?}");
    handed_over(&witness.tell(), pair.epoch);
}

#[tokio::test]
async fn a_short_cut_changes_nothing() {
    let site = GatewayNamespace::new(cluster().await, "short").await;
    let pair = GatewayPair::new(&site).await;
    let witness = pair.witness();
    for mode in [LinkMode::Cut, LinkMode::Hold] {
        pair.links[0].set(mode);
        sleep(RENEW_DEADLINE / 2).await;
        pair.links[0].set(LinkMode::Pass);
        sleep(RENEW_DEADLINE / 2).await;
    }
    let seen = witness.tell();
    assert_eq!((seen.len(), seen[0].leader), (1, Some((0, pair.epoch))), "{seen:?}");
}

#[tokio::test]
async fn a_lease_that_somebody_deletes_comes_back_with_a_higher_epoch() {
    let site = GatewayNamespace::new(cluster().await, "deleted").await;
    let pair = GatewayPair::new(&site).await;
    sleep(SOON).await;
    let witness = pair.witness();
    let leases: Api<Lease> = site.namespace.api();
    for _ in 0..3 {
        let before = site.lease().await.unwrap();
        leases.delete(LEASE_NAME, &DeleteParams::default()).await.unwrap();
        let back = |claim: &Option<Leadership>| claim.is_some_and(|claim| claim.epoch > transitions(&before));
        timeout(WAIT_TIMEOUT, pair.elections[0].leadership().wait_for(back))
            .await
            .expect("it never leads")
            .unwrap();
        let after = site.lease().await.unwrap();
        assert_ne!(after.metadata.uid, before.metadata.uid);
        assert!(transitions(&after) > transitions(&before));
    }
    let seen = witness.tell();
    assert!(seen.iter().filter_map(|seen| seen.leader).all(|(who, _)| who == 0), "{seen:?}");
}

fn transitions(lease: &Lease) -> u64 {
    lease.spec.as_ref().unwrap().lease_transitions.unwrap().try_into().unwrap()
}

/// An API server creates a Lease from an update that finds none, so a late renewal would bring back an old epoch.
#[tokio::test]
async fn what_was_meant_for_a_lease_that_is_gone_makes_no_other() {
    let site = GatewayNamespace::new(cluster().await, "late").await;
    let store = site.leases(site.client().await);
    let record = |epoch| LeaseRecord { holder: Some("one".to_owned()), epoch, duration: LEASE_DURATION };
    let old = store.create(&record(7)).await.unwrap();
    let leases: Api<Lease> = site.namespace.api();
    leases.delete(LEASE_NAME, &DeleteParams::default()).await.unwrap();
    let late = store.replace(&record(7), &old).await;
    assert!(matches!(late, Err(LeaseError::Conflict)), "{late:?}");
    assert!(site.lease().await.is_none(), "a late renewal made another");

    let new = store.create(&record(8)).await.unwrap();
    let late = store.replace(&record(7), &old).await;
    assert!(matches!(late, Err(LeaseError::Conflict)), "{late:?}");
    assert!(matches!(store.create(&record(9)).await, Err(LeaseError::Conflict)));
    assert_eq!(store.get().await.unwrap(), Some((record(8), new)));
}
