//! Measures the CPU cost of one request and one streamed event: the data path of ADR 1, without the rest of the
//! gateway.
//!
//! One thread is the gateway: hyper's server, the `model` probe, a lease, the relay. Another one is client and engine.
//! The gateway thread's CPU time comes from the kernel (`/proc/thread-self/schedstat`), so other load on the machine
//! has little effect. Figures of an unoptimized build are meaningless.
//!
//! `relay_cost request 16 500` and `relay_cost event 8 500` run only one of the two, with the given number of clients,
//! and of requests or events of each client. Count two runs of different length: their difference gives the cost of a
//! unit, without noise.
//!
//! ```sh
//! valgrind --tool=callgrind --separate-threads=yes relay_cost request 16 500
//! ```

#[path = "common/loopback.rs"]
mod loopback;

use std::{convert::Infallible, io, net::SocketAddr, rc::Rc, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Method, Request, Response, uri::PathAndQuery};
use http_body_util::{BodyExt, Either, Full};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::TokioIo;
use rouse::{
    model::EngineId,
    units::{Generation, Millis, Tick},
};
use rouse_net::{
    lease::{Gate, TickClock},
    openai::{ApiSchema, error, routing_fields},
    relay::{
        ConnectionPool, Exchange, RelayBody, RelayTarget, RelayTimeouts, ResponseInspection, UpstreamRequest,
        exchange,
    },
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::Builder,
    sync::Notify,
    time::Instant,
};

use loopback::{ClientLoad, serve_clients};

const CLIENTS: usize = 64;
const REQUESTS: usize = 1000;
const STREAMS: usize = 200;
const EVENTS: usize = 250;
const PACE: Duration = Duration::from_millis(20);

const HEAD: &str = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";

fn main() -> anyhow::Result<()> {
    let load = Builder::new_current_thread().enable_all().build()?;
    let engine = load.block_on(TcpListener::bind("127.0.0.1:0"))?;
    let address = engine.local_addr()?;
    load.spawn(serve_engine(engine));

    let mut args = std::env::args().skip(1);
    let only = args.next();
    let mut number = || args.next().and_then(|word| word.parse().ok());
    let (clients, units): (Option<usize>, Option<usize>) = (number(), number());
    for (unit_name, usually, requests, events) in
        [("request", CLIENTS, units.unwrap_or(REQUESTS), 0), ("event", STREAMS, 1, units.unwrap_or(EVENTS))]
    {
        if only.as_ref().is_some_and(|only| only != unit_name) {
            continue;
        }
        let clients = clients.unwrap_or(usually);
        let load_of_clients =
            ClientLoad { clients, requests, request: request(events), response_end: response_end(events) };
        let spent = serve_clients(&load, load_of_clients, move || gateway(address))?;
        let units = (clients * requests * events.max(1)) as f64;
        println!("{units} {unit_name}s: {:.2} us of CPU per {unit_name}", spent.as_secs_f64() * 1e6 / units);
    }
    Ok(())
}

/// Returns the gateway's handler of connections.
fn gateway(engine: SocketAddr) -> impl FnMut(TcpStream) {
    let gate = Gate::new(None, TickClock::new(Instant::now(), Tick(0)), Arc::new(Notify::new()));
    gate.open();
    let context = Rc::new((ConnectionPool::default(), gate, engine));
    move |socket: TcpStream| {
        let context = Rc::clone(&context);
        tokio::task::spawn_local(async move {
            let service = service_fn(|request| answer(&context, request));
            let connection = http1::Builder::new()
                .writev(false)
                .max_buf_size(16 << 10)
                .serve_connection(TokioIo::new(socket), service);
            drop(connection.await);
        });
    }
}

