//! A stub in its own process, engines behind it, and a client that exposes the bytes.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::File,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse_testing::wait::holds_within;
use tempfile::TempDir;

pub(crate) mod client;
pub(crate) mod engine;
pub(crate) mod nvml;
pub(crate) mod run_queue_meter;

pub(crate) use client::StubTestClient;
pub(crate) use rouse_testing::{
    port::ReservedPort,
    raw_client::{TestExchange, TestResponse},
};

/// Longer than any wait takes.
pub(crate) const TEST_TIMEOUT: Duration = Duration::from_secs(20);

/// All ports of both designs.
const PORTS: [&str; 7] = ["probes", "spi", "proxy", "relay", "admin", "metrics", "debug"];

/// Configures a stub for a test. It sees none of this machine's accelerators.
pub(crate) struct StubBuilder {
    dir: TempDir,
    command: Command,
    /// Ports that listen after the start.
    ports: Vec<&'static str>,
    host: Option<&'static str>,
}

/// A running stub. Killed by its pid on drop.
pub(crate) struct StubProcess {
    child: Child,
    log: Arc<StubLog>,
    dir: TempDir,
}

/// The stub's stderr so far.
#[derive(Default)]
struct StubLog {
    text: Mutex<StubLogText>,
    more: Condvar,
}

#[derive(Default)]
struct StubLogText {
    text: String,
    /// The stub has closed stderr.
    ended: bool,
}

/// A stub with all ports at free numbers, and these flags.
pub(crate) fn stub(flags: &[&str]) -> StubProcess {
    StubBuilder::new().flags(flags).start()
}

/// A stub with all ports, these flags, and this engine as its target.
pub(crate) fn stub_before(engine: SocketAddr, flags: &[&str]) -> StubProcess {
    let stub = stub(flags);
    assert_eq!(stub.set_target(engine), 200);
    stub
}

impl StubBuilder {
    /// A builder with all ports at free numbers.
    pub(crate) fn new() -> Self {
        Self::without_ports(&[])
    }

    /// A builder with all ports except these, which flags must set.
    pub(crate) fn without_ports(these: &[&str]) -> Self {
        let ports: Vec<_> =
            PORTS.iter().filter(|port| !these.contains(port)).map(|port| (*port, 0)).collect();
        Self::with_ports(&ports)
    }

    /// A builder with only these ports, on loopback.
    pub(crate) fn with_ports(ports: &[(&'static str, u16)]) -> Self {
        let mut setting = Self::from_command(Command::new(env!("CARGO_BIN_EXE_rouse-stub"))).flag("proxy");
        for (port, number) in ports {
            setting = setting.flag(format!("--{port}-port={number}"));
        }
        // The proxy port listens only once it has a target.
        setting.ports = ports.iter().map(|(port, _)| *port).filter(|port| *port != "proxy").collect();
        setting.host("127.0.0.1")
    }

    /// A builder for an unchanged command line.
    pub(crate) fn from_command(mut command: Command) -> Self {
        let dir = tempfile::tempdir().unwrap();
        command
            .env_remove("ROUSE_ACCELERATORS")
            .env_remove("NVIDIA_VISIBLE_DEVICES")
            .env_remove("LD_LIBRARY_PATH")
            .env("NO_COLOR", "1")
            .stdin(Stdio::null())
            .stdout(File::create(dir.path().join("stdout")).unwrap())
            .stderr(Stdio::piped());
        Self { dir, command, ports: Vec::new(), host: None }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    pub(crate) fn flag(mut self, flag: impl AsRef<OsStr>) -> Self {
        self.command.arg(flag);
        self
    }

    pub(crate) fn flags(mut self, flags: &[&str]) -> Self {
        self.command.args(flags);
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Adds accelerators, described as in [`nvml`].
    pub(crate) fn nvml(mut self, lines: &[&str]) -> (Self, nvml::FakeNvmlLibrary) {
        let fake = nvml::FakeNvmlLibrary::new(lines);
        self.command.envs(fake.environment());
        (self, fake)
    }

    pub(crate) const fn host(mut self, host: &'static str) -> Self {
        self.host = Some(host);
        self
    }

    /// Redirects its output from the usual file.
    pub(crate) fn stdout(mut self, to: impl Into<Stdio>) -> Self {
        self.command.stdout(to);
        self
    }

    /// Starts the stub without waiting.
    pub(crate) fn spawn(mut self) -> StubProcess {
        self.command.args(self.host.map(|host| format!("--host={host}")));
        let mut child = self.command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::<StubLog>::default();
        let shared_log = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let text = &mut shared_log.text.lock().unwrap().text;
                text.push_str(&line);
                text.push('\n');
                shared_log.more.notify_all();
            }
            shared_log.text.lock().unwrap().ended = true;
            shared_log.more.notify_all();
        });
        StubProcess { child, log, dir: self.dir }
    }

    /// Starts the stub and waits until all its ports listen.
    pub(crate) fn start(self) -> StubProcess {
        let ports = self.ports.clone();
        let stub = self.spawn();
        for port in ports {
            stub.port(port);
        }
        stub
    }
}

impl StubProcess {
    /// Waits for a log line that contains all of these texts.
    pub(crate) fn until_logged(&self, texts: &[&str]) -> String {
        let log_text = self.log.text.lock().unwrap();
        let waits = |log_text: &mut StubLogText| !log_text.ended && log_text.line(texts).is_none();
        let (said, _) = self.log.more.wait_timeout_while(log_text, TEST_TIMEOUT, waits).unwrap();
        said.line(texts).unwrap_or_else(|| panic!("never said {texts:?}: {}", said.text)).to_owned()
    }

