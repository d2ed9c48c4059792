//! Probes: a kubelet's repeated checks of a container, and their thresholds.

use std::{net::Ipv4Addr, process::Stdio, time::Duration};

use k8s_openapi::{
    api::core::v1::{Container, ContainerPort, ExecAction, HTTPGetAction, Probe, TCPSocketAction},
    apimachinery::pkg::util::intstr::IntOrString,
};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    process::Command,
    sync::mpsc,
    time,
};

/// A kubelet reads no more of a response.
const MAX_RESPONSE_BYTES: u64 = 10 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbeKind {
    Startup,
    Liveness,
    Readiness,
}

impl ProbeKind {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Startup => "Startup",
            Self::Liveness => "Liveness",
            Self::Readiness => "Readiness",
        }
    }

    pub(super) fn spec_of(self, container: &Container) -> Option<&Probe> {
        match self {
            Self::Startup => container.startup_probe.as_ref(),
            Self::Liveness => container.liveness_probe.as_ref(),
            Self::Readiness => container.readiness_probe.as_ref(),
        }
    }
}

/// The action of a probe or hook.
#[derive(Clone, Debug)]
pub(super) enum HandlerAction {
    Http { address: String, path: String, headers: Vec<(String, String)> },
    Tcp { address: String },
    Exec(Vec<String>),
    Sleep(Duration),
    Unsupported(&'static str),
}

impl HandlerAction {
    pub(super) fn from_probe(probe: &Probe, ip: Ipv4Addr, ports: &[ContainerPort]) -> Self {
        if let Some(http) = &probe.http_get {
            return Self::http(http, ip, ports);
        }
        if let Some(TCPSocketAction { host, port }) = &probe.tcp_socket {
            return address(host.as_deref(), ip, port, ports)
                .map_or(Self::Unsupported("a port without a number"), |address| Self::Tcp { address });
        }
        if let Some(exec) = &probe.exec {
            return Self::exec(exec);
        }
        Self::Unsupported("gRPC probes")
    }

    pub(super) fn http(http: &HTTPGetAction, ip: Ipv4Addr, ports: &[ContainerPort]) -> Self {
        if http.scheme.as_deref() == Some("HTTPS") {
            return Self::Unsupported("HTTPS probes");
        }
        let Some(address) = address(http.host.as_deref(), ip, &http.port, ports) else {
            return Self::Unsupported("a port without a number");
        };
        let headers =
            http.http_headers.iter().flatten().map(|header| (header.name.clone(), header.value.clone()));
        let path = http.path.clone().unwrap_or_else(|| "/".to_owned());
        Self::Http { address, path, headers: headers.collect() }
    }

    pub(super) fn exec(exec: &ExecAction) -> Self {
        Self::Exec(exec.command.clone().unwrap_or_default())
    }

    /// Runs the action once. `beside` makes an exec command's process.
    pub(super) async fn run(&self, beside: impl Fn() -> Result<Command, String>) -> Result<(), String> {
        match self {
            Self::Http { address, path, headers } => get(address, path, headers).await,
            Self::Tcp { address } => TcpStream::connect(address)
                .await
                .map(drop)
                .map_err(|error| format!("dial tcp {address}: {error}")),
            Self::Exec(_) => {
                let mut command = beside()?;
                command.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
                let status = command.status().await.map_err(|error| error.to_string())?;
                if status.success() { Ok(()) } else { Err(format!("command failed: {status}")) }
            }
            Self::Sleep(pause) => {
                time::sleep(*pause).await;
                Ok(())
            }
            Self::Unsupported(what) => Err(format!("podrunner does not support {what}")),
        }
    }
}

fn address(host: Option<&str>, ip: Ipv4Addr, port: &IntOrString, ports: &[ContainerPort]) -> Option<String> {
    let number = match port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => {
            ports.iter().find(|port| port.name.as_ref() == Some(name)).map(|port| port.container_port)?
        }
    };
    let host = host.filter(|host| !host.is_empty()).map_or_else(|| ip.to_string(), str::to_owned);
    Some(format!("{host}:{number}"))
}

/// Sends an HTTP probe. A status of 200 to 399 is success, as in a kubelet.
async fn get(address: &str, path: &str, headers: &[(String, String)]) -> Result<(), String> {
    let said = |error: std::io::Error| format!("Get \"http://{address}{path}\": {error}");
    let mut stream = TcpStream::connect(address).await.map_err(said)?;
    let slash = if path.starts_with('/') { "" } else { "/" };
    let mut head =
        format!("GET {slash}{path} HTTP/1.1\r\nUser-Agent: kube-probe/1.34\r\nConnection: close\r\n");
    if !headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
        head += &format!("Host: {address}\r\n");
    }
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    stream.write_all(format!("{head}\r\n").as_bytes()).await.map_err(said)?;
    let mut answer = Vec::new();
    let read = stream.take(MAX_RESPONSE_BYTES).read_to_end(&mut answer).await;
    let line = answer.split(|&byte| byte == b'\r').next().unwrap_or_default();
    let line = String::from_utf8_lossy(line);
    let status = line.strip_prefix("HTTP/1.").and_then(|rest| rest.split(' ').nth(1)?.parse::<u16>().ok());
    match (status, read) {
        (Some(200..=399), _) => Ok(()),
        (Some(status), _) => Err(format!("HTTP probe failed with statuscode: {status}")),
        (None, Err(error)) => Err(said(error)),
        (None, Ok(_)) => Err(format!("Get \"http://{address}{path}\": no HTTP answer")),
    }
}

