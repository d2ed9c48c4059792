//! One serving thread: accepts connections until the gateway drains, and executes the tasks of the admin API.

use std::{io, net::SocketAddr, pin::pin, rc::Rc, sync::Arc};

use rouse_net::accept::{accept_queued, is_transient};
use tokio::{
    net::{TcpListener, TcpStream},
    runtime::{LocalOptions, LocalRuntime},
    sync::{
        mpsc::{Receiver, Sender},
        oneshot, watch,
    },
};

use super::connections::{MovedConnection, WorkerConnections};
use crate::{
    http::{ServerContext, WorkerContext},
    serve::{
        ShutdownStage, address_limiter::AddressLimiter, api_workers::WorkerTask, balance::CoreLoads,
        tls::HandshakePool,
    },
};

/// Threads beside a serving thread, for large bodies. Their work never blocks, so more of them would only share the
/// same cores; `limits.bodyTotal` bounds the backlog.
pub(super) const MAX_BLOCKING_THREADS: usize = 4;
/// The niceness that threads beside a serving thread add.
const BLOCKING_THREAD_NICENESS: i32 = 10;

/// The arguments of one serving thread.
pub(super) struct WorkerSetup {
    pub(super) listener: std::net::TcpListener,
    pub(super) shared: Arc<ServerContext>,
    pub(super) stage: watch::Receiver<ShutdownStage>,
    pub(super) address_limiter: Arc<AddressLimiter>,
    pub(super) handshakes: Option<Arc<HandshakePool>>,
    pub(super) core_index: usize,
    pub(super) loads: Arc<CoreLoads>,
    /// Channels to the other cores, by number.
    pub(super) peers: Vec<Option<Sender<MovedConnection>>>,
    pub(super) moved_rx: Receiver<MovedConnection>,
    /// Tasks from the admin API.
    pub(super) tasks_rx: Receiver<WorkerTask>,
    /// Notified when the core accepts.
    pub(super) ready_tx: oneshot::Sender<()>,
}

/// Builds the runtime of one core. Spawned tasks stay on it without a second scheduler (a `LocalSet`) inside the first.
pub(super) fn runtime() -> io::Result<LocalRuntime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_start(lower_priority)
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .build_local(LocalOptions::default())
}

/// Serves on this thread until the gateway has shut down and every connection of the core is closed.
///
/// # Errors
/// The runtime or the listener cannot be set up.
pub(super) fn run(setup: WorkerSetup) -> io::Result<()> {
    runtime()?.block_on(async move {
        let WorkerSetup {
            listener,
            shared,
            stage,
            address_limiter: addresses,
            handshakes,
            core_index: number,
            loads,
            peers,
            moved_rx: mut moved,
            tasks_rx,
            ready_tx,
        } = setup;
        let listener = TcpListener::from_std(listener)?;
        let core = WorkerContext::new(shared, stage.clone());
        let pool = core.pool.clone();
        tokio::task::spawn_local(async move { pool.expire().await });
        let connections = WorkerConnections::new(core, addresses, handshakes, loads, number);
        tokio::task::spawn_local(run_tasks(Rc::clone(&connections), tasks_rx, stage.clone()));
        ready_tx.send(()).unwrap_or_default();
        accept(listener, &connections, &peers, &mut moved, stage.clone()).await;
        drop(peers);
        connections.drain(stage, moved).await;
        Ok(())
    })
}

/// Executes the tasks from the admin API.
async fn run_tasks(
    connections: Rc<WorkerConnections>,
    mut tasks_rx: Receiver<WorkerTask>,
    stage: watch::Receiver<ShutdownStage>,
) {
    while let Some(task) = tasks_rx.recv().await {
        match task {
            WorkerTask::ListRequests(max, reply) => {
                // An error means that the admin API no longer waits.
                drop(reply.send(connections.worker.active_requests.list(max)));
            }
            WorkerTask::Serve(stream) if *stage.borrow() == ShutdownStage::Serving => {
                match TcpStream::from_std(stream) {
                    Ok(stream) => connections.serve_operator(stream),
                    Err(error) => tracing::warn!(%error, "cannot serve a connection from the admin API"),
                }
            }
            // Closing it is the answer.
            WorkerTask::Serve(stream) => drop(stream),
        }
    }
}

/// Lowers the priority of a thread that does long work for a serving thread. On a shared processor the serving thread
/// then runs first.
fn lower_priority() {
    if let Err(error) = rustix::process::nice(BLOCKING_THREAD_NICENESS) {
        tracing::debug!(%error, "cannot lower the priority of a helper thread");
    }
}

/// Accepts until the gateway drains, and then takes the connections that already queue.
async fn accept(
    listener: TcpListener,
    connections: &Rc<WorkerConnections>,
    peers: &[Option<Sender<MovedConnection>>],
    moved: &mut Receiver<MovedConnection>,
    mut stage: watch::Receiver<ShutdownStage>,
) {
    loop {
        let accepted = tokio::select! {
            biased;
            _ = stage.wait_for(|stage| *stage > ShutdownStage::Serving) => break,
            Some(moved) = moved.recv() => {
                connections.serve_moved(moved, ShutdownStage::Serving);
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => connections.assign_core(stream, peer, peers),
            Err(error) if is_transient(&error) => {}
            Err(error) => {
                tokio::select! {
                    () = connections.wait_after_accept_error(&error) => {}
                    // Connections that other cores accepted need not wait for that.
                    Some(moved) = moved.recv() => connections.serve_moved(moved, ShutdownStage::Serving),
                }
            }
        }
    }
    // Bypass the poller, which may not have reported the last connections, and which limits a task to about a hundred
    // accepts.
    let Ok(listener) = listener.into_std() else { return };
    let serve = |(stream, peer): (std::net::TcpStream, SocketAddr)| {
        if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
            connections.serve_here(stream, peer, ShutdownStage::Draining);
        }
    };
    let pause = async |error: io::Error| {
        // Idle connections end then, and free the descriptor that is missing.
        connections.advance(ShutdownStage::Draining);
        connections.wait_after_accept_error(&error).await;
        connections.advance(ShutdownStage::Draining)
    };
    let mut accepting = pin!(accept_queued(|| listener.accept(), serve, pause));
    loop {
        tokio::select! {
            biased;
            () = &mut accepting => break,
            Some(moved) = moved.recv() => connections.serve_moved(moved, ShutdownStage::Draining),
            _ = stage.wait_for(|stage| *stage == ShutdownStage::Terminating) => break,
        }
    }
}
