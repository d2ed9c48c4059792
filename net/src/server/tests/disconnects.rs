//! Clients that disconnect, and wakers of bodies that other tasks read.

use std::future::{pending, poll_fn};

use super::*;

const POST: &str = "POST / HTTP/1.1\r\ncontent-length: 3\r\n\r\n";

/// Notes when it is dropped.
struct DropFlag(Rc<Cell<bool>>);

impl Drop for DropFlag {
    fn drop(&mut self) {
        self.0.set(true);
    }
}

/// A service that reads the body and never answers, and the flag that its future is gone.
fn waiting_server() -> (TestServer, Rc<Cell<bool>>) {
    let dropped = Rc::new(Cell::new(false));
    let flag = Rc::clone(&dropped);
    let server = TestServer::new(move |request: TestRequest| {
        let flag = DropFlag(Rc::clone(&flag));
        async move {
            let _flag = flag;
            drop(read_body(request.into_body()).await);
            pending::<Response<TestBody>>().await
        }
    });
    (server, dropped)
}

#[test]
fn a_client_that_leaves_while_the_service_waits_ends_it_at_once() {
    // A stray line end, and a pipelined request, blind no one.
    for sent in [
        POST,
        "GET / HTTP/1.1\r\n\r\n",
        &format!("{POST}abc"),
        &format!("{POST}abc\r\n"),
        &format!("{POST}abcGET / HTTP/1.1\r\n"),
    ] {
        for apart in [false, true] {
            let (mut server, dropped) = waiting_server();
            if apart {
                sent.as_bytes().chunks(7).for_each(|piece| server.send(piece));
            } else {
                server.send(sent);
            }
            assert_eq!(server.connection.phase(), Http1Phase::Serving, "{sent:?}");
            assert!(!dropped.get() && server.end.is_none());
            server.send_end();
            assert!(matches!(server.end, Some(Http1End::ClientLeft)), "{sent:?}: {:?}", server.end);
            assert!(dropped.get());
        }
    }
}

#[test]
fn a_client_that_leaves_with_too_much_behind_its_request_is_noticed_later() {
    let (mut server, _) = waiting_server();
    server.send("GET / HTTP/1.1\r\n\r\n");
    server.send("x".repeat(65));
    server.send_end();
    assert!(server.end.is_none(), "no more than max_read_ahead_bytes are read");
    assert_eq!(server.client.sent.borrow().len(), 1);
}

#[test]
fn a_client_that_leaves_while_a_stream_waits_ends_it_at_once() {
    for polls_spuriously in [false, true] {
        let frames = Rc::<Frames>::default();
        let feed = Rc::clone(&frames);
        let mut server = TestServer::new(move |_| {
            let feed = Rc::clone(&feed);
            async move { Response::new(TestBody::stream(&feed, true)) }
        });
        server.polls_spuriously = polls_spuriously;
        server.send("GET / HTTP/1.1\r\n\r\n");
        server.send("\r\n");
        frames.add(Some(Ok("event")));
        server.run();
        assert!(server.received().ends_with("5\r\nevent\r\n") && !frames.dropped.get());
        server.send_end();
        assert!(matches!(server.end, Some(Http1End::ClientLeft)), "{:?}", server.end);
        assert!(frames.dropped.get());
    }
}

#[test]
fn a_client_that_leaves_while_it_reads_nothing_is_noticed() {
    let frames = Rc::<Frames>::default();
    let feed = Rc::clone(&frames);
    let mut server = TestServer::new(move |_| {
        let feed = Rc::clone(&feed);
        async move { Response::new(TestBody::stream(&feed, true)) }
    });
    server.set_room(0);
    frames.add(Some(Ok("event")));
    server.send("GET / HTTP/1.1\r\n\r\n");
    server.send_end();
    assert!(matches!(server.end, Some(Http1End::ClientLeft)), "{:?}", server.end);
}

#[test]
fn a_response_that_is_complete_reaches_a_client_that_has_closed_its_sending_half() {
    let mut server = TestServer::new(echo);
    server.set_room(10);
    server.send("GET / HTTP/1.1\r\n\r\n");
    assert_eq!(server.connection.phase(), Http1Phase::Flushing);
    server.send_end();
    server.set_room(usize::MAX);
    assert_eq!(server.received(), "HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nGET / ");
    assert!(matches!(server.end, Some(Http1End::Closed { request_unread: false })), "{:?}", server.end);
}

#[test]
fn a_body_that_ends_early_may_still_be_answered() {
    let mut server = TestServer::new(echo);
    server.send(format!("{POST}ab"));
    server.send_end();
    let answer = server.received();
    assert!(
        answer.contains("\r\nconnection: close\r\n") && answer.contains("disconnected before"),
        "{answer}"
    );
    assert!(matches!(server.end, Some(Http1End::Closed { request_unread: false })), "{:?}", server.end);
}

