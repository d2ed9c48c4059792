//! Three gateways under load: one is killed, all are replaced one by one, and the API server is unreachable. No client
//! may notice.

use std::net::SocketAddr;

use nix::sys::signal::Signal;
use rouse_cluster::{ServerRole, TestCluster};
use rouse_controllers::election::LEASE_DURATION;
use serde_json::json;
use tokio::time::{Duration, Instant, sleep};

use crate::{
    installation::{ClusterGateway, Installation, blocking},
    load::{BackgroundLoad, BackgroundLoadResult, BackgroundLoadSpec},
    runner::{TestPrograms, plain_node},
    site::GatewayNamespace,
    support::define_kinds,
};

/// Required rate of short requests per second. The load makes some more.
const RATE: u32 = 1000;
const WISHES: BackgroundLoadSpec = BackgroundLoadSpec {
    short: "short",
    rate: RATE + RATE / 20,
    clients: 24,
    long: "long",
    streams: 12,
    tokens: 100,
};
/// Debug builds may answer fewer requests than that even undisturbed. The test holds them to this share of their
/// undisturbed rate.
const KEPT: f64 = 0.8;
/// A new leader acts within this time after the former leader's lease has ended.
const ACTS: Duration = Duration::from_secs(2);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_requests_a_second_fail_by_no_kill_no_rolling_restart_and_no_absence_of_the_api_server() {
    let cluster = TestCluster::start().unwrap();
    define_kinds(&cluster).await;
    let programs = TestPrograms::optimised();
    let optimised = programs.are_optimised();
    let site = GatewayNamespace::new(&cluster, "many").await;
    let world = Installation::with_programs(programs, site, "256Gi", |own| plain_node(own, 4)).await;
    world.model("short", "40Gi", "--ttft 1ms --itl 1ms", json!({})).await;
    world.model("long", "40Gi", "--itl 20ms", json!({})).await;
    for cold in ["cold-0", "cold-1"] {
        world.model(cold, "40Gi", "", json!({})).await;
    }
    let mut gateways: Vec<ClusterGateway> = (0..3).map(|n| world.gateway(&name(n), "")).collect();
    for model in ["short", "long"] {
        let client = gateways[0].client();
        assert_eq!(blocking(move || client.chat(model, false, 4)).await.status, 200);
    }
    for gateway in &gateways {
        gateway.until_ready().await;
    }

    let load = BackgroundLoad::start(gateways.iter().map(|gateway| gateway.api).collect(), WISHES);
    let mut phase = LoadPhaseReport::new();
    sleep(Duration::from_secs(2)).await;
    let undisturbed = phase.ends("undisturbed", &load);
    let wanted = if optimised { f64::from(RATE) } else { f64::from(RATE).min(undisturbed * KEPT) };

    let (killed, gone) = kill_the_leader(&world, &mut gateways, &load).await;
    phase.ends("the leader killed", &load);
    replace_each(&world, &mut gateways, &load).await;
    phase.ends("each replaced", &load);

    cluster.stop_server(ServerRole::ApiServer).await;
    cluster.start_server(ServerRole::ApiServer).await.unwrap();
    let client = gateways[0].client();
    assert_eq!(blocking(move || client.chat("cold-1", false, 4)).await.status, 200);
    phase.ends("the API server restarted", &load);

    let outcome = blocking(move || load.end()).await;
    check(outcome, wanted, |gateway, connected| gateway == killed && connected <= gone);
}

fn name(n: usize) -> String {
    format!("gateway-{n}")
}

/// Prints the load of each part of the test for people.
struct LoadPhaseReport {
    since: Instant,
    answered: u64,
}

impl LoadPhaseReport {
    fn new() -> Self {
        Self { since: Instant::now(), answered: 0 }
    }

    /// Ends a part of the test and returns its requests per second.
    fn ends(&mut self, what: &str, load: &BackgroundLoad) -> f64 {
        let (now, answered) = (Instant::now(), load.answered());
        let (took, made) = (now - self.since, answered - self.answered);
        println!("{what}: {made} requests in {took:.1?}");
        (self.since, self.answered) = (now, answered);
        made as f64 / took.as_secs_f64()
    }
}

/// Kills the leader while a request waits for a cold model. Returns the leader's address and the time of its end.
async fn kill_the_leader(
    world: &Installation<'_>,
    gateways: &mut Vec<ClusterGateway>,
    load: &BackgroundLoad,
) -> (SocketAddr, Instant) {
    let holder = world.site.holder().await;
    let n = (0..gateways.len()).find(|n| holder.starts_with(&name(*n))).expect("one of them leads");
    let dead = gateways.remove(n);
    let address = dead.api;
    let killed = Instant::now();
    dead.signal(Signal::SIGKILL);
    dead.wait_owned().await;
    let gone = Instant::now();
    load.remove_gateway(address);
    let client = gateways[0].client();
    let waits = tokio::spawn(blocking(move || client.chat("cold-0", true, 4)));
    world.until_deployed("cold-0").await;
    let acted = killed.elapsed();
    println!("a new leader acts {acted:.1?} after the other was killed");
    assert!(acted <= LEASE_DURATION + ACTS, "{acted:?}");
    let answer = waits.await.unwrap();
    assert!(answer.is_whole_stream(), "{answer:?}");
    gateways.insert(n, world.gateway(&name(n), ""));
    gateways[n].until_ready().await;
    load.add_gateway(gateways[n].api);
    (address, gone)
}

/// Replaces the gateways as a Deployment does: one after the other, each after the previous new gateway serves.
async fn replace_each(world: &Installation<'_>, gateways: &mut [ClusterGateway], load: &BackgroundLoad) {
    for (n, gateway) in gateways.iter_mut().enumerate() {
        gateway.signal(Signal::SIGTERM);
        let address = gateway.api;
        gateway.wait().await;
        load.remove_gateway(address);
        *gateway = world.gateway(&name(n), "");
        gateway.until_ready().await;
        load.add_gateway(gateway.api);
    }
}

fn check(outcome: BackgroundLoadResult, wanted: f64, excused: impl Fn(SocketAddr, Instant) -> bool) {
    let BackgroundLoadResult { answered, streams, took, slowest, failed } = outcome;
    let (apart, failed): (Vec<_>, Vec<_>) =
        failed.into_iter().partition(|failed| excused(failed.gateway, failed.connected));
    let rate = answered as f64 / took.as_secs_f64();
    println!(
        "{answered} requests in {took:.1?}, {rate:.0} a second, the slowest in {slowest:.1?}; {streams} streams; \
         {} in flight at the gateway that was killed",
        apart.len()
    );
    assert!(failed.is_empty(), "{} failed: {failed:#?}", failed.len());
    assert!(rate >= wanted, "{rate:.0} requests a second, {wanted:.0} are wanted");
    assert!(streams >= 100, "{streams}");
}
