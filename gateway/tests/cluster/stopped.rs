//! A leader whose process is stopped, and resumes while another leads, changes nothing any more, wherever it stopped.

use kube::{Api, ResourceExt as _};
use rouse::units::{Bytes, Tick};
use rouse_cluster::{Link, LinkMode, TestCluster};
use rouse_controllers::{
    crd::{AcceleratorPool, ledger::Ledger},
    ledger::{Error, PoolLedger, ReservationRefusal},
};

use crate::{
    process::ScriptedGatewayProcess,
    site::GatewayNamespace,
    support::{PoolRevisions, check_ledger, cluster, names, pool, reservation_request},
};

/// The pool's memory, of which one [`LAST`] is reserved from the start.
const TOTAL: Bytes = Bytes::gib(120);
const LAST: Bytes = Bytes::gib(40);
const NOT_LEADING: &str = "this gateway is not the leader";

/// A process that leads, its two links to the API server, and a pool.
struct StoppedLeaderFixture<'a> {
    site: GatewayNamespace<'a>,
    process: ScriptedGatewayProcess,
    books: Link,
    _election: Link,
    pool: AcceleratorPool,
    revisions: PoolRevisions,
}

/// Larger than any epoch that a clock yields.
const EPOCH: u64 = 2_000_000_007;

impl<'a> StoppedLeaderFixture<'a> {
    async fn new(cluster: &'a TestCluster, name: &str) -> Self {
        let site = GatewayNamespace::new(cluster, name).await;
        site.next_epoch(EPOCH).await;
        let (election, books) = (cluster.link().await.unwrap(), cluster.link().await.unwrap());
        let process = ScriptedGatewayProcess::start(&site, &election, &books, EPOCH).await;
        let pool = pool(&site.admin, name, TOTAL).await;
        let revisions = PoolRevisions::of(&site.admin, &pool);
        let mut scene = Self { site, process, books, _election: election, pool, revisions };
        // From here on the ledger carries the process's own stamp: another leader would only change that stamp.
        scene.decides("settled").await;
        scene.process.send_line("write").await;
        assert_eq!(scene.process.next_line().await, "1 reserved 0");
        scene
    }

    fn pool(&self) -> String {
        self.pool.name_any()
    }

    /// Makes the process read the pool and pause before its decision.
    async fn decides(&mut self, model: &str) {
        let pool = self.pool();
        self.process.send_line(&format!("reserve {pool} {model} {}", LAST.0)).await;
        assert_eq!(self.process.next_line().await, "decides");
    }

    /// The pool's version, which shows any other write.
    async fn version(&self) -> Option<String> {
        let pools: Api<AcceleratorPool> = Api::all(self.site.admin.clone());
        pools.get(&self.pool()).await.unwrap().resource_version()
    }
}

/// Stopped between its read and its last check of the claim.
#[tokio::test]
async fn who_was_stopped_before_it_looked_does_not_even_try() {
    let mut scene = Box::pin(StoppedLeaderFixture::new(cluster().await, "looks")).await;
    scene.decides("late").await;
    scene.process.stop().await;
    let (_next, claim) = scene.site.leader("next").await;
    assert_eq!(claim.epoch, EPOCH + 1);

    // No process has written the pool meanwhile: only the check of the claim protects the ledger.
    let (version, traffic) = (scene.version().await, scene.books.traffic());
    scene.process.resume();
    scene.process.send_line("write").await;
    assert_eq!(scene.process.next_line().await, format!("1 {NOT_LEADING}"));
    scene.process.send_line(&format!("reserve {} late {}", scene.pool(), LAST.0)).await;
    assert_eq!(scene.process.next_line().await, format!("0 {NOT_LEADING}"));
    assert_eq!(scene.books.traffic(), traffic, "it asked the API server for something");
    assert_eq!(scene.version().await, version);
}

