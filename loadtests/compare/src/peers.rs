//! The compared proxies and how each starts: one worker on its own core, configured as its makers advise for streams,
//! so that no proxy loses because of a setting.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::PathBuf,
    str::FromStr,
    time::Duration,
};

use anyhow::{Context as _, bail};
use serde::{Deserialize, Serialize};

use crate::peers::process::{BenchCommand, BenchProcess};

pub(crate) mod config;
pub(crate) mod install;
pub(crate) mod probe;
pub(crate) mod process;

pub(crate) use install::InstalledPrograms;

/// The model that all engines serve here.
pub(crate) const MODEL: &str = "load";
/// Longest start of any target; LiteLLM imports for many seconds.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Another process may take a port between its choice and its use.
const MAX_START_TRIES: u32 = 3;

/// One side of the comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ComparedProxy {
    /// No proxy: the load goes to the engine itself, as the baseline for added latency.
    Direct,
    Rouse,
    /// The stub's proxy without a gateway in front.
    Stub,
    Nginx,
    Haproxy,
    /// sglang-router with its makers' settings, which log several lines per request.
    Smg,
    /// sglang-router without its log.
    #[serde(rename = "smg-quiet")]
    SmgQuiet,
    Envoy,
    Litellm,
}

impl ComparedProxy {
    pub(crate) const ALL: [Self; 9] = [
        Self::Direct,
        Self::Rouse,
        Self::Stub,
        Self::Nginx,
        Self::Haproxy,
        Self::Smg,
        Self::SmgQuiet,
        Self::Envoy,
        Self::Litellm,
    ];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Direct => "direct",
            Self::Rouse => "rouse",
            Self::Stub => "stub",
            Self::Nginx => "nginx",
            Self::Haproxy => "haproxy",
            Self::Smg => "smg",
            Self::SmgQuiet => "smg-quiet",
            Self::Envoy => "envoy",
            Self::Litellm => "litellm",
        }
    }
}

impl fmt::Display for ComparedProxy {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.pad(self.name())
    }
}

impl FromStr for ComparedProxy {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let peers = Self::ALL.into_iter().filter(|target| !matches!(target, Self::Direct | Self::Rouse));
        let names: Vec<_> = peers.clone().map(Self::name).collect();
        peers
            .into_iter()
            .find(|target| target.name() == text)
            .ok_or_else(|| format!("no such peer; the peers are {}", names.join(", ")))
    }
}

/// The two cores in use: one for the proxy, the other for load and engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BenchCores {
    pub(crate) proxy: usize,
    pub(crate) load: usize,
}

impl BenchCores {
    /// The core list for `taskset`.
    fn proxy_cores(self, workers: usize) -> String {
        if workers > 1 { format!("{},{}", self.proxy, self.load) } else { self.proxy.to_string() }
    }
}

/// The programs, the cores, and the folder for the processes' files.
#[derive(Debug)]
pub(crate) struct BenchEnvironment {
    pub(crate) installed: InstalledPrograms,
    pub(crate) cores: BenchCores,
    /// Deleted after the run.
    pub(crate) folder: PathBuf,
}

/// A running proxy (or, for [`ComparedProxy::Direct`], no process).
pub(crate) struct RunningProxy {
    pub(crate) address: SocketAddr,
    /// The key that clients send.
    pub(crate) key: String,
    pub(crate) process: Option<BenchProcess>,
    /// From its launch until it accepted a connection.
    pub(crate) listening: Duration,
}

impl RunningProxy {
    /// The process whose CPU time and memory count.
    pub(crate) fn pid(&self) -> Option<u32> {
        self.process.as_ref().map(BenchProcess::pid)
    }

    pub(crate) async fn stop(self) {
        if let Some(process) = self.process {
            process.stop().await;
        }
    }
}

impl BenchEnvironment {
    /// Starts an engine on the load's core. Rouse launches its own engine; all other targets use this one.
    ///
    /// Errors: it does not serve within a minute.
    pub(crate) async fn engine(&self) -> anyhow::Result<(BenchProcess, SocketAddr)> {
        let address = free_address()?;
        let command = BenchCommand::new(&self.installed.engine).args([
            "--fast",
            "--host",
            &address.ip().to_string(),
            "--port",
            &address.port().to_string(),
            "--model",
            MODEL,
        ]);
        let mut process = BenchProcess::spawn("engine", command, &self.cores.load.to_string(), &self.folder)?;
        probe::wait_until_serving(&mut process, address, MODEL, "none", START_TIMEOUT).await?;
        Ok((process, address))
    }

    /// Starts `target` in front of `engine` and waits until it has answered a request.
    ///
    /// Errors: it does not serve within a minute.
    pub(crate) async fn start(
        &self,
        target: ComparedProxy,
        workers: usize,
        engine: SocketAddr,
    ) -> anyhow::Result<RunningProxy> {
        if target == ComparedProxy::Direct {
            let key = config::KEY.to_owned();
            return Ok(RunningProxy { address: engine, key, process: None, listening: Duration::ZERO });
        }
        let mut last = None;
        for _ in 0..MAX_START_TRIES {
            match self.try_start(target, workers, engine).await {
                Ok(proxy) => return Ok(proxy),
                Err(error) => last = Some(error),
            }
        }
        let Some(error) = last else { bail!("{target} was not started") };
        Err(error.context(format!("{target} did not start")))
    }

