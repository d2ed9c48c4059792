//! Probes whether an engine is ready: it answers health checks and does not report that it sleeps.

use std::{
    convert::Infallible,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use rouse_net::{
    adapter::{Adapter, EngineHealth, EngineKind, EngineProfile, ProbeTask, SleepApi},
    process::table,
};
use tokio::{task, time};

/// Delay between probes. It starts short, since small engines start at once, and grows up to the maximum.
const MIN_PROBE_INTERVAL: Duration = Duration::from_millis(10);
const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(1);
const PROBE_INTERVAL_GROWTH: f64 = 1.3;
/// A busy engine may answer slowly.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// A ready engine becomes unready after this many unanswered probes in a row.
const MAX_SILENT_PROBES: u32 = 3;
/// vLLM's default port.
const DEFAULT_ENGINE_PORT: u16 = 8000;

#[derive(Debug)]
pub(crate) struct ReadinessProbe {
    adapter: Adapter,
    port: u16,
    group: i32,
    mark: String,
}

impl ReadinessProbe {
    /// `command_line` is the engine's command line. `group` and `mark` identify its processes.
    pub(crate) fn new(command_line: &[String], group: i32, mark: String) -> Self {
        // A custom profile, since the command may be a program other than vLLM, and some have no health route.
        let profile = EngineProfile {
            kind: EngineKind::Custom,
            sleep: SleepApi::Vllm,
            served_name: String::new(),
            task: ProbeTask::None,
            api_key: None,
        };
        let address = address(command_line);
        Self { adapter: Adapter::new(profile, address), port: address.port(), group, mark }
    }

    /// Probes forever and reports each change.
    pub(crate) async fn watch(&self, on_change: impl Fn(bool)) -> Infallible {
        let (mut ready, mut silent, mut gap) = (false, 0_u32, MIN_PROBE_INTERVAL);
        loop {
            let health = self.adapter.health(PROBE_TIMEOUT).await;
            silent = if health == EngineHealth::Unreachable { silent + 1 } else { 0 };
            let now = match health {
                EngineHealth::Healthy => {
                    self.adapter.is_asleep(PROBE_TIMEOUT).await != Some(true)
                        && (ready || self.is_own_listener().await)
                }
                // No stub stands in front of the engine here, so an engine that reports a closed gate is not ready.
                EngineHealth::Unhealthy | EngineHealth::Gated => false,
                EngineHealth::Unreachable => ready && silent < MAX_SILENT_PROBES,
            };
            if now != ready {
                on_change(now);
                gap = MIN_PROBE_INTERVAL;
            }
            ready = now;
            time::sleep(gap).await;
            gap = if ready {
                MAX_PROBE_INTERVAL
            } else {
                gap.mul_f64(PROBE_INTERVAL_GROWTH).min(MAX_PROBE_INTERVAL)
            };
        }
    }

    /// Whether this engine owns the listener. If two engines have the same port in their options, the second fails to
    /// bind, and the first answers the probe. If the kernel does not reveal the owner of the socket, the answer is
    /// accepted.
    async fn is_own_listener(&self) -> bool {
        let (port, group, mark) = (self.port, self.group, self.mark.clone());
        let owned = task::spawn_blocking(move || {
            let all = table::listeners(port);
            all.is_empty() || !table::owned_by(&all, &table::members(Some(group), &mark)).is_empty()
        });
        owned.await.unwrap_or(false)
    }
}

/// The address at which the launcher reaches the engine.
fn address(command_line: &[String]) -> SocketAddr {
    let port =
        flag_value(command_line, "--port").and_then(|port| port.parse().ok()).unwrap_or(DEFAULT_ENGINE_PORT);
    let host = flag_value(command_line, "--host").and_then(|host| host.parse().ok());
    let host = match host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)) {
        IpAddr::V4(host) if host.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(host) if host.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        host => host,
    };
    SocketAddr::new(host, port)
}

/// Returns the value of `--name VALUE` or `--name=VALUE`; the last occurrence wins.
fn flag_value<'a>(command_line: &'a [String], name: &str) -> Option<&'a str> {
    let value = |(at, word): (usize, &'a String)| match word.strip_prefix(name)? {
        "" => command_line.get(at + 1).map(String::as_str),
        rest => rest.strip_prefix('='),
    };
    command_line.iter().enumerate().rev().find_map(value)
}

#[cfg(test)]
mod tests {
    use rouse::shell_words;

    use super::*;

    #[test]
    fn an_engine_is_asked_where_its_options_say() {
        for (options, expected) in [
            ("--model m", "127.0.0.1:8000"),
            ("--model m --port 8005", "127.0.0.1:8005"),
            ("--port=8005 --host 0.0.0.0", "127.0.0.1:8005"),
            ("--host :: --port 1 --port 2", "[::1]:2"),
            ("--host=10.1.2.3", "10.1.2.3:8000"),
            ("vllm serve --host 10.1.2.3 --model m --port 8005", "10.1.2.3:8005"),
            ("--portion 7 --port", "127.0.0.1:8000"),
        ] {
            let options = shell_words::split(options).unwrap();
            assert_eq!(address(&options), expected.parse().unwrap(), "{options:?}");
        }
    }
}
