//! A gateway in a process of its own, on free ports, with its state in a folder of its own.

use std::{
    fmt::Write as _,
    io::{BufRead as _, BufReader},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::Duration,
};

use rouse_testing::wait::holds_within;
use tempfile::TempDir;

pub(crate) mod engine;
pub(crate) mod forms;
pub(crate) mod frames;
pub(crate) mod row;
pub(crate) mod threads;
pub(crate) mod tls;

pub(crate) use rouse_testing::{
    raw_client::{self as client, TestClient, TestResponse},
    wait::pause,
};

/// The gateway that cargo builds for tests.
const PROGRAM: &str = env!("CARGO_BIN_EXE_rouse-gateway");

/// Builds a configuration. Accelerators are simulated and enforce their memory.
pub(crate) struct GatewayFixture {
    dir: TempDir,
    accelerators: Vec<(String, u64)>,
    models: Vec<String>,
    settings: String,
    pub(crate) flags: Vec<String>,
    program: PathBuf,
}

/// One model over engine-sim.
pub(crate) struct SimModel<'a> {
    pub(crate) name: &'a str,
    /// The engine kind in the configuration.
    pub(crate) kind: &'a str,
    pub(crate) awake: &'a str,
    pub(crate) asleep: &'a str,
    pub(crate) accelerators: u32,
    /// Flags of the engine: `--start-time 100ms` and so on.
    pub(crate) flags: &'a str,
    /// More keys of the model, one a line, without indentation: `pinned: true`.
    pub(crate) keys: &'a str,
    /// More keys of its engine, in the same form.
    pub(crate) engine: &'a str,
    /// The stub in front of the engine, if any. Such an engine does not sleep.
    pub(crate) stub: Option<row::StubInRow<'a>>,
}

/// A running gateway. The drop ends it with SIGTERM to its own pid.
pub(crate) struct GatewayProcess {
    child: Child,
    pub(crate) api: SocketAddr,
    pub(crate) admin: SocketAddr,
    pub(crate) dir: PathBuf,
    _fixture: Option<TempDir>,
}

impl<'a> SimModel<'a> {
    /// A fast model: it starts in 100 ms, wakes and sleeps in 50 ms, and holds 1Gi awake and 64Mi asleep on one
    /// accelerator.
    pub(crate) fn new(name: &'a str) -> Self {
        SimModel {
            name,
            kind: "vllm",
            awake: "1Gi",
            asleep: "64Mi",
            accelerators: 1,
            flags: "",
            keys: "",
            engine: "",
            stub: row::stub_if_enabled(),
        }
    }
}

impl GatewayFixture {
    /// A configuration with these accelerators, given by their memory: `["2Gi", "2Gi"]` are gpu-0 and gpu-1.
    pub(crate) fn new(accelerators: &[&str]) -> Self {
        let size = |text: &&str| text.parse::<rouse::units::Bytes>().unwrap().0;
        Self {
            dir: tempfile::tempdir().unwrap(),
            accelerators: accelerators
                .iter()
                .enumerate()
                .map(|(i, a)| (format!("gpu-{i}"), size(a)))
                .collect(),
            models: Vec::new(),
            settings: String::new(),
            flags: Vec::new(),
            program: PROGRAM.into(),
        }
    }

    /// Takes another build of the gateway, also as the engine of the models that are added after this.
    pub(crate) fn program(mut self, program: PathBuf) -> Self {
        self.program = program;
        self
    }

    /// Adds top-level YAML as in a configuration file.
    pub(crate) fn settings(mut self, yaml: &str) -> Self {
        self.settings.push_str(yaml);
        self.settings.push('\n');
        self
    }

