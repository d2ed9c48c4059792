//! The public stub's own test cases, under their names there.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Barrier,
    time::Duration,
};

use nix::sys::signal::Signal;
use rouse_testing::scripted_engine::head_length;

use crate::{
    set_log::send,
    support::{ReservedPort, StubBuilder, StubProcess, StubTestClient, engine::echo, stub_before, within},
};

const CONFIG: &str = "/v1/proxy/config";

fn refuses(address: SocketAddr) -> bool {
    TcpStream::connect(address).is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
}

fn named(target: SocketAddr) -> String {
    format!(r#"{{"address":"{}","port":{}}}"#, target.ip(), target.port())
}

/// A stub with the public stub's ports: probes, SPI, and a proxy port at a reserved number.
fn public() -> (StubProcess, ReservedPort) {
    let proxy = ReservedPort::bind();
    let stub = StubBuilder::with_ports(&[("spi", 0), ("probes", 0), ("proxy", proxy.number())]).start();
    (stub, proxy)
}

#[test]
fn log_chunking_overlap_gap_negative() {
    let stub = StubBuilder::new().start();
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
    assert_eq!(send(&stub, "0", "line 1\n").text(), "appended 0 bytes; the log ends at 35\r\n");
    let missing = stub.post("/v1/set-log", "piece");
    assert_eq!(missing.status, 400);
    assert!(missing.text().starts_with("startPos is missing") && missing.text().ends_with("\r\n"));
    let other = stub.get("spi", "/v1/set-log?startPos=0");
    assert_eq!((other.status, other.header("allow")), (405, "POST"));
    assert!(stub.get("metrics", "/metrics").text().contains("\nrouse_stub_log_bytes_total 35\n"));
}

#[test]
fn request_before_serve() {
    let (spi, probes) = (ReservedPort::bind(), ReservedPort::bind());
    let ports = [("spi", spi.number()), ("probes", probes.number())];
    let setting = StubBuilder::with_ports(&ports).env("ROUSE_ACCELERATORS", "a");
    assert!(refuses(spi.address()));
    let _stub = setting.spawn();
    // The first accepted connection gets its response, however early it is.
    let mut stream = None;
    within("it listens", Duration::from_secs(20), || {
        stream = TcpStream::connect(spi.address()).ok();
        stream.is_some()
    });
    let (mut stream, mut answer) = (stream.unwrap(), String::new());
    stream
        .write_all(b"GET /v1/dual-pods/accelerators HTTP/1.1\r\nhost: stub\r\nconnection: close\r\n\r\n")
        .unwrap();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 ") && answer.ends_with("\r\n\r\n[\"a\"]\n"), "{answer}");
}

#[test]
fn shutdown() {
    let ports =
        ["spi", "probes", "admin", "metrics", "debug", "relay"].map(|port| (port, ReservedPort::bind()));
    let mut stub =
        StubBuilder::with_ports(&ports.each_ref().map(|(port, reserved)| (*port, reserved.number()))).start();
    assert_eq!(stub.post("/v1/become-ready", "").status, 200);
    stub.signal(Signal::SIGTERM);
    assert_eq!(stub.wait_exit_within(Duration::from_secs(10)).code(), Some(0));
    for (port, reserved) in ports {
        assert!(refuses(reserved.address()), "{port} is still open");
    }
}

#[test]
fn probes_shutdown_before_serve() {
    let mut stub = StubBuilder::with_ports(&[("spi", 0), ("probes", 0)]).spawn();
    stub.signal(Signal::SIGTERM);
    // The signal itself ends a process that has not installed its handler yet.
    let code = stub.wait_exit_within(Duration::from_secs(10)).code();
    assert!(matches!(code, None | Some(0)), "{code:?}");
}

#[test]
fn a_port_that_is_taken_ends_it_with_the_public_stubs_code() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for (ports, code) in [([("spi", port), ("probes", 0)], 10), ([("spi", 0), ("probes", port)], 11)] {
        let mut stub = StubBuilder::with_ports(&ports).spawn();
        assert_eq!(stub.wait_exit_within(Duration::from_secs(10)).code(), Some(code));
    }
}

/// A body with every byte value, different for each `marker`.
fn body(size: usize, marker: usize) -> Vec<u8> {
    (0..=u8::MAX).cycle().skip(marker).take(size).collect()
}

/// Returns the echo of a body.
fn round_trip(proxy: &StubTestClient, sent: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {}\r\n\r\n",
        sent.len()
    );
    let mut open = proxy.open(head);
    assert!(open.try_write(sent));
    let answer = open.rest();
    assert_eq!((answer.status, answer.complete), (200, true), "{}", answer.text());
    let head = head_length(&answer.body).unwrap();
    answer.body.get(head..).unwrap().to_vec()
}

#[test]
fn proxy_echo_round_trip() {
    let stub = stub_before(echo(), &[]);
    let proxy = stub.port("proxy");
    for size in [0, 1, 256, 70_000, 1 << 20] {
        let sent = body(size, 0);
        assert!(round_trip(&proxy, &sent) == sent, "{size} bytes came back as others");
    }
    // Many requests at once; each gets its own body back.
    std::thread::scope(|scope| {
        for marker in 0..16 {
            let proxy = &proxy;
            scope.spawn(move || {
                let sent = body(10_000 + marker, marker);
                assert!(round_trip(proxy, &sent) == sent, "the {marker}th has not got its own");
            });
        }
    });
}

