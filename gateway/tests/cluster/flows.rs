//! An operator's flows with a budget: a cold model, a model that goes to sleep, a model without room.

use std::time::Duration;

use kube::{ResourceExt as _, api::DeleteParams};
use nix::sys::signal::Signal;
use rouse::engine::SLEEP_DENIAL_TIMEOUT;
use rouse_controllers::crd::InferenceModel;
use serde_json::json;
use tokio::time::{Instant, sleep, timeout};

use crate::{
    audit::PoolAudit,
    client::TestClient,
    installation::{Installation, blocking, reason},
    leftovers::a_request_waits,
    streams::HeldClientStream,
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cold_model_is_started_by_its_first_request_and_put_away_when_nobody_asks() {
    let world = Installation::new("flow-cold", 1, "128Gi").await;
    world.model("qwen", "80Gi", "", json!({"cooldownPeriod": "10m"})).await;
    // A head that goes out while its stream still waits does not name the kind of start.
    let gateway = world.gateway("gateway-0", "stream: {grace: 10m}");
    world.until("qwen", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    assert_eq!(world.running().await.len(), 0, "nothing is started before somebody asks");

    let client = gateway.client();
    let answer = blocking(move || client.chat("qwen", true, 8)).await;
    assert!(answer.is_whole_stream(), "{answer:?}");
    assert_eq!(answer.header("x-rouse-cold-start"), "cold");
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 80)]);
    world.until("qwen", "ready", |model| model.status.as_ref().is_some_and(|status| status.ready)).await;
    assert_eq!(world.running().await.len(), 1);

    // The engine ends only after the checks above.
    world.edit("qwen", json!({"cooldownPeriod": "2s"})).await;
    let zero = |model: &_| reason(model, "Ready") == "ScaledToZero";
    tokio::time::timeout(Duration::from_secs(30), world.until("qwen", "scaled to zero", zero)).await.unwrap();
    world.until_reserved("nothing", <[_]>::is_empty).await;
    assert_eq!(world.running().await.len(), 0);
}

/// While a model is in use, no turn of the decisions says when one of its requests ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_status_of_a_model_in_unbroken_use_has_the_time_of_its_last_request() {
    let world = Installation::new("flow-busy", 1, "128Gi").await;
    world.model("qwen", "80Gi", "--itl 100ms", json!({"cooldownPeriod": "5m"})).await;
    let gateway = world.gateway("gateway-0", "");
    world.until("qwen", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let stream = HeldClientStream::open(&gateway, "qwen", 900).await;
    let requested =
        |model: &InferenceModel| Some(model.status.as_ref()?.last_request_time.as_ref()?.0.as_second());
    let asks = async {
        loop {
            let client = gateway.client();
            assert_eq!(blocking(move || client.chat("qwen", false, 1)).await.status, 200);
            sleep(Duration::from_secs(1)).await;
        }
    };
    let watches = async {
        let model = world.until("qwen", "requested", |model| requested(model).is_some()).await;
        let first = requested(&model);
        // With this cooldown the time is written again after half a minute.
        world.until("qwen", "requested later", |model| requested(model) > first.map(|at| at + 10)).await;
    };
    tokio::select! {
        () = asks => {}
        outcome = timeout(Duration::from_secs(60), watches) => outcome.expect("the stream is open for longer"),
    }
    stream.leave().await;
}

/// The leader lets the engines of a model that it no longer serves finish their requests, those at other gateways too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_at_every_gateway_end_whole_after_their_model_was_rejected() {
    let world = Installation::new("flow-rejected", 1, "128Gi").await;
    world.model("qwen", "80Gi", "--itl 100ms", json!({"cooldownPeriod": "10m"})).await;
    let gateways = [world.gateway("gateway-0", ""), world.gateway("gateway-1", "")];
    world.until("qwen", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let client = gateways[0].client();
    assert_eq!(blocking(move || client.chat("qwen", false, 1)).await.status, 200);
    let streams = HeldClientStream::open_each(&gateways, "qwen", 80, 1).await;
    let own = world.name().to_owned();
    let spec = json!({"nodeSelector": {"inference-pool": own}, "memory": "128Gi", "allowedNamespaces": ["elsewhere"]});
    world.pool(&own, spec).await;
    world.until("qwen", "rejected", |model| reason(model, "Accepted") == "NamespaceNotAllowed").await;
    for stream in streams {
        stream.finish_whole().await;
    }
    let has_none =
        |model: &InferenceModel| model.status.as_ref().is_some_and(|status| status.engines.is_empty());
    world.until("qwen", "without engines", has_none).await;
    world.until_reserved("nothing", <[_]>::is_empty).await;
}

