//! The inference API's listeners: one thread, one runtime and one socket per core.
//!
//! A connection stays on one core, so a request's path shares only the routes (read without a lock) and the leases (one
//! atomic word). That core is the one that accepted the connection or, if its load is well above the mean, the least
//! loaded one ([`super::balance`]). The connection moves before its first byte is read, together with its address's
//! permit, and the new core does all further work, the handshake included.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    thread,
    time::Duration,
};

use rouse_net::{openai, tcp::Tcp};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::{LocalOptions, LocalRuntime},
    sync::{
        Notify,
        mpsc::{self, Receiver, Sender},
        oneshot, watch,
    },
};

use super::{
    Error, ShutdownStage,
    address_limiter::{AddressLimiter, ConnectionRefusal},
    api_workers::{ApiWorkers, WorkerTask},
    balance::{CoreConnectionGuard, CoreLoadHandle, CoreLoads},
    client_address::{ConnectionSource, UnknownSource},
    connection,
    listener::{self, BoundSockets},
    socket::ClientSocket,
    tls::HandshakePool,
};
use crate::http::{self, ServerContext, WorkerContext};

#[cfg(feature = "pipe")]
pub mod pipe;

/// The longest pause after an accept that failed for want of descriptors; a connection that ends cuts it short.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(500);
/// The most refused connections that a core answers at a time, and the time each may take.
const MAX_REJECTED_CONNECTIONS: u32 = 64;
const REJECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Threads beside a serving thread, for large bodies. Their work never blocks, so more of them would only share the
/// same cores; `limits.bodyTotal` bounds the backlog.
const MAX_BLOCKING_THREADS: usize = 4;
/// The niceness that threads beside a serving thread add.
const BLOCKING_THREAD_NICENESS: i32 = 10;

/// The bound listeners.
pub struct ApiServer {
    address: SocketAddr,
    listeners: Vec<std::net::TcpListener>,
    shared: Arc<ServerContext>,
    handshakes: Option<Arc<HandshakePool>>,
    loads: Arc<CoreLoads>,
    workers: Arc<ApiWorkers>,
}

/// Moved connections that may wait for a core. When they are as many, the core that accepts a further one keeps it: a
/// core that falls so far behind is no better place.
const MAX_MOVED_CONNECTIONS: usize = 1024;

/// A connection on its way to another core.
struct MovedConnection {
    stream: std::net::TcpStream,
    peer: SocketAddr,
    source: ConnectionSource,
    core_guard: CoreConnectionGuard,
}

/// The arguments of one serving thread.
struct WorkerSetup {
    listener: std::net::TcpListener,
    shared: Arc<ServerContext>,
    stage: watch::Receiver<ShutdownStage>,
    address_limiter: Arc<AddressLimiter>,
    handshakes: Option<Arc<HandshakePool>>,
    core_index: usize,
    loads: Arc<CoreLoads>,
    /// Channels to the other cores, by number.
    peers: Vec<Option<Sender<MovedConnection>>>,
    moved_rx: Receiver<MovedConnection>,
    /// Tasks from the admin API.
    tasks_rx: Receiver<WorkerTask>,
    /// Notified when the core accepts.
    ready_tx: oneshot::Sender<()>,
}

impl ApiServer {
    /// Binds `cores` sockets to one address (`None`: one per core). Connections queue once the sockets listen, and are
    /// accepted after [`Self::start`].
    ///
    /// # Errors
    /// The address is taken, or is none of this machine's.
    pub fn bind(address: SocketAddr, cores: Option<usize>) -> Result<BoundSockets, Error> {
        let cores = cores.or_else(|| thread::available_parallelism().ok().map(usize::from)).unwrap_or(1);
        listener::bind_shared(address, cores)
    }

