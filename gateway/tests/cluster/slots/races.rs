//! Two nodes ask for the last slot at the same moment.

use std::{collections::BTreeMap, time::Duration};

use rouse_testing::sample::size;
use serde_json::json;
use tokio::time::Instant;

use super::fixture::SlotsFixture;

/// Races in the soak, and in the gate.
const RACES: (u32, u32) = (1_000, 100);
/// Longest time until a freed slot is healthy on every node.
const FREED_WITHIN: Duration = Duration::from_secs(1);
const POD: &str = "racer";
/// A node without an agent. Its claim between two races shows that both agents know the object.
const ELSEWHERE: &str = "elsewhere";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_nodes_that_race_for_the_last_slot_exactly_one_gets_it_and_a_freed_slot_is_soon_healthy_again()
{
    let fixture = SlotsFixture::new("slots-race", &["a", "b"]).await;
    let [a, b] = fixture.nodes(["a", "b"]).await;
    let device = fixture.share("box", 1, json!({})).await;
    let resource = device.resource();
    let slot = device.slot(0);
    a.until_health(&device, [true]).await;
    b.until_health(&device, [true]).await;

    let (mut wins, mut slowest) = (BTreeMap::<&str, u32>::new(), Duration::ZERO);
    let races = size(RACES.0, RACES.1);
    for race in 0..races {
        // Both kubelets have chosen before one of them hears of the other. Each is the first to ask in every other race.
        let (first, second) = if race % 2 == 0 { (&a, &b) } else { (&b, &a) };
        let (one, two) = tokio::join!(
            first.kubelet.allocate_ids(POD, &resource, std::slice::from_ref(&slot)),
            second.kubelet.allocate_ids(POD, &resource, std::slice::from_ref(&slot)),
        );
        let (winner, loser, refused) = match (one, two) {
            (Ok(_), Err(refused)) => (first, second, refused),
            (Err(refused), Ok(_)) => (second, first, refused),
            (one, two) => panic!("race {race}: {one:?} {two:?}, {:?}", device.usage().await),
        };
        assert!(refused.contains(&format!("node {} has claimed slot {slot}", winner.name)), "{refused}");
        assert_eq!(device.usage().await, device.map([&winner.name]), "race {race}");
        *wins.entry(&winner.name).or_default() += 1;
        loser.until_health(&device, [false]).await;

        winner.kubelet.release(POD);
        device.set(&slot, &winner.name, ELSEWHERE).await;
        winner.until_health(&device, [false]).await;
        let freed_at = Instant::now();
        device.set(&slot, ELSEWHERE, "").await;
        tokio::join!(a.until_health(&device, [true]), b.until_health(&device, [true]));
        slowest = slowest.max(freed_at.elapsed());
    }
    println!("{races} races: {wins:?}; a freed slot was healthy everywhere after {slowest:?} at most");
    assert_eq!(wins.values().sum::<u32>(), races);
    assert!(slowest < FREED_WITHIN, "{slowest:?}");
}
