//! Requests and their responses.

use http::{StatusCode, header};

use super::*;

const POST: &str = "POST /a HTTP/1.1\r\nhost: h\r\n";

fn ok(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

#[test]
fn a_head_and_a_body_that_are_ready_are_one_write() {
    let mut server = TestServer::new(echo);
    server.send(format!("{POST}content-length: 3\r\n\r\nabc"));
    assert_eq!((server.received(), server.writes()), (ok("POST /a abc"), 1));
    assert_eq!((server.connection.phase(), server.connection.requests()), (Http1Phase::Idle, 1));
}

/// TLS may hold back what is not flushed.
#[test]
fn a_large_frame_without_framing_is_flushed() {
    const FRAME_BYTES: usize = 20 << 10;
    let frames = Rc::<Frames>::default();
    let sent = Rc::clone(&frames);
    let mut server = TestServer::new(move |_: TestRequest| {
        let length = Some(2 * FRAME_BYTES as u64);
        let body = TestBody { frames: Rc::clone(&sent), length, uses_scratch: false };
        std::future::ready(Response::new(body))
    });
    server.send("GET / HTTP/1.1\r\n\r\n");
    for phase in [Http1Phase::Responding, Http1Phase::Idle] {
        frames.add(Some(Ok(&"x".repeat(FRAME_BYTES))));
        server.run();
        assert_eq!((server.connection.phase(), server.client.is_unflushed.get()), (phase, false));
    }
}

#[test]
fn pipelined_requests_are_answered_in_order_wherever_they_are_cut() {
    let wire = format!(
        "\r\n{POST}content-length: 3\r\n\r\nabc\r\nGET /b HTTP/1.1\r\n\r\n{POST}transfer-encoding: chunked\r\n\r\n\
         2\r\nde\r\n1;x\r\nf\r\n0\r\nx: y\r\n\r\nGET /c HTTP/1.1\r\n\r\n"
    );
    let answers = [ok("POST /a abc"), ok("GET /b "), ok("POST /a def"), ok("GET /c ")].concat();
    for polls_spuriously in [false, true] {
        for cut in 1..wire.len() {
            let mut server = TestServer::new(echo);
            server.polls_spuriously = polls_spuriously;
            let (first, second) = wire.split_at(cut);
            server.send(first);
            server.send(second);
            assert_eq!(server.received(), answers, "cut at {cut}");
            assert_eq!((server.connection.phase(), server.connection.requests()), (Http1Phase::Idle, 4));
        }
    }
    let mut server = TestServer::new(echo);
    wire.as_bytes().chunks(1).for_each(|byte| server.send(byte));
    assert_eq!(server.received(), answers, "byte by byte");
    let mut server = TestServer::new(echo);
    server.send("GET /b HTTP/1.1\r\n\r\n".repeat(100));
    assert_eq!(server.received(), ok("GET /b ").repeat(100), "more than one poll serves");
}

#[test]
fn the_client_is_asked_to_continue_when_its_body_is_read_and_only_then() {
    let interim = "HTTP/1.1 100 Continue\r\n\r\n";
    let head = format!("{POST}expect: 100-Continue\r\ncontent-length: 3\r\n\r\n");
    for polls_spuriously in [false, true] {
        let mut server = TestServer::new(echo);
        server.polls_spuriously = polls_spuriously;
        server.send(&head);
        assert_eq!(server.received(), interim);
        server.send("abc");
        assert_eq!(server.received(), ok("POST /a abc"));
        // The socket accepts a part of the interim response, and the rest precedes the final one.
        server.set_room(10);
        server.send(&head);
        server.send("abc");
        server.set_room(usize::MAX);
        assert_eq!(server.received(), format!("{interim}{}", ok("POST /a abc")));
        server.send(head.replace("HTTP/1.1", "HTTP/1.0"));
        assert_eq!(server.received(), "", "HTTP/1.0 has no interim responses");
    }
    let mut server = TestServer::new(refuse);
    server.send(&head);
    let refusal = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nno";
    assert_eq!(server.received(), refusal);
    assert!(matches!(server.end, Some(Http1End::Closed { request_unread: true })), "{:?}", server.end);
}

#[test]
fn a_body_that_is_not_read_is_skipped_where_that_is_cheap() {
    let mut server = TestServer::new(refuse);
    server.send(format!("{POST}content-length: 3\r\n\r\nabcGET / HTTP/1.1\r\n\r\n"));
    assert_eq!(server.received(), ok("no").repeat(2));
    let mut server = TestServer::new(refuse);
    server.send(format!("{POST}transfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n"));
    assert_eq!(server.received(), ok("no").repeat(2));
    for (lines, part) in [
        ("content-length: 4", "abc"),
        ("content-length: 100000", &*"a".repeat(99_999)),
        ("transfer-encoding: chunked", "1\r\na\r\n0\r\n\r"),
        ("transfer-encoding: chunked", "x\r\n"),
    ] {
        let mut server = TestServer::new(refuse);
        server.send(format!("{POST}{lines}\r\n\r\n{part}"));
        assert!(server.received().contains("\r\nconnection: close\r\n"), "{lines}");
        assert!(matches!(server.end, Some(Http1End::Closed { request_unread: true })), "{:?}", server.end);
        assert!(server.client.was_shut_down.get());
    }
}

/// An engine may refuse a large upload early, while its body is still held.
#[test]
fn an_answer_before_the_end_of_a_body_that_is_still_held_ends_the_connection() {
    let respond = || std::future::ready(Response::new(TestBody::text("no")));
    let request = format!("{POST}content-length: 3\r\n\r\nab");
    let (server, mut body) = server_and_held_body(respond, &request);
    assert!(server.received().contains("\r\nconnection: close\r\n"));
    assert!(matches!(server.end, Some(Http1End::Closed { request_unread: true })), "{:?}", server.end);
    let end = Pin::new(&mut body).poll_frame(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(end, Poll::Ready(Some(Err(RequestBodyError::ExchangeEnded)))), "{end:?}");
}

#[test]
fn a_broken_body_is_an_error_that_ends_the_connection_after_the_answer() {
    let mut server = TestServer::new(echo);
    server.send(format!("{POST}transfer-encoding: chunked\r\n\r\n1\r\nab\r\n0\r\n\r\n"));
    let answer = server.received();
    assert!(
        answer.contains("\r\nconnection: close\r\n") && answer.ends_with("is longer than its size"),
        "{answer}"
    );
    assert!(matches!(server.end, Some(Http1End::Closed { request_unread: true })), "{:?}", server.end);
}

#[test]
fn events_pass_as_they_come_and_as_one_write_each() {
    for uses_scratch in [false, true] {
        for polls_spuriously in [false, true] {
            let frames = Rc::<Frames>::default();
            let feed = Rc::clone(&frames);
            let mut server = TestServer::new(move |_| {
                let feed = Rc::clone(&feed);
                async move { Response::new(TestBody::stream(&feed, uses_scratch)) }
            });
            server.polls_spuriously = polls_spuriously;
            let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
            server.send("GET / HTTP/1.1\r\n\r\n");
            assert_eq!((server.received(), server.writes()), (head.into(), 1), "the head waits for no event");
            assert_eq!(server.connection.phase(), Http1Phase::Responding);
            frames.add(Some(Ok("event")));
            server.run();
            assert_eq!((server.received(), server.writes()), ("5\r\nevent\r\n".into(), 1));
            frames.add(Some(Ok("")));
            frames.add(Some(Ok("0123456789abcdef")));
            server.run();
            assert_eq!((server.received(), server.writes()), ("10\r\n0123456789abcdef\r\n".into(), 1));
            frames.add(None);
            server.run();
            assert_eq!(server.received(), "0\r\n\r\n");
            assert!(frames.dropped.get());
            // The next response is ready with its head: one write for all of it.
            frames.add(Some(Ok("last")));
            frames.add(None);
            server.writes();
            server.send("GET / HTTP/1.1\r\n\r\n");
            assert_eq!((server.received(), server.writes()), (format!("{head}4\r\nlast\r\n0\r\n\r\n"), 1));
        }
    }
}

#[test]
fn frames_of_any_size_pass_whole_to_a_client_that_reads_slowly() {
    for uses_scratch in [false, true] {
        for length in [1, 1000, (16 << 10) + 1, 60_000, 200_000] {
            let frames = Rc::<Frames>::default();
            let feed = Rc::clone(&frames);
            let mut server = TestServer::new(move |_| {
                let feed = Rc::clone(&feed);
                async move { Response::new(TestBody::stream(&feed, uses_scratch)) }
            });
            let payload = "x".repeat(length);
            frames.add(Some(Ok(&payload)));
            frames.add(Some(Ok("more")));
            server.set_room(length.min(40));
            server.send("GET / HTTP/1.1\r\n\r\n");
            assert_eq!(frames.polls.get(), 1, "a client that reads nothing slows its engine");
            let mut received = server.received_raw();
            for _ in 0..3000 {
                server.set_room(77);
                received += &server.received_raw();
            }
            let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n";
            let (head_of, body) = received.split_once("\r\n\r\n").unwrap();
            assert!(head_of.starts_with(head.trim_end()), "{head_of}");
            assert!(body == format!("{length:X}\r\n{payload}\r\n4\r\nmore\r\n"), "{length} {uses_scratch}");
            assert_eq!(server.connection.phase(), Http1Phase::Responding);
        }
    }
}

#[test]
fn a_body_is_held_to_the_length_that_its_head_gives() {
    for uses_scratch in [false, true] {
        for (given, body, whole) in
            [("4", &["ab", "cd"][..], true), ("3", &["ab", "cd"], true), ("5", &["ab", "cd"], false)]
        {
            let frames = Rc::<Frames>::default();
            body.iter().for_each(|frame| frames.add(Some(Ok(frame))));
            frames.add(None);
            let feed = Rc::clone(&frames);
            let mut server = TestServer::new(move |_| {
                let mut response = Response::new(TestBody::stream(&feed, uses_scratch));
                response.headers_mut().insert(header::CONTENT_LENGTH, given.parse().unwrap());
                std::future::ready(response)
            });
            server.send("GET / HTTP/1.1\r\n\r\n");
            let length: usize = given.parse().unwrap();
            let sent: String = body.concat().chars().take(length).collect();
            let received = server.received();
            let expected = format!("HTTP/1.1 200 OK\r\ncontent-length: {given}\r\n\r\n{sent}");
            assert!(if whole { received == expected } else { expected.starts_with(&received) }, "{received}");
            assert_eq!(matches!(server.end, Some(Http1End::Truncated)), !whole, "{:?}", server.end);
        }
    }
}

#[test]
fn old_clients_and_questions_without_a_body_get_what_they_can_read() {
    async fn service(request: TestRequest) -> Response<TestBody> {
        let frames = Rc::<Frames>::default();
        frames.add(Some(Ok("a")));
        frames.add(None);
        let mut response = Response::new(TestBody::stream(&frames, false));
        if request.uri() == "/204" {
            *response.status_mut() = StatusCode::NO_CONTENT;
        } else if request.uri() == "/101" {
            *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        }
        response
    }
    for (request, response, ends) in [
        ("GET / HTTP/1.0", "HTTP/1.0 200 OK\r\nconnection: close\r\n\r\na", true),
        ("GET / HTTP/1.0\r\nconnection: keep-alive", "HTTP/1.0 200 OK\r\nconnection: close\r\n\r\na", true),
        (
            "HEAD / HTTP/1.0\r\nconnection: keep-alive",
            "HTTP/1.0 200 OK\r\nconnection: keep-alive\r\n\r\n",
            false,
        ),
        ("HEAD / HTTP/1.1", "HTTP/1.1 200 OK\r\n\r\n", false),
        ("GET /204 HTTP/1.1", "HTTP/1.1 204 No Content\r\n\r\n", false),
        (
            "GET / HTTP/1.1\r\nconnection: x, close",
            "HTTP/1.1 200 OK\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
            true,
        ),
        (
            "GET /101 HTTP/1.1",
            "HTTP/1.1 500 Internal Server Error\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n\
             1\r\na\r\n0\r\n\r\n",
            true,
        ),
    ] {
        let mut server = TestServer::new(service);
        server.send(format!("{request}\r\n\r\n"));
        assert_eq!(server.received(), response, "{request}");
        assert_eq!(matches!(server.end, Some(Http1End::Closed { request_unread: false })), ends, "{request}");
    }
}