    /// Prepares one thread per listener.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub fn from_listeners(
        address: SocketAddr,
        listeners: Vec<std::net::TcpListener>,
        shared: Arc<ServerContext>,
    ) -> Result<Self, Error> {
        let address = match listeners.first() {
            Some(first) => first.local_addr().map_err(|source| Error::Bind { address, source })?,
            None => address,
        };
        let handshakes =
            HandshakePool::for_listener(shared.config.load().tls.as_ref(), listeners.len())?.map(Arc::new);
        let loads = CoreLoads::new(listeners.len());
        Ok(Self { address, listeners, shared, handshakes, loads, workers: Arc::default() })
    }

    /// Lets the admin API reach the serving threads through these workers, from [`Self::start`] on.
    #[must_use]
    pub fn with_workers(self, workers: Arc<ApiWorkers>) -> Self {
        Self { workers, ..self }
    }

    /// The bound address, with the actual port for port 0.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    #[cfg(test)]
    pub(crate) fn loads(&self) -> Arc<CoreLoads> {
        Arc::clone(&self.loads)
    }

    /// Starts the serving threads.
    pub fn start(self, stage: watch::Receiver<ShutdownStage>) -> Result<ServingThreads, Error> {
        let addresses = Arc::<AddressLimiter>::default();
        let (mut ups, mut ends) = (Vec::new(), Vec::new());
        let (ways, arrivals): (Vec<_>, Vec<_>) =
            self.listeners.iter().map(|_| mpsc::channel(MAX_MOVED_CONNECTIONS)).unzip();
        for ((number, listener), moved) in self.listeners.into_iter().enumerate().zip(arrivals) {
            let (tell, end) = oneshot::channel();
            let (ready_tx, ready_rx) = oneshot::channel();
            // Not to itself: a core has received all its connections once no sender is left.
            let peers = ways.iter().enumerate().map(|(at, way)| (at != number).then(|| way.clone()));
            let setup = WorkerSetup {
                listener,
                shared: Arc::clone(&self.shared),
                stage: stage.clone(),
                address_limiter: Arc::clone(&addresses),
                handshakes: self.handshakes.clone(),
                core_index: number,
                loads: Arc::clone(&self.loads),
                peers: peers.collect(),
                moved_rx: moved,
                tasks_rx: self.workers.add(),
                ready_tx,
            };
            thread::Builder::new()
                .name(format!("api-{number}"))
                .spawn(move || {
                    // The receiver is gone when the control runtime is gone.
                    drop(tell.send(run_worker(setup)));
                })
                .map_err(Error::Thread)?;
            ups.push(ready_rx);
            ends.push(end);
        }
        Ok(ServingThreads { ready: ups, results: ends })
    }
}

/// The running serving threads.
pub struct ServingThreads {
    ready: Vec<oneshot::Receiver<()>>,
    results: Vec<oneshot::Receiver<io::Result<()>>>,
}

impl ServingThreads {
    /// Returns when each thread accepts connections or has already ended.
    pub async fn wait_until_ready(&mut self) {
        for up in self.ready.drain(..) {
            up.await.unwrap_or_default();
        }
    }

    /// Returns when the gateway shuts down and every connection is closed: at [`ShutdownStage::Draining`] when their
    /// exchanges are over, at [`ShutdownStage::Terminating`] at most two seconds later. Errors: a thread failed.
    pub async fn join(self) -> Result<(), Error> {
        for end in self.results {
            end.await
                .unwrap_or_else(|_| Err(io::Error::other("a serving thread panicked")))
                .map_err(|error| Error::Ended("api", error))?;
        }
        Ok(())
    }
}

/// Builds the runtime of one core. Spawned tasks stay on it without a second scheduler (a `LocalSet`) inside the first.
fn runtime() -> io::Result<LocalRuntime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_start(lower_priority)
        .max_blocking_threads(MAX_BLOCKING_THREADS)
        .build_local(LocalOptions::default())
}

fn run_worker(setup: WorkerSetup) -> io::Result<()> {
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

/// Carries out the tasks from the admin API.
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
                tracing::warn!(%error, "cannot accept connections, retrying");
                // The socket stays readable, so an immediate retry would spin.
                let pause = tokio::time::timeout(ACCEPT_BACKOFF, connections.connection_ended.notified());
                tokio::select! {
                    _ = pause => {}
                    // Connections that other cores accepted need not wait for that.
                    Some(moved) = moved.recv() => connections.serve_moved(moved, ShutdownStage::Serving),
                }
            }
        }
    }
    // Bypass the poller, which may not have reported the last connections, and which limits a task to about a hundred
    // accepts.
    let Ok(listener) = listener.into_std() else { return };
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
                    connections.serve_here(stream, peer, ShutdownStage::Draining);
                }
            }
            Err(error) if is_transient(&error) => {}
            Err(_) => return,
        }
    }
}

