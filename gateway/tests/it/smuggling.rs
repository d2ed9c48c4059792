//! Requests that two readers could understand differently, sent to the real gateway before an engine that records every
//! byte. The gateway refuses each request, or the engine gets exactly one request with exactly its body. Later bytes on
//! the connection are either served as a request of their own or not read.

use std::{
    io::{Read as _, Write as _},
    net::{TcpListener, TcpStream},
    path::PathBuf,
    time::Duration,
};

use crate::support::{GatewayFixture, GatewayProcess, TestResponse, read, row};

mod rows;

const CONTINUE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

/// A malformed or ambiguous request.
pub(crate) struct SmugglingCase {
    pub(crate) name: &'static str,
    /// The parts to write. Each further part waits for a `100 Continue`.
    pub(crate) parts: Vec<Vec<u8>>,
    /// The statuses of all answers.
    pub(crate) answers: &'static [u16],
    /// The bodies that the engine gets, in order.
    pub(crate) engine: Vec<String>,
    /// Whether the connection serves further requests.
    pub(crate) open: bool,
}

/// A gateway before a model `m` whose engine records every request.
pub(crate) struct RecordingGateway {
    pub(crate) gateway: GatewayProcess,
    file: PathBuf,
}

impl RecordingGateway {
    pub(crate) fn start(settings: &str) -> Self {
        let fixture = GatewayFixture::new(&["2Gi"]).settings(settings);
        let file = fixture.dir().join("recorded");
        let told = ["RECORD_AT=${HOST}:${PORT}", &format!("RECORD_TO={}", file.display())];
        let (command, env, behind) = row::test_engine_command("smuggling::recorder", &told);
        let gateway = fixture
            .model_yaml(&format!(
                r#"  - name: m
    engine:
      kind: custom
      task: none
      command: {command}
      env: {env}
{behind}    memory: {{awake: 64Mi}}
"#
            ))
            .start();
        gateway.wake("m");
        Self { gateway, file }
    }

    /// Returns the requests that reached the engine so far, without the gateway's own probes.
    pub(crate) fn seen(&self) -> Vec<String> {
        let text = read(&self.file);
        let all = text.lines().map(|line| serde_json::from_str::<String>(line).unwrap());
        all.filter(|r| !["GET /health ", "GET /metrics ", "GET /v1/models "].iter().any(|p| r.starts_with(p)))
            .collect()
    }
}

/// Runs the engine when another test starts this binary as one. Among the tests it does nothing.
#[test]
fn recorder() {
    let (Ok(address), Ok(file)) = (std::env::var("RECORD_AT"), std::env::var("RECORD_TO")) else { return };
    let listener = TcpListener::bind(address).unwrap();
    for stream in listener.incoming() {
        let file = file.clone();
        std::thread::spawn(move || record(stream.unwrap(), &file));
    }
}

/// Reads requests one after the other. It records bytes that are no request with a mark in front.
fn record(mut stream: TcpStream, file: &str) {
    let note = |what: &[u8], mark: &str| {
        let text = format!("{mark}{}", String::from_utf8_lossy(what));
        let line = serde_json::to_string(&text).unwrap() + "\n";
        let mut file = std::fs::OpenOptions::new().create(true).append(true).open(file).unwrap();
        file.write_all(line.as_bytes()).unwrap();
    };
    let mut bytes: Vec<u8> = Vec::new();
    let mut buffer = vec![0; 64 << 10];
    loop {
        while let Some(head) = bytes.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4) {
            let text = String::from_utf8_lossy(&bytes[..head]).into_owned();
            if text.contains("\r\nx-early:") {
                let answer =
                    "HTTP/1.1 413 Payload Too Large\r\ncontent-length: 5\r\nconnection: close\r\n\r\nearly";
                drop(stream.write_all(answer.as_bytes()));
                note(text.as_bytes(), "");
                // The sender may still be sending.
                while stream.read(&mut buffer).is_ok_and(|n| n > 0) {}
                return;
            }
            let lengths: Vec<_> = text.lines().filter_map(|l| l.strip_prefix("content-length: ")).collect();
            let length: usize = lengths.first().map_or(0, |length| length.parse().unwrap());
            if bytes.len() < head + length {
                break;
            }
            let request: Vec<u8> = bytes.drain(..head + length).collect();
            note(
                &request,
                if lengths.len() > 1 || text.contains("transfer-encoding") { "AMBIGUOUS " } else { "" },
            );
            let body = &request[head..];
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len());
            drop(stream.write_all(&[answer.as_bytes(), body].concat()));
        }
        match stream.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(n) => bytes.extend_from_slice(&buffer[..n]),
        }
    }
    if !bytes.is_empty() {
        note(&bytes, "CUT ");
    }
}

#[test]
fn nothing_is_forwarded_wrong() {
    let recorded = RecordingGateway::start("limits: {header: 16Ki}");
    let mut failed = Vec::new();
    let rows = rows::rows();
    for row in &rows {
        let before = recorded.seen().len();
        let got = SmugglingResponses::of(&recorded.gateway, row);
        let seen = recorded.seen().split_off(before);
        let statuses: Vec<u16> = got.answers.iter().map(|(status, _)| *status).collect();
        let then = if got.open { "serves on" } else { "closed" };
        println!("{:48} {statuses:?}, {} forwarded, {then}", row.name, seen.len());
        if let Err(why) = got.is_as(row).and_then(|()| forwarded(&seen, row)) {
            failed.push(format!("{}: {why}\n  answers {:?}\n  engine {seen:?}", row.name, got.answers));
        }
    }
    assert!(failed.is_empty(), "{} of {}:\n{}", failed.len(), rows.len(), failed.join("\n"));
    println!("{} rows", rows.len());
    assert_eq!(recorded.gateway.leases(), 0);
}

