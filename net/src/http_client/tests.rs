use std::{
    io::{Read as _, Write as _},
    sync::{Mutex, mpsc},
};

use http::{StatusCode, header};
use rouse_testing::{port::ReservedPort, scripted_engine::scripted};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex},
    net::{TcpListener, TcpSocket, TcpStream},
};

use super::*;
use crate::stub_api::EPOCH_HEADER;

const LONG: Duration = Duration::from_secs(30);
const SHORT: Duration = Duration::from_millis(20);
const CHUNKED_HEAD: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";

/// A server that sends these pieces to each request and closes.
fn answering(pieces: Vec<Vec<u8>>) -> SocketAddr {
    // A client that has seen enough closes before the last piece.
    scripted(move |mut stream, _| _ = pieces.iter().try_for_each(|piece| stream.write_all(piece)))
}

/// A server that sends this to each request, and then keeps the connection until the client closes it.
fn holding(sent: &'static str) -> SocketAddr {
    scripted(move |mut stream, _| {
        stream.write_all(sent.as_bytes()).unwrap();
        _ = stream.read_to_end(&mut Vec::new());
    })
}

/// The outcome of a call to a server that sends these pieces and closes.
async fn answered(pieces: Vec<Vec<u8>>) -> Result<(u16, Bytes), HttpClientError> {
    let reply = HttpClient::new(answering(pieces), None).get("/metrics", LONG).await?;
    Ok((reply.status, reply.body))
}

fn sized(body: &[u8]) -> Vec<u8> {
    [format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len()).as_bytes(), body].concat()
}

fn until_close(body: &[u8]) -> Vec<u8> {
    [&b"HTTP/1.0 200 OK\r\n\r\n"[..], body].concat()
}

fn chunked(body: &[u8]) -> Vec<u8> {
    let size = format!("{:x}\r\n", body.len());
    [CHUNKED_HEAD.as_bytes(), size.as_bytes(), body, b"\r\n0\r\n\r\n"].concat()
}

#[tokio::test]
async fn a_body_arrives_whole_in_each_framing() {
    let large = vec![b'x'; 300_000];
    for framed in [sized, until_close, chunked] {
        assert_eq!(answered(vec![framed(&large)]).await, Ok((200, Bytes::from(large.clone()))));
    }
    let chunks = format!("{CHUNKED_HEAD}3\r\none\r\n2\r\n, \r\n3\r\ntwo\r\n0\r\n\r\n");
    let bytewise = chunks.bytes().map(|byte| vec![byte]).collect();
    assert_eq!(answered(bytewise).await, Ok((200, Bytes::from_static(b"one, two"))));
}

#[tokio::test]
async fn interim_answers_are_skipped() {
    let interim = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n";
    let final_answer = "HTTP/1.1 204 No Content\r\n\r\n";
    let together = format!("{interim}{final_answer}").into_bytes();
    assert_eq!(answered(vec![together.clone()]).await, Ok((204, Bytes::new())));
    let bytewise = together.into_iter().map(|byte| vec![byte]).collect();
    assert_eq!(answered(bytewise).await, Ok((204, Bytes::new())));
    assert_eq!(answered(vec![interim.into()]).await, Err(HttpClientError::Broken), "no final answer");
}

