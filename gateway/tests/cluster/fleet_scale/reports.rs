//! The Events of a start. The leader writes them at a limited rate, for minutes after thousands of engines serve: until
//! then, neither its writes nor its CPU time are those of a steady fleet.

use futures_util::StreamExt as _;
use k8s_openapi::api::core::v1::Event;
use kube::{
    Api,
    runtime::{WatchStreamExt as _, watcher},
};
use tokio::time::{Instant, timeout};

use super::fleet::FleetInstallation;

/// Returns once no Event has been written for as long as the fleet's size asks for.
pub(super) async fn until_reported(fleet: &FleetInstallation<'_>) {
    let begun = Instant::now();
    let (mut last, mut last_write) = (String::new(), begun);
    let reported = async {
        let api: Api<Event> = fleet.world.site.namespace.api();
        let events = watcher(api, watcher::Config::default()).default_backoff();
        let mut events = events.applied_objects().boxed();
        while let Ok(next) = timeout(fleet.size.without_events, events.next()).await {
            last_write = Instant::now();
            // An error is one of the connection, from which the watcher recovers.
            if let Ok(event) = next.expect("a watch does not end") {
                last = describe(&event);
            }
        }
    };
    let in_time = timeout(fleet.size.start_timeout, Box::pin(reported)).await.is_ok();
    assert!(in_time, "Events are still written {:.1?} after all engines served: {last}", begun.elapsed());
    println!("the start was reported after {:.1?} more", last_write - begun);
}

fn describe(event: &Event) -> String {
    let [reason, object, note] = [&event.reason, &event.involved_object.name, &event.message]
        .map(|text| text.as_deref().unwrap_or_default());
    format!("{reason} of {object}: {note}")
}
