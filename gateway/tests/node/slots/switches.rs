//! Models whose Pods have slots of one accelerator: their engines take turns, and the Pods stay.

use std::{collections::BTreeSet, fs, net::SocketAddr};

use k8s_openapi::api::core::v1::Pod;
use kube::{ResourceExt as _, api::ListParams};
use rouse::{fleet::event::Event, journal};
use rouse_cluster::AuditedCall;
use serde_json::json;
use tokio::time::{Duration, Instant};

use super::{
    slots_node::{ACCELERATOR, ACCELERATOR_CONFIGURATION, SLOTS, SlotsNode, slots_node},
    worker::environment_of,
};
use crate::{
    client::TestClient,
    installation::{blocking, merge, reason},
    pairs::{address, annotation},
    shared_node::{find_program, run},
    support::repo_path,
};

/// As many as the accelerator has slots. The first two are those of the recorded scenario.
const MODELS: [&str; 8] = ["qwen", "llama", "gemma", "granite", "mistral", "nemotron", "olmo", "phi"];
/// An engine's own time to fall asleep, and to wake.
const SLEEP: Duration = Duration::from_millis(20);
const WAKE: Duration = Duration::from_millis(30);
/// The promised median and 99th percentile of the other part of a switch.
const PROMISED: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(150));
const SCENARIO: &str = "gateway/tests/scenarios/two-models-on-one-gpu.journal";

/// What a switch must leave alone.
#[derive(Debug, PartialEq, Eq)]
struct StandingPods {
    /// The Pods of all models, by uid.
    uids: BTreeSet<String>,
    /// How often the gateway has created or deleted an object. Events do not count.
    made_or_ended: usize,
}

/// How often models have taken the place of others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SwapCounts {
    /// As the gateway counts.
    swaps: u64,
    /// As the engines count.
    sleeps: u64,
}

impl SwapCounts {
    fn since(self, before: Self) -> Self {
        Self { swaps: self.swaps - before.swaps, sleeps: self.sleeps - before.sleeps }
    }

    const fn each(count: u64) -> Self {
        Self { swaps: count, sleeps: count }
    }
}

impl SlotsNode {
    /// Creates those of these models that do not exist yet, and starts their engines.
    async fn serve(&self, models: &[&str]) {
        let (sleep, wake) = (SLEEP.as_millis(), WAKE.as_millis());
        let flags =
            format!("--enable-sleep-mode --ttft 0 --itl 0 --sleep-time {sleep}ms --wake-time {wake}ms");
        let world = &self.ground.installation;
        for name in models {
            if world.models().get_opt(name).await.unwrap().is_some() {
                continue;
            }
            let terms = json!({
                "mode": "dualPods",
                "memory": "60Gi",
                "memoryAsleep": "1Gi",
                "hostMemory": "1Gi",
                "cooldownPeriod": "1h",
                "engine": {"kind": "vllm", "level": "1"},
            });
            Box::pin(self.ground.model(name, &flags, |spec| merge(spec, terms))).await;
            let may_start = "its accelerator to be known";
            world.until(name, may_start, |model| reason(model, "Ready") == "ScaledToZero").await;
            self.time_to_content(name).await;
        }
    }

    /// Sends a request, and returns the time until the first content of its answer.
    async fn time_to_content(&self, model: &str) -> Duration {
        let (client, model) = (self.ground.gateway.client(), model.to_owned());
        blocking(move || {
            let begun = Instant::now();
            let mut open = client.open_chat(&model, true, 2);
            open.until("\"content\"");
            let took = begun.elapsed();
            let answer = open.rest();
            assert!(answer.is_whole_stream(), "{model}: {answer:?}");
            took
        })
        .await
    }

    /// The Pods of all models: requesters and engines.
    async fn model_pods(&self) -> Vec<Pod> {
        let all = self.pods().list(&ListParams::default()).await.unwrap().items;
        let is_of_model =
            |pod: &Pod| pod.annotations().keys().any(|key| key.starts_with("dual-pods.llm-d.ai/"));
        all.into_iter().filter(is_of_model).collect()
    }

    async fn standing_pods(&self) -> StandingPods {
        let uids = self.model_pods().await.iter().filter_map(|pod| pod.uid()).collect();
        let site = &self.ground.installation.site;
        let calls = site.cluster.calls(&site.account).unwrap();
        let makes_or_ends = |call: &&AuditedCall| {
            ["create", "delete", "deletecollection"].contains(&call.verb.as_str())
                && call.resource != "events"
        };
        StandingPods { uids, made_or_ended: calls.iter().filter(makes_or_ends).count() }
    }

    async fn swap_counts(&self) -> SwapCounts {
        let engines = self.model_pods().await.into_iter().filter(|pod| !is_requester(pod));
        let engines: Vec<TestClient> =
            engines.map(|pod| TestClient::new(SocketAddr::new(address(&pod), 8000))).collect();
        let admin = TestClient::new(self.ground.gateway.admin);
        blocking(move || {
            let metrics = admin.get("/metrics").text();
            let swaps = metrics.lines().find_map(|line| line.strip_prefix("rouse_swaps_total "));
            let counted = engines.iter().map(|engine| engine.get("/sim/counters").json()["sleeps"].as_u64());
            SwapCounts {
                swaps: swaps.expect("the gateway counts no swaps").parse().unwrap(),
                sleeps: counted.map(Option::unwrap).sum(),
            }
        })
        .await
    }