/// The answers to one case.
struct SmugglingResponses {
    answers: Vec<(u16, String)>,
    /// Whether a further request on the connection was served.
    open: bool,
    /// How many `100 Continue` answers arrived.
    continued: usize,
}

impl SmugglingResponses {
    fn of(gateway: &GatewayProcess, row: &SmugglingCase) -> Self {
        let mut stream = gateway.client().connect();
        stream.set_read_timeout(Some(Duration::from_secs(8))).unwrap();
        let mut got = Self { answers: Vec::new(), open: false, continued: 0 };
        let mut bytes = Vec::new();
        let (first, rest) = row.parts.split_first().unwrap();
        drop(stream.write_all(first));
        for part in rest {
            while !bytes.ends_with(CONTINUE) {
                assert!(more(&mut stream, &mut bytes), "{}: no 100", row.name);
            }
            drop(stream.write_all(part));
        }
        while got.answers.len() < row.answers.len() {
            if let Some(answer) = got.first(&mut bytes) {
                got.answers.push(answer);
            } else if !more(&mut stream, &mut bytes) {
                return got;
            }
        }
        // All other answers arrive before the answer to this request.
        drop(stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"));
        while more(&mut stream, &mut bytes) {}
        while let Some(answer) = got.first(&mut bytes) {
            got.open |= answer == (200, "ok\n".to_owned());
            got.answers.push(answer);
        }
        if got.open {
            got.answers.pop();
        }
        if !bytes.is_empty() {
            got.answers.push((0, String::from_utf8_lossy(&bytes).into_owned()));
        }
        got
    }

    /// Takes the first complete answer off, and the interim answers before it.
    fn first(&mut self, bytes: &mut Vec<u8>) -> Option<(u16, String)> {
        while bytes.starts_with(CONTINUE) {
            bytes.drain(..CONTINUE.len());
            self.continued += 1;
        }
        let head = bytes.windows(4).position(|window| window == b"\r\n\r\n")? + 4;
        let answer = TestResponse::parse(&bytes[..head])?;
        let length: usize = answer.header("content-length").parse().unwrap_or(0);
        if bytes.len() < head + length {
            return None;
        }
        let body = String::from_utf8_lossy(&bytes[head..head + length]).into_owned();
        bytes.drain(..head + length);
        Some((answer.status, body))
    }

    fn is_as(&self, row: &SmugglingCase) -> Result<(), String> {
        let statuses: Vec<u16> = self.answers.iter().map(|(status, _)| *status).collect();
        if statuses != row.answers {
            return Err(format!("expected {:?}", row.answers));
        }
        if self.open != row.open {
            return Err(format!("the connection is {}", if self.open { "open" } else { "closed" }));
        }
        // A client that waits for `100 Continue` must get it, and a client with an unwanted body must not.
        let unwanted = row.engine.is_empty();
        if self.continued < row.parts.len() - 1 || (self.continued > 0 && unwanted) {
            return Err(format!("{} times 100", self.continued));
        }
        let served = self.answers.iter().filter(|(status, _)| *status == 200).map(|(_, body)| body);
        let echoed: Vec<_> = served.filter(|body| body.starts_with('{') && body.contains("\"x\"")).collect();
        if echoed != row.engine.iter().collect::<Vec<_>>() {
            return Err("the answers are not those to these requests".to_owned());
        }
        Ok(())
    }
}

/// Checks that the engine got one request for each body, with that body and a length.
fn forwarded(seen: &[String], row: &SmugglingCase) -> Result<(), String> {
    if seen.len() != row.engine.len() {
        return Err(format!("{} requests reached the engine, not {}", seen.len(), row.engine.len()));
    }
    for (request, body) in seen.iter().zip(&row.engine) {
        let (head, got) = request.split_once("\r\n\r\n").unwrap_or_default();
        if got != body || !head.contains(&format!("content-length: {}", body.len())) {
            return Err(format!("the engine got {request:?}"));
        }
        if !head.starts_with("POST /v1/chat/completions HTTP/1.1\r\n")
            && !head.starts_with("POST /v1/chat/completions?x=1 HTTP/1.1\r\n")
        {
            return Err(format!("the engine was asked {head:?}"));
        }
    }
    Ok(())
}

/// Reads more bytes. Returns false at the end. Unlike `TestExchange::more`, treats a read timeout as the end, so that an
/// unanswered case is a failed row and not a panic.
fn more(stream: &mut TcpStream, bytes: &mut Vec<u8>) -> bool {
    let mut buffer = [0; 16 << 10];
    match stream.read(&mut buffer) {
        Ok(0) | Err(_) => false,
        Ok(n) => {
            bytes.extend_from_slice(&buffer[..n]);
            true
        }
    }
}

#[test]
fn an_engine_that_answers_early_is_heard_and_its_client_reads_the_answer() {
    let recorded = RecordingGateway::start("");
    let body = format!("{{\"model\":\"m\",\"x\":\"{}\"}}", "e".repeat(8 << 20));
    let answer = recorded.gateway.client().post_with("/v1/chat/completions", "x-early: 1\r\n", &body);
    assert_eq!((answer.status, answer.text().as_str()), (413, "early"));
    recorded.gateway.until("the lease is back", Duration::from_secs(5), || recorded.gateway.leases() == 0);
}
