//! `simulate --journal`: what one machine would do with its recorded requests under another configuration.

mod access_log;
mod run_table;

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use clap::Args;
use rouse::{
    error_chain, journal,
    model::{AcceleratorRequirement, FleetConfig, ModelName},
    sim::what_if::{
        AcceleratorCount, MachineChanges, MachineRecord, MachineReport, RecordedRequest, TransitionTimes,
        read_journal_record, simulate_machine,
    },
    units::{Bytes, Millis, pluralize},
};

use self::{access_log::AccessLogRequests, run_table::MachineComparison};

/// Flags that concern a trace alone.
const TRACE_ARGS: [&str; 10] = [
    "trace",
    "svg",
    "min_replicas",
    "max_replicas",
    "profile",
    "kv_threshold",
    "queue_threshold",
    "kv_trigger",
    "queue_trigger",
    "variants",
];

/// Until a model's first sleep was measured.
const ASSUMED_SLEEP: Millis = Millis::secs(2);

#[derive(Args, Debug)]
#[command(next_help_heading = "One machine, instead of a trace")]
pub(super) struct MachineArgs {
    /// Journal of the machine's gateway; may be repeated, the oldest first.
    #[arg(long, value_name = "FILE", conflicts_with_all = TRACE_ARGS)]
    journal: Vec<PathBuf>,
    /// Configuration of the machine's gateway, in place of a journal.
    #[arg(long, value_name = "FILE", requires = "requests", conflicts_with = "journal")]
    #[arg(conflicts_with_all = TRACE_ARGS)]
    config: Option<PathBuf>,
    /// Access log of the gateway; may be repeated. Without it, the journal's own requests are simulated.
    #[arg(long, value_name = "FILE", conflicts_with = "trace")]
    requests: Vec<PathBuf>,
    /// Number of accelerators: absolute, or a change like +2 or -1. Those that are added are copies of the largest.
    #[arg(long, value_name = "N", allow_negative_numbers = true, conflicts_with = "trace")]
    accelerators: Option<AcceleratorCount>,
    /// Change of `turns.maxTurn`.
    #[arg(long, value_name = "DURATION", conflicts_with = "trace")]
    max_turn: Option<Millis>,
    /// Change of a model's memory while it is awake, on each of its accelerators; may be repeated.
    #[arg(long, value_name = "MODEL=SIZE", value_parser = parse_memory, conflicts_with = "trace")]
    memory: Vec<(ModelName, Bytes)>,
    /// Keep this model awake; may be repeated.
    #[arg(long, value_name = "MODEL", conflicts_with = "trace")]
    pin: Vec<String>,
    /// Time to wake a model of which no wake was measured.
    #[arg(long, value_name = "DURATION", default_value = "5s")]
    wake_time: Millis,
}

/// What is simulated, and what its reader must know of it.
struct MachineInput {
    machine: MachineRecord,
    requests: Vec<RecordedRequest>,
    notes: Vec<String>,
}

/// Result of the command.
#[derive(Debug)]
pub(super) struct MachineOutput {
    pub(super) text: String,
    /// For standard error. Empty if they are in the text.
    pub(super) notes: Vec<String>,
}

impl MachineArgs {
    /// Whether a machine is simulated and no trace.
    pub(super) const fn is_given(&self) -> bool {
        !self.journal.is_empty() || self.config.is_some()
    }

    /// Simulates the machine as it was, and with the changes if there are any. The result is a table, or `json`.
    ///
    /// # Errors
    /// Why the input cannot be simulated, for its author.
    pub(super) fn run(&self, start_time: Millis, json: bool) -> Result<MachineOutput, String> {
        let mut input = self.read()?;
        input.leave_out_unknown_models();
        if input.requests.is_empty() {
            return Err("nothing to simulate: no recorded request is for a configured model".to_owned());
        }
        let assumed = TransitionTimes { start: start_time, wake: self.wake_time, sleep: ASSUMED_SLEEP };
        input.note_assumed_times(assumed);
        let MachineInput { machine, requests, mut notes } = input;
        let changes = self.changes();
        let changed = changes.apply(&machine.configuration).map_err(|error| error.to_string())?;
        notes.extend(named_accelerators_note(&changes, &changed));
        let changed = MachineRecord { configuration: changed, ..machine.clone() };

        let simulate = |machine: &MachineRecord| {
            let report = simulate_machine(machine, &requests, assumed);
            report.map_err(|failure| format!("the decisions broke an invariant, please report it: {failure}"))
        };
        let recorded = MachineReport::of_recording(&requests);
        let mut runs = vec![("recorded", recorded), ("simulated", simulate(&machine)?)];
        let mut described = None;
        if !changes.is_empty() {
            runs.push(("changed", simulate(&changed)?));
            described = Some(run_table::describe(&changes, &changed.configuration));
        }
        let comparison = MachineComparison {
            requests: &requests,
            configuration: &machine.configuration,
            changes: described,
            runs,
        };
        if json {
            let text = format!("{}\n", comparison.to_json(&notes));
            return Ok(MachineOutput { text, notes: Vec::new() });
        }
        Ok(MachineOutput { text: comparison.render(), notes })
    }

    fn read(&self) -> Result<MachineInput, String> {
        let mut log = AccessLogRequests::default();
        for file in &self.requests {
            log.read(&read_file(file)?).map_err(|problem| format!("{}: {problem}", file.display()))?;
        }
        log.requests.sort_by_key(|request| request.at);
        let mut input = match &self.config {
            Some(file) => {
                let machine = read_config(file)?;
                MachineInput { machine, requests: log.requests, notes: Vec::new() }
            }
            None => self.read_journal(log.requests)?,
        };
        if log.without_demand > 0 {
            let lines = pluralize(log.without_demand, "line");
            input.notes.push(format!(
                "left out: {lines} of the access log, for requests without a model or refused before they could wait"
            ));
        }
        Ok(input)
    }

