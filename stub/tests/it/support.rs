//! A stub in a process of its own, on ports that were free.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{ErrorKind, Read as _, Write as _},
    net::{SocketAddr, TcpStream},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use tempfile::TempDir;
use tokio::time::Instant;

pub(crate) mod engine;
pub(crate) mod nvml;

/// What a test says about the stub it wants. Nothing of this machine's accelerators is known to it.
pub(crate) struct Setting {
    dir: TempDir,
    command: Command,
    ports: Vec<&'static str>,
    host: &'static str,
}

/// A running stub; ended by its own pid when dropped.
pub(crate) struct Stub {
    child: Child,
    addresses: BTreeMap<String, SocketAddr>,
    dir: TempDir,
}

/// One answer, whole.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    /// Names in lower case.
    pub(crate) headers: BTreeMap<String, String>,
    pub(crate) body: String,
}

impl Setting {
    /// With the ports of both designs.
    pub(crate) fn new() -> Self {
        let ports = ["probes", "spi", "admin", "metrics", "debug", "relay"];
        let mut setting = Self::with(&ports.map(|port| (port, 0)));
        setting.ports = ports.to_vec();
        setting
    }

    /// With these ports only.
    pub(crate) fn with(ports: &[(&'static str, u16)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-stub"));
        command.args(["proxy", "--proxy-port=0"]);
        for (port, number) in ports {
            command.arg(format!("--{port}-port={number}"));
        }
        command
            .env_remove("ROUSE_ACCELERATORS")
            .env_remove("NVIDIA_VISIBLE_DEVICES")
            .env_remove("LD_LIBRARY_PATH")
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(File::create(dir.path().join("stdout")).unwrap())
            .stderr(File::create(dir.path().join("stderr")).unwrap());
        Self { dir, command, ports: ports.iter().map(|(port, _)| *port).collect(), host: "127.0.0.1" }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn flag(mut self, flag: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.arg(flag);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<std::ffi::OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// With accelerators as [`nvml`] describes them.
    pub(crate) fn nvml(mut self, lines: &[&str]) -> (Self, nvml::Fake) {
        let fake = nvml::Fake::new(lines);
        self.command.envs(fake.environment());
        (self, fake)
    }

    pub(crate) const fn host(mut self, host: &'static str) -> Self {
        self.host = host;
        self
    }

    /// Where its output goes, instead of into a file.
    pub(crate) fn stdout(mut self, to: impl Into<Stdio>) -> Self {
        self.command.stdout(to);
        self
    }

    /// Starts it, and does not wait for anything.
    pub(crate) fn spawn(mut self) -> Stub {
        let child = self.command.args(["--host", self.host]).spawn().unwrap();
        Stub { child, addresses: BTreeMap::new(), dir: self.dir }
    }

    /// Returns when all ports listen.
    pub(crate) fn start(self) -> Stub {
        let ports = self.ports.clone();
        let mut stub = self.spawn();
        until("the ports listen", Duration::from_secs(20), || {
            stub.addresses = listening(&stub.log());
            ports.iter().all(|port| stub.addresses.contains_key(*port))
        });
        stub
    }
}

/// From lines of the log like `listening port="spi" address=127.0.0.1:8081`.
fn listening(log: &str) -> BTreeMap<String, SocketAddr> {
    let after = |line: &str, key: &str| {
        let (_, value) = line.split_once(key)?;
        Some(value.split_whitespace().next()?.trim_matches('"').to_owned())
    };
    let lines = log.lines().filter(|line| line.contains(" listening "));
    lines.filter_map(|line| Some((after(line, "port=")?, after(line, "address=")?.parse().ok()?))).collect()
}

impl Stub {
    pub(crate) fn address(&self, port: &str) -> SocketAddr {
        self.addresses[port]
    }

    pub(crate) fn get(&self, port: &str, path: &str) -> Answer {
        self.call(port, "GET", path, "")
    }

    pub(crate) fn post(&self, path: &str, body: &str) -> Answer {
        self.call("spi", "POST", path, body)
    }

    pub(crate) fn call(&self, port: &str, method: &str, path: &str, body: &str) -> Answer {
        call(self.address(port), method, path, body)
    }

    pub(crate) fn ready(&self) -> bool {
        match self.get("probes", "/ready") {
            Answer { status: 200, body, .. } if body == "OK\n" => true,
            Answer { status: 503, body, .. } if body == "Service Unavailable\n" => false,
            other => panic!("{other:?}"),
        }
    }

    /// What it logged so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("stderr")).unwrap_or_default()
    }

    /// What it wrote to its output so far.
    pub(crate) fn output(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("stdout")).unwrap_or_default()
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = i32::try_from(self.child.id()).unwrap();
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
    }

    /// Waits for its end; the exit code.
    pub(crate) fn wait(&mut self, within: Duration) -> Option<i32> {
        let mut status = None;
        until("it ends", within, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap().code()
    }
}

impl Drop for Stub {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(nix::sys::signal::Signal::SIGKILL);
            self.child.wait().unwrap();
        }
        if std::thread::panicking() {
            eprintln!("--- the stub's log\n{}", self.log());
        }
    }
}

/// One request on a connection of its own.
pub(crate) fn call(address: SocketAddr, method: &str, path: &str, body: &str) -> Answer {
    let length = body.len();
    let head =
        format!("{method} {path} HTTP/1.1\r\nhost: stub\r\nconnection: close\r\ncontent-length: {length}");
    raw(address, format!("{head}\r\n\r\n{body}").as_bytes())
}

/// Sends bytes as they are.
pub(crate) fn raw(address: SocketAddr, request: &[u8]) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(request).unwrap();
    answer(&mut stream)
}

/// What comes until the connection ends.
pub(crate) fn answer(stream: &mut TcpStream) -> Answer {
    let mut bytes = Vec::new();
    match stream.read_to_end(&mut bytes) {
        Ok(_) => {}
        Err(error) if error.kind() == ErrorKind::ConnectionReset => {}
        Err(error) => panic!("{error} after {:?}", String::from_utf8_lossy(&bytes)),
    }
    let text = String::from_utf8(bytes).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {text:?}"));
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.split(' ').nth(1)?.parse().ok()).unwrap();
    let headers = lines.filter_map(|line| line.split_once(": "));
    let headers = headers.map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned())).collect();
    Answer { status, headers, body: body.to_owned() }
}

/// Polls another process, which sends no event.
pub(crate) fn until(what: &str, within: Duration, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + within;
    while !is_so() {
        assert!(Instant::now() < end, "not so within {within:?}: {what}");
        pause(Duration::from_millis(2));
    }
}

#[expect(clippy::disallowed_methods, reason = "a test polls another process")]
pub(crate) fn pause(span: Duration) {
    std::thread::sleep(span);
}