    pub(crate) fn has_logged(&self, texts: &[&str]) -> bool {
        self.log.text.lock().unwrap().line(texts).is_some()
    }

    /// Counts the occurrences of this text in the log so far.
    pub(crate) fn count_logged(&self, text: &str) -> usize {
        self.log.text.lock().unwrap().text.matches(text).count()
    }

    /// Returns its output so far.
    pub(crate) fn output(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("stdout")).unwrap()
    }

    /// Waits until this port listens, and returns a client for it.
    pub(crate) fn port(&self, name: &str) -> StubTestClient {
        let line = self.until_logged(&["listening", &format!("port=\"{name}\""), "address="]);
        let address = line.split("address=").nth(1).unwrap().split_whitespace().next().unwrap();
        let mut address: SocketAddr = address.parse().unwrap();
        if address.ip().is_unspecified() {
            address.set_ip([127, 0, 0, 1].into());
        }
        StubTestClient::new(address)
    }

    pub(crate) fn address(&self, port: &str) -> SocketAddr {
        self.port(port).address
    }

    pub(crate) fn spi(&self) -> StubTestClient {
        self.port("spi")
    }

    pub(crate) fn relay(&self) -> StubTestClient {
        self.port("relay")
    }

    pub(crate) fn get(&self, port: &str, path: &str) -> TestResponse {
        self.port(port).get(path)
    }

    /// Posts an order to the SPI.
    pub(crate) fn post(&self, path: &str, body: &str) -> TestResponse {
        self.spi().post(path, body)
    }

    /// Sets the engine as target, and returns the status.
    pub(crate) fn set_target(&self, engine: SocketAddr) -> u16 {
        let (address, port) = (engine.ip(), engine.port());
        let body = format!(r#"{{"address":"{address}","port":{port}}}"#);
        self.spi().send("PUT", "/v1/proxy/config", &body).status
    }

    pub(crate) fn gate(&self) -> serde_json::Value {
        self.spi().get("/v1/gate").json()
    }

    pub(crate) fn leases(&self) -> u64 {
        self.gate()["leases"].as_u64().unwrap()
    }

    pub(crate) fn ready(&self) -> bool {
        let answer = self.get("probes", "/ready");
        match (answer.status, &*answer.text()) {
            (200, "OK\n") => true,
            (503, "Service Unavailable\n") => false,
            other => panic!("{other:?}"),
        }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(i32::try_from(self.pid()).unwrap()), signal).unwrap();
    }

    /// Waits for its exit, up to [`TEST_TIMEOUT`].
    pub(crate) fn wait_exit(&mut self) -> ExitStatus {
        self.wait_exit_within(TEST_TIMEOUT)
    }

    pub(crate) fn wait_exit_within(&mut self, span: Duration) -> ExitStatus {
        let mut status = None;
        within("it ends", span, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        status.unwrap()
    }

    pub(crate) fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Returns one of its memory values in KiB.
    pub(crate) fn memory(&self, name: &str) -> u64 {
        let rollup = std::fs::read_to_string(format!("/proc/{}/smaps_rollup", self.pid())).unwrap();
        let values: BTreeMap<&str, u64> = rollup
            .lines()
            .filter_map(|line| line.split_once(':'))
            .filter_map(|(name, value)| Some((name, value.split_whitespace().next()?.parse().ok()?)))
            .collect();
        values[name]
    }
}

impl Drop for StubProcess {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
        if std::thread::panicking() {
            eprintln!("--- the stub's log\n{}", self.log.text.lock().unwrap().text);
        }
    }
}

impl StubLogText {
    fn line(&self, texts: &[&str]) -> Option<&str> {
        self.text.lines().find(|line| texts.iter().all(|word| line.contains(word)))
    }
}

/// Polls until the condition holds.
pub(crate) fn until(what: &str, is_so: impl FnMut() -> bool) {
    within(what, TEST_TIMEOUT, is_so);
}

/// Polls until the condition holds, at most for `span`.
pub(crate) fn within(what: &str, span: Duration, is_so: impl FnMut() -> bool) {
    assert!(holds_within(span, Duration::from_millis(1), is_so), "not so within {span:?}: {what}");
}
