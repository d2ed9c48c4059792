//! `simulate`: replays requests with Rouse's autoscaler, an HPA and a KEDA scaler, in simulated time.
//!
//! With `--journal` it simulates one machine instead: see `machine`.

mod machine;
mod plot;

use std::{io::Write, path::PathBuf, process::ExitCode};

use anyhow::Context as _;
use clap::{Args, ValueEnum, value_parser};
use rouse::{
    saturation::{Profile, Thresholds},
    sim::saturation::{
        AutoscalerKind, BUILT_IN, EngineSpeed, LoadReport, LoadScenario, RequestTrace, SimulatedVariant,
        built_in, read_trace, simulate,
    },
    units::{Millis, pluralize},
};
use serde_json::{Value, json};

use self::machine::MachineArgs;
use super::{
    EXIT_USAGE,
    show::{row, table},
};

#[derive(Args, Debug)]
pub(super) struct SimulateArgs {
    /// Trace to replay: a file, or `daily`, `burst` or `ramp`.
    ///
    /// A file has a line for each request: its time in seconds, the tokens of its prompt and the tokens of its answer,
    /// as CSV or as JSON Lines with `time`, `prompt_tokens` and `output_tokens`.
    #[arg(required_unless_present_any = ["journal", "config"])]
    trace: Option<String>,
    /// Write plots of replicas, queue, time to first token and cost over time to this file.
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Fewest replicas, without `--variant`. Only Rouse and KEDA can go to 0.
    #[arg(long, value_name = "N", default_value_t = 1, conflicts_with = "variants")]
    min_replicas: u32,
    /// Most replicas, without `--variant`.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = value_parser!(u32).range(1..=1000))]
    #[arg(conflicts_with = "variants")]
    max_replicas: u32,
    /// Time from the order to start a replica until it serves.
    #[arg(long, value_name = "DURATION", default_value = "2m")]
    start_time: Millis,
    /// Version of Rouse's rules.
    #[arg(long, value_enum, default_value_t = ProfileArg::Rouse)]
    profile: ProfileArg,
    /// Used fraction of the KV cache from which a replica is saturated, for Rouse.
    #[arg(long, value_name = "FRACTION", default_value_t = Thresholds::default().kv_cache)]
    kv_threshold: f64,
    /// Waiting requests from which a replica is saturated, for Rouse.
    #[arg(long, value_name = "N", default_value_t = Thresholds::default().queue_length)]
    queue_threshold: f64,
    /// Mean spare fraction of the KV cache below which Rouse adds a replica.
    #[arg(long, value_name = "FRACTION", default_value_t = Thresholds::default().kv_spare_trigger)]
    kv_trigger: f64,
    /// Mean spare places in the queue below which Rouse adds a replica.
    #[arg(long, value_name = "N", default_value_t = Thresholds::default().queue_spare_trigger)]
    queue_trigger: f64,
    /// Variant of the model, with bounds of its own; may be repeated.
    ///
    /// The cost is that of a replica for an hour. The speed and the KV cache are relative to the built-in engine.
    #[arg(long = "variant", value_name = "NAME:COST:SPEED:MIN:MAX", value_parser = parse_variant)]
    variants: Vec<SimulatedVariant>,
    /// Print JSON: durations are milliseconds.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    machine: MachineArgs,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ProfileArg {
    Rouse,
    Latest,
    Doc,
}

