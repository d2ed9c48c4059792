//! HTTP/2 clients that mean harm: their cost is bounded, other clients get answers meanwhile, and no malformed request
//! reaches an engine.

use std::{io::Write as _, net::TcpStream, time::Duration};

use tokio::time::Instant;

use crate::{
    smuggling::RecordingGateway,
    support::{
        GatewayFixture, GatewayProcess, SimModel,
        client::chat_body,
        frames::{
            self, CONTINUATION, DATA, END_HEADERS, END_STREAM, GOAWAY, HEADERS, PING, POST, RST_STREAM,
            SETTINGS, WINDOW_UPDATE, frame, header_block,
        },
    },
};

/// How much the gateway's memory may grow under any of these attacks, in bytes.
const ROOM: usize = 48 << 20;

fn start(settings: &str) -> GatewayProcess {
    let gateway = GatewayFixture::new(&["2Gi"])
        .settings(settings)
        .model(&SimModel { flags: "--itl 1ms", ..SimModel::new("m") })
        .start();
    gateway.wake("m");
    assert!(gateway.client().chat("m", true, 4).is_whole_stream());
    gateway
}

fn connect(gateway: &GatewayProcess, settings: &[(u16, u32)]) -> TcpStream {
    let mut stream = gateway.client().connect();
    // A small send buffer keeps the written bytes close to the received ones: a gateway without a core receives
    // nothing, and this machine would buffer megabytes for it.
    socket2::SockRef::from(&stream).set_send_buffer_size(64 << 10).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.set_write_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(&frames::preface_and_settings(settings)).unwrap();
    stream
}

/// The peak of physical memory so far, in bytes.
///
/// The kernel counts pages per processor and adds them up when asked, so a later reading may be a few pages lower.
fn peak(gateway: &GatewayProcess) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", gateway.pid())).unwrap();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() << 10
}

/// Runs `harm` while other clients get answers, and asserts that it costs little and leaves nothing. Returns the result
/// of `harm`.
fn bounded<T: Send>(gateway: &GatewayProcess, harm: impl FnOnce() -> T + Send) -> T {
    let before = peak(gateway);
    let done = std::thread::scope(|scope| {
        let harm = scope.spawn(harm);
        let mut slowest = Duration::ZERO;
        while !harm.is_finished() {
            let asked = Instant::now();
            assert!(gateway.client().chat("m", true, 2).is_whole_stream());
            slowest = slowest.max(asked.elapsed());
        }
        println!("others waited {slowest:?} at the most");
        assert!(slowest < Duration::from_secs(3), "{slowest:?}");
        harm.join().unwrap()
    });
    let grown = peak(gateway).saturating_sub(before);
    println!("memory grew by {} KiB", grown >> 10);
    assert!(grown < ROOM, "{} MiB", grown >> 20);
    gateway.until_unused("m#0");
    assert!(gateway.client().chat("m", true, 2).is_whole_stream());
    done
}

/// Reads until the connection ends, and returns the error code of the GOAWAY frame, if any.
fn goes_away(stream: &mut TcpStream) -> Option<u32> {
    let mut reason = None;
    while let Some(frame) = frames::read_frame(stream) {
        if frame.kind == GOAWAY {
            reason = Some(frames::error_code(&frame));
        }
    }
    reason
}

/// Writes until the gateway has taken all bytes or closes the connection. Returns whether it took all.
fn pour(stream: &mut TcpStream, bytes: &[u8], times: usize) -> bool {
    (0..times).all(|_| stream.write_all(bytes).is_ok())
}

#[test]
fn streams_reset_as_fast_as_they_are_opened_end_the_connection() {
    let gateway = start("");
    let ended = bounded(&gateway, || {
        let mut stream = connect(&gateway, &[]);
        let mut batch = Vec::new();
        let mut id = 1;
        let begun = Instant::now();
        let mut opened = 0;
        while begun.elapsed() < Duration::from_secs(10) {
            batch.clear();
            for _ in 0..500 {
                batch.extend(frames::chat(id, &chat_body("m", true, 1000)));
                batch.extend(frame(RST_STREAM, 0, id, &8_u32.to_be_bytes()));
                id += 2;
                opened += 1;
            }
            if stream.write_all(&batch).is_err() {
                break;
            }
        }
        println!("{opened} streams were opened and reset");
        (opened, goes_away(&mut stream))
    });
    assert!(ended.0 < 5000, "{ended:?}");
}

