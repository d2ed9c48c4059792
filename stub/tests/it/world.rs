//! A stub in a process of its own, engines behind it, and a client that shows the bytes.

use std::{
    collections::BTreeMap,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    process::{Child, Command, ExitStatus, Stdio},
    sync::{Arc, Condvar, Mutex},
    time::Duration,
};

use tokio::time::Instant;

pub(crate) mod client;
pub(crate) mod engine;

pub(crate) use client::{Answer, Client, Open};

use crate::support::pause;

/// Longer than anything that is waited for takes.
pub(crate) const LONG: Duration = Duration::from_secs(20);

/// What the stub wrote to stderr, as it comes.
#[derive(Default)]
struct Log {
    text: Mutex<String>,
    more: Condvar,
}

/// A running stub; killed by its own pid when dropped.
pub(crate) struct Stub {
    child: Child,
    log: Arc<Log>,
}

/// A stub with all ports of both designs, each of them free, and more flags.
pub(crate) fn stub(flags: &[&str]) -> Stub {
    let stub = Stub::on_free_ports(flags, &[]);
    stub.port("debug");
    stub.port("relay");
    stub
}

/// The same, and requests go to this engine.
pub(crate) fn before(engine: SocketAddr, flags: &[&str]) -> Stub {
    let stub = stub(flags);
    assert_eq!(stub.target(engine), 200);
    stub
}

impl Stub {
    /// With flags, which say what the ports in `but` are.
    pub(crate) fn on_free_ports(flags: &[&str], but: &[&str]) -> Self {
        let ports = ["probes", "spi", "proxy", "relay", "admin", "metrics", "debug"];
        let free = ports.iter().filter(|port| !but.contains(port)).map(|port| format!("--{port}-port=0"));
        let mut command = Command::new(env!("CARGO_BIN_EXE_rouse-stub"));
        command.args(["proxy", "--host=127.0.0.1"]).args(free).args(flags);
        Self::start(command)
    }

    pub(crate) fn start(mut command: Command) -> Self {
        let mut child = command.stderr(Stdio::piped()).stdout(Stdio::null()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let log = Arc::<Log>::default();
        let told = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let mut text = told.text.lock().unwrap();
                text.push_str(&line);
                text.push('\n');
                told.more.notify_all();
            }
        });
        Self { child, log }
    }

    /// Waits for a line of the log that has all of this in it.
    pub(crate) fn says(&self, wanted: &[&str]) -> String {
        let has = |text: &str| {
            text.lines().find(|line| wanted.iter().all(|word| line.contains(word))).map(str::to_owned)
        };
        let text = self.log.text.lock().unwrap();
        let waits = |text: &mut String| has(text).is_none();
        let (text, _) = self.log.more.wait_timeout_while(text, LONG, waits).unwrap();
        has(&text).unwrap_or_else(|| panic!("never said {wanted:?}: {text}"))
    }

    pub(crate) fn has_said(&self, wanted: &[&str]) -> bool {
        let text = self.log.text.lock().unwrap();
        text.lines().any(|line| wanted.iter().all(|word| line.contains(word)))
    }

    /// Where this port listens; waits until it does.
    pub(crate) fn port(&self, name: &str) -> Client {
        let line = self.says(&["listening", &format!("port=\"{name}\""), "address="]);
        let address = line.split("address=").nth(1).unwrap().split_whitespace().next().unwrap();
        let mut address: SocketAddr = address.parse().unwrap();
        if address.ip().is_unspecified() {
            address.set_ip([127, 0, 0, 1].into());
        }
        Client::new(address)
    }

    pub(crate) fn spi(&self) -> Client {
        self.port("spi")
    }

    pub(crate) fn relay(&self) -> Client {
        self.port("relay")
    }

    /// Names the engine; the status of the answer.
    pub(crate) fn target(&self, engine: SocketAddr) -> u16 {
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

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").args([signal, &pid]).status().unwrap().success());
    }

    /// Its exit, which must come soon.
    pub(crate) fn exits(&mut self) -> ExitStatus {
        let began = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(began.elapsed() < LONG, "it does not end: {}", self.log.text.lock().unwrap());
            pause(Duration::from_millis(1));
        }
    }

    pub(crate) fn runs(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// A value of its memory, in KiB.
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

impl Drop for Stub {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Looks until it is so.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LONG, "never: {what}");
        pause(Duration::from_millis(1));
    }
}
