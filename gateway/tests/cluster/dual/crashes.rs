//! A leader is killed before any one of its writes or orders: the next leader finds out the state.

use std::pin::pin;

use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Pod;
use rouse_testing::sample::{cases, size};
use tokio::time::{Duration, sleep};

use super::{
    DualPodsFixture,
    all_modes::{TestedProviderKind, engines_of},
};
use crate::{crashes::before_each_write, pairs::both_replaced};

/// Pairs of killed leaders.
const TEN: u32 = 10;
/// How many of a story's writes and orders, and how many of the pairs, the gate tries.
const SAMPLED: usize = 3;
/// The gate samples among this many writes and orders of [`slept`]: it has no more, as the soak asserts.
const MOST_OF_SLEPT: u32 = 40;
/// The same for [`ended`], which has 48 to 53: three starts of about 12 each (questions and orders to stubs, a Pod, its
/// records, a canary, an event), and two ends of about 7 each.
const MOST_OF_ENDED: u32 = 60;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_or_order_leaves_nothing_doubled_and_nothing_lost() {
    everywhere(TestedProviderKind::Pod, MOST_OF_SLEPT, slept).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_or_order_about_launchers_loses_and_doubles_nothing() {
    everywhere(TestedProviderKind::Launcher, MOST_OF_SLEPT, slept).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_leader_killed_before_any_write_or_order_in_mode_plain_leaves_no_engine_and_no_requester_behind() {
    everywhere(TestedProviderKind::Plain, MOST_OF_ENDED, ended).await;
}

/// The gateway that takes over dies soon as well, and a third goes on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_leaders_killed_one_after_the_other_leave_nothing_doubled_and_nothing_lost() {
    let both = [TestedProviderKind::Pod, TestedProviderKind::Launcher].map(|home| Box::pin(twice(home)));
    join_all(both).await;
}

/// Kills the first leader before its second, fourth... write or order, and the next leader before its first to third.
async fn twice(home: TestedProviderKind) {
    let killed_before = async |point: u32| {
        let (first, second) = (2 * point, 1 + point % 3);
        let name = home.named(&format!("dual-crash-{first}-{second}"));
        let mut duo =
            Box::pin(Box::pin(DualPodsFixture::dying(&name, first, Some(second), home)).await.at(home)).await;
        let mut next = duo.second.take().unwrap();
        let mut story = pin!(slept(&duo));
        let third = async {
            while !next.has_ended() {
                sleep(Duration::from_millis(50)).await;
            }
            duo.world.gateway_with("gateway-2", &duo.more)
        };
        let _third = tokio::select! {
            () = &mut story => return false,
            third = third => third,
        };
        story.await;
        true
    };
    // A story always reaches the first five.
    let points: Vec<u32> = (1..=size(TEN, 5)).collect();
    let points = cases(&points, SAMPLED);
    let ended = join_all(points.iter().map(|point| Box::pin(killed_before(*point)))).await;
    let killed = ended.iter().filter(|killed| **killed).count();
    assert!(killed >= points.len().min(5), "two leaders were killed in {killed} of {points:?}");
}

/// Kills the leader before each write and order of this story. The second gateway runs from the start and leads once
/// the first is dead.
async fn everywhere(home: TestedProviderKind, most: u32, story: impl AsyncFn(&DualPodsFixture)) {
    before_each_write(most, SAMPLED, async |point| {
        let name = home.named(&format!("dual-crash-{point}"));
        let mut duo =
            Box::pin(Box::pin(DualPodsFixture::dying(&name, point, None, home)).await.at(home)).await;
        story(&duo).await;
        duo.gateway.has_ended()
    })
    .await;
}

/// A story of a cold start, a sleep and a wake.
async fn slept(duo: &DualPodsFixture) {
    duo.demand("one", "").await;
    let (_, provider) = duo.pair("one").await;
    duo.scale("one", 0).await;
    assert_eq!(engines_of(&duo.alone("one").await), engines_of(&provider));
    duo.scale("one", 1).await;
    assert_eq!(engines_of(&duo.pair("one").await.1), engines_of(&provider));
}

/// A story of a cold start and the end of its requester, then another and the end of its provider.
async fn ended(duo: &DualPodsFixture) {
    duo.demand("one", "").await;
    duo.pair("one").await;
    duo.scale("one", 0).await;
    let nobody = |requesters: &[Pod], providers: &[Pod]| requesters.is_empty() && providers.is_empty();
    duo.watch_for("one", "no Pod", nobody).await;
    duo.scale("one", 1).await;
    let (requester, provider) = duo.pair("one").await;
    duo.delete(&provider).await;
    duo.watch_for("one", "two new Pods", both_replaced(&requester, &provider)).await;
    duo.pair("one").await;
}
