//! Tests with real processes: engine-sim run out of this test binary, and shell scripts if the process is the subject.

mod adoption;
mod load;
mod stopping;

use std::{fs, path::Path, time::Duration};

use engine_sim::accelerator::AcceleratorFile;
use rouse::{
    engine::last_outcome::EngineDiagnostics,
    fault::FailureCause,
    fleet::event::CanaryVerdict,
    model::{EngineMemory, ModelSpec, SleepLevel},
    sim::simulated_model,
    units::{Bytes, Millis},
};
use rouse_config::{Config, EngineConfig, EngineKind, OnDisconnect, ProbeTask, SleepApi};
use rouse_net::process::table;
use tempfile::TempDir;
use tokio::time;

use super::*;

const FLAGS: &str = "TEST_ENGINE_FLAGS";
const FIRST: Generation = Generation(1);

/// Not a test: the process that the tests launch. It does nothing without flags in the environment.
#[test]
fn the_engine_that_other_tests_launch() {
    let Ok(flags) = std::env::var(FLAGS) else {
        return;
    };
    let matches = <engine_sim::EngineSimArgs as clap::Args>::augment_args(clap::Command::new("engine"))
        .get_matches_from(std::iter::once("engine").chain(flags.split_whitespace()));
    let args = <engine_sim::EngineSimArgs as clap::FromArgMatches>::from_arg_matches(&matches).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let code = runtime.block_on(engine_sim::run(args)).map_err(|error| eprintln!("{error:#}"));
    std::process::exit(i32::from(code != Ok(std::process::ExitCode::SUCCESS)));
}

/// A platform with its own state directory and one simulated accelerator, `gpu-0`, of 4 GiB.
struct LocalPlatformHarness {
    _engines: EngineCleanup,
    folder: TempDir,
    config: Config,
    local: LocalPlatform,
    events: mpsc::Receiver<Event>,
    /// Diagnostics that engines have reported.
    shown: EngineDiagnostics,
}

impl LocalPlatformHarness {
    fn new(models: Vec<EngineConfig>) -> Self {
        let folder = tempfile::tempdir().unwrap();
        AcceleratorFile::create(folder.path().join("gpus"), &[("gpu-0", 4 << 30)]).unwrap();
        let config = config(folder.path(), models);
        let (local, events) = start(&config);
        Self {
            _engines: EngineCleanup(folder.path().join("state").canonicalize().unwrap()),
            folder,
            config,
            local,
            events,
            shown: EngineDiagnostics::default(),
        }
    }

    /// Closes the gateway and starts another one.
    async fn restart(mut self, models: Vec<EngineConfig>) -> Self {
        self.local.close().await;
        self.config = config(self.folder.path(), models);
        (self.local, self.events) = start(&self.config);
        self
    }

    /// Drops the gateway without closing it, and starts another one.
    fn crash(self) -> Self {
        let Self { _engines, folder, config, local, .. } = self;
        drop(local);
        let (local, events) = start(&config);
        Self { _engines, folder, config, local, events, shown: EngineDiagnostics::default() }
    }

    /// Returns the next event. Skips diagnostics, which a slow engine reports on a busy machine.
    async fn next(&mut self) -> Event {
        loop {
            let event = time::timeout(Duration::from_secs(20), self.events.recv()).await;
            match event.expect("no event").unwrap() {
                Event::Diagnostics { diagnostics, .. } => self.shown.merge(&diagnostics),
                event => return event,
            }
        }
    }

    async fn adopted(&mut self) -> Vec<Event> {
        let mut before = Vec::new();
        loop {
            match self.next().await {
                Event::AdoptionDone => return before,
                event => before.push(event),
            }
        }
    }

    fn launch(&self, model: &str) {
        self.local.submit(Command::Launch {
            engine: engine(model),
            generation: FIRST,
            accelerators: vec!["gpu-0".into()],
            bytes: Bytes::gib(1),
        });
    }

