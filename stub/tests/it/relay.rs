//! Requests and responses pass unchanged: bytes and framing, in all their forms.

use std::io::{Read as _, Write as _};

use rouse_testing::scripted_engine::{head_length, scripted};

use crate::support::{
    ReservedPort, TestResponse,
    client::chat,
    engine::{echo, sim},
    stub, stub_before,
};

const PATH: &str = "/v1/chat/completions";

#[test]
fn a_stream_is_the_engines_byte_for_byte() {
    let engine = sim("--fixed-ids --ttft 1ms --itl 1ms");
    let stub = stub_before(engine.address, &[]);
    for path in [PATH, "/v1/completions", "/v1/responses", "/v1/messages"] {
        let body = match path {
            "/v1/completions" => r#"{"model":"m","stream":true,"max_tokens":30,"prompt":"x"}"#.to_owned(),
            "/v1/responses" => r#"{"model":"m","stream":true,"max_output_tokens":30,"input":"x"}"#.to_owned(),
            _ => chat(30),
        };
        let direct = engine.client().post(path, &body);
        for client in [stub.relay(), stub.port("proxy")] {
            let passed = client.post(path, &body);
            assert_eq!((passed.status, direct.status), (200, 200), "{path} {}", direct.text());
            assert_eq!(passed.text(), direct.text(), "{path}");
            assert!(passed.complete);
            assert_eq!(passed.header("content-type"), direct.header("content-type"));
        }
    }
    let whole = chat(30).replace("\"stream\":true", "\"stream\":false");
    let (direct, passed) = (engine.client().post(PATH, &whole), stub.relay().post(PATH, &whole));
    assert_eq!(
        (passed.text(), passed.header("content-length")),
        (direct.text(), direct.header("content-length"))
    );
    assert_eq!(stub.relay().get("/metrics").status, 200);
}

/// An engine that sends these bytes, then closes.
fn answers(bytes: &'static str) -> std::net::SocketAddr {
    scripted(move |mut stream, _| stream.write_all(bytes.as_bytes()).unwrap())
}

fn answer(method: &str, bytes: &'static str) -> TestResponse {
    let stub = stub_before(answers(bytes), &[]);
    stub.relay().send(method, if method == "POST" { PATH } else { "/v1/models" }, "")
}

#[test]
fn every_framing_of_an_answer_passes() {
    let length = answer("POST", "HTTP/1.1 201 Made\r\nContent-Length: 5\r\nX-Own: 1\r\n\r\nhello");
    assert_eq!((length.status, length.text().as_str(), length.complete), (201, "hello", true));
    assert_eq!((length.header("content-length"), length.header("x-own")), ("5", "1"));
    let chunked = answer(
        "POST",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2;x=y\r\nhe\r\n3\r\nllo\r\n0\r\nt: 1\r\n\r\n",
    );
    assert_eq!(
        (chunked.text().as_str(), chunked.complete, chunked.trailers.as_str()),
        ("hello", true, "\r\n"),
        "trailers are dropped"
    );
    let closed = answer("POST", "HTTP/1.1 200 OK\r\n\r\nhello");
    assert_eq!((closed.text().as_str(), closed.complete), ("hello", true));
    let old = answer("POST", "HTTP/1.0 200 OK\r\n\r\nhello");
    assert_eq!((old.status, old.text().as_str()), (200, "hello"));
    let none = answer("POST", "HTTP/1.1 204 No Content\r\n\r\n");
    assert_eq!((none.status, none.body.len(), none.header("transfer-encoding")), (204, 0, ""));
    let head = answer("HEAD", "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n");
    assert_eq!((head.status, head.body.len()), (200, 0));
    let interim = "HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
    let interim = answer("POST", interim);
    assert_eq!((interim.status, interim.text().as_str(), interim.header("link")), (200, "ok", ""));
    assert_eq!(interim.interim, [0; 0]);
}

