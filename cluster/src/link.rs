//! A way to the API server that can fail: one client's connections go through it, and others' do not.

use std::{
    io,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::Result;
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

use crate::{Inner, User};

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

/// A link to the API server. Dropped, it is cut.
pub struct Link {
    inner: Arc<Inner>,
    address: SocketAddr,
    mode: watch::Sender<Mode>,
    accepted: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Link {
    /// One that listens at this address of this machine.
    pub(crate) async fn open(inner: Arc<Inner>, here: Ipv4Addr) -> Result<Self> {
        let there = inner.plane.address();
        let (mode, seen) = watch::channel(Mode::Pass);
        let accepted = Arc::new(AtomicUsize::new(0));
        let count = Arc::clone(&accepted);
        let opened = inner.at_home(async move {
            let listener = TcpListener::bind((here, 0)).await?;
            let address = listener.local_addr()?;
            io::Result::Ok((address, tokio::spawn(accept(listener, there, seen, count))))
        });
        let (address, task) = opened.await?;
        Ok(Self { inner, address, mode, accepted, task })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on, for connections that exist as well.
    pub fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Connections so far.
    pub fn accepted(&self) -> usize {
        self.accepted.load(Ordering::Relaxed)
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
    count: Arc<AtomicUsize>,
) {
    // The only errors are a client that is gone already, and a lack of descriptors, in which the test fails anyway.
    while let Ok((client, _)) = listener.accept().await {
        count.fetch_add(1, Ordering::Relaxed);
        tokio::spawn(carry(client, there, mode.clone()));
    }
}

/// One connection, until either side ends it or the link is cut.
async fn carry(mut client: TcpStream, there: SocketAddr, mode: watch::Receiver<Mode>) {
    let mut waits = mode.clone();
    let connected = async {
        passes(&mut waits).await;
        TcpStream::connect(there).await
    };
    let Some(Ok(mut server)) = unless_cut(mode.clone(), connected).await else { return reset(&client) };
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let pumped = async {
        tokio::join!(pump(from_client, to_server, mode.clone()), pump(from_server, to_client, mode.clone()))
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

async fn pump(mut from: ReadHalf<'_>, mut to: WriteHalf<'_>, mut mode: watch::Receiver<Mode>) {
    let mut room = vec![0; 16 * 1024];
    while let Ok(n @ 1..) = from.read(&mut room).await {
        passes(&mut mode).await;
        if to.write_all(room.get(..n).unwrap_or_default()).await.is_err() {
            return;
        }
    }
    // The other side has nothing more to say; an error says that this one has gone as well.
    to.shutdown().await.ok();
}

/// Waits while nothing may pass.
async fn passes(mode: &mut watch::Receiver<Mode>) {
    let seen = mode.wait_for(|mode| *mode != Mode::Hold).await.map(|mode| *mode);
    if let Ok(Mode::Slow(pause)) = seen {
        time::sleep(pause).await;
    }
}
