//! Discovers this Pod's accelerators: `GET /v1/dual-pods/accelerators`.
//!
//! Four sources are queried in this order, and the first that names any accelerator wins: our device plugin, through
//! [`PLUGIN_ENV`]; NVIDIA's device plugin, through [`RUNTIME_ENV`]; the driver, which shows a container only its own
//! devices; a file, for machines without a driver. They are queried once, at the start, because a container's devices
//! do not change.
//!
//! The driver may hang. So it is queried on a detached thread while all ports already serve; a thread of the runtime
//! would keep the runtime from ending. A request before the answer waits at most [`nvml::QUERY_TIMEOUT`].

use std::{fmt, path::PathBuf, sync::Arc, time::Duration};

use axum::{
    Router,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use rouse::model::AcceleratorId;
use rouse_net::{
    accelerators_file::{AcceleratorEntry, read_accelerators_file},
    nvml,
};
use tokio::{sync::watch, time};

use crate::accelerator_driver::AcceleratorDriver;

pub(crate) const PATH: &str = "/v1/dual-pods/accelerators";

/// Set by our device plugin on allocation: UUIDs, comma-separated.
pub(crate) const PLUGIN_ENV: &str = "ROUSE_ACCELERATORS";
/// Set by NVIDIA's device plugin, or by an image, for NVIDIA's container runtime.
pub(crate) const RUNTIME_ENV: &str = "NVIDIA_VISIBLE_DEVICES";

/// The sources of the accelerator list, the driver aside.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiscoverySources {
    plugin: Option<String>,
    runtime: Option<String>,
    file: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum AcceleratorSource {
    Plugin,
    Runtime,
    Driver,
    File,
}

/// The accelerators, or each source's failure if no source names any.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub(crate) struct DiscoveredAccelerators {
    pub(crate) ids: Vec<AcceleratorId>,
    pub(crate) source: Option<AcceleratorSource>,
    #[serde(rename = "silent")]
    pub(crate) failed_sources: Vec<(AcceleratorSource, String)>,
}

/// Why no accelerators are known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Error {
    /// The error text is part of the contract.
    #[error("no GPUs found")]
    None,
    #[error("the accelerators are not known yet: NVML did not answer within {0:?}")]
    Hung(Duration),
}

/// The pending or finished discovery.
#[derive(Clone, Debug)]
pub(crate) struct AcceleratorDiscovery {
    result_rx: watch::Receiver<Option<Arc<DiscoveredAccelerators>>>,
    timeout: Duration,
}

impl DiscoverySources {
    /// Reads the sources of this process.
    pub(crate) fn from_env(file: Option<PathBuf>) -> Self {
        // A value that is not UTF-8 names no UUID; keeping it makes the failure report it.
        let variable = |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        Self { plugin: variable(PLUGIN_ENV), runtime: variable(RUNTIME_ENV), file }
    }

    #[cfg(test)]
    pub(super) fn from_file(file: PathBuf) -> Self {
        Self { file: Some(file), ..Self::default() }
    }

    /// Queries the sources in order. Blocks, forever if the driver hangs.
    fn discover(&self, driver: &dyn AcceleratorDriver) -> DiscoveredAccelerators {
        let mut silent = Vec::new();
        let mut accept_answer = |source, answer: Result<Vec<AcceleratorId>, String>| match answer {
            Ok(ids) if !ids.is_empty() => {
                Some(DiscoveredAccelerators { ids, source: Some(source), failed_sources: Vec::new() })
            }
            Ok(_) => {
                silent.push((source, "lists no accelerators".to_owned()));
                None
            }
            Err(error) => {
                silent.push((source, error));
                None
            }
        };
        let plugin =
            || self.plugin.as_deref().map_or_else(|| Err("is not set".to_owned()), |it| Ok(parse_uuids(it)));
        let runtime = || {
            self.runtime
                .as_deref()
                .map_or_else(|| Err("is not set".to_owned()), |it| parse_visible_devices(it, driver))
        };
        let all = || match self.runtime.as_deref().map(str::trim) {
            Some("none") => Err(format!("is not queried: {RUNTIME_ENV} is 'none'")),
            _ => driver.list().map(ids).map_err(|error| error.to_string()),
        };
        let file = || match self.file.as_deref() {
            Some(file) => read_accelerators_file(file).map(ids).map_err(|error| error.to_string()),
            None => Err("is not given".to_owned()),
        };
        let found = accept_answer(AcceleratorSource::Plugin, plugin())
            .or_else(|| accept_answer(AcceleratorSource::Runtime, runtime()))
            .or_else(|| accept_answer(AcceleratorSource::Driver, all()))
            .or_else(|| accept_answer(AcceleratorSource::File, file()));
        match found {
            Some(found) => DiscoveredAccelerators { failed_sources: silent, ..found },
            None => DiscoveredAccelerators { ids: Vec::new(), source: None, failed_sources: silent },
        }
    }
}

