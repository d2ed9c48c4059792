//! From a load to the engines that it needs, and back.

use rouse_controllers::crd::{InferenceModel, inference_model::EngineState};
use serde_json::json;

use super::{QUICK, awake, awake_pods, metric, pods_in, report_load, state, target, targets};
use crate::installation::Installation;

/// The design document's timeline: while a third engine loads, the load of the two others adds no fourth and fifth.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_still_loads_blocks_every_further_one_until_it_serves() {
    let world = Installation::new("saturation-up", 5, "256Gi").await;
    // The profile of the document has no thresholds of its own.
    let saturation = json!({
        "profile": "doc",
        "kvCacheThreshold": 0.8, "queueLengthThreshold": 5, "kvSpareTrigger": 0.1, "queueSpareTrigger": 3,
    });
    let settings = json!({"minReplicas": 2, "maxReplicas": 5, "saturation": saturation});
    world.model("qwen", "40Gi", "--start-time 2s", settings).await;
    let gateway = world.gateway_with("gateway-0", QUICK);
    let pods = awake_pods(&world, "qwen", 2).await;
    world.until("qwen", "its present number", |model| targets(model) == [("default", 2)]).await;
    let own = world.name().to_owned();
    let series = |name: &str| format!("{name}{{model=\"qwen\",namespace=\"{own}\",variant=\"default\"}}");
    assert_eq!(metric(&gateway, &series("rouse_desired_replicas")), Some(2.0));

    report_load(&pods, 0.95, 0).await;
    let more = world.until("qwen", "one more", |model| target(model, "default") > 2).await;
    assert_eq!((target(&more, "default"), awake(&more)), (3, 2));
    assert_eq!(state(&more, "Saturated"), ("True".to_owned(), "NeedsReplicas".to_owned()));
    // All the time that it loads, the two others report that they are full.
    let blocked = |model: &InferenceModel| {
        assert!(awake(model) == 3 || target(model, "default") == 3, "{:?}", targets(model));
        awake(model) == 3
    };
    world.until("qwen", "the third to serve", blocked).await;
    let pods = awake_pods(&world, "qwen", 3).await;
    report_load(&pods, 0.95, 0).await;
    world.until("qwen", "a new decision", |model| target(model, "default") == 4).await;
    assert_eq!(metric(&gateway, &series("rouse_desired_replicas")), Some(4.0));
    let public = format!(
        "wva_desired_replicas{{accelerator_type=\"unresolved\",namespace=\"{own}\",variant_name=\"qwen\"}}"
    );
    assert_eq!(metric(&gateway, &public), Some(4.0));
}

/// The design document's two timelines, side by side: both models have the same load, of one and a half engines, and
/// engines that start equally slowly. A failpoint takes the protection from one of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_protection_each_look_at_a_slow_start_adds_an_engine_and_with_it_one_is_added() {
    let world = Installation::new("saturation-cascade", 8, "128Gi").await;
    // This profile adds to what runs, as the document's timeline without protection does.
    let settings = json!({"minReplicas": 2, "maxReplicas": 5, "saturation": {"profile": "latest"}});
    let models = ["protected", "unprotected"];
    for name in models {
        // Engines report half a load until the test sets theirs.
        world.model(name, "10Gi", "--start-time 3s --fault kv-use=0.5", settings.clone()).await;
    }
    let failpoint = [("ROUSE_TEST_UNPROTECTED_MODEL", "unprotected".to_owned())];
    let gateway = world.gateway_in("gateway-0", QUICK, &failpoint);
    let has_two = |model: &InferenceModel| (awake(model), target(model, "default")) == (2, 2);
    let mut pods = Vec::new();
    for name in models {
        let model = world.until(name, "two engines", has_two).await;
        pods.extend(pods_in(&world, &model, EngineState::Awake).await);
    }
    assert_eq!(pods.len(), 4);
    report_load(&pods, 0.75, 0).await;

    // Two are too few and three are enough.
    let overshoots = |model: &InferenceModel| {
        assert_eq!(awake(model), 2, "the third serves already: {:?}", targets(model));
        target(model, "default") == 5
    };
    world.until("unprotected", "a fifth while two serve", overshoots).await;
    for replicas in [3, 4, 5] {
        let ordered = format!("model=unprotected variant=default replicas={replicas} ");
        gateway.until_logged("INFO", &ordered).await;
    }
    let one_more = |model: &InferenceModel| {
        assert!(target(model, "default") <= 3, "{:?}", targets(model));
        awake(model) == 3
    };
    world.until("protected", "the third to serve", one_more).await;
    world.until("unprotected", "all five to serve", |model| awake(model) == 5).await;

    // The load spreads over all engines.
    for (name, share) in [("protected", 0.5), ("unprotected", 0.3)] {
        let model = world.models().get(name).await.unwrap();
        report_load(&pods_in(&world, &model, EngineState::Awake).await, share, 0).await;
    }
    world.until("unprotected", "too many engines", |model| target(model, "default") < 5).await;
    let has_enough = ("False".to_owned(), "SpareCapacity".to_owned());
    let protected = world.until("protected", "enough", |model| state(model, "Saturated") == has_enough).await;
    assert_eq!((awake(&protected), target(&protected, "default")), (3, 3));
}

/// The cheapest variant grows first and the dearest shrinks first. Of equal costs the first by name grows first, and
/// the last by name shrinks first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_cheapest_variant_grows_first_and_the_dearest_shrinks_first() {
    let world = Installation::new("saturation-cost", 6, "512Gi").await;
    let variant =
        |name: &str, cost: u32| json!({"name": name, "cost": cost, "minReplicas": 1, "maxReplicas": 2});
    let variants = json!([variant("dear", 20), variant("b", 5), variant("a", 5)]);
    let settings = json!({"variants": variants, "saturation": {}});
    // Each engine is full from its start.
    world.model("qwen", "40Gi", "--fault kv-use=0.95", settings).await;
    let _gateway = world.gateway_with("gateway-0", QUICK);
    let grows = |model: &InferenceModel| {
        let [a, b, dear] = ["a", "b", "dear"].map(|variant| target(model, variant));
        assert!(dear < 2 || b == 2, "{:?}", targets(model));
        assert!(b < 2 || a == 2, "{:?}", targets(model));
        (a, b, dear) == (2, 2, 2)
    };
    world.until("qwen", "all that may run", grows).await;
    let pods = awake_pods(&world, "qwen", 6).await;

    // The order is the same in this profile, which has no pause between two steps down.
    world.edit("qwen", json!({"saturation": {"profile": "latest"}})).await;
    report_load(&pods, 0.0, 0).await;
    let shrinks = |model: &InferenceModel| {
        let [a, b, dear] = ["a", "b", "dear"].map(|variant| target(model, variant));
        assert!(b > 1 || dear == 1, "{:?}", targets(model));
        assert!(a > 1 || b == 1, "{:?}", targets(model));
        (a, b, dear) == (1, 1, 1)
    };
    world.until("qwen", "what must run", shrinks).await;
    world.until("qwen", "the others to end", |model| awake(model) == 3).await;
}
