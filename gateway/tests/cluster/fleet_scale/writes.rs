//! How often all gateways together write to the API server while models are in use, and what each writes of its demand.

use std::collections::{BTreeMap, BTreeSet};

use kube::Api;
use rouse_cluster::{AuditedCall, wait::WAIT_TIMEOUT};
use rouse_controllers::crd::GatewayReplica;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Duration, Instant, sleep, sleep_until, timeout},
};

use super::{
    fleet::{FleetInstallation, chat},
    wire::TOKEN_TIME,
};
use crate::crowd;

/// Writes per second of all gateways together, as promised for any number of models.
const MAX_RATE: f64 = 20.0;
/// Models whose demand changes between none and some, each second: half of them begin and half of them end.
const EDGES_PER_SECOND: u32 = 10;
/// Length of the requests that make these edges.
const SHORT: Duration = Duration::from_secs(1);
/// Length of the requests that keep a model in use: longer than the test measures.
const LONG: Duration = Duration::from_secs(600);
/// The numbers of requests that are written every few seconds are written by then.
const SETTLE: Duration = Duration::from_secs(6);
const WRITES: [&str; 5] = ["create", "update", "patch", "delete", "deletecollection"];

/// Keeps models in use and starts and ends the use of others, and counts the writes meanwhile.
pub(super) async fn check_rate(fleet: &FleetInstallation<'_>) {
    let mut streams = use_models(fleet).await;
    sleep(SETTLE).await;
    let before = fleet.calls().len();
    let begun = Instant::now();
    let requests = make_edges(fleet, begun).await;
    let took = begun.elapsed();
    let calls = fleet.calls();
    let writes = count_writes(&calls[before..]);
    let rate = writes.values().sum::<usize>() as f64 / took.as_secs_f64();
    println!(
        "{rate:.1} writes a second, with {} models in use and {EDGES_PER_SECOND} edges a second: {writes:?} in \
         {took:.1?}",
        fleet.size.in_use
    );
    assert!(streams.try_join_next().is_none(), "a stream has ended");
    requests.join_all().await;
    check_demand(fleet).await;
    assert!(rate <= MAX_RATE, "{rate:.1} writes a second: {writes:?}");
}

/// Opens a stream to each model that is to be in use, and returns once all have begun. The drop closes them.
async fn use_models(fleet: &FleetInstallation<'_>) -> JoinSet<()> {
    let mut streams = JoinSet::new();
    let (begun, mut begun_rx) = mpsc::channel(fleet.size.in_use);
    for n in 0..fleet.size.in_use {
        let (gateway, model, begun) = (fleet.api(n), crowd::model(n), begun.clone());
        streams.spawn(async move {
            let report = || {
                // The channel has room for all.
                begun.try_send(()).ok();
            };
            let answer = chat(gateway, &model, tokens(LONG), report).await;
            assert!(answer.is_whole_stream(), "{model}: {answer:?}");
        });
    }
    for _ in 0..fleet.size.in_use {
        let in_time = timeout(WAIT_TIMEOUT, begun_rx.recv()).await;
        in_time.expect("a model does not answer").unwrap();
    }
    streams
}

/// Sends short requests to other models, one after the other, until the window ends.
async fn make_edges(fleet: &FleetInstallation<'_>, begun: Instant) -> JoinSet<()> {
    let mut requests = JoinSet::new();
    let every = Duration::from_secs(2) / EDGES_PER_SECOND;
    let others = fleet.size.models - fleet.size.in_use;
    let mut n = 0;
    while begun.elapsed() < fleet.size.writes_window {
        let (gateway, model) = (fleet.api(n), crowd::model(fleet.size.in_use + n % others));
        requests.spawn(async move {
            let answer = chat(gateway, &model, tokens(SHORT), || {}).await;
            assert!(answer.is_whole_stream(), "{model}: {answer:?}");
        });
        n += 1;
        sleep_until(begun + every * u32::try_from(n).unwrap()).await;
    }
    requests
}

/// Asserts that each gateway lists models that were requested there, and none of the others. If gateways repeated what
/// they read from each other, each would list them all.
async fn check_demand(fleet: &FleetInstallation<'_>) {
    let gateways = fleet.gateways.len();
    let [in_use, models] = [fleet.size.in_use, fleet.size.models].map(|number| number % gateways);
    assert_eq!([in_use, models], [0, 0], "the number of each requested model tells the gateway");
    let api: Api<GatewayReplica> = Api::namespaced(fleet.world.site.admin.clone(), fleet.world.name());
    for (place, gateway) in fleet.gateways.iter().enumerate() {
        let listed = api.get(&gateway.name).await.unwrap().status.unwrap_or_default().models;
        let own: BTreeSet<String> = (place..fleet.size.models).step_by(gateways).map(crowd::model).collect();
        let others: Vec<&String> = listed.keys().filter(|model| !own.contains(*model)).collect();
        assert!(
            !listed.is_empty() && others.is_empty(),
            "{} of {} lists {others:?}",
            gateway.name,
            listed.len()
        );
    }
}

fn tokens(length: Duration) -> u64 {
    u64::try_from(length.as_millis() / TOKEN_TIME.as_millis()).unwrap()
}

fn count_writes(calls: &[AuditedCall]) -> BTreeMap<(&str, &str), usize> {
    let mut count = BTreeMap::new();
    for call in calls.iter().filter(|call| WRITES.contains(&&*call.verb)) {
        *count.entry((&*call.verb, &*call.resource)).or_default() += 1;
    }
    count
}
