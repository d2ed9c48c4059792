//! The inference API's listeners: one thread, one runtime and one socket per core.
//!
//! A connection stays on one core, so nothing on the way of a request is shared but the routes (read without a lock) and
//! the leases (one atomic word). That is the core that accepted it or, when that one carries well above the mean, the
//! one that carries least ([`super::balance`]): the connection is handed over before its first byte is read, with the
//! place that its address has for it, and all else, the handshake included, happens over there.

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

use rouse::{
    fault::{Fault, Wait},
    tcp::Tcp,
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    runtime::{LocalOptions, LocalRuntime},
    sync::{
        Notify,
        mpsc::{self, UnboundedReceiver, UnboundedSender},
        oneshot, watch,
    },
};

use super::{
    Error, Stage,
    addresses::{Addresses, Place, Refused},
    balance::{Loads, OnCore, Seat},
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

/// Threads beside a serving one, for large bodies. None of their work waits for anything, so more of them would only share
/// the same cores; what they do not get to is bounded by `limits.bodyTotal`.
const BESIDE: usize = 4;
/// What threads beside a serving one add to their niceness.
const LESS_URGENT: i32 = 10;

/// The bound listeners.
pub struct Api {
    address: SocketAddr,
    listeners: Vec<std::net::TcpListener>,
    shared: Arc<Shared>,
    handshakes: Option<Arc<Handshakes>>,
    loads: Arc<Loads>,
}

/// A connection on its way to another core.
struct Moved {
    stream: std::net::TcpStream,
    peer: SocketAddr,
    place: Place,
    seat: Seat,
}

/// What one serving thread starts with.
struct Start {
    listener: std::net::TcpListener,
    shared: Arc<Shared>,
    stage: watch::Receiver<Stage>,
    addresses: Arc<Addresses>,
    handshakes: Option<Arc<Handshakes>>,
    number: usize,
    loads: Arc<Loads>,
    /// To the other cores, by number. Unbounded by type; what is in them holds a descriptor each.
    others: Vec<Option<UnboundedSender<Moved>>>,
    moved: UnboundedReceiver<Moved>,
    /// Told when it accepts.
    begun: oneshot::Sender<()>,
}

impl Api {
    /// Binds `cores` listeners to one address (`None`: as many as there are cores). Connections queue from here on and
    /// are accepted after [`Self::start`].
    ///
    /// # Errors
    /// The address is taken, or is none of this machine's.
    pub fn listen(address: SocketAddr, cores: Option<usize>) -> Result<Vec<std::net::TcpListener>, Error> {
        let cores = cores.or_else(|| thread::available_parallelism().ok().map(usize::from)).unwrap_or(1);
        listener::bind_shared(address, cores)
    }

    /// One thread for each listener.
    ///
    /// # Errors
    /// The certificates cannot be used.
    pub fn over(
        address: SocketAddr,
        listeners: Vec<std::net::TcpListener>,
        shared: Arc<Shared>,
    ) -> Result<Self, Error> {
        let address = match listeners.first() {
            Some(first) => first.local_addr().map_err(|source| Error::Bind { address, source })?,
            None => address,
        };
        let handshakes = Handshakes::of(shared.config.load().tls.as_ref(), listeners.len())?.map(Arc::new);
        let loads = Loads::new(listeners.len());
        Ok(Self { address, listeners, shared, handshakes, loads })
    }

    /// Where it listens, with the port that was given for port 0.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    #[cfg(test)]
    pub(crate) fn loads(&self) -> Arc<Loads> {
        Arc::clone(&self.loads)
    }

    /// Starts the serving threads.
    pub fn start(self, stage: watch::Receiver<Stage>) -> Result<Serving, Error> {
        let addresses = Arc::<Addresses>::default();
        let (mut ups, mut ends) = (Vec::new(), Vec::new());
        let (ways, arrivals): (Vec<_>, Vec<_>) =
            self.listeners.iter().map(|_| mpsc::unbounded_channel()).unzip();
        for ((number, listener), moved) in self.listeners.into_iter().enumerate().zip(arrivals) {
            let (tell, end) = oneshot::channel();
            let (begun, up) = oneshot::channel();
            // Not to itself: a core has all of its connections when nobody can send it any more.
            let others = ways.iter().enumerate().map(|(at, way)| (at != number).then(|| way.clone()));
            let start = Start {
                listener,
                shared: Arc::clone(&self.shared),
                stage: stage.clone(),
                addresses: Arc::clone(&addresses),
                handshakes: self.handshakes.clone(),
                number,
                loads: Arc::clone(&self.loads),
                others: others.collect(),
                moved,
                begun,
            };
            thread::Builder::new()
                .name(format!("api-{number}"))
                .spawn(move || {
                    // Nobody listens any more when the control runtime is gone.
                    drop(tell.send(run_core(start)));
                })
                .map_err(Error::Thread)?;
            ups.push(up);
            ends.push(end);
        }
        Ok(Serving { ups, ends })
    }
}

/// The threads that serve.
pub struct Serving {
    ups: Vec<oneshot::Receiver<()>>,
    ends: Vec<oneshot::Receiver<io::Result<()>>>,
}

impl Serving {
    /// Returns when each of them accepts connections, or has ended already.
    pub async fn up(&mut self) {
        for up in self.ups.drain(..) {
            up.await.unwrap_or_default();
        }
    }

    /// Returns when the gateway's stage says that it goes and every connection is closed: at [`Stage::Draining`] when
    /// their exchanges are over, at [`Stage::Ending`] two seconds later at most. Errors: one of them broke.
    pub async fn ended(self) -> Result<(), Error> {
        for end in self.ends {
            end.await
                .unwrap_or_else(|_| Err(io::Error::other("a serving thread panicked")))
                .map_err(|error| Error::Ended("api", error))?;
        }
        Ok(())
    }
}

/// Of one core. What is spawned there stays there, without a second scheduler (a `LocalSet`) inside the first.
fn runtime() -> io::Result<LocalRuntime> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .on_thread_start(step_back)
        .max_blocking_threads(BESIDE)
        .build_local(LocalOptions::default())
}

