//! Clients of several gateways at once, as behind a Service: each moves to another gateway when its connection is
//! refused, and never resends a request that it has begun.
//!
//! The clients run in a thread of their own, so a blocking test delays none of them.

use std::{
    io::ErrorKind,
    net::SocketAddr,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
};

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    runtime,
    sync::watch,
    task::JoinSet,
    time::{Duration, Instant, sleep_until, timeout},
};

use crate::client::{TestResponse, chat_body, request};

/// Longer than any request takes.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// A client closes a connection after this many requests, so that restarted gateways get their share.
const MAX_USES_PER_CONNECTION: u32 = 100;

/// The requested load.
#[derive(Clone, Copy)]
pub(crate) struct BackgroundLoadSpec {
    /// The model of short requests, how many of them start per second, and the number of their clients.
    pub(crate) short: &'static str,
    pub(crate) rate: u32,
    pub(crate) clients: u32,
    /// The model of streams, how many are always open, and their length in tokens.
    pub(crate) long: &'static str,
    pub(crate) streams: u32,
    pub(crate) tokens: u32,
}

/// Load that runs until the test ends it.
pub(crate) struct BackgroundLoad {
    shared: Arc<BackgroundLoadShared>,
    started_at: Instant,
    stop: watch::Sender<bool>,
    thread: JoinHandle<()>,
}

/// The results of the load.
#[derive(Debug)]
pub(crate) struct BackgroundLoadResult {
    pub(crate) answered: u64,
    pub(crate) streams: u64,
    pub(crate) took: Duration,
    pub(crate) slowest: Duration,
    pub(crate) failed: Vec<FailedLoadRequest>,
}

#[derive(Debug)]
pub(crate) struct FailedLoadRequest {
    pub(crate) gateway: SocketAddr,
    /// Before the connection of the request began. No client connects to a gateway that has ended, so this is before
    /// that gateway's end for each request that the end cut.
    pub(crate) connected: Instant,
    #[allow(dead_code, reason = "printed by a test that fails")]
    pub(crate) why: String,
}

struct BackgroundLoadShared {
    spec: BackgroundLoadSpec,
    gateways: Mutex<Vec<SocketAddr>>,
    next: AtomicUsize,
    answered: AtomicU64,
    streams: AtomicU64,
    slowest: AtomicU64,
    failed: Mutex<Vec<FailedLoadRequest>>,
}

impl BackgroundLoad {
    pub(crate) fn start(gateways: Vec<SocketAddr>, wishes: BackgroundLoadSpec) -> Self {
        let shared = Arc::new(BackgroundLoadShared {
            spec: wishes,
            gateways: Mutex::new(gateways),
            next: AtomicUsize::default(),
            answered: AtomicU64::default(),
            streams: AtomicU64::default(),
            slowest: AtomicU64::default(),
            failed: Mutex::default(),
        });
        let (stop, stopped) = watch::channel(false);
        let clients = Arc::clone(&shared);
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let thread = thread::spawn(move || runtime.block_on(run(clients, stopped)));
        Self { shared, started_at: Instant::now(), stop, thread }
    }

    /// Adds a gateway to the load.
    pub(crate) fn add_gateway(&self, gateway: SocketAddr) {
        self.shared.gateways().push(gateway);
    }

    /// Removes an ended gateway: its address may belong to another process next.
    pub(crate) fn remove_gateway(&self, gateway: SocketAddr) {
        self.shared.gateways().retain(|known| *known != gateway);
    }

    /// Short requests that were answered so far.
    pub(crate) fn answered(&self) -> u64 {
        self.shared.answered.load(Relaxed)
    }

    /// Starts no further request, and waits for the running ones.
    pub(crate) fn end(self) -> BackgroundLoadResult {
        self.stop.send_replace(true);
        let took = self.started_at.elapsed();
        self.thread.join().unwrap();
        BackgroundLoadResult {
            answered: self.shared.answered.load(Relaxed),
            streams: self.shared.streams.load(Relaxed),
            took,
            slowest: Duration::from_micros(self.shared.slowest.load(Relaxed)),
            failed: std::mem::take(&mut self.shared.failed.lock().unwrap()),
        }
    }
}

async fn run(shared: Arc<BackgroundLoadShared>, stop: watch::Receiver<bool>) {
    let mut all = JoinSet::new();
    let BackgroundLoadSpec { rate, clients, streams, .. } = shared.spec;
    let every = Duration::from_secs(1) * clients / rate;
    let begun = Instant::now();
    for n in 0..clients {
        all.spawn(ask(Arc::clone(&shared), stop.clone(), begun + every * n / clients, every));
    }
    for _ in 0..streams {
        all.spawn(listen(Arc::clone(&shared), stop.clone()));
    }
    while let Some(ended) = all.join_next().await {
        ended.unwrap();
    }
}

