//! Two processes that both believe they lead reserve in one pool: the API server lets one of them write.
//!
//! Both claims are valid here: each process leads by its own lease, and both have the same epoch, so only the version
//! of the pool separates them.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicU32, Ordering},
};

use kube::{Api, ResourceExt as _};
use rouse::units::{Bytes, Tick};
use rouse_cluster::{LinkMode, TestCluster};
use rouse_controllers::{
    crd::{AcceleratorPool, ledger::Ledger},
    election::Election,
    ledger::{Error, PoolLedger, ReservationRefusal},
};
use rouse_testing::sample::size;

use crate::{
    process::ScriptedGatewayProcess,
    site::GatewayNamespace,
    support::{PoolRevisions, check_ledger, cluster, names, pool, reservation_request},
};

/// Rounds in the soak, and in the gate.
const ROUNDS: u32 = 1000;
const SAMPLED: u32 = 100;
/// Larger than any epoch that a clock yields.
const EPOCH: u64 = 2_000_000_042;
/// The pool's memory, of which [`LAST`] is left.
const TOTAL: Bytes = Bytes::gib(80);
const LAST: Bytes = Bytes::gib(40);

async fn two_sites<'a>(cluster: &'a TestCluster, name: &str) -> [GatewayNamespace<'a>; 2] {
    let sites = [GatewayNamespace::new(cluster, name).await, GatewayNamespace::new(cluster, name).await];
    for site in &sites {
        site.next_epoch(EPOCH).await;
    }
    sites
}

struct LedgerWriterFixture {
    _election: Election,
    books: PoolLedger,
    model: &'static str,
    asked: AtomicU32,
}

impl LedgerWriterFixture {
    async fn new(site: &GatewayNamespace<'_>, model: &'static str) -> Self {
        let (election, claim) = site.leader(model).await;
        assert_eq!(claim.epoch, EPOCH);
        let books = PoolLedger::new(site.client().await, election.leadership());
        Self { _election: election, books, model, asked: AtomicU32::new(0) }
    }

    async fn reserve(&self, pool: &str) -> Result<u64, Error<ReservationRefusal>> {
        let reserved = self.books.change(pool, |ledger, total| {
            self.asked.fetch_add(1, Ordering::Relaxed);
            ledger.reserve(&reservation_request(self.model, LAST), total, Tick(0))
        });
        reserved.await
    }

    async fn release(&self, pool: &str, id: u64) {
        let released = self.books.change(pool, |ledger, _| {
            ledger.release(id);
            Ok::<_, Infallible>(())
        });
        released.await.unwrap();
    }
}

/// The number of reads of one pool by this site's account, and of writes of a pool's status.
fn reads_and_writes(site: &GatewayNamespace<'_>) -> (usize, usize) {
    let calls = site.cluster.calls(&site.account).unwrap();
    let count = |verb: &str, resource: &str| {
        calls.iter().filter(|call| call.verb == verb && call.resource == resource).count()
    };
    (count("get", "acceleratorpools"), count("update", "acceleratorpools/status"))
}

