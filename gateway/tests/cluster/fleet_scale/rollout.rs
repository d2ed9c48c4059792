//! A rollout whose leader is killed in the middle: many Pod events, models with a new template, requests all the while.

use std::{collections::BTreeMap, sync::Arc};

use kube::{
    Api, Client, ResourceExt as _,
    api::{ListParams, Patch, PatchParams},
};
use nix::sys::signal::Signal;
use rouse_controllers::crd::AcceleratorPool;
use serde_json::json;
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{Duration, Instant, MissedTickBehavior, interval, sleep_until, timeout},
};

use super::{
    cost::{pod_names, touch},
    fleet::FleetInstallation,
    ledger::check_pool,
    objects::{ENGINES, MODELS_PER_POOL, pool_name, running_spec},
    takeover::{self, EndedGateway},
};
use crate::{
    crowd,
    installation::blocking,
    load::{BackgroundLoad, BackgroundLoadResult, BackgroundLoadSpec},
    machine_load::CoresReading,
    support::{FIELD_MANAGER, PoolRevisions},
};

/// One in so many models gets a new template.
const ROLLED: usize = 10;
/// Changes of Pods that the API server sends to gateways, in a second and for each core of the machine, which it shares
/// with these gateways and the rest of the test. It sends each change to every gateway.
const DELIVERIES_PER_CORE: u32 = 100;
/// How many changes of Pods are under way at once.
const AT_ONCE: usize = 32;
/// The share of the Pod events that must have been made in time: the API server shares its cores with all the rest of
/// the test. If other programs take a share of the cores, that much less is asked for.
const KEPT: f64 = 0.8;
/// Engines of the first of these models are awake all the while. The second gets a new template: its streams may wait
/// for an engine, and none may be cut.
const LOAD: BackgroundLoadSpec = BackgroundLoadSpec {
    short: "model-0001",
    rate: 40,
    clients: 16,
    long: "model-0000",
    streams: 4,
    tokens: 20,
};

/// Whether the rollout changes this model's template.
pub(super) const fn is_rolled(model: usize) -> bool {
    model.is_multiple_of(ROLLED)
}

/// Changes Pods all the while, gives models a new template, kills the leader amid that, and asserts what must hold.
/// `cold`: the number of a cold model that nothing has asked for yet.
pub(super) async fn check(fleet: &mut FleetInstallation<'_>, cold: usize) {
    let mut pools = follow_pools(fleet).await;
    let (former, _) = fleet.leader().await;
    let (first_revision, first_event) = (fleet.lease.count() - 1, fleet.world.runner.pod_events());
    let load = BackgroundLoad::start((0..fleet.gateways.len()).map(|n| fleet.api(n)).collect(), LOAD);

    let begun = Instant::now();
    let (client, namespace) = (fleet.world.site.admin.clone(), fleet.world.name().to_owned());
    let (pods, length) = (pod_names(fleet).await, fleet.size.rollout);
    let borne = DELIVERIES_PER_CORE * cores() / u32::try_from(fleet.gateways.len()).unwrap();
    let rate = fleet.size.rollout_rate.min(borne);
    println!(
        "a rollout with {rate} changes of Pods a second, for {} on a machine that bears it",
        fleet.size.rollout_rate
    );
    let changes = tokio::spawn(change_pods(client, namespace, pods, rate, length));
    sleep_until(begun + length / 2).await;
    let deployments = fleet.world.runner.deployments();
    change_templates(fleet).await;
    // In the middle: the leader has begun with half of the models.
    let begun_models = fleet.size.models / ROLLED / 2;
    fleet.world.runner.until_deployments(deployments + begun_models).await;
    let killed = Box::pin(takeover::check(fleet, Signal::SIGKILL, cold, Some(&load))).await;
    changes.await.unwrap();
    until_rolled(fleet).await;
    fleet.until_awake().await;
    let events = fleet.world.runner.pod_events() - first_event;
    println!("the rollout was over after {:.1?} and {events} Pod events", begun.elapsed());

    let outcome = blocking(move || load.end()).await;
    check_load(outcome, &killed);
    let holders = fleet.lease.holders_since(first_revision);
    assert!(holders.len() == 2 && holders[0] == former, "the Lease changes hands once: {holders:?}");
    for (pool, revisions) in &mut pools {
        check_pool(*pool, &revisions.all().await);
    }
}

fn cores() -> u32 {
    let cores = std::thread::available_parallelism().unwrap().get();
    u32::try_from(cores).unwrap()
}