/// The acceptance list of the original design: a budget of 128Gi, of which one model holds 80.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_model_without_room_is_refused_with_who_has_it_and_starts_once_that_one_was_put_away() {
    let world = Installation::new("flow-full", 2, "128Gi").await;
    let policy = json!({"cooldownPeriod": "5m", "eviction": "cooldown", "queue": {"policy": "reject"}});
    world.model("large", "80Gi", "", policy.clone()).await;
    world.model("other", "60Gi", "", policy).await;
    let gateway = world.gateway("gateway-0", "");
    world.until("other", "accepted", |model| reason(model, "Accepted") == "Accepted").await;
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("large", false, 4)).await.status, 200);

    let refused = blocking(move || client.chat("other", false, 4)).await;
    assert_eq!(refused.status, 429, "{}", refused.text());
    let error = &refused.json()["error"];
    assert_eq!(
        (&error["type"], &error["code"]),
        (&json!("insufficient_memory"), &json!("insufficient_memory"))
    );
    let details = &error["details"];
    assert_eq!(details["requested"], json!({"model": "other", "memory": "60Gi"}));
    assert_eq!(details["available"], "48Gi");
    assert_eq!(details["blocking"][0]["model"], "large", "{details}");
    assert_eq!(details["blocking"][0]["memory"], "80Gi", "{details}");
    assert!(details["blocking"][0]["idle_for"].is_string(), "{details}");
    let wait: u64 = refused.header("retry-after").parse().unwrap();
    assert!((1..=300).contains(&wait), "{wait}");
    world.until("other", "told so", |model| reason(model, "Available") == "InsufficientMemory").await;
    assert_eq!(world.reserved_gib().await, [("large".to_owned(), 80)], "nothing was booked for it");

    world.edit("large", json!({"cooldownPeriod": "1s"})).await;
    world.until("large", "scaled to zero", |model| reason(model, "Ready") == "ScaledToZero").await;
    let served = blocking(move || client.chat("other", true, 4)).await;
    assert!(served.is_whole_stream(), "{served:?}");
    assert_eq!(world.reserved_gib().await, [("other".to_owned(), 60)]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_leaves_the_budget_and_the_engines_as_they_are() {
    let world = Installation::new("flow-restart", 2, "128Gi").await;
    world.model("large", "80Gi", "", json!({"eviction": "cooldown", "queue": {"policy": "reject"}})).await;
    world.model("other", "60Gi", "", json!({"queue": {"policy": "reject"}})).await;
    let mut gateway = world.gateway("gateway-0", "");
    let client = gateway.client();
    assert_eq!(blocking(move || client.chat("large", false, 4)).await.status, 200);
    let before = world.running().await;
    let start = |model: &InferenceModel| model.status.as_ref()?.learned.as_ref()?.start_millis;
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        // The next gateway knows only the written status of the engine.
        let is_written = |model: &InferenceModel| {
            model.status.as_ref().is_some_and(|status| status.ready) && start(model).is_some()
        };
        let written = world.until("large", "ready, with the time of its start", is_written).await;
        gateway.signal(signal);
        gateway.wait_owned().await;
        gateway = world.gateway("gateway-0", "");
        let client = gateway.client();
        let answer = blocking(move || client.chat("large", false, 4)).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        assert_eq!(answer.header("x-rouse-cold-start"), "", "it has been awake all the time");
        let admin = TestClient::new(gateway.admin);
        let fleet = blocking(move || admin.get("/admin/v1/fleet").json()).await;
        let known =
            fleet["models"].as_array().unwrap().iter().find(|model| model["name"] == "large").unwrap();
        assert_eq!(known["learned"]["start"], json!(start(&written)), "what a former leader learned");
        assert_eq!(world.reserved_gib().await, [("large".to_owned(), 80)]);
        let refused = blocking(move || client.chat("other", false, 4)).await;
        assert_eq!(refused.status, 429, "{}", refused.text());
        let now = world.running().await;
        assert_eq!(now.iter().map(|pod| &pod.metadata.uid).collect::<Vec<_>>(), [&before[0].metadata.uid]);
    }
}