#[tokio::test]
async fn a_response_that_is_cut_off_is_broken_and_one_of_another_protocol_is_malformed() {
    for cut in ["", "HTTP/1.1 200 OK\r\ncontent-", "HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nab"] {
        assert_eq!(answered(vec![cut.into()]).await, Err(HttpClientError::Broken), "{cut}");
    }
    let cut_chunk = format!("{CHUNKED_HEAD}3\r\nab");
    assert_eq!(answered(vec![cut_chunk.into()]).await, Err(HttpClientError::Broken));
    let bad_chunk = format!("{CHUNKED_HEAD}x\r\n");
    let endless_head = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(1 << 20));
    for other in ["SSH-2.0-OpenSSH_9.2\r\n", &bad_chunk, &endless_head] {
        assert_eq!(answered(vec![other.into()]).await, Err(HttpClientError::Malformed), "{other:.40}");
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_an_error_that_names_the_limit() {
    for framed in [sized, until_close, chunked] {
        let (fits, over) = (vec![b'x'; 10], vec![b'x'; 11]);
        for (body, expected) in [(fits, Ok(10)), (over, Err(HttpClientError::BodyTooLarge(10)))] {
            let client = HttpClient::new(answering(vec![framed(&body)]), None);
            let request = Request::get("/").body(Bytes::new()).unwrap();
            let reply = client.send(request, 10, LONG).await;
            assert_eq!(reply.map(|reply| reply.body.len()), expected);
        }
    }
    assert!(HttpClientError::BodyTooLarge(10).to_string().contains("limit of 10 bytes"));
    let endless = answered(vec![until_close(&vec![b'x'; MAX_BODY_BYTES + 1])]).await;
    assert_eq!(endless, Err(HttpClientError::BodyTooLarge(MAX_BODY_BYTES)));
}

#[tokio::test]
async fn the_deadline_covers_the_connection() {
    // Connections to a listener with a full backlog wait for room.
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(([127, 0, 0, 1], 0).into()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(connected) = time::timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        waiting.push(connected.unwrap());
        assert!(waiting.len() < 100, "the backlog has an end");
    }
    let late = HttpClient::new(address, None).get("/", SHORT).await;
    assert_eq!(late.err(), Some(HttpClientError::Timeout));
}

#[tokio::test]
async fn the_deadline_covers_the_head() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = HttpClient::new(listener.local_addr().unwrap(), None);
    assert_eq!(silent.get("/", SHORT).await.err(), Some(HttpClientError::Timeout));
    let late = silent.stream_lines("/", None, SHORT, 10).await;
    assert_eq!(late.err(), Some(HttpClientError::Timeout));
    // A server that is never silent has no more time.
    let busy = scripted(|mut stream, _| while stream.write_all(b"HTTP/1.1 100 Continue\r\n\r\n").is_ok() {});
    let late = HttpClient::new(busy, None).get("/", SHORT).await;
    assert_eq!(late.err(), Some(HttpClientError::Timeout));
}

#[tokio::test]
async fn the_deadline_covers_the_body() {
    for part in ["HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\npart", "HTTP/1.1 200 OK\r\n\r\npart"] {
        let late = HttpClient::new(holding(part), None).get("/", SHORT).await;
        assert_eq!(late.err(), Some(HttpClientError::Timeout), "{part}");
    }
}

#[tokio::test]
async fn a_server_that_keeps_its_connection_open_delays_no_answer_of_known_length() {
    for sent in [
        "HTTP/1.1 200 OK\r\nconnection: keep-alive\r\ncontent-length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
        // Bytes after the body belong to no answer.
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 500",
    ] {
        let reply = HttpClient::new(holding(sent), None).get("/", LONG).await.unwrap();
        assert_eq!((reply.status, &*reply.body), (200, &b"ok"[..]), "{sent}");
    }
}

/// A response that begins with these bytes, and the half of its server, which can send more and has read nothing.
async fn opened(sent: &str, body: &'static [u8]) -> (ResponseStream, DuplexStream) {
    let (connection, mut server) = duplex(4096);
    server.write_all(sent.as_bytes()).await.unwrap();
    let request = Request::post("/v1/gate").body(Bytes::from_static(body)).unwrap();
    let wire = request::to_wire(&request, "x", "", None).unwrap();
    let opened = ResponseStream::open(Box::new(connection), wire, request.method());
    (opened.await.unwrap(), server)
}

/// A body that is larger than what the connection holds.
const LARGE_BODY: &[u8] = &[b'x'; 64 << 10];

#[tokio::test]
async fn an_early_answer_counts_although_its_server_reads_no_body() {
    let refusal = "HTTP/1.1 413 Content Too Large\r\ncontent-length: 9\r\n\r\ntoo large";
    let (mut response, _server) = opened(refusal, LARGE_BODY).await;
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(response.body(100).await, Ok(Bytes::from_static(b"too large")));

    // A server that closes without reading resets the connection.
    let closing = scripted(move |mut stream, _| stream.write_all(refusal.as_bytes()).unwrap());
    let request = Request::post("/").body(Bytes::from(vec![b'x'; 8 << 20])).unwrap();
    let reply = HttpClient::new(closing, None).send(request, 100, LONG).await.unwrap();
    assert_eq!((reply.status, &*reply.body), (413, &b"too large"[..]));
}

#[tokio::test]
async fn an_answer_counts_although_its_server_has_closed_before_the_request() {
    let (connection, mut server) = duplex(4096);
    server.write_all(b"HTTP/1.1 413 Content Too Large\r\ncontent-length: 0\r\n\r\n").await.unwrap();
    drop(server);
    let wire = Bytes::from_static(b"POST / HTTP/1.1\r\n\r\n");
    let response = ResponseStream::open(Box::new(connection), wire, &Method::POST).await.unwrap();
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
}

