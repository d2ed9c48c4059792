//! The end of the process.
//!
//! A requester Pod that is deleted still holds its accelerators, on which its engine is awake. So with `--epoch-gate`
//! SIGTERM only closes the gate; the process stays until whoever leads has put the engine away and says so, or until it is
//! held no longer. Without it nobody would ever say so, and SIGTERM is what it is for any server.

use std::{io, sync::Arc};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Duration, Instant, sleep_until, timeout},
};

use super::{args::Args, relay, state::Proxy};

/// For what was cut to be told so.
const LAST_WORDS: Duration = Duration::from_secs(1);

pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}

/// Returns when the process may end: some time after the first signal, or at the second.
pub(super) async fn until_over(
    proxy: &Arc<Proxy>,
    args: &Args,
    signals: &mut Signals,
    relaying: relay::Relaying,
) {
    signals.next().await;
    let over = async {
        if args.epoch_gate {
            held(proxy, Instant::now() + args.hold).await;
        }
        proxy.relays.close();
        let ended = timeout(if args.epoch_gate { LAST_WORDS } else { args.shutdown }, relaying.ended()).await;
        if ended.is_err() {
            tracing::warn!("requests that still run are cut: their time is over");
        }
    };
    tokio::select! {
        () = over => {}
        () = signals.next() => tracing::warn!("a second signal: ends at once"),
    }
}

async fn held(proxy: &Arc<Proxy>, until: Instant) {
    proxy.keeper.shut(until);
    tracing::info!("the gate is closed; waits to be released");
    let mut released = proxy.released.subscribe();
    let unused_and_released = async {
        // Its sender lives as long as the proxy.
        drop(released.wait_for(|released| *released).await);
        proxy.keeper.drained().await;
    };
    tokio::select! {
        () = unused_and_released => tracing::info!("released"),
        () = sleep_until(until) => {
            tracing::warn!("not released in time");
            drop(timeout(LAST_WORDS, proxy.keeper.drained()).await);
        }
    }
}