    pub(crate) fn model(mut self, sim: &SimModel<'_>) -> Self {
        let meter = self.meter();
        let SimModel { name, kind, awake, asleep, accelerators, flags, keys, engine, stub } = sim;
        let indent = |text: &str, by: &str| text.lines().fold(String::new(), |t, l| format!("{t}{by}{l}\n"));
        let meter = meter.display().to_string();
        let mut words = vec![self.program.to_str().unwrap()];
        words.extend("demo-engine --host ${HOST} --port ${PORT} --model".split(' '));
        words.extend([name]);
        words.extend("--gpu-memory-utilization ${MEMORY_FRACTION} --accelerator-file".split(' '));
        words.extend([&*meter, "--memory-awake", awake, "--memory-asleep", asleep, "--memory-host", "16Mi"]);
        words.extend("--start-time 100ms --profile-time 20ms --wake-time 50ms --sleep-time 50ms".split(' '));
        words.extend("--ttft 5ms --itl 5ms --enable-sleep-mode".split(' '));
        words.extend(flags.split_whitespace());
        let (command, env, behind) = match stub {
            Some(place) => row::stub_command(&words, *place),
            None => (format!("{words:?}"), r#"{VLLM_SERVER_DEV_MODE: "1"}"#.to_owned(), ""),
        };
        self.models.push(format!(
            r#"  - name: {name}
    engine:
      kind: {kind}
      command: {command}
      env: {env}
{behind}{}    accelerators: {accelerators}
    memory: {{awake: {awake}, asleep: {asleep}, host: 16Mi}}
{}"#,
            indent(engine, "      "),
            indent(keys, "    "),
        ));
        self
    }

    /// Adds a model as its entry under `models:` in a file.
    pub(crate) fn model_yaml(mut self, yaml: &str) -> Self {
        self.models.push(yaml.to_owned());
        self
    }

    pub(crate) fn flag(mut self, flag: &str) -> Self {
        self.flags.push(flag.to_owned());
        self
    }

    pub(crate) fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// The file that simulates the accelerators.
    pub(crate) fn meter(&self) -> PathBuf {
        self.dir.path().join("accelerators.json")
    }

    pub(crate) fn yaml(&self) -> String {
        let meter = self.meter().display().to_string();
        let mut text = format!("state: {:?}\nheadroom: 0\naccelerators:\n", self.dir.path().join("state"));
        for (id, bytes) in &self.accelerators {
            let visible = format!("{{CUDA_VISIBLE_DEVICES: {id}}}");
            writeln!(text, "  - {{id: {id}, memory: {bytes}, meter: {meter:?}, visible: {visible}}}")
                .unwrap();
        }
        text.push_str(&self.settings);
        text.push_str("models:\n");
        text.extend(self.models.iter().map(String::as_str));
        text
    }

    /// Writes the file and starts a gateway with it. Returns when the gateway is ready.
    pub(crate) fn start(self) -> GatewayProcess {
        self.start_as(|_| {})
    }

    /// Starts a gateway after a change to its command.
    pub(crate) fn start_as(self, change: impl FnOnce(&mut Command)) -> GatewayProcess {
        let accelerators: Vec<(&str, u64)> =
            self.accelerators.iter().map(|(id, b)| (id.as_str(), *b)).collect();
        engine_sim::accelerator::AcceleratorFile::create(self.meter(), &accelerators).unwrap();
        let file = self.dir.path().join("rouse.yaml");
        std::fs::write(&file, self.yaml()).unwrap();
        let mut gateway = GatewayProcess::spawn_program(&self.program, self.dir.path(), &self.flags, change);
        gateway._fixture = Some(self.dir);
        gateway
    }
}

impl GatewayProcess {
    /// Starts a gateway on `dir/rouse.yaml`, also on the folder of a gateway that crashed.
    pub(crate) fn spawn(dir: &Path, flags: &[String]) -> Self {
        Self::spawn_as(dir, flags, |_| {})
    }

    pub(crate) fn spawn_as(dir: &Path, flags: &[String], change: impl FnOnce(&mut Command)) -> Self {
        Self::spawn_program(Path::new(PROGRAM), dir, flags, change)
    }

