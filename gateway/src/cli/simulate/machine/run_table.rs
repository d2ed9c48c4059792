//! Prints the runs of a machine, as a table or as JSON.

use rouse::{
    model::FleetConfig,
    sim::what_if::{MachineActivity, MachineChanges, MachineReport, RecordedRequest},
    units::{Millis, pluralize},
};
use serde_json::{Value, json};

use crate::cli::{
    show::{row, table},
    simulate::rounded_millis,
};

/// What is simulated, and each run of it.
pub(super) struct MachineComparison<'a> {
    /// In the order of their arrival.
    pub(super) requests: &'a [RecordedRequest],
    pub(super) configuration: &'a FleetConfig,
    /// The changes in words; `None` without any.
    pub(super) changes: Option<String>,
    /// By their names.
    pub(super) runs: Vec<(&'static str, MachineReport)>,
}

/// The changes, as the changed configuration has them.
pub(super) fn describe(changes: &MachineChanges, changed: &FleetConfig) -> String {
    let mut parts = Vec::new();
    if changes.accelerators.is_some() {
        parts.push(pluralize(changed.accelerators.len(), "accelerator"));
    }
    parts.extend(changes.max_turn.map(|max_turn| format!("maxTurn {max_turn}")));
    parts.extend(changes.memory.iter().map(|(model, bytes)| format!("{model} with {bytes}")));
    parts.extend(changes.pinned.iter().map(|model| format!("{model} pinned")));
    parts.join(", ")
}

impl MachineComparison<'_> {
    /// What is simulated, and a line for each run.
    pub(super) fn render(&self) -> String {
        let changes = self.changes.as_ref().map(|changes| format!("changed: {changes}\n"));
        format!("{}{}\n{}", self.title(), changes.unwrap_or_default(), self.run_lines())
    }

    /// The content of [`Self::render`] and the notes, with durations in milliseconds.
    pub(super) fn to_json(&self, notes: &[String]) -> Value {
        json!({
            "requests": self.requests.len(),
            "lasts": self.duration(),
            "accelerators": self.configuration.accelerators.len(),
            "models": self.configuration.models.len(),
            "changed": self.changes,
            "runs": self.runs.iter().map(|(name, report)| run_json(name, report)).collect::<Vec<_>>(),
            "notes": notes,
        })
    }

    fn title(&self) -> String {
        let (count, lasts) = (pluralize(self.requests.len(), "request"), self.duration());
        let accelerators = pluralize(self.configuration.accelerators.len(), "accelerator");
        let models = pluralize(self.configuration.models.len(), "model");
        format!("{count} in {lasts}; {accelerators}, {models}\n")
    }

    /// Time from the first request's arrival to the last one's.
    fn duration(&self) -> Millis {
        match (self.requests.first(), self.requests.last()) {
            (Some(first), Some(last)) => last.at.since(first.at),
            _ => Millis::ZERO,
        }
    }

    fn run_lines(&self) -> String {
        let head = [
            "RUN",
            "REQUESTS",
            "REFUSED",
            "LEFT",
            "WAIT MEAN",
            "WAIT P99",
            "SWAPS",
            "STARTS",
            "WAKES",
            "GPU-HOURS",
            "AWAKE",
            "IDLE",
        ];
        let lines = self.runs.iter().map(|(name, report)| {
            let [swaps, starts, wakes, total, awake, idle] = activity_cells(report.activity);
            row([
                name,
                &report.requests.to_string(),
                &report.refused.to_string(),
                &report.left.to_string(),
                &format!("{:.2}s", report.wait_mean),
                &format!("{:.1}s", report.wait_p99.0 as f64 / 1000.0),
                &swaps,
                &starts,
                &wakes,
                &total,
                &awake,
                &idle,
            ])
        });
        let rows: Vec<_> = std::iter::once(row(head)).chain(lines).collect();
        table(&rows, false)
    }
}

/// Swaps, starts, wakes, and the hours of accelerators: all, awake and idle.
fn activity_cells(activity: Option<MachineActivity>) -> [String; 6] {
    let Some(MachineActivity { swaps, starts, wakes, hours }) = activity else {
        return std::array::from_fn(|_| "-".to_owned());
    };
    let [swaps, starts, wakes] = [swaps, starts, wakes].map(|count| count.to_string());
    let [total, awake, idle] = [hours.total, hours.awake, hours.idle].map(|hours| format!("{hours:.2}"));
    [swaps, starts, wakes, total, awake, idle]
}

/// One run. What a recording does not have is null.
fn run_json(name: &str, report: &MachineReport) -> Value {
    let activity = report.activity;
    json!({
        "run": name,
        "requests": report.requests,
        "refused": report.refused,
        "left": report.left,
        "waitMean": rounded_millis(report.wait_mean),
        "waitP99": report.wait_p99,
        "swaps": activity.map(|activity| activity.swaps),
        "starts": activity.map(|activity| activity.starts),
        "wakes": activity.map(|activity| activity.wakes),
        "gpuHours": activity.map(|activity| activity.hours.total),
        "awakeHours": activity.map(|activity| activity.hours.awake),
        "idleHours": activity.map(|activity| activity.hours.idle),
    })
}
