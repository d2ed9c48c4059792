//! How a kubelet handles containers that end or cannot start, and what waiting requests get.

use kube::ResourceExt as _;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_cluster::node::image;
use rouse_controllers::crd::InferenceModel;
use serde_json::{Value, json};

use crate::{
    installation::reason,
    shared_node::{engine_pid, run, shared_node},
};

/// The kubelet would restart the container beside a stub without its state. The gateway replaces the Pod instead.
#[test]
fn an_engine_that_is_killed_is_told_and_replaced_by_another_pod() {
    run(async {
        let ground = shared_node().await;
        ground.model("killed", "--itl 50ms", |_| {}).await;
        let stream = ground.stream("killed", 2000).await;
        let pod = ground.pods("killed").await.remove(0);
        let killed = engine_pid(&pod, &ground.installation.runner.processes(&pod).unwrap());
        kill(Pid::from_raw(killed), Signal::SIGKILL).unwrap();
        let cut = stream.ended().await;
        assert!(!cut.is_whole_stream(), "{}", cut.text());
        let events = cut.events();
        assert!(events.iter().any(|event| event.contains("\"error\"")), "{events:?}");
        let failed = ground
            .installation
            .until("killed", "seen dead", |model| reason(model, "Ready") != "Deployed")
            .await;
        assert!(!failed.status.unwrap().ready);

        let again = ground.chat("killed", true).await;
        assert!(again.is_whole_stream(), "{again:?}");
        ground.until_gone(&pod).await;
        let now = ground.pods("killed").await;
        assert_eq!(now.len(), 1);
        assert_ne!(now[0].uid(), pod.uid());
        assert_eq!(ground.reserved_gib("killed").await, [40]);
    });
}

#[test]
fn an_image_that_cannot_be_had_ends_the_start_and_the_client_is_told() {
    run(async {
        let ground = shared_node().await;
        // This name leads to no listener, so the kubelet reaches no registry.
        ground.model("pulled", "", with_image("localhost/nowhere:1")).await;
        let answer = ground.chat("pulled", false).await;
        assert_eq!(answer.status, 503, "{}", answer.text());
        let error = &answer.json()["error"];
        assert_eq!(
            (&error["code"], &error["details"]["cause"]),
            (&json!("model_not_ready"), &json!("unrunnable"))
        );
        // The model's owner sees the kubelet's message.
        let says = |model: &InferenceModel, words: &str| {
            let conditions = model.status.iter().flat_map(|status| &status.conditions);
            conditions.into_iter().any(|one| one.type_ == "Available" && one.message.contains(words))
        };
        let failed = |model: &InferenceModel| {
            reason(model, "Available") == "Failed"
                && says(model, "ImagePullBackOff")
                && says(model, "localhost/nowhere:1")
        };
        ground.installation.until("pulled", "the kubelet's words", failed).await;
        assert!(ground.pods("pulled").await.is_empty());
        assert_eq!(ground.reserved_gib("pulled").await, [0; 0]);

        ground.model("pulled", "", with_image(&image("engine-sim"))).await;
        let seen = |model: &InferenceModel| {
            let status = model.status.as_ref();
            status.is_some_and(|status| status.observed_generation == model.metadata.generation)
        };
        ground.installation.until("pulled", "seen as it is now", seen).await;
        let mended = ground.chat("pulled", true).await;
        assert!(mended.is_whole_stream(), "{mended:?}");
    });
}

fn with_image(image: &str) -> impl FnOnce(&mut Value) {
    let image = image.to_owned();
    move |spec| spec["template"]["spec"]["containers"][0]["image"] = json!(image)
}
