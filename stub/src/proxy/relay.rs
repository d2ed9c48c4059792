//! The relays: threads that each run their own connections and accept from all listeners.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    io,
    net::{SocketAddr, TcpListener},
    rc::Rc,
    sync::Arc,
    time::Duration,
};

use rouse_net::{
    accept::{accept_queued, is_transient},
    relay::ConnectionPool,
    server::DateCache,
};
use tokio::{
    net::TcpStream,
    runtime::LocalOptions,
    sync::{
        Notify, OwnedSemaphorePermit, Semaphore,
        mpsc::{self, Receiver, Sender, error::TrySendError},
        oneshot, watch,
    },
    time::timeout,
};

use super::{listen, metrics::ThreadTraffic, state::Proxy};

mod body;
mod connection;
mod exchange;
mod policy;
mod socket;

use socket::RelaySocket;

/// Pause after a failed accept, for example without free descriptors. It ends earlier when a connection of this thread
/// ends.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(500);

/// Sends listeners and the shutdown to the relay threads.
#[derive(Debug)]
pub(super) struct RelayThreads {
    listener_txs: Vec<Sender<TcpListener>>,
    shutdown_tx: watch::Sender<bool>,
}

/// What a relay thread starts with.
pub(super) struct RelayThreadSetup {
    listener_rx: Receiver<TcpListener>,
    shutdown_rx: watch::Receiver<bool>,
    /// Connection permits, shared by all threads.
    connection_permits: Arc<Semaphore>,
}

/// The running relay threads.
pub(super) struct RunningRelays(Vec<oneshot::Receiver<()>>);

impl RelayThreads {
    /// Creates `count` threads' setups, with at most `max_connections` connections in all.
    ///
    /// [`Self::serve`] takes `max_listeners` listeners, even before the threads run.
    pub(super) fn new(
        count: usize,
        max_connections: usize,
        max_listeners: usize,
    ) -> (Self, Vec<RelayThreadSetup>) {
        let closes = watch::Sender::new(false);
        let permits = Arc::new(Semaphore::new(max_connections.min(Semaphore::MAX_PERMITS)));
        let (listener_txs, starts) = (0..count)
            .map(|_| {
                let (listener_tx, listener_rx) = mpsc::channel(max_listeners.max(1));
                (
                    listener_tx,
                    RelayThreadSetup {
                        listener_rx,
                        shutdown_rx: closes.subscribe(),
                        connection_permits: Arc::clone(&permits),
                    },
                )
            })
            .unzip();
        (Self { listener_txs, shutdown_tx: closes }, starts)
    }

    /// Makes every thread accept from this listener, and returns its address.
    pub(super) fn serve(&self, listener: TcpListener) -> Result<SocketAddr, listen::Error> {
        let failed = |source| listen::Error { name: "relay", address: ([0; 4], 0).into(), source };
        let address = listener.local_addr().map_err(failed)?;
        for listener_tx in &self.listener_txs {
            let one = listener.try_clone().map_err(failed)?;
            listener_tx.try_send(one).map_err(|error| {
                failed(io::Error::other(match error {
                    TrySendError::Full(_) => "too many listeners wait for a relay thread",
                    TrySendError::Closed(_) => "a relay thread has ended",
                }))
            })?;
        }
        Ok(address)
    }

    /// Ends the threads once their requests have finished.
    pub(super) fn close(&self) {
        self.shutdown_tx.send_replace(true);
    }
}

impl RunningRelays {
    /// Waits until no request runs any more.
    pub(super) async fn join(self) {
        for end in self.0 {
            end.await.unwrap_or_default();
        }
    }
}

/// Starts the threads.
pub(super) fn start(proxy: &Arc<Proxy>, starts: Vec<RelayThreadSetup>) -> io::Result<RunningRelays> {
    let mut ends = Vec::new();
    for (number, start) in starts.into_iter().enumerate() {
        let (tell, end) = oneshot::channel();
        let proxy = Arc::clone(proxy);
        std::thread::Builder::new().name(format!("relay-{number}")).spawn(move || {
            if let Err(error) = run_thread(proxy, start) {
                tracing::error!(%error, "relay thread failed");
            }
            // The receiver is gone once the control thread has ended.
            tell.send(()).unwrap_or_default();
        })?;
        ends.push(end);
    }
    Ok(RunningRelays(ends))
}

/// State that the connections of one thread share.
struct RelayThreadContext {
    proxy: Arc<Proxy>,
    pool: ConnectionPool,
    dates: Rc<DateCache>,
    traffic: ThreadTraffic,
}

/// The connections of one thread.
struct RelayConnections {
    context: Rc<RelayThreadContext>,
    open: RefCell<BTreeMap<u64, Rc<RelaySocket>>>,
    next_id: Cell<u64>,
    permits: Arc<Semaphore>,
    /// Each connection ends after its current request.
    draining: Cell<bool>,
    /// Notified when a connection ends.
    connection_ended: Notify,
}

