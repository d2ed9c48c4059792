//! Names of nodes, Pods, engines and providers.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::model::AcceleratorId;

string_ids! {
    /// A node of the cluster. Cheap to clone.
    NodeName;
    /// A requester: the UID of its Pod, since the next Pod may have the same name.
    RequesterId;
    /// UID of a Pod or container. The next Pod of the same name has another.
    Uid;
}

/// How engines are created and stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProviderMode {
    /// One provider per requester, created and deleted with it.
    Plain,
    /// One engine per provider; it sleeps when its requester goes.
    Sleep,
    /// Launcher Pods start and stop engines by REST; the engines can sleep.
    Launcher,
}

/// Fingerprint of the normalised patched Pod. Engines with the same fingerprint are interchangeable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineFingerprint(pub u64);

/// What a launcher is created from: a LauncherConfig in one version of its Pod template. A launcher of another build
/// does not satisfy a request, whatever engines it could start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LauncherBuild(pub u64);

/// Accelerators of one node that are used together, sorted. Cheap to clone.
pub type AcceleratorSet = Arc<[AcceleratorId]>;

/// Returns these accelerators in the order that identifies an engine on them.
pub(super) fn accelerator_set(accelerators: &[AcceleratorId]) -> AcceleratorSet {
    let mut sorted = accelerators.to_vec();
    sorted.sort();
    sorted.into()
}

/// An engine of a node. No two engines have the same mode, fingerprint and accelerators: the names of the Pod or
/// instance derive from these. So if two controllers believe that they lead, the API server and the launcher refuse the
/// second engine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PairingEngineId {
    pub mode: ProviderMode,
    pub accelerators: AcceleratorSet,
    pub fingerprint: EngineFingerprint,
}

/// A provider Pod of a node, identified by the parts of its name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProviderId {
    pub mode: ProviderMode,
    /// A launcher has exactly one.
    pub accelerators: AcceleratorSet,
    /// Set in [`ProviderMode::Sleep`] only, where several sleepers may share the same accelerators.
    pub fingerprint: Option<EngineFingerprint>,
}

impl ProviderId {
    #[must_use]
    pub fn launcher(accelerator: AcceleratorId) -> Self {
        Self { mode: ProviderMode::Launcher, accelerators: Arc::new([accelerator]), fingerprint: None }
    }

    /// The Pod that runs only this engine. For an engine in a launcher, `PairingNode::provider_for` gives the provider.
    #[must_use]
    pub fn direct(engine: &PairingEngineId) -> Self {
        let fingerprint = (engine.mode == ProviderMode::Sleep).then_some(engine.fingerprint);
        Self { mode: engine.mode, accelerators: engine.accelerators.clone(), fingerprint }
    }

    #[must_use]
    pub fn is_launcher(&self) -> bool {
        self.mode == ProviderMode::Launcher
    }
}

/// Joins the accelerators as `a+b`, for messages.
#[must_use]
pub fn accelerator_list(accelerators: &[AcceleratorId]) -> String {
    accelerators.iter().map(AcceleratorId::as_str).collect::<Vec<_>>().join("+")
}

impl fmt::Display for EngineFingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl fmt::Display for LauncherBuild {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl fmt::Display for PairingEngineId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}", self.fingerprint, accelerator_list(&self.accelerators))
    }
}

impl fmt::Display for ProviderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let on = accelerator_list(&self.accelerators);
        match (self.mode, self.fingerprint) {
            (ProviderMode::Launcher, _) => write!(f, "launcher@{on}"),
            (_, Some(fingerprint)) => write!(f, "pod-{fingerprint}@{on}"),
            (_, None) => write!(f, "pod@{on}"),
        }
    }
}
