//! The results of a comparison: every raw measurement, and the figures derived from them.
//!
//! Results are published, so they contain no names of machines, people or folders.

use std::{collections::BTreeMap, fmt, fs, path::Path};

use anyhow::Context as _;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::{cases::BenchCase, peers::ComparedProxy};

pub(crate) mod goals;
pub(crate) mod plot;
pub(crate) mod table;

/// The results of one run.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct CompareResults {
    pub(crate) rounds: u32,
    /// Approximate length of one measurement.
    pub(crate) seconds: f64,
    pub(crate) machine: MachineInfo,
    /// Versions of all programs.
    pub(crate) versions: BTreeMap<String, String>,
    /// Size of the stripped gateway in bytes.
    pub(crate) binary: Option<u64>,
    pub(crate) cells: Vec<ResultCell>,
}

/// The machine that the figures depend on.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct MachineInfo {
    pub(crate) kernel: String,
    pub(crate) processor: String,
    pub(crate) processors: usize,
    pub(crate) memory_gib: u64,
}

impl fmt::Display for MachineInfo {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kernel, processor, processors, memory_gib } = self;
        write!(out, "{processor}, {processors} processors, {memory_gib} GiB, Linux {kernel}")
    }
}

/// One measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct ResultCell {
    pub(crate) case: BenchCase,
    pub(crate) target: ComparedProxy,
    pub(crate) workers: usize,
    pub(crate) round: u32,
    /// Shared by measurements that are neighbours in time.
    pub(crate) group: u32,
    /// Other work disturbed the machine and the group was repeated; this cell does not count.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) discarded: bool,
    /// Cores used by anything but load, engine and proxy, over the whole machine.
    pub(crate) other_work: f64,
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) disturbed: bool,
    pub(crate) units: u64,
    pub(crate) errors: u64,
    pub(crate) corrupted: u64,
    /// The first error, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) first_error: Option<String>,
    pub(crate) wall_s: f64,
    /// CPU time of the proxy's processes.
    pub(crate) cpu_s: f64,
    /// For requests until the complete response, for streams until the first event.
    pub(crate) latency_us: LatencyQuantiles,
    pub(crate) lag_us: LatencyQuantiles,
    pub(crate) listening_ms: f64,
    /// Proportional set size of the proxy's processes: after the start, when warm, and while all streams were open.
    pub(crate) idle_bytes: u64,
    pub(crate) warm_bytes: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) open_bytes: Option<u64>,
    /// Streams open at that time.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(crate) streams: usize,
}

/// A latency distribution.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LatencyQuantiles {
    pub(crate) count: u64,
    pub(crate) p10: u64,
    pub(crate) p50: u64,
    pub(crate) p90: u64,
    pub(crate) p95: u64,
    pub(crate) p99: u64,
    pub(crate) p999: u64,
    pub(crate) max: u64,
}

impl From<&Histogram<u64>> for LatencyQuantiles {
    fn from(of: &Histogram<u64>) -> Self {
        let at = |share| if of.is_empty() { 0 } else { of.value_at_quantile(share) };
        Self {
            count: of.len(),
            p10: at(0.1),
            p50: at(0.5),
            p90: at(0.9),
            p95: at(0.95),
            p99: at(0.99),
            p999: at(0.999),
            max: of.max(),
        }
    }
}

impl LatencyQuantiles {
    /// Returns fractions and their quantiles.
    pub(crate) const fn points(&self) -> [(f64, u64); 6] {
        [
            (0.1, self.p10),
            (0.5, self.p50),
            (0.9, self.p90),
            (0.95, self.p95),
            (0.99, self.p99),
            (0.999, self.p999),
        ]
    }
}

impl ResultCell {
    /// The proxy's CPU time per request or event, in microseconds.
    pub(crate) fn cpu_per_unit(&self) -> Option<f64> {
        (self.units > 0 && self.cpu_s > 0.0).then(|| self.cpu_s * 1e6 / self.units as f64)
    }

    pub(crate) fn per_second(&self) -> Option<f64> {
        (self.wall_s > 0.0).then(|| self.units as f64 / self.wall_s)
    }

    /// Memory per open stream, in bytes.
    pub(crate) fn per_stream(&self) -> Option<f64> {
        let open = self.open_bytes?;
        (self.streams > 0).then(|| open.saturating_sub(self.warm_bytes) as f64 / self.streams as f64)
    }

    /// Whether the cell is usable: it has units and no errors.
    pub(crate) fn is_valid(&self) -> bool {
        !self.discarded
            && self.errors == 0
            && self.corrupted == 0
            && (self.units > 0 || self.case == BenchCase::Start)
    }
}

impl CompareResults {
    /// The cells of one case and target with one worker, in the order of rounds.
    pub(crate) fn cells_of(
        &self,
        case: BenchCase,
        target: ComparedProxy,
    ) -> impl Iterator<Item = &ResultCell> {
        self.cells_with_workers(case, target, 1)
    }

    pub(crate) fn cells_with_workers(
        &self,
        case: BenchCase,
        target: ComparedProxy,
        workers: usize,
    ) -> impl Iterator<Item = &ResultCell> {
        self.cells.iter().filter(move |cell| {
            cell.case == case && cell.target == target && cell.workers == workers && cell.is_valid()
        })
    }

    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        serde_json::from_slice(&text).context("the file holds no results of a comparison")
    }

    /// Writes results, table and plots into `folder`.
    pub(crate) fn write(&self, folder: &Path) -> anyhow::Result<()> {
        fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
        let text = serde_json::to_string_pretty(self)? + "\n";
        fs::write(folder.join("results.json"), text).context("cannot write results.json")?;
        fs::write(folder.join("table.md"), table::markdown(self)).context("cannot write table.md")?;
        plot::all(self, folder)
    }
}

/// Redacts each absolute path in a text to its file name.
pub(crate) fn redact_folders(text: &str) -> String {
    let of_path = |c: char| c.is_alphanumeric() || "/._-+@~".contains(c);
    let (mut plain, mut rest) = (String::with_capacity(text.len()), text);
    while let Some(at) = rest.find('/') {
        let (before, path) = rest.split_at(at);
        plain.push_str(before);
        let (path, after) = path.split_at(path.find(|c| !of_path(c)).unwrap_or(path.len()));
        // Not part of an address, a fraction or a relative path.
        let absolute = !path.starts_with("//") && !before.ends_with(of_path);
        let name = path.trim_end_matches('/').rsplit('/').next().filter(|_| absolute);
        plain.push_str(name.unwrap_or(path));
        rest = after;
    }
    plain + rest
}

fn is_false(value: &bool) -> bool {
    !value
}

fn is_zero(value: &usize) -> bool {
    *value == 0
}

#[cfg(test)]
mod tests;
