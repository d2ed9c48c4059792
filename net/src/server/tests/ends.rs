//! Ends of a connection that a request does not ask for: refusals, drains, broken responses.

use std::future::{pending, ready};

use http::{HeaderValue, header};

use super::*;

#[test]
fn a_refused_head_is_left_to_the_caller_after_all_earlier_answers() {
    let many = "a: b\r\n".repeat(9);
    let large = format!("a: {}", "b".repeat(1024));
    let target = format!("/{}", "a".repeat(70_000));
    for (bytes, status) in [
        ("GET / HTTP/1.2\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\na : b\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\na: b\r\n c\r\n\r\n", 400),
        ("GET /\0 HTTP/1.1\r\n\r\n", 400),
        ("G(T / HTTP/1.1\r\n\r\n", 400),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\ncontent-length: +1\r\n\r\n", 400),
        (&format!("GET / HTTP/1.1\r\n{many}\r\n"), 431),
        (&format!("GET / HTTP/1.1\r\n{large}\r\n\r\n"), 431),
        (&format!("GET / HTTP/1.1\r\n{large}"), 431),
        (&format!("GET {target} HTTP/1.1\r\n\r\n"), 431),
        (&"\r\n".repeat(512), 431),
    ] {
        for cut in [1, 7, bytes.len()] {
            let mut server = TestServer::new(echo);
            server.send("GET /a HTTP/1.1\r\n\r\n");
            for piece in bytes.as_bytes().chunks(cut) {
                server.send(piece);
            }
            let start: String = bytes.chars().take(40).collect();
            assert!(server.received().ends_with("GET /a "), "{start:?}");
            match &server.end {
                Some(Http1End::Refused(refusal)) => {
                    assert_eq!(refusal.status(), status, "{start:?}: {refusal}")
                }
                other => panic!("{start:?} by {cut}: {other:?}"),
            }
            assert!(!server.client.was_shut_down.get(), "the answer follows");
        }
    }
}

#[test]
fn an_idle_connection_closes_at_once_and_a_busy_one_after_its_exchange() {
    let closed = |server: &TestServer| matches!(server.end, Some(Http1End::Closed { request_unread: false }));
    for begins in ["", "\r\n", "GET / HTTP/1.1\r\n\r\n"] {
        let mut server = TestServer::new(echo);
        server.send(begins);
        server.connection.close();
        server.poll();
        assert!(closed(&server) && server.client.was_shut_down.get(), "{begins:?}: {:?}", server.end);
    }
    // A request that has arrived, even in part, is served.
    let mut server = TestServer::new(echo);
    server.send("GET / HT");
    assert_eq!(server.connection.phase(), Http1Phase::ReadingHead);
    server.connection.close();
    server.poll();
    assert!(server.end.is_none());
    server.send("TP/1.1\r\n\r\nGET /b HTTP/1.1\r\n\r\n");
    assert_eq!(server.received(), "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 6\r\n\r\nGET / ");
    assert!(closed(&server));

    let mut server = TestServer::new(echo);
    server.client.sent.borrow_mut().extend(b"GET / HTTP/1.1\r\n\r\n");
    server.connection.close();
    server.poll();
    assert!(server.received().ends_with("GET / ") && closed(&server), "the socket had it already");

    let frames = Rc::<Frames>::default();
    let feed = Rc::clone(&frames);
    let mut server = TestServer::new(move |_| {
        let feed = Rc::clone(&feed);
        async move { Response::new(TestBody::stream(&feed, true)) }
    });
    server.send("GET / HTTP/1.1\r\n\r\n");
    server.connection.close();
    server.poll();
    assert!(server.end.is_none());
    frames.add(None);
    server.run();
    assert!(server.received().ends_with("0\r\n\r\n") && closed(&server));
}

#[test]
fn the_service_ends_the_connection_with_a_header() {
    let mut server = TestServer::new(|_| {
        let mut response = Response::new(TestBody::text("last"));
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        ready(response)
    });
    server.send("GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n");
    assert_eq!(server.received(), "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 4\r\n\r\nlast");
    assert!(matches!(server.end, Some(Http1End::Closed { request_unread: false })), "{:?}", server.end);
}

#[test]
fn a_body_that_fails_cuts_the_response_off() {
    for uses_scratch in [false, true] {
        let frames = Rc::<Frames>::default();
        let feed = Rc::clone(&frames);
        let mut server = TestServer::new(move |_| {
            let feed = Rc::clone(&feed);
            async move { Response::new(TestBody::stream(&feed, uses_scratch)) }
        });
        frames.add(Some(Ok("event")));
        server.send("GET / HTTP/1.1\r\n\r\n");
        frames.add(Some(Err(())));
        server.run();
        assert!(server.received().ends_with("5\r\nevent\r\n"), "without an end");
        assert!(matches!(server.end, Some(Http1End::Truncated)), "{:?}", server.end);
        assert!(!server.client.was_shut_down.get() && frames.dropped.get());
    }
}

#[test]
fn a_client_that_ends_between_two_requests_closes_the_connection() {
    for sent in ["", "GET / HTTP/1.1\r\n\r\n", "\r\n\r\n", "GET / HT"] {
        let mut server = TestServer::new(echo);
        server.send(sent);
        server.send_end();
        let closed = matches!(server.end, Some(Http1End::Closed { request_unread: false }));
        assert!(closed, "{sent:?}: {:?}", server.end);
    }
}

#[test]
fn a_connection_waits_in_the_phase_that_its_deadlines_need() {
    let mut server = TestServer::new(|_| pending());
    let phase = |server: &TestServer| (server.connection.phase(), server.connection.requests());
    assert_eq!(phase(&server), (Http1Phase::Idle, 0));
    server.send("\r\n");
    assert_eq!(phase(&server), (Http1Phase::Idle, 0), "an empty line begins no head");
    server.send("P");
    assert_eq!(phase(&server), (Http1Phase::ReadingHead, 0));
    server.send("OST / HTTP/1.1\r\n");
    assert_eq!(phase(&server), (Http1Phase::ReadingHead, 0));
    server.send("content-length: 1\r\n\r\n");
    assert_eq!(phase(&server), (Http1Phase::Serving, 1));
}
