//! A running engine, and a client that exposes the raw bytes.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpStream},
    process::{Child, ChildStderr, Command, ExitStatus, Stdio},
    time::Duration,
};

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

    pub(crate) fn get(&self, path: &str) -> SimTestResponse {
        call(self.addr, "GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> SimTestResponse {
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

#[derive(Debug)]
pub(crate) struct SimTestResponse {
    pub(crate) status: u16,
    /// The final head, after the informational ones.
    pub(crate) head: String,
    /// Status codes of the informational responses.
    pub(crate) interim: Vec<u16>,
    /// The body without its chunked framing.
    pub(crate) body: Vec<u8>,
    /// Whether the body ended as its framing says.
    pub(crate) whole: bool,
    pub(crate) trailers: String,
}

impl SimTestResponse {
    pub(crate) fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|_| panic!("no JSON: {self:?}"))
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.head.lines().filter_map(|l| l.split_once(": ")).find(|(n, _)| *n == name).map(|(_, v)| v)
    }

    /// The data of each server-sent event.
    pub(crate) fn events(&self) -> Vec<String> {
        let text = self.text();
        let events = text.split_terminator("\n\n");
        events
            .map(|e| e.lines().find_map(|l| l.strip_prefix("data: ")).unwrap_or_default().to_owned())
            .collect()
    }

    /// The streamed chat text.
    pub(crate) fn chat_text(&self) -> String {
        let parse = |event: &String| serde_json::from_str::<Value>(event).ok();
        let content = |event: Value| event["choices"][0]["delta"]["content"].as_str().map(str::to_owned);
        self.events().iter().filter_map(parse).filter_map(content).collect()
    }
}

pub(crate) fn request(method: &str, path: &str, body: &str, more: &str) -> String {
    let length = body.len();
    format!("{method} {path} HTTP/1.1\r\nhost: engine\r\ncontent-length: {length}\r\n{more}\r\n{body}")
}

pub(crate) fn call(addr: SocketAddr, method: &str, path: &str, body: &str) -> SimTestResponse {
    raw(addr, &request(method, path, body, "connection: close\r\n"))
}

/// Sends bytes as they are and reads until the connection ends.
pub(crate) fn raw(addr: SocketAddr, bytes: &str) -> SimTestResponse {
    let mut io = connect(addr);
    // An engine may close before it has read the whole request.
    io.write_all(bytes.as_bytes()).ok();
    read(&mut io)
}

pub(crate) fn connect(addr: SocketAddr) -> TcpStream {
    let io = TcpStream::connect(addr).unwrap();
    io.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    io
}

/// Reads a response until its connection ends, even by a reset.
pub(crate) fn read(io: &mut TcpStream) -> SimTestResponse {
    let mut bytes = Vec::new();
    io.read_to_end(&mut bytes).ok();
    parse(&bytes)
}

pub(crate) fn parse(mut bytes: &[u8]) -> SimTestResponse {
    let mut interim = Vec::new();
    loop {
        let end =
            bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| panic!("no head: {bytes:?}"));
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        bytes = &bytes[end + 4..];
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        if status < 200 {
            interim.push(status);
            continue;
        }
        let mut answer = SimTestResponse {
            status,
            head,
            interim,
            body: bytes.to_vec(),
            whole: true,
            trailers: String::new(),
        };
        if answer.header("transfer-encoding") == Some("chunked") {
            (answer.body, answer.whole, answer.trailers) = unchunk(bytes);
        } else if let Some(length) = answer.header("content-length") {
            answer.whole = length.parse() == Ok(bytes.len());
        }
        return answer;
    }
}

fn unchunk(mut bytes: &[u8]) -> (Vec<u8>, bool, String) {
    let mut body = Vec::new();
    while let Some(end) = bytes.windows(2).position(|w| w == b"\r\n") {
        let digits = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let size = usize::from_str_radix(&digits, 16).unwrap();
        bytes = &bytes[end + 2..];
        if size == 0 {
            return (body, bytes.ends_with(b"\r\n"), String::from_utf8(bytes.to_vec()).unwrap());
        }
        if bytes.len() < size + 2 {
            break;
        }
        body.extend_from_slice(&bytes[..size]);
        bytes = &bytes[size + 2..];
    }
    (body, false, String::new())
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