impl AcceleratorDiscovery {
    /// Starts the discovery on its own thread and returns at once.
    pub(crate) fn discover(sources: DiscoverySources, driver: Arc<dyn AcceleratorDriver>) -> Self {
        Self::discover_with_timeout(sources, driver, nvml::QUERY_TIMEOUT)
    }

    pub(super) fn discover_with_timeout(
        sources: DiscoverySources,
        driver: Arc<dyn AcceleratorDriver>,
        within: Duration,
    ) -> Self {
        let (result_tx, result_rx) = watch::channel(None);
        let thread = std::thread::Builder::new().name("accelerators".to_owned()).spawn(move || {
            let found = sources.discover(&*driver);
            found.log();
            result_tx.send_replace(Some(Arc::new(found)));
        });
        if let Err(error) = thread {
            tracing::error!(%error, "cannot start the thread that lists the accelerators");
        }
        Self { result_rx, timeout: within }
    }

    /// Waits for the discovered accelerators.
    ///
    /// # Errors
    /// There are none, or the driver hangs.
    pub(crate) async fn get(&self) -> Result<Arc<DiscoveredAccelerators>, Error> {
        let mut found = self.result_rx.clone();
        let discovered = time::timeout(self.timeout, found.wait_for(Option::is_some)).await;
        match discovered.map_err(|_| Error::Hung(self.timeout))? {
            Ok(found) => found.clone().filter(|found| !found.ids.is_empty()).ok_or(Error::None),
            Err(_) => Err(Error::None),
        }
    }

    /// Returns the result so far; `None` while the discovery runs.
    pub(crate) fn current(&self) -> Option<Arc<DiscoveredAccelerators>> {
        self.result_rx.borrow().clone()
    }
}

impl DiscoveredAccelerators {
    fn log(&self) {
        let ids: Vec<&str> = self.ids.iter().map(AcceleratorId::as_str).collect();
        if let Some(source) = self.source {
            return tracing::info!(%source, accelerators = ids.join(","), "accelerators found");
        }
        let errors: Vec<String> =
            self.failed_sources.iter().map(|(source, error)| format!("{source} {error}")).collect();
        tracing::error!(
            sources = errors.join("; "),
            "no GPUs found: set {PLUGIN_ENV} or pass --accelerators-file"
        );
    }
}

impl fmt::Display for AcceleratorSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plugin => PLUGIN_ENV,
            Self::Runtime => RUNTIME_ENV,
            Self::Driver => "NVML",
            Self::File => "--accelerators-file",
        })
    }
}

/// Serves [`PATH`].
pub(crate) fn routes(accelerators: AcceleratorDiscovery) -> Router {
    Router::new().route(PATH, get(list)).with_state(accelerators)
}

async fn list(State(accelerators): State<AcceleratorDiscovery>) -> Response {
    match accelerators.get().await {
        Ok(found) => {
            let json = serde_json::json!(found.ids);
            ([(header::CONTENT_TYPE, "application/json")], format!("{json}\n")).into_response()
        }
        Err(error) => {
            let status = match error {
                Error::None => StatusCode::INTERNAL_SERVER_ERROR,
                Error::Hung(_) => StatusCode::SERVICE_UNAVAILABLE,
            };
            (status, format!("{error}\n")).into_response()
        }
    }
}

fn ids(listed: Vec<AcceleratorEntry>) -> Vec<AcceleratorId> {
    listed.into_iter().map(|listed| listed.id).collect()
}

/// Splits comma-separated UUIDs and drops duplicates.
fn parse_uuids(text: &str) -> Vec<AcceleratorId> {
    let mut ids = Vec::new();
    for id in text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(AcceleratorId::from) {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    ids
}

/// Parses the value for NVIDIA's container runtime. UUIDs are taken as they are; numbers are the driver's indices.
/// `all` and `void` name no accelerator; with `void` the devices come through CDI, and the driver knows them.
fn parse_visible_devices(text: &str, driver: &dyn AcceleratorDriver) -> Result<Vec<AcceleratorId>, String> {
    let text = text.trim();
    if matches!(text, "" | "all" | "void" | "none") {
        return Err(format!("is '{text}'"));
    }
    let mut ids = Vec::new();
    for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        let id = if name.starts_with("GPU-") || name.starts_with("MIG-") {
            name.into()
        } else {
            let (index, part) = parse_device_index(name)
                .ok_or_else(|| format!("has '{name}', which is neither a UUID nor a number"))?;
            driver.id_at_index(index, part).map_err(|error| format!("has '{name}', and {error}"))?
        };
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}

/// Parses `3`, or `3:1` for partition 1 of device 3.
fn parse_device_index(name: &str) -> Option<(u32, Option<u32>)> {
    match name.split_once(':') {
        Some((index, part)) => Some((index.parse().ok()?, Some(part.parse().ok()?))),
        None => Some((name.parse().ok()?, None)),
    }
}

#[cfg(test)]
mod tests;