    fn stop(&self, model: &str, grace: Millis) {
        let (engine, generation) = (engine(model), FIRST);
        self.local.submit(Command::Stop { engine, generation, grace, successor: None });
    }

    /// Launches the engine and waits until it is ready.
    async fn run(&mut self, model: &str) {
        self.launch(model);
        assert!(matches!(self.next().await, Event::Started { .. }));
        assert!(matches!(self.next().await, Event::Profiled { .. }));
        assert_eq!(self.next().await, Event::Ready { engine: engine(model), generation: FIRST });
    }

    fn pid(&self, model: &str) -> i32 {
        self.local.shared.store.engines()[&engine(model)].pid
    }

    async fn gone(&mut self, model: &str) -> FailureCause {
        loop {
            if let Event::Gone { engine: id, generation: FIRST, cause } = self.next().await {
                assert_eq!(id, engine(model));
                return cause;
            }
        }
    }
}

/// Kills what a failed test leaves behind.
struct EngineCleanup(PathBuf);

impl Drop for EngineCleanup {
    fn drop(&mut self) {
        let ours = format!("{}|", self.0.display());
        for pid in table::pids() {
            if table::env_value(pid, launch::MARK_VAR).is_some_and(|mark| mark.starts_with(&ours)) {
                let pid = nix::unistd::Pid::from_raw(pid);
                nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap_or_default();
            }
        }
    }
}

fn start(config: &Config) -> (LocalPlatform, mpsc::Receiver<Event>) {
    let (sender, events) = mpsc::channel(16);
    let clock = TickClock::new(time::Instant::now(), Tick(1_000_000));
    let lock = StateDirLock::take(&config.state).unwrap();
    (LocalPlatform::start(lock, Arc::new(config.clone()), sender, clock).unwrap(), events)
}

fn engine(model: &str) -> EngineId {
    EngineId::new(model.into(), 0)
}

/// A simulated engine; `flags` are added to the usual ones.
fn sim(name: &str, flags: &str) -> EngineConfig {
    let us = std::env::current_exe().unwrap();
    let us = us.to_str().unwrap();
    let test = "platform::local::tests::the_engine_that_other_tests_launch";
    let usual =
        format!("--host ${{HOST}} --port ${{PORT}} --model {name} --enable-sleep-mode --start-time 60ms");
    EngineConfig {
        env: BTreeMap::from([(FLAGS.to_owned(), format!("{usual} {flags}"))]),
        ..script(name, &[us, test, "--exact", "--nocapture"])
    }
}

fn script(name: &str, command: &[&str]) -> EngineConfig {
    EngineConfig {
        name: name.into(),
        kind: EngineKind::Vllm,
        command: command.iter().map(|&part| part.to_owned()).collect(),
        env: BTreeMap::new(),
        served_name: name.to_owned(),
        task: ProbeTask::Generate,
        on_disconnect: OnDisconnect::Abort,
        api_key: None,
        stub: false,
        allow_public: false,
        passthrough: Vec::new(),
        backend_origin: None,
        fingerprint: 7,
        sleep: SleepApi::Vllm,
    }
}

fn spec(name: &ModelName) -> ModelSpec {
    ModelSpec {
        fingerprint: 7,
        ..simulated_model(
            name.clone(),
            EngineMemory { awake: Bytes::gib(1), asleep: Bytes::mib(64), host: Bytes::mib(512) },
        )
    }
}

fn config(folder: &Path, models: Vec<EngineConfig>) -> Config {
    let (state, meter) = (folder.join("state"), folder.join("gpus"));
    let text = format!(
        "state: {}\nheadroom: 0\naccelerators: [{{id: gpu-0, memory: 4Gi, meter: {}}}]\n\
         timeouts: {{firstByte: 10s, health: {{every: 50ms, timeout: 300ms}}}}\nlogs: {{perEngine: 1MiB}}\n",
        state.display(),
        meter.display()
    );
    let mut config = rouse_config::parse(&text, "test").unwrap_or_else(|errors| panic!("{errors}"));
    config.core.models = models.iter().map(|model| spec(&model.name)).collect();
    config.engines = models.into_iter().map(|model| (model.name.clone(), Arc::new(model))).collect();
    config
}

