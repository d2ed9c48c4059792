//! The flags: two sets of ports, for the two designs that this program replaces, and the flags that both share.

use std::{net::IpAddr, path::PathBuf, time::Duration};

use rouse::units::Millis;
use rouse_net::adapter::EngineKind;

use crate::token::TokenHash;

/// The earlier design's default ports, used when any of its port flags is given.
const DEFAULT_RELAY_PORT: u16 = 8000;
const DEFAULT_ADMIN_PORT: u16 = 8001;
const DEFAULT_METRICS_PORT: u16 = 8002;
const DEFAULT_DEBUG_PORT: u16 = 8003;

/// Flags of the proxy. A port of 0 is any free port; the proxy writes each address to stderr.
#[derive(Debug, clap::Args)]
pub struct ProxyArgs {
    /// Address to listen on [default: all addresses; the debug port always on loopback]
    #[arg(long, value_name = "ADDRESS")]
    pub(super) host: Option<IpAddr>,
    /// Port for the kubelet's probes: GET /ready
    #[arg(long, env = "PROBES_PORT", value_name = "PORT", default_value_t = 8080)]
    pub(super) probes_port: u16,
    /// Port for controllers
    #[arg(long, env = "SPI_PORT", value_name = "PORT", default_value_t = 8081)]
    pub(super) spi_port: u16,
    /// Port for requests to the engine; opens once PUT /v1/proxy/config has set the engine's address
    #[arg(long, value_name = "PORT", default_value_t = 8082)]
    pub(super) proxy_port: u16,
    /// Port for requests to the engine; open from the start
    ///
    /// For several ports repeat the flag, or write --relay-port-1, --relay-port-2 and so on.
    #[arg(long, value_name = "PORT")]
    pub(super) relay_port: Vec<u16>,
    /// Port with the same paths as the SPI port
    ///
    /// Any of --relay-port, --admin-port, --metrics-port and --debug-port opens all four, with the defaults 8000, 8001,
    /// 8002 and 8003.
    #[arg(long, value_name = "PORT")]
    pub(super) admin_port: Option<u16>,
    /// Port with metrics for Prometheus: GET /metrics
    #[arg(long, value_name = "PORT")]
    pub(super) metrics_port: Option<u16>,
    /// Port with the proxy's internal state, on loopback only
    #[arg(long, value_name = "PORT")]
    pub(super) debug_port: Option<u16>,
    /// Time limit to connect to the engine
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
    pub(super) proxy_dial_timeout: Duration,
    /// Maximum size of a request's body; 0 for any size
    ///
    /// The proxy passes bodies on as they arrive.
    #[arg(long, value_name = "SIZE", default_value = "256Mi")]
    pub(super) max_body: rouse::units::Bytes,
    /// How long a client may pause in a request's body, and how long the first 64 KiB of the body may take
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s")]
    pub(super) body_timeout: Duration,
    /// Minimum rate of a request's body behind its first 64 KiB, in bytes a second; 0 for any rate
    ///
    /// Measured over five seconds, or over --body-timeout if that is shorter. The time in which the engine takes nothing
    /// does not count.
    #[arg(long, value_name = "SIZE", default_value = "1Ki")]
    pub(super) body_rate: rouse::units::Bytes,
    /// How long a request's head may take from its first byte, and how long a new connection may send nothing
    #[arg(long, value_name = "TIME", value_parser = parse_positive_duration, default_value = "10s")]
    pub(super) head_timeout: Duration,
    /// How long a client's connection may stay open without a request after its last one
    ///
    /// Longer than any gateway keeps an idle connection.
    #[arg(long, value_name = "TIME", value_parser = parse_positive_duration, default_value = "75s")]
    pub(super) idle_timeout: Duration,
    /// How long a client may read nothing of its response; while the gate is closed, 5 seconds at most
    #[arg(long, value_name = "TIME", value_parser = parse_positive_duration, default_value = "60s")]
    pub(super) stall_timeout: Duration,
    /// Maximum number of client connections, over all ports for requests; further ones wait until one ends
    #[arg(long, value_name = "COUNT", default_value_t = 2048)]
    pub(super) max_connections: usize,
    /// Start with a closed gate and no target, and hold after SIGTERM until released
    ///
    /// For controllers that send epochs.
    #[arg(long)]
    pub(super) epoch_gate: bool,
    /// Maximum duration of the hold after SIGTERM; requests that still run then are cut
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s")]
    pub(super) hold: Duration,
    /// How long requests may continue after SIGTERM, without a hold
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s")]
    pub(super) shutdown: Duration,
    /// Require the bearer token in this file on the SPI and admin ports; a new token counts at once
    #[arg(long, value_name = "FILE")]
    pub(super) token_file: Option<PathBuf>,
    /// Require the bearer token with this SHA-256, in hexadecimal digits, on the SPI and admin ports
    #[arg(long, value_name = "HASH", conflicts_with = "token_file")]
    pub(super) token_sha256: Option<TokenHash>,
    /// File with the accelerators' UUIDs, used if no other source has them
    ///
    /// One UUID a line or a JSON array in the order of their indices, or a JSON object of UUIDs and indices.
    #[arg(long, value_name = "FILE")]
    pub(super) accelerators_file: Option<PathBuf>,
    /// File with the engine's address, as the downward API writes it: ADDRESS or ADDRESS:PORT
    #[arg(long, value_name = "FILE")]
    pub(super) server_ip_file: Option<PathBuf>,
    /// Engine's port if the address in --server-ip-file has none
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(super) server_port: u16,
    /// Program that the engine is: vllm, sglang, llamacpp or custom
    ///
    /// The kind decides which paths pass, and how the engine is put to sleep.
    #[arg(long, value_name = "KIND", default_value = "vllm", value_parser = parse_engine_kind)]
    pub(super) engine_kind: EngineKind,
    /// Engine's name for the model, used in messages and in probes
    ///
    /// A probe requests one token when the engine's counters are stuck.
    #[arg(long, value_name = "NAME", default_value = "this model")]
    pub(super) model: String,
    /// Number of threads that relay [default: one for each processor, four at most]
    #[arg(long, value_name = "COUNT")]
    pub(super) relay_threads: Option<usize>,
    /// Lowest level of messages to log: error, warn, info, debug or trace
    #[arg(long, value_name = "LEVEL", default_value = "info")]
    pub(super) log_level: tracing::Level,
}

