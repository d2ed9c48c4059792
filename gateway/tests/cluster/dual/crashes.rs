//! A leader that is killed before a write or an order, whichever: the next one finds out what there is.

use futures_util::future::join_all;

use super::{
    Duo,
    both::{Home, engines_of},
};

/// At once.
const TEN: u32 = 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_or_order_leaves_nothing_doubled_and_nothing_lost() {
    everywhere(Home::Pod).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_or_order_about_launchers_loses_and_doubles_nothing() {
    everywhere(Home::Launcher).await;
}

/// Before each write and order of a cold start, of falling asleep and of a wake, until there is none left to be killed before.
async fn everywhere(home: Home) {
    let mut killed = 0;
    for first in (0..).map(|ten| 1 + ten * TEN) {
        let points = first..first + TEN;
        let ended = join_all(points.map(|point| Box::pin(killed_before(home, point)))).await;
        killed += ended.iter().filter(|killed| **killed).count();
        if ended.contains(&false) {
            break;
        }
    }
    assert!(killed >= 14, "a start, a sleep and a wake are more than {killed} writes and orders");
}

/// The second gateway is there from the first, and leads once the first is dead. False: it is not.
async fn killed_before(home: Home, point: u32) -> bool {
    let name = format!("dual-crash-{point}");
    let mut duo = Box::pin(Box::pin(Duo::dying(&home.named(&name), point)).await.at(home)).await;
    duo.demand("one", "").await;
    let (_, provider) = duo.pair("one").await;
    duo.scale("one", 0).await;
    assert_eq!(engines_of(&duo.alone("one").await), engines_of(&provider), "point {point}");
    duo.scale("one", 1).await;
    assert_eq!(engines_of(&duo.pair("one").await.1), engines_of(&provider), "point {point}");
    duo.gateway.has_ended()
}
