//! A stub in front of an engine, behind the gateway, with the orders that its controller would send.
//!
//! The stub is this test binary itself, started as a process of its own with a filter that runs nothing but [`stub`].
//! Its engine is its child, so the gateway starts and ends the two as one engine. When `ROUSE_STUB` is set, every test
//! runs through such a row. That is for suites whose engines need not sleep, because a stub passes no sleep order.

use std::{ffi::OsString, path::Path, process::Command};

use super::{TestClient, TestResponse};

/// The variable with the stub's relay port, which the gateway takes for the engine's port.
const RELAY_PORT_ENV: &str = "ROW_PORT";
const ADMIN_PORT_ENV: &str = "ROW_ADMIN";
/// The variable with the engine's command line, one argument a line.
const ENGINE_COMMAND_ENV: &str = "ROW_ENGINE";
/// Placeholder for the engine's own port in those arguments.
const ENGINE_PORT_PLACEHOLDER: &str = "ENGINE_PORT";
const FOLDER_ENV: &str = "ROW_FOLDER";

/// How a test uses a stub.
#[derive(Clone, Copy)]
pub(crate) struct StubInRow<'a> {
    /// The stub's admin port.
    pub(crate) admin: u16,
    /// A folder in which the test controls the stub. The test gives the stub its target by copying `engine` to
    /// `target`; `run_stub` has the stub's own address. The stub is a process of its own, `pid`, and the row replaces
    /// it when it is killed. Without a folder the row itself sets the target.
    pub(crate) folder: Option<&'a Path>,
}

/// Whether every test runs through a row.
pub(crate) fn is_enabled() -> bool {
    std::env::var_os("ROUSE_STUB").is_some()
}

/// A stub, if `ROUSE_STUB` is set. No test sends orders to it, so it binds any free admin port when it starts. A port
/// chosen earlier might be taken by then.
pub(crate) fn stub_if_enabled() -> Option<StubInRow<'static>> {
    is_enabled().then_some(StubInRow { admin: 0, folder: None })
}

impl StubInRow<'_> {
    pub(crate) fn new() -> Self {
        Self { admin: free_port(), folder: None }
    }
}

pub(crate) fn free_port() -> u16 {
    rouse_net::port::claim_for_process().unwrap()
}

/// The command, environment and further keys of an engine that is one test of this binary. Its environment
/// (`AT=${HOST}:${PORT}`) makes that test an engine. With `ROUSE_STUB` set, a stub is in front of it.
pub(crate) fn test_engine_command(name: &str, env: &[&str]) -> (String, String, &'static str) {
    let exe = std::env::current_exe().unwrap();
    let exe = [exe.to_str().unwrap(), name, "--exact", "--nocapture"];
    match stub_if_enabled() {
        Some(place) => stub_command(&[&["env"], env, &exe].concat(), place),
        None => {
            let env = env.iter().filter_map(|pair| pair.split_once('='));
            let env: Vec<_> = env.map(|(key, value)| format!("{key}: {value:?}")).collect();
            (format!("{exe:?}"), format!("{{{}}}", env.join(", ")), "")
        }
    }
}

/// The command, environment and further keys of an engine with this command line behind a stub.
pub(super) fn stub_command(words: &[&str], place: StubInRow<'_>) -> (String, String, &'static str) {
    let StubInRow { admin, folder } = place;
    let exe = std::env::current_exe().unwrap();
    let command = format!("[{exe:?}, \"support::row::stub\", --exact, --nocapture]");
    let engine = words.join("\n").replace("${PORT}", ENGINE_PORT_PLACEHOLDER);
    let folder = folder.map_or(String::new(), |folder| format!("{FOLDER_ENV}: {folder:?}, "));
    let env = format!(
        "{{{RELAY_PORT_ENV}: \"${{PORT}}\", {ADMIN_PORT_ENV}: \"{admin}\", {folder}{ENGINE_COMMAND_ENV}: {engine:?}, VLLM_SERVER_DEV_MODE: \"1\"}}"
    );
    (command, env, "      stub: true\n")
}

/// Sends an order or a query to the stub.
pub(crate) fn stub_request(admin: u16, method: &str, path: &str, body: &str) -> TestResponse {
    let head = format!("{method} {path} HTTP/1.1\r\nHost: stub\r\nConnection: close\r\n");
    let length = body.len();
    let request = format!("{head}Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}");
    TestClient::new(([127, 0, 0, 1], admin).into()).raw(&request)
}

/// Runs a stub with its engine when another test starts this binary as one. Among the tests it does nothing.
#[test]
fn stub() {
    let Ok(port) = std::env::var(RELAY_PORT_ENV) else { return };
    let own = free_port();
    let words = std::env::var(ENGINE_COMMAND_ENV).unwrap().replace(ENGINE_PORT_PLACEHOLDER, &own.to_string());
    let mut words = words.lines();
    let mut engine = Command::new(words.next().unwrap()).args(words).spawn().unwrap();
    let address = format!("127.0.0.1:{own}");
    if let Some(folder) = std::env::var_os(FOLDER_ENV) {
        let write_file =
            |name: &str, what: String| std::fs::write(Path::new(&folder).join(name), what).unwrap();
        write_file("relay", format!("127.0.0.1:{port}"));
        write_file("engine", address);
        // Until the gateway ends all three processes.
        loop {
            let exe = std::env::current_exe().unwrap();
            let mut stub = Command::new(exe).args(["support::row::alone", "--exact"]).spawn().unwrap();
            write_file("pid", stub.id().to_string());
            stub.wait().unwrap();
        }
    }
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("target"), address).unwrap();
    run_stub(&port, folder.path());
    drop(engine.kill());
    engine.wait().unwrap();
}

/// Runs the stub of a row as a process of its own.
#[test]
fn alone() {
    let (Ok(port), Some(folder)) = (std::env::var(RELAY_PORT_ENV), std::env::var_os(FOLDER_ENV)) else {
        return;
    };
    run_stub(&port, Path::new(&folder));
}

/// Runs a stub until its process gets a signal. `folder` has its `target` file.
fn run_stub(port: &str, folder: &Path) {
    let target = folder.join("target");
    let admin = std::env::var(ADMIN_PORT_ENV).unwrap();
    let flags = [
        ["rouse-stub", "proxy"],
        ["--host", "127.0.0.1"],
        ["--relay-port", port],
        ["--admin-port", &admin],
        ["--metrics-port", "0"],
        ["--debug-port", "0"],
        ["--probes-port", "0"],
        ["--spi-port", "0"],
        ["--proxy-port", "0"],
        // A custom engine's own paths pass the stub, too, and tests read the engine through them.
        ["--engine-kind", "custom"],
        ["--server-ip-file", target.to_str().unwrap()],
    ];
    let ended = rouse_stub::cli::run_from(flags.into_iter().flatten().map(OsString::from));
    eprintln!("the stub has ended: {ended:?}");
}
