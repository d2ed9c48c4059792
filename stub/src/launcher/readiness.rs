//! Whether an engine can be asked: it answers health requests, and does not say that it sleeps.

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

/// Between two questions: short at first, since small engines are up in no time, and never longer than the last.
const MIN_PROBE_INTERVAL: Duration = Duration::from_millis(10);
const MAX_PROBE_INTERVAL: Duration = Duration::from_secs(1);
const PROBE_INTERVAL_GROWTH: f64 = 1.3;
/// An engine that computes may be slow to answer.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// So many questions in a row without an answer, and a ready engine is no longer that.
const MAX_SILENT_PROBES: u32 = 3;
/// vLLM's.
const DEFAULT_ENGINE_PORT: u16 = 8000;

#[derive(Debug)]
pub(crate) struct ReadinessProbe {
    adapter: Adapter,
    port: u16,
    group: i32,
    mark: String,
}

impl ReadinessProbe {
    /// `words`: the engine's command line; `group` and `mark` tell its processes.
    pub(crate) fn new(words: &[String], group: i32, mark: String) -> Self {
        // Not vLLM's: other programs may be told to run, and some have no route for health.
        let manner = EngineProfile {
            kind: EngineKind::Custom,
            sleep: SleepApi::Vllm,
            served_name: String::new(),
            task: ProbeTask::None,
            api_key: None,
        };
        let address = address(words);
        Self { adapter: Adapter::new(manner, address), port: address.port(), group, mark }
    }

    /// Asks for ever, and tells each change.
    pub(crate) async fn watch(&self, tell: impl Fn(bool)) -> Infallible {
        let (mut ready, mut silent, mut gap) = (false, 0_u32, MIN_PROBE_INTERVAL);
        loop {
            let health = self.adapter.health(PROBE_TIMEOUT).await;
            silent = if health == EngineHealth::Unreachable { silent + 1 } else { 0 };
            let now = match health {
                EngineHealth::Healthy => {
                    self.adapter.is_asleep(PROBE_TIMEOUT).await != Some(true)
                        && (ready || self.is_own_listener().await)
                }
                // No stub stands here: an engine that says so is none to believe.
                EngineHealth::Unhealthy | EngineHealth::Gated => false,
                EngineHealth::Unreachable => ready && silent < MAX_SILENT_PROBES,
            };
            if now != ready {
                tell(now);
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

    /// Whether it is this engine that listens. With one port in two options the second engine finds it taken, and what
    /// answers there is the first. Where the kernel does not tell whose a socket is, whoever answers is believed.
    async fn is_own_listener(&self) -> bool {
        let (port, group, mark) = (self.port, self.group, self.mark.clone());
        let own = task::spawn_blocking(move || {
            let all = table::listeners(port);
            all.is_empty() || !table::owned_by(&all, &table::members(Some(group), &mark)).is_empty()
        });
        own.await.unwrap_or(false)
    }
}

/// Where the engine will listen, as seen from here.
fn address(words: &[String]) -> SocketAddr {
    let port = flag_value(words, "--port").and_then(|port| port.parse().ok()).unwrap_or(DEFAULT_ENGINE_PORT);
    let host = flag_value(words, "--host").and_then(|host| host.parse().ok());
    let host = match host.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST)) {
        IpAddr::V4(host) if host.is_unspecified() => IpAddr::V4(Ipv4Addr::LOCALHOST),
        IpAddr::V6(host) if host.is_unspecified() => IpAddr::V6(Ipv6Addr::LOCALHOST),
        host => host,
    };
    SocketAddr::new(host, port)
}

/// The value of `--name VALUE` or `--name=VALUE`; the last one counts.
fn flag_value<'a>(words: &'a [String], name: &str) -> Option<&'a str> {
    let value = |(at, word): (usize, &'a String)| match word.strip_prefix(name)? {
        "" => words.get(at + 1).map(String::as_str),
        rest => rest.strip_prefix('='),
    };
    words.iter().enumerate().rev().find_map(value)
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