/// In mode deployment the engine's Pod stays, and the next leader knows that the engine sleeps, and how deep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_to_sleep_does_so_in_its_pod_and_is_woken_there() {
    let world = Installation::new("flow-asleep", 1, "128Gi").await;
    let own = world.name().to_owned();
    let spec = json!({"nodeSelector": {"inference-pool": own}, "memory": "128Gi", "hostSleepMemory": "64Gi"});
    world.pool(&own, spec).await;
    let more = json!({"cooldownPeriod": "10m", "memoryAsleep": "2Gi", "hostMemory": "30Gi",
        "engine": {"sleepMode": "vllm"}, "variants": [{"name": "usual"}]});
    world.model("qwen", "80Gi", "--enable-sleep-mode", more).await;
    let mut gateway = world.gateway("gateway-0", "");
    let mut seen = Vec::new();
    for start in ["cold", "hot", "hot"] {
        let client = gateway.client();
        let answer = blocking(move || client.chat("qwen", false, 4)).await;
        assert_eq!((answer.status, answer.header("x-rouse-cold-start")), (200, start), "{}", answer.text());
        assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 80)]);
        world.edit("qwen", json!({"cooldownPeriod": "1s"})).await;
        let asleep = world.until("qwen", "asleep", |model| reason(model, "Ready") == "Asleep").await;
        let variants = asleep.status.unwrap().variants;
        let [usual] = variants.as_slice() else { panic!("{variants:?}") };
        assert_eq!((usual.name.as_str(), usual.replicas, usual.asleep), ("usual", 0, 1));
        world.until_reserved("what it keeps", |booked| booked == [("qwen".to_owned(), 2)]).await;
        seen.extend(world.running().await.into_iter().map(|pod| pod.uid().unwrap()));
        world.edit("qwen", json!({"cooldownPeriod": "10m"})).await;
        if start == "hot" {
            continue;
        }
        gateway.signal(Signal::SIGTERM);
        gateway.wait_owned().await;
        gateway = world.gateway("gateway-0", "");
    }
    seen.dedup();
    assert_eq!(seen.len(), 1, "it is the same Pod all the time: {seen:?}");
    let pod = world.running().await.remove(0);
    world.pods().delete(&pod.name_any(), &DeleteParams::default().grace_period(0)).await.unwrap();
    for (level, words) in [
        ("INFO", "launching engine"),
        ("INFO", "waking engine"),
        ("INFO", "engine ready"),
        ("INFO", "engine asleep"),
        ("WARN", "failed while asleep"),
    ] {
        gateway.until_logged(level, words).await;
    }
}

/// The same Pod serves the requests that arrive before it is stopped, and no longer reports its engine as asleep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_takes_the_order_to_sleep_and_stays_awake_serves_who_comes_meanwhile() {
    let world = Installation::new("flow-awake", 1, "128Gi").await;
    let more = json!({"cooldownPeriod": "2s", "memoryAsleep": "2Gi", "hostMemory": "30Gi",
        "engine": {"sleepMode": "vllm"}});
    world.model("qwen", "80Gi", "--enable-sleep-mode --fault ignore-sleep --fault hang-sleep", more).await;
    let gateway = world.gateway("gateway-0", "");
    let chat = async || {
        let client = gateway.client();
        blocking(move || client.chat("qwen", true, 4)).await
    };
    let told = |model: &_| reason(model, "Ready") == "Asleep";
    assert!(chat().await.is_whole_stream());
    let before = world.running().await;
    world.until("qwen", "told to sleep", told).await;
    let client = gateway.client();
    let comes = tokio::spawn(blocking(move || client.chat("qwen", true, 4)));
    a_request_waits(&world).await;
    world.faults(&before, r#"{"hang-sleep": null}"#).await;
    let began = Instant::now();
    let answer = comes.await.unwrap();
    let waited = began.elapsed();
    assert!(answer.is_whole_stream(), "{}", answer.text());
    // A gateway that does not trust the engine would wait as long as a sleep may take, 90 s.
    assert!(waited <= SLEEP_DENIAL_TIMEOUT.duration() + Duration::from_secs(15), "{waited:?}");
    let now = world.running().await;
    assert_eq!((now.len(), now[0].uid()), (1, before[0].uid()));
    assert!(!now[0].annotations().contains_key("rouse.dev/asleep"), "{:?}", now[0].annotations());
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 80)]);
    // The next time no request arrives.
    world.until_reserved("nothing", <[_]>::is_empty).await;
    assert_eq!(world.running().await.len(), 0);
}

