//! The inference API's listeners: one thread, one runtime and one socket per core.
//!
//! A connection stays on the core that accepted it, so nothing on the way of a request is shared but the routes (read
//! without a lock) and the leases (one atomic word).

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
    future::poll_fn,
    io,
    net::SocketAddr,
    rc::Rc,
    sync::Arc,
    task::Poll,
    thread,
    time::Duration,
};

use rouse::{
    fault::{Fault, Wait},
    tcp::Tcp,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Notify, oneshot, watch},
    task::LocalSet,
};

use super::{
    Error, Stage,
    addresses::{Addresses, Place, Refused},
    connection, listener,
    socket::Socket,
    tls::Handshakes,
};
use crate::http::{self, Core, Shared};

#[cfg(feature = "pipe")]
pub mod pipe;

/// After an accept that failed for want of descriptors: until a connection of ours ends, or so long.
const BACK_OFF: Duration = Duration::from_millis(500);
/// How many refused connections a core answers at a time, and how long each may take to read that.
const TURNED_AWAY: u32 = 64;
const TELLING: Duration = Duration::from_secs(1);

/// The bound listeners.
pub struct Api {
    address: SocketAddr,
    listeners: Vec<std::net::TcpListener>,
    shared: Arc<Shared>,
    handshakes: Option<Arc<Handshakes>>,
}

impl Api {
    /// Binds `cores` listeners to one address (`None`: as many as there are cores). Connections queue from here on and
    /// are accepted once [`Self::run`] is polled.
    pub fn bind(address: SocketAddr, cores: Option<usize>, shared: Arc<Shared>) -> Result<Self, Error> {
        let cores = cores.or_else(|| thread::available_parallelism().ok().map(usize::from)).unwrap_or(1);
        let listeners = listener::bind_shared(address, cores)?;
        let address = match listeners.first() {
            Some(first) => first.local_addr().map_err(|source| Error::Bind { address, source })?,
            None => address,
        };
        let handshakes = Handshakes::of(shared.config.load().tls.as_ref(), cores)?.map(Arc::new);
        Ok(Self { address, listeners, shared, handshakes })
    }

    /// Where it listens, with the port that was given for port 0.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stage` says that the gateway goes and every connection is closed: at [`Stage::Draining`] when
    /// their exchanges are over, at [`Stage::Ending`] two seconds later at most.
    pub async fn run(self, stage: watch::Receiver<Stage>) -> Result<(), Error> {
        let addresses = Arc::<Addresses>::default();
        let mut ends = Vec::new();
        for (number, listener) in self.listeners.into_iter().enumerate() {
            let (tell, end) = oneshot::channel();
            let shared = Arc::clone(&self.shared);
            let (stage, addresses) = (stage.clone(), Arc::clone(&addresses));
            let handshakes = self.handshakes.clone();
            thread::Builder::new()
                .name(format!("api-{number}"))
                .spawn(move || {
                    // Nobody listens any more when the control runtime is gone.
                    drop(tell.send(run_core(listener, shared, stage, addresses, handshakes)));
                })
                .map_err(Error::Thread)?;
            ends.push(end);
        }
        for end in ends {
            end.await
                .unwrap_or_else(|_| Err(io::Error::other("a serving thread panicked")))
                .map_err(|error| Error::Ended("api", error))?;
        }
        Ok(())
    }
}

fn run_core(
    listener: std::net::TcpListener,
    shared: Arc<Shared>,
    stage: watch::Receiver<Stage>,
    addresses: Arc<Addresses>,
    handshakes: Option<Arc<Handshakes>>,
) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let local = LocalSet::new();
    runtime.block_on(local.run_until(async move {
        let listener = TcpListener::from_std(listener)?;
        let core = Core::new(shared, stage.clone());
        let pool = core.pool.clone();
        tokio::task::spawn_local(async move { pool.expire().await });
        let connections = Connections::new(core, addresses, handshakes);
        accept(listener, &connections, stage.clone()).await;
        connections.drain(stage).await;
        Ok(())
    }))
}

