//! The same bytes to hyper's server and to ours: both see the same requests with the same bodies, refuse the same heads
//! with the same status, and keep the same connections open. `make soak` sends a million connections; the gate sends a
//! sample by the day (`ROUSE_DAY`).
//!
//! Ours is stricter in these cases, and in no others ([`STRICTER_HEADS`], [`STRICTER_BODIES`]):
//!
//! * a Transfer-Encoding other than a single `chunked`: hyper also takes lists that end in it, such as `gzip, chunked`,
//!   and several fields. Another reader may not, and finds another end of the body;
//! * HTTP/2's preface is answered with 400, and so is a bad head that it follows; hyper closes the connection without
//!   an answer;
//! * a chunk's size of more than 16 digits: hyper takes any number of leading zeros;
//! * a trailer with a bare LF: hyper takes it as the end of a line, or of all lines.

use std::{
    convert::Infallible,
    io::{self, Write as _},
};

use http_body_util::{BodyExt as _, Full};
use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use rouse_testing::sample;
use tokio::io::{AsyncRead, AsyncWrite};

use super::*;
use crate::server::{
    chunked::{BARE_LINE_END, SIZE_TOO_LONG},
    head::{CODING_REFUSED, HTTP2_REFUSED},
};

const HTTP2_PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const STRICTER_HEADS: [&str; 2] = [CODING_REFUSED, HTTP2_REFUSED];
const STRICTER_BODIES: [&str; 2] = [SIZE_TOO_LONG, BARE_LINE_END];

/// Small, so that generated requests reach the limits. hyper counts in the same way.
const MAX_HEAD_BYTES: usize = 600;
const MAX_HEADERS: usize = 12;

/// A connection's events as its service and its client see them.
#[derive(Debug, Default, PartialEq, Eq)]
struct Seen {
    requests: Vec<SeenRequest>,
    /// The status of a refused head.
    refused: Option<u16>,
    is_closed: bool,
}

#[derive(Debug, PartialEq, Eq)]
struct SeenRequest {
    line: String,
    headers: Vec<(String, Vec<u8>)>,
    /// `None`: the body is not complete, and will not be.
    body: Option<Vec<u8>>,
}

impl SeenRequest {
    fn new(parts: &http::request::Parts, body: Option<Vec<u8>>) -> Self {
        let mut headers: Vec<_> =
            parts.headers.iter().map(|(name, value)| (name.to_string(), value.as_bytes().to_vec())).collect();
        headers.sort();
        let line = format!("{} {} {:?}", parts.method, parts.uri, parts.version);
        Self { line, headers, body }
    }
}

/// A client that sends its pieces, one per read, and then waits.
#[derive(Debug, Default)]
struct ScriptedIo {
    pieces: VecDeque<Vec<u8>>,
    received: Rc<RefCell<Vec<u8>>>,
}