/// The next leader finds the order to sleep on the engine's Pod, and in the ledger that no gateway has seen the engine
/// asleep.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_told_to_sleep_when_its_leader_dies_has_its_memory_until_it_sleeps() {
    let world = Installation::new("flow-asked-again", 1, "128Gi").await;
    let more = json!({"cooldownPeriod": "2s", "memoryAsleep": "2Gi", "hostMemory": "30Gi",
        "engine": {"sleepMode": "vllm"}});
    world.model("qwen", "80Gi", "--enable-sleep-mode --fault hang-sleep", more).await;
    let first = world.gateway("gateway-0", "");
    let client = first.client();
    assert!(blocking(move || client.chat("qwen", true, 4)).await.is_whole_stream());
    let told = |model: &_| reason(model, "Ready") == "Asleep";
    world.until("qwen", "told to sleep", told).await;
    let pods = world.running().await;
    first.signal(Signal::SIGKILL);
    first.wait_owned().await;
    let next = world.gateway("gateway-0", "");
    // The change waits for the leader's status, so the next gateway has taken over by then.
    world.edit("qwen", json!({"cooldownPeriod": "10m"})).await;
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 80)]);
    world.faults(&pods, r#"{"hang-sleep": null}"#).await;
    world.until_reserved("what it keeps", |booked| booked == [("qwen".to_owned(), 2)]).await;
    let client = next.client();
    // Not a stream: the head of a stream that waits for the grace goes out before the kind of start is known.
    let answer = blocking(move || client.chat("qwen", false, 4)).await;
    assert_eq!((answer.status, answer.header("x-rouse-cold-start")), (200, "hot"), "{answer:?}");
    assert_eq!(world.reserved_gib().await, [("qwen".to_owned(), 80)]);
    let now = world.running().await;
    assert_eq!((now.len(), now[0].uid()), (1, pods[0].uid()));
}

/// Models take turns in a pool with room for one. One model's Pod is deleted, and then the leader is killed, whose
/// lease lasts 15 s more. No revision of the pool reserves more than its memory, and no reservation outlives its Pod by
/// more than `SETTLE`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_booking_outlives_its_pod_and_no_revision_books_more_than_there_is() {
    const SETTLE: Duration = Duration::from_secs(20);
    let world = Installation::new("flow-audit", 2, "64Gi").await;
    let own = world.name().to_owned();
    let spec = json!({"nodeSelector": {"inference-pool": own}, "memory": "64Gi", "meterLag": "20s"});
    world.pool(&own, spec).await;
    let models = ["one", "two", "three"];
    let audit = PoolAudit::of(&world, &models);
    for model in models {
        world.model(model, "40Gi", "", json!({"cooldownPeriod": "3s"})).await;
    }
    let mut gateway = world.gateway("gateway-0", "");
    for round in 0..2 {
        for model in models {
            let client = gateway.client();
            let answer = blocking(move || client.chat(model, true, 4)).await;
            assert!(answer.is_whole_stream(), "{model}: {answer:?}");
            assert_eq!(world.reserved_gib().await, [(model.to_owned(), 40)]);
        }
        // The last model's Pod ends at once, and in the second round the leader ends after it.
        let pod = world.running().await.remove(0);
        let now = DeleteParams::default().grace_period(0);
        world.pods().delete(&pod.name_any(), &now).await.unwrap();
        if round == 1 {
            gateway.signal(Signal::SIGKILL);
            gateway.wait_owned().await;
            gateway = world.gateway("gateway-0", "");
        }
    }
    for model in models {
        world.models().delete(model, &DeleteParams::default()).await.unwrap();
    }
    let (ended, outlived) = audit.finish(SETTLE).await;
    // Each start was a reservation, and no gateway led when the last Pod ended.
    assert!(ended >= 6 && outlived >= 1, "{ended} bookings ended, {outlived} outlived a Pod");
}
