//! `POST /v1/set-log`: the public stub's cases (chunking with overlap, gap and negative start), and what may go wrong.

use std::{fs::File, io::Write as _, net::TcpStream, time::Duration};

use super::support::{Answer, Setting, Stub, until};

fn send(stub: &Stub, start: &str, piece: &str) -> Answer {
    let answer = stub.post(&format!("/v1/set-log?startPos={start}"), piece);
    assert!(answer.body.ends_with("\r\n"), "{answer:?}");
    answer
}

#[test]
fn log_chunking_overlap_gap_negative() {
    let stub = Setting::new().start();
    for (start, piece, status) in [
        ("0", "line 1\n", 200),
        ("7", "line 2\n", 200),
        ("0", "line 1\nline 2\nline 3\n", 200),
        ("14", "line 3\nline 4\n", 200),
        ("14", "line 3\n", 200),
        ("29", "a gap", 400),
        ("-1", "negative", 400),
        ("x", "unreadable", 400),
        ("", "empty", 400),
        ("28", "line 5\n", 200),
    ] {
        let answer = send(&stub, start, piece);
        assert_eq!(answer.status, status, "{start}: {answer:?}");
    }
    assert_eq!(stub.output(), "line 1\nline 2\nline 3\nline 4\nline 5\n");
    assert_eq!(send(&stub, "0", "line 1\n").body, "appended 0 bytes; the log ends at 35\r\n");
    let missing = stub.post("/v1/set-log", "piece");
    assert_eq!(missing.status, 400);
    assert!(missing.body.starts_with("startPos is missing") && missing.body.ends_with("\r\n"));
    let other = stub.get("spi", "/v1/set-log?startPos=0");
    assert_eq!((other.status, &*other.headers["allow"]), (405, "POST"));
    assert!(stub.get("metrics", "/metrics").body.contains("\nrouse_stub_log_bytes_total 35\n"));
}

#[test]
fn many_copies_of_one_long_log_at_once_are_one_log() {
    let stub = Setting::new().start();
    let whole: String = (0..400_000).map(|line| format!("line {line}\n")).collect();
    std::thread::scope(|scope| {
        let senders: Vec<_> = (0..6).map(|_| scope.spawn(|| send(&stub, "0", &whole))).collect();
        for sender in senders {
            assert_eq!(sender.join().unwrap().status, 200);
        }
    });
    assert!(stub.output() == whole, "bytes were lost, doubled or mixed");
}

#[test]
fn a_body_that_breaks_off_is_kept_as_far_as_it_came_and_goes_on_from_there() {
    let stub = Setting::new().start();
    let mut stream = TcpStream::connect(stub.address("spi")).unwrap();
    let head = "POST /v1/set-log?startPos=0 HTTP/1.1\r\nhost: stub\r\ncontent-length: 100\r\n\r\n";
    stream.write_all(format!("{head}the first half, ").as_bytes()).unwrap();
    until("it is there", Duration::from_secs(5), || stub.output() == "the first half, ");
    drop(stream);
    assert_eq!(send(&stub, "4", "first half, the second").status, 200);
    assert_eq!(stub.output(), "the first half, the second");
}

#[test]
fn an_output_that_takes_nothing_is_500() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let stub = Setting::new().stdout(full).start();
    let answer = send(&stub, "0", "piece\n");
    assert_eq!(answer.status, 500);
    assert!(answer.body.starts_with("writing the log failed; it ends at "), "{answer:?}");
}

#[test]
fn an_output_that_nobody_reads_holds_up_nothing_else_nor_the_end() {
    let mut stub = Setting::new().stdout(std::process::Stdio::piped()).start();
    let (size, piece) = (64 << 20, [b'x'; 64 << 10]);
    let mut stream = TcpStream::connect(stub.address("spi")).unwrap();
    let head =
        format!("POST /v1/set-log?startPos=0 HTTP/1.1\r\nhost: stub\r\ncontent-length: {size}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    stream.set_nonblocking(true).unwrap();
    // It takes as much as fits into the pipe and the sockets, and waits.
    let mut sent = 0;
    while let Ok(count) = stream.write(&piece) {
        sent += count;
        assert!(sent < size, "it takes what it cannot write");
    }
    for _ in 0..20 {
        assert!(!stub.ready());
    }
    stub.signal(nix::sys::signal::Signal::SIGTERM);
    assert_eq!(stub.wait(Duration::from_secs(10)), Some(0));
}