#[test]
fn an_answer_that_breaks_off_never_looks_whole() {
    // hyper may not have sent any byte of a response with a length yet.
    let stub = stub_before(answers("HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nhello"), &[]);
    let short = stub.relay();
    let came = short.open(short.request("POST", PATH, "Connection: close\r\n", "")).all();
    assert!(TestResponse::parse(came.as_bytes()).is_none_or(|answer| !answer.complete), "{came}");
    let chunked = answer("POST", "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n");
    assert!(!chunked.complete);
    let events = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\ndata: {\"half";
    let events = answer("POST", events);
    assert!(!events.complete && events.text().contains("\n\ndata: {\"error\""), "{}", events.text());
    let whole = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: {}\n\ndata: [DONE]\n\n";
    assert_eq!(answer("POST", whole).text(), "data: {}\n\ndata: [DONE]\n\n");
    let nothing = answer("POST", "");
    assert_eq!((nothing.status, nothing.json()["error"]["code"].as_str()), (502, Some("engine_closed")));
    let garbage = answer("POST", "SSH-2.0-x\r\n\r\n");
    assert_eq!(garbage.status, 502);
}

/// Decodes a chunked body up to its last chunk.
fn unchunked(mut body: &str) -> String {
    let mut whole = String::new();
    loop {
        let (size, rest) = body.split_once("\r\n").expect("a chunk's size");
        let size = usize::from_str_radix(size, 16).expect("a size in hexadecimal digits");
        let (data, rest) = rest.split_at(size);
        body = rest.strip_prefix("\r\n").expect("the end of a chunk");
        if size == 0 {
            return whole;
        }
        whole.push_str(data);
    }
}

#[test]
fn a_request_passes_with_its_body_in_every_framing_and_size() {
    let stub = stub_before(echo(), &[]);
    let relay = stub.relay();
    for size in [0, 1, 1000, 64 << 10, (64 << 10) + 1, 1 << 20] {
        let body = "x".repeat(size);
        let came =
            relay.clone().with("Authorization: Bearer k").with("X-Request-Id: a").post(PATH, &body).text();
        let (head, sent) = came.split_once("\r\n\r\n").unwrap();
        assert_eq!(sent.len(), size);
        assert!(head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n"), "{head}");
        assert!(head.contains(&format!("content-length: {size}")) && !head.contains("chunked"), "{head}");
        assert!(head.contains("authorization: Bearer k") && head.contains("x-request-id: a"), "{head}");
    }
    for chunks in [1, 3, 40] {
        let chunk = "y".repeat(5000);
        let mut open = relay.open(format!(
            "POST {PATH} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        ));
        for _ in 0..chunks {
            assert!(open.try_write(format!("1388\r\n{chunk}\r\n")));
        }
        assert!(open.try_write("0\r\n\r\n"));
        let came = open.rest().text();
        // The response is the request as the engine received it.
        let (head, body) = came.split_once("\r\n\r\n").unwrap();
        let chunked = chunks * 5000 > 64 << 10;
        assert_eq!(head.contains("transfer-encoding: chunked"), chunked, "{head}");
        let body = if chunked { unchunked(body) } else { body.to_owned() };
        assert_eq!(body, "y".repeat(chunks * 5000));
    }
}

#[test]
fn a_large_body_is_passed_on_and_not_held() {
    const SIZE: usize = 120 << 20;
    let engine = scripted(|mut stream, came| {
        let mut left = SIZE - (came.len() - head_length(&came).unwrap());
        let mut buffer = vec![0; 1 << 16];
        while left > 0 {
            left -= stream.read(&mut buffer).unwrap();
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok").unwrap();
    });
    let stub = stub_before(engine, &[]);
    let before = stub.memory("Rss");
    let mut open = stub.relay().open(format!(
        "POST {PATH} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {SIZE}\r\n\r\n"
    ));
    let piece = vec![b'x'; 1 << 20];
    let mut most = 0;
    for _ in 0..SIZE >> 20 {
        assert!(open.try_write(&piece));
        most = most.max(stub.memory("Rss"));
    }
    assert_eq!(open.rest().text(), "ok");
    assert!(most < before + (4 << 10), "{before} KiB before and {most} KiB while it passed");
}

#[test]
fn a_body_beyond_the_limit_is_413_and_the_client_can_read_that() {
    let stub = stub_before(echo(), &["--max-body=100Ki"]);
    let relay = stub.relay();
    for size in [100 << 10, (100 << 10) + 1, 8 << 20] {
        let answer = relay.post(PATH, &"x".repeat(size));
        let fits = size == 100 << 10;
        assert_eq!(answer.status, if fits { 200 } else { 413 }, "{size}");
        assert!(fits || answer.json()["error"]["code"] == "body_too_large");
    }
    let chunk = format!("10000\r\n{}\r\n", "x".repeat(1 << 16));
    let head =
        "POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
    let mut open = relay.open(head);
    for _ in 0..4 {
        open.try_write(&chunk);
    }
    assert_eq!(open.rest().status, 413);
    assert_eq!(stub.leases(), 0);
}

#[test]
fn a_connection_is_kept_for_the_next_request_on_both_sides() {
    let engine = sim("--fixed-ids");
    let stub = stub_before(engine.address, &["--relay-threads=1"]);
    let relay = stub.relay();
    let mut open = relay.open("");
    for number in 1..=5 {
        assert!(open.try_write(relay.request("POST", PATH, "", &chat(2))));
        while open.text().matches("data: [DONE]").count() < number {
            assert!(open.more());
        }
    }
    assert!(open.text().matches("HTTP/1.1 200").count() == 5);
    // Two requests at once, like a pipelining client.
    let two = relay.request("POST", PATH, "", &chat(2))
        + &relay.request("POST", PATH, "Connection: close\r\n", &chat(3));
    let text = relay.open(two).all();
    assert_eq!((text.matches("HTTP/1.1 200").count(), text.matches("[DONE]").count()), (2, 2));
}

#[test]
fn without_an_engine_and_with_one_that_is_not_there_it_says_so() {
    let stub = stub(&[]);
    let refused = stub.relay().post(PATH, &chat(1));
    assert_eq!(
        (refused.status, refused.header("x-rouse-not-ready"), refused.header("x-rouse-gated")),
        (503, "1", "")
    );
    assert_eq!(
        (refused.header("retry-after"), &refused.json()["error"]["code"]),
        ("1", &"not_serving".into())
    );
    let nobody = ReservedPort::bind();
    assert_eq!(stub.set_target(nobody.address()), 200);
    let unreachable = stub.relay().post(PATH, &chat(1));
    assert_eq!(
        (unreachable.status, &unreachable.json()["error"]["code"]),
        (502, &"engine_unreachable".into())
    );
    // The error has the form of the requested API.
    let messages = stub.relay().post("/v1/messages", "{}");
    assert_eq!((messages.status, &messages.json()["type"]), (502, &"error".into()));
    // An engine's claim to be a stub does not pass.
    let forged = answer("POST", "HTTP/1.1 503 Busy\r\nX-Rouse-Gated: 1\r\nContent-Length: 0\r\n\r\n");
    assert_eq!((forged.status, forged.header("x-rouse-gated")), (503, ""));
}

#[test]
fn http2_is_not_spoken() {
    let stub = stub_before(echo(), &[]);
    let text = stub.relay().open("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").all();
    assert!(text.is_empty() || text.starts_with("HTTP/1.1 "), "{text}");
}
