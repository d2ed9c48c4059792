//! The tables in Markdown.

use std::fmt::Write as _;

use crate::{
    cases::BenchCase,
    peers::ComparedProxy,
    report::{
        CompareResults, ResultCell,
        goals::{
            FigureSpread, FigureUnit, GoalVerdict, PerformanceGoal, ReferenceFigures, goals, neighbour_ratios,
        },
    },
};

/// Renders everything derived from the measurements.
pub(crate) fn markdown(results: &CompareResults) -> String {
    let mut text = String::from("# Rouse beside its peers\n\n");
    // Writing to a String cannot fail, here and below.
    writeln!(
        text,
        "{} rounds, about {} s each measurement. {}.\n",
        results.rounds, results.seconds, results.machine
    )
    .ok();
    for (name, version) in &results.versions {
        writeln!(text, "* {name}: {version}").ok();
    }
    let (counted, disturbed) = counted(results);
    writeln!(text, "\n{counted} measurements, {disturbed} of them while other work used the machine.").ok();
    text.push_str("\n## Goals\n\n");
    text.push_str(
        "Median of the rounds, the least and the most in brackets; ratios are of neighbours in time.\n\n",
    );
    text.push_str(
        "| | Rouse | beside it | judged | goal | first acceptable | |\n|---|---|---|---|---|---|---|\n",
    );
    for goal in goals() {
        goal_row(&mut text, results, &goal);
    }
    text.push_str("\n## All\n\nMedians; of CPU also the ratio to nginx beside it.\n");
    for case in BenchCase::ALL {
        case_table(&mut text, results, case);
    }
    text
}

/// The goals that this run misses, without those that were deliberately not measured.
pub(crate) fn missed(results: &CompareResults) -> Vec<&'static str> {
    goals()
        .iter()
        .filter(|goal| {
            goal.verdict(goal.measured(results).map(|spread| spread.median)) == GoalVerdict::Missed
        })
        .map(|goal| goal.what)
        .collect()
}

fn counted(results: &CompareResults) -> (usize, usize) {
    let counted = results.cells.iter().filter(|cell| !cell.discarded);
    (counted.clone().count(), counted.filter(|cell| cell.disturbed).count())
}

fn goal_row(text: &mut String, results: &CompareResults, goal: &PerformanceGoal) {
    let measured = goal.measured(results);
    let (ours, other) =
        goal.reference.as_ref().map_or_else(Default::default, |behind| reference_cells(results, behind));
    let judged = measured.map_or_else(|| "-".to_owned(), |spread| spread_text(spread, goal.unit));
    let sign = if goal.at_least { "≥" } else { "≤" };
    let limit = |limit| {
        if goal.unit == FigureUnit::Count {
            number(limit, goal.unit)
        } else {
            format!("{sign} {}", number(limit, goal.unit))
        }
    };
    writeln!(
        text,
        "| {} | {ours} | {other} | {judged} | {} | {} | {} |",
        goal.what,
        limit(goal.goal),
        limit(goal.acceptable),
        goal.verdict(measured.map(|spread| spread.median)).name()
    )
    .ok();
}

fn reference_cells(results: &CompareResults, behind: &ReferenceFigures) -> (String, String) {
    let median = |target, workers| {
        let figures =
            results.cells_with_workers(behind.case, target, workers).filter_map(behind.figure).collect();
        FigureSpread::from_figures(figures).map(|spread| number(spread.median, behind.unit))
    };
    let name = if behind.other == ComparedProxy::Rouse { "1 worker" } else { behind.other.name() };
    (
        median(ComparedProxy::Rouse, behind.workers.0).unwrap_or_default(),
        median(behind.other, behind.workers.1).map(|figure| format!("{name} {figure}")).unwrap_or_default(),
    )
}

fn case_table(text: &mut String, results: &CompareResults, case: BenchCase) {
    let mut rows = String::new();
    for target in ComparedProxy::ALL {
        for workers in [1, 2] {
            case_row(&mut rows, results, case, target, workers);
        }
    }
    if !rows.is_empty() {
        let unit = match case {
            BenchCase::Streams400
            | BenchCase::Streams1000
            | BenchCase::Opening
            | BenchCase::Streams5000
            | BenchCase::Streams0
            | BenchCase::Stall => "event",
            _ => "request",
        };
        let first = if unit == "event" { "first event" } else { "answer" };
        writeln!(
            text,
            "\n### {}\n\n| | {unit}s/s | CPU µs/{unit} | / nginx | cores | {first} p50 ms | p99 ms | lag p50 ms | p99 ms | \
             most ms | KiB/stream | idle MB | listens ms | errors | corrupted |\n\
             |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
            case.title()
        )
        .ok();
        text.push_str(&rows);
    }
}