impl ScriptedIo {
    fn read(&mut self, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Some(mut piece) = self.pieces.pop_front() else { return Poll::Pending };
        let rest = piece.split_off(piece.len().min(buf.remaining()));
        buf.put_slice(&piece);
        if !rest.is_empty() {
            self.pieces.push_front(rest);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for ScriptedIo {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.read(buf)
    }
}

impl AsyncWrite for ScriptedIo {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.received.borrow_mut().extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// The same client for our server.
struct SharedScript(RefCell<ScriptedIo>);

impl ServerIo for SharedScript {
    fn poll_read(&self, _: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.0.borrow_mut().read(buf)
    }

    fn poll_write(&self, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(&self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// Polls until it is ready, or waits for the client.
fn poll_to_rest<T>(mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> Option<T> {
    let flag = Arc::<WakeFlag>::default();
    let waker = Waker::from(Arc::clone(&flag));
    for _ in 0..MAX_POLLS {
        if let Poll::Ready(end) = poll(&mut Context::from_waker(&waker)) {
            return Some(end);
        }
        if !flag.take() {
            return None;
        }
    }
    panic!("a connection that is woken again and again");
}

fn by_hyper(pieces: &[&[u8]]) -> Seen {
    let requests = Rc::<RefCell<Vec<SeenRequest>>>::default();
    let (seen, received) = (Rc::clone(&requests), Rc::default());
    let service = service_fn(move |request: Request<hyper::body::Incoming>| {
        let seen = Rc::clone(&seen);
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.ok().map(|body| body.to_bytes().to_vec());
            seen.borrow_mut().push(SeenRequest::new(&parts, body));
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from_static(b"ok"))))
        }
    });
    let io = ScriptedIo {
        pieces: pieces.iter().map(|piece| piece.to_vec()).collect(),
        received: Rc::clone(&received),
    };
    let mut connection = Box::new(
        http1::Builder::new()
            .max_header_size(MAX_HEAD_BYTES)
            .max_headers(MAX_HEADERS)
            .serve_connection(TokioIo::new(io), service),
    );
    let is_closed = poll_to_rest(|cx| Pin::new(&mut *connection).poll(cx)).is_some();
    drop(connection);
    let requests = Rc::into_inner(requests).unwrap().into_inner();
    // hyper refuses a head with an empty response of its own, behind those of the service.
    let received = String::from_utf8_lossy(&received.borrow()).into_owned();
    let statuses: Vec<u16> = received
        .split("HTTP/1.")
        .filter_map(|response| response.get(2..5)?.parse().ok())
        .filter(|status| *status != 100)
        .collect();
    Seen { refused: statuses.get(requests.len()).copied(), requests, is_closed }
}

/// Returns our view, and why ours refused a head or a body.
fn by_ours(pieces: &[&[u8]], pool: &ConnectionPool) -> (Seen, Option<&'static str>) {
    let requests = Rc::<RefCell<Vec<SeenRequest>>>::default();
    let reason = Rc::<Cell<Option<&'static str>>>::default();
    let (seen, why) = (Rc::clone(&requests), Rc::clone(&reason));
    let service = move |request: Request<Http1RequestBody<SharedScript>>| {
        let (seen, why) = (Rc::clone(&seen), Rc::clone(&why));
        async move {
            let (parts, body) = request.into_parts();
            let body = body.collect().await.map(|body| body.to_bytes().to_vec());
            if let Err(RequestBodyError::Malformed(reason)) = body {
                why.set(Some(reason));
            }
            seen.borrow_mut().push(SeenRequest::new(&parts, body.ok()));
            Response::new(TestBody::text("ok"))
        }
    };
    let script =
        ScriptedIo { pieces: pieces.iter().map(|piece| piece.to_vec()).collect(), received: Rc::default() };
    let limits =
        Http1Limits { max_head_bytes: MAX_HEAD_BYTES, max_headers: MAX_HEADERS, ..Http1Limits::default() };
    let peer = Rc::new(SharedScript(RefCell::new(script)));
    let mut connection = Http1Connection::new(peer, service, limits, pool.clone(), Rc::default());
    let end = poll_to_rest(|cx| connection.poll(cx));
    drop(connection);
    let refused = match &end {
        Some(Http1End::Refused(refusal)) => {
            if let HeadRefusal::Malformed(why) = *refusal {
                reason.set(Some(why));
            }
            Some(refusal.status().as_u16())
        }
        _ => None,
    };
    let requests = Rc::into_inner(requests).unwrap().into_inner();
    (Seen { requests, refused, is_closed: end.is_some() }, reason.get())
}

/// Checks that ours is stricter than hyper for this reason: both saw the same until ours refused.
fn is_stricter(hyper: &Seen, ours: &Seen, why: &'static str) -> bool {
    if STRICTER_HEADS.contains(&why) {
        return ours.refused == Some(400) && hyper.requests.starts_with(&ours.requests);
    }
    let Some((refused, before)) = ours.requests.split_last() else { return false };
    STRICTER_BODIES.contains(&why)
        && refused.body.is_none()
        && ours.is_closed
        && hyper.requests.starts_with(before)
        && hyper.requests.get(before.len()).is_none_or(|same| same.line == refused.line)
}

/// Checks that both refused the same head, which hyper does without an answer where HTTP/2's preface follows it.
fn is_silent_refusal(hyper: &Seen, ours: &Seen, wire: &[u8]) -> bool {
    let has_preface = wire.windows(HTTP2_PREFACE.len()).any(|piece| piece == HTTP2_PREFACE);
    let is_silent = hyper.refused.is_none() && hyper.is_closed && ours.refused.is_some() && ours.is_closed;
    has_preface && is_silent && hyper.requests == ours.requests
}

fn compare(pieces: &[&[u8]], pool: &ConnectionPool) -> Result<(), String> {
    let (hyper, (ours, why)) = (by_hyper(pieces), by_ours(pieces, pool));
    let wire = pieces.concat();
    if hyper == ours
        || why.is_some_and(|why| is_stricter(&hyper, &ours, why))
        || is_silent_refusal(&hyper, &ours, &wire)
    {
        return Ok(());
    }
    let wire = String::from_utf8_lossy(&wire).into_owned();
    Err(format!("{wire:?}\nhyper: {hyper:#?}\nours: {ours:#?} {why:?}"))
}

/// A small generator of numbers (splitmix64): a case takes a microsecond, where proptest's strategies take many.
struct CaseNumbers(u64);

impl CaseNumbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).unwrap()
    }

    fn one_in(&mut self, cases: usize) -> bool {
        self.below(cases) == 0
    }

    fn pick<'a>(&mut self, from: &[&'a str]) -> &'a str {
        from[self.below(from.len())]
    }
}

