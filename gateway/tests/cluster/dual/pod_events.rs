//! What a description of a requester or a provider shows in its Events.

use k8s_openapi::api::core::v1::{Event, Pod};
use kube::api::{Patch, PatchParams};
use rouse::units::Millis;
use serde_json::json;

use super::DualPodsFixture;
use crate::{
    events,
    pairs::{annotation, is_served},
};

fn note(event: &Event) -> &str {
    event.message.as_deref().unwrap()
}

/// Longer than a requester waits before its Event names the reason.
const SLOW: &str = "--start-time 12s";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn events_of_a_pair_say_why_it_waits_and_how_that_ended() {
    // Too little for the only sleeper.
    let duo = DualPodsFixture::new("dual-told", 1, "512Mi", "").await;
    duo.ask("slow", 1, 1, SLOW).await;
    let made = |requesters: &[_], providers: &[_]| requesters.len() == 1 && providers.len() == 1;
    let (requesters, providers) = duo.until("slow", "a provider", made).await;
    let told = |reason| events::until_event(&duo.world, &requesters[0], reason);
    assert_eq!(note(&told("Waiting").await), "the engine is starting");
    let served = told("Served").await;
    let took = note(&served).strip_prefix("the engine was started in a new Pod and serves after ");
    let took: Millis = took.unwrap_or_else(|| panic!("{served:?}")).parse().unwrap();
    assert!(took >= Millis::secs(12), "{served:?}");
    assert_eq!(served.type_.as_deref(), Some("Normal"));

    duo.scale("slow", 0).await;
    let sleeper = duo.until_asleep("slow").await;
    assert_eq!(sleeper.metadata.uid, providers[0].metadata.uid);
    let slept = events::until_event(&duo.world, &sleeper, "Slept").await;
    assert!(note(&slept).ends_with(" sleeps at level 1"), "{slept:?}");

    duo.ask("next", 1, 1, "").await;
    let ended = events::until_event(&duo.world, &sleeper, "Ended").await;
    assert!(note(&ended).ends_with(" was stopped: the engine's memory is needed"), "{ended:?}");
    let (requester, provider) = duo.until_served("next").await;
    duo.delete(&provider).await;
    let deleted = events::until_event(&duo.world, &requester, "Deleted").await;
    let why = "the requester was deleted, so that its owner creates another: the provider is being deleted";
    assert_eq!(note(&deleted), why);
}

impl DualPodsFixture {
    /// Sets the grace of the next requester with this name, in seconds.
    async fn grace(&self, name: &str, seconds: u32) {
        let spec = json!({"terminationGracePeriodSeconds": seconds});
        let patch = Patch::Merge(json!({"spec": {"template": {"spec": spec}}}));
        self.sets().patch(name, &PatchParams::default(), &patch).await.unwrap();
    }
}

/// 30 s to drain, 10 s to sleep plus 1 s for each of 40 GiB, and 10 s more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_requester_is_warned_of_a_grace_that_is_too_short_for_a_drain_and_a_sleep() {
    let duo = DualPodsFixture::new("dual-grace", 1, "8Gi", "").await;
    duo.ask("one", 0, 1, "").await;
    duo.grace("one", 89).await;
    duo.scale("one", 1).await;
    let (requester, _) = duo.until_served("one").await;
    let warned = events::until_event(&duo.world, &requester, "ShortGrace").await;
    assert_eq!(warned.type_.as_deref(), Some("Warning"));
    let text = note(&warned);
    assert!(text.starts_with("terminationGracePeriodSeconds is 89: "), "{text}");
    assert!(text.ends_with("; set it to at least 90"), "{text}");
    let status = json!({"Errors": null, "Warnings": [text]}).to_string();
    let says = |requesters: &[Pod], providers: &[Pod]| {
        is_served(requesters, providers) && annotation(&requesters[0], "status") == Some(&*status)
    };
    duo.until("one", "a warning in its status", says).await;

    duo.scale("one", 0).await;
    duo.until_asleep("one").await;
    duo.grace("one", 90).await;
    duo.scale("one", 1).await;
    let (requester, _) = duo.until_served("one").await;
    assert_eq!(annotation(&requester, "status"), None);
}
