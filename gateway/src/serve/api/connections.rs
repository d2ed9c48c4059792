//! The connections of one core: admits, moves, serves, refuses and drains them.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use rouse_net::{openai, tcp::Tcp};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::TcpStream,
    sync::{
        Notify,
        mpsc::{Receiver, Sender},
        watch,
    },
};

use crate::{
    http::{self, WorkerContext},
    serve::{
        ShutdownStage,
        address_limiter::{AddressLimiter, ConnectionRefusal},
        balance::{CoreConnectionGuard, CoreLoadHandle, CoreLoads},
        client_address::{self, ConnectionSource, UnknownSource},
        connection,
        socket::ClientSocket,
        tls::HandshakePool,
    },
};

/// The most refused connections that a core answers at a time, and the time each may take.
const MAX_REJECTED_CONNECTIONS: u32 = 64;
const REJECT_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest pause after an accept that failed for want of descriptors; a connection that ends cuts it short.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(500);

/// A connection on its way to another core.
pub(super) struct MovedConnection {
    stream: std::net::TcpStream,
    peer: SocketAddr,
    source: ConnectionSource,
    core_guard: CoreConnectionGuard,
}

/// The connections of one core.
pub(super) struct WorkerConnections {
    pub(super) worker: Rc<WorkerContext>,
    pub(super) address_limiter: Arc<AddressLimiter>,
    handshakes: Option<Arc<HandshakePool>>,
    core_index: usize,
    core_load: Rc<CoreLoadHandle>,
    pub(super) loads: Arc<CoreLoads>,
    /// Refused connections that are currently getting their answer.
    rejecting: Cell<u32>,
    open: RefCell<BTreeMap<u64, Rc<ClientSocket>>>,
    next_id: Cell<u64>,
    /// Notified when a connection ends.
    connection_ended: Notify,
}

impl WorkerConnections {
    /// Creates the connections of the core with this number.
    pub(super) fn new(
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
    pub(super) fn assign_core(
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
            Ok(()) => self.worker.server.metrics_sink().connection_moved(),
            Err(refused) => {
                // That core takes no more for now, or it has ended in a shutdown.
                let core_guard = self.loads.add_connection(self.core_index);
                let kept = MovedConnection { core_guard, ..refused.into_inner() };
                self.serve_moved(kept, ShutdownStage::Serving);
            }
        }
    }

    pub(super) fn serve_here(self: &Rc<Self>, stream: TcpStream, peer: SocketAddr, stage: ShutdownStage) {
        if let Some((stream, source)) = self.admit(stream, peer) {
            self.serve(stream, peer, (source, self.loads.add_connection(self.core_index)), stage);
        }
    }

    /// Serves a connection that another core accepted.
    pub(super) fn serve_moved(
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

    pub(super) fn serve(
        self: &Rc<Self>,
        stream: impl Into<Tcp>,
        peer: SocketAddr,
        (source, core_guard): (ConnectionSource, CoreConnectionGuard),
        stage: ShutdownStage,
    ) {
        let socket = ClientSocket::new(stream, stage);
        socket.set_peer(peer);
        let begins_with_header = source.register(&socket, &self.address_limiter);
        self.spawn(socket, begins_with_header, core_guard);
    }

    /// Serves a connection from the admin API. It has no address, whose limits could hold for it, and no TLS.
    pub(super) fn serve_operator(self: &Rc<Self>, stream: TcpStream) {
        let socket = ClientSocket::new(stream, ShutdownStage::Serving);
        socket.set_operator_key(self.worker.server.operator_key());
        self.spawn(socket, false, self.loads.add_connection(self.core_index));
    }

    /// Serves the connection on a task of its own.
    fn spawn(
        self: &Rc<Self>,
        socket: Rc<ClientSocket>,
        begins_with_header: bool,
        core_guard: CoreConnectionGuard,
    ) {
        tokio::task::spawn_local(self.connection(socket, begins_with_header, core_guard));
    }

    /// Counts the connection as open, and returns the future that serves it. An idle connection consists mostly of that
    /// future, so everything that is awaited only at the beginning or at the end is boxed.
    ///
    /// `begins_with_header`: a proxy names the connection's client in a header in front of the first request.
    pub(super) fn connection(
        self: &Rc<Self>,
        socket: Rc<ClientSocket>,
        begins_with_header: bool,
        core_guard: CoreConnectionGuard,
    ) -> impl Future<Output = ()> + use<> {
        let number = self.next_id.replace(self.next_id.get() + 1);
        socket.set_core_load(Rc::clone(&self.core_load));
        self.open.borrow_mut().insert(number, Rc::clone(&socket));
        self.worker.server.metrics_sink().add_connections(1);
        let connections = Rc::clone(self);
        async move {
            let resolved = if begins_with_header {
                Box::pin(client_address::resolve_proxy_header(
                    &connections.worker,
                    &connections.address_limiter,
                    &socket,
                ))
                .await
            } else {
                Ok(())
            };
            match resolved {
                Ok(()) => {
                    connection::serve(&connections.worker, &socket, connections.handshakes_for(&socket))
                        .await;
                }
                Err(UnknownSource::Refused(refusal)) => {
                    tracing::debug!(peer = ?socket.peer(), "connection rejected: {refusal}");
                    if let Some(wire) = socket.take_wire() {
                        connections.reject(wire, refusal);
                    }
                }
                Err(UnknownSource::NoHeader) => {}
            }
            // The tasks of HTTP/2's streams may hold the socket for longer.
            socket.release_permit();
            drop(socket);
            drop(core_guard);
            connections.worker.server.metrics_sink().add_connections(-1);
            connections.open.borrow_mut().remove(&number);
            connections.connection_ended.notify_waiters();
        }
    }

    /// The handshakes that the connection begins with. The admin API's connections have no TLS.
    fn handshakes_for(&self, socket: &ClientSocket) -> Option<&HandshakePool> {
        self.handshakes.as_deref().filter(|_| socket.operator_key().is_none())
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
        self.worker.server.metrics_sink().connection_rejected(openai::error::status(&fault).as_u16());
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

    /// Sends the shutdown stage to every open connection. Returns whether there is any.
    pub(super) fn advance(&self, now: ShutdownStage) -> bool {
        let sockets: Vec<_> = self.open.borrow().values().map(Rc::clone).collect();
        for socket in &sockets {
            if socket.stage() < now {
                socket.set_stage(now);
            }
        }
        !sockets.is_empty()
    }

    /// Waits after a failed accept. The socket stays readable, so an immediate retry would spin.
    pub(super) async fn wait_after_accept_error(&self, error: &io::Error) {
        tracing::warn!(%error, "cannot accept connections, retrying");
        drop(tokio::time::timeout(ACCEPT_BACKOFF, self.connection_ended.notified()).await);
    }

    /// Sends the shutdown stage to every connection until the last one has ended. This includes connections that other
    /// cores moved here just before they stopped accepting.
    pub(super) async fn drain(
        self: &Rc<Self>,
        mut stage: watch::Receiver<ShutdownStage>,
        mut moved: Receiver<MovedConnection>,
    ) {
        let mut more = true;
        loop {
            let ended = self.connection_ended.notified();
            let now = *stage.borrow_and_update();
            if !self.advance(now) && !more {
                return;
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
