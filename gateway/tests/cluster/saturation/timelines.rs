//! From a load to the engines that it needs, and back.

use rouse_controllers::crd::InferenceModel;
use serde_json::json;

use super::{QUICK, awake, awake_pods, metric, report_load, state, target, targets};
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
