//! Logs: an instance's output, by offset.

use rouse_testing::raw_client::TestResponse;

use crate::support::{LauncherProcess, launcher, start, until};

fn range(launcher: &LauncherProcess, range: &str) -> TestResponse {
    launcher.request("GET", "/v2/vllm/instances/test-id/log", &format!("range: {range}\r\n"), "")
}

/// Thirty bytes over both of its outputs.
fn with_log() -> LauncherProcess {
    let launcher = launcher();
    launcher.run("test-id", "printf \"Log line 1Log line 2\"; printf \"Log line 3\" >&2; exec sleep 100");
    launcher.until_logged("test-id", "line 3");
    launcher
}

#[test]
fn get_instance_logs_endpoint() {
    let answer = with_log().get("/v2/vllm/instances/test-id/log");
    assert_eq!(answer.status, 200);
    assert_eq!(answer.text(), "Log line 1Log line 2Log line 3");
    assert_eq!(answer.find_header("content-type"), Some("application/octet-stream"));
    assert_eq!(answer.find_header("content-range"), Some("bytes 0-29/30"));
    assert_eq!(answer.find_header("accept-ranges"), Some("bytes"));
    assert_eq!(answer.find_header("content-length"), Some("30"));
}

#[test]
fn get_instance_logs_partial_content_206() {
    let answer = range(&with_log(), "bytes=10-14");
    assert_eq!((answer.status, &*answer.text()), (206, "Log l"));
    assert_eq!(answer.find_header("content-range"), Some("bytes 10-14/30"));
    assert_eq!(answer.find_header("accept-ranges"), Some("bytes"));
}

#[test]
fn get_instance_logs_open_ended_range() {
    let launcher = with_log();
    let answer = range(&launcher, "bytes=20-");
    assert_eq!((answer.status, &*answer.text()), (206, "Log line 3"));
    assert_eq!(answer.find_header("content-range"), Some("bytes 20-29/30"));
    let answer = range(&launcher, "bytes=20-999");
    assert_eq!(answer.find_header("content-range"), Some("bytes 20-29/30"));
}

#[test]
fn get_instance_logs_range_not_available() {
    let launcher = with_log();
    for text in ["bytes=30-", "bytes=5000-", "bytes=30-31"] {
        let answer = range(&launcher, text);
        assert_eq!((answer.status, answer.body.len()), (416, 0), "{text}");
        assert_eq!(answer.find_header("content-range"), Some("bytes */30"));
        assert_eq!(answer.find_header("content-type"), Some("application/octet-stream"));
    }
    launcher.run("empty", "exec sleep 100");
    let answer = launcher.get("/v2/vllm/instances/empty/log");
    assert_eq!((answer.status, answer.find_header("content-range")), (416, Some("bytes */0")));
}

#[test]
fn get_instance_logs_invalid_range() {
    let launcher = with_log();
    for text in ["invalid", "bytes=5-2", "bytes=0-1,4-5", "items=0-1"] {
        let answer = range(&launcher, text);
        assert_eq!(answer.status, 400, "{text}");
        assert!(answer.json()["detail"].is_string(), "{}", answer.text());
    }
}

#[test]
fn get_instance_logs_suffix_range_rejected() {
    assert_eq!(range(&with_log(), "bytes=-500").status, 400);
}

#[test]
fn get_instance_logs_nonexistent_endpoint() {
    let launcher = launcher();
    assert_eq!(range(&launcher, "bytes=0-").status, 404);
    // The checks have the public launcher's order.
    assert_eq!(range(&launcher, "bytes=-1").status, 400);
}

/// Numbered lines of eight bytes, so that an offset has a predictable content. They exceed the cap and the longest
/// response.
#[test]
fn a_long_log_is_kept_within_its_cap_and_its_offsets_hold() {
    let launcher = start(&["--command", "sh -c", "--log-cap", "1Mi"]);
    let lines = 500_000_u64;
    launcher.run("test-id", &format!("seq -f %07g 1 {lines}; exec sleep 100"));
    let total = format!("/{}", lines * 8);
    let whole = || launcher.get("/v2/vllm/instances/test-id/log");
    let first = |answer: &TestResponse| {
        let range = answer.find_header("content-range").unwrap().strip_prefix("bytes ").unwrap().to_owned();
        range.split('-').next().unwrap().parse::<u64>().unwrap()
    };
    until("the log is written and its head is given back", || {
        let answer = whole();
        answer.status == 200
            && answer.find_header("content-range").unwrap().ends_with(&total)
            && first(&answer) >= lines * 8 - (1 << 20)
    });
    let start = first(&whole());
    assert!(whole().text().starts_with(&format!("{:07}\n", start / 8 + 1)), "{start}");
    let last = range(&launcher, &format!("bytes={}-", lines * 8 - 8));
    assert_eq!(last.text(), format!("{lines:07}\n"));
    // A range that was partly trimmed returns the kept rest; a fully trimmed range fails.
    let across = range(&launcher, &format!("bytes=0-{}", start + 7));
    assert_eq!((across.status, across.text()), (206, format!("{:07}\n", start / 8 + 1)));
    let gone = range(&launcher, "bytes=0-7");
    assert_eq!((gone.status, gone.find_header("x-rouse-log-start")), (416, Some(&*start.to_string())));
    // A range with an end is not limited to one mebibyte; a range without an end is.
    assert!(whole().body.len() <= 1 << 20);
}

/// Bytes that a client has not read yet are not kept for it. The client gets a correct prefix and sees that it is
/// incomplete.
#[test]
fn an_answer_that_is_overtaken_by_the_cap_ends_early_and_has_no_other_bytes() {
    const HALF: u64 = 32 << 20;
    let launcher = start(&["--command", "sh -c", "--log-cap", "40Mi"]);
    let go = launcher.dir.path().join("go");
    let half = format!("yes 1234567 | head -c {HALF}");
    let wait = format!("until test -e {}; do sleep 0.01; done", go.display());
    launcher.run("test-id", &format!("{half}; {wait}; {half}; exec sleep 100"));
    let last = |total: u64| format!("bytes {}-{}/{total}", total - 8, total - 1);
    let written = |total: u64| {
        let answer = range(&launcher, &format!("bytes={}-", total - 8));
        answer.find_header("content-range") == Some(&*last(total))
    };
    until("the first half is written", || written(HALF));
    let headers = format!("range: bytes=0-{}\r\n", HALF - 1);
    let mut slow = launcher.open("GET", "/v2/vllm/instances/test-id/log", &headers);
    assert_eq!(slow.header("content-length"), Some(&*HALF.to_string()));
    std::fs::write(go, "").unwrap();
    until("the second half is written", || written(2 * HALF));
    until("the first one is given back", || range(&launcher, &format!("bytes=0-{}", HALF - 1)).status == 416);
    let body = slow.rest();
    println!("{} bytes of {HALF} came", body.len());
    assert!(!body.is_empty() && (body.len() as u64) < HALF, "{}", body.len());
    assert!(body.chunks(8).all(|line| b"1234567\n".starts_with(line)), "other bytes are among them");
    // From there on a client can continue with the kept bytes.
    let rest = range(&launcher, &format!("bytes={}-{}", body.len(), 2 * HALF - 1));
    assert_eq!(rest.status, 206);
    assert!(rest.body.chunks(8).all(|line| b"1234567\n".starts_with(line)));
}