/// The ports of the earlier design.
pub(super) struct LegacyPorts {
    pub(super) relay: Vec<u16>,
    pub(super) admin: u16,
    pub(super) metrics: u16,
    pub(super) debug: u16,
}

impl ProxyArgs {
    /// Returns the earlier design's ports if any of them was given.
    pub(super) fn legacy_ports(&self) -> Option<LegacyPorts> {
        let named = !self.relay_port.is_empty()
            || [self.admin_port, self.metrics_port, self.debug_port].iter().any(Option::is_some);
        named.then(|| LegacyPorts {
            relay: if self.relay_port.is_empty() {
                vec![DEFAULT_RELAY_PORT]
            } else {
                self.relay_port.clone()
            },
            admin: self.admin_port.unwrap_or(DEFAULT_ADMIN_PORT),
            metrics: self.metrics_port.unwrap_or(DEFAULT_METRICS_PORT),
            debug: self.debug_port.unwrap_or(DEFAULT_DEBUG_PORT),
        })
    }

    /// Returns how many listeners the relays get: the ports of the earlier design, and the proxy port.
    pub(super) fn max_relay_listeners(&self) -> usize {
        self.legacy_ports().map_or(0, |ports| ports.relay.len()) + 1
    }

    pub(super) fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from).min(4);
        self.relay_threads.unwrap_or_else(cores).max(1)
    }
}

fn parse_duration(text: &str) -> Result<Duration, rouse::units::Error> {
    text.parse().map(Millis::duration)
}

/// For deadlines of which 0 would end every connection at once.
fn parse_positive_duration(text: &str) -> Result<Duration, String> {
    match parse_duration(text) {
        Ok(Duration::ZERO) => Err("must be more than 0".into()),
        Ok(duration) => Ok(duration),
        Err(error) => Err(error.to_string()),
    }
}

fn parse_engine_kind(name: &str) -> Result<EngineKind, String> {
    Ok(match name {
        "vllm" => EngineKind::Vllm,
        "sglang" => EngineKind::Sglang,
        "llamacpp" => EngineKind::LlamaCpp,
        "custom" => EngineKind::Custom,
        _ => return Err("must be vllm, sglang, llamacpp or custom".into()),
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct ProxyFlagsLine {
        #[command(flatten)]
        args: ProxyArgs,
    }

    #[test]
    fn the_hold_lasts_as_long_as_a_drain_and_a_sleep_unless_the_flags_say_otherwise() {
        let line = ProxyFlagsLine::try_parse_from(["proxy"]).unwrap();
        let defaults = rouse::pairing::settings::PairingSettings::default();
        assert_eq!(line.args.hold, (defaults.drain_timeout + defaults.sleep_timeout).duration());
    }

    fn earlier(flags: &[&str]) -> Option<(Vec<u16>, u16, u16, u16)> {
        let line = ProxyFlagsLine::try_parse_from(std::iter::once(&"proxy").chain(flags)).unwrap();
        line.args.legacy_ports().map(|ports| (ports.relay, ports.admin, ports.metrics, ports.debug))
    }

    #[test]
    fn any_port_of_the_earlier_design_opens_all_of_them() {
        assert_eq!(earlier(&[]), None);
        assert_eq!(earlier(&["--spi-port=1"]), None);
        assert_eq!(earlier(&["--debug-port=7"]), Some((vec![8000], 8001, 8002, 7)));
        let two = earlier(&["--relay-port=1", "--relay-port=2"]);
        assert_eq!(two, Some((vec![1, 2], 8001, 8002, 8003)));
    }

    #[test]
    fn no_deadline_of_a_connection_is_zero() {
        let parsed = |flag: &str| ProxyFlagsLine::try_parse_from(["proxy", flag]).map(|line| line.args);
        assert_eq!(parsed("--head-timeout=250ms").unwrap().head_timeout, Duration::from_millis(250));
        for flag in ["--head-timeout=0s", "--idle-timeout=0s", "--stall-timeout=0s"] {
            let error = parsed(flag).unwrap_err().to_string();
            assert!(error.contains("must be more than 0"), "{flag}: {error}");
        }
    }

    #[test]
    fn the_kinds_of_engines_are_those_of_the_gateway() {
        for name in ["vllm", "sglang", "llamacpp", "custom"] {
            assert!(parse_engine_kind(name).is_ok(), "{name}");
        }
        assert!(parse_engine_kind("vLLM").is_err());
    }
}
