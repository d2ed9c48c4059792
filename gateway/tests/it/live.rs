//! An engine that a test reaches past the gateway.

use std::{
    net::SocketAddr,
    path::{Path, PathBuf},
};

use nix::{sys::signal::Signal, unistd::Pid};
use serde_json::Value;

use crate::support::{GatewayProcess, TestClient, read};

/// All clients share one address, and a gateway without CPU time still holds the connections that closed meanwhile.
pub(crate) const UNLIMITED_CONNECTIONS: &str = "limits: {connectionsPerAddress: 100000}";

/// The process of one engine, as the gateway recorded it for adoption.
pub(crate) struct EngineUnderTest {
    pub(crate) pid: i32,
    client: TestClient,
}

impl EngineUnderTest {
    pub(crate) fn of(gateway: &GatewayProcess, id: &str) -> Self {
        let pid = gateway.engine_pid(id);
        let address: SocketAddr =
            adoption_file(&gateway.dir)["engines"][id]["address"].as_str().unwrap().parse().unwrap();
        Self { pid, client: TestClient::new(address) }
    }

    pub(crate) fn counters(&self) -> Value {
        self.client.get("/sim/counters").json()
    }

    /// Sets and clears faults: `{"hang": true}`.
    pub(crate) fn faults(&self, faults: &str) {
        let answer = self.client.post("/sim/faults", faults);
        assert!(matches!(answer.status, 200..=299), "{}", answer.text());
    }

    pub(crate) fn signal(&self, signal: Signal) {
        nix::sys::signal::kill(Pid::from_raw(self.pid), signal).unwrap();
    }

    pub(crate) fn lives(&self) -> bool {
        is_alive(self.pid)
    }
}

/// The file from which a gateway adopts engines.
fn adoption_file(dir: &Path) -> Value {
    serde_json::from_str(&read(&dir.join("state/engines.json"))).unwrap_or_default()
}

/// Whether the process runs. A zombie does not count.
pub(crate) fn is_alive(pid: i32) -> bool {
    let stat = read(&PathBuf::from(format!("/proc/{pid}/stat")));
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}
