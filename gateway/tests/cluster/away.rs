//! No gateway reaches the API server for more than a minute, so the gateways forget one another. Awake engines serve,
//! no gateway evicts an engine without knowing the load at the others, and each waiting request gets the reason.

use std::time::Duration;

use futures_util::future::join_all;
use kube::ResourceExt as _;
use rouse_cluster::{LinkMode, wait};
use rouse_controllers::crd::{InferenceModel, inference_model::EngineState};
use rouse_testing::sample::size;
use serde_json::json;
use tokio::time::{Instant, sleep_until, timeout};

use crate::{
    client::TestClient,
    installation::{ClusterGateway, Installation, blocking},
    load::{BackgroundLoad, BackgroundLoadSpec},
};

/// A gateway that sent no report for a minute counts as gone. The soak waits for that, the gate for a new leader's
/// grace period.
const AWAY: Duration = Duration::from_secs(65);
const SAMPLED: Duration = Duration::from_secs(20);
/// Models with requests at one gateway each. The reports of the other gateways show them unused.
const LONE: [&str; 3] = ["lone-0", "lone-1", "lone-2"];
/// Longer than a pause of the load on a busy machine.
const COOLDOWN: &str = "10s";
/// Several cooldowns, and longer than a new leader waits for the other gateways' reports.
const SEEN: Duration = Duration::from_secs(30);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_is_away_for_a_minute_costs_no_request_and_no_engine() {
    let world = Installation::new("away", 8, "512Gi").await;
    for model in LONE {
        world.model(model, "40Gi", "--itl 10ms", json!({"cooldownPeriod": COOLDOWN})).await;
    }
    world.model("short", "40Gi", "", json!({})).await;
    world.model("hasty", "40Gi", "", json!({"queue": {"maxWait": "3s"}})).await;
    world.model("patient", "40Gi", "", json!({})).await;
    let link = world.site.cluster.link().await.unwrap();
    let kubeconfig = link.kubeconfig(&world.site.account).unwrap();
    let gateway = |n: usize| world.gateway_by(&format!("gateway-{n}"), "", &kubeconfig, &[]);
    let gateways: Vec<ClusterGateway> = (0..3).map(gateway).collect();
    join_all(gateways.iter().map(ClusterGateway::until_ready)).await;
    let mut loads: Vec<BackgroundLoad> =
        gateways.iter().zip(LONE).map(|(gateway, model)| load(vec![gateway.api], model, 2)).collect();
    loads.push(load(gateways.iter().map(|gateway| gateway.api).collect(), "short", 30));
    for model in LONE.iter().chain(&["short"]) {
        world.until(model, "awake", |model| !is_disturbed(model)).await;
    }
    let uids = async || {
        let mut uids: Vec<_> = world.running().await.iter().map(|pod| pod.uid()).collect();
        uids.sort();
        uids
    };
    let before = uids().await;
    assert_eq!(before.len(), LONE.len() + 1);

    link.set(LinkMode::Cut);
    let gone = Instant::now();
    join_all(gateways.iter().map(told_why)).await;
    let client = gateways[1].client();
    let patient = tokio::spawn(blocking(move || client.chat("patient", true, 4)));
    sleep_until(gone + size(AWAY, SAMPLED)).await;
    assert!(!patient.is_finished());
    assert_eq!(uids().await, before);

    link.set(LinkMode::Pass);
    let back = Instant::now();
    let disturbed = LONE.map(|model| {
        let models = world.models();
        let seen = async move {
            let seen = |model: &Option<InferenceModel>| model.as_ref().is_none_or(is_disturbed);
            wait::until(&models, model, "it to be put away", seen).await.unwrap()
        };
        timeout(SEEN, Box::pin(seen))
    });
    let (answer, disturbed) = tokio::join!(
        async {
            let answer = patient.await.unwrap();
            println!("served {:.1?} after the API server was back", back.elapsed());
            answer
        },
        join_all(disturbed)
    );
    assert!(answer.is_whole_stream(), "{answer:?}");
    for disturbed in disturbed {
        assert!(disturbed.is_err(), "it is in use: {disturbed:?}");
    }
    for load in loads {
        let outcome = blocking(move || load.end()).await;
        assert!(outcome.failed.is_empty() && outcome.answered > 60 && outcome.streams > 20, "{outcome:?}");
    }
    let after = uids().await;
    assert!(before.iter().all(|uid| after.contains(uid)), "{before:?} {after:?}");
}

fn load(gateways: Vec<std::net::SocketAddr>, model: &'static str, rate: u32) -> BackgroundLoad {
    BackgroundLoad::start(
        gateways,
        BackgroundLoadSpec { short: model, rate, clients: 2, long: model, streams: 1, tokens: 100 },
    )
}

/// Whether the model has anything but one awake engine.
fn is_disturbed(model: &InferenceModel) -> bool {
    let engines = model.status.as_ref().map(|status| status.engines.as_slice()).unwrap_or_default();
    !matches!(engines, [engine] if engine.state == EngineState::Awake)
}

/// Asserts that a client gets the reason at its deadline, and an operator at once.
async fn told_why(gateway: &ClusterGateway) {
    let client = gateway.client();
    let refused = blocking(move || client.chat("hasty", false, 4)).await;
    assert_eq!(refused.status, 503, "{}", refused.text());
    let error = &refused.json()["error"];
    let why = error["details"]["waited_for"].as_str().unwrap();
    assert!(why.contains("API server"), "{error}");
    let admin = TestClient::new(gateway.admin);
    for model in ["hasty", "patient"] {
        let path = format!("/admin/v1/models/{model}/explain");
        let told = blocking(move || admin.get(&path)).await.json();
        assert!(told["reason"].as_str().unwrap().contains("API server"), "{told}");
    }
}