/// Whether the peer was gone before the accept.
fn is_transient(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

/// The connections of one core.
struct WorkerConnections {
    worker: Rc<WorkerContext>,
    address_limiter: Arc<AddressLimiter>,
    handshakes: Option<Arc<HandshakePool>>,
    core_index: usize,
    core_load: Rc<CoreLoadHandle>,
    loads: Arc<CoreLoads>,
    /// Refused connections that are currently getting their answer.
    rejecting: Cell<u32>,
    open: RefCell<BTreeMap<u64, Rc<ClientSocket>>>,
    next_id: Cell<u64>,
    /// Notified when a connection ends.
    connection_ended: Notify,
}

impl WorkerConnections {
    /// Creates the connections of the core with this number.
    fn new(
        worker: Rc<WorkerContext>,
        addresses: Arc<AddressLimiter>,
        handshakes: Option<Arc<HandshakePool>>,
        loads: Arc<CoreLoads>,
        number: usize,
    ) -> Rc<Self> {
        Rc::new(Self {
            worker,
            address_limiter: addresses,
            handshakes,
            core_index: number,
            core_load: Rc::new(loads.handle(number)),
            loads,
            open: RefCell::default(),
            rejecting: Cell::new(0),
            next_id: Cell::new(0),
            connection_ended: Notify::new(),
        })
    }

    /// Serves a connection that this core accepted, or moves it to a less loaded core.
    fn assign_core(
        self: &Rc<Self>,
        stream: TcpStream,
        peer: SocketAddr,
        peers: &[Option<Sender<MovedConnection>>],
    ) {
        let better = self.loads.less_loaded_than(self.core_index);
        let Some(way) = better.and_then(|better| peers.get(better)?.as_ref().map(|way| (better, way))) else {
            self.serve_here(stream, peer, ShutdownStage::Serving);
            return;
        };
        let (better, way) = way;
        let Some((stream, source)) = self.admit(stream, peer) else { return };
        // Deregister from this core's poller; this cannot fail while nothing else holds the socket.
        let Ok(stream) = stream.into_std() else { return };
        let moved = MovedConnection { stream, peer, source, core_guard: self.loads.add_connection(better) };
        match way.try_send(moved) {
            Ok(()) => self.worker.server.metrics_sink.connection_moved(),
            Err(refused) => {
                // That core takes no more for now, or it has ended in a shutdown.
                let core_guard = self.loads.add_connection(self.core_index);
                let kept = MovedConnection { core_guard, ..refused.into_inner() };
                self.serve_moved(kept, ShutdownStage::Serving);
            }
        }
    }

    fn serve_here(self: &Rc<Self>, stream: TcpStream, peer: SocketAddr, stage: ShutdownStage) {
        if let Some((stream, source)) = self.admit(stream, peer) {
            self.serve(stream, peer, (source, self.loads.add_connection(self.core_index)), stage);
        }
    }

    /// Serves a connection that another core accepted.
    fn serve_moved(
        self: &Rc<Self>,
        MovedConnection { stream, peer, source, core_guard }: MovedConnection,
        stage: ShutdownStage,
    ) {
        match TcpStream::from_std(stream) {
            Ok(stream) => self.serve(stream, peer, (source, core_guard), stage),
            Err(error) => tracing::warn!(%error, "connection lost while moving to another core"),
        }
    }

    /// Finds what the connection counts against, or rejects it.
    fn admit(self: &Rc<Self>, stream: TcpStream, peer: SocketAddr) -> Option<(TcpStream, ConnectionSource)> {
        let config = self.worker.server.config.load();
        match ConnectionSource::accepted(peer, &config, &self.address_limiter) {
            Ok(source) => stream.set_nodelay(true).is_ok().then_some((stream, source)),
            Err(refused) => {
                tracing::debug!(%peer, "connection rejected: {refused}");
                self.reject(stream, refused);
                None
            }
        }
    }

    fn serve(
        self: &Rc<Self>,
        stream: impl Into<Tcp>,
        peer: SocketAddr,
        (source, core_guard): (ConnectionSource, CoreConnectionGuard),
        stage: ShutdownStage,
    ) {
        let socket = ClientSocket::new(stream, stage);
        socket.set_peer(peer);
        source.register(&socket, &self.address_limiter);
        self.spawn(socket, source, core_guard);
    }

    /// Serves a connection from the admin API. It has no address, whose limits could hold for it, and no TLS.
    fn serve_operator(self: &Rc<Self>, stream: TcpStream) {
        let socket = ClientSocket::new(stream, ShutdownStage::Serving);
        socket.set_operator_key(self.worker.server.operator_key());
        self.spawn(socket, ConnectionSource::Operator, self.loads.add_connection(self.core_index));
    }

    /// Serves the connection on a task of its own.
    fn spawn(
        self: &Rc<Self>,
        socket: Rc<ClientSocket>,
        source: ConnectionSource,
        core_guard: CoreConnectionGuard,
    ) {
        let number = self.next_id.replace(self.next_id.get() + 1);
        socket.set_core_load(Rc::clone(&self.core_load));
        self.open.borrow_mut().insert(number, Rc::clone(&socket));
        self.worker.server.metrics_sink.add_connections(1);
        let connections = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let from_operator = socket.operator_key().is_some();
            let handshakes = connections.handshakes.as_deref().filter(|_| !from_operator);
            let source = source.resolve(&connections.worker, &connections.address_limiter, &socket).await;
            match &source {
                Ok(_) => connection::serve(&connections.worker, &socket, handshakes).await,
                Err(UnknownSource::Refused(refusal)) => {
                    tracing::debug!(peer = ?socket.peer(), "connection rejected: {refusal}");
                    if let Some(wire) = socket.take_wire() {
                        connections.reject(wire, *refusal);
                    }
                }
                Err(UnknownSource::NoHeader) => {}
            }
            drop(socket);
            drop((source, core_guard));
            connections.worker.server.metrics_sink.add_connections(-1);
            connections.open.borrow_mut().remove(&number);
            connections.connection_ended.notify_waiters();
        });
    }

    /// Sends the reason, only in cleartext and only to a few at a time: a flood of connections deserves no more effort.
    fn reject(
        self: &Rc<Self>,
        mut stream: impl AsyncRead + AsyncWrite + Unpin + 'static,
        refusal: ConnectionRefusal,
    ) {
        if self.handshakes.is_some() || self.rejecting.get() >= MAX_REJECTED_CONNECTIONS {
            return;
        }
        self.rejecting.set(self.rejecting.get() + 1);
        let fault = refusal.fault();
        self.worker.server.metrics_sink.connection_rejected(openai::error::status(&fault).as_u16());
        let answer = http::error_response_bytes(&self.worker, &fault);
        let connections = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let sent = async {
                stream.write_all(&answer).await?;
                stream.shutdown().await?;
                // Closing with unread bytes would reset the connection and lose the answer.
                while stream.read(&mut [0; 1024]).await? > 0 {}
                Ok::<_, io::Error>(())
            };
            drop(tokio::time::timeout(REJECT_TIMEOUT, sent).await);
            connections.rejecting.set(connections.rejecting.get() - 1);
        });
    }

    /// Sends the shutdown stage to every connection until the last one has ended. This includes connections that other
    /// cores moved here just before they stopped accepting.
    async fn drain(
        self: &Rc<Self>,
        mut stage: watch::Receiver<ShutdownStage>,
        mut moved: Receiver<MovedConnection>,
    ) {
        let mut more = true;
        loop {
            let ended = self.connection_ended.notified();
            let now = *stage.borrow_and_update();
            let sockets: Vec<_> = self.open.borrow().values().map(Rc::clone).collect();
            if sockets.is_empty() && !more {
                return;
            }
            for socket in sockets {
                if socket.stage() < now {
                    socket.set_stage(now);
                }
            }
            tokio::select! {
                arrived = moved.recv(), if more => match arrived {
                    Some(moved) => self.serve_moved(moved, now),
                    None => more = false,
                },
                () = ended => {}
                // The sender is gone, so no later stage can arrive.
                changed = stage.changed(), if now < ShutdownStage::Terminating => if changed.is_err() { return },
            }
        }
    }
}

#[cfg(test)]
mod tests;
