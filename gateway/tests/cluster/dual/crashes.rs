//! A leader that is killed before a write or an order, whichever: the next one finds out what there is.

use futures_util::future::join_all;
use kube::ResourceExt as _;

use super::Duo;

/// Writes and orders of a cold start, of falling asleep and of a wake, one after the other.
const POINTS: std::ops::RangeInclusive<u32> = 1..=20;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_or_order_leaves_nothing_doubled_and_nothing_lost() {
    let mut killed = 0;
    for ten in POINTS.collect::<Vec<_>>().chunks(10) {
        killed += join_all(ten.iter().copied().map(at)).await.into_iter().filter(|killed| *killed).count();
    }
    assert!(killed >= 14, "a start, a sleep and a wake are more than {killed} writes and orders");
}

/// Whether it was killed.
async fn at(point: u32) -> bool {
    let mut duo = Duo::dying(&format!("dual-crash-{point}"), point).await;
    duo.ask("one", 1, 1, "").await;
    let round = async {
        let (_, provider) = duo.served("one").await;
        duo.scale("one", 0).await;
        assert_eq!(duo.asleep("one").await.uid(), provider.uid(), "point {point}");
        duo.scale("one", 1).await;
        assert_eq!(duo.served("one").await.1.uid(), provider.uid(), "point {point}");
    };
    // The second gateway is there from the first, and leads once the first is dead.
    round.await;
    let (requesters, providers) = duo.pairs("one").await;
    assert_eq!((requesters.len(), providers.len()), (1, 1), "point {point}");
    duo.gateway.has_ended()
}
