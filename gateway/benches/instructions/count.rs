//! Runs cases under callgrind and compares two runs.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};

use crate::script::Case;

/// Number of listed functions.
const LISTED: usize = 60;

/// Returns the instructions per unit.
pub(crate) fn per_unit(case: &Case) -> anyhow::Result<f64> {
    let folder = ScratchDir::new()?;
    let (short, long) =
        (collected(case, case.units, &folder.0)?, collected(case, 2 * case.units, &folder.0)?);
    Ok((long as f64 - short as f64) / case.units as f64)
}

/// Prints the instructions per unit that each function itself executes.
pub(crate) fn annotate(case: &Case) -> anyhow::Result<()> {
    let folder = ScratchDir::new()?;
    let mut tables = Vec::new();
    for units in [case.units, 2 * case.units] {
        collected(case, units, &folder.0)?;
        tables.push(functions(&folder.0.join(units.to_string()))?);
    }
    let (Some(long), Some(short)) = (tables.pop(), tables.pop()) else { bail!("two runs give two tables") };
    let mut lines: Vec<(f64, &str)> = long
        .iter()
        .map(|(name, count)| {
            let before = short.get(name).copied().unwrap_or(0);
            ((*count as f64 - before as f64) / case.units as f64, name.as_str())
        })
        .collect();
    lines.sort_by(|a, b| b.0.total_cmp(&a.0));
    let total: f64 = lines.iter().map(|line| line.0).sum();
    println!("{total:9.0}  per {}", case.unit);
    for (count, name) in lines.iter().take(LISTED) {
        println!("{count:9.0}  {name}");
    }
    Ok(())
}

fn collected(case: &Case, units: usize, folder: &Path) -> anyhow::Result<u64> {
    let program = std::env::current_exe()?;
    let run = Command::new("valgrind")
        .arg("--tool=callgrind")
        .arg(format!("--callgrind-out-file={}", folder.join(units.to_string()).display()))
        .arg(program)
        .args(["--case", case.name, &units.to_string()])
        .output()
        .context("cannot run valgrind, which counts: on Debian it is the package valgrind")?;
    let stderr = String::from_utf8_lossy(&run.stderr);
    if !run.status.success() {
        bail!("{} with {units} units: {}\n{stderr}", case.name, run.status);
    }
    let count = stderr.lines().find_map(|line| line.split_once("Collected :")?.1.trim().parse().ok());
    count.with_context(|| format!("valgrind gave no count:\n{stderr}"))
}

/// Returns each function's own instructions, as `callgrind_annotate` reports them.
fn functions(file: &Path) -> anyhow::Result<BTreeMap<String, u64>> {
    let run = Command::new("callgrind_annotate")
        .args(["--auto=no", "--show-percs=no", "--threshold=100"])
        .arg(file)
        .output()
        .context("cannot run callgrind_annotate")?;
    let text = String::from_utf8_lossy(&run.stdout);
    let mut functions = BTreeMap::new();
    for (count, name) in text.lines().filter_map(|line| line.trim_start().split_once("  ")) {
        let (Ok(count), Some((_, name))) = (count.replace(',', "").parse::<u64>(), name.split_once(':'))
        else {
            continue;
        };
        let name = name.rsplit_once(" [").map_or(name, |(name, _)| name);
        *functions.entry(name.to_owned()).or_default() += count;
    }
    Ok(functions)
}

/// A new directory, removed with its content on drop.
struct ScratchDir(PathBuf);

impl ScratchDir {
    fn new() -> anyhow::Result<Self> {
        let path = std::env::temp_dir().join(format!("rouse-instructions-{}", std::process::id()));
        std::fs::create_dir(&path).with_context(|| path.display().to_string())?;
        Ok(Self(path))
    }
}

impl Drop for ScratchDir {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}
