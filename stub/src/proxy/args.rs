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

/// Flags of the proxy. A port of 0 is any that is free; where each listens is written to stderr.
#[derive(Debug, clap::Args)]
pub struct ProxyArgs {
    /// Listen on this address only [default: all addresses; the debug port always on loopback]
    #[arg(long, value_name = "ADDRESS")]
    pub(super) host: Option<IpAddr>,
    /// Readiness, for the kubelet: GET /ready
    #[arg(long, env = "PROBES_PORT", value_name = "PORT", default_value_t = 8080)]
    pub(super) probes_port: u16,
    /// What controllers call
    #[arg(long, env = "SPI_PORT", value_name = "PORT", default_value_t = 8081)]
    pub(super) spi_port: u16,
    /// Requests for the engine; listens once PUT /v1/proxy/config has named it
    #[arg(long, value_name = "PORT", default_value_t = 8082)]
    pub(super) proxy_port: u16,
    /// Requests for the engine; listens from the start. Repeat it, or write --relay-port-1, --relay-port-2 and so on
    #[arg(long, value_name = "PORT")]
    pub(super) relay_port: Vec<u16>,
    /// The same as the SPI port. Any of --relay-port, --admin-port, --metrics-port and --debug-port opens all four, at
    /// 8000 to 8003 where nothing else is said
    #[arg(long, value_name = "PORT")]
    pub(super) admin_port: Option<u16>,
    /// Metrics for Prometheus: GET /metrics
    #[arg(long, value_name = "PORT")]
    pub(super) metrics_port: Option<u16>,
    /// What goes on inside, on loopback only
    #[arg(long, value_name = "PORT")]
    pub(super) debug_port: Option<u16>,
    /// Longest time to get a connection to the engine
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "10s")]
    pub(super) proxy_dial_timeout: Duration,
    /// Largest body of a request; 0 for any size. Bodies are passed on as they come
    #[arg(long, value_name = "SIZE", default_value = "256Mi")]
    pub(super) max_body: rouse::units::Bytes,
    /// How long a client may pause in a request's body, and how long the first 64 KiB of it may take
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s")]
    pub(super) body_timeout: Duration,
    /// Clients' connections at a time, over all ports for requests; further ones wait until one of them ends
    #[arg(long, value_name = "COUNT", default_value_t = 2048)]
    pub(super) max_connections: usize,
    /// Start with the gate closed and without a target, and hold after SIGTERM until released: for controllers that
    /// send epochs
    #[arg(long)]
    pub(super) epoch_gate: bool,
    /// How long the hold after SIGTERM lasts at most; requests that still run then are cut
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s")]
    pub(super) hold: Duration,
    /// Without a hold: how long requests may go on after SIGTERM
    #[arg(long, value_name = "TIME", value_parser = parse_duration, default_value = "60s")]
    pub(super) shutdown: Duration,
    /// Demand the bearer token of this file on the SPI and admin ports; read again when it changes
    #[arg(long, value_name = "FILE")]
    pub(super) token_file: Option<PathBuf>,
    /// Demand there the bearer token that has this SHA-256, as hexadecimal digits
    #[arg(long, value_name = "HASH", conflicts_with = "token_file")]
    pub(super) token_sha256: Option<TokenHash>,
    /// UUIDs of the accelerators, one a line, where nothing else tells them
    #[arg(long, value_name = "FILE")]
    pub(super) accelerators_file: Option<PathBuf>,
    /// Take the engine's address from this file, as the downward API writes it: ADDRESS or ADDRESS:PORT
    #[arg(long, value_name = "FILE")]
    pub(super) server_ip_file: Option<PathBuf>,
    /// The port that belongs to an address without one in --server-ip-file
    #[arg(long, value_name = "PORT", default_value_t = 8000)]
    pub(super) server_port: u16,
    /// Which program the engine is: it decides which paths pass, and how it is put to sleep
    #[arg(long, value_name = "KIND", default_value = "vllm", value_parser = parse_engine_kind)]
    pub(super) engine_kind: EngineKind,
    /// The model's name as the engine knows it, for messages and for the one token that is asked for when an engine's
    /// counters are stuck
    #[arg(long, value_name = "NAME", default_value = "this model")]
    pub(super) model: String,
    /// Threads that relay [default: one for each processor, four at most]
    #[arg(long, value_name = "COUNT")]
    pub(super) relay_threads: Option<usize>,
    /// Messages of this level and above: error, warn, info, debug or trace
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

    pub(super) fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, usize::from).min(4);
        self.relay_threads.unwrap_or_else(cores).max(1)
    }
}

fn parse_duration(text: &str) -> Result<Duration, rouse::units::Error> {
    text.parse().map(Millis::duration)
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
    fn the_kinds_of_engines_are_those_of_the_gateway() {
        for name in ["vllm", "sglang", "llamacpp", "custom"] {
            assert!(parse_engine_kind(name).is_ok(), "{name}");
        }
        assert!(parse_engine_kind("vLLM").is_err());
    }
}