async fn answer(
    context: &(ConnectionPool, Arc<Gate>, SocketAddr),
    request: Request<Incoming>,
) -> Result<Response<Either<RelayBody<()>, Full<Bytes>>>, Infallible> {
    let (pool, gate, address) = context;
    let (parts, body) = request.into_parts();
    let path = PathAndQuery::from_static("/v1/chat/completions");
    let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
    let stream_requested = routing_fields::peek(&body).map(|head| head.stream);
    let (Ok(stream), Some(lease)) = (stream_requested, gate.take()) else {
        return Ok(error::response(&rouse::fault::Fault::Internal, ApiSchema::OpenAi).map(Either::Right));
    };
    let sent = exchange(
        pool,
        Exchange {
            now: Instant::now(),
            target: RelayTarget {
                engine: EngineId::new("m".into(), 0),
                generation: Generation(1),
                address: *address,
                authorization: None,
                origin: None,
            },
            request: UpstreamRequest {
                method: &Method::POST,
                path: &path,
                headers: &parts.headers,
                request_id: None,
                body: body.into(),
                stream,
                schema: ApiSchema::OpenAi,
                inspection: ResponseInspection::Events,
                wants_load_report: false,
            },
            upload: None,
            lease,
            timeouts: RelayTimeouts {
                connect: Millis::secs(2),
                first_byte: Millis::secs(300),
                non_stream: Millis::secs(600),
                idle: Millis::secs(300),
                exit_wait: Millis::ZERO,
            },
            observer: (),
        },
    );
    Ok(match sent.await {
        Ok(answer) => answer.map(Either::Left),
        Err(failed) => error::response(&failed.fault, ApiSchema::OpenAi).map(Either::Right),
    })
}

/// Returns a request for a short answer, or for so many events.
fn request(events: usize) -> String {
    let filler = "x".repeat(700);
    let body = format!(
        r#"{{"messages":[{{"role":"user","content":"{filler}"}}],"model":"m","stream":{},"max_tokens":{events}}}"#,
        events > 0
    );
    format!("{HEAD}content-length: {}\r\n\r\n{body}", body.len())
}

/// Returns the last bytes of the response.
const fn response_end(events: usize) -> &'static [u8] {
    if events > 0 { b"0\r\n\r\n" } else { b"\"}" }
}

/// Answers every request: with a short JSON document, or with events at an even pace.
async fn serve_engine(listener: TcpListener) {
    while let Ok((mut socket, _)) = listener.accept().await {
        tokio::spawn(async move {
            drop(socket.set_nodelay(true));
            let json = format!(r#"{{"choices":[{{"message":"{}"}}],"x":"y"}}"#, "z".repeat(550));
            let whole = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{json}", json.len());
            loop {
                let mut request = Vec::with_capacity(4096);
                while !request.ends_with(b"}") {
                    if !matches!(socket.read_buf(&mut request).await, Ok(1..)) {
                        return;
                    }
                }
                let sent = if request.windows(13).any(|window| window == b"\"stream\":true") {
                    stream(&mut socket, asked(&request)).await
                } else {
                    socket.write_all(whole.as_bytes()).await
                };
                if sent.is_err() {
                    return;
                }
            }
        });
    }
}

/// How many events a request asks for: its `max_tokens`, which comes last.
fn asked(request: &[u8]) -> usize {
    let digits: Vec<u8> =
        request.iter().rev().skip(1).take_while(|byte| byte.is_ascii_digit()).copied().collect();
    digits.iter().rev().fold(0, |number, digit| number * 10 + usize::from(digit - b'0'))
}

async fn stream(socket: &mut TcpStream, events: usize) -> io::Result<()> {
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    socket.write_all(head.as_bytes()).await?;
    let event = format!("data: {{\"choices\":[{{\"delta\":{{\"content\":\"{}\"}}}}]}}\n\n", "t".repeat(175));
    let chunk = format!("{:x}\r\n{event}\r\n", event.len());
    let mut pace = tokio::time::interval(PACE);
    for _ in 0..events {
        pace.tick().await;
        socket.write_all(chunk.as_bytes()).await?;
    }
    socket.write_all(b"0\r\n\r\n").await
}