#[test]
fn proxy_no_listener_before_configure() {
    let (stub, proxy) = public();
    assert!(refuses(proxy.address()));
    assert_eq!(stub.spi().get(CONFIG).status, 404);
    assert!(refuses(proxy.address()), "to ask configures nothing");
    assert_eq!(stub.set_target(echo()), 200);
    // The response to the order comes once the port listens, not before.
    assert!(!refuses(proxy.address()));
    assert_eq!(stub.address("proxy"), proxy.address());
}

#[test]
fn proxy_configure_lifecycle() {
    for _ in 0..2 {
        // A restarted process does not remember its predecessor's target.
        let (mut stub, reserved) = public();
        let (spi, proxy, engine) = (stub.spi(), StubTestClient::new(reserved.address()), echo());
        assert_eq!(spi.get(CONFIG).status, 404);
        assert_eq!(spi.send("PUT", CONFIG, &named(engine)).status, 200);
        let shown = spi.get(CONFIG);
        assert_eq!((shown.status, shown.header("content-type")), (200, "application/json"));
        assert_eq!(shown.text(), named(engine));
        assert_eq!(round_trip(&proxy, b"hello"), b"hello");
        // Repeating the same target changes nothing.
        assert_eq!(spi.send("PUT", CONFIG, &named(engine)).status, 200);
        assert_eq!(round_trip(&proxy, b"again"), b"again");
        for method in ["POST", "DELETE", "PATCH"] {
            let other = spi.send(method, CONFIG, &named(engine));
            assert_eq!((other.status, other.header("allow")), (405, "GET,HEAD,PUT"), "{method}");
        }
        assert_eq!(spi.get(CONFIG).text(), named(engine));
        stub.signal(Signal::SIGTERM);
        assert_eq!(stub.wait_exit().code(), Some(0));
        assert!(refuses(reserved.address()));
    }
}

#[test]
fn proxy_bad_requests() {
    let (stub, proxy) = public();
    let spi = stub.spi();
    for body in [
        "",
        "{",
        "[]",
        "null",
        r#""10.0.0.1:8000""#,
        r#"{"address":"10.0.0.1"}"#,
        r#"{"address":"10.0.0.1","port":0}"#,
        r#"{"address":"10.0.0.1","port":-1}"#,
        r#"{"address":"10.0.0.1","port":65536}"#,
        r#"{"address":"10.0.0.1","port":"8000"}"#,
        r#"{"port":8000}"#,
        r#"{"address":"","port":8000}"#,
        r#"{"address":1,"port":8000}"#,
    ] {
        let refused = spi.send("PUT", CONFIG, body);
        assert_eq!(refused.status, 400, "{body}: {}", refused.text());
        assert!(refused.text().len() > 5, "{body}: it is not said what is wrong");
        assert_eq!(spi.get(CONFIG).status, 404, "{body}");
        assert!(refuses(proxy.address()), "{body}");
    }
    assert_eq!(stub.set_target(echo()), 200, "a bad order is in the way of no good one");
}

#[test]
fn proxy_different_target_conflict() {
    let (stub, proxy) = public();
    let spi = stub.spi();
    let (first, other) = (echo(), TcpListener::bind("127.0.0.1:0").unwrap());
    assert_eq!(stub.set_target(first), 200);
    for target in [other.local_addr().unwrap(), SocketAddr::new([127, 0, 0, 2].into(), first.port())] {
        let refused = spi.send("PUT", CONFIG, &named(target));
        assert_eq!(refused.status, 409, "{}", refused.text());
        assert!(refused.text().contains(&first.to_string()), "{}", refused.text());
    }
    assert_eq!(spi.get(CONFIG).text(), named(first));
    assert_eq!(round_trip(&StubTestClient::new(proxy.address()), b"hello"), b"hello");
    other.set_nonblocking(true).unwrap();
    assert_eq!(other.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "somebody was sent there");
}

/// Several controllers each believe to be the only one: one succeeds, and all others get a conflict.
#[test]
fn proxy_different_targets_at_once_conflict() {
    const COUNT: u16 = 12;
    for _ in 0..5 {
        let (stub, _) = public();
        let (spi, together) = (stub.spi(), Barrier::new(COUNT.into()));
        let answers: Vec<(String, u16)> = std::thread::scope(|scope| {
            let asking: Vec<_> = (1..=COUNT)
                .map(|port| {
                    let (spi, together) = (&spi, &together);
                    scope.spawn(move || {
                        let target = named(SocketAddr::from(([10, 0, 0, 1], port)));
                        together.wait();
                        let status = spi.send("PUT", CONFIG, &target).status;
                        (target, status)
                    })
                })
                .collect();
            asking.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let won: Vec<_> = answers.iter().filter(|(_, status)| *status == 200).collect();
        let lost = answers.iter().filter(|(_, status)| *status == 409).count();
        assert_eq!((won.len(), lost), (1, usize::from(COUNT) - 1), "{answers:?}");
        assert_eq!(spi.get(CONFIG).text(), won[0].0);
    }
}