fn is_full(outcome: &Result<u64, Error<ReservationRefusal>>) -> bool {
    matches!(
        outcome,
        Err(Error::Refused(ReservationRefusal::Full { available: Bytes::ZERO, total: TOTAL, .. }))
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_two_that_believe_they_lead_one_gets_what_is_left() {
    let sites = two_sites(cluster().await, "two").await;
    let [one, two] =
        [LedgerWriterFixture::new(&sites[0], "one").await, LedgerWriterFixture::new(&sites[1], "two").await];
    let made = pool(&sites[0].admin, "two", TOTAL).await;
    let mut revisions = PoolRevisions::of(&sites[0].admin, &made);
    let always =
        |ledger: &mut Ledger, total| ledger.reserve(&reservation_request("always", LAST), total, Tick(0));
    one.books.change("two", always).await.unwrap();

    let (mut won, rounds) = ([0_u32; 2], size(ROUNDS, SAMPLED));
    for round in 0..rounds {
        let outcomes = tokio::join!(one.reserve("two"), two.reserve("two"));
        let (winner, id) = match &outcomes {
            (Ok(id), lost) if is_full(lost) => (0, *id),
            (lost, Ok(id)) if is_full(lost) => (1, *id),
            other => panic!("round {round}: {other:?}"),
        };
        won[winner] += 1;
        // In every other round the process without the reservation releases it.
        let by = if round % 2 == 0 { winner } else { 1 - winner };
        [&one, &two][by].release("two", id).await;
    }

    let all = revisions.all().await;
    check_ledger(&all);
    assert_eq!(
        all.len() as u32,
        1 + 1 + 2 * rounds,
        "revisions that were not seen, or that nobody was told of"
    );
    let conflicts = one.asked.into_inner() + two.asked.into_inner() - 2 * rounds;
    println!("{rounds} rounds, {conflicts} with a conflict; won: {won:?}");
    assert!(conflicts > rounds / 10, "{conflicts} conflicts in {rounds} rounds: they do not meet");
}

/// In each round both processes have read the same ledger before either writes.
#[tokio::test]
async fn of_two_processes_that_believe_they_lead_one_gets_what_is_left() {
    let cluster = cluster().await;
    let sites = two_sites(cluster, "processes").await;
    let mut processes = Vec::new();
    let mut links = Vec::new();
    for site in &sites {
        let link = cluster.link().await.unwrap();
        processes.push(ScriptedGatewayProcess::start(site, &link, &link, EPOCH).await);
        links.push(link);
    }
    let made = pool(&sites[0].admin, "processes", LAST).await;
    let mut revisions = PoolRevisions::of(&sites[0].admin, &made);

    let (mut won, rounds) = ([0_u32; 2], size(ROUNDS, SAMPLED));
    for round in 0..rounds {
        for (process, model) in processes.iter_mut().zip(["one", "two"]) {
            process.send_line(&format!("reserve processes {model} {}", LAST.0)).await;
            assert_eq!(process.next_line().await, "decides");
        }
        for n in [round as usize % 2, (round as usize + 1) % 2] {
            processes[n].send_line("write").await;
        }
        let said = [processes[0].next_line().await, processes[1].next_line().await];
        let reserved = said.each_ref().map(|text| text.strip_prefix("1 reserved ").map(str::to_owned));
        let full = |text: &str| text.starts_with("2 ") && text.ends_with(" 0 of 40Gi are available");
        let (winner, id) = match reserved {
            [Some(id), None] if full(&said[1]) => (0, id),
            [None, Some(id)] if full(&said[0]) => (1, id),
            _ => panic!("round {round}: {said:?}"),
        };
        won[winner] += 1;
        let by = &mut processes[(winner + round as usize) % 2];
        by.send_line(&format!("release processes {id}")).await;
        assert_eq!(by.next_line().await, "released");
    }
    let all = revisions.all().await;
    check_ledger(&all);
    assert_eq!(all.len() as u32, 1 + 2 * rounds);
    println!("{rounds} rounds, a conflict in each; won: {won:?}");
}

/// A write without an answer may have happened. A process that retries finds out, and has one reservation.
#[tokio::test]
async fn a_caller_that_lost_the_response_asks_again_and_has_one_reservation() {
    let cluster = cluster().await;
    let site = GatewayNamespace::new(cluster, "lost").await;
    let (election, _) = site.leader("only").await;
    let link = cluster.link().await.unwrap();
    let books = PoolLedger::new(site.client_by(&link).await, election.leadership());
    let made = pool(&site.admin, "lost", TOTAL).await;
    let mut revisions = PoolRevisions::of(&site.admin, &made);
    for (round, model) in ["one", "two"].into_iter().enumerate() {
        let reserve =
            |ledger: &mut Ledger, total| ledger.reserve(&reservation_request(model, LAST), total, Tick(0));
        let unheard = books.change("lost", |ledger, total| {
            link.set(LinkMode::Hold);
            reserve(ledger, total)
        });
        assert!(matches!(unheard.await, Err(Error::Timeout)));
        // In the first round the held write arrives now, beside the retry; in the second round it never arrives.
        link.set(if round == 0 { LinkMode::Pass } else { LinkMode::Cut });
        link.set(LinkMode::Pass);
        let id = books.change("lost", reserve).await.unwrap();
        let all = revisions.all().await;
        check_ledger(&all);
        let ledger = &all.last().unwrap().status.as_ref().unwrap().ledger;
        assert_eq!(
            (ledger.reservations.len(), ledger.allocated()),
            (round + 1, Bytes(LAST.0 * (round as u64 + 1)))
        );
        assert_eq!(ledger.reservations[round].id, id);
    }
}

#[tokio::test]
async fn a_missing_pool_and_a_gateway_that_does_not_lead_are_distinct_errors() {
    let site = GatewayNamespace::new(cluster().await, "gone").await;
    let (election, claim) = site.leader("only").await;
    let books = PoolLedger::new(site.client().await, election.leadership());
    let nothing = |_: &mut _, _| Ok::<_, Infallible>(());
    let outcome = books.change("nowhere", nothing).await;
    assert!(matches!(outcome, Err(Error::NoPool(ref name)) if name == "nowhere"), "{outcome:?}");

    pool(&site.admin, "there", TOTAL).await;
    let ledgers = books.take_over(&names(&["nowhere", "there"])).await.unwrap();
    assert_eq!(ledgers.into_keys().collect::<Vec<_>>(), ["there"], "a pool that is gone is left out");
    let pools: Api<AcceleratorPool> = Api::all(site.admin.clone());
    let stamped = pools.get("there").await.unwrap();
    assert_eq!(stamped.status.as_ref().unwrap().epoch, claim.epoch);
    books.take_over(&names(&["there"])).await.unwrap();
    books.change("there", nothing).await.unwrap();
    let after = pools.get("there").await.unwrap();
    assert_eq!(after.resource_version(), stamped.resource_version(), "written although nothing changed");

    election.release(async {}).await;
    let outcome = books.change("there", nothing).await;
    assert!(matches!(outcome, Err(Error::NotLeading)), "{outcome:?}");
    let outcome = books.take_over(&names(&["there"])).await;
    assert!(matches!(outcome, Err(Error::NotLeading)), "{outcome:?}");
}

#[tokio::test]
async fn a_writer_without_rivals_reads_a_pool_once_and_again_for_an_outcome_without_a_write() {
    let site = GatewayNamespace::new(cluster().await, "unrivalled").await;
    let (election, _) = site.leader("only").await;
    let books = PoolLedger::new(site.client().await, election.leadership());
    pool(&site.admin, "unrivalled", TOTAL).await;
    let reserve = |model: &'static str| {
        books.change("unrivalled", move |ledger, total| {
            ledger.reserve(&reservation_request(model, LAST), total, Tick(0))
        })
    };
    let reads_and_writes = || reads_and_writes(&site);
    let first = reserve("one").await.unwrap();
    let second = reserve("two").await.unwrap();
    assert!(second > first);
    assert_eq!(reads_and_writes(), (1, 2), "the second write begins with what the first one returned");
    assert!(is_full(&reserve("three").await));
    assert_eq!(reads_and_writes(), (2, 2), "a refusal rests on a read");
    let release = |ledger: &mut Ledger, _| {
        ledger.release(first);
        Ok::<_, Infallible>(())
    };
    books.change("unrivalled", release).await.unwrap();
    assert_eq!(reads_and_writes(), (3, 3), "nothing was returned by a write before");
    assert_eq!(reserve("two").await.unwrap(), second);
    assert_eq!(reads_and_writes(), (4, 3), "only a read shows that no newer leader has changed the ledger");
}

#[tokio::test]
async fn a_takeover_begins_with_what_one_list_shows_and_reads_only_a_pool_that_has_changed_since() {
    let site = GatewayNamespace::new(cluster().await, "listed").await;
    let reserve = |model: &'static str| {
        move |ledger: &mut Ledger, total| ledger.reserve(&reservation_request(model, LAST), total, Tick(0))
    };
    let (former, _) = site.leader("former").await;
    let books = PoolLedger::new(site.client().await, former.leadership());
    pool(&site.admin, "listed", TOTAL).await;
    let first = books.change("listed", reserve("one")).await.unwrap();
    former.release(async {}).await;

    let (next, claim) = site.leader("next").await;
    let books = PoolLedger::new(site.client().await, next.leadership());
    let before = reads_and_writes(&site);
    let calls = || {
        let now = reads_and_writes(&site);
        (now.0 - before.0, now.1 - before.1)
    };
    let listed = books.pools_with_reservations().await.unwrap();
    assert!(listed.iter().any(|(name, _)| name == "listed"), "{listed:?}");
    let ledgers = books.take_over(&names(&["listed"])).await.unwrap();
    assert_eq!(ledgers["listed"].reservations.len(), 1);
    let stamped = Api::<AcceleratorPool>::all(site.admin.clone()).get("listed").await.unwrap();
    assert_eq!(stamped.status.unwrap().epoch, claim.epoch);
    assert_eq!(calls(), (0, 1), "the stamp begins with what the list showed");
    books.change("listed", reserve("two")).await.unwrap();
    assert_eq!(calls(), (0, 2), "the first reservation begins with what the stamp returned");

    // The list shows a full pool, and another writer then makes room.
    books.pools_with_reservations().await.unwrap();
    let release = |ledger: &mut Ledger, _| {
        ledger.release(first);
        Ok::<_, Infallible>(())
    };
    PoolLedger::new(site.admin.clone(), next.leadership()).change("listed", release).await.unwrap();
    books.change("listed", reserve("three")).await.unwrap();
    assert_eq!(calls(), (1, 3), "a refusal rests on a read, whatever a list showed");
}
