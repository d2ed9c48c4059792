use clap::Parser;

use super::*;

#[derive(Parser)]
struct CommandLine {
    #[command(flatten)]
    args: SimulateArgs,
}

fn args(words: &[&str]) -> SimulateArgs {
    let words = std::iter::once("simulate").chain(words.iter().copied());
    CommandLine::try_parse_from(words).map(|line| line.args).unwrap_or_else(|error| panic!("{error}"))
}

#[test]
fn the_table_has_a_line_for_each_autoscaler_and_the_plots_are_written() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, svg) = (dir.path().join("trace.csv"), dir.path().join("plots.svg"));
    let lines: String = (0..1200).map(|second| format!("{second},1000,200\n")).collect();
    std::fs::write(&trace, lines).unwrap();
    let words = [trace.to_str().unwrap(), "--svg", svg.to_str().unwrap(), "--max-replicas", "4"];
    let mut out = Vec::new();
    run(&args(&words), &mut out).unwrap();
    let text = String::from_utf8(out).unwrap();
    let mut lines = text.lines();
    let title = lines.next().unwrap();
    assert!(title.ends_with(": 1200 requests in 19m59s; a replica starts in 2m"), "{title}");
    assert_eq!(lines.next(), Some(""));
    let words: Vec<&str> = lines.map(|line| line.split_whitespace().next().unwrap()).collect();
    assert_eq!(words, ["AUTOSCALER", "rouse", "hpa", "keda"], "{text}");
    assert!(std::fs::read_to_string(svg).unwrap().starts_with("<svg "));
}

#[test]
fn the_json_has_what_the_table_has() {
    let dir = tempfile::tempdir().unwrap();
    let trace = dir.path().join("trace.csv");
    let lines: String = (0..1200).map(|second| format!("{second},2000,600\n")).collect();
    std::fs::write(&trace, lines).unwrap();
    let trace = trace.to_str().unwrap();
    let words = [trace, "--max-replicas", "4", "--start-time", "90s"];
    let printed = |more: &[&str]| {
        let mut out = Vec::new();
        run(&args(&[words.as_slice(), more].concat()), &mut out).unwrap();
        String::from_utf8(out).unwrap()
    };
    let (table, json) = (printed(&[]), printed(&["--json"]));
    assert_eq!(json.lines().count(), 1, "{json}");
    let value: Value = serde_json::from_str(&json).unwrap();
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} in {json}"));
    let span = |name: &str| Millis(value[name].as_u64().unwrap());
    let (name, requests) = (value["trace"].as_str().unwrap(), &value["requests"]);
    let title = format!(
        "{name}: {requests} requests in {}; a replica starts in {}",
        span("lasts"),
        span("startTime")
    );
    assert_eq!(table.lines().next(), Some(title.as_str()));
    assert_eq!((name, span("startTime")), (trace, Millis::secs(90)));
    let autoscalers = value["autoscalers"].as_array().unwrap();
    for (line, one) in table.lines().skip(3).zip(autoscalers) {
        let cells = [
            one["autoscaler"].as_str().unwrap().to_owned(),
            Millis(one["saturated"].as_u64().unwrap()).to_string(),
            format!("{:.2}", number(&one["replicaHours"])),
            format!("{:.2}", number(&one["cost"])),
        ];
        assert!(line.split_whitespace().take(4).eq(cells), "{line} is not {one}");
        let shown: Vec<f64> =
            line.split_whitespace().skip(4).map(|cell| cell.trim_end_matches('s').parse().unwrap()).collect();
        let [mean, p99, queue] = ["ttftMean", "ttftP99", "queueMean"].map(|name| number(&one[name]));
        // The table rounds to the number of digits that it shows.
        for (shown, exact, digit) in
            [(shown[0], mean / 1000.0, 0.01), (shown[1], p99 / 1000.0, 0.1), (shown[2], queue, 0.1)]
        {
            assert!((shown - exact).abs() <= digit, "{line} is not {one}");
        }
    }
    assert_eq!(autoscalers.len(), 3, "{json}");
}

#[test]
fn a_trace_that_is_none_is_refused_with_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("trace.csv");
    std::fs::write(&file, "0,100,10\n1,100\n").unwrap();
    let path = file.to_str().unwrap();
    assert_eq!(load_trace(path).unwrap_err(), format!("{path}: line 2: the column output_tokens is missing"));
    let absent = load_trace("no-such-trace").unwrap_err();
    assert!(absent.starts_with("cannot read no-such-trace: "), "{absent}");
    assert!(absent.ends_with("built-in trace: daily, burst, ramp"), "{absent}");
}

#[test]
fn bounds_and_thresholds_that_contradict_themselves_are_refused() {
    for (words, named) in [
        (["burst", "--min-replicas", "20"], "--min-replicas 20 is above --max-replicas 16"),
        (["burst", "--kv-threshold", "1.5"], "kvCacheThreshold is 1.5"),
        (["burst", "--queue-threshold", "2"], "queueSpareTrigger (3) is above queueLengthThreshold (2)"),
        (["burst", "--kv-trigger", "0.9"], "kvSpareTrigger (0.9) is above kvCacheThreshold (0.8)"),
        (["burst", "--queue-trigger", "7"], "queueSpareTrigger (7) is above queueLengthThreshold (5)"),
    ] {
        let error = args(&words).scenario().unwrap_err();
        assert!(error.contains(named), "{error}");
    }
}

#[test]
fn a_threshold_may_be_lower_with_its_trigger() {
    let words = ["burst", "--queue-threshold", "2", "--queue-trigger", "1", "--kv-trigger", "0.3"];
    let thresholds = args(&words).scenario().unwrap().thresholds;
    let queue = Thresholds { queue_length: 2.0, queue_spare_trigger: 1.0, ..Thresholds::default() };
    assert_eq!(thresholds, Thresholds { kv_spare_trigger: 0.3, ..queue });
}

#[test]
fn the_bounds_of_the_model_are_not_beside_those_of_variants() {
    for bound in ["--min-replicas", "--max-replicas"] {
        let words = ["simulate", "burst", "--variant", "small:1:1:1:8", bound, "4"];
        let error = CommandLine::try_parse_from(words).err().unwrap();
        assert_eq!(error.kind(), clap::error::ErrorKind::ArgumentConflict, "{error}");
        assert!(error.to_string().contains("--variant"), "{error}");
    }
}

#[test]
fn variants_replace_the_one_of_the_bounds() {
    let words = ["burst", "--variant", "small:1:1:1:8", "--variant", "large:2.5:3:0:4", "--profile", "doc"];
    let scenario = args(&words).scenario().unwrap();
    assert_eq!(scenario.policy.profile, Profile::Doc);
    let [small, large] = scenario.variants.as_slice() else { panic!("{:?}", scenario.variants) };
    assert_eq!((small.name.as_str(), small.min, small.max), ("small", 1, 8));
    assert_eq!((large.name.as_str(), large.cost, large.min, large.max), ("large", 2.5, 0, 4));
    assert!((large.speed.kv_tokens / small.speed.kv_tokens - 3.0).abs() < 1e-9);
    for text in ["small", "small:1:1:1", "small:0:1:1:8", "small:1:x:1:8", "small:1:1:9:8", ":1:1:1:8"] {
        assert!(CommandLine::try_parse_from(["simulate", "burst", "--variant", text]).is_err(), "{text}");
    }
}
