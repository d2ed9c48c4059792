use tokio::net::TcpListener;

use super::*;
use crate::load::{RequestPace, ResponseCheck};

const OUTPUT: &str = "Running 5s test @ http://127.0.0.1:1/v1/chat/completions\n\
    summary: {\"requests\":10,\"bytes\":7000,\"duration_us\":5000000,\
    \"errors\":{\"connect\":0,\"read\":0,\"write\":0,\"status\":0,\"timeout\":0}}\n";

fn requests(proxy: SocketAddr) -> RequestLoad {
    RequestLoad {
        proxy,
        model: "m".into(),
        key: "k".into(),
        connections: 4,
        body: 1024,
        engine_time: Duration::ZERO,
        pace: RequestPace::Closed,
        duration: Duration::ZERO,
        check: ResponseCheck::Bytes,
    }
}

fn pair(subject_us: f64, other_work: f64) -> WrkPair {
    let nginx = WrkFigures { cpu_us: 20.0, requests_per_second: 40_000.0, busy: 0.8, other_work: 0.01 };
    WrkPair { subject: WrkFigures { cpu_us: subject_us, other_work, ..nginx }, nginx }
}

#[tokio::test]
async fn wrk_sends_the_request_that_the_engine_answers() {
    let folder = tempfile::tempdir().unwrap();
    let Ok(wrk) = WrkProgram::find(folder.path()) else {
        println!(
            "not checked: wrk is not installed (loadtests/compare/install --only nginx --wrk does that)"
        );
        return;
    };
    assert!(wrk.version().is_some_and(|version| version.contains('.')));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let engine = listener.local_addr().unwrap();
    let serving = tokio::spawn(engine_sim::fast::serve(listener, "m"));
    let summary = wrk.run(&requests(engine), 1, "0", folder.path()).await.unwrap();
    assert!(summary.requests > 0 && summary.duration_us >= 1_000_000, "{summary:?}");
    serving.abort();
    assert!(serving.await.unwrap_err().is_cancelled());
    let error = wrk.run(&requests(engine), 1, "0", folder.path()).await.unwrap_err().to_string();
    assert!(error.contains("unable to connect"), "{error}");
}

#[test]
fn a_summary_is_found_below_what_wrk_prints_itself() {
    let summary = WrkSummary::parse(OUTPUT).unwrap();
    let expected =
        WrkSummary { requests: 10, bytes: 7000, duration_us: 5_000_000, errors: WrkErrors::default() };
    assert_eq!(summary, expected);
    summary.check().unwrap();
    assert!(WrkSummary::parse("chat.lua: attempt to concatenate a nil value\n").is_err());
}

#[test]
fn a_failed_or_short_response_is_an_error() {
    let summary = WrkSummary::parse(OUTPUT).unwrap();
    let errors = WrkErrors { status: 1, ..WrkErrors::default() };
    for (wrong, reason) in [
        (WrkSummary { errors, ..summary }, "status: 1"),
        (WrkSummary { requests: 0, ..summary }, "no response"),
        (WrkSummary { bytes: 5000, ..summary }, "500 bytes"),
    ] {
        let error = wrong.check().unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
    }
}

#[test]
fn a_table_has_each_pair_and_the_median_and_range_of_the_ratios() {
    let text = table(Rouse, &[pair(22.0, 0.0), pair(30.0, 0.2), pair(19.0, 0.0)]);
    let rows: Vec<_> = text.lines().filter(|line| line.starts_with("| ")).skip(1).collect();
    assert_eq!(
        rows,
        [
            "| 1 | 22.00 | 20.00 | 1.100 | 40000 | 40000 | 0.80 | 0.80 | 0.01 |",
            "| 2 | 30.00 | 20.00 | 1.500 | 40000 | 40000 | 0.80 | 0.80 | 0.20 |",
            "| 3 | 19.00 | 20.00 | 0.950 | 40000 | 40000 | 0.80 | 0.80 | 0.01 |",
        ]
    );
    assert!(text.ends_with("rouse / nginx: median 1.100, from 0.950 to 1.500.\n"), "{text}");
}
