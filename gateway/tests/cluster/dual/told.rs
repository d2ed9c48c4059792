//! What whoever describes a requester or a provider finds in its Events.

use k8s_openapi::api::core::v1::Event;
use rouse::units::Millis;

use super::Duo;
use crate::events;

fn note(event: &Event) -> &str {
    event.message.as_deref().unwrap()
}

/// Longer than a requester waits before it is told why.
const SLOW: &str = "--start-time 12s";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pair_is_told_why_it_waits_and_what_became_of_it() {
    // Not enough for the one sleeper that there will be.
    let duo = Duo::new("dual-told", 1, "512Mi", "").await;
    duo.ask("slow", 1, 1, SLOW).await;
    let made = |requesters: &[_], providers: &[_]| requesters.len() == 1 && providers.len() == 1;
    let (requesters, providers) = duo.until("slow", "a provider", made).await;
    let told = |reason| events::told(&duo.world, &requesters[0], reason);
    assert_eq!(note(&told("Waiting").await), "its engine is starting");
    let served = told("Served").await;
    let took = note(&served).strip_prefix("its engine was started in a new Pod, and serves it after ");
    let took: Millis = took.unwrap_or_else(|| panic!("{served:?}")).parse().unwrap();
    assert!(took >= Millis::secs(12), "{served:?}");
    assert_eq!(served.type_.as_deref(), Some("Normal"));

    duo.scale("slow", 0).await;
    let sleeper = duo.asleep("slow").await;
    assert_eq!(sleeper.metadata.uid, providers[0].metadata.uid);
    let slept = events::told(&duo.world, &sleeper, "Slept").await;
    assert!(note(&slept).ends_with(" sleeps at level 1"), "{slept:?}");

    duo.ask("next", 1, 1, "").await;
    let ended = events::told(&duo.world, &sleeper, "Ended").await;
    assert!(note(&ended).ends_with(" is ended: room is needed"), "{ended:?}");
    let (requester, provider) = duo.served("next").await;
    duo.delete(&provider).await;
    let deleted = events::told(&duo.world, &requester, "Deleted").await;
    let why = "it is deleted, so that another one is made: its provider is being deleted";
    assert_eq!(note(&deleted), why);
}
