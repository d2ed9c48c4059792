//! Prints the runs of a machine as a table.

use rouse::{
    model::FleetConfig,
    sim::what_if::{MachineActivity, MachineChanges, MachineReport, RecordedRequest},
    units::{Millis, pluralize},
};

use crate::cli::show::{row, table};

/// What is simulated.
pub(super) fn title(requests: &[RecordedRequest], configuration: &FleetConfig) -> String {
    let count = pluralize(requests.len(), "request");
    let lasts = match (requests.first(), requests.last()) {
        (Some(first), Some(last)) => last.at.since(first.at),
        _ => Millis::ZERO,
    };
    let accelerators = pluralize(configuration.accelerators.len(), "accelerator");
    let models = pluralize(configuration.models.len(), "model");
    format!("{count} in {lasts}; {accelerators}, {models}\n")
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

/// A line for each run.
pub(super) fn render(runs: &[(&str, MachineReport)]) -> String {
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
    let lines = runs.iter().map(|(name, report)| {
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

/// Swaps, starts, wakes, and the hours of accelerators: all, awake and idle.
fn activity_cells(activity: Option<MachineActivity>) -> [String; 6] {
    let Some(MachineActivity { swaps, starts, wakes, hours }) = activity else {
        return std::array::from_fn(|_| "-".to_owned());
    };
    let [swaps, starts, wakes] = [swaps, starts, wakes].map(|count| count.to_string());
    let [total, awake, idle] = [hours.total, hours.awake, hours.idle].map(|hours| format!("{hours:.2}"));
    [swaps, starts, wakes, total, awake, idle]
}
