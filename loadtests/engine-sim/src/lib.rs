//! A simulated inference server that behaves like vLLM towards a gateway: its routes, its streams, its sleep mode, its
//! memory on shared accelerators, and its failures. `README.md` lists flags, faults and the engine's own routes.
//!
//! `content` defines every byte of a response; `accelerator` is the shared memory, for meters and tests.

pub mod accelerator;
mod api;
mod args;
mod choice;
mod clock;
pub mod content;
mod counters;
mod document;
mod engine;
pub mod fast;
pub mod faults;
mod frames;
mod generate;
mod gzip;
mod http1;
mod lifecycle;
mod log;
mod memory;
mod metrics;
mod reply;
mod request;
mod server;
pub mod units;

use std::{net::SocketAddr, process::ExitCode, sync::Arc};

use anyhow::Context as _;
use nix::{
    errno::Errno,
    sys::resource::{Resource, getrlimit, setrlimit},
};
use tokio::{
    net::{TcpListener, TcpSocket, lookup_host},
    select,
    signal::unix::{Signal, SignalKind, signal},
    task::JoinSet,
};

pub use args::EngineSimArgs;

use engine::SimEngine;
use faults::SimFault;
use memory::SimMemory;

/// uvicorn's backlog.
const LISTEN_BACKLOG: u32 = 2048;

/// Runs an engine until SIGTERM (exit code 0) or a failure (1, or the fault's code).
///
/// Needs only a current-thread runtime with I/O and time. Errors: the address cannot be bound, or is not an address.
pub async fn run(args: EngineSimArgs) -> anyhow::Result<ExitCode> {
    let mut signals =
        SimSignals { term: signal(SignalKind::terminate())?, int: signal(SignalKind::interrupt())? };
    raise_descriptor_limit();
    // Like vLLM: bind the port at once, so that a taken port fails at once, but listen later.
    let socket = bind(&args).await?;
    if args.fast {
        let model = args.model.first().map_or("sim", String::as_str);
        let listener = socket.listen(fast::BACKLOG)?;
        log::plain(&format!("listening on {}", listener.local_addr()?));
        select! {
            () = fast::serve(listener, model) => {}
            () = signals.next() => {}
        }
        return Ok(ExitCode::SUCCESS);
    }
    let (engine, lifecycle) = SimEngine::new(args);
    let mut tasks = JoinSet::new();
    tasks.spawn(lifecycle);
    let code = select! {
        code = serve(&engine, socket, &mut tasks) => code?,
        code = engine.fatal.wait() => code,
        () = signals.wait_for_shutdown(&engine) => 0,
    };
    // Like vLLM, cut running requests instead of finishing them.
    tasks.abort_all();
    match SimMemory::new(&engine.args, engine.faults.time(SimFault::LateMemory))
        .and_then(|memory| memory.release())
    {
        Ok(()) => {}
        // The next reader drops the remaining entries.
        Err(error) => log::error(&error.to_string()),
    }
    Ok(ExitCode::from(code))
}

/// Like vLLM: many streams need many sockets.
fn raise_descriptor_limit() {
    let raised = getrlimit(Resource::RLIMIT_NOFILE)
        .and_then(|(_, hard)| setrlimit(Resource::RLIMIT_NOFILE, hard, hard));
    if let Err(error) = raised {
        log::error(&format!("cannot raise the descriptor limit: {error}"));
    }
}

async fn bind(args: &EngineSimArgs) -> anyhow::Result<TcpSocket> {
    let named = (args.host.as_str(), args.port);
    let address = lookup_host(named).await.with_context(|| format!("cannot resolve {}", args.host))?.next();
    let address = address.with_context(|| format!("{} has no address", args.host))?;
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?;
    let address_in_use =
        || format!("error while attempting to bind on address {address}: address already in use");
    socket.bind(address).with_context(address_in_use)?;
    Ok(socket)
}

async fn serve(engine: &Arc<SimEngine>, socket: TcpSocket, tasks: &mut JoinSet<()>) -> anyhow::Result<u8> {
    engine.wait_until(|view| view.listening).await;
    let listener: TcpListener = socket.listen(LISTEN_BACKLOG)?;
    let address: SocketAddr = listener.local_addr()?;
    log::plain(&format!("listening on {address}"));
    loop {
        select! {
            accepted = listener.accept() => match accepted {
                Ok((io, _)) => {
                    tasks.spawn(server::serve(Arc::clone(engine), io));
                }
                // Without descriptors the next accept fails too, so first wait for a connection to end.
                Err(error) if out_of_descriptors(&error) => {
                    log::error(&error.to_string());
                    tasks.join_next().await;
                }
                Err(error) => log::error(&error.to_string()),
            },
            Some(_) = tasks.join_next() => {}
        }
    }
}

fn out_of_descriptors(error: &std::io::Error) -> bool {
    let errno = error.raw_os_error().map(Errno::from_raw);
    matches!(errno, Some(Errno::EMFILE | Errno::ENFILE))
}

struct SimSignals {
    term: Signal,
    int: Signal,
}

impl SimSignals {
    async fn next(&mut self) {
        select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }

    /// Returns at the first signal that the engine does not ignore.
    async fn wait_for_shutdown(&mut self, engine: &SimEngine) {
        loop {
            self.next().await;
            if !engine.faults.is_on(SimFault::IgnoreSigterm) {
                return;
            }
            log::info("a signal was ignored");
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct SpawnedEngineCli {
        #[command(flatten)]
        args: EngineSimArgs,
    }

    #[test]
    fn another_binary_can_offer_it_and_spawn_it() {
        fn spawnable(_: impl Future + Send) {}

        let cli = SpawnedEngineCli::parse_from([
            "demo", "--model", "a", "--port", "1", "--port", "0", "--model", "b",
        ]);
        assert_eq!((&*cli.args.model, cli.args.port), (&["a".to_owned(), "b".to_owned()][..], 0));
        spawnable(run(cli.args));
    }
}
