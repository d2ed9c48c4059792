use super::{
    goals::{GoalVerdict, goals},
    *,
};

fn cell(case: BenchCase, target: ComparedProxy, round: u32) -> ResultCell {
    ResultCell {
        case,
        target,
        workers: 1,
        round,
        group: round,
        discarded: false,
        other_work: 0.0,
        disturbed: false,
        units: 100_000,
        errors: 0,
        corrupted: 0,
        first_error: None,
        wall_s: 2.0,
        cpu_s: 1.0,
        latency_us: LatencyQuantiles::default(),
        lag_us: LatencyQuantiles::default(),
        listening_ms: 50.0,
        idle_bytes: 16_000_000,
        warm_bytes: 17_000_000,
        open_bytes: None,
        streams: 0,
    }
}

/// Three rounds of a case; `change` varies the cells by target and round.
fn rounds(case: BenchCase, targets: &[ComparedProxy], change: impl Fn(&mut ResultCell)) -> Vec<ResultCell> {
    let each = |round| targets.iter().map(move |&target| cell(case, target, round));
    let mut cells: Vec<_> = (0..3).flat_map(each).collect();
    cells.iter_mut().for_each(change);
    cells
}

fn times(p50: u64, p99: u64) -> LatencyQuantiles {
    LatencyQuantiles { count: 100, p50, p99, max: p99, ..LatencyQuantiles::default() }
}

fn results() -> CompareResults {
    use ComparedProxy::{Direct, Nginx, Rouse, Smg};
    let mut cells = rounds(BenchCase::Saturated, &[Direct, Rouse, Nginx, Smg], |cell| {
        // The machine's speed changes from round to round, but the ratio within a round hardly does.
        let pace = f64::from(cell.round + 1);
        (cell.cpu_s, cell.units) = match cell.target {
            Rouse => (1.1 * pace, 100_000),
            Smg => (2.0, 20_000),
            Nginx => (pace, 100_000),
            _ => (0.0, 200_000),
        };
    });
    cells.extend(rounds(BenchCase::Streams5000, &[Direct, Rouse, Nginx], |cell| {
        let (p99, kib) = match cell.target {
            Rouse => (2900 + 100 * u64::from(cell.round), 3),
            Nginx => (1500, 18),
            _ => (500, 0),
        };
        (cell.latency_us, cell.lag_us) = (times(300, p99), times(100, 900));
        cell.open_bytes = Some(cell.warm_bytes + kib * 1024 * 5000);
        cell.streams = 5000;
    }));
    cells.extend(rounds(BenchCase::Start, &[Rouse, Nginx], |cell| (cell.units, cell.cpu_s) = (0, 0.0)));
    // Figures of a failed run do not count.
    cells.push(ResultCell { corrupted: 1, cpu_s: 0.001, group: 9, ..cell(BenchCase::Saturated, Rouse, 0) });
    cells.push(ResultCell {
        discarded: true,
        cpu_s: 0.001,
        group: 9,
        ..cell(BenchCase::Saturated, Rouse, 0)
    });
    CompareResults {
        rounds: 3,
        seconds: 2.0,
        machine: MachineInfo {
            kernel: "6.1.0".into(),
            processor: "A processor".into(),
            processors: 2,
            memory_gib: 8,
        },
        versions: [("nginx".to_owned(), "nginx/1.22.1".to_owned())].into(),
        binary: Some(21_000_000),
        cells,
    }
}

#[test]
fn the_table_tells_of_each_goal_what_was_measured_and_whether_it_was_kept() {
    let text = table::markdown(&results());
    let (_, goals) = text.split_once("## Goals\n").unwrap();
    let (goals, _) = goals.split_once("\n## All").unwrap();
    let rows: Vec<_> = goals.lines().filter(|line| line.starts_with("| ")).collect();
    let expected = "\
| | Rouse | beside it | judged | goal | first acceptable | |
| CPU per request, saturated | 22.0 µs | nginx 20.0 µs | 1.10 × [1.10..1.10] | ≤ 1.00 × | ≤ 1.15 × | acceptable |
| CPU per event, 400 streams at 20 ms |  |  | - | ≤ 1.00 × | ≤ 1.10 × | not measured |
| CPU per event, 5,000 streams at 200 ms | 10.0 µs | nginx 10.0 µs | 1.00 × | ≤ 1.00 × | ≤ 1.10 × | met |
| CPU per event of the stub, 400 streams at 20 ms, against the gateway |  |  | - | ≤ 1.00 × | ≤ 1.10 × | not measured |
| Requests per second of a core, against sglang-router | 50000/s | smg 10000/s | 5.00 × | ≥ 6.00 × | ≥ 4.00 × | acceptable |
| CPU per request, 2 workers against 1 |  |  | - | ≤ 1.05 × | ≤ 1.10 × | not measured |
| Event lag p99 at saturation, 200 streams at 0 ms |  |  | - | ≤ 1.00 × | ≤ 1.50 × | not measured |
| Added time to first byte p99, 1,000 streams |  |  | - | ≤ 1.00 ms | ≤ 2.00 ms | not measured |
| Added time to first byte p99, 5,000 streams | 3.00 ms | nginx 1.50 ms | 2.50 ms [2.40..2.60] | ≤ 1.00 ms | ≤ 2.00 ms | missed |
| Added event lag p99, 1,000 streams at 20 ms |  |  | - | ≤ 1.50 × | ≤ 2.50 × | not measured |
| Added p50 of 220 KB bodies, 150 in flight |  |  | - | ≤ 1.00 ms | ≤ 2.00 ms | not measured |
| Added to a stream's longest stall while a 200 MB body is parsed on its core |  |  | - | ≤ 5.00 ms | ≤ 20.0 ms | not measured |
| Memory of an open stream, 5,000 of them | 3.0 KiB | nginx 18.0 KiB | 3.0 KiB | ≤ 4.0 KiB | ≤ 16.0 KiB | met |
| Memory when idle | 16.0 MB | nginx 16.0 MB | 16.0 MB | ≤ 15.0 MB | ≤ 20.0 MB | acceptable |
| From start to listening | 50.0 ms | nginx 50.0 ms | 50.0 ms | ≤ 100.0 ms | ≤ 200.0 ms | met |
| Stripped gateway |  |  | 21.0 MB | ≤ 20.0 MB | ≤ 30.0 MB | acceptable |
| Corrupted or reordered events and answers, whole run |  |  | 1 | 0 | 0 | missed |";
    assert_eq!(rows.join("\n"), expected);
    assert_eq!(
        table::missed(&results()),
        [
            "Added time to first byte p99, 5,000 streams",
            "Corrupted or reordered events and answers, whole run"
        ]
    );
}