    async fn try_start(
        &self,
        target: ComparedProxy,
        workers: usize,
        engine: SocketAddr,
    ) -> anyhow::Result<RunningProxy> {
        let address = free_address()?;
        let folder = tempfolder(&self.folder, target)?;
        let (command, key) = self.command(target, workers, address, engine, &folder)?;
        let began = tokio::time::Instant::now();
        let mut process =
            BenchProcess::spawn(target.name(), command, &self.cores.proxy_cores(workers), &folder)?;
        probe::wait_until_listening(&mut process, address, START_TIMEOUT).await?;
        let listening = began.elapsed();
        probe::wait_until_serving(&mut process, address, MODEL, &key, START_TIMEOUT).await?;
        Ok(RunningProxy { address, key, process: Some(process), listening })
    }

    fn command(
        &self,
        target: ComparedProxy,
        workers: usize,
        listen: SocketAddr,
        engine: SocketAddr,
        folder: &std::path::Path,
    ) -> anyhow::Result<(BenchCommand, String)> {
        let file = |name: &str, text: String| -> anyhow::Result<PathBuf> {
            let path = folder.join(name);
            std::fs::write(&path, text)?;
            Ok(path)
        };
        let installed = &self.installed;
        let key = config::KEY.to_owned();
        Ok(match target {
            ComparedProxy::Direct => bail!("direct is not a process"),
            ComparedProxy::Rouse => {
                let admin = free_address()?;
                let text = config::rouse(listen, admin, &installed.engine, self.cores.load, folder);
                let path = file("rouse.yaml", text)?;
                (BenchCommand::new(&installed.gateway).args(["--config".as_ref(), path.as_os_str()]), key)
            }
            ComparedProxy::Stub => {
                let path = file("engine", engine.to_string())?;
                (BenchCommand::new(installed.find(target)?).args(config::stub(listen, &path, workers)), key)
            }
            ComparedProxy::Nginx => {
                let path = file("nginx.conf", config::nginx(listen, engine, workers, folder))?;
                let program = installed.find(target)?;
                let prefix = folder.as_os_str();
                let args = [
                    "-e".as_ref(),
                    "stderr".as_ref(),
                    "-p".as_ref(),
                    prefix,
                    "-c".as_ref(),
                    path.as_os_str(),
                ];
                (BenchCommand::new(program).args(args), key)
            }
            ComparedProxy::Haproxy => {
                let path = file("haproxy.cfg", config::haproxy(listen, engine, workers))?;
                (
                    BenchCommand::new(installed.find(target)?).args([
                        "-db".as_ref(),
                        "-f".as_ref(),
                        path.as_os_str(),
                    ]),
                    key,
                )
            }
            ComparedProxy::Smg | ComparedProxy::SmgQuiet => {
                let metrics = free_address()?.port().to_string();
                let (port, url) = (listen.port().to_string(), format!("http://{engine}"));
                let args = config::smg(&port, &url, &metrics, target == ComparedProxy::SmgQuiet);
                (BenchCommand::new(installed.find(target)?).args(args), key)
            }
            ComparedProxy::Envoy => {
                let path = file("envoy.yaml", config::envoy(listen, engine))?;
                let workers = workers.to_string();
                let args = ["--disable-hot-restart", "--log-level", "error", "--concurrency", &workers, "-c"];
                (BenchCommand::new(installed.find(target)?).args(args).args([path.as_os_str()]), key)
            }
            ComparedProxy::Litellm => {
                let key = config::random_key()?;
                let path = file("litellm.yaml", config::litellm(engine))?;
                let port = listen.port().to_string();
                let args = ["--host", "127.0.0.1", "--port", &port, "--num_workers", "1", "--config"];
                let command = BenchCommand::new(installed.find(target)?).args(args).args([path.as_os_str()]);
                (command.env("LITELLM_MASTER_KEY", &key).env("LITELLM_TELEMETRY", "False"), key)
            }
        })
    }
}

/// Returns an address at which nothing listens now.
fn free_address() -> anyhow::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot find a free port")?;
    Ok(listener.local_addr()?)
}

/// Creates a new folder for each start, so that no start finds another's files.
fn tempfolder(under: &std::path::Path, target: ComparedProxy) -> anyhow::Result<PathBuf> {
    (0..u32::MAX)
        .map(|number| under.join(format!("{target}-{number}")))
        .find(|path| !path.exists())
        .map(|path| std::fs::create_dir(&path).map(|()| path))
        .context("no free name")?
        .context("cannot create a folder")
}

#[cfg(test)]
mod tests;
