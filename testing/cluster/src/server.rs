//! One server of the control plane: a process that can be stopped, killed, frozen and restarted with the same
//! arguments.

use std::{
    fs::{self, File},
    io,
    net::SocketAddr,
    path::PathBuf,
    process::Stdio,
    time::Duration,
};

use anyhow::{Context as _, Result, bail};
use nix::sys::signal::Signal;
use rouse_net::process::ProcessGroup;
use tokio::{net::TcpStream, process::Command, time};

use crate::resources::{CLUSTER_MARK_ENV, ClusterResources, PART_MARK_ENV};

/// How long a server may take to end by itself. kube-apiserver finishes its requests at once; it would then wait a
/// minute for watches of custom resources, and accepts no requests meanwhile.
const STOP_GRACE: Duration = Duration::from_secs(5);
/// How long a server may take to start. Usually a second or two; on a machine that compiles meanwhile, much longer.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(180);
/// Interval of readiness checks, since a server does not announce that it listens.
const READY_POLL_INTERVAL: Duration = Duration::from_millis(25);
/// Heap growth before a garbage collection, in percent (Go's default is 100). A small cluster has memory to spare, and
/// the tests need the CPU.
const HEAP_PERCENT: &str = "400";
/// How much of a log's end an error includes.
const MAX_LOG_TAIL_BYTES: usize = 3000;

pub(crate) struct ServerProcess {
    name: &'static str,
    program: PathBuf,
    args: Vec<String>,
    log: PathBuf,
    mark: String,
    part_mark: String,
    process: Option<ProcessGroup>,
}

impl ServerProcess {
    pub(crate) fn new(
        resources: &ClusterResources,
        name: &'static str,
        program: PathBuf,
        args: Vec<String>,
    ) -> Self {
        let log = resources.logs().join(format!("{name}.log"));
        Self {
            name,
            program,
            args,
            log,
            mark: resources.mark(),
            part_mark: resources.part_mark(name),
            process: None,
        }
    }

    /// Starts the server if it does not run, and appends to its log.
    pub(crate) fn start(&mut self) -> Result<()> {
        if self.process.is_some() {
            return Ok(());
        }
        let log = File::options().create(true).append(true).open(&self.log)?;
        let child = Command::new(&self.program)
            .args(&self.args)
            .env(CLUSTER_MARK_ENV, &self.mark)
            .env(PART_MARK_ENV, &self.part_mark)
            .env("GOGC", HEAP_PERCENT)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(0)
            .spawn()
            .with_context(|| self.program.display().to_string())?;
        self.process = Some(ProcessGroup::from_child(child, format!("{PART_MARK_ENV}={}", self.part_mark))?);
        Ok(())
    }

    /// Stops the server with SIGTERM, and kills it after a timeout.
    pub(crate) async fn stop(&mut self) {
        if let Some(process) = &self.process {
            process.signal(Signal::SIGTERM);
            // The next step is the same after a timeout.
            let _in_time = time::timeout(STOP_GRACE, process.leader_exited()).await.is_ok();
        }
        self.kill().await;
    }

    /// Kills the server and waits until it has ended.
    pub(crate) async fn kill(&mut self) {
        if let Some(process) = self.process.take() {
            process.kill_and_reap().await;
        }
    }

    pub(crate) fn signal(&self, signal: Signal) {
        if let Some(process) = &self.process {
            process.signal(signal);
        }
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.process.as_ref().map(ProcessGroup::pid)
    }

    /// Polls until `ready` returns true.
    ///
    /// # Errors
    /// The server ended or timed out; the error holds the end of its log.
    pub(crate) async fn wait_until_ready<F: Future<Output = bool>>(
        &mut self,
        ready: impl Fn() -> F,
    ) -> Result<()> {
        let Some(process) = &self.process else { bail!("{} is not running", self.name) };
        let becomes_ready = async {
            while !ready().await {
                time::sleep(READY_POLL_INTERVAL).await;
            }
        };
        let outcome = tokio::select! {
            () = process.leader_exited() => "ended",
            outcome = time::timeout(START_TIMEOUT, becomes_ready) => match outcome {
                Ok(()) => return Ok(()),
                Err(_) => "is not ready",
            },
        };
        bail!("{} {outcome}. The end of its log:\n{}", self.name, self.log_tail()?)
    }

    fn log_tail(&self) -> io::Result<String> {
        let log = fs::read(&self.log)?;
        let end = log.get(log.len().saturating_sub(MAX_LOG_TAIL_BYTES)..).unwrap_or_default();
        Ok(String::from_utf8_lossy(end).into_owned())
    }
}

/// Whether a connection to this address succeeds.
pub(crate) async fn is_listening(address: SocketAddr) -> bool {
    TcpStream::connect(address).await.is_ok()
}
