//! `rouse-stub proxy`: in a requester Pod, the one gate before an engine in another Pod.
//!
//! ```text
//!   relay and proxy ports   ──▶ gate ──▶ relay ──▶ engine     one thread and runtime per processor
//!   SPI and admin ports     ──▶ gate, target, engine, release  the control thread, with
//!   probes, metrics, debug                                     everything else that is rare
//! ```
//!
//! It holds no opinion: whoever leads says, with an epoch, when the gate is open, where the engine is, and when it sleeps.

mod accelerators;
mod admin;
mod args;
mod debug;
mod engine;
mod gate;
mod hold;
mod listen;
mod memory;
mod metrics;
mod ports;
mod probes;
mod readiness;
mod relay;
mod set_log;
mod state;
mod target;

use std::{process::ExitCode, sync::Arc};

use tokio::{sync::watch, task::JoinSet};

pub use args::Args;
use hold::Signals;
use state::Proxy;

use crate::{serve, token::Token};

/// Why the proxy ended, and its exit codes.
#[derive(Debug, thiserror::Error)]
enum Error {
    /// 10 and 11 are those of the public stub.
    #[error(transparent)]
    Listen(#[from] listen::Error),
    #[error("cannot use --token-file {file}: {source}")]
    Token { file: String, source: std::io::Error },
    #[error("cannot start: {0}")]
    Start(#[from] std::io::Error),
}

impl Error {
    fn code(&self) -> u8 {
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
pub fn run(args: Args) -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .with_max_level(args.log_level)
        .init();
    match serve(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error}");
            ExitCode::from(error.code())
        }
    }
}

fn serve(args: &Args) -> Result<(), Error> {
    if let Err(error) = rouse::limits::raise() {
        tracing::warn!(%error, "the limit of open files stays as it is");
    }
    let token = match args.token_file.clone() {
        Some(file) => {
            let name = file.display().to_string();
            Some(Token::in_file(file).map_err(|source| Error::Token { file: name, source })?)
        }
        None => args.token_sha256.map(Token::Hashed),
    };
    let (threads, starts) = relay::Threads::new(args.threads(), args.max_connections);
    let proxy = Proxy::new(args, token, threads);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let served = runtime.block_on(async {
        let mut signals = Signals::new()?;
        let (ends, _) = watch::channel(false);
        let mut servers = listen_all(args, &proxy, &ends)?;
        let relaying = relay::start(&proxy, starts)?;
        let keeper = Arc::clone(&proxy);
        tokio::spawn(async move { keeper.keeper.run().await });
        if let Some(file) = args.server_ip_file.clone() {
            tokio::spawn(target::follow(Arc::clone(&proxy), file, args.server_port));
        }
        hold::until_over(&proxy, args, &mut signals, relaying).await;
        // The answer to the order that ended it is still to be written.
        ends.send_replace(true);
        let last = async { while servers.join_next().await.is_some() {} };
        drop(tokio::time::timeout(std::time::Duration::from_secs(1), last).await);
        Ok(())
    });
    // An output that nobody reads may hold a thread for ever.
    runtime.shutdown_background();
    served
}

/// Opens every port that is to be open from the start.
fn listen_all(args: &Args, proxy: &Arc<Proxy>, ends: &watch::Sender<bool>) -> Result<JoinSet<()>, Error> {
    let spi = listen::bind("spi", args.host, args.spi_port)?;
    let probes = listen::bind("probes", args.host, args.probes_port)?;
    let admin = admin::router(proxy, proxy.spi());
    let mut served = vec![(spi, admin.clone()), (probes, proxy.probes())];
    if let Some(earlier) = args.earlier() {
        served.push((listen::bind("admin", args.host, earlier.admin)?, admin));
        served.push((listen::bind("metrics", args.host, earlier.metrics)?, proxy.scrapes()));
        let loopback = std::net::Ipv4Addr::LOCALHOST.into();
        served.push((listen::bind("debug", Some(loopback), earlier.debug)?, proxy.insides()));
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