#[tokio::test]
async fn an_engine_starts_without_a_log_where_none_can_be_written() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    assert_eq!(harness.adopted().await, []);
    let logs = harness.folder.path().join("state/logs");
    fs::remove_dir(&logs).unwrap();
    fs::write(&logs, "no folder any more").unwrap();
    harness.run("m").await;
    harness.stop("m", Millis::secs(5));
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
}

/// A full queue is a defect, so the process ends. Until then, no command is lost unnoticed.
#[tokio::test]
async fn a_command_for_which_there_is_no_room_ends_the_gateway() {
    let mut harness = LocalPlatformHarness::new(Vec::new());
    let lost = harness.local.command_lost();
    tokio::pin!(lost);
    let reserve = || Command::Reserve {
        engine: engine("m"),
        generation: FIRST,
        accelerators: Vec::new(),
        bytes: Bytes::ZERO,
        host: Bytes::ZERO,
    };
    // The supervisor does not run in between: this test has one thread.
    (0..MAX_PENDING_COMMANDS).for_each(|_| harness.local.submit(reserve()));
    let soon = Duration::from_millis(20);
    assert!(time::timeout(soon, lost.as_mut()).await.is_err(), "all of them fit");
    assert_eq!(harness.adopted().await, []);
    for _ in 0..MAX_PENDING_COMMANDS {
        assert!(matches!(harness.next().await, Event::Placed { .. }));
    }
    (0..=MAX_PENDING_COMMANDS).for_each(|_| harness.local.submit(reserve()));
    time::timeout(Duration::from_secs(5), lost).await.expect("the loss is not reported");
}