/// Follows every pool, by its number.
async fn follow_pools(fleet: &FleetInstallation<'_>) -> BTreeMap<usize, PoolRevisions> {
    let api: Api<AcceleratorPool> = Api::all(fleet.world.site.admin.clone());
    let mut pools = BTreeMap::new();
    for n in 0..fleet.size.models / MODELS_PER_POOL {
        let pool = api.get(&pool_name(n)).await.unwrap();
        pools.insert(n, PoolRevisions::of(&fleet.world.site.admin, &pool));
    }
    pools
}

/// Changes so many Pods a second for this long, and asserts that the API server kept up as far as it had the cores.
async fn change_pods(client: Client, namespace: String, pods: Vec<String>, rate: u32, length: Duration) {
    let (cores, begun) = (CoresReading::now(), Instant::now());
    let count = rate * u32::try_from(length.as_secs()).unwrap();
    let permits = Arc::new(Semaphore::new(AT_ONCE));
    let (mut patches, mut done) = (JoinSet::new(), 0);
    for n in 0..count {
        sleep_until(begun + Duration::from_secs(1) * n / rate).await;
        let permit = Arc::clone(&permits).acquire_owned().await.unwrap();
        let n = usize::try_from(n).unwrap();
        let (client, namespace, pod) = (client.clone(), namespace.clone(), pods[n % pods.len()].clone());
        patches.spawn(async move {
            touch(&client, &namespace, &pod, n).await;
            drop(permit);
        });
        while let Some(outcome) = patches.try_join_next() {
            outcome.unwrap();
            done += 1;
        }
    }
    done += patches.join_all().await.len();
    let made = f64::from(count) / begun.elapsed().as_secs_f64();
    let others = cores.others_since();
    println!(
        "{made:.0} of {rate} changes of Pods a second; other programs took {:.0} % of the cores",
        others * 100.0
    );
    assert_eq!(done, usize::try_from(count).unwrap(), "changes of Pods");
    let least = f64::from(rate) * KEPT * (1.0 - others);
    assert!(made >= least, "{made:.0} changes of Pods a second of {rate}, at least {least:.0} are wanted");
}

/// Gives some models a new template.
async fn change_templates(fleet: &FleetInstallation<'_>) {
    for n in (0..fleet.size.models).filter(|n| is_rolled(*n)) {
        let spec = running_spec(n, "second");
        let patch = Patch::Merge(json!({"spec": {"template": spec["template"]}}));
        fleet
            .world
            .models()
            .patch(&crowd::model(n), &PatchParams::apply(FIELD_MANAGER), &patch)
            .await
            .unwrap();
    }
}

/// Waits until the new template's Deployment of each of these models has all Pods, and the former has none.
async fn until_rolled(fleet: &FleetInstallation<'_>) {
    let mut looks = interval(Duration::from_millis(500));
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let over = async {
        loop {
            looks.tick().await;
            let deployments = fleet.world.deployments().list(&ListParams::default()).await.unwrap().items;
            let mut replicas: BTreeMap<String, Vec<i32>> = BTreeMap::new();
            for deployment in deployments {
                let name = deployment.name_any();
                let (model, _) = name.rsplit_once('-').unwrap();
                let now = deployment.spec.and_then(|spec| spec.replicas);
                replicas.entry(model.to_owned()).or_default().extend(now);
            }
            let is_over = |n: usize| {
                let mut replicas = replicas[&crowd::model(n)].clone();
                replicas.sort_unstable();
                replicas == [0, ENGINES.cast_signed()]
            };
            if (0..fleet.size.models).filter(|n| is_rolled(*n)).all(is_over) {
                return;
            }
        }
    };
    let in_time = timeout(fleet.size.start_timeout, Box::pin(over)).await;
    in_time.expect("the rollout does not end");
}

/// Asserts that no request failed, except those in flight at the killed gateway.
fn check_load(outcome: BackgroundLoadResult, killed: &EndedGateway) {
    let BackgroundLoadResult { answered, streams, took, slowest, failed } = outcome;
    let (apart, failed): (Vec<_>, Vec<_>) =
        failed.into_iter().partition(|failed| failed.gateway == killed.api && failed.connected <= killed.at);
    println!(
        "{answered} requests and {streams} streams in {took:.1?}, the slowest request in {slowest:.1?}; {} in flight \
         at the gateway that was killed",
        apart.len()
    );
    assert!(failed.is_empty(), "{} failed: {failed:#?}", failed.len());
    assert!(answered > 0 && streams > 0, "{answered} requests, {streams} streams");
}