#[test]
fn the_stub_is_judged_against_the_gateway_beside_it() {
    use ComparedProxy::{Nginx, Rouse, Stub};
    let mut results = results();
    results.cells.extend(rounds(BenchCase::Streams400, &[Rouse, Nginx, Stub], |cell| {
        let pace = f64::from(cell.round + 1);
        cell.cpu_s = if cell.target == Stub { 1.08 } else { 1.0 } * pace;
    }));
    // A measurement without a neighbour.
    results.cells.push(ResultCell { cpu_s: 9.0, group: 9, ..cell(BenchCase::Streams400, Stub, 0) });
    let row = |results: &CompareResults| {
        let text = table::markdown(results);
        text.lines().find(|line| line.contains("of the stub")).unwrap().to_owned()
    };
    let what = "CPU per event of the stub, 400 streams at 20 ms, against the gateway";
    let limits = "≤ 1.00 × | ≤ 1.10 ×";
    assert_eq!(
        row(&results),
        format!("| {what} | 20.0 µs | stub 27.0 µs | 1.08 × [1.08..1.08] | {limits} | acceptable |")
    );
    for cell in results.cells.iter_mut().filter(|cell| cell.target == Stub) {
        cell.cpu_s *= 1.11 / 1.08;
    }
    assert!(row(&results).ends_with("| missed |"), "{}", row(&results));
    assert!(table::missed(&results).contains(&what));
}

#[test]
fn what_the_stub_corrupted_is_ours() {
    let corrupted = |results: &CompareResults| {
        let text = table::markdown(results);
        text.lines().find(|line| line.starts_with("| Corrupted")).unwrap().to_owned()
    };
    let mut results = results();
    assert!(corrupted(&results).ends_with("| 1 | 0 | 0 | missed |"));
    results.cells.push(ResultCell { corrupted: 2, ..cell(BenchCase::Streams400, ComparedProxy::Stub, 0) });
    results.cells.push(ResultCell { corrupted: 4, ..cell(BenchCase::Streams400, ComparedProxy::Nginx, 0) });
    assert!(corrupted(&results).ends_with("| 3 | 0 | 0 | missed |"));
}

#[test]
fn a_figure_on_a_limit_keeps_it_and_one_beyond_does_not() {
    let goals = goals();
    let at_most = &goals[0];
    let verdicts = [0.9, 1.0, 1.01, 1.15, 1.16].map(|figure| at_most.verdict(Some(figure)));
    use GoalVerdict::{Acceptable, Met, Missed, Unmeasured};
    assert_eq!(verdicts, [Met, Met, Acceptable, Acceptable, Missed]);
    assert_eq!(at_most.verdict(None), Unmeasured);
    let at_least = goals.iter().find(|goal| goal.at_least).unwrap();
    assert_eq!(
        [7.0, 6.0, 5.9, 4.0, 3.9].map(|figure| at_least.verdict(Some(figure))),
        [Met, Met, Acceptable, Acceptable, Missed]
    );
}

#[test]
fn results_survive_being_written_and_make_the_same_table() {
    let folder = tempfile::tempdir().unwrap();
    let results = results();
    results.write(folder.path()).unwrap();
    let again = CompareResults::read(&folder.path().join("results.json")).unwrap();
    assert_eq!(table::markdown(&again), table::markdown(&results));
    for picture in ["cpu-per-request.svg", "cpu-per-event-5000.svg", "memory-per-stream.svg"] {
        let text = fs::read_to_string(folder.path().join(picture)).unwrap();
        assert!(text.contains("rouse") && text.contains("nginx"), "{picture}");
    }
}

#[test]
fn of_a_path_only_its_name_is_published() {
    let said = "nginx: [emerg] \"x\" in /tmp/a-b/nginx.conf:3; cannot run '/opt/some one/bin/p', see http://127.0.0.1:80/v1/chat";
    let plain =
        "nginx: [emerg] \"x\" in nginx.conf:3; cannot run 'some one/bin/p', see http://127.0.0.1:80/v1/chat";
    assert_eq!(redact_folders(said), plain);
    assert_eq!(redact_folders("/home/me/"), "me");
    assert_eq!(redact_folders("3/4, HTTP/1.1 and a/b"), "3/4, HTTP/1.1 and a/b");
}
