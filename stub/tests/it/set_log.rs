//! Errors of `POST /v1/set-log`. The public stub's cases test its function.

use std::{fs::File, io::Write as _, net::TcpStream, time::Duration};

use nix::sys::signal::Signal;

use crate::support::{StubBuilder, StubProcess, TestResponse, within};

pub(crate) fn send(stub: &StubProcess, start: &str, piece: &str) -> TestResponse {
    let answer = stub.post(&format!("/v1/set-log?startPos={start}"), piece);
    assert!(answer.text().ends_with("\r\n"), "{answer:?}");
    answer
}

#[test]
fn many_copies_of_one_long_log_at_once_are_one_log() {
    let stub = StubBuilder::new().start();
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
    let stub = StubBuilder::new().start();
    let head = "POST /v1/set-log?startPos=0 HTTP/1.1\r\nhost: stub\r\ncontent-length: 100\r\n\r\n";
    let open = stub.spi().open(format!("{head}the first half, "));
    within("it is there", Duration::from_secs(5), || stub.output() == "the first half, ");
    drop(open);
    assert_eq!(send(&stub, "4", "first half, the second").status, 200);
    assert_eq!(stub.output(), "the first half, the second");
}

#[test]
fn an_output_that_takes_nothing_is_500() {
    let full = File::options().write(true).open("/dev/full").unwrap();
    let stub = StubBuilder::new().stdout(full).start();
    let answer = send(&stub, "0", "piece\n");
    assert_eq!(answer.status, 500);
    assert!(answer.text().starts_with("writing the log failed; the log ends at "), "{answer:?}");
}

#[test]
fn an_output_that_nobody_reads_holds_up_nothing_else_nor_the_end() {
    let mut stub = StubBuilder::new().stdout(std::process::Stdio::piped()).start();
    let (size, piece) = (64 << 20, [b'x'; 64 << 10]);
    let mut stream = TcpStream::connect(stub.address("spi")).unwrap();
    let head =
        format!("POST /v1/set-log?startPos=0 HTTP/1.1\r\nhost: stub\r\ncontent-length: {size}\r\n\r\n");
    stream.write_all(head.as_bytes()).unwrap();
    stream.set_nonblocking(true).unwrap();
    // The stub takes as much as the pipe and the sockets hold, then waits.
    let mut sent = 0;
    while let Ok(count) = stream.write(&piece) {
        sent += count;
        assert!(sent < size, "it takes what it cannot write");
    }
    for _ in 0..20 {
        assert!(!stub.ready());
    }
    stub.signal(Signal::SIGTERM);
    assert_eq!(stub.wait_exit_within(Duration::from_secs(10)).code(), Some(0));
}
