//! A way to the API server that can fail: one client's connections go through it, and others' do not.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Result, bail};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{
        TcpListener, TcpStream,
        tcp::{ReadHalf, WriteHalf},
    },
    sync::watch,
    task::JoinHandle,
    time,
};

use crate::{Inner, User, wait::PATIENCE};

/// What a link does with its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Pass,
    /// Each piece of up to 16 KiB, in both directions, waits this long.
    Slow(Duration),
    /// Nothing passes, and nobody is told: as when a switch drops packets.
    Hold,
    /// Connections are reset, new ones as soon as they are made.
    Cut,
}

/// What has become of a link's bytes. They are counted in pieces: what was read of a connection at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Connections so far.
    pub accepted: usize,
    /// Pieces that wait because the link is held, now.
    pub held: usize,
    /// Pieces that were handed to the API server.
    pub asked: usize,
    /// Pieces that were handed to the client.
    pub answered: usize,
}

/// A link to the API server. Dropped, it is cut.
pub struct Link {
    inner: Arc<Inner>,
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    traffic: Arc<watch::Sender<Traffic>>,
    task: JoinHandle<()>,
}

impl Link {
    /// One that listens at this address of this machine.
    pub(crate) async fn open(inner: Arc<Inner>, here: Ipv4Addr) -> Result<Self> {
        let there = inner.api_server;
        let (mode, seen) = watch::channel(Mode::Pass);
        let traffic = Arc::new(watch::Sender::new(Traffic::default()));
        let count = Arc::clone(&traffic);
        let opened = inner.at_home(async move {
            let listener = TcpListener::bind((here, 0)).await?;
            let address = listener.local_addr()?;
            io::Result::Ok((address, tokio::spawn(accept(listener, there, seen, count))))
        });
        let (address, task) = opened.await?;
        Ok(Self { inner, address, mode, traffic, task })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on, for connections that exist as well.
    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// What has become of its bytes until now.
    pub fn traffic(&self) -> Traffic {
        *self.traffic.borrow()
    }

    /// Waits until `fits` says so of what has become of its bytes.
    ///
    /// # Errors
    /// After [`PATIENCE`](crate::wait::PATIENCE), with what it was then.
    pub async fn until(&self, what: &str, fits: impl FnMut(&Traffic) -> bool) -> Result<Traffic> {
        let mut seen = self.traffic.subscribe();
        match time::timeout(PATIENCE, seen.wait_for(fits)).await {
            Ok(traffic) => Ok(*traffic?),
            Err(_) => bail!("waited {} s for {what} of a link: {:?}", PATIENCE.as_secs(), self.traffic()),
        }
    }

    /// A client of this user that goes through here.
    ///
    /// # Errors
    /// When the kubeconfig cannot be used.
    pub async fn client(&self, user: &User) -> Result<kube::Client> {
        self.inner.users.client(user, self.address).await
    }

    /// A kubeconfig of this user for processes that go through here.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn kubeconfig(&self, user: &User) -> Result<std::path::PathBuf> {
        self.inner.users.kubeconfig(user, self.address)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.set(Mode::Cut);
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    there: SocketAddr,
    mode: watch::Receiver<Mode>,
    traffic: Arc<watch::Sender<Traffic>>,
) {
    // The only errors are a client that is gone already, and a lack of descriptors, in which the test fails anyway.
    while let Ok((client, _)) = listener.accept().await {
        traffic.send_modify(|traffic| traffic.accepted += 1);
        tokio::spawn(carry(client, there, mode.clone(), Arc::clone(&traffic)));
    }
}

/// One connection, until either side ends it or the link is cut.
async fn carry(
    mut client: TcpStream,
    there: SocketAddr,
    mode: watch::Receiver<Mode>,
    traffic: Arc<watch::Sender<Traffic>>,
) {
    let mut waits = mode.clone();
    let connected = async {
        passes(&mut waits).await;
        TcpStream::connect(there).await
    };
    let Some(Ok(mut server)) = unless_cut(mode.clone(), connected).await else { return reset(&client) };
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let pumped = async {
        let asked = |traffic: &mut Traffic| traffic.asked += 1;
        let answered = |traffic: &mut Traffic| traffic.answered += 1;
        tokio::join!(
            pump(from_client, to_server, mode.clone(), &traffic, asked),
            pump(from_server, to_client, mode.clone(), &traffic, answered),
        )
    };
    if unless_cut(mode.clone(), pumped).await.is_none() {
        reset(&client);
        reset(&server);
    }
}

async fn unless_cut<T>(mut mode: watch::Receiver<Mode>, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        // An error is the end of the link.
        _ = mode.wait_for(|mode| *mode == Mode::Cut) => None,
        done = work => Some(done),
    }
}

/// When this socket is closed, its other side sees a failure and not an orderly end.
fn reset(stream: &TcpStream) {
    if let Err(error) = stream.set_zero_linger() {
        eprintln!("a link's connection ends in order, not cut: {error}");
    }
}

async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut mode: watch::Receiver<Mode>,
    traffic: &watch::Sender<Traffic>,
    count: impl Fn(&mut Traffic),
) {
    let mut room = vec![0; 16 * 1024];
    while let Ok(n @ 1..) = from.read(&mut room).await {
        let held = Held::by(&mode, traffic);
        passes(&mut mode).await;
        drop(held);
        if to.write_all(room.get(..n).unwrap_or_default()).await.is_err() {
            return;
        }
        traffic.send_modify(&count);
    }
    // The other side has nothing more to say; an error says that this one has gone as well.
    to.shutdown().await.ok();
}

/// A piece that waits, until it is dropped: also when its connection is cut meanwhile.
struct Held<'a>(&'a watch::Sender<Traffic>);

impl<'a> Held<'a> {
    fn by(mode: &watch::Receiver<Mode>, traffic: &'a watch::Sender<Traffic>) -> Option<Self> {
        (*mode.borrow() == Mode::Hold).then(|| {
            traffic.send_modify(|traffic| traffic.held += 1);
            Self(traffic)
        })
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|traffic| traffic.held -= 1);
    }
}

/// Waits while nothing may pass.
async fn passes(mode: &mut watch::Receiver<Mode>) {
    let seen = mode.wait_for(|mode| *mode != Mode::Hold).await.map(|mode| *mode);
    if let Ok(Mode::Slow(pause)) = seen {
        time::sleep(pause).await;
    }
}