    fn spawn_program(
        program: &Path,
        dir: &Path,
        flags: &[String],
        change: impl FnOnce(&mut Command),
    ) -> Self {
        let log =
            std::fs::OpenOptions::new().create(true).append(true).open(dir.join("gateway.log")).unwrap();
        let mut command = Command::new(program);
        command
            .arg("--config")
            .arg(dir.join("rouse.yaml"))
            .args(["--api", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
            .args(flags)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log);
        change(&mut command);
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut address = |label: &str| -> SocketAddr {
            let line = lines
                .next()
                .unwrap_or_else(|| panic!("no address: {}", read(&dir.join("gateway.log"))))
                .unwrap();
            assert!(line.starts_with(label), "{line}");
            let url = line.split_whitespace().last().unwrap();
            let (_, address) = url.split_once("://").unwrap();
            address.trim_end_matches("/v1").parse().unwrap()
        };
        let (api, admin) = (address("inference API"), address("admin"));
        let gateway = Self { child, api, admin, dir: dir.to_owned(), _fixture: None };
        gateway.until("ready", Duration::from_secs(10), || gateway.admin().get("/readyz").status == 200);
        gateway
    }

    pub(crate) fn client(&self) -> TestClient {
        TestClient::new(self.api)
    }

    pub(crate) fn admin(&self) -> TestClient {
        TestClient::new(self.admin)
    }

    pub(crate) fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// The gateway's log so far.
    pub(crate) fn log(&self) -> String {
        read(&self.dir.join("gateway.log"))
    }

    /// Waits until the log contains this text. A thread of its own writes each line, after the event that the line
    /// describes.
    pub(crate) fn until_logged(&self, text: &str) {
        self.until(&format!("'{text}' is logged"), Duration::from_secs(10), || self.log().contains(text));
    }

    /// Waits until a complete line of the journal contains all these words. A thread of its own writes it, after the
    /// decisions.
    pub(crate) fn until_journaled(&self, journal: &Path, words: &[&str]) {
        let has = || {
            let text = read(journal);
            let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
            lines.any(|line| words.iter().all(|word| line.contains(word)))
        };
        self.until(&format!("the journal has {words:?}"), Duration::from_secs(10), has);
    }

    pub(crate) fn fleet(&self) -> serde_json::Value {
        self.admin().get("/admin/v1/fleet").json()
    }

    /// One engine's view: `engine("small#0")["state"]`.
    pub(crate) fn engine(&self, id: &str) -> serde_json::Value {
        let fleet = self.fleet();
        fleet["engines"].as_array().unwrap().iter().find(|e| e["engine"] == id).cloned().unwrap_or_default()
    }

    /// The pid of a running engine, from the file for adoption.
    pub(crate) fn engine_pid(&self, id: &str) -> i32 {
        let saved = || -> Option<i64> {
            let text = std::fs::read_to_string(self.dir.join("state/engines.json")).ok()?;
            let json: serde_json::Value = serde_json::from_str(&text).ok()?;
            find_pid(&json, id)
        };
        self.until(&format!("{id} has a process"), Duration::from_secs(10), || saved().is_some());
        i32::try_from(saved().unwrap()).unwrap()
    }

    /// Waits until no exchange is left: no lease in the gateway, no request in the engine.
    pub(crate) fn until_unused(&self, id: &str) {
        let unused = || self.engine(id)["leases"] == 0 && self.counters(id)["running"] == 0;
        self.until(&format!("{id} is unused"), Duration::from_secs(5), unused);
    }

    /// Polls until a condition holds, because the event happens in another process.
    pub(crate) fn until(&self, what: &str, within: Duration, is_so: impl FnMut() -> bool) {
        let holds = holds_within(within, Duration::from_millis(10), is_so);
        assert!(holds, "not so within {within:?}: {what}\n{}", self.log());
    }

    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.pid()), signal).unwrap();
    }

    /// Waits for the gateway to end, and returns its exit code.
    pub(crate) fn wait(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }

    /// Sends SIGTERM and returns the exit code.
    pub(crate) fn terminate(mut self) -> Option<i32> {
        self.signal(nix::sys::signal::Signal::SIGTERM);
        self.wait()
    }
}

impl Drop for GatewayProcess {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            self.signal(nix::sys::signal::Signal::SIGTERM);
            self.child.wait().unwrap();
        }
        if std::thread::panicking() {
            eprintln!("--- the gateway's log\n{}", self.log());
        }
    }
}

fn find_pid(json: &serde_json::Value, id: &str) -> Option<i64> {
    json["engines"][id]["pid"].as_i64()
}

pub(crate) fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}
