//! Shuts the process down.
//!
//! A deleted requester Pod still holds its accelerators while its engine is awake on them. So with `--epoch-gate`
//! SIGTERM only closes the gate. The process stays until the leader has put the engine to sleep or stopped it and
//! releases the stub, or until the hold ends. Without `--epoch-gate` no release will come, and SIGTERM ends the process
//! as usual.

use std::{io, sync::Arc};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::{Duration, Instant, sleep_until, timeout},
};

use super::{args::ProxyArgs, relay, state::Proxy};

/// Time to send the error to cut requests.
const CUT_NOTICE_TIMEOUT: Duration = Duration::from_secs(1);

pub(super) struct StubShutdownSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl StubShutdownSignals {
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

/// Waits until the process may end: some time after the first signal, or at the second signal.
pub(super) async fn run_shutdown(
    proxy: &Arc<Proxy>,
    args: &ProxyArgs,
    signals: &mut StubShutdownSignals,
    relaying: relay::RunningRelays,
) {
    signals.next().await;
    let drained = async {
        if args.epoch_gate {
            hold_until_released(proxy, Instant::now() + args.hold).await;
        }
        proxy.relays.close();
        let joined =
            timeout(if args.epoch_gate { CUT_NOTICE_TIMEOUT } else { args.shutdown }, relaying.join()).await;
        if joined.is_err() {
            tracing::warn!("shutdown time is over, cutting the requests still in flight");
        }
    };
    tokio::select! {
        () = drained => {}
        () = signals.next() => tracing::warn!("second signal received, exiting at once"),
    }
}

async fn hold_until_released(proxy: &Arc<Proxy>, until: Instant) {
    proxy.gate.close_for_shutdown(until);
    tracing::info!("gate closed, waiting for the release order");
    let mut released = proxy.released.subscribe();
    let unused_and_released = async {
        // The proxy holds the sender.
        drop(released.wait_for(|released| *released).await);
        proxy.gate.wait_drained().await;
    };
    tokio::select! {
        () = unused_and_released => tracing::info!("stub released and drained"),
        () = sleep_until(until) => {
            tracing::warn!("hold timed out: the stub was not released and drained");
            drop(timeout(CUT_NOTICE_TIMEOUT, proxy.gate.wait_drained()).await);
        }
    }
}
