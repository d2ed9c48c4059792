//! Checks every revision of a pool against the Pods that its reservations are for.

use std::{
    collections::BTreeMap,
    pin::pin,
    sync::{Arc, Mutex},
};

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, ResourceExt as _,
    runtime::{WatchStreamExt as _, watcher},
};
use rouse::units::Bytes;
use rouse_cluster::wait::WAIT_TIMEOUT;
use rouse_controllers::crd::AcceleratorPool;
use tokio::{
    sync::Notify,
    task::JoinHandle,
    time::{Duration, Instant, timeout},
};

use crate::installation::Installation;

/// Watches a pool until [`Self::finish`], which reports the violations.
pub(crate) struct PoolAudit {
    seen: Arc<Mutex<PoolAuditState>>,
    changed: Arc<Notify>,
    tasks: [JoinHandle<()>; 2],
}

#[derive(Default)]
struct PoolAuditState {
    /// Revisions of the pool.
    revisions: u32,
    /// The largest sum of reservations so far.
    max_reserved: Bytes,
    violations: Vec<String>,
    /// Reservations that ended.
    ended: usize,
    /// For each reservation that outlived its model's last Pod: for how long.
    outlived: Vec<Duration>,
    /// Models by reservation id, Pods by model name, and since when a reservation's model has no Pod after it had one.
    reserved: BTreeMap<u64, String>,
    pods: BTreeMap<String, u32>,
    without_pod: BTreeMap<u64, Instant>,
}

impl PoolAudit {
    /// Watches the pool. The beginning of a Pod's name names its model.
    pub(crate) fn of(world: &Installation<'_>, models: &[&str]) -> Self {
        let seen = Arc::new(Mutex::new(PoolAuditState::default()));
        let (of_pool, of_pods) = (Arc::clone(&seen), Arc::clone(&seen));
        let pools: Api<AcceleratorPool> = Api::all(world.site.admin.clone());
        let (pool, pods) = (world.name().to_owned(), world.pods());
        let news = Arc::new(Notify::new());
        let noticed = Arc::clone(&news);
        let models: Vec<String> = models.iter().map(|model| (*model).to_owned()).collect();
        let pool = tokio::spawn(async move {
            let config = watcher::Config::default().fields(&format!("metadata.name={pool}"));
            let mut revisions = pin!(watcher(pools, config).applied_objects());
            while let Some(pool) = revisions.next().await {
                of_pool.lock().unwrap().pool(&pool.unwrap());
                noticed.notify_one();
            }
        });
        let pods = tokio::spawn(async move {
            let mut events = pin!(watcher(pods, watcher::Config::default()));
            let mut known = BTreeMap::new();
            while let Some(event) = events.next().await {
                of_pods.lock().unwrap().pod(event.unwrap(), &models, &mut known);
            }
        });
        Self { seen, changed: news, tasks: [pool, pods] }
    }

    /// Ends the audit once the pool has no reservation, and asserts that every revision kept the pool's rule and that
    /// no reservation outlived its Pod by more than `settle`. Returns how many reservations ended and how many of them
    /// outlived a Pod.
    pub(crate) async fn finish(self, settle: Duration) -> (usize, usize) {
        let empty = async {
            while !self.seen.lock().unwrap().reserved.is_empty() {
                self.changed.notified().await
            }
        };
        timeout(WAIT_TIMEOUT, empty).await.expect("something stays booked");
        self.tasks.iter().for_each(JoinHandle::abort);
        let seen = self.seen.lock().unwrap();
        assert!(seen.violations.is_empty(), "{:#?}", seen.violations);
        assert!(seen.revisions > 4 && seen.max_reserved > Bytes::ZERO, "it saw {} revisions", seen.revisions);
        let late: Vec<_> = seen.outlived.iter().filter(|after| **after > settle).collect();
        assert!(late.is_empty(), "bookings outlived their Pods by {late:?}");
        (seen.ended, seen.outlived.len())
    }
}

impl PoolAuditState {
    fn pool(&mut self, pool: &AcceleratorPool) {
        let Some(status) = &pool.status else { return };
        self.revisions += 1;
        let sum: Bytes = status.ledger.reservations.iter().map(|own| own.sum()).sum();
        let version = pool.resource_version().unwrap_or_default();
        let of = |quantity: &Option<_>| quantity.as_ref().map(ToString::to_string);
        let (total, allocated) = (of(&status.total), of(&status.allocated));
        if let Some(allocated) = &allocated {
            let said: Bytes = allocated.parse().unwrap();
            if said != sum {
                self.violations
                    .push(format!("{version}: {allocated} is said to be allocated, {sum} is booked"));
            }
        }
        let total: Option<Bytes> = total.map(|total| total.parse().unwrap());
        if total.is_none_or(|total| sum > total) && sum > Bytes::ZERO {
            self.violations.push(format!("{version}: {sum} of {total:?} is booked"));
        }
        self.max_reserved = self.max_reserved.max(sum);
        let now: BTreeMap<u64, String> =
            status.ledger.reservations.iter().map(|own| (own.id, own.model.name.clone())).collect();
        let ended: Vec<u64> = self.reserved.keys().copied().filter(|id| !now.contains_key(id)).collect();
        self.ended += ended.len();
        for id in ended {
            self.outlived.extend(self.without_pod.remove(&id).map(|since| since.elapsed()));
        }
        self.reserved = now;
    }

    fn pod(&mut self, event: watcher::Event<Pod>, models: &[String], known: &mut BTreeMap<String, String>) {
        let (pod, gone) = match event {
            watcher::Event::Apply(pod) | watcher::Event::InitApply(pod) => (pod, false),
            watcher::Event::Delete(pod) => (pod, true),
            watcher::Event::Init | watcher::Event::InitDone => return,
        };
        let name = pod.name_any();
        let Some(model) = models.iter().find(|model| name.starts_with(&format!("{model}-"))) else { return };
        let has = self.pods.entry(model.clone()).or_default();
        if gone && known.remove(&name).is_some() {
            *has -= 1;
        } else if !gone && known.insert(name, model.clone()).is_none() {
            *has += 1;
        }
        let (has, now) = (*has, Instant::now());
        for (id, _) in self.reserved.iter().filter(|(_, of)| *of == model) {
            if has == 0 {
                self.without_pod.entry(*id).or_insert(now);
            } else {
                self.without_pod.remove(id);
            }
        }
    }
}