#[test]
fn headers_without_end_are_not_gathered() {
    let gateway = start("limits: {header: 16Ki, headerRead: 2s}");
    for piece in [vec![], b"\x00\x01a\x01b".repeat(1000), vec![b'x'; 16 << 10]] {
        let taken = bounded(&gateway, || {
            let mut stream = connect(&gateway, &[]);
            stream.write_all(&frame(HEADERS, 0, 1, &header_block(&POST))).unwrap();
            let taken = pour(&mut stream, &frame(CONTINUATION, 0, 1, &piece), 100_000);
            goes_away(&mut stream);
            taken
        });
        assert!(!taken, "{} bytes at a time: all of it was taken", piece.len());
    }
}

#[test]
fn small_frames_that_stand_for_large_headers_are_refused() {
    let gateway = start("limits: {header: 16Ki}");
    let text = bounded(&gateway, || {
        let mut stream = connect(&gateway, &[]);
        // The table keeps 3 KB once, and 4000 references ask for them.
        let mut bomb = header_block(&POST);
        bomb.extend_from_slice(&[0x40, 1, b'a', 0x7f, 0xb9, 0x16]);
        bomb.extend_from_slice(&vec![b'v'; 3000]);
        bomb.extend_from_slice(&vec![0xbe; 4000]);
        for id in [1, 3, 5, 7] {
            drop(stream.write_all(&frame(HEADERS, END_HEADERS | END_STREAM, id, &bomb)));
        }
        answered(&mut stream, 1)
    });
    assert!(!text.contains("chat.completion"), "{text}");
}

#[test]
fn questions_whose_answers_nobody_takes_are_not_gathered() {
    let gateway = start("limits: {clientStall: 1s, connectionIdle: 5s}");
    for (kind, payload) in [(PING, &b"12345678"[..]), (SETTINGS, b"\x00\x03\x00\x00\x00\x64")] {
        let taken = bounded(&gateway, || {
            let mut stream = connect(&gateway, &[]);
            let many = frame(kind, 0, 0, payload).repeat(1000);
            pour(&mut stream, &many, 20_000)
        });
        assert!(!taken, "frames of kind {kind}: all of them were taken");
    }
}

#[test]
fn streams_without_a_window_are_cut_and_hold_little() {
    let gateway = start("limits: {clientStall: 1s}");
    let ended = bounded(&gateway, || {
        // No stream may send a byte (INITIAL_WINDOW_SIZE is 0).
        let mut stream = connect(&gateway, &[(4, 0)]);
        for id in 0..100 {
            stream.write_all(&frames::chat(2 * id + 1, &chat_body("m", true, 100_000))).unwrap();
        }
        let begun = Instant::now();
        goes_away(&mut stream);
        begun.elapsed()
    });
    assert!(ended < Duration::from_secs(30), "{ended:?}");
    // The streams ran: the engine got an abort for each cut stream.
    let cut = gateway.counters("m#0")["aborts"].as_u64().unwrap();
    assert!(cut > 50, "{cut} ran until they were cut");
}

#[test]
fn windows_that_open_byte_by_byte_cost_little() {
    let gateway = start("limits: {clientStall: 1s}");
    bounded(&gateway, || {
        let mut stream = connect(&gateway, &[(4, 1)]);
        stream.write_all(&frames::chat(1, &chat_body("m", true, 100_000))).unwrap();
        let more = frame(WINDOW_UPDATE, 0, 1, &1_u32.to_be_bytes());
        let begun = Instant::now();
        while begun.elapsed() < Duration::from_secs(3) {
            // This client does not read either, so the gateway cuts it in the end.
            if stream.write_all(&more.repeat(100)).is_err() {
                break;
            }
        }
    });
}