fn case_row(
    rows: &mut String,
    results: &CompareResults,
    case: BenchCase,
    target: ComparedProxy,
    workers: usize,
) {
    let all = || {
        results.cells.iter().filter(move |cell| {
            cell.case == case && cell.target == target && cell.workers == workers && !cell.discarded
        })
    };
    if all().next().is_none() {
        return;
    }
    let figure = |figure: &dyn Fn(&ResultCell) -> Option<f64>, unit| {
        FigureSpread::from_figures(
            results.cells_with_workers(case, target, workers).filter_map(figure).collect(),
        )
        .map_or_else(|| "-".to_owned(), |spread| number_without_unit(spread.median, unit))
    };
    let ms = |us: u64, count: u64| (count > 0).then(|| us as f64 / 1e3);
    let proxied = |value: f64| (target != ComparedProxy::Direct).then_some(value);
    let ratio = if workers > 1 || target == ComparedProxy::Nginx || case == BenchCase::Workers {
        "-".to_owned()
    } else {
        FigureSpread::from_figures(neighbour_ratios(
            results,
            case,
            (target, ComparedProxy::Nginx),
            ResultCell::cpu_per_unit,
        ))
        .map_or_else(|| "-".to_owned(), |spread| spread_text(spread, FigureUnit::Times))
    };
    let name = if case == BenchCase::Workers { format!("{target}, {workers}") } else { target.to_string() };
    let cells = [
        figure(&ResultCell::per_second, FigureUnit::PerSecond),
        figure(&ResultCell::cpu_per_unit, FigureUnit::Micros),
        ratio,
        figure(
            &|cell| (cell.wall_s > 0.0 && cell.cpu_s > 0.0).then(|| cell.cpu_s / cell.wall_s),
            FigureUnit::Times,
        ),
        figure(&|cell| ms(cell.latency_us.p50, cell.latency_us.count), FigureUnit::Millis),
        figure(&|cell| ms(cell.latency_us.p99, cell.latency_us.count), FigureUnit::Millis),
        figure(&|cell| ms(cell.lag_us.p50, cell.lag_us.count), FigureUnit::Millis),
        figure(&|cell| ms(cell.lag_us.p99, cell.lag_us.count), FigureUnit::Millis),
        figure(&|cell| ms(cell.lag_us.max, cell.lag_us.count), FigureUnit::Millis),
        figure(&|cell| Some(cell.per_stream()? / 1024.0), FigureUnit::KiB),
        figure(&|cell| proxied(cell.idle_bytes as f64 / 1e6), FigureUnit::MB),
        figure(&|cell| proxied(cell.listening_ms), FigureUnit::Millis),
        all().map(|cell| cell.errors).sum::<u64>().to_string(),
        all().map(|cell| cell.corrupted).sum::<u64>().to_string(),
    ];
    writeln!(rows, "| {name} | {} |", cells.join(" | ")).ok();
}

fn spread_text(spread: FigureSpread, unit: FigureUnit) -> String {
    let median = number(spread.median, unit);
    if spread.min.to_bits() == spread.max.to_bits() {
        return median;
    }
    format!("{median} [{}..{}]", number_without_unit(spread.min, unit), number_without_unit(spread.max, unit))
}

fn number(value: f64, unit: FigureUnit) -> String {
    let suffix = match unit {
        FigureUnit::Times => " ×",
        FigureUnit::Micros => " µs",
        FigureUnit::Millis => " ms",
        FigureUnit::KiB => " KiB",
        FigureUnit::MB => " MB",
        FigureUnit::PerSecond => "/s",
        FigureUnit::Count => "",
    };
    number_without_unit(value, unit) + suffix
}

fn number_without_unit(value: f64, unit: FigureUnit) -> String {
    match unit {
        FigureUnit::Times => format!("{value:.2}"),
        FigureUnit::Millis if value.abs() < 10.0 => format!("{value:.2}"),
        FigureUnit::Micros | FigureUnit::Millis | FigureUnit::KiB | FigureUnit::MB => format!("{value:.1}"),
        FigureUnit::PerSecond | FigureUnit::Count => format!("{value:.0}"),
    }
}
