//! Measures a server's CPU time while clients on another thread load it over loopback.

use std::{fs, io, net::SocketAddr, sync::Arc, thread, time::Duration};

use anyhow::Context as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    runtime::{Builder, LocalOptions, Runtime},
    sync::oneshot,
    task::JoinSet,
};

/// Received bytes of one response beyond which only its end is kept.
const MAX_KEPT_BYTES: usize = 32 << 10;

/// What the clients do: each has a connection of its own, and sends its requests one after the other.
pub(crate) struct ClientLoad {
    pub(crate) clients: usize,
    /// Of each client.
    pub(crate) requests: usize,
    pub(crate) request: String,
    /// The last bytes of each response.
    pub(crate) response_end: &'static [u8],
}

/// Serves on a thread of its own until the clients are done, and returns the CPU time of serving. `make_handler` runs on
/// that thread, and its handler spawns the task of a connection.
pub(crate) fn serve_clients<H: FnMut(TcpStream)>(
    load: &Runtime,
    clients: ClientLoad,
    make_handler: impl FnOnce() -> H + Send + 'static,
) -> anyhow::Result<Duration> {
    let (address_tx, address_rx) = oneshot::channel();
    let (stop, stopped) = oneshot::channel();
    let server = thread::spawn(move || serve(make_handler, address_tx, stopped));
    let address = load.block_on(address_rx)?;
    load.block_on(run_clients(address, clients))?;
    drop(stop);
    server.join().map_err(|_| anyhow::anyhow!("the server panicked"))?
}

fn serve<H: FnMut(TcpStream)>(
    make_handler: impl FnOnce() -> H,
    address_tx: oneshot::Sender<SocketAddr>,
    stopped: oneshot::Receiver<()>,
) -> anyhow::Result<Duration> {
    let runtime = Builder::new_current_thread().enable_all().build_local(LocalOptions::default())?;
    runtime.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let mut handle = make_handler();
        let before = cpu_time()?;
        address_tx.send(listener.local_addr()?).map_err(|_| anyhow::anyhow!("the clients are gone"))?;
        let accept = async {
            loop {
                let (socket, _) = listener.accept().await?;
                socket.set_nodelay(true)?;
                handle(socket);
            }
        };
        tokio::select! {
            ended = accept => ended,
            _ = stopped => Ok::<_, io::Error>(()),
        }?;
        Ok(cpu_time()?.saturating_sub(before))
    })
}

/// This thread's CPU time, as the kernel accounts it.
fn cpu_time() -> io::Result<Duration> {
    let text = fs::read_to_string("/proc/thread-self/schedstat")?;
    let nanoseconds = text.split(' ').next().and_then(|number| number.parse().ok());
    nanoseconds.map(Duration::from_nanos).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

async fn run_clients(address: SocketAddr, load: ClientLoad) -> anyhow::Result<()> {
    let ClientLoad { clients, requests, request, response_end } = load;
    let request: Arc<str> = request.into();
    let mut all = JoinSet::new();
    for _ in 0..clients {
        let request = Arc::clone(&request);
        all.spawn(async move {
            let mut socket = TcpStream::connect(address).await?;
            socket.set_nodelay(true)?;
            for _ in 0..requests {
                socket.write_all(request.as_bytes()).await?;
                read_until(&mut socket, response_end).await?;
            }
            anyhow::Ok(())
        });
    }
    while let Some(client) = all.join_next().await {
        client.context("a client panicked")??;
    }
    Ok(())
}

/// Reads one response, which ends with `end`.
async fn read_until(socket: &mut TcpStream, end: &[u8]) -> anyhow::Result<()> {
    let mut received = Vec::with_capacity(2 * MAX_KEPT_BYTES);
    while !received.ends_with(end) {
        if received.len() > MAX_KEPT_BYTES {
            received.drain(..received.len() - end.len());
        }
        anyhow::ensure!(socket.read_buf(&mut received).await? > 0, "the server closed the connection");
    }
    Ok(())
}