/// An unknown name in a vendor's variable would hide a GPU.
#[tokio::test]
async fn an_engine_on_a_declared_accelerator_gets_the_variables_that_the_file_says_and_else_none() {
    let mut harness = LocalPlatformHarness::new(vec![script("plain", &["env"]), script("shown", &["env"])]);
    assert_eq!(harness.adopted().await, []);
    harness.launch("plain");
    assert_eq!(harness.gone("plain").await, FailureCause::Exited(0));
    let said = BTreeMap::from([("HIP_VISIBLE_DEVICES".to_owned(), "3".to_owned())]);
    harness.config.visible = BTreeMap::from([("gpu-0".into(), said)]);
    harness.local.reconfigure(Arc::new(harness.config.clone()));
    harness.launch("shown");
    assert_eq!(harness.gone("shown").await, FailureCause::Exited(0));

    let names = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK"];
    let seen = |model: &str, name: &str| {
        let log = fs::read_to_string(harness.local.log_path(&engine(model)).unwrap()).unwrap();
        let mut lines = log.lines();
        lines.find_map(|line| line.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
    };
    assert!(seen("plain", "PATH").is_some(), "it does not show its environment");
    for name in names {
        // Engines also inherit these variables from the gateway.
        let ours = std::env::var(name).ok();
        assert_eq!(seen("plain", name), ours, "{name}");
        let expected = if name.starts_with("HIP") { Some("3".to_owned()) } else { ours };
        assert_eq!(seen("shown", name), expected, "{name}");
    }
}

#[tokio::test]
async fn an_engine_is_launched_probed_put_to_sleep_woken_and_stopped() {
    let (id, generation) = (engine("m"), FIRST);
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    let book = harness.config.meters["gpu-0"].to_str().unwrap().to_owned();
    harness.local.reconfigure(Arc::new(config(
        harness.folder.path(),
        vec![sim("m", &format!("--accelerator-file {book} --gpu-memory-utilization ${{MEMORY_FRACTION}}"))],
    )));
    assert_eq!(harness.adopted().await, []);
    harness.local.submit(Command::Reserve {
        engine: id.clone(),
        generation,
        accelerators: vec!["gpu-0".into()],
        bytes: Bytes::gib(1),
        host: Bytes::ZERO,
    });
    assert!(matches!(harness.next().await, Event::Placed { .. }));
    harness.run("m").await;

    let meter = || Command::ReadMeter { accelerator: "gpu-0".into(), after: Millis(1) };
    harness.local.submit(meter());
    let Event::MeterRead { used, by_engine, .. } = harness.next().await else { panic!("no reading") };
    assert_eq!(used, Bytes::gib(1));
    assert_eq!(by_engine, Some(BTreeMap::from([(id.clone(), used)])));

    harness.local.submit(Command::Probe { engine: id.clone(), generation });
    let verdict = CanaryVerdict::Passed;
    assert_eq!(harness.next().await, Event::Canary { engine: id.clone(), generation, verdict });

    for level in [SleepLevel::One, SleepLevel::Two] {
        harness.local.submit(Command::Sleep { engine: id.clone(), generation, level });
        assert_eq!(harness.next().await, Event::Slept { engine: id.clone(), generation, level });
        harness.local.submit(meter());
        assert!(matches!(harness.next().await, Event::MeterRead { used, .. } if used == Bytes::mib(64)));
        harness.local.submit(Command::Wake { engine: id.clone(), generation, level });
        assert_eq!(harness.next().await, Event::Ready { engine: id.clone(), generation });
    }
    harness.stop("m", Millis::secs(5));
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
    assert!(
        fs::read_to_string(harness.local.log_path(&EngineId::new("m".into(), 0)).unwrap())
            .unwrap()
            .contains("m#0, generation 1")
    );
}

#[tokio::test]
async fn an_engine_that_cannot_start_says_why() {
    let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    let mut harness = LocalPlatformHarness::new(Vec::new());
    let book = harness.config.meters["gpu-0"].to_str().unwrap();
    let locked = harness.folder.path().join("locked");
    fs::write(&locked, "#!/bin/sh\n").unwrap();
    let models = vec![
        script("none", &["/no/such/engine"]),
        script("locked", &[locked.to_str().unwrap()]),
        sim("port", &format!("--port {port}")),
        sim("memory", &format!("--accelerator-file {book} --memory-awake 8Gi")),
        script("code", &["sh", "-c", "echo \"No module named 'llama_cpp'\" >&2; exit 3"]),
        script("signal", &["sh", "-c", "kill -9 $$"]),
    ];
    harness.local.reconfigure(Arc::new(config(harness.folder.path(), models)));
    for (model, expected) in [
        ("none", FailureCause::CommandNotFound),
        ("locked", FailureCause::PermissionDenied),
        ("port", FailureCause::PortTaken),
        ("memory", FailureCause::OutOfMemory),
        ("code", FailureCause::Exited(3)),
        ("signal", FailureCause::Killed(9)),
    ] {
        harness.launch(model);
        assert_eq!(harness.gone(model).await, expected, "{model}");
        let EngineDiagnostics { last_line, system, .. } = std::mem::take(&mut harness.shown);
        match model {
            "none" => assert!(system.unwrap().contains("No such file")),
            "locked" => assert!(system.unwrap().contains("Permission denied")),
            "code" => assert_eq!(last_line.as_deref(), Some("No module named 'llama_cpp'")),
            "signal" => assert_eq!(last_line, None),
            _ => assert!(last_line.is_some(), "{model}"),
        }
    }
}

#[tokio::test]
async fn an_engine_that_never_is_ready_shows_how_it_answers_and_what_it_wrote() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "--start-time 1h")]);
    harness.launch("m");
    while harness.shown.probe.is_none() {
        let event = time::timeout(Duration::from_secs(20), harness.events.recv()).await;
        if let Event::Diagnostics { diagnostics, .. } = event.expect("nothing is shown").unwrap() {
            harness.shown.merge(&diagnostics);
        }
    }
    assert!(harness.shown.probe.as_ref().unwrap().starts_with("GET /health"), "{:?}", harness.shown);
    harness.stop("m", Millis::secs(5));
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
    assert!(harness.shown.last_line.is_some());
}