/// The loop and another task wait for the same socket, which keeps one waker. Whichever it is, both go on.
#[test]
fn a_body_that_another_task_reads_is_woken_when_the_loop_reads_in_its_place() {
    for polls_loop_last in [false, true] {
        let (mut server, mut body) = server_and_held_body(pending, POST);
        let flag = Arc::<WakeFlag>::default();
        let waker = Waker::from(Arc::clone(&flag));
        let mut poll = || Pin::new(&mut body).poll_frame(&mut Context::from_waker(&waker));
        assert!(poll().is_pending());
        if polls_loop_last {
            server.poll();
        }
        server.send("ab");
        assert!(flag.take(), "the body's task is woken");
        assert!(
            matches!(poll(), Poll::Ready(Some(Ok(frame))) if frame.data_ref().is_some_and(|data| data == "ab"))
        );
        assert!(poll().is_pending());
        if polls_loop_last {
            server.poll();
        }
        server.send_end();
        assert!(flag.take());
        assert!(matches!(poll(), Poll::Ready(Some(Err(RequestBodyError::Disconnected)))));
        assert!(matches!(poll(), Poll::Ready(None)));
        server.run();
        assert!(matches!(server.end, Some(Http1End::ClientLeft)), "{:?}", server.end);
    }
}

/// From then on the loop alone waits for the client.
#[test]
fn a_disconnect_is_noticed_after_another_task_has_read_or_dropped_the_body() {
    for reads_all in [false, true] {
        let (mut server, mut body) = server_and_held_body(pending, POST);
        let waker = Waker::from(Arc::<WakeFlag>::default());
        let mut cx = Context::from_waker(&waker);
        assert!(Pin::new(&mut body).poll_frame(&mut cx).is_pending());
        if reads_all {
            server.send("abc");
            assert!(Pin::new(&mut body).poll_frame(&mut cx).is_ready() && body.is_end_stream());
        } else {
            drop(body);
        }
        server.run();
        server.send_end();
        assert!(matches!(server.end, Some(Http1End::ClientLeft)), "{:?}", server.end);
    }
}

#[test]
fn a_body_that_outlives_its_connection_is_woken_and_fails() {
    let (server, mut body) = server_and_held_body(pending, POST);
    let flag = Arc::<WakeFlag>::default();
    let waker = Waker::from(Arc::clone(&flag));
    let mut cx = Context::from_waker(&waker);
    assert!(Pin::new(&mut body).poll_frame(&mut cx).is_pending());
    drop(server);
    assert!(flag.take());
    let end = Pin::new(&mut body).poll_frame(&mut cx);
    assert!(matches!(end, Poll::Ready(Some(Err(RequestBodyError::Disconnected)))));
}

/// A reader must never take a cut body for a whole one.
#[test]
fn a_body_that_outlives_its_exchange_unread_is_woken_and_fails_once() {
    for (framing, part, has_arrived) in [
        ("content-length: 3", "ab", false),
        ("transfer-encoding: chunked", "2\r\nab\r\n", false),
        ("content-length: 3", "abc", true),
        ("transfer-encoding: chunked", "2\r\nab\r\n0\r\n\r\n", true),
    ] {
        let frames = Rc::<Frames>::default();
        let feed = Rc::clone(&frames);
        let respond = move || std::future::ready(Response::new(TestBody::stream(&feed, false)));
        let request = format!("POST / HTTP/1.1\r\n{framing}\r\n\r\n{part}");
        let (mut server, mut body) = server_and_held_body(respond, &request);
        let flag = Arc::<WakeFlag>::default();
        let waker = Waker::from(Arc::clone(&flag));
        let mut cx = Context::from_waker(&waker);
        if !has_arrived {
            let part = Pin::new(&mut body).poll_frame(&mut cx);
            assert!(
                matches!(part, Poll::Ready(Some(Ok(frame))) if frame.data_ref().is_some_and(|d| d == "ab"))
            );
            assert!(Pin::new(&mut body).poll_frame(&mut cx).is_pending());
        }
        frames.add(None);
        server.run();
        assert_eq!(flag.take(), !has_arrived, "{framing}: the task that waits for the body is woken");
        assert!(!body.is_end_stream() && body.size_hint().exact().is_none(), "{framing}");
        let end = Pin::new(&mut body).poll_frame(&mut cx);
        assert!(matches!(end, Poll::Ready(Some(Err(RequestBodyError::ExchangeEnded)))), "{framing}: {end:?}");
        assert!(matches!(Pin::new(&mut body).poll_frame(&mut cx), Poll::Ready(None)));
        assert!(!body.is_end_stream(), "{framing}");
    }
}

#[test]
fn a_body_that_outlives_its_exchange_takes_nothing_of_the_next_one() {
    let body = Rc::new(RefCell::new(None));
    let held = Rc::clone(&body);
    let mut server = TestServer::new(move |request: TestRequest| {
        let held = Rc::clone(&held);
        async move {
            if request.uri() == "/keep" {
                let mut body = request.into_body();
                while poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await.is_some() {}
                *held.borrow_mut() = Some(body);
                return Response::new(TestBody::text("kept"));
            }
            echo(request).await
        }
    });
    server.send("POST /keep HTTP/1.1\r\ncontent-length: 3\r\n\r\nabc");
    server.send("POST /b HTTP/1.1\r\ncontent-length: 3\r\n\r\n");
    let mut body = body.take().unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    assert!(matches!(Pin::new(&mut body).poll_frame(&mut cx), Poll::Ready(None)));
    assert!(body.is_end_stream() && body.size_hint().exact() == Some(0));
    drop(body);
    server.send("def");
    assert!(server.received().ends_with("POST /b def"));
    assert!(server.end.is_none());
}
