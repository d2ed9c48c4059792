//! Test engines: engine-sim in its own process, which is this test binary filtered to run only [`engine`]; an engine
//! that echoes requests; and one that only answers readiness probes, on a listener and with a thread that tests know.

use std::{
    io::{BufRead as _, BufReader, Read as _, Write as _},
    net::{SocketAddr, TcpListener},
    process::{Child, Command, ExitCode, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU16, Ordering},
    },
};

use clap::Parser;
use rouse_testing::scripted_engine::{read_rest_of_request, scripted};
use tokio::time::Instant;

use super::{StubTestClient, run_queue_meter::ProcThread};

const ENGINE_FLAGS_ENV: &str = "ROUSE_TEST_ENGINE";

#[derive(Parser)]
struct EngineProcessCli {
    #[command(flatten)]
    args: engine_sim::EngineSimArgs,
}

/// Not a test: the engine's own process.
#[test]
#[ignore = "started by other tests"]
fn engine() {
    let Ok(flags) = std::env::var(ENGINE_FLAGS_ENV) else { return };
    let args = EngineProcessCli::parse_from(std::iter::once("engine").chain(flags.split_whitespace())).args;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    assert_eq!(runtime.block_on(engine_sim::run(args)).unwrap(), ExitCode::SUCCESS);
}

/// A running engine-sim. Killed by its pid on drop.
pub(crate) struct SimEngineProcess {
    child: Child,
    pub(crate) address: SocketAddr,
}

pub(crate) fn sim(flags: &str) -> SimEngineProcess {
    let usual = "--port 0 --model m --start-time 10ms --profile-time 0 --enable-sleep-mode --keep-alive 0";
    let flags =
        if flags.contains("--fast") { format!("--port 0 {flags}") } else { format!("{usual} {flags}") };
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["support::engine::engine", "--exact", "--ignored", "--nocapture"])
        .env(ENGINE_FLAGS_ENV, flags)
        .env("VLLM_SERVER_DEV_MODE", "1")
        .env_remove("CUDA_VISIBLE_DEVICES")
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let address = lines.find_map(|line| line.split("listening on ").nth(1)?.trim().parse().ok());
    std::thread::spawn(move || lines.for_each(drop));
    SimEngineProcess { child, address: address.expect("the engine listens") }
}

impl SimEngineProcess {
    pub(crate) fn client(&self) -> StubTestClient {
        StubTestClient::new(self.address)
    }

    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.client().get("/sim/counters").json()[name].as_u64().unwrap()
    }
}

impl Drop for SimEngineProcess {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// An engine that echoes each request, head and body.
pub(crate) fn echo() -> SocketAddr {
    scripted(|mut stream, came| {
        let Some(request) = read_rest_of_request(&mut stream, came) else {
            // The client has disconnected.
            return;
        };
        write!(stream, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", request.len()).unwrap();
        stream.write_all(&request).unwrap();
    })
}

/// Answers each readiness probe with the configured status, until the test ends.
pub(crate) struct ProbedHttpServer {
    pub(crate) address: SocketAddr,
    pub(crate) thread: ProcThread,
    status: Arc<AtomicU16>,
    answers: Arc<Mutex<ProbeAnswers>>,
}

/// The answers given so far.
#[derive(Default)]
struct ProbeAnswers {
    bad: u32,
    first_good: Option<Instant>,
}

impl ProbedHttpServer {
    pub(crate) fn start(status: u16) -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").unwrap(), status)
    }

    pub(crate) fn on(listener: TcpListener, status: u16) -> Self {
        let address = listener.local_addr().unwrap();
        let status = Arc::new(AtomicU16::new(status));
        let given = Arc::<Mutex<ProbeAnswers>>::default();
        let (answers, probes) = (Arc::clone(&status), Arc::clone(&given));
        #[expect(clippy::disallowed_methods, reason = "a test's channel")]
        let (thread_tx, thread_rx) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            thread_tx.send(ProcThread::current()).unwrap();
            for stream in listener.incoming() {
                let mut stream = stream.unwrap();
                let status = answers.load(Ordering::SeqCst);
                // The client may have disconnected.
                _ = stream.read(&mut [0; 1024]);
                probes.lock().unwrap().note((200..300).contains(&status));
                _ = write!(stream, "HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n");
            }
        });
        Self { address, thread: thread_rx.recv().unwrap(), status, answers: given }
    }

    pub(crate) fn set(&self, status: u16) {
        self.status.store(status, Ordering::SeqCst);
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/health", self.address)
    }

    /// When it gave its first good answer.
    pub(crate) fn first_good(&self) -> Option<Instant> {
        self.answers.lock().unwrap().first_good
    }

    /// How many bad answers it has given.
    pub(crate) fn bad(&self) -> u32 {
        self.answers.lock().unwrap().bad
    }
}

impl ProbeAnswers {
    fn note(&mut self, good: bool) {
        if good {
            self.first_good.get_or_insert_with(Instant::now);
        } else {
            self.bad += 1;
        }
    }
}