    /// Requests these models in turn, so that each request costs a switch. Returns the time of each switch, without
    /// what the engines themselves take, in order of size.
    async fn switch(&self, models: &[&str], count: usize) -> Vec<Duration> {
        Box::pin(self.serve(models)).await;
        // The last one is awake, and the first one is not.
        self.time_to_content(models[models.len() - 1]).await;
        let (pods, swaps) = (self.standing_pods().await, self.swap_counts().await);
        assert_eq!(pods.uids.len(), 2 * models.len(), "a requester and an engine for each model");
        let mut took = Vec::new();
        for model in models.iter().cycle().take(count) {
            took.push(self.time_to_content(model).await.saturating_sub(SLEEP + WAKE));
        }
        assert_eq!(self.standing_pods().await, pods, "a switch made or ended something");
        let counted = u64::try_from(count).unwrap();
        assert_eq!(self.swap_counts().await.since(swaps), SwapCounts::each(counted));
        took.sort_unstable();
        took
    }
}

fn is_requester(pod: &Pod) -> bool {
    annotation(pod, "server-patch").is_some()
}

/// Prints the times of switches among this many models. Returns the median and the 99th percentile.
fn percentiles(node: &SlotsNode, models: usize, took: &[Duration]) -> (Duration, Duration) {
    let (median, late) = (took[took.len() / 2], took[(took.len() * 99).div_ceil(100) - 1]);
    let built = if node.is_optimised { "optimised" } else { "not optimised" };
    println!(
        "{} switches among {models} models ({built}), without sleep and wake: median {median:.1?}, 99 of 100 within \
         {late:.1?}",
        took.len()
    );
    (median, late)
}

#[test]
fn two_and_eight_models_switch_on_one_accelerator_within_150_ms_and_no_pod_is_made_or_ended() {
    run(async {
        let node = slots_node().await;
        let count = if node.is_optimised { 200 } else { 40 };
        let of_two = percentiles(&node, 2, &Box::pin(node.switch(&MODELS[..2], count)).await);
        let of_all = percentiles(&node, MODELS.len(), &Box::pin(node.switch(&MODELS, count)).await);
        // What is promised holds for optimised programs, and the gate's are not.
        for (median, late) in [of_two, of_all].into_iter().filter(|_| node.is_optimised) {
            assert!(median <= PROMISED.0, "median {median:?}");
            assert!(late <= PROMISED.1, "99th percentile {late:?}");
        }

        let device = node.device(ACCELERATOR_CONFIGURATION, ACCELERATOR, Some(node.name()));
        let usage = device.usage().await;
        assert_eq!(usage.len(), usize::try_from(SLOTS).unwrap());
        assert!(usage.values().all(|user| user == node.name()), "each requester has a slot: {usage:?}");
        for pod in node.model_pods().await.iter().filter(|pod| is_requester(pod)) {
            let stub = find_program(&node.runner().processes(pod).unwrap(), "/rouse-stub");
            let env = environment_of(stub.expect("the requester has no stub"));
            for variable in ["ROUSE_ACCELERATORS", "NVIDIA_VISIBLE_DEVICES"] {
                let value = env.get(variable).map(String::as_str);
                assert_eq!(value, Some(ACCELERATOR), "{variable} of {}", pod.name_any());
            }
        }
    });
}

/// The requests of the scenario as they were recorded on one machine, and how often an engine fell asleep there. None
/// did so but for the other model.
fn recorded() -> (Vec<String>, u64) {
    let text = fs::read_to_string(repo_path(SCENARIO)).unwrap();
    let (mut requests, mut sleeps) = (Vec::new(), 0);
    for line in journal::read(&text).unwrap() {
        let journal::JournalLine::Turn { events, .. } = line else { continue };
        for event in events {
            match event {
                Event::Arrived { waiter } => requests.push(waiter.model.as_str().to_owned()),
                Event::Slept { .. } => sleeps += 1,
                _ => {}
            }
        }
    }
    (requests, sleeps)
}

/// There each request came long after the answer to the last one. So here they follow one another.
#[test]
fn the_recorded_requests_of_two_models_cost_as_many_swaps_on_slots_as_on_one_machine() {
    run(async {
        let (requests, swaps) = recorded();
        assert!(
            swaps > 0 && requests.iter().all(|model| MODELS[..2].contains(&model.as_str())),
            "{requests:?}"
        );
        let node = slots_node().await;
        Box::pin(node.serve(&MODELS[..2])).await;
        let (first, more) = requests.split_first().unwrap();
        node.time_to_content(first).await;
        let before = node.swap_counts().await;
        for model in more {
            node.time_to_content(model).await;
        }
        assert_eq!(node.swap_counts().await.since(before), SwapCounts::each(swaps));
    });
}