/// A changed probe result, with the reason of a failure.
pub(super) type ProbeVerdict = (ProbeKind, Result<(), String>);

/// Probes until the container ends and sends each changed result. A startup probe ends with its first success.
pub(super) async fn run_probe(
    kind: ProbeKind,
    probe: Probe,
    action: HandlerAction,
    hook_command: impl Fn() -> Result<Command, String>,
    verdict_tx: mpsc::Sender<ProbeVerdict>,
) {
    let seconds = |value: Option<i32>, default: u64| {
        Duration::from_secs(value.and_then(|value| u64::try_from(value).ok()).unwrap_or(default))
    };
    let times = |value: Option<i32>, default: i32| value.unwrap_or(default).max(1);
    let (period, timeout) = (seconds(probe.period_seconds, 10), seconds(probe.timeout_seconds, 1));
    time::sleep(seconds(probe.initial_delay_seconds, 0)).await;
    let mut ticks = time::interval(period.max(Duration::from_secs(1)));
    ticks.set_missed_tick_behavior(time::MissedTickBehavior::Delay);
    // Initially a readiness or startup probe counts as failed, and a liveness probe as passed.
    let mut believed = kind == ProbeKind::Liveness;
    let (mut good, mut bad) = (0, 0);
    loop {
        ticks.tick().await;
        let outcome = match time::timeout(timeout, action.run(&hook_command)).await {
            Ok(outcome) => outcome,
            Err(_) => Err(format!("no answer within {} s", timeout.as_secs())),
        };
        match &outcome {
            Ok(()) => (good, bad) = (good + 1, 0),
            Err(_) => (good, bad) = (0, bad + 1),
        }
        let changed = match &outcome {
            Ok(()) => !believed && good >= times(probe.success_threshold, 1),
            // A failed liveness or startup probe kills the container, once.
            Err(_) => bad == times(probe.failure_threshold, 3) && (believed || kind == ProbeKind::Startup),
        };
        if changed {
            believed = outcome.is_ok();
            if verdict_tx.send((kind, outcome)).await.is_err() || (kind == ProbeKind::Startup && believed) {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use rouse_testing::scripted_engine::{read_head, serve};
    use serde_json::json;

    use super::*;

    fn probe(value: serde_json::Value) -> Probe {
        serde_json::from_value(value).unwrap()
    }

    fn nothing() -> Result<Command, String> {
        Err("no command".to_owned())
    }

    /// Answers each connection with the next of these responses, then repeats the last.
    fn server(answers: &'static [&'static str]) -> u16 {
        let mut served = 0;
        let address = serve(move |mut stream| {
            read_head(&mut stream).unwrap();
            stream.write_all(answers[served].as_bytes()).unwrap();
            served = answers.len().min(served + 2) - 1;
        });
        address.port()
    }

    #[tokio::test]
    async fn statuses_from_200_to_399_are_good_and_nothing_else() {
        for (answer, good) in [
            ("HTTP/1.1 200 OK\r\n\r\n", true),
            ("HTTP/1.0 204\r\n\r\n", true),
            ("HTTP/1.1 302 Found\r\n\r\n", true),
            ("HTTP/1.1 404 Not Found\r\n\r\n", false),
            ("HTTP/1.1 503 x\r\n\r\n", false),
            ("hello\r\n", false),
            ("", false),
        ] {
            let port = server(Box::leak(Box::new([answer])));
            let ports: Vec<ContainerPort> =
                serde_json::from_value(json!([{ "name": "web", "containerPort": port }])).unwrap();
            let asked = probe(json!({ "httpGet": { "port": "web", "path": "/ready" } }));
            let action = HandlerAction::from_probe(&asked, Ipv4Addr::LOCALHOST, &ports);
            assert_eq!(action.run(nothing).await.is_ok(), good, "{answer:?}");
        }
    }

    #[tokio::test]
    async fn a_verdict_changes_at_its_threshold_and_not_before() {
        const GOOD: &str = "HTTP/1.1 200 OK\r\n\r\n";
        const BAD: &str = "HTTP/1.1 503 x\r\n\r\n";
        let port = server(&[GOOD, BAD, GOOD, BAD, BAD, GOOD]);
        let asked = json!({
            "httpGet": { "port": port }, "periodSeconds": 1, "failureThreshold": 2, "successThreshold": 1,
        });
        let asked = probe(asked);
        let action = HandlerAction::from_probe(&asked, Ipv4Addr::LOCALHOST, &[]);
        let (told, mut verdicts) = mpsc::channel(8);
        tokio::spawn(run_probe(ProbeKind::Readiness, asked, action, nothing, told));
        let mut seen = Vec::new();
        for _ in 0..3 {
            let (kind, outcome) = verdicts.recv().await.unwrap();
            seen.push((kind, outcome.is_ok()));
        }
        assert_eq!(
            seen,
            [(ProbeKind::Readiness, true), (ProbeKind::Readiness, false), (ProbeKind::Readiness, true)]
        );
    }
}