fn run_core(start: Start) -> io::Result<()> {
    runtime()?.block_on(async move {
            let Start {
                listener,
                shared,
                stage,
                addresses,
                handshakes,
                number,
                loads,
                others,
                mut moved,
                begun,
            } = start;
            let listener = TcpListener::from_std(listener)?;
            let core = Core::new(shared, stage.clone());
            let pool = core.pool.clone();
            tokio::task::spawn_local(async move { pool.expire().await });
            let connections = Connections::new(core, addresses, handshakes, loads, number);
            begun.send(()).unwrap_or_default();
            accept(listener, &connections, &others, &mut moved, stage.clone()).await;
            drop(others);
            connections.drain(stage, moved).await;
            Ok(())
        })
}

/// For threads that work off long things for a serving one: where they share its processor, it goes first.
fn step_back() {
    if let Err(error) = rustix::process::nice(LESS_URGENT) {
        tracing::debug!(%error, "a thread stays as urgent as those that serve");
    }
}

/// Accepts until the gateway drains, and then what already queued.
async fn accept(
    listener: TcpListener,
    connections: &Rc<Connections>,
    others: &[Option<UnboundedSender<Moved>>],
    moved: &mut UnboundedReceiver<Moved>,
    mut stage: watch::Receiver<Stage>,
) {
    loop {
        let accepted = tokio::select! {
            biased;
            _ = stage.wait_for(|stage| *stage > Stage::Serving) => break,
            Some(moved) = moved.recv() => {
                connections.take_over(moved, Stage::Serving);
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, peer)) => connections.open(stream, peer, others),
            Err(error) if is_momentary(&error) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot accept connections");
                // The socket stays readable, so trying again at once would spin.
                let pause = tokio::time::timeout(BACK_OFF, connections.changed.notified());
                tokio::select! {
                    _ = pause => {}
                    // What others have accepted need not wait for that.
                    Some(moved) = moved.recv() => connections.take_over(moved, Stage::Serving),
                }
            }
        }
    }
    // Off the poller, which need not have heard of those that came last, and would not let us take more than a hundred.
    let Ok(listener) = listener.into_std() else { return };
    loop {
        match listener.accept() {
            Ok((stream, peer)) => {
                if let Ok(stream) = stream.set_nonblocking(true).and_then(|()| TcpStream::from_std(stream)) {
                    connections.keep(stream, peer, Stage::Draining);
                }
            }
            Err(error) if is_momentary(&error) => {}
            Err(_) => return,
        }
    }
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
    number: usize,
    load: Rc<OnCore>,
    loads: Arc<Loads>,
    /// Those that are being told that there is no place for them.
    turned_away: Cell<u32>,
    open: RefCell<BTreeMap<u64, Rc<Socket>>>,
    next: Cell<u64>,
    /// One has ended.
    changed: Notify,
}