/// One client of short requests. Each request has a due time, and an overdue request is sent at once.
async fn ask(
    shared: Arc<BackgroundLoadShared>,
    stop: watch::Receiver<bool>,
    mut due: Instant,
    every: Duration,
) {
    let body = chat_body(shared.spec.short, false, 2);
    let text = request("/v1/chat/completions", "", &body).replace("Connection: close\r\n", "");
    let mut kept: Option<BackgroundConnection> = None;
    while !*stop.borrow() {
        sleep_until(due).await;
        due += every;
        let mut connection = match kept.take().filter(BackgroundConnection::is_good) {
            Some(connection) => connection,
            None => shared.connect().await,
        };
        let begun = Instant::now();
        let BackgroundConnection { gateway, connected, .. } = connection;
        match timeout(REQUEST_TIMEOUT, connection.exchange(text.as_bytes()))
            .await
            .unwrap_or_else(|_| Err("late".into()))
        {
            Ok(answer) if answer.status == 200 => {
                shared.answered.fetch_add(1, Relaxed);
                let took = u64::try_from(begun.elapsed().as_micros()).unwrap();
                shared.slowest.fetch_max(took, Relaxed);
                connection.answers += 1;
                let closes = answer.header("connection") == "close";
                kept = Some(connection)
                    .filter(|connection| !closes && connection.answers < MAX_USES_PER_CONNECTION);
            }
            Ok(answer) => shared.failed(gateway, connected, format!("{} {}", answer.status, answer.text())),
            Err(why) => shared.failed(gateway, connected, why),
        }
    }
}

/// One client that always has a stream open.
async fn listen(shared: Arc<BackgroundLoadShared>, stop: watch::Receiver<bool>) {
    let BackgroundLoadSpec { long, tokens, .. } = shared.spec;
    let text = request("/v1/chat/completions", "", &chat_body(long, true, tokens));
    while !*stop.borrow() {
        let BackgroundConnection { mut stream, gateway, connected, .. } = shared.connect().await;
        let mut bytes = Vec::new();
        let exchange = async {
            stream.write_all(text.as_bytes()).await?;
            stream.read_to_end(&mut bytes).await
        };
        let ended = timeout(REQUEST_TIMEOUT, exchange).await;
        if TestResponse::parse(&bytes).is_some_and(|answer| answer.is_whole_stream()) {
            shared.streams.fetch_add(1, Relaxed);
        } else {
            let last = String::from_utf8_lossy(&bytes);
            let last: String = last.chars().skip(last.chars().count().saturating_sub(300)).collect();
            shared.failed(gateway, connected, format!("a stream was cut: {ended:?} after {last:?}"));
        }
    }
}

impl BackgroundLoadShared {
    fn gateways(&self) -> MutexGuard<'_, Vec<SocketAddr>> {
        self.gateways.lock().unwrap()
    }

    fn failed(&self, gateway: SocketAddr, connected: Instant, why: String) {
        self.failed.lock().unwrap().push(FailedLoadRequest { gateway, connected, why });
    }

    /// Connects to the next gateway in turn that accepts.
    async fn connect(&self) -> BackgroundConnection {
        let given_up = Instant::now() + REQUEST_TIMEOUT;
        loop {
            let turn = self.next.fetch_add(1, Relaxed);
            let gateway = {
                let gateways = self.gateways();
                gateways[turn % gateways.len()]
            };
            let connected = Instant::now();
            match TcpStream::connect(gateway).await {
                Ok(stream) => {
                    stream.set_nodelay(true).unwrap();
                    return BackgroundConnection { stream, gateway, connected, answers: 0 };
                }
                // Refused, or reset by a process that was just killed: the client has sent nothing on this connection.
                Err(error) => assert!(Instant::now() < given_up, "no gateway takes connections: {error}"),
            }
        }
    }
}

struct BackgroundConnection {
    stream: TcpStream,
    /// The system forgets the peer of a connection that was reset.
    gateway: SocketAddr,
    connected: Instant,
    answers: u32,
}

impl BackgroundConnection {
    /// Whether the peer has not closed the connection. Every client checks that before it reuses a connection.
    fn is_good(&self) -> bool {
        matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock)
    }

    async fn exchange(&mut self, request: &[u8]) -> Result<TestResponse, String> {
        self.stream.write_all(request).await.map_err(|error| error.to_string())?;
        let mut bytes = Vec::with_capacity(4096);
        loop {
            match self.stream.read_buf(&mut bytes).await {
                Ok(1..) => {}
                ended => return Err(format!("{ended:?} after {:?}", String::from_utf8_lossy(&bytes))),
            }
            if let Some(answer) = TestResponse::parse(&bytes).filter(|answer| answer.complete) {
                return Ok(answer);
            }
        }
    }
}