/// Accepts until the gateway drains, and then what already queued.
async fn accept(listener: TcpListener, connections: &Rc<Connections>, mut stage: watch::Receiver<Stage>) {
    loop {
        let accepted = tokio::select! {
            biased;
            _ = stage.wait_for(|stage| *stage > Stage::Serving) => break,
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => connections.open(stream, peer, Stage::Serving),
            Err(error) if is_momentary(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections");
                // The socket stays readable, so trying again at once would spin.
                drop(tokio::time::timeout(BACK_OFF, connections.changed.notified()).await);
            }
        }
    }
    poll_fn(|cx| {
        while let Poll::Ready(Ok((stream, peer))) = listener.poll_accept(cx) {
            connections.open(stream, peer, Stage::Draining);
        }
        Poll::Ready(())
    })
    .await;
}

/// The peer was gone before it was accepted.
fn is_momentary(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
    )
}

/// The connections of one core.
struct Connections {
    core: Rc<Core>,
    addresses: Arc<Addresses>,
    handshakes: Option<Arc<Handshakes>>,
    /// Those that are being told that there is no place for them.
    turned_away: Cell<u32>,
    open: RefCell<BTreeMap<u64, Rc<Socket>>>,
    next: Cell<u64>,
    /// One has ended.
    changed: Notify,
}

impl Connections {
    fn new(core: Rc<Core>, addresses: Arc<Addresses>, handshakes: Option<Arc<Handshakes>>) -> Rc<Self> {
        Rc::new(Self {
            core,
            addresses,
            handshakes,
            open: RefCell::default(),
            turned_away: Cell::new(0),
            next: Cell::new(0),
            changed: Notify::new(),
        })
    }

    fn open(self: &Rc<Self>, stream: TcpStream, peer: SocketAddr, stage: Stage) {
        let limits = self.core.shared.config.load().limits;
        let place = match self.addresses.enter(peer.ip(), &limits) {
            Ok(place) => place,
            Err(refused) => {
                tracing::debug!(%peer, "refused a connection: {refused}");
                self.turn_away(stream, refused);
                return;
            }
        };
        if stream.set_nodelay(true).is_err() {
            return;
        }
        self.serve(stream, peer, place, stage);
    }

    fn serve(self: &Rc<Self>, stream: impl Into<Tcp>, peer: SocketAddr, place: Place, stage: Stage) {
        let number = self.next.replace(self.next.get() + 1);
        let socket = Socket::new(stream, stage);
        socket.set_peer(peer);
        socket.is_of(place.offender());
        self.open.borrow_mut().insert(number, Rc::clone(&socket));
        self.core.shared.meter.connections(1);
        let connections = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let handshakes = connections.handshakes.clone();
            connection::serve(Rc::clone(&connections.core), socket, handshakes).await;
            drop(place);
            connections.core.shared.meter.connections(-1);
            connections.open.borrow_mut().remove(&number);
            connections.changed.notify_waiters();
        });
    }

    /// Says why, in the clear only and to a few at a time: whoever floods us is worth no more.
    fn turn_away(self: &Rc<Self>, mut stream: TcpStream, why: Refused) {
        if self.handshakes.is_some() || self.turned_away.get() >= TURNED_AWAY {
            return;
        }
        self.turned_away.set(self.turned_away.get() + 1);
        let wait =
            Wait { waited_for: why.to_string(), retry_after: Some(why.retry_after()), ..Wait::default() };
        let fault = Fault::QueueFull { message: why.to_string(), wait };
        self.core.shared.meter.refused(429);
        let answer = http::bare(&self.core, &fault);
        let connections = Rc::clone(self);
        tokio::task::spawn_local(async move {
            let told = async {
                stream.write_all(&answer).await?;
                stream.shutdown().await?;
                // Closed with bytes unread, the connection would be reset and the answer lost.
                while stream.read(&mut [0; 1024]).await? > 0 {}
                Ok::<_, io::Error>(())
            };
            drop(tokio::time::timeout(TELLING, told).await);
            connections.turned_away.set(connections.turned_away.get() - 1);
        });
    }

    /// Passes the stages on to every connection until the last one has ended.
    async fn drain(&self, mut stage: watch::Receiver<Stage>) {
        loop {
            let ended = self.changed.notified();
            let now = *stage.borrow_and_update();
            let sockets: Vec<_> = self.open.borrow().values().map(Rc::clone).collect();
            if sockets.is_empty() {
                return;
            }
            for socket in sockets {
                if socket.stage() < now {
                    socket.set_stage(now);
                }
            }
            tokio::select! {
                () = ended => {}
                // Its sender is gone: nobody can ask for more than this.
                changed = stage.changed(), if now < Stage::Ending => if changed.is_err() { return },
            }
        }
    }
}
