use clap::Parser;
use rouse::{
    model::{Accelerator, EngineMemory, FleetSettings},
    sim::{Scenario, ScenarioAction, SimulatedRequest, SimulatedWorld, simulated_model},
};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::*;
use crate::cli::simulate::SimulateArgs;

#[derive(Debug, Parser)]
struct MachineCommandLine {
    #[command(flatten)]
    args: SimulateArgs,
}

/// Runs the command with these arguments.
fn run(words: &[&str]) -> Result<MachineOutput, String> {
    let words = std::iter::once("simulate").chain(words.iter().copied());
    let line = MachineCommandLine::try_parse_from(words).map_err(|error| error.to_string())?;
    line.args.machine.run(line.args.start_time, line.args.json)
}

fn write(dir: &TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    path.to_str().unwrap().to_owned()
}

/// A configuration with one accelerator, which each of these models nearly fills.
fn configuration(settings: &str, models: &[&str]) -> String {
    let engine = "engine: {kind: custom, command: [x, '${HOST}:${PORT}']}, memory: {awake: 20Gi}";
    let models: String = models.iter().map(|name| format!("  - {{name: {name}, {engine}}}\n")).collect();
    format!("keys: none\n{settings}\naccelerators: [{{id: gpu-0, memory: 25Gi}}]\nmodels:\n{models}")
}

