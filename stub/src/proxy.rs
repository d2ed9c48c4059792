//! `rouse-stub proxy`: runs in a requester Pod and is the only gate before an engine in another Pod.
//!
//! ```text
//!   relay and proxy ports   ──▶ gate ──▶ relay ──▶ engine     one thread and runtime per processor
//!   SPI and admin ports     ──▶ gate, target, engine, release  the control thread, with
//!   probes, metrics, debug                                     everything else that is rare
//! ```
//!
//! The control thread also reads the engine's load for gateways that ask for it (`proxy/load_reporter.rs`).
//!
//! The proxy decides nothing: the leader sends orders with an epoch that open the gate, name the engine and put it to
//! sleep.

mod accelerators;
mod actuation;
mod admin;
mod args;
mod debug;
mod gate;
mod listen;
mod load_reporter;
mod memory;
mod metrics;
mod probes;
mod readiness;
mod relay;
mod routers;
mod set_log;
mod shutdown;
mod state;
mod target;

use std::{process::ExitCode, sync::Arc};

use tokio::{sync::watch, task::JoinSet};

pub use args::ProxyArgs;
use shutdown::StubShutdownSignals;
use state::Proxy;

use crate::{serve, token::BearerToken};

/// Why the proxy ended; each error has an exit code.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// Exit codes 10 and 11 match the public stub's.
    #[error(transparent)]
    Listen(#[from] listen::Error),
    #[error("cannot use --token-file {file}: {source}")]
    Token { file: String, source: std::io::Error },
    #[error("cannot start: {0}")]
    Start(#[from] std::io::Error),
}

impl Error {
    fn exit_code(&self) -> u8 {
        match self {
            Self::Listen(error) => match error.name {
                "spi" | "admin" => 10,
                "probes" => 11,
                _ => 12,
            },
            Self::Token { .. } => 13,
            Self::Start(_) => 1,
        }
    }
}

/// Serves until SIGTERM and the end of the hold.
#[must_use]
pub fn run(args: ProxyArgs) -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(args.log_level)
        .init();
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::from(error.exit_code())
        }
    }
}

fn serve(args: &ProxyArgs) -> Result<(), Error> {
    if let Err(error) = rouse_net::fd_limit::raise() {
        tracing::warn!(%error, "cannot raise the limit of open files, keeping the current limit");
    }
    let token = match args.token_file.clone() {
        Some(file) => {
            let name = file.display().to_string();
            Some(BearerToken::from_file(file).map_err(|source| Error::Token { file: name, source })?)
        }
        None => args.token_sha256.map(BearerToken::Hashed),
    };
    let (threads, starts) =
        relay::RelayThreads::new(args.threads(), args.max_connections, args.max_relay_listeners());
    let proxy = Proxy::new(args, token, threads);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(async {
        let mut signals = StubShutdownSignals::new()?;
        let (ends, _) = watch::channel(false);
        let mut servers = listen_all(args, &proxy, &ends)?;
        let relaying = relay::start(&proxy, starts)?;
        let gate_owner = Arc::clone(&proxy);
        tokio::spawn(async move { gate_owner.gate.run().await });
        let reading = Arc::clone(&proxy);
        tokio::spawn(async move { load_reporter::run(&reading).await });
        if let Some(file) = args.server_ip_file.clone() {
            tokio::spawn(target::follow_file(Arc::clone(&proxy), file, args.server_port));
        }
        shutdown::run_shutdown(&proxy, args, &mut signals, relaying).await;
        // The response to the order that ended the proxy may still be in flight.
        ends.send_replace(true);
        let last = async { while servers.join_next().await.is_some() {} };
        drop(tokio::time::timeout(std::time::Duration::from_secs(1), last).await);
        Ok(())
    });
    // A write to an unread output may block a thread forever.
    runtime.shutdown_background();
    served
}

/// Opens every port that listens from the start.
fn listen_all(
    args: &ProxyArgs,
    proxy: &Arc<Proxy>,
    ends: &watch::Sender<bool>,
) -> Result<JoinSet<()>, Error> {
    let spi = listen::bind("spi", args.host, args.spi_port)?;
    let probes = listen::bind("probes", args.host, args.probes_port)?;
    let admin = admin::router(proxy, proxy.spi_router());
    let mut served = vec![(spi, admin.clone()), (probes, proxy.probes_router())];
    if let Some(earlier) = args.legacy_ports() {
        served.push((listen::bind("admin", args.host, earlier.admin)?, admin));
        served.push((listen::bind("metrics", args.host, earlier.metrics)?, proxy.metrics_router()));
        let loopback = std::net::Ipv4Addr::LOCALHOST.into();
        served.push((listen::bind("debug", Some(loopback), earlier.debug)?, proxy.debug_router()));
        for port in earlier.relay {
            proxy.relays.serve(listen::bind("relay", args.host, port)?)?;
        }
    }
    let mut servers = JoinSet::new();
    for (listener, router) in served {
        servers.spawn(serve::serve(tokio::net::TcpListener::from_std(listener)?, router, ends.subscribe()));
    }
    Ok(servers)
}
