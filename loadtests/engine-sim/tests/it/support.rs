//! A running engine, and a client that exposes the raw bytes.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    time::Duration,
};

use rouse_testing::raw_client::TestClient;
pub(crate) use rouse_testing::raw_client::TestResponse;
use serde_json::Value;
use tokio::time::Instant;

pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(10);

pub(crate) struct EngineSimProcess {
    pub(crate) addr: SocketAddr,
    child: Child,
    stderr: ChildStderr,
}

/// Starts an engine with `flags` without waiting for it.
pub(crate) fn spawn(flags: &str) -> Child {
    Command::new(env!("CARGO_BIN_EXE_engine-sim"))
        .args(["--port", "0", "--model", "m"])
        .args(flags.split_whitespace())
        .env_remove("CUDA_VISIBLE_DEVICES")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Waits until a spawned engine listens. An engine that dies first is an `Err` with its exit code and error output.
pub(crate) fn wait_until_listening(mut child: Child) -> Result<EngineSimProcess, (Option<i32>, String)> {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let mut stderr = child.stderr.take().unwrap();
    let Some(addr) = lines.find_map(|line| line.strip_prefix("listening on ")?.parse().ok()) else {
        let mut text = String::new();
        stderr.read_to_string(&mut text).unwrap();
        return Err((child.wait().unwrap().code(), text));
    };
    Ok(EngineSimProcess { addr, child, stderr })
}

pub(crate) fn start(flags: &str) -> EngineSimProcess {
    wait_until_listening(spawn(&format!("--start-time 10ms --profile-time 0 {flags}"))).unwrap()
}

impl EngineSimProcess {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn get(&self, path: &str) -> TestResponse {
        call(self.addr, "GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> TestResponse {
        call(self.addr, "POST", path, body)
    }

    pub(crate) fn set(&self, faults: &str) {
        assert_eq!(self.post("/sim/faults", faults).status, 200, "{faults}");
    }

    pub(crate) fn counters(&self) -> Value {
        self.get("/sim/counters").json()
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.counters()[name].as_u64().unwrap_or_else(|| panic!("no counter {name}"))
    }

    /// Polls until `counter` is `value`.
    pub(crate) fn wait_for_counter(&self, counter: &str, value: u64) {
        let began = Instant::now();
        while self.counter(counter) != value {
            assert!(began.elapsed() < TEST_TIMEOUT, "{counter} never was {value}: {}", self.counters());
        }
    }

    pub(crate) fn kill(&self, signal: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Waits for the exit, and returns the code and the error output.
    pub(crate) fn exit(mut self) -> (ExitStatus, String) {
        let mut text = String::new();
        let status = self.child.wait().unwrap();
        self.stderr.read_to_string(&mut text).unwrap();
        (status, text)
    }
}

impl Drop for EngineSimProcess {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// The streamed chat text.
pub(crate) fn chat_text(answer: &TestResponse) -> String {
    let parse = |event: &String| serde_json::from_str::<Value>(event).ok();
    let content = |event: Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
    answer.events().iter().filter_map(parse).filter_map(content).collect()
}

pub(crate) fn request(method: &str, path: &str, body: &str, more: &str) -> String {
    let length = body.len();
    format!("{method} {path} HTTP/1.1\r\nhost: engine\r\ncontent-length: {length}\r\n{more}\r\n{body}")
}

pub(crate) fn call(addr: SocketAddr, method: &str, path: &str, body: &str) -> TestResponse {
    raw(addr, &request(method, path, body, "connection: close\r\n"))
}

/// Sends bytes as they are and reads until the connection ends.
pub(crate) fn raw(addr: SocketAddr, bytes: &str) -> TestResponse {
    let mut io = connect(addr);
    // An engine may close before it has read the whole request.
    io.write_all(bytes.as_bytes()).ok();
    read(&mut io)
}

pub(crate) fn connect(addr: SocketAddr) -> TcpStream {
    TestClient::new(addr).with_read_timeout(TEST_TIMEOUT).connect()
}

/// Reads a response until its connection ends, even by a reset.
pub(crate) fn read(io: &mut TcpStream) -> TestResponse {
    let mut bytes = Vec::new();
    io.read_to_end(&mut bytes).ok();
    parse(&bytes)
}

pub(crate) fn parse(bytes: &[u8]) -> TestResponse {
    TestResponse::parse(bytes).unwrap_or_else(|| panic!("no head: {bytes:?}"))
}

pub(crate) fn chat(prompt: &str, tokens: u64, stream: bool) -> String {
    format!(
        r#"{{"model":"m","messages":[{{"role":"user","content":"{prompt}"}}],"max_tokens":{tokens},"stream":{stream}}}"#
    )
}

pub(crate) const CHAT: &str = "/v1/chat/completions";

/// Opens a chat stream and returns once its head has arrived.
pub(crate) fn open_stream(addr: SocketAddr, prompt: &str, tokens: u64) -> TcpStream {
    let mut io = connect(addr);
    io.write_all(request("POST", CHAT, &chat(prompt, tokens, true), "").as_bytes()).unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        io.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    io
}