#[test]
fn more_streams_than_there_may_be_are_refused_one_by_one() {
    let gateway = start("");
    let refused = bounded(&gateway, || {
        let mut stream = connect(&gateway, &[]);
        // Only the headers: each request stays incomplete.
        for id in 0..400 {
            stream.write_all(&frame(HEADERS, END_HEADERS, 2 * id + 1, &header_block(&POST))).unwrap();
        }
        stream.write_all(&frame(PING, 0, 0, b"12345678")).unwrap();
        let mut refused = 0;
        loop {
            let frame = frames::read_frame(&mut stream).expect("the connection ended");
            match frame.kind {
                // REFUSED_STREAM: the client may retry.
                RST_STREAM => {
                    assert_eq!(frames::error_code(&frame), 7);
                    refused += 1;
                }
                PING if frame.flags == 1 && refused >= 144 => return refused,
                _ => {}
            }
            if refused == 144 {
                return refused;
            }
        }
    });
    assert_eq!(refused, 400 - 256);
}

/// hyper leaves a body in an answer to HEAD here, and clients end the stream for that.
#[test]
fn an_answer_to_head_has_a_length_and_no_body() {
    let gateway = start("");
    for path in ["/v1/models", "/v1/nothing", "/healthz"] {
        let mut stream = connect(&gateway, &[]);
        let headers =
            [(":method", "HEAD"), (":scheme", "http"), (":path", path), (":authority", "localhost")];
        stream.write_all(&frame(HEADERS, END_HEADERS | END_STREAM, 1, &header_block(&headers))).unwrap();
        assert_eq!(answered(&mut stream, 1), "empty", "{path}");
    }
}

/// Returns the answer on a stream: the text of its body, `empty`, `reset` or `closed`.
fn answered(stream: &mut TcpStream, id: u32) -> String {
    let mut text = String::new();
    while let Some(frame) = frames::read_frame(stream) {
        match frame.kind {
            RST_STREAM if frame.stream == id && text.is_empty() => return "reset".to_owned(),
            HEADERS if frame.stream == id => {}
            DATA if frame.stream == id => text += &String::from_utf8_lossy(&frame.payload),
            _ => continue,
        }
        if frame.flags & END_STREAM != 0 {
            return if text.is_empty() { "empty".to_owned() } else { text };
        }
    }
    "closed".to_owned()
}

type HeaderFields<'a> = Vec<(&'a str, &'a str)>;

