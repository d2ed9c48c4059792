//! A link to the API server, or to another server, that can fail. It carries one client's connections; other clients
//! are unaffected.

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

use crate::{ClusterInner, ClusterUser, wait::WAIT_TIMEOUT};

/// How a link treats its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkMode {
    Pass,
    /// Delays each piece of up to 16 KiB by this time, in both directions.
    Slow(Duration),
    /// Nothing passes, without an error: like a switch that drops packets.
    Hold,
    /// Connections are reset, new ones as soon as they open.
    Cut,
}

/// Counts of a link's bytes, in pieces. A piece is the result of one read of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkTraffic {
    /// Connections so far.
    pub accepted: usize,
    /// Pieces waiting now because the link is held.
    pub held: usize,
    /// Pieces delivered to the server.
    pub to_server: usize,
    /// Pieces delivered to the client.
    pub to_client: usize,
}

/// A link to a server. Cut on drop.
pub struct Link {
    inner: Arc<ClusterInner>,
    address: SocketAddr,
    mode: watch::Sender<LinkMode>,
    traffic: Arc<watch::Sender<LinkTraffic>>,
    task: JoinHandle<()>,
}

impl Link {
    /// Opens a link to the API server that listens at this address of this machine.
    pub(crate) async fn open(inner: Arc<ClusterInner>, listen_ip: Ipv4Addr) -> Result<Self> {
        let api_server = inner.api_server;
        Self::open_to(inner, listen_ip, api_server).await
    }

    /// Opens a link to this server that listens at this address of this machine.
    pub(crate) async fn open_to(
        inner: Arc<ClusterInner>,
        listen_ip: Ipv4Addr,
        server_address: SocketAddr,
    ) -> Result<Self> {
        let (mode, mode_rx) = watch::channel(LinkMode::Pass);
        let traffic = Arc::new(watch::Sender::new(LinkTraffic::default()));
        let count = Arc::clone(&traffic);
        let opened = inner.on_cluster_runtime(async move {
            let listener = TcpListener::bind((listen_ip, 0)).await?;
            let address = listener.local_addr()?;
            io::Result::Ok((address, tokio::spawn(accept(listener, server_address, mode_rx, count))))
        });
        let (address, task) = opened.await?;
        Ok(Self { inner, address, mode, traffic, task })
    }

    /// The address at which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the mode, also for existing connections.
    pub fn set(&self, mode: LinkMode) {
        self.mode.send_replace(mode);
    }

    /// Returns the traffic so far.
    pub fn traffic(&self) -> LinkTraffic {
        *self.traffic.borrow()
    }

    /// Waits until the traffic satisfies `fits`.
    ///
    /// # Errors
    /// [`WAIT_TIMEOUT`] passed; the error holds the traffic.
    pub async fn until(&self, what: &str, fits: impl FnMut(&LinkTraffic) -> bool) -> Result<LinkTraffic> {
        let mut traffic_rx = self.traffic.subscribe();
        match time::timeout(WAIT_TIMEOUT, traffic_rx.wait_for(fits)).await {
            Ok(traffic) => Ok(*traffic?),
            Err(_) => bail!("waited {} s for {what} of a link: {:?}", WAIT_TIMEOUT.as_secs(), self.traffic()),
        }
    }

    /// Creates a client of this user through this link.
    ///
    /// # Errors
    /// The kubeconfig cannot be used.
    pub async fn client(&self, user: &ClusterUser) -> Result<kube::Client> {
        self.inner.users.client(user, self.address).await
    }

    /// Writes a kubeconfig of this user for processes that use this link.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn kubeconfig(&self, user: &ClusterUser) -> Result<std::path::PathBuf> {
        self.inner.users.kubeconfig(user, self.address)
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.set(LinkMode::Cut);
        self.task.abort();
    }
}