/// Prints one line for each autoscaler and writes the plots, or prints one for each run of a machine.
pub(super) fn run(args: &SimulateArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    if args.machine.is_given() {
        return run_machine(args, out);
    }
    let trace = load_trace(args.trace.as_deref().unwrap_or_default());
    let (trace, scenario) = match trace.and_then(|trace| Ok((trace, args.scenario()?))) {
        Ok(input) => input,
        Err(problem) => return Ok(report_bad_input(&problem)),
    };
    let reports = AutoscalerKind::ALL.map(|kind| simulate(&trace, &scenario, kind));
    if args.json {
        writeln!(out, "{}", to_json(&trace, &scenario, &reports))?;
    } else {
        write!(out, "{}", render(&trace, &scenario, &reports))?;
    }
    if let Some(file) = &args.svg {
        let plots = plot::render(&title(&trace, &scenario), &reports);
        std::fs::write(file, plots).with_context(|| format!("cannot write {}", file.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn run_machine(args: &SimulateArgs, out: &mut impl Write) -> anyhow::Result<ExitCode> {
    let output = match args.machine.run(args.start_time, args.json) {
        Ok(output) => output,
        Err(problem) => return Ok(report_bad_input(&problem)),
    };
    for note in &output.notes {
        eprintln!("rouse-gateway: {note}");
    }
    write!(out, "{}", output.text)?;
    Ok(ExitCode::SUCCESS)
}

fn report_bad_input(problem: &str) -> ExitCode {
    eprintln!("rouse-gateway: {problem}");
    EXIT_USAGE.into()
}

fn load_trace(name: &str) -> Result<RequestTrace, String> {
    if let Some(trace) = built_in(name) {
        return Ok(trace);
    }
    let text = std::fs::read_to_string(name).map_err(|error| {
        format!("cannot read {name}: {error}; pass a file or a built-in trace: {}", BUILT_IN.join(", "))
    })?;
    read_trace(name, &text).map_err(|error| format!("{name}: {error}"))
}

impl SimulateArgs {
    fn scenario(&self) -> Result<LoadScenario, String> {
        let mut scenario = LoadScenario { start_time: self.start_time, ..LoadScenario::default() };
        scenario.policy.profile = self.profile.into();
        scenario.thresholds.kv_cache = self.kv_threshold;
        scenario.thresholds.queue_length = self.queue_threshold;
        scenario.thresholds.kv_spare_trigger = self.kv_trigger;
        scenario.thresholds.queue_spare_trigger = self.queue_trigger;
        scenario.thresholds.validate().map_err(|error| error.to_string())?;
        if self.min_replicas > self.max_replicas {
            return Err(format!(
                "--min-replicas {} is above --max-replicas {}",
                self.min_replicas, self.max_replicas
            ));
        }
        let (min, max) = (self.min_replicas, self.max_replicas);
        scenario.variants = vec![SimulatedVariant { min, max, ..SimulatedVariant::default() }];
        if !self.variants.is_empty() {
            scenario.variants.clone_from(&self.variants);
        }
        Ok(scenario)
    }
}

impl From<ProfileArg> for Profile {
    fn from(profile: ProfileArg) -> Self {
        match profile {
            ProfileArg::Rouse => Self::Rouse,
            ProfileArg::Latest => Self::Latest,
            ProfileArg::Doc => Self::Doc,
        }
    }
}

/// Parses `NAME:COST:SPEED:MIN:MAX`.
fn parse_variant(text: &str) -> Result<SimulatedVariant, String> {
    let fields: Vec<&str> = text.split(':').collect();
    let [name, cost, speed, min, max] = *fields.as_slice() else {
        return Err("a variant is NAME:COST:SPEED:MIN:MAX, like small:1:1:1:8".to_owned());
    };
    let positive = |what: &str, text: &str| {
        let number = text.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite());
        number.ok_or_else(|| format!("{what} is '{text}': it must be a number above 0"))
    };
    let replicas = |text: &str| {
        let number = text.parse().ok().filter(|number: &u32| *number <= 1000);
        number.ok_or_else(|| format!("'{text}' must be a number of replicas from 0 to 1000"))
    };
    let (cost, speed) = (positive("the cost", cost)?, positive("the speed", speed)?);
    let (min, max) = (replicas(min)?, replicas(max)?);
    if name.is_empty() || max == 0 || min > max {
        return Err("a variant has a name, and a maximum that is not 0 and not below its minimum".to_owned());
    }
    let speed = EngineSpeed::default().times(speed);
    Ok(SimulatedVariant { name: name.into(), cost, min, max, speed })
}

fn title(trace: &RequestTrace, scenario: &LoadScenario) -> String {
    let (requests, start_time) = (pluralize(trace.requests.len(), "request"), scenario.start_time);
    format!("{}: {requests} in {}; a replica starts in {start_time}", trace.name, trace.lasts)
}

fn render(trace: &RequestTrace, scenario: &LoadScenario, reports: &[LoadReport]) -> String {
    let head = ["AUTOSCALER", "SATURATED", "REPLICA-HOURS", "COST", "TTFT MEAN", "TTFT P99", "QUEUE MEAN"];
    let lines = reports.iter().map(|report| {
        row([
            report.autoscaler.name(),
            &Millis::secs(report.saturated_seconds).to_string(),
            &format!("{:.2}", report.replica_hours),
            &format!("{:.2}", report.cost),
            &format!("{:.2}s", report.ttft_mean),
            &format!("{:.1}s", report.ttft_p99),
            &format!("{:.1}", report.mean_queue),
        ])
    });
    let rows: Vec<_> = std::iter::once(row(head)).chain(lines).collect();
    format!("{}\n\n{}", title(trace, scenario), table(&rows, false))
}

/// The content of [`render`], with durations in milliseconds.
fn to_json(trace: &RequestTrace, scenario: &LoadScenario, reports: &[LoadReport]) -> Value {
    let report = |report: &LoadReport| {
        json!({
            "autoscaler": report.autoscaler.name(),
            "saturated": Millis::secs(report.saturated_seconds),
            "replicaHours": report.replica_hours,
            "cost": report.cost,
            "ttftMean": rounded_millis(report.ttft_mean),
            "ttftP99": rounded_millis(report.ttft_p99),
            "queueMean": report.mean_queue,
        })
    };
    json!({
        "trace": trace.name,
        "requests": trace.requests.len(),
        "lasts": trace.lasts,
        "startTime": scenario.start_time,
        "autoscalers": reports.iter().map(report).collect::<Vec<_>>(),
    })
}

/// Converts seconds.
fn rounded_millis(seconds: f64) -> Millis {
    Millis((seconds * 1000.0).round() as u64)
}

#[cfg(test)]
mod tests;