fn log_line(second: u64, model: &str, duration_ms: u64) -> String {
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    let time = format!("2026-11-20T{hour:02}:{minute:02}:{second:02}.000Z");
    let engine = format!(r#""model": "{model}", "engine": "{model}#0""#);
    format!(r#"{{"ts": "{time}", {engine}, "status": 200, "duration_ms": {duration_ms}}}"#) + "\n"
}

/// One cell of a run's line.
fn cell(output: &MachineOutput, run: &str, column: usize) -> String {
    let line = output.text.lines().find(|line| line.split_whitespace().next() == Some(run));
    let line = line.unwrap_or_else(|| panic!("no line of {run} in {}", output.text));
    line.split_whitespace().nth(column).unwrap().to_owned()
}

fn swaps(output: &MachineOutput, run: &str) -> u64 {
    cell(output, run, 6).parse().unwrap()
}

#[test]
fn two_more_accelerators_end_the_swaps_of_three_models() {
    let dir = tempfile::tempdir().unwrap();
    let config = write(&dir, "rouse.yaml", &configuration("", &["a", "b", "c"]));
    let lines: String = (0..60).map(|n| log_line(60 * n, ["a", "b", "c"][n as usize % 3], 5000)).collect();
    let log = write(&dir, "access.log", &lines);
    let words = ["--config", &config, "--requests", &log, "--start-time", "5s"];
    let output = run(&[words.as_slice(), &["--accelerators", "+2"]].concat()).unwrap();
    let mut lines = output.text.lines();
    assert_eq!(lines.next(), Some("60 requests in 59m; 1 accelerator, 3 models"));
    assert_eq!(lines.next(), Some("changed: 3 accelerators"));
    assert_eq!((swaps(&output, "simulated"), swaps(&output, "changed")), (59, 0));
    let cells = [("recorded", 1), ("recorded", 6), ("simulated", 9), ("changed", 9)];
    assert_eq!(cells.map(|(run, column)| cell(&output, run, column)), ["60", "-", "0.98", "2.95"]);
    let assumed = "no start of a, b, c was measured: 5s is assumed (--start-time)";
    assert!(output.notes.iter().any(|note| note == assumed), "{:?}", output.notes);
    assert_eq!(run(&[words.as_slice(), &["--accelerators", "+2"]].concat()).unwrap().text, output.text);
    let unchanged = run(&words).unwrap();
    assert!(!unchanged.text.contains("changed"), "{}", unchanged.text);
}

#[test]
fn the_json_has_what_the_table_has_and_the_notes() {
    let dir = tempfile::tempdir().unwrap();
    let config = write(&dir, "rouse.yaml", &configuration("", &["a", "b", "c"]));
    let lines: String = (0..60).map(|n| log_line(60 * n, ["a", "b", "c"][n as usize % 3], 5000)).collect();
    let log = write(&dir, "access.log", &lines);
    let words = ["--config", &config, "--requests", &log, "--start-time", "5s"];
    let with = |more: &[&str]| run(&[words.as_slice(), more].concat()).unwrap();
    let (table, output) = (with(&["--accelerators", "+2"]), with(&["--accelerators", "+2", "--json"]));
    let value: Value = serde_json::from_str(&output.text).unwrap();
    assert_eq!(output.notes, [""; 0], "they are in the JSON");
    assert_eq!(value["notes"], json!(table.notes));
    let facts = ["requests", "lasts", "accelerators", "models", "changed"].map(|name| value[name].clone());
    assert_eq!(json!(facts), json!([60, 59 * 60_000, 1, 3, "3 accelerators"]));
    let runs = value["runs"].as_array().unwrap();
    let names: Vec<_> = runs.iter().map(|run| run["run"].as_str().unwrap()).collect();
    assert_eq!(names, ["recorded", "simulated", "changed"]);
    for (run, name) in runs.iter().zip(names) {
        for (column, field) in [(1, "requests"), (2, "refused"), (3, "left"), (6, "swaps"), (8, "wakes")] {
            let shown = if run[field].is_null() { "-".to_owned() } else { run[field].to_string() };
            assert_eq!(cell(&table, name, column), shown, "{field} of {run}");
        }
    }
    assert_eq!([&runs[0]["gpuHours"], &runs[0]["swaps"]], [&Value::Null; 2], "a recording has none");
    let hours = runs[2]["gpuHours"].as_f64().unwrap();
    assert!((2.9..3.0).contains(&hours), "{hours}");
    let [mean, p99] = ["waitMean", "waitP99"].map(|field| runs[1][field].as_u64().unwrap());
    assert_eq!(cell(&table, "simulated", 5), format!("{:.1}s", p99 as f64 / 1000.0));
    assert!((5000..=p99).contains(&mean), "each request waits for a start: {}", runs[1]);
    assert_eq!(serde_json::from_str::<Value>(&with(&["--json"]).text).unwrap()["changed"], Value::Null);
}

#[test]
fn a_longer_turn_has_fewer_swaps() {
    let dir = tempfile::tempdir().unwrap();
    let config = write(&dir, "rouse.yaml", &configuration("turns: {maxTurn: 10s}", &["a", "b"]));
    let lines: String = (0..600).flat_map(|n| ["a", "b"].map(|model| log_line(n, model, 2000))).collect();
    let log = write(&dir, "access.log", &lines);
    let words = ["--config", &config, "--requests", &log, "--start-time", "2s", "--max-turn", "60s"];
    let output = run(&words).unwrap();
    assert!(output.text.contains("\nchanged: maxTurn 1m\n"), "{}", output.text);
    let (short, long) = (swaps(&output, "simulated"), swaps(&output, "changed"));
    assert!(long > 0 && short > 2 * long, "{}", output.text);
}

#[test]
fn a_journal_has_configuration_and_times_and_its_own_requests_if_there_is_no_log() {
    let memory = EngineMemory { awake: Bytes::gib(20), asleep: Bytes::mib(256), host: Bytes::gib(1) };
    let configuration = FleetConfig {
        settings: FleetSettings::default(),
        accelerators: vec![Accelerator { metered: true, ..Accelerator::new("gpu-0".into(), Bytes::gib(24)) }],
        models: ["a", "b"].map(|name| simulated_model(name, memory)).into(),
    };
    let mut scenario = Scenario::new("recorded", configuration);
    for n in 0..10 {
        let request = SimulatedRequest::stream(["a", "b"][n as usize % 2], Millis::secs(2));
        scenario = scenario.at(Millis::secs(30 * n), ScenarioAction::SendRequest(request));
    }
    let mut world = SimulatedWorld::new(scenario).with_journal();
    world.run_until(Millis::secs(400)).unwrap_or_else(|failure| panic!("{failure}"));
    let lines: String = world.journal().iter().map(|line| journal::write(line).unwrap() + "\n").collect();
    let dir = tempfile::tempdir().unwrap();
    let file = write(&dir, "journal", &lines);
    let output = run(&["--journal", &file, "--memory", "b=2Gi", "--pin", "a"]).unwrap();
    assert!(output.text.contains("\nchanged: b with 2Gi, a pinned\n"), "{}", output.text);
    assert_eq!((swaps(&output, "simulated"), swaps(&output, "changed")), (9, 0));
    let mean_wait = |run| cell(&output, run, 4).trim_end_matches('s').parse::<f64>().unwrap();
    assert!((mean_wait("recorded") - mean_wait("simulated")).abs() < 0.02, "{}", output.text);
    let [note] = output.notes.as_slice() else { panic!("{:?}", output.notes) };
    assert!(note.contains("0 that went to an awake engine") && note.contains("--requests"), "{note}");
}

#[test]
fn mistakes_in_the_input_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let config = write(&dir, "rouse.yaml", &configuration("", &["a"]));
    let log = write(&dir, "access.log", &(log_line(0, "a", 10) + &log_line(1, "gone", 10)));
    let broken = write(&dir, "broken.log", &(log_line(0, "a", 10) + "{}\n"));
    let gone = write(&dir, "gone.log", &log_line(1, "gone", 10));
    let auto = write(&dir, "auto.yaml", "keys: none\nmodels: []\n");
    let output = run(&["--config", &config, "--requests", &log]).unwrap();
    let note = "left out: 1 request for models that are not configured: gone (1)";
    assert!(output.notes.iter().any(|found| found == note), "{:?}", output.notes);
    for (words, named) in [
        (vec!["--config", &config, "--requests", &broken], "broken.log: line 2: not a line of the access"),
        (vec!["--config", &config, "--requests", &gone], "nothing to simulate"),
        (vec!["--config", &config, "--requests", "absent.log"], "cannot read absent.log: "),
        (vec!["--config", &auto, "--requests", &log], "the accelerators are detected at the start"),
        (vec!["--config", &config, "--requests", &log, "--pin", "z"], "has no model 'z': it has a"),
        (vec!["--config", &config, "--requests", &log, "--memory", "a"], "write MODEL=SIZE"),
        (vec!["--config", &config, "--requests", &log, "--accelerators", "-1"], "would have 0 accelerators"),
        (vec!["--config", &config], "--requests"),
        (vec!["--journal", &log], "line 1 of the journal"),
        (vec!["--journal", &log, "--svg", "plots.svg"], "cannot be used with"),
        (vec!["daily", "--pin", "a"], "cannot be used with"),
        (vec![], "required"),
    ] {
        let error = run(&words).unwrap_err();
        assert!(error.contains(named), "{words:?}: {error}");
    }
}