/// Stopped after its last check: the write is under way, for as long as it takes.
#[tokio::test]
async fn what_was_under_way_when_another_took_over_is_refused() {
    let mut scene = Box::pin(StoppedLeaderFixture::new(cluster().await, "late")).await;
    scene.decides("late").await;
    scene.books.set(LinkMode::Hold);
    scene.process.send_line("write").await;
    let before = scene.books.until("the write", |traffic| traffic.held > 0).await.unwrap();
    scene.process.stop().await;

    let (next, claim) = scene.site.leader("next").await;
    assert_eq!(claim.epoch, EPOCH + 1);
    let books = PoolLedger::new(scene.site.client().await, next.leadership());
    let name = scene.pool();
    let ledgers = books.take_over(&names(&[&name])).await.unwrap();
    assert_eq!(ledgers[&name].reservations.len(), 1);
    let stamped = scene.version().await;

    scene.books.set(LinkMode::Pass);
    scene.books.until("the answer", |traffic| traffic.to_client > before.to_client).await.unwrap();
    assert_eq!(scene.version().await, stamped, "the write of a leader that was replaced");
    scene.process.resume();
    // Whether the process meets the answer first or its timer, it has reserved nothing.
    let said = scene.process.next_line().await;
    assert!(said.starts_with("1 ") && !said.contains("reserved"), "{said}");
    scene.process.send_line(&format!("reserve {name} late {}", LAST.0)).await;
    assert_eq!(scene.process.next_line().await, format!("0 {NOT_LEADING}"));

    // The new leader gets all of the memory.
    for model in ["one", "two"] {
        let reserve =
            |ledger: &mut Ledger, total| ledger.reserve(&reservation_request(model, LAST), total, Tick(0));
        books.change(&name, reserve).await.unwrap();
    }
    let all = scene.revisions.all().await;
    check_ledger(&all);
    assert_eq!(all.len(), 1 + 1 + 1 + 2);
}

/// A clock may stop with a suspended machine, and then the claim still seems to hold at every check.
#[tokio::test]
async fn who_believes_it_leads_is_refused_by_the_stamp_of_a_newer_leader() {
    let cluster = cluster().await;
    let (old, new) =
        (GatewayNamespace::new(cluster, "old").await, GatewayNamespace::new(cluster, "new").await);
    old.next_epoch(EPOCH).await;
    new.next_epoch(EPOCH + 1).await;
    let (before, _) = old.leader("before").await;
    let (after, _) = new.leader("after").await;
    let before = PoolLedger::new(old.client().await, before.leadership());
    let after = PoolLedger::new(new.client().await, after.leadership());
    let made = pool(&old.admin, "stamped", TOTAL).await;
    let mut revisions = PoolRevisions::of(&old.admin, &made);

    let mut asked = 0;
    let mut reserve = |ledger: &mut Ledger, total| {
        asked += 1;
        ledger.reserve(&reservation_request("model", LAST), total, Tick(0))
    };
    let id = before.change("stamped", &mut reserve).await.unwrap();
    // The model has its reservation already: the answer alone is a decision, and needs the stamp.
    assert_eq!(after.change("stamped", &mut reserve).await.unwrap(), id);
    let replaced = |outcome: Result<u64, Error<ReservationRefusal>>| {
        let Err(Error::Replaced { pool, epoch: EPOCH, newer }) = outcome else { panic!("{outcome:?}") };
        assert_eq!((pool.as_str(), newer), ("stamped", EPOCH + 1));
    };
    replaced(before.change("stamped", &mut reserve).await);
    assert_eq!(asked, 3, "a decision that rests on an earlier write and writes nothing counts for nothing");
    assert!(matches!(before.take_over(&names(&["stamped"])).await, Err(Error::Replaced { .. })));

    let all = revisions.all().await;
    check_ledger(&all);
    let epochs: Vec<_> = all.iter().map(|pool| pool.status.as_ref().unwrap().epoch).collect();
    assert_eq!(epochs, [0, EPOCH, EPOCH + 1]);
}
