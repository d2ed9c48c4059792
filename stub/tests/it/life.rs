//! Its beginning and its end, as far as the public stub's own tests look at them.

use std::{
    io::Write as _,
    net::{TcpListener, TcpStream},
    time::Duration,
};

use nix::sys::signal::Signal;

use super::support::{self, Setting, until};

/// A port that was free just now.
fn free() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn request_before_serve() {
    let (spi, probes) = (free(), free());
    let setting = Setting::with(&[("spi", spi), ("probes", probes)]).env("ROUSE_ACCELERATORS", "a");
    assert!(TcpStream::connect(("127.0.0.1", spi)).is_err());
    let _stub = setting.spawn();
    // The first connection that is taken gets its answer, however early it comes.
    let mut stream = None;
    until("it listens", Duration::from_secs(20), || {
        stream = TcpStream::connect(("127.0.0.1", spi)).ok();
        stream.is_some()
    });
    let mut stream = stream.unwrap();
    stream
        .write_all(b"GET /v1/dual-pods/accelerators HTTP/1.1\r\nhost: stub\r\nconnection: close\r\n\r\n")
        .unwrap();
    assert_eq!(support::answer(&mut stream).body, "[\"a\"]\n");
}

#[test]
fn shutdown() {
    let mut stub = Setting::new().start();
    assert_eq!(stub.post("/v1/become-ready", "").status, 200);
    stub.signal(Signal::SIGTERM);
    assert_eq!(stub.wait(Duration::from_secs(10)), Some(0));
    for port in ["spi", "probes", "admin", "metrics", "debug"] {
        assert!(TcpStream::connect(stub.address(port)).is_err(), "{port} is still open");
    }
}

#[test]
fn shutdown_waits_for_the_answer_that_is_being_given() {
    let mut stub = Setting::new().start();
    let mut stream = TcpStream::connect(stub.address("spi")).unwrap();
    let head = "POST /v1/set-log?startPos=0 HTTP/1.1\r\nhost: stub\r\nconnection: close\r\ncontent-length: 6\r\n\r\n";
    stream.write_all(format!("{head}one").as_bytes()).unwrap();
    until("half of it is there", Duration::from_secs(5), || stub.output() == "one");
    stub.signal(Signal::SIGTERM);
    stream.write_all(b"two").unwrap();
    let answer = support::answer(&mut stream);
    assert_eq!((answer.status, stub.output().as_str()), (200, "onetwo"));
    assert_eq!(stub.wait(Duration::from_secs(10)), Some(0));
}

#[test]
fn probes_shutdown_before_serve() {
    let mut stub = Setting::with(&[("spi", 0), ("probes", 0)]).spawn();
    stub.signal(Signal::SIGTERM);
    // By the signal itself where it came before anything else.
    let code = stub.wait(Duration::from_secs(10));
    assert!(matches!(code, None | Some(0)), "{code:?}");
}

#[test]
fn a_port_that_is_taken_ends_it_with_the_public_stubs_code() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    for (ports, code) in [([("spi", port), ("probes", 0)], 10), ([("spi", 0), ("probes", port)], 11)] {
        let mut stub = Setting::with(&ports).spawn();
        assert_eq!(stub.wait(Duration::from_secs(10)), Some(code));
    }
}
