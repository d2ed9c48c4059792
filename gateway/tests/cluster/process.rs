//! A gateway that is a process: this test program, started with the filter that runs nothing but [`gateway`]. It takes part in
//! the election and does what it is told line by line; what it says has a mark, since libtest prints as well.

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
use rouse_cluster::{Link, wait::PATIENCE};
use rouse_gateway::controllers::{
    booking::Books,
    election::{Election, Leases},
};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    process::{Child, ChildStdin, ChildStdout, Command},
    time::{Duration, sleep, timeout},
};

use crate::{
    site::{LEASE, Site, gained},
    support::wanted,
};

/// The namespace of its lease.
const RUNS: &str = "ROUSE_TEST_GATEWAY";
/// Kubeconfigs: by which way it takes part in the election, and by which it books.
const ELECTION: &str = "ROUSE_TEST_ELECTION";
const BOOKS: &str = "ROUSE_TEST_BOOKS";
const MARK: &str = "> ";

/// The program. What waits for a line blocks a thread, and the election goes on beside it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gateway() {
    let Ok(namespace) = std::env::var(RUNS) else { return };
    let leases = Leases::new(client(ELECTION).await, &namespace, LEASE);
    let election = Election::start(leases, format!("process {}", std::process::id()));
    let books = Books::new(client(BOOKS).await, election.claim());
    say(&format!("leads in {}", gained(&mut election.claim()).await.epoch));
    while let Some(line) = hear() {
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["reserve", pool, model, bytes] => {
                say(&reserve(&books, pool, model, bytes.parse().unwrap()).await);
            }
            ["release", pool, id] => {
                let id = id.parse().unwrap();
                let released = books.change(pool, |ledger, _| {
                    ledger.release(id);
                    Ok::<_, std::convert::Infallible>(())
                });
                say(&released.await.map_or_else(|error| error.to_string(), |()| "released".to_owned()));
            }
            _ => panic!("{line}"),
        }
    }
}

/// How often it was asked, and what came of it. The first time it says so, and goes on when it is told to: between what
/// it read and what it writes.
async fn reserve(books: &Books, pool: &str, model: &str, bytes: Bytes) -> String {
    let mut asked = 0;
    let outcome = books.change(pool, |ledger, total| {
        asked += 1;
        if asked == 1 {
            say("decides");
            hear();
        }
        ledger.reserve(&wanted(model, bytes), total, Tick(0))
    });
    let outcome = outcome.await.map_or_else(|error| error.to_string(), |id| format!("reserved {id}"));
    format!("{asked} {outcome}")
}

async fn client(variable: &str) -> Client {
    let kubeconfig = Kubeconfig::read_from(std::env::var(variable).unwrap()).unwrap();
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await.unwrap();
    Client::try_from(config).unwrap()
}

fn say(text: &str) {
    println!("\n{MARK}{text}");
}

/// The next line, without its end; nothing after the last.
fn hear() -> Option<String> {
    let mut line = String::new();
    io::stdin().lock().read_line(&mut line).unwrap();
    (!line.is_empty()).then(|| line.trim_end().to_owned())
}

/// Such a process, from outside. Dropped, it is killed.
pub(crate) struct Gateway {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    tell: ChildStdin,
}

impl Gateway {
    /// It leads when this returns.
    pub(crate) async fn start(site: &Site<'_>, election: &Link, books: &Link, epoch: u64) -> Self {
        let kubeconfig = |link: &Link| link.kubeconfig(&site.account).unwrap();
        let mut child = program(site.namespace.name(), &kubeconfig(election), &kubeconfig(books));
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let tell = child.stdin.take().unwrap();
        let mut started = Self { child, lines, tell };
        assert_eq!(started.hears().await, format!("leads in {epoch}"));
        started
    }

    pub(crate) async fn tell(&mut self, line: &str) {
        self.tell.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// The next that it says.
    pub(crate) async fn hears(&mut self) -> String {
        let said = async {
            loop {
                let line = self.lines.next_line().await.unwrap().expect("it has ended");
                if let Some(said) = line.strip_prefix(MARK) {
                    return said.to_owned();
                }
            }
        };
        timeout(PATIENCE, said).await.expect("it says nothing")
    }

    /// Stops every thread of it, and returns when they are.
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
        timeout(PATIENCE, all).await.expect("it goes on");
    }

    pub(crate) fn go_on(&self) {
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
        .env(RUNS, namespace)
        .env(ELECTION, election)
        .env(BOOKS, books)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap()
}
