//! What a journal has of its machine: configuration, measured times, and requests.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{MachineRecord, RecordedRequest, lease_samples::LeaseSamples, transition_timer::TransitionTimer};
use crate::{
    fleet::{
        Fleet, Plan,
        event::{Event, LearnedMeasurements, Planner},
    },
    journal::{self, JournalLine},
    model::{Accelerator, AcceleratorId, FleetConfig, FleetSettings, ModelName},
    units::{Bytes, Tick},
};

/// Result of reading a journal.
#[derive(Clone, Debug, PartialEq)]
pub struct JournalRecord {
    pub machine: MachineRecord,
    /// The journal's requests in the order of their arrival. Most of those that did not wait are missing.
    pub requests: Vec<RecordedRequest>,
    /// The part of `requests` that did not wait, estimated from samples of the gates.
    pub estimated: usize,
    /// Priorities of the API keys that the journal names.
    pub key_priorities: BTreeMap<String, i32>,
    /// Number of different configurations in the journal; the record has the last one.
    pub configurations: usize,
}

/// Why a journal does not describe one machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("the journal has no configuration: the gateway ended before its first turn")]
    NoConfiguration,
    #[error("the journal is a cluster's, whose pools of accelerators cannot be simulated as one machine")]
    Cluster,
}

/// The part of a planner that has the configuration, in the form of the journal: the planner's fields are private.
#[derive(Deserialize)]
struct SnapshotState {
    settings: FleetSettings,
    ledger: SnapshotLedger,
}

#[derive(Deserialize)]
struct SnapshotLedger {
    accelerators: BTreeMap<AcceleratorId, SnapshotAccelerator>,
}

#[derive(Deserialize)]
struct SnapshotAccelerator {
    capacity: Bytes,
    metered: bool,
    /// Absent for an accelerator that the configuration lists.
    configured: Option<bool>,
    units: Option<u32>,
}

#[derive(Default)]
struct RecordCollector {
    configuration: Option<FleetConfig>,
    configurations: usize,
    measured: BTreeMap<ModelName, LearnedMeasurements>,
    timer: TransitionTimer,
    samples: LeaseSamples,
}

/// Replays a journal and collects what a simulation of its machine needs.
///
/// # Errors
/// If the journal has no configuration, or that of a cluster.
pub fn read_journal_record(lines: &[JournalLine]) -> Result<JournalRecord, Error> {
    let mut collector = RecordCollector::default();
    for segment in lines.chunk_by(|_, next| !matches!(next, JournalLine::Header { .. })) {
        collector.timer.interrupt();
        collector.samples.interrupt();
        let last = segment.last().map_or(Tick(0), JournalLine::at);
        journal::replay(segment, |at, events, plan, fleet| {
            collector.observe_turn(at, events, plan, fleet);
            if at == last {
                collector.measured.extend(fleet.learned());
            }
        });
    }
    collector.finish()
}

impl RecordCollector {
    fn observe_turn(&mut self, at: Tick, events: &[Event], plan: &Plan, fleet: &Fleet) {
        for event in events {
            match event {
                Event::Configured { configuration } => self.configure((**configuration).clone()),
                Event::StateRestored { state } if self.configuration.is_none() => {
                    if let Some(configuration) = restored_configuration(state, fleet) {
                        self.configure(configuration);
                    }
                }
                _ => {}
            }
            self.timer.observe_event(event, at);
            self.samples.observe_event(event, at, fleet);
        }
        for command in &plan.commands {
            self.timer.observe_command(command, at);
            self.samples.observe_command(command, at);
        }
    }

    fn configure(&mut self, configuration: FleetConfig) {
        if self.configuration.as_ref() != Some(&configuration) {
            self.configurations += 1;
            self.configuration = Some(configuration);
        }
    }

    fn finish(mut self) -> Result<JournalRecord, Error> {
        let mut configuration = self.configuration.ok_or(Error::NoConfiguration)?;
        if configuration.accelerators.iter().any(|accelerator| accelerator.units.is_some()) {
            return Err(Error::Cluster);
        }
        raise_memory(&mut configuration, &self.measured);
        self.timer.write_medians(&mut self.measured);
        let mut requests = self.samples.requests;
        requests.sort_by_key(|request| request.at);
        Ok(JournalRecord {
            machine: MachineRecord {
                configuration,
                measured: self.measured,
                stop_time: self.timer.stop_time(),
            },
            requests,
            estimated: self.samples.estimated,
            key_priorities: self.samples.key_priorities,
            configurations: self.configurations,
        })
    }
}

/// The configuration in a snapshot, with which a rotated journal begins.
fn restored_configuration(state: &Planner, fleet: &Fleet) -> Option<FleetConfig> {
    let state: SnapshotState = serde_json::from_value(serde_json::to_value(state).ok()?).ok()?;
    let accounts = state.ledger.accelerators.into_iter();
    let configured = accounts.filter(|(_, account)| account.configured != Some(false));
    let accelerators = configured.map(|(id, account)| Accelerator {
        metered: account.metered,
        units: account.units,
        ..Accelerator::new(id, account.capacity)
    });
    Some(FleetConfig {
        settings: state.settings,
        accelerators: accelerators.collect(),
        models: fleet.specs().cloned().collect(),
    })
}

/// Raises each model's declared memory to what its engines used, as the decisions do.
fn raise_memory(configuration: &mut FleetConfig, measured: &BTreeMap<ModelName, LearnedMeasurements>) {
    let largest = configuration.accelerators.iter().map(|accelerator| accelerator.capacity).max();
    for spec in &mut configuration.models {
        let Some(learned) = measured.get(&spec.name) else { continue };
        let memory = &mut spec.memory;
        // A peak beyond every accelerator is a misreading.
        if let Some(peak) = learned.peak.filter(|peak| Some(*peak) <= largest) {
            memory.awake = memory.awake.max(peak);
        }
        memory.asleep = memory.asleep.max(learned.residue.unwrap_or_default()).min(memory.awake);
    }
}