const METHODS: &[&str] = &["GET", "POST", "POST", "HEAD", "OPTIONS", "PROPFIND", "get", "G@T"];
const TARGETS: &[&str] = &[
    "/",
    "/a",
    "/v1/x?y=z",
    "*",
    "http://h/a",
    "https://h:1/a?b",
    "h:443",
    "",
    "//a",
    "/a b",
    "/\u{e9}",
    "/a#b",
    "http://",
    "/%zz",
];
const VERSIONS: &[&str] =
    &["HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.1", "HTTP/1.0", "HTTP/1.2", "HTTP/2.0", "http/1.1"];
const LINE_ENDS: [&str; 8] = ["\r\n", "\r\n", "\r\n", "\r\n", "\r\n", "\n", "\r", "\r\r\n"];
const FIELDS: &[&str] = &[
    "Host: h",
    "Host: h",
    "Host: ",
    "X-A: b",
    "x-a:b",
    "X-A :b",
    " X-A: b",
    "X-A: b\r\n c",
    "X-A",
    ": b",
    "X-A: \u{e9}",
    "X-A: \0",
    "X A: b",
    "Accept: */*",
    "Connection: close",
    "Connection: keep-alive",
    "Connection: x , Close",
    "Connection: \u{e9}, close",
    "Expect: 100-continue",
    "Expect: 100-Continue",
    "Expect: x",
    "Upgrade: websocket",
    "Content-Length: 3",
    "Content-Length: 3",
    "Content-Length: 5",
    "Content-Length: 0",
    "Content-Length: 03",
    "Content-Length: +3",
    "Content-Length: 3, 3",
    "Content-Length: ",
    "Content-Length: 18446744073709551614",
    "Content-Length: 18446744073709551616",
    "TE: trailers",
    "Trailer: x",
];
const CODINGS: &[&str] = &[
    "chunked",
    "chunked",
    "chunked",
    "chunked",
    "Chunked",
    " chunked\t",
    "gzip, chunked",
    "chunked, gzip",
    "gzip",
    "identity",
    "",
    "chunked,",
    "chunked, chunked",
    "x chunked",
];
const SIZES: &[&str] = &[
    "3",
    "3",
    "3",
    "03",
    "3 ",
    "3\t",
    "3;a=b",
    "3 ;a",
    "x",
    "",
    "-3",
    "0x3",
    "10000000000000000",
    "00000000000000003",
    "3;a\nb",
    "3\n",
];
const TRAILERS: &[&str] = &[
    "",
    "",
    "",
    "",
    "X: y\r\n",
    "X: y\n",
    "X y\r\n",
    "X: y\r\n z\r\n",
    "\n",
    "X: \0\r\n",
    "X: y\rz\r\n",
    ": y\r\n",
];
const PIECES: &[&str] = &[
    "\r",
    "\n",
    "\r\n",
    "\r\n\r\n",
    " ",
    "\t",
    "\0",
    ":",
    ",",
    ";",
    "0\r\n\r\n",
    "GET / HTTP/1.1\r\n\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Content-Length: 3\r\n",
    "chunked",
    "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
];

/// Appends a request, nearly valid.
fn write_request(numbers: &mut CaseNumbers, wire: &mut Vec<u8>) {
    let end = if numbers.one_in(6) { numbers.pick(&LINE_ENDS) } else { "\r\n" };
    if numbers.one_in(10) {
        wire.extend_from_slice(end.as_bytes());
    }
    let (method, target, version) = if numbers.one_in(3) {
        (numbers.pick(METHODS), numbers.pick(TARGETS), numbers.pick(VERSIONS))
    } else {
        ("POST", "/a", "HTTP/1.1")
    };
    write!(wire, "{method} {target} {version}{end}Host: h{end}").unwrap();
    let is_chunked = numbers.one_in(2);
    let coding = if numbers.one_in(3) { numbers.pick(CODINGS) } else { "chunked" };
    let coding_at = numbers.below(3);
    for at in 0..3 {
        if is_chunked && at == coding_at {
            write!(wire, "Transfer-Encoding: {coding}{end}").unwrap();
        } else if numbers.one_in(2) {
            write!(wire, "{}{end}", numbers.pick(FIELDS)).unwrap();
        }
    }
    if numbers.one_in(40) {
        (0..numbers.below(14)).for_each(|n| write!(wire, "X-{n}: y{end}").unwrap());
    }
    if numbers.one_in(40) {
        write!(wire, "X-Long: {}{end}", "y".repeat(400 + numbers.below(300))).unwrap();
    }
    if !is_chunked && numbers.one_in(2) {
        write!(wire, "Content-Length: 3{end}").unwrap();
    }
    wire.extend_from_slice(end.as_bytes());
    if is_chunked {
        for _ in 0..numbers.below(3) {
            let size = if numbers.one_in(4) { numbers.pick(SIZES) } else { "3" };
            write!(wire, "{size}\r\nabc\r\n").unwrap();
        }
        if numbers.one_in(60) {
            write!(wire, "1;{}\r\na\r\n", "e".repeat(16_380 + numbers.below(8))).unwrap();
        }
        let mut trailers = numbers.pick(TRAILERS).to_owned();
        if numbers.one_in(20) {
            trailers = trailers.repeat(numbers.below(16));
        }
        if numbers.one_in(20) {
            trailers += &format!("X: {}\r\n", "y".repeat(580 + numbers.below(30)));
        }
        write!(wire, "0\r\n{trailers}\r\n").unwrap();
    } else {
        wire.extend_from_slice(b"abc");
    }
}

