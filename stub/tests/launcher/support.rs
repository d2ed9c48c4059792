//! A launcher, a raw HTTP client for it, and the process table.

use std::{
    io::{BufRead, BufReader, ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_net::process::table;
use rouse_testing::{
    raw_client::{TestClient, TestResponse},
    wait::holds_within,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::Instant;

/// Longer than any step takes on a busy machine; it only bounds a failure.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(30);

/// In the environment of the launcher, and so of every process that it starts.
const MARK_ENV: &str = "LAUNCHER_TEST";

pub(crate) struct LauncherProcess {
    child: Child,
    pub(crate) address: SocketAddr,
    pub(crate) dir: TempDir,
    mark: String,
}

/// A response whose body is not read yet.
pub(crate) struct UnreadResponse {
    head: String,
    stream: BufReader<TcpStream>,
}

/// One event and its arrival time.
pub(crate) struct WatchedEvent {
    pub(crate) received_at: Instant,
    pub(crate) line: String,
}

/// A live event stream.
pub(crate) struct EventWatch {
    pub(crate) head: String,
    lines: Receiver<WatchedEvent>,
}

/// A launcher whose instances are scripts, given by their options.
pub(crate) fn launcher() -> LauncherProcess {
    start(&["--command", "sh -c", "--mock-gpus", "--mock-gpu-count", "3"])
}

pub(crate) fn start(flags: &[&str]) -> LauncherProcess {
    start_with_env(&[], flags)
}

/// Starts a launcher with these variables in its environment.
pub(crate) fn start_with_env(environment: &[(&'static str, PathBuf)], flags: &[&str]) -> LauncherProcess {
    let dir = tempfile::tempdir().unwrap();
    let mark = dir.path().display().to_string();
    let open = flags.iter().all(|flag| !flag.starts_with("--token"));
    let logs = dir.path().join("logs");
    let mut child = Command::new(env!("CARGO_BIN_EXE_rouse-stub"))
        .args(["launcher", "--host", "127.0.0.1", "--port", "0", "--log-dir"])
        .arg(&logs)
        .args(flags)
        .args(open.then_some("--no-token"))
        .env_remove("ROUSE_TOKEN_SHA256")
        .env(MARK_ENV, &mark)
        .env("ROUSE_SECRET", "not for engines")
        .env("CUDA_VISIBLE_DEVICES", "7")
        .envs(environment.iter().map(|(name, value)| (name, value)))
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut errors = BufReader::new(child.stderr.take().unwrap());
    let mut text = String::new();
    let address = loop {
        assert!(errors.read_line(&mut text).unwrap() > 0, "it has ended: {text}");
        if let Some((_, address)) = text.split_once("listening on ") {
            break address.trim().parse().unwrap();
        }
    };
    // Print its later output with a failing test, and keep the pipe from filling.
    thread::spawn(move || errors.lines().map_while(Result::ok).for_each(|line| println!("{line}")));
    LauncherProcess { child, address, dir, mark }
}

impl LauncherProcess {
    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub(crate) fn request(&self, method: &str, path: &str, headers: &str, body: &str) -> TestResponse {
        request(self.address, method, path, headers, body)
    }

    /// Sends a request and reads the response's head.
    pub(crate) fn open(&self, method: &str, path: &str, headers: &str) -> UnreadResponse {
        let mut stream = connect(self.address);
        send(&mut stream, method, path, headers, "");
        let mut stream = BufReader::new(stream);
        let head = read_head(&mut stream);
        UnreadResponse { head, stream }
    }

    pub(crate) fn get(&self, path: &str) -> TestResponse {
        self.request("GET", path, "", "")
    }

    pub(crate) fn delete(&self, path: &str) -> TestResponse {
        self.request("DELETE", path, "", "")
    }

    pub(crate) fn put(&self, id: &str, body: &Value) -> TestResponse {
        self.request("PUT", &format!("/v2/vllm/instances/{id}"), "", &body.to_string())
    }

    /// Starts an instance that runs this script.
    pub(crate) fn run(&self, id: &str, script: &str) -> Value {
        assert!(!script.contains('\''));
        let answer = self.put(id, &json!({"options": format!("'{script}'")}));
        assert_eq!(answer.status, 201, "{}", answer.text());
        answer.json()
    }

    pub(crate) fn instance(&self, id: &str) -> Value {
        self.get(&format!("/v2/vllm/instances/{id}")).json()
    }

    pub(crate) fn log(&self, id: &str) -> String {
        self.get(&format!("/v2/vllm/instances/{id}/log")).text()
    }

    /// Waits until the log contains this text, and returns the log.
    pub(crate) fn until_logged(&self, id: &str, what: &str) -> String {
        until(&format!("{id} says {what}"), || self.log(id).contains(what));
        self.log(id)
    }

    pub(crate) fn watch(&self, query: &str) -> EventWatch {
        let mut stream = connect(self.address);
        // The caller that waits for an event sets the timeout.
        stream.set_read_timeout(None).unwrap();
        // With HTTP/1.0 only the end of the connection frames the body.
        write!(stream, "GET /v2/vllm/instances/watch{query} HTTP/1.0\r\n\r\n").unwrap();
        let mut reader = BufReader::new(stream);
        let head = read_head(&mut reader);
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (sender, lines) = channel();
        thread::spawn(move || {
            for line in reader.lines().map_while(Result::ok) {
                let event = WatchedEvent { received_at: Instant::now(), line };
                if sender.send(event).is_err() {
                    return;
                }
            }
        });
        EventWatch { head, lines }
    }

    /// Returns the live processes that this launcher started, at any depth.
    pub(crate) fn descendants(&self) -> Vec<i32> {
        let mark = format!("{MARK_ENV}={}", self.mark);
        table::members(None, &mark).into_iter().filter(|&pid| pid != self.pid()).collect()
    }

    pub(crate) fn zombies(&self) -> Vec<i32> {
        let zombie = |stat: table::ProcessStat| stat.zombie && stat.parent == self.pid();
        table::pids().filter(|&pid| table::stat(pid).is_some_and(zombie)).collect()
    }

    /// CPU time of the serving thread.
    pub(crate) fn cpu_time(&self) -> Duration {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.pid())).unwrap();
        Duration::from_nanos(text.split(' ').next().unwrap().parse().unwrap())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Waits for its end, and returns the exit code.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

impl Drop for LauncherProcess {
    fn drop(&mut self) {
        if self.child.try_wait().unwrap().is_none() {
            self.signal(Signal::SIGTERM);
            self.child.wait().unwrap();
        }
    }
}

impl UnreadResponse {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }

    /// Reads the body up to the end of the connection, even by a reset.
    pub(crate) fn rest(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        match self.stream.read_to_end(&mut body) {
            Err(error) if error.kind() != ErrorKind::ConnectionReset => panic!("{error}"),
            _ => body,
        }
    }
}

impl EventWatch {
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        header(&self.head, name)
    }

    /// Returns the next event; `None` once the stream has ended.
    pub(crate) fn event(&self) -> Option<WatchedEvent> {
        match self.lines.recv_timeout(TEST_TIMEOUT) {
            Ok(event) => Some(event),
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected) => None,
            Err(timeout) => panic!("no event: {timeout}"),
        }
    }

    /// Returns the next event as `CREATED id`.
    pub(crate) fn next(&self) -> String {
        self.event().map_or_else(|| "end".into(), |event| event.named())
    }
}

impl WatchedEvent {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.line).unwrap()
    }

    pub(crate) fn named(&self) -> String {
        let event = self.json();
        format!("{} {}", event["type"].as_str().unwrap(), event["object"]["instance_id"].as_str().unwrap())
    }
}

fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    head.lines().find_map(|line| {
        let (key, value) = line.split_once(": ")?;
        key.eq_ignore_ascii_case(name).then_some(value)
    })
}

fn connect(address: SocketAddr) -> TcpStream {
    TestClient::new(address).with_read_timeout(TEST_TIMEOUT).connect()
}

fn send(stream: &mut TcpStream, method: &str, path: &str, headers: &str, body: &str) {
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {length}\r\n{headers}\r\n{body}"
    )
    .unwrap();
}

fn read_head(reader: &mut impl BufRead) -> String {
    let mut head = String::new();
    while !head.ends_with("\r\n\r\n") {
        assert!(reader.read_line(&mut head).unwrap() > 0, "{head}");
    }
    head
}

/// Sends a request. `headers` are whole lines.
pub(crate) fn request(
    address: SocketAddr,
    method: &str,
    path: &str,
    headers: &str,
    body: &str,
) -> TestResponse {
    let mut stream = connect(address);
    send(&mut stream, method, path, headers, body);
    answer(stream)
}

/// Deletes with a timeout longer than the launcher's wait for a killed engine.
pub(crate) fn delete_with_long_timeout(address: SocketAddr, path: &str) -> TestResponse {
    let mut stream = connect(address);
    stream.set_read_timeout(Some(TEST_TIMEOUT * 3)).unwrap();
    send(&mut stream, "DELETE", path, "", "");
    answer(stream)
}

/// Reads to the end of the connection, which must not be a reset.
fn answer(mut stream: TcpStream) -> TestResponse {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    TestResponse::parse(&bytes).expect("an answer")
}

/// The first number that an instance logs.
pub(crate) fn first_logged_number(launcher: &LauncherProcess, id: &str) -> i32 {
    launcher.until_logged(id, "\n").lines().next().unwrap().trim().parse().unwrap()
}

/// Polls for a condition that no event reports.
pub(crate) fn until(what: &str, is_so: impl FnMut() -> bool) {
    let holds = holds_within(TEST_TIMEOUT, Duration::from_millis(5), is_so);
    assert!(holds, "not so within {TEST_TIMEOUT:?}: {what}");
}