#[tokio::test]
async fn an_engine_that_faces_the_network_or_serves_another_model_is_refused() {
    let other = EngineConfig { served_name: "other".to_owned(), ..sim("wrong", "") };
    let mut harness = LocalPlatformHarness::new(vec![sim("public", "--host 0.0.0.0"), other]);
    let wrong = FailureCause::WrongModel { serves: "wrong".into(), configured: "other".into() };
    for (model, expected) in [("public", FailureCause::PublicListener), ("wrong", wrong)] {
        harness.launch(model);
        let cause = loop {
            if let Event::StartFailed { cause, .. } = harness.next().await {
                break cause;
            }
        };
        assert_eq!(cause, expected);
        harness.stop(model, Millis::secs(5));
        assert_eq!(harness.gone(model).await, FailureCause::Stopped);
    }
}

#[tokio::test]
async fn a_stopped_process_shows_in_the_health_of_its_engine_and_so_does_its_return() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    harness.adopted().await;
    harness.run("m").await;
    // A probe ordered right after `Ready` must not end the health watch that begins then.
    harness.local.submit(Command::Probe { engine: engine("m"), generation: FIRST });
    assert!(matches!(harness.next().await, Event::Canary { .. }));
    let pid = nix::unistd::Pid::from_raw(harness.pid("m"));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    for _ in 0..2 {
        assert!(matches!(harness.next().await, Event::Health { ok: false, progressed: false, .. }));
    }
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).unwrap();
    while !matches!(harness.next().await, Event::Health { ok: true, .. }) {}
    harness.stop("m", Millis::secs(5));
    harness.gone("m").await;
}

/// The health watch continues, and the next gateway finds the engine awake.
#[tokio::test]
async fn an_engine_that_takes_the_order_to_sleep_and_stays_awake_is_as_it_was() {
    let models = || vec![sim("m", "--fault ignore-sleep")];
    let mut harness = LocalPlatformHarness::new(models());
    harness.adopted().await;
    harness.run("m").await;
    let (id, generation, cause) = (engine("m"), FIRST, FailureCause::SleepDenied);
    harness.local.submit(Command::Sleep { engine: id.clone(), generation, level: SleepLevel::One });
    assert_eq!(harness.next().await, Event::SleepFailed { engine: id, generation, cause });
    let pid = nix::unistd::Pid::from_raw(harness.pid("m"));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    assert!(matches!(harness.next().await, Event::Health { ok: false, .. }));
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).unwrap();
    while !matches!(harness.next().await, Event::Health { ok: true, .. }) {}

    let mut harness = harness.restart(models()).await;
    let adopted = harness.adopted().await;
    let [Event::Adopted { found, .. }] = &*adopted else { panic!("{adopted:?}") };
    assert_eq!((found.asleep, found.ready), (None, true));
    harness.stop("m", Millis::secs(5));
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
}

#[tokio::test]
async fn orders_to_an_engine_that_is_gone_are_answered_as_such() {
    let mut harness = LocalPlatformHarness::new(vec![sim("m", "")]);
    harness.adopted().await;
    let (id, generation) = (engine("m"), FIRST);
    harness.local.submit(Command::Probe { engine: id.clone(), generation });
    assert!(matches!(harness.next().await, Event::Canary { verdict: CanaryVerdict::Failed(_), .. }));
    let level = SleepLevel::One;
    harness.local.submit(Command::Sleep { engine: id.clone(), generation, level });
    assert!(matches!(harness.next().await, Event::SleepFailed { .. }));
    harness.local.submit(Command::Wake { engine: id, generation, level });
    assert!(matches!(harness.next().await, Event::WakeFailed { .. }));
    harness.stop("m", Millis::ZERO);
    assert_eq!(harness.gone("m").await, FailureCause::Stopped);
}
