//! Finds the readiness endpoint of an engine in a provider Pod.

use k8s_openapi::{
    api::core::v1::{Container, HTTPGetAction},
    apimachinery::pkg::util::intstr::IntOrString,
};

/// Default port and path of engines.
const PORT: u16 = 8000;
const PATH: &str = "/health";
const FLAG: &str = "--port";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReadinessEndpoint {
    /// The engine also serves requests on this port.
    pub port: u16,
    pub path: String,
    /// Whether the Pod becomes ready only with its engine; without a probe it is ready once its container runs.
    pub probed: bool,
}

/// Reads the container's HTTP readiness probe, or else the port in its command line.
#[must_use]
pub(super) fn readiness_endpoint(container: &Container) -> ReadinessEndpoint {
    let probe = container.readiness_probe.as_ref();
    let http = probe.and_then(|probe| probe.http_get.as_ref());
    let port = http.and_then(|http| probe_port(container, http)).or_else(|| flag(container)).unwrap_or(PORT);
    let path = http.and_then(|http| http.path.clone()).filter(|path| !path.is_empty());
    ReadinessEndpoint { port, path: path.unwrap_or_else(|| PATH.to_owned()), probed: probe.is_some() }
}

fn probe_port(container: &Container, http: &HTTPGetAction) -> Option<u16> {
    let number = match &http.port {
        IntOrString::Int(number) => *number,
        IntOrString::String(name) => {
            let mut ports = container.ports.iter().flatten();
            ports.find(|port| port.name.as_ref() == Some(name))?.container_port
        }
    };
    u16::try_from(number).ok().filter(|port| *port > 0)
}

/// Reads the port flag from the command line; the last one counts. Splits shell scripts at white space.
fn flag(container: &Container) -> Option<u16> {
    let all = container.command.iter().chain(&container.args).flatten();
    let mut words = all.flat_map(|word| word.split_whitespace());
    let mut port = None;
    while let Some(word) = words.next() {
        let value = match word.strip_prefix(FLAG) {
            Some("") => words.next(),
            Some(rest) => rest.strip_prefix('='),
            None => continue,
        };
        port = value.and_then(|value| value.trim_matches(['"', '\'']).parse().ok()).or(port);
    }
    port.filter(|port| *port > 0)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(container: Value) -> ReadinessEndpoint {
        let mut container = container;
        container["name"] = "inference-server".into();
        readiness_endpoint(&serde_json::from_value(container).unwrap())
    }

    #[test]
    fn a_probe_says_where_by_number_or_by_name() {
        let ports = json!([{"name": "metrics", "containerPort": 1}, {"name": "http", "containerPort": 8010}]);
        for (port, want) in
            [(json!(8005), 8005), (json!("http"), 8010), (json!("other"), 9000), (json!(0), 9000)]
        {
            let probe = json!({"httpGet": {"path": "/ready", "port": port}});
            let container = json!({"ports": ports, "readinessProbe": probe, "args": ["--port", "9000"]});
            let want = ReadinessEndpoint { port: want, path: "/ready".to_owned(), probed: true };
            assert_eq!(read(container), want, "{port}");
        }
        let other = json!({"readinessProbe": {"exec": {"command": ["true"]}}});
        assert_eq!(read(other), ReadinessEndpoint { port: 8000, path: "/health".to_owned(), probed: true });
    }

    #[test]
    fn without_one_the_command_line_does() {
        for (command, args, want) in [
            (json!(["vllm", "serve", "--port=8005"]), json!([]), 8005),
            (json!(["vllm", "serve"]), json!(["--port", "8006", "m"]), 8006),
            (json!(["--port=1"]), json!(["--port=2"]), 2),
            (json!(["sh", "-c", "exec vllm serve m --port '8007' # x"]), json!([]), 8007),
            (json!(["vllm", "--port-file=9", "--port", "many"]), json!(["--port"]), 8000),
            (json!([]), json!([]), 8000),
        ] {
            let container = json!({"command": command, "args": args});
            let want = ReadinessEndpoint { port: want, path: "/health".to_owned(), probed: false };
            assert_eq!(read(container), want, "{command} {args}");
        }
    }
}
