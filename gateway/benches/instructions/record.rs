//! Compares counts with the recorded ones.

use std::{collections::BTreeMap, fmt::Write as _, path::Path, process::ExitCode};

use anyhow::Context as _;

use crate::{count, script::CASES};

const FILE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/benches/instructions.toml");
/// Maximum relative deviation from the recorded count.
const TOLERANCE: f64 = 0.05;

/// Fails if any case has become more expensive.
pub(crate) fn check() -> anyhow::Result<ExitCode> {
    let recorded = read(Path::new(FILE))?;
    let (mut dearer, mut cheaper) = (false, false);
    println!("{:>16} {:>12} {:>12} {:>8}", "", "recorded", "now", "");
    for case in &CASES {
        let before = *recorded.get(case.name).with_context(|| format!("{FILE} lacks {}", case.name))?;
        let now = count::per_unit(case)?;
        let change = now / before - 1.0;
        let verdict = if change > TOLERANCE {
            dearer = true;
            "  TOO MANY"
        } else if change < -TOLERANCE {
            cheaper = true;
            "  fewer"
        } else {
            ""
        };
        println!(
            "{:>16} {before:>12.0} {now:>12.0} {:>+7.1}%  per {}{verdict}",
            case.name,
            100.0 * change,
            case.unit
        );
    }
    if cheaper {
        println!("something became cheaper: `make bench-record` records that, so that it stays so");
    }
    if dearer {
        println!(
            "more than {:.0} % above what is recorded. `make test-bench ARGS=\"--annotate CASE\"` shows where;",
            100.0 * TOLERANCE
        );
        println!("what is worth its price is recorded by `make bench-record`");
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

pub(crate) fn write() -> anyhow::Result<ExitCode> {
    let mut text = "# Instructions per unit, kernel left out. Written by `make bench-record`, checked by `make test-bench`.\n".to_owned();
    for case in &CASES {
        let line = format!("{} = {:.0}", case.name, count::per_unit(case)?);
        println!("{line}  # per {}", case.unit);
        writeln!(text, "{line}")?;
    }
    std::fs::write(FILE, text).context(FILE)?;
    Ok(ExitCode::SUCCESS)
}

fn read(file: &Path) -> anyhow::Result<BTreeMap<String, f64>> {
    let text = std::fs::read_to_string(file).with_context(|| file.display().to_string())?;
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    lines
        .map(|line| {
            let (name, count) = line.split_once('=').with_context(|| format!("{FILE}: {line:?}"))?;
            Ok((name.trim().to_owned(), count.trim().parse().with_context(|| format!("{FILE}: {line:?}"))?))
        })
        .collect()
}
