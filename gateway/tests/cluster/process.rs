//! A gateway process: this test program, started with a filter that runs nothing but [`gateway`]. The process takes
//! part in the election and follows its input line by line. Its own output lines have a mark, because libtest prints as
//! well.

use std::{
    io::{self, BufRead as _},
    path::Path,
    process::Stdio,
};

use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use rouse::units::{Bytes, Tick};
use rouse_cluster::{Link, wait::WAIT_TIMEOUT};
use rouse_controllers::{
    election::{Election, KubeLeaseStore},
    ledger::PoolLedger,
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::{Duration, sleep, timeout},
};

use crate::{
    site::{GatewayNamespace, LEASE_NAME, until_leading},
    support::reservation_request,
};

/// The namespace of the process's lease.
const NAMESPACE_ENV: &str = "ROUSE_TEST_GATEWAY";
/// Kubeconfigs of the process, one for the election and one for the ledger.
const ELECTION_KUBECONFIG_ENV: &str = "ROUSE_TEST_ELECTION";
const LEDGER_KUBECONFIG_ENV: &str = "ROUSE_TEST_BOOKS";
const LINE_MARK: &str = "> ";

/// Runs the process. A wait for a line blocks one thread, and the election continues on another.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateway() {
    let Ok(namespace) = std::env::var(NAMESPACE_ENV) else { return };
    let leases = KubeLeaseStore::new(client(ELECTION_KUBECONFIG_ENV).await, &namespace, LEASE_NAME);
    let election = Election::start(leases, format!("process {}", std::process::id()));
    let client = client(LEDGER_KUBECONFIG_ENV).await;
    // Without the memory of earlier writes: each change begins with a read.
    let books = || PoolLedger::new(client.clone(), election.leadership());
    print_line(&format!("leads in {}", until_leading(&mut election.leadership()).await.epoch));
    while let Some(line) = read_line() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["reserve", pool, model, bytes] => {
                print_line(&reserve(&books(), pool, model, bytes.parse().unwrap()).await);
            }
            ["release", pool, id] => {
                let id = id.parse().unwrap();
                let books = books();
                let released = books.change(pool, |ledger, _| {
                    ledger.release(id);
                    Ok::<_, std::convert::Infallible>(())
                });
                print_line(
                    &released.await.map_or_else(|error| error.to_string(), |()| "released".to_owned()),
                );
            }
            _ => panic!("{line}"),
        }
    }
}

/// Reserves, and returns how often the closure ran and the outcome. The first run prints a line and waits for one,
/// between its read and its write.
async fn reserve(books: &PoolLedger, pool: &str, model: &str, bytes: Bytes) -> String {
    let mut asked = 0;
    let outcome = books.change(pool, |ledger, total| {
        asked += 1;
        if asked == 1 {
            print_line("decides");
            read_line();
        }
        ledger.reserve(&reservation_request(model, bytes), total, Tick(0))
    });
    let outcome = outcome.await.map_or_else(|error| error.to_string(), |id| format!("reserved {id}"));
    format!("{asked} {outcome}")
}

async fn client(variable: &str) -> Client {
    let kubeconfig = Kubeconfig::read_from(std::env::var(variable).unwrap()).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

fn print_line(text: &str) {
    println!("\n{LINE_MARK}{text}");
}

/// Reads the next line without its end. Returns none after the last line.
fn read_line() -> Option<String> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).unwrap();
    (!line.is_empty()).then(|| line.trim_end().to_owned())
}

/// The handle of such a process. The drop kills it.
pub(crate) struct ScriptedGatewayProcess {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    stdin: ChildStdin,
}

impl ScriptedGatewayProcess {
    /// Starts the process, and returns once it leads.
    pub(crate) async fn start(
        site: &GatewayNamespace<'_>,
        election: &Link,
        books: &Link,
        epoch: u64,
    ) -> Self {
        let kubeconfig = |link: &Link| link.kubeconfig(&site.account).unwrap();
        let mut child = program(site.namespace.name(), &kubeconfig(election), &kubeconfig(books));
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let tell = child.stdin.take().unwrap();
        let mut started = Self { child, lines, stdin: tell };
        assert_eq!(started.next_line().await, format!("leads in {epoch}"));
        started
    }

    pub(crate) async fn send_line(&mut self, line: &str) {
        self.stdin.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// The next line of the process.
    pub(crate) async fn next_line(&mut self) -> String {
        let next_mark = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("it has ended");
                if let Some(said) = line.strip_prefix(LINE_MARK) {
                    return said.to_owned();
                }
            }
        };
        timeout(WAIT_TIMEOUT, next_mark).await.expect("it says nothing")
    }

    /// Stops every thread of the process, and returns once all have stopped.
    pub(crate) async fn stop(&self) {
        self.signal(Signal::SIGSTOP);
        let tasks = format!("/proc/{}/task", self.pid());
        let stopped = |task: io::Result<std::fs::DirEntry>| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
            stat.rsplit_once(") ").unwrap().1.starts_with('T')
        };
        let all = async {
            while !std::fs::read_dir(&tasks).unwrap().all(stopped) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(WAIT_TIMEOUT, all).await.expect("it goes on");
    }

    pub(crate) fn resume(&self) {
        self.signal(Signal::SIGCONT);
    }

    fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).unwrap();
    }

    fn pid(&self) -> i32 {
        self.child.id().expect("it has ended").try_into().unwrap()
    }
}

fn program(namespace: &str, election: &Path, books: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["process::gateway", "--exact", "--nocapture"])
        .env(NAMESPACE_ENV, namespace)
        .env(ELECTION_KUBECONFIG_ENV, election)
        .env(LEDGER_KUBECONFIG_ENV, books)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}