impl Connections {
    /// Those of the core with this number.
    fn new(
        core: Rc<Core>,
        addresses: Arc<Addresses>,
        handshakes: Option<Arc<Handshakes>>,
        loads: Arc<Loads>,
        number: usize,
    ) -> Rc<Self> {
        Rc::new(Self {
            core,
            addresses,
            handshakes,
            number,
            load: Rc::new(loads.on(number)),
            loads,
            open: RefCell::default(),
            turned_away: Cell::new(0),
            next: Cell::new(0),
            changed: Notify::new(),
        })
    }

    /// Serves a connection that was accepted here, or has a core do it that has less to do.
    fn open(self: &Rc<Self>, stream: TcpStream, peer: SocketAddr, others: &[Option<UnboundedSender<Moved>>]) {
        let better = self.loads.better_than(self.number);
        let Some(way) = better.and_then(|better| others.get(better)?.as_ref().map(|way| (better, way)))
        else {
            self.keep(stream, peer, Stage::Serving);
            return;
        };
        let (better, way) = way;
        let Some((stream, place)) = self.admit(stream, peer) else { return };
        // Off this core's poller; it cannot fail while nothing else holds the socket.
        let Ok(stream) = stream.into_std() else { return };
        self.core.shared.meter.moved();
        let moved = Moved { stream, peer, place, seat: self.loads.seat(better) };
        if let Err(back) = way.send(moved) {
            // That core has ended, which only a defect or the gateway's end explains.
            let seat = self.loads.seat(self.number);
            self.take_over(Moved { seat, ..back.0 }, Stage::Serving);
        }
    }

    fn keep(self: &Rc<Self>, stream: TcpStream, peer: SocketAddr, stage: Stage) {
        if let Some((stream, place)) = self.admit(stream, peer) {
            self.serve(stream, peer, (place, self.loads.seat(self.number)), stage);
        }
    }

    /// Goes on with what another core has accepted.
    fn take_over(self: &Rc<Self>, Moved { stream, peer, place, seat }: Moved, stage: Stage) {
        match TcpStream::from_std(stream) {
            Ok(stream) => self.serve(stream, peer, (place, seat), stage),
            Err(error) => tracing::warn!(%error, "lost a connection on its way to another core"),
        }
    }

    /// A place for the connection, if its client gets one.
    fn admit(self: &Rc<Self>, stream: TcpStream, peer: SocketAddr) -> Option<(TcpStream, Place)> {
        let limits = self.core.shared.config.load().limits;
        match self.addresses.enter(peer.ip(), &limits) {
            Ok(place) => stream.set_nodelay(true).is_ok().then_some((stream, place)),
            Err(refused) => {
                tracing::debug!(%peer, "refused a connection: {refused}");
                self.turn_away(stream, refused);
                None
            }
        }
    }

    fn serve(
        self: &Rc<Self>,
        stream: impl Into<Tcp>,
        peer: SocketAddr,
        (place, seat): (Place, Seat),
        stage: Stage,
    ) {
        let number = self.next.replace(self.next.get() + 1);
        let socket = Socket::new(stream, stage);
        socket.set_peer(peer);
        socket.is_of(place.offender());
        socket.weighs_on(Rc::clone(&self.load));
        self.open.borrow_mut().insert(number, Rc::clone(&socket));
        self.core.shared.meter.connections(1);
        let connections = Rc::clone(self);
        tokio::task::spawn_local(async move {
            connection::serve(&connections.core, &socket, connections.handshakes.as_deref()).await;
            drop(socket);
            drop((place, seat));
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

    /// Passes the stages on to every connection until the last one has ended, those included that other cores gave us
    /// just before they stopped accepting.
    async fn drain(self: &Rc<Self>, mut stage: watch::Receiver<Stage>, mut moved: UnboundedReceiver<Moved>) {
        let mut more = true;
        loop {
            let ended = self.changed.notified();
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
                    Some(moved) => self.take_over(moved, now),
                    None => more = false,
                },
                () = ended => {}
                // Its sender is gone: nobody can ask for more than this.
                changed = stage.changed(), if now < Stage::Ending => if changed.is_err() { return },
            }
        }
    }
}

#[cfg(test)]
mod tests;
