//! What one machine would do with its recorded requests under another configuration.
//!
//! ```text
//!   journal ─▶ MachineRecord ─▶ MachineChanges ─┐
//!   access log or journal ─▶ RecordedRequest ───┴─▶ SimulatedWorld ─▶ MachineReport
//! ```
//!
//! The real [`crate::fleet::Fleet`] decides in a [`SimulatedWorld`](super::SimulatedWorld) without faults. Its engines
//! take as long to start, wake and fall asleep as the journal's did, and each request keeps its engine for as long as
//! in the recording. So two runs differ only by what the decisions make of the configuration. The run without changes
//! shows how close the simulation is to the recording.

mod accelerator_use;
mod changes;
mod journal_record;
mod lease_samples;
mod machine_run;
mod transition_timer;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

pub use self::{
    accelerator_use::AcceleratorHours,
    changes::{AcceleratorCount, Error, MachineChanges},
    journal_record::{Error as JournalRecordError, JournalRecord, read_journal_record},
    machine_run::simulate_machine,
};
use crate::{
    fleet::event::LearnedMeasurements,
    model::{FleetConfig, ModelName, ModelSpec},
    units::{Millis, Tick},
};

/// A machine as it was recorded.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineRecord {
    pub configuration: FleetConfig,
    /// Measured times to start, wake and fall asleep, by model.
    pub measured: BTreeMap<ModelName, LearnedMeasurements>,
    /// The usual time from the order to stop an engine until it is gone.
    pub stop_time: Option<Millis>,
}

/// A request as a gateway recorded it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordedRequest {
    pub at: Tick,
    pub model: ModelName,
    /// Name of the API key; empty without keys.
    pub key: String,
    /// Priority of the key.
    pub key_priority: i32,
    /// The client, as in [`crate::fleet::event::Waiter::client`].
    pub client: u64,
    /// Cost of the whole answer, in weighted tokens.
    pub tokens: u64,
    /// How long the request waited for an engine.
    pub wait: Millis,
    pub end: RecordedEnd,
}

/// How a recorded request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedEnd {
    /// An engine had the request for this long.
    Served(Millis),
    /// The gateway refused it after its wait.
    Refused,
    /// The client disconnected while the request waited.
    Left,
}

/// Times of an engine's transitions, from the order until the engine reports that it serves or sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransitionTimes {
    pub start: Millis,
    pub wake: Millis,
    pub sleep: Millis,
}

/// Result of a recording or of a simulated run.
#[derive(Clone, Debug, PartialEq)]
pub struct MachineReport {
    pub requests: usize,
    pub refused: u64,
    /// Clients that disconnected while their request waited.
    pub left: u64,
    /// Mean wait of the requests that an engine served, in seconds.
    pub wait_mean: f64,
    /// 99 of 100 served requests waited at most this long.
    pub wait_p99: Millis,
    /// `None` for a recording, which does not have it.
    pub activity: Option<MachineActivity>,
}

/// What the engines of a simulated run did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MachineActivity {
    /// Models put to sleep or stopped so that another could be awake, as `rouse_swaps_total` counts them.
    pub swaps: u64,
    pub starts: u64,
    pub wakes: u64,
    /// From the first request's arrival until the last one's.
    pub hours: AcceleratorHours,
}

/// An engine on no accelerator runs elsewhere: its start is a check whether it answers.
const EXTERNAL_START: Millis = Millis::secs(1);

impl MachineRecord {
    /// Times of the model's engines: measured, or `assumed` within the model's deadlines.
    fn transition_times(&self, spec: &ModelSpec, assumed: TransitionTimes) -> TransitionTimes {
        let measured = self.measured.get(&spec.name).copied().unwrap_or_default();
        let timeouts = self.configuration.settings.timeouts;
        let start = if spec.accelerators.is_none() { EXTERNAL_START } else { assumed.start };
        // An engine that misses its deadline would never serve.
        let within = |time: Millis, deadline: Millis| Millis(time.0.min(deadline.0 / 2));
        TransitionTimes {
            start: measured.start.unwrap_or_else(|| within(start, spec.start_timeout)),
            wake: measured.wake.unwrap_or_else(|| within(assumed.wake, timeouts.wake)),
            sleep: measured.sleep.unwrap_or_else(|| within(assumed.sleep, timeouts.sleep)),
        }
    }
}

impl MachineReport {
    /// What the gateway recorded.
    #[must_use]
    pub fn of_recording(requests: &[RecordedRequest]) -> Self {
        let count = |end: RecordedEnd| requests.iter().filter(|request| request.end == end).count() as u64;
        let served = requests.iter().filter(|request| matches!(request.end, RecordedEnd::Served(_)));
        Self {
            requests: requests.len(),
            refused: count(RecordedEnd::Refused),
            left: count(RecordedEnd::Left),
            activity: None,
            ..Self::with_waits(served.map(|request| request.wait).collect())
        }
    }

    fn with_waits(mut waits: Vec<Millis>) -> Self {
        waits.sort_unstable();
        let sum: u64 = waits.iter().map(|wait| wait.0).sum();
        Self {
            requests: waits.len(),
            refused: 0,
            left: 0,
            wait_mean: sum as f64 / 1000.0 / waits.len().max(1) as f64,
            wait_p99: waits.get(waits.len() * 99 / 100).copied().unwrap_or_default(),
            activity: None,
        }
    }
}

/// The median; the upper one of an even number.
fn median(mut values: Vec<Millis>) -> Option<Millis> {
    values.sort_unstable();
    values.get(values.len() / 2).copied()
}