#[tokio::test]
async fn a_request_is_sent_whole_although_its_answer_has_begun() {
    let (mut response, mut server) = opened(CHUNKED_HEAD, LARGE_BODY).await;
    let reads = async {
        let mut sent = vec![0; LARGE_BODY.len()];
        server.read_exact(&mut sent).await.unwrap();
        server.write_all(b"4\r\nread\r\n0\r\n\r\n").await.unwrap();
    };
    let (body, ()) = tokio::join!(response.body(100), reads);
    assert_eq!(body, Ok(Bytes::from_static(b"read")));
}

#[tokio::test]
async fn a_read_that_is_dropped_before_a_piece_arrives_loses_nothing() {
    let (mut response, mut server) = opened(&format!("{CHUNKED_HEAD}5\r\none, "), b"").await;
    assert_eq!(response.chunk().await, Ok(Some(Bytes::from_static(b"one, "))));
    server.write_all(b"\r\n3\r").await.unwrap();
    tokio::select! {
        biased;
        piece = response.chunk() => panic!("no piece has arrived: {piece:?}"),
        () = std::future::ready(()) => {}
    }
    server.write_all(b"\ntwo\r\n0\r\n\r\n").await.unwrap();
    assert_eq!(response.body(100).await, Ok(Bytes::from_static(b"two")));
}

/// A server that answers each request with 200, and the requests that it has received.
fn recording() -> (SocketAddr, mpsc::Receiver<String>) {
    let (tx, rx) = mpsc::sync_channel(8);
    let address = scripted(move |mut stream, request| {
        tx.send(String::from_utf8(request).unwrap()).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").unwrap();
    });
    (address, rx)
}

#[tokio::test]
async fn a_request_has_its_headers_and_the_length_of_its_body() {
    let (address, requests) = recording();
    let client = HttpClient::new(address, Some("secret".to_owned()));
    client.post("/v1/gate?x=y", Some(&json!({"a": 1})), LONG).await.unwrap();
    client.get("/health", LONG).await.unwrap();
    client.call(Method::POST, "/v1/become-ready", None, Some(7), LONG).await.unwrap();
    let own = format!("host: {address}\r\nconnection: close\r\nauthorization: Bearer secret\r\n");
    let typed = "content-type: application/json\r\n";
    let posted = format!("POST /v1/gate?x=y HTTP/1.1\r\n{own}{typed}content-length: 7\r\n\r\n{{\"a\":1}}");
    assert_eq!(requests.recv().unwrap(), posted);
    assert_eq!(requests.recv().unwrap(), format!("GET /health HTTP/1.1\r\n{own}\r\n"));
    let epoch = format!("{EPOCH_HEADER}: 7\r\n");
    let ordered = format!("POST /v1/become-ready HTTP/1.1\r\n{own}{epoch}content-length: 0\r\n\r\n");
    assert_eq!(requests.recv().unwrap(), ordered);
}

#[tokio::test]
async fn a_request_of_any_content_goes_to_a_named_host_and_below_a_path() {
    let (address, requests) = recording();
    let origin = BackendOrigin::new("models.example", "/team", None);
    let client = HttpClient::for_host(&format!("localhost:{}", address.port()), None);
    let client = client.with_origin(Some(Arc::new(origin)));
    let request = Request::put("https://ignored.example/v1/x?y=z")
        .header(header::HOST, "ignored")
        .header(header::CONTENT_LENGTH, "9")
        .header(header::TRANSFER_ENCODING, "chunked")
        .header("x-team", "a");
    client.send(request.body(Bytes::from_static(b"spans")).unwrap(), 10, LONG).await.unwrap();
    let expected = "PUT /team/v1/x?y=z HTTP/1.1\r\nhost: models.example\r\nconnection: close\r\nx-team: a\r\n\
        content-length: 5\r\n\r\nspans";
    assert_eq!(requests.recv().unwrap(), expected);

    let client = HttpClient::for_host(&format!("localhost:{}", address.port()), None);
    client.get("/", LONG).await.unwrap();
    let head = requests.recv().unwrap();
    assert!(head.contains(&format!("\r\nhost: localhost:{}\r\n", address.port())), "{head}");
}

