//! Tests' access to engines past the gateway, and an engine of our own that shows its requests.
//!
//! engine-sim behaves like a real engine. Tests of header forwarding, and of a peer that closes without an answer, need
//! an engine that does not. That engine is this test binary itself, started with a filter that runs nothing but
//! [`echo`].

use std::{
    io::Write as _,
    net::{SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use rouse_testing::scripted_engine::read_request;

use super::{GatewayFixture, GatewayProcess, TestClient, client, read, row};

/// The header that selects the echoing engine's behavior for a request.
const BEHAVIOR_HEADER: &str = "x-behave";

impl GatewayProcess {
    /// A client of a running engine, past the gateway.
    pub(crate) fn engine_client(&self, id: &str) -> TestClient {
        let saved = || -> Option<SocketAddr> {
            let json: serde_json::Value =
                serde_json::from_str(&read(&self.dir.join("state/engines.json"))).ok()?;
            json["engines"][id]["address"].as_str()?.parse().ok()
        };
        self.until(&format!("{id} has an address"), Duration::from_secs(10), || saved().is_some());
        TestClient::new(saved().unwrap())
    }

    /// Sets faults of an engine-sim once it listens: `fault("small#0", r#"{"hang": true}"#)`.
    pub(crate) fn fault(&self, id: &str, faults: &str) {
        let request = client::request("/sim/faults", "", faults);
        let engine = self.engine_client(id);
        let mut answer = None;
        self.until(&format!("{id} listens"), Duration::from_secs(10), || {
            // A stub in front of the engine may listen before the engine does, and before the stub has its target.
            let answered = engine.try_connect().ok().map(|_| engine.raw(&request));
            answer = answered.filter(|it| !matches!(it.status, 502 | 503));
            answer.is_some()
        });
        let answer = answer.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text());
    }

    /// Stalls an engine, or lets it continue. A stalled engine generates nothing: running streams pause, and new
    /// requests wait.
    pub(crate) fn stall(&self, id: &str, still: bool) {
        let fault = if still { "true" } else { "null" };
        self.fault(id, &format!("{{\"stall-streams\": {fault}}}"));
    }

    pub(crate) fn counters(&self, id: &str) -> serde_json::Value {
        self.engine_client(id).get("/sim/counters").json()
    }

    /// Orders a wake as an operator, and waits until the model is awake.
    pub(crate) fn wake(&self, model: &str) {
        let answer = self.admin().post(&format!("/admin/v1/models/{model}/wake"), "");
        assert_eq!(answer.status, 202, "{}", answer.text());
        self.until_state(model, "awake");
    }

    /// Wakes a model like [`Self::wake`], but reads its state from the admin API, for an inference API under TLS.
    pub(crate) fn wake_by_admin(&self, model: &str) {
        let answer = self.admin().post(&format!("/admin/v1/models/{model}/wake"), "");
        assert_eq!(answer.status, 202, "{}", answer.text());
        let awake = || self.engine(&format!("{model}#0"))["state"] == "Awake";
        self.until(&format!("{model} is awake"), Duration::from_secs(10), awake);
    }

    pub(crate) fn until_state(&self, model: &str, state: &str) {
        self.until(&format!("{model} is {state}"), Duration::from_secs(10), || {
            self.client().get(&format!("/v1/models/{model}")).json()["state"] == state
        });
    }

    pub(crate) fn leases(&self) -> u64 {
        self.fleet()["engines"].as_array().unwrap().iter().filter_map(|e| e["leases"].as_u64()).sum()
    }
}

impl GatewayFixture {
    /// Adds a model whose engine answers with the request as it arrived. `keys`: keys of the engine, one a line.
    pub(crate) fn echo_model(self, name: &str, keys: &str) -> Self {
        let (command, env, behind) =
            row::test_engine_command("support::engine::echo", &["ECHO_AT=${HOST}:${PORT}"]);
        let keys = keys.lines().fold(String::new(), |text, line| format!("{text}      {line}\n"));
        self.model_yaml(&format!(
            r#"  - name: {name}
    engine:
      kind: custom
      task: none
      command: {command}
      env: {env}
{behind}{keys}    memory: {{awake: 64Mi}}
"#
        ))
    }
}

/// Runs the echoing engine when another test starts this binary as one. Among the tests it does nothing.
#[test]
fn echo() {
    let Ok(address) = std::env::var("ECHO_AT") else { return };
    let mut listener = Some(TcpListener::bind(address).unwrap());
    // One connection after the other: no request here takes long.
    while let Some(Ok((stream, _))) = listener.as_ref().map(TcpListener::accept) {
        answer(stream, &mut listener);
    }
    // After `deafen` the process lives on without a listener until the gateway ends it.
    while listener.is_none() {
        std::thread::park();
    }
}

/// Answers one request per connection: the end of the answer ends the connection.
fn answer(mut stream: TcpStream, listener: &mut Option<TcpListener>) {
    let Some(request) = read_request(&mut stream) else { return };
    let text = String::from_utf8_lossy(&request).into_owned();
    let behave = text.lines().find_map(|line| line.strip_prefix(&format!("{BEHAVIOR_HEADER}: ")));
    let extra = match behave {
        Some("close") => return,
        Some("forge") => {
            "x-rouse-cold-start: forged\r\nconnection: x-private, close\r\nx-private: 1\r\nkeep-alive: timeout=9\r\n\
             proxy-authenticate: Basic\r\nx-passes: yes\r\n"
        }
        _ => "connection: close\r\n",
    };
    let head = format!("HTTP/1.1 200 OK\r\n{extra}content-length: {}\r\n\r\n", request.len());
    if behave == Some("deafen") {
        // The listener closes before the answer, because the answer confirms it.
        listener.take();
    }
    // The gateway may have closed the connection, and then no client waits for this answer.
    drop(stream.write_all(&[head.as_bytes(), &request].concat()));
}