async fn accept(
    listener: TcpListener,
    server_address: SocketAddr,
    mode: watch::Receiver<LinkMode>,
    traffic: Arc<watch::Sender<LinkTraffic>>,
) {
    // The only errors are a client that has disconnected, and a lack of descriptors, which fails the test anyway.
    while let Ok((client, _)) = listener.accept().await {
        traffic.send_modify(|traffic| traffic.accepted += 1);
        tokio::spawn(forward_connection(client, server_address, mode.clone(), Arc::clone(&traffic)));
    }
}

/// Forwards one connection until either side ends it or the link is cut.
async fn forward_connection(
    mut client: TcpStream,
    server_address: SocketAddr,
    mode: watch::Receiver<LinkMode>,
    traffic: Arc<watch::Sender<LinkTraffic>>,
) {
    let mut waits = mode.clone();
    let connected = async {
        wait_to_pass(&mut waits).await;
        TcpStream::connect(server_address).await
    };
    let Some(Ok(mut server)) = unless_cut(mode.clone(), connected).await else { return reset(&client) };
    let (from_client, to_client) = client.split();
    let (from_server, to_server) = server.split();
    let pumped = async {
        let count_to_server = |traffic: &mut LinkTraffic| traffic.to_server += 1;
        let count_to_client = |traffic: &mut LinkTraffic| traffic.to_client += 1;
        tokio::join!(
            pump(from_client, to_server, mode.clone(), &traffic, count_to_server),
            pump(from_server, to_client, mode.clone(), &traffic, count_to_client),
        )
    };
    if unless_cut(mode.clone(), pumped).await.is_none() {
        reset(&client);
        reset(&server);
    }
}

async fn unless_cut<T>(mut mode: watch::Receiver<LinkMode>, work: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        // An error means that the link was dropped.
        _ = mode.wait_for(|mode| *mode == LinkMode::Cut) => None,
        done = work => Some(done),
    }
}

/// Makes the close of this socket a reset instead of an orderly end.
fn reset(stream: &TcpStream) {
    if let Err(error) = stream.set_zero_linger() {
        eprintln!("a link's connection ends in order, not cut: {error}");
    }
}

async fn pump(
    mut from: ReadHalf<'_>,
    mut to: WriteHalf<'_>,
    mut mode: watch::Receiver<LinkMode>,
    traffic: &watch::Sender<LinkTraffic>,
    count: impl Fn(&mut LinkTraffic),
) {
    let mut buffer = vec![0; 16 * 1024];
    while let Ok(n @ 1..) = from.read(&mut buffer).await {
        let held_piece = HeldPiece::if_held(&mode, traffic);
        wait_to_pass(&mut mode).await;
        drop(held_piece);
        if to.write_all(buffer.get(..n).unwrap_or_default()).await.is_err() {
            return;
        }
        traffic.send_modify(&count);
    }
    // The sender has finished. An error means that the receiver has closed too.
    to.shutdown().await.ok();
}

/// Counts a waiting piece until dropped, even if its connection is cut meanwhile.
struct HeldPiece<'a>(&'a watch::Sender<LinkTraffic>);

impl<'a> HeldPiece<'a> {
    fn if_held(mode: &watch::Receiver<LinkMode>, traffic: &'a watch::Sender<LinkTraffic>) -> Option<Self> {
        (*mode.borrow() == LinkMode::Hold).then(|| {
            traffic.send_modify(|traffic| traffic.held += 1);
            Self(traffic)
        })
    }
}

impl Drop for HeldPiece<'_> {
    fn drop(&mut self) {
        self.0.send_modify(|traffic| traffic.held -= 1);
    }
}

/// Waits while the link is held, then for the delay of a slow link.
async fn wait_to_pass(mode: &mut watch::Receiver<LinkMode>) {
    let current = mode.wait_for(|mode| *mode != LinkMode::Hold).await.map(|mode| *mode);
    if let Ok(LinkMode::Slow(pause)) = current {
        time::sleep(pause).await;
    }
}