/// Each request is alone on a connection, and its answer contains this text.
#[test]
fn what_cannot_be_a_request_is_refused() {
    let recorded = RecordingGateway::start("");
    let body = "{\"model\":\"m\",\"x\":\"a\"}";
    let length = body.len().to_string();
    let and = |more: &[(&'static str, &'static str)]| [&POST[..], more].concat();
    let but = |name: &str, value: &'static str| -> Vec<(&'static str, &'static str)> {
        POST.into_iter().map(|(n, v)| (n, if n == name { value } else { v })).collect()
    };
    const SERVED: &str = "\"x\":\"a\"";
    let rows: Vec<(&str, HeaderFields<'_>, &[&str])> = vec![
        ("a request", POST.to_vec(), &[SERVED]),
        ("te: trailers", and(&[("te", "trailers")]), &[SERVED]),
        ("its length", [&POST[..], &[("content-length", length.as_str())]].concat(), &[SERVED]),
        ("a Host that agrees", and(&[("host", "localhost")]), &[SERVED]),
        ("te: gzip", and(&[("te", "gzip")]), &["reset"]),
        ("connection", and(&[("connection", "close")]), &["reset"]),
        ("keep-alive", and(&[("keep-alive", "timeout=5")]), &["reset"]),
        ("proxy-connection", and(&[("proxy-connection", "close")]), &["reset"]),
        ("transfer-encoding", and(&[("transfer-encoding", "chunked")]), &["reset"]),
        ("upgrade", and(&[("upgrade", "websocket")]), &["reset"]),
        ("a name in capitals", and(&[("X-A", "1")]), &["reset", "closed"]),
        ("a name with a space", and(&[("x a", "1")]), &["reset", "closed"]),
        ("a name with a colon", and(&[("x:a", "1")]), &["reset", "closed"]),
        ("an empty name", and(&[("", "1")]), &["reset", "closed"]),
        ("CR LF in a value", and(&[("x-a", "1\r\nx-b: 2")]), &["reset", "closed"]),
        ("LF in a value", and(&[("x-a", "1\nx-b: 2")]), &["reset", "closed"]),
        ("NUL in a value", and(&[("x-a", "1\0")]), &["reset", "closed"]),
        ("a length that is too small", and(&[("content-length", "3")]), &["reset", "closed"]),
        ("a length that is too large", and(&[("content-length", "999")]), &["reset", "closed"]),
        ("a length that is none", and(&[("content-length", "-1")]), &["reset", "closed"]),
        ("two lengths", and(&[("content-length", "21"), ("content-length", "3")]), &["reset", "closed"]),
        ("two Hosts", and(&[("host", "localhost"), ("host", "localhost")]), &["ambiguous"]),
        ("another Host", and(&[("host", "other")]), &["ambiguous"]),
        ("no path", POST[..3].to_vec(), &["reset"]),
        ("an empty path", but(":path", ""), &["reset"]),
        (
            "a path without a slash",
            but(":path", "v1/chat/completions"),
            &["reset", "ambiguous", "route_not_found"],
        ),
        ("a path with a space", but(":path", "/v1/chat completions"), &["reset"]),
        ("a path with CR LF", but(":path", "/v1/chat/completions HTTP/1.1\r\nx: y"), &["reset", "closed"]),
        ("the asterisk", but(":path", "*"), &["reset", "route_not_found"]),
        (
            "an absolute path",
            but(":path", "http://localhost/v1/chat/completions"),
            &["reset", "route_not_found"],
        ),
        ("the management API", but(":path", "/admin/v1/fleet"), &["route_not_found"]),
        ("no method", POST[1..].to_vec(), &["reset"]),
        ("an empty method", but(":method", ""), &["reset", "closed"]),
        ("a method with a space", but(":method", "POST /admin"), &["reset", "closed"]),
        ("a method of others", but(":method", "post"), &["method_not_allowed"]),
        ("TRACE", but(":method", "TRACE"), &["method_not_allowed"]),
        ("a scheme of others", but(":scheme", "ftp"), &[SERVED, "reset", "ambiguous"]),
        ("two methods", and(&[(":method", "GET")]), &["reset", "closed"]),
        ("two paths", and(&[(":path", "/admin/v1/fleet")]), &["reset", "closed"]),
        ("a pseudo-header after others", [&[("x-a", "1")][..], &POST[..]].concat(), &["reset", "closed"]),
        ("an unknown pseudo-header", and(&[(":x", "1")]), &["reset", "closed"]),
        (":status", and(&[(":status", "200")]), &["reset", "closed"]),
        (
            "an extended CONNECT",
            [&[(":protocol", "websocket")][..], &but(":method", "CONNECT")].concat(),
            &["reset", "closed"],
        ),
        ("CONNECT", vec![(":method", "CONNECT"), (":authority", "h:443")], &["method_not_allowed", "reset"]),
    ];
    let mut failed = Vec::new();
    for (name, headers, expected) in &rows {
        let before = recorded.seen().len();
        let mut stream = connect(&recorded.gateway, &[]);
        let mut bytes = frame(HEADERS, END_HEADERS, 1, &header_block(headers));
        bytes.extend(frame(DATA, END_STREAM, 1, body.as_bytes()));
        drop(stream.write_all(&bytes));
        let got = answered(&mut stream, 1);
        let seen = recorded.seen().split_off(before);
        let right = expected.iter().any(|text| got.contains(text));
        let forwarded = usize::from(got.contains(SERVED));
        if !right || seen.len() != forwarded || seen.iter().any(|request| !request.ends_with(body)) {
            failed.push(format!("{name}: {got}\n  engine {seen:?}"));
        }
    }
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), rows.len(), failed.join("\n"));
    println!("{} rows", rows.len());
    assert_eq!(recorded.gateway.leases(), 0);
}

#[test]
fn what_offends_behind_a_proxy_on_this_machine_locks_nobody_out() {
    let gateway = start("limits: {offencesPerAddress: 5}");
    for _ in 0..30 {
        assert_eq!(gateway.client().raw("nonsense\r\n\r\n").status, 400);
    }
    assert_eq!(gateway.client().get("/healthz").status, 200);
}
