//! The API server stops and comes back: which gateway leads meanwhile.

use std::time::Duration;

use rouse_cluster::ServerRole;
use rouse_controllers::election::{Election, RENEW_DEADLINE};
use tokio::time::{Instant, sleep};

use crate::{
    election::LeaderWatcher,
    site::{GatewayNamespace, until_leading},
    support::own_cluster,
};

/// An outage that costs no lease, even if a renewal is due just when the server stops and the next attempt comes just
/// before the server is back.
const IN_TIME: Duration = Duration::from_secs(5);

#[tokio::test]
async fn who_leads_goes_on_when_the_api_server_is_back_in_time() {
    let cluster = own_cluster().await;
    let site = GatewayNamespace::new(&cluster, "outage").await;
    let start = async |name: &str| Election::start(site.leases(site.client().await), name.to_owned());
    let first = start("first").await;
    let epoch = until_leading(&mut first.leadership()).await.epoch;
    let second = start("second").await;
    let witness = LeaderWatcher::of(&[&first, &second]);

    // The server hangs, and then continues.
    cluster.freeze_server(ServerRole::ApiServer).await;
    sleep(IN_TIME).await;
    cluster.thaw_server(ServerRole::ApiServer).await;
    sleep(RENEW_DEADLINE).await;
    let seen = witness.tell();
    assert_eq!((seen.len(), seen[0].leader), (1, Some((0, epoch))), "{seen:?}");

    // The server is killed, and another takes its place.
    let witness = LeaderWatcher::of(&[&first, &second]);
    cluster.kill_server(ServerRole::ApiServer).await;
    let gone = Instant::now();
    cluster.start_server(ServerRole::ApiServer).await.unwrap();
    let away = gone.elapsed();
    sleep(RENEW_DEADLINE).await;
    let seen = witness.tell();
    println!("the API server was away for {away:?}: {seen:?}");
    // The test cannot control how long the server takes to start, only what follows.
    if away < IN_TIME {
        assert_eq!((seen.len(), seen[0].leader), (1, Some((0, epoch))), "{seen:?}");
    } else {
        assert!(seen.iter().filter_map(|seen| seen.leader).all(|(_, led)| led >= epoch));
    }
    tokio::select! {
        _ = async { until_leading(&mut first.leadership()).await } => {}
        _ = async { until_leading(&mut second.leadership()).await } => {}
    }
}