fn run_thread(proxy: Arc<Proxy>, start: RelayThreadSetup) -> io::Result<()> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build_local(LocalOptions::default())?;
    runtime.block_on(async move {
        let RelayThreadSetup {
            listener_rx: mut listeners,
            shutdown_rx: mut closes,
            connection_permits: places,
        } = start;
        let pool = ConnectionPool::default();
        let traffic = proxy.metrics.thread_traffic();
        let context =
            Rc::new(RelayThreadContext { proxy, pool: pool.clone(), dates: Rc::default(), traffic });
        tokio::task::spawn_local(async move { pool.expire().await });
        let connections = Rc::new(RelayConnections {
            context,
            open: RefCell::default(),
            next_id: Cell::new(0),
            permits: places,
            draining: Cell::new(false),
            connection_ended: Notify::new(),
        });
        let mut accepting = Vec::new();
        loop {
            let listener = tokio::select! {
                biased;
                _ = closes.wait_for(|closes| *closes) => break,
                Some(listener) = listeners.recv() => listener,
            };
            let listener = tokio::net::TcpListener::from_std(listener)?;
            let accept = accept(listener, Rc::clone(&connections), closes.clone());
            accepting.push(tokio::task::spawn_local(accept));
        }
        // Before the last connections are accepted, because that may need the descriptors of those that end.
        connections.begin_drain();
        for accepting in accepting {
            accepting.await.unwrap_or_default();
        }
        connections.wait_until_closed().await;
        Ok(())
    })
}

/// Accepts until shutdown, then accepts the connections already queued.
async fn accept(
    listener: tokio::net::TcpListener,
    connections: Rc<RelayConnections>,
    mut closes: watch::Receiver<bool>,
) {
    loop {
        let accepted = tokio::select! {
            biased;
            _ = closes.wait_for(|closes| *closes) => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => {
                let permit = tokio::select! {
                    biased;
                    _ = closes.wait_for(|closes| *closes) => None,
                    place = Arc::clone(&connections.permits).acquire_owned() => place.ok(),
                };
                connections.serve(stream, permit);
            }
            Err(error) if is_transient(&error) => {}
            Err(error) => connections.wait_after_accept_error(&error).await,
        }
    }
    // Use the blocking socket, because the poller may not have reported the last connections yet.
    let Ok(listener) = listener.into_std() else { return };
    let served = |stream: std::net::TcpStream| {
        if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
            // No permit: no further connections follow, and each ends after its current request.
            connections.serve(stream, None);
        }
    };
    accept_queued(
        || listener.accept().map(|(stream, _)| stream),
        served,
        async |error| {
            connections.wait_after_accept_error(&error).await;
            connections.context.proxy.metrics.open_counts().0 > 0
        },
    )
    .await;
}

impl RelayConnections {
    /// Serves a connection. Without a permit the connection exceeds the limit.
    fn serve(self: &Rc<Self>, stream: TcpStream, permit: Option<OwnedSemaphorePermit>) {
        if stream.set_nodelay(true).is_err() {
            return;
        }
        let number = self.next_id.replace(self.next_id.get() + 1);
        let socket = RelaySocket::new(stream);
        if self.draining.get() {
            socket.close();
        }
        self.open.borrow_mut().insert(number, Rc::clone(&socket));
        let connections = Rc::clone(self);
        let present = self.context.proxy.metrics.connection();
        tokio::task::spawn_local(async move {
            connection::serve(Rc::clone(&connections.context), socket).await;
            drop((present, permit));
            connections.open.borrow_mut().remove(&number);
            connections.connection_ended.notify_waiters();
        });
    }

    /// Waits after a failed accept. The socket stays readable, so an immediate retry would spin.
    async fn wait_after_accept_error(&self, error: &io::Error) {
        tracing::warn!(%error, "accepting a connection failed, retrying");
        drop(timeout(ACCEPT_RETRY_DELAY, self.connection_ended.notified()).await);
    }

    /// Ends every connection after its current request: those that are open, and those that are accepted from now on.
    fn begin_drain(&self) {
        self.draining.set(true);
        self.open.borrow().values().for_each(|socket| socket.close());
    }

    /// Returns when no connection is open.
    async fn wait_until_closed(&self) {
        loop {
            let ended = self.connection_ended.notified();
            if self.open.borrow().is_empty() {
                return;
            }
            ended.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_for_which_no_thread_has_room_is_an_error_and_not_lost() {
        let bind = || TcpListener::bind("127.0.0.1:0").unwrap();
        let (relays, mut setups) = RelayThreads::new(1, 1, 2);
        for _ in 0..2 {
            relays.serve(bind()).unwrap();
        }
        let error = relays.serve(bind()).unwrap_err().to_string();
        assert!(error.contains("too many listeners wait for a relay thread"), "{error}");
        let listeners = &mut setups[0].listener_rx;
        assert!(listeners.try_recv().is_ok() && listeners.try_recv().is_ok());
        relays.serve(bind()).unwrap();
        drop(setups);
        let error = relays.serve(bind()).unwrap_err().to_string();
        assert!(error.contains("a relay thread has ended"), "{error}");
    }
}
