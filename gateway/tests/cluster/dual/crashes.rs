//! A leader that is killed before a write or an order, whichever: the next one finds out what there is.

use futures_util::future::join_all;
use kube::ResourceExt as _;

use super::Duo;
use crate::launched::lives;

/// Writes and orders of a cold start, of falling asleep and of a wake, one after the other.
const POINTS: std::ops::RangeInclusive<u32> = 1..=20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_or_order_leaves_nothing_doubled_and_nothing_lost() {
    let killed = count(direct).await;
    assert!(killed >= 14, "a start, a sleep and a wake are more than {killed} writes and orders");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_or_order_about_launchers_loses_and_doubles_nothing() {
    let killed = count(launched).await;
    assert!(killed >= 14, "a start, a sleep and a wake are more than {killed} writes and orders");
}

/// How many of the gateways were killed.
async fn count<F: Future<Output = bool>>(at: impl Fn(u32) -> F) -> usize {
    let mut killed = 0;
    for ten in POINTS.collect::<Vec<_>>().chunks(10) {
        killed += join_all(ten.iter().copied().map(&at)).await.into_iter().filter(|killed| *killed).count();
    }
    killed
}

/// The second gateway is there from the first, and leads once the first is dead.
async fn direct(point: u32) -> bool {
    let mut duo = Duo::dying(&format!("dual-crash-{point}"), point).await;
    duo.ask("one", 1, 1, "").await;
    let (_, provider) = duo.served("one").await;
    duo.scale("one", 0).await;
    assert_eq!(duo.asleep("one").await.uid(), provider.uid(), "point {point}");
    duo.scale("one", 1).await;
    assert_eq!(duo.served("one").await.1.uid(), provider.uid(), "point {point}");
    let (requesters, providers) = duo.pairs("one").await;
    assert_eq!((requesters.len(), providers.len()), (1, 1), "point {point}");
    duo.gateway.has_ended()
}

async fn launched(point: u32) -> bool {
    let mut duo =
        Box::pin(Duo::dying(&format!("dual-launcher-crash-{point}"), point)).await.in_launchers("").await;
    duo.config("one", "").await;
    duo.request("one", 1, 1).await;
    let (_, launcher) = duo.launched("one").await;
    duo.scale("one", 0).await;
    assert_eq!(duo.put_away("one", 1).await.uid(), launcher.uid(), "point {point}");
    duo.scale("one", 1).await;
    let (_, woken) = duo.launched("one").await;
    assert_eq!((woken.uid(), lives(&woken)), (launcher.uid(), lives(&launcher)), "point {point}");
    assert_eq!((duo.pairs("one").await.0.len(), duo.launchers().await.len()), (1, 1), "point {point}");
    duo.gateway.has_ended()
}