    /// Reads the journals. Their own requests count if there is no access log.
    fn read_journal(&self, logged: Vec<RecordedRequest>) -> Result<MachineInput, String> {
        let mut lines = Vec::new();
        for file in &self.journal {
            let read = journal::read(&read_file(file)?);
            let problem = |error: journal::Error| error_chain::one_line(&error);
            lines.extend(read.map_err(|error| format!("{}: {}", file.display(), problem(error)))?);
        }
        let record = read_journal_record(&lines).map_err(|error| error.to_string())?;
        let mut notes = Vec::new();
        if record.configurations > 1 {
            notes.push(format!(
                "the journal has {} configurations: the last one is simulated",
                record.configurations
            ));
        }
        let requests = if self.requests.is_empty() {
            notes.push(format!(
                "a journal has only requests that waited: {} that went to an awake engine at once are estimated \
                 from samples, and others are missing; pass the access log with --requests",
                record.estimated
            ));
            record.requests
        } else {
            let priority = |request: &RecordedRequest| record.key_priorities.get(&request.key).copied();
            let with_priority = |request: RecordedRequest| RecordedRequest {
                key_priority: priority(&request).unwrap_or_default(),
                ..request
            };
            logged.into_iter().map(with_priority).collect()
        };
        Ok(MachineInput { machine: record.machine, requests, notes })
    }

    fn changes(&self) -> MachineChanges {
        MachineChanges {
            accelerators: self.accelerators,
            max_turn: self.max_turn,
            memory: self.memory.clone(),
            pinned: self.pin.iter().map(|model| ModelName::from(model.as_str())).collect(),
        }
    }
}

impl MachineInput {
    fn leave_out_unknown_models(&mut self) {
        let known: BTreeSet<&ModelName> =
            self.machine.configuration.models.iter().map(|spec| &spec.name).collect();
        let mut unknown: BTreeMap<ModelName, usize> = BTreeMap::new();
        self.requests.retain(|request| {
            let is_known = known.contains(&request.model);
            if !is_known {
                *unknown.entry(request.model.clone()).or_default() += 1;
            }
            is_known
        });
        if !unknown.is_empty() {
            let count = pluralize(unknown.values().sum::<usize>(), "request");
            let models: Vec<_> = unknown.iter().map(|(model, count)| format!("{model} ({count})")).collect();
            let models = models.join(", ");
            self.notes.push(format!("left out: {count} for models that are not configured: {models}"));
        }
    }

    /// Names the requested models whose times were not measured.
    fn note_assumed_times(&mut self, assumed: TransitionTimes) {
        let requested: BTreeSet<&ModelName> = self.requests.iter().map(|request| &request.model).collect();
        let specs = self.machine.configuration.models.iter().filter(|spec| requested.contains(&spec.name));
        let (mut starts, mut wakes) = (Vec::new(), Vec::new());
        for spec in specs {
            let measured = self.machine.measured.get(&spec.name).copied().unwrap_or_default();
            if measured.start.is_none() && !spec.accelerators.is_none() {
                starts.push(spec.name.as_str());
            }
            if measured.wake.is_none() && spec.can_sleep {
                wakes.push(spec.name.as_str());
            }
        }
        for (step, flag, models, time) in
            [("start", "--start-time", starts, assumed.start), ("wake", "--wake-time", wakes, assumed.wake)]
        {
            if !models.is_empty() {
                let models = models.join(", ");
                self.notes.push(format!("no {step} of {models} was measured: {time} is assumed ({flag})"));
            }
        }
    }
}

/// Added accelerators are of no use to models that name theirs.
fn named_accelerators_note(changes: &MachineChanges, changed: &FleetConfig) -> Option<String> {
    changes.accelerators?;
    let models = changed.models.iter();
    let named = models.filter(|spec| matches!(spec.accelerators, AcceleratorRequirement::Ids(_)));
    let named: Vec<&str> = named.map(|spec| spec.name.as_str()).collect();
    let models = named.join(", ");
    (!named.is_empty()).then(|| format!("models that name their accelerators use no others: {models}"))
}

fn read_file(file: &Path) -> Result<String, String> {
    std::fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))
}

fn read_config(file: &Path) -> Result<MachineRecord, String> {
    let config = rouse_config::load(file).map_err(|errors| errors.to_string())?;
    let problem = if config.kubernetes.is_some() {
        "the configuration is a cluster's, and only one machine can be simulated"
    } else if config.accelerators_auto {
        "the accelerators are detected at the start: pass the gateway's --journal, or list them in the file"
    } else {
        return Ok(MachineRecord { configuration: config.core, measured: BTreeMap::new(), stop_time: None });
    };
    Err(format!("{}: {problem}", file.display()))
}

/// Parses `MODEL=SIZE`.
fn parse_memory(text: &str) -> Result<(ModelName, Bytes), String> {
    let (model, size) = text.rsplit_once('=').ok_or("write MODEL=SIZE, like qwen3-8b=40GiB")?;
    let bytes = size.parse::<Bytes>().map_err(|error| error.to_string())?;
    if model.is_empty() || bytes == Bytes::ZERO {
        return Err("write a model's name and a size above 0, like qwen3-8b=40GiB".to_owned());
    }
    Ok((model.into(), bytes))
}

#[cfg(test)]
mod tests;