fn mutate(numbers: &mut CaseNumbers, wire: &mut Vec<u8>) {
    let at = numbers.below(wire.len() + 1);
    match numbers.below(5) {
        0 => {
            if let Some(byte) = wire.get_mut(at) {
                *byte = numbers.next().to_le_bytes()[0];
            }
        }
        1 => {
            let piece = numbers.pick(PIECES);
            drop(wire.splice(at..at, piece.bytes()));
        }
        2 => drop(wire.drain(at..(at + numbers.below(12)).min(wire.len()))),
        3 => {
            let from = numbers.below(wire.len() + 1);
            let piece = wire[from..(from + numbers.below(40)).min(wire.len())].to_vec();
            drop(wire.splice(at..at, piece));
        }
        _ => wire.truncate(at),
    }
}

/// Returns the pieces of one connection's bytes.
fn case(seed: u64) -> Vec<Vec<u8>> {
    let mut numbers = CaseNumbers(seed);
    let mut wire = Vec::new();
    (0..=numbers.below(3)).for_each(|_| write_request(&mut numbers, &mut wire));
    for _ in 0..numbers.below(4) {
        mutate(&mut numbers, &mut wire);
    }
    // Both look at a head that arrives in pieces again once it may be complete.
    wire.extend_from_slice(b"\r\n\r\n");
    let mut pieces = Vec::new();
    for _ in 0..numbers.below(4) {
        let rest = wire.split_off(numbers.below(wire.len()));
        pieces.push(std::mem::replace(&mut wire, rest));
    }
    pieces.push(wire);
    pieces.retain(|piece| !piece.is_empty());
    pieces
}

#[test]
fn hyper_and_ours_accept_and_refuse_the_same() {
    const ALL: u64 = 1_000_000;
    const SAMPLED: u64 = 20_000;
    let pool = ConnectionPool::default();
    let first = sample::first_seed(ALL, SAMPLED);
    println!("cases from {first}");
    for seed in first..first + sample::size(ALL, SAMPLED) {
        let pieces = case(seed);
        let pieces: Vec<&[u8]> = pieces.iter().map(Vec::as_slice).collect();
        if let Err(difference) = compare(&pieces, &pool) {
            panic!("case {seed}: {difference}");
        }
    }
}

/// The list above: hyper accepts each of these, and ours refuses it for the reason given.
#[test]
fn ours_is_stricter_where_the_list_says_so() {
    let (post, pool) = ("POST / HTTP/1.1\r\nhost: h\r\n", ConnectionPool::default());
    let chunked = format!("{post}transfer-encoding: chunked\r\n\r\n");
    for (wire, accepted, reason) in [
        (format!("{post}transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"), 1, CODING_REFUSED),
        (
            format!("{post}transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
            1,
            CODING_REFUSED,
        ),
        (
            format!("{post}transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"),
            1,
            CODING_REFUSED,
        ),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(), 0, HTTP2_REFUSED),
        (format!("{chunked}00000000000000001\r\na\r\n0\r\n\r\n"), 1, SIZE_TOO_LONG),
        (format!("{chunked}1\r\na\r\n0\r\nX: y\n\r\n\r\n"), 1, BARE_LINE_END),
        (format!("{chunked}1\r\na\r\n0\r\n\nX: y\r\n\r\n"), 1, BARE_LINE_END),
    ] {
        let pieces = [wire.as_bytes()];
        let hyper = by_hyper(&pieces);
        let whole = hyper.requests.iter().filter(|request| request.body.is_some()).count();
        assert_eq!((whole, hyper.refused), (accepted, None), "{wire:?}: {hyper:?}");
        let (ours, why) = by_ours(&pieces, &pool);
        assert_eq!(why, Some(reason), "{wire:?}: {ours:?}");
        assert!(is_stricter(&hyper, &ours, reason), "{wire:?}: {hyper:?} {ours:?}");
        assert!(ours.requests.iter().all(|request| request.body.is_none()));
    }
}