#[tokio::test]
async fn a_request_that_cannot_be_written_is_not_sent() {
    let (address, requests) = recording();
    let injected = HttpClient::new(address, Some("secret\r\nx-a: b".to_owned()));
    assert!(matches!(injected.get("/", LONG).await, Err(HttpClientError::InvalidRequest(_))));
    let client = HttpClient::new(address, None);
    assert!(matches!(client.get("/a b", LONG).await, Err(HttpClientError::InvalidRequest(_))));
    client.get("/sent", LONG).await.unwrap();
    assert!(requests.recv().unwrap().starts_with("GET /sent "));
}

#[derive(Debug, Default)]
struct RecordedCalls(Mutex<Vec<(String, Option<u16>)>>);

impl CallObserver for RecordedCalls {
    fn call_ended(&self, method: &Method, path: &str, status: Option<u16>, _: Duration) {
        self.0.lock().unwrap().push((format!("{method} {path}"), status));
    }
}

#[tokio::test]
async fn each_call_is_reported_and_a_refused_connection_has_its_reason() {
    let calls = Arc::new(RecordedCalls::default());
    let (address, _requests) = recording();
    let client = HttpClient::new(address, None).with_observer(Arc::clone(&calls) as Arc<dyn CallObserver>);
    client.get("/health?x=y", LONG).await.unwrap();
    let closed = ReservedPort::bind();
    let client =
        HttpClient::new(closed.address(), None).with_observer(Arc::clone(&calls) as Arc<dyn CallObserver>);
    let error = client.post("/sleep", None, LONG).await.unwrap_err();
    assert!(
        matches!(&error, HttpClientError::Unreachable(reason) if reason.contains("refused")),
        "{error:?}"
    );
    assert_eq!(error.to_string(), "connection failed");
    let expected = [("GET /health?x=y".to_owned(), Some(200)), ("POST /sleep".to_owned(), None)];
    assert_eq!(*calls.0.lock().unwrap(), expected);
}

/// Lines of a response whose bytes arrive in these pieces, with a limit of ten bytes per line.
async fn lines(pieces: &[&str]) -> LineStream {
    let address = answering(pieces.iter().map(|piece| piece.as_bytes().to_vec()).collect());
    HttpClient::new(address, None).stream_lines("/", None, LONG, 10).await.unwrap()
}

#[tokio::test]
async fn lines_come_whole_whatever_pieces_they_were_sent_in_and_one_without_an_end_does_not() {
    let pieces = [CHUNKED_HEAD, "3\r\none\r\n", "7\r\n\ntwo\n\nt\r\n", "6\r\nen int\r\n", "0\r\n\r\n"];
    let mut lines = lines(&pieces).await;
    assert_eq!(lines.status(), 200);
    for expected in ["one", "two", ""] {
        assert_eq!(lines.next().await.unwrap().unwrap(), expected);
    }
    assert_eq!(lines.next().await, Ok(None));
}

#[tokio::test]
async fn a_line_that_is_too_long_is_not_kept() {
    let too_long = Err(HttpClientError::LineTooLong(10));
    let mut ended = lines(&[CHUNKED_HEAD, "b\r\n0123456789\n\r\n", "c\r\n0123456789x\n\r\n"]).await;
    assert_eq!(ended.next().await.unwrap().unwrap(), "0123456789");
    assert_eq!(ended.next().await, too_long);
    let mut endless = lines(&[CHUNKED_HEAD, "b\r\n0123456789x\r\n"]).await;
    assert_eq!(endless.next().await, too_long);
}

#[tokio::test]
async fn lines_of_a_response_that_is_cut_off_end_with_an_error_and_outlive_the_deadline_of_the_head() {
    let mut cut = lines(&[CHUNKED_HEAD, "4\r\none\n\r\n", "3\r\nt"]).await;
    assert_eq!(cut.next().await.unwrap().unwrap(), "one");
    assert_eq!(cut.next().await, Err(HttpClientError::Broken));
    let (tx, rx) = mpsc::sync_channel::<()>(1);
    let rx = Mutex::new(rx);
    let late = scripted(move |mut stream, _| {
        stream.write_all(CHUNKED_HEAD.as_bytes()).unwrap();
        rx.lock().unwrap().recv().unwrap();
        stream.write_all(b"5\r\nlate\n\r\n0\r\n\r\n").unwrap();
    });
    let within = Duration::from_millis(300);
    let mut lines = HttpClient::new(late, None).stream_lines("/", None, within, 10).await.unwrap();
    assert!(time::timeout(within, lines.next()).await.is_err(), "no line was sent");
    tx.send(()).unwrap();
    assert_eq!(lines.next().await.unwrap().unwrap(), "late");
}
