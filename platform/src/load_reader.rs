//! Reads the load of an engine that serves, between two health probes.
//!
//! Probes are too rare for the load balancer: an engine's queue grows and empties within a second. An engine behind a
//! stub needs no reader, because its stub reports the load in the responses themselves (`rouse_net::engine_load`).
//!
//! A reading is one request to the engine and costs both sides a millisecond at most. So it happens at a fixed pace,
//! whatever the number of requests, and only while this gateway has requests at the engine.

use std::{future::pending, time::Duration};

use rouse_net::engine_load::EngineLoad;
use tokio::time;

use crate::{EngineActivity, engine_client::EngineClient};

/// Pause between two readings.
const READ_INTERVAL: Duration = Duration::from_secs(2);

/// Reads the engine's load while it serves this gateway's requests. Runs until dropped.
pub(crate) async fn run(contact: &EngineClient, activity: &EngineActivity) {
    if contact.model.stub {
        return pending().await;
    }
    let mut pace = ReadPace::default();
    loop {
        time::sleep(READ_INTERVAL).await;
        if pace.is_due(activity.has_requests()) {
            let load = contact.adapter.load(contact.health_timeout()).await;
            store(contact, activity, load);
        }
    }
}

/// Stores a reading. `None`: the engine reported no load.
pub(crate) fn store(contact: &EngineClient, activity: &EngineActivity, load: Option<EngineLoad>) {
    match load {
        Some(load) => activity.record_load(&load, contact.common.clock.now()),
        None => activity.clear_load(),
    }
}

/// Decides at each interval whether to read.
#[derive(Debug, Default)]
struct ReadPace {
    was_serving: bool,
}

impl ReadPace {
    /// True while the engine serves, and once afterwards: otherwise its last reading would show a load that is gone.
    const fn is_due(&mut self, serves: bool) -> bool {
        let due = serves || self.was_serving;
        self.was_serving = serves;
        due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Readings of a whole minute in which the engine serves in these intervals.
    fn readings(serves: impl Fn(u32) -> bool) -> usize {
        let mut pace = ReadPace::default();
        let intervals = 60 / u32::try_from(READ_INTERVAL.as_secs()).unwrap();
        (0..intervals).filter(|interval| pace.is_due(serves(*interval))).count()
    }

    #[test]
    fn an_engine_is_read_twice_in_four_seconds_at_most_and_never_while_it_is_idle() {
        assert_eq!(readings(|_| true), 30);
        assert_eq!(readings(|_| false), 0);
        assert_eq!(readings(|interval| interval == 3), 2, "the second one shows that it is idle");
        assert_eq!(readings(|interval| interval % 2 == 0), 30);
    }
}
