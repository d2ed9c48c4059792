//! The engine that a requester requests.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use rouse::{
    model::SleepLevelPolicy,
    pairing::{
        event::{MemorySizes, RequestedEngine},
        ids::{EngineFingerprint, NodeName, ProviderMode},
    },
    units::Bytes,
};
use rouse_config::{has_lora_by_command, kv_cache_by_command};

use super::facts::{ClusterFacts, SpecResolveError};
use crate::{
    crd::ledger::ObjectName,
    dual_pods::{
        keys,
        patched_launcher::{self, PatchedLauncher},
        provider,
        record::{self, MemoryRequest, SleepPolicy},
    },
};

/// A request as the Pod's annotations state it.
#[derive(Clone, Debug)]
pub(super) struct RequesterSpec {
    server: RequestedServer,
    wanted: MemoryRequest,
    sleep_policy: SleepPolicy,
    /// Amount of each extended resource that the Pod has.
    resources: BTreeMap<String, u32>,
}

/// Which engine is requested.
#[derive(Clone, Debug)]
enum RequestedServer {
    /// An engine in a Pod of its own, made with the requester's server patch.
    Patched {
        mode: ProviderMode,
        fingerprint: EngineFingerprint,
        labels: BTreeMap<String, String>,
        kv_cache: Option<Bytes>,
        adapters: bool,
    },
    /// An engine in a launcher, both made with the requester's server patch.
    Launched(Arc<PatchedLauncher>),
    /// An engine of this InferenceServerConfig in a launcher, under this served name.
    Configured { config: ObjectName, served_name: Option<String> },
}

