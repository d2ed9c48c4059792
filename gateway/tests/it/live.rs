//! Live handles for tests: a stream that a test reads, and an engine that a test reaches past the gateway.

use std::{
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::{Path, PathBuf},
};

use nix::{sys::signal::Signal, unistd::Pid};
use serde_json::Value;

use crate::support::{
    GatewayProcess, TestClient, TestResponse,
    client::{chat_body, request},
    read,
};

/// All clients share one address, and a gateway without CPU time still holds the connections that closed meanwhile.
pub(crate) const UNLIMITED_CONNECTIONS: &str = "limits: {connectionsPerAddress: 100000}";

/// An exchange whose answer the test has not read to its end.
pub(crate) struct PendingExchange {
    socket: TcpStream,
    bytes: Vec<u8>,
}

impl PendingExchange {
    pub(crate) fn chat(client: &TestClient, model: &str, stream: bool, tokens: u32) -> Self {
        Self::raw(client, &request("/v1/chat/completions", "", &chat_body(model, stream, tokens)))
    }

    pub(crate) fn raw(client: &TestClient, request: &str) -> Self {
        let mut socket = client.connect();
        socket.write_all(request.as_bytes()).unwrap();
        Self { socket, bytes: Vec::new() }
    }

    /// Opens a stream and waits for its first bytes.
    pub(crate) fn streaming(client: &TestClient, model: &str, tokens: u32) -> Self {
        Self::chat(client, model, true, tokens).until("data: ")
    }

    /// Reads on until the answer contains this text.
    pub(crate) fn until(mut self, text: &str) -> Self {
        while !self.text().contains(text) {
            assert!(self.more(), "ended before {text:?}: {}", self.text());
        }
        self
    }

    pub(crate) const fn socket(&self) -> &TcpStream {
        &self.socket
    }

    /// The complete `data:` lines so far.
    pub(crate) fn sse_data(&self) -> Vec<String> {
        let text = self.text();
        let whole = text.rsplit_once("\n\n").map_or("", |(whole, _)| whole);
        whole.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    /// Reads to the end of the connection.
    pub(crate) fn rest(mut self) -> TestResponse {
        while self.more() {}
        TestResponse::parse(&self.bytes).unwrap_or_else(|| panic!("no answer: {}", self.text()))
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    fn more(&mut self) -> bool {
        let mut buffer = [0; 16 << 10];
        match self.socket.read(&mut buffer) {
            Ok(0) => false,
            Ok(n) => {
                self.bytes.extend_from_slice(buffer.get(..n).unwrap());
                true
            }
            Err(e) if e.kind() == ErrorKind::ConnectionReset => false,
            Err(e) => panic!("{e} after {}", self.text()),
        }
    }
}

impl TestResponse {
    /// Whether the engine or the gateway gave the stream up: an error event last, no `[DONE]`, an unclean end.
    pub(crate) fn broke_off_with(&self, code: &str) -> bool {
        let events = self.events();
        let last = events.last().and_then(|event| serde_json::from_str::<Value>(event).ok());
        self.status == 200
            && !self.complete
            && last.is_some_and(|event| event["error"]["code"] == code)
            && !events.iter().any(|event| event == "[DONE]")
    }
}

/// The process of one engine, as the gateway recorded it for adoption.
pub(crate) struct EngineUnderTest {
    pub(crate) pid: i32,
    client: TestClient,
}

impl EngineUnderTest {
    pub(crate) fn of(gateway: &GatewayProcess, id: &str) -> Self {
        let pid = gateway.engine_pid(id);
        let address: SocketAddr =
            adoption_file(&gateway.dir)["engines"][id]["address"].as_str().unwrap().parse().unwrap();
        Self { pid, client: TestClient::new(address) }
    }

    pub(crate) fn counters(&self) -> Value {
        self.client.get("/sim/counters").json()
    }

    /// Sets and clears faults: `{"hang": true}`.
    pub(crate) fn faults(&self, faults: &str) {
        let answer = self.client.post("/sim/faults", faults);
        assert!(matches!(answer.status, 200..=299), "{}", answer.text());
    }

    pub(crate) fn signal(&self, signal: Signal) {
        nix::sys::signal::kill(Pid::from_raw(self.pid), signal).unwrap();
    }

    pub(crate) fn lives(&self) -> bool {
        is_alive(self.pid)
    }
}

/// The file from which a gateway adopts engines.
fn adoption_file(dir: &Path) -> Value {
    serde_json::from_str(&read(&dir.join("state/engines.json"))).unwrap_or_default()
}

/// Whether the process runs. A zombie does not count.
pub(crate) fn is_alive(pid: i32) -> bool {
    let stat = read(&PathBuf::from(format!("/proc/{pid}/stat")));
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}