/// Why a request is invalid.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{0}")]
    Patch(#[from] provider::Error),
    #[error("{0}")]
    Launcher(#[from] patched_launcher::Error),
    #[error("{0}")]
    Annotation(#[from] record::Error),
    #[error("the annotation {} is not a port: use a value such as \"8081\"", keys::ADMIN_PORT)]
    Port,
    #[error("the annotation {key} is '{0}': use plain, sleep or launcher", key = keys::MODE)]
    Mode(String),
}

impl RequesterSpec {
    /// Reads the request of a Pod on this node. `mode` applies if the Pod does not set one.
    pub(super) fn of(pod: &Pod, node: &NodeName, mode: ProviderMode) -> Result<Self, Error> {
        keys::admin_port(pod).ok_or(Error::Port)?;
        let server = if let Some(name) = keys::read(pod, keys::SERVER_CONFIG) {
            RequestedServer::Configured {
                config: ObjectName::new(pod.namespace().unwrap_or_default(), name.trim()),
                served_name: pod.annotations().get(keys::SERVED_NAME).cloned(),
            }
        } else {
            match own_mode(pod)?.unwrap_or(mode) {
                ProviderMode::Launcher => {
                    RequestedServer::Launched(Arc::new(PatchedLauncher::of(pod, node)?))
                }
                mode @ (ProviderMode::Plain | ProviderMode::Sleep) => {
                    let provider::PatchedEngine { fingerprint, labels, kv_cache, adapters } =
                        provider::patched_engine(pod, node)?;
                    RequestedServer::Patched { mode, fingerprint, labels, kv_cache, adapters }
                }
            }
        };
        let (wanted, rest) = (record::memory_request(pod)?, record::sleep_policy(pod)?);
        Ok(Self { server, wanted, sleep_policy: rest, resources: extended(pod) })
    }

    /// Returns the request of a requester that gets nothing more.
    pub(super) fn empty_request() -> RequestedEngine {
        let none = Bytes::ZERO;
        let sizes = MemorySizes { awake: none, asleep: none, host: none };
        let (mode, fingerprint, level) = (ProviderMode::Plain, EngineFingerprint(0), SleepLevelPolicy::Never);
        RequestedEngine { mode, fingerprint, build: None, sizes, level, stop_after: None }
    }

    /// Returns the requested InferenceServerConfig.
    pub(super) const fn config(&self) -> Option<&ObjectName> {
        match &self.server {
            RequestedServer::Configured { config, .. } => Some(config),
            RequestedServer::Patched { .. } | RequestedServer::Launched(_) => None,
        }
    }

    /// Returns the launcher and the engine that the server patch makes, in mode launcher.
    pub(super) fn patched_launcher(&self) -> Option<&PatchedLauncher> {
        match &self.server {
            RequestedServer::Launched(launcher) => Some(launcher),
            RequestedServer::Patched { .. } | RequestedServer::Configured { .. } => None,
        }
    }

    /// Returns the served name for the engine of its InferenceServerConfig.
    pub(super) fn served_name(&self) -> Option<&str> {
        match &self.server {
            RequestedServer::Configured { served_name: served, .. } => served.as_deref(),
            RequestedServer::Patched { .. } | RequestedServer::Launched(_) => None,
        }
    }

    /// Returns the labels by which clients find the engine's own Pod.
    pub(super) const fn labels(&self) -> Option<&BTreeMap<String, String>> {
        match &self.server {
            RequestedServer::Configured { .. } | RequestedServer::Launched(_) => None,
            RequestedServer::Patched { labels, .. } => Some(labels),
        }
    }

    pub(super) fn resolve(
        &self,
        node: &NodeName,
        facts: &ClusterFacts,
    ) -> Result<RequestedEngine, SpecResolveError> {
        let (mode, fingerprint, build, kv_cache, adapters) = match &self.server {
            RequestedServer::Patched { mode, fingerprint, kv_cache, adapters, .. } => {
                (*mode, *fingerprint, None, *kv_cache, *adapters)
            }
            RequestedServer::Launched(launcher) => {
                let PatchedLauncher { fingerprint, kv_cache, adapters, .. } = **launcher;
                (ProviderMode::Launcher, fingerprint, Some(launcher.revision.build()), kv_cache, adapters)
            }
            RequestedServer::Configured { config, served_name: served } => {
                let configs = &facts.configs;
                let fingerprint = configs.fingerprint(config, served.as_deref())?;
                let options = configs.options(config);
                let (kv_cache, adapters) = (kv_cache_by_command(&options), has_lora_by_command(&options));
                (ProviderMode::Launcher, fingerprint, configs.build(config), kv_cache, adapters)
            }
        };
        let sizes = facts.sizes(node, &self.wanted, kv_cache, &self.resources)?;
        let SleepPolicy { level, stop_after } = self.sleep_policy;
        let level = if adapters { level_with_adapters(level, mode)? } else { level };
        Ok(RequestedEngine { mode, fingerprint, build, sizes, level, stop_after })
    }
}

/// Returns the level policy of an engine with LoRA adapters.
///
/// An engine of mode plain never sleeps, so its annotation is not refused.
fn level_with_adapters(
    level: SleepLevelPolicy,
    mode: ProviderMode,
) -> Result<SleepLevelPolicy, SpecResolveError> {
    if level == SleepLevelPolicy::Two && mode != ProviderMode::Plain {
        Err(SpecResolveError::LoraAdapters)
    } else {
        Ok(level.without_level_two_fallback())
    }
}

/// Sums the limits of extended resources, whose names contain a domain.
fn extended(pod: &Pod) -> BTreeMap<String, u32> {
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let limits = containers.filter_map(|container| container.resources.as_ref()?.limits.as_ref()).flatten();
    let mut all = BTreeMap::<String, u32>::new();
    for (name, amount) in limits.filter(|(name, _)| name.contains('/')) {
        *all.entry(name.clone()).or_default() += amount.0.parse::<u32>().unwrap_or(0);
    }
    all
}

fn own_mode(pod: &Pod) -> Result<Option<ProviderMode>, Error> {
    match pod.annotations().get(keys::MODE).map(String::as_str) {
        None => Ok(None),
        Some("plain") => Ok(Some(ProviderMode::Plain)),
        Some("sleep") => Ok(Some(ProviderMode::Sleep)),
        Some("launcher") => Ok(Some(ProviderMode::Launcher)),
        Some(other) => Err(Error::Mode(other.to_owned())),
    }
}

#[cfg(test)]
mod tests;
