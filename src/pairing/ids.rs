//! What things are called.

use std::{fmt, sync::Arc};

use serde::{Deserialize, Serialize};

use crate::model::AcceleratorId;

/// A node of the cluster. Cheap to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct NodeName(Arc<str>);

/// A requester: the uid of its Pod, since the next Pod may have the same name.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequesterId(Arc<str>);

/// One life of a provider Pod: the next Pod of the same name has another.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Uid(Arc<str>);

macro_rules! text_id {
    ($($name:ident)*) => {$(
        impl $name {
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }
        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                Self(text.into())
            }
        }
        impl From<String> for $name {
            fn from(text: String) -> Self {
                Self(text.into())
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    )*};
}

text_id!(NodeName RequesterId Uid);

/// How engines are made and put away.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ProviderMode {
    /// One provider per requester, made and deleted with it.
    Plain,
    /// One engine per provider; it sleeps when its requester goes.
    Sleep,
    /// Engines are started and ended in launcher Pods, by REST; they sleep, too.
    Launcher,
}

/// Over the normalised patched Pod: engines with the same one can stand in for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct EngineFingerprint(pub u64);

/// What a launcher is made from: a LauncherConfig, in one version of its Pod template. Launchers of another build are not what was
/// asked for, whatever engines they could start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LauncherBuild(pub u64);

/// Accelerators of one node that are used together, sorted. Cheap to clone.
pub type AcceleratorSet = Arc<[AcceleratorId]>;

/// An engine of a node. There is never a second one with the same mode, fingerprint and accelerators: the names of what runs
/// it are made of these, so that the API server and the launcher refuse the second when two controllers think they lead.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PairingEngineId {
    pub mode: ProviderMode,
    pub accelerators: AcceleratorSet,
    pub fingerprint: EngineFingerprint,
}

/// A provider Pod of a node: with accelerators and fingerprint as its name has them.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ProviderId {
    pub mode: ProviderMode,
    /// Of a launcher: its one.
    pub accelerators: AcceleratorSet,
    /// In mode `sleep_timeout` alone: there may be several sleepers on the same accelerators.
    pub fingerprint: Option<EngineFingerprint>,
}

impl ProviderId {
    #[must_use]
    pub fn launcher(accelerator: AcceleratorId) -> Self {
        Self { mode: ProviderMode::Launcher, accelerators: Arc::new([accelerator]), fingerprint: None }
    }

    /// The Pod whose life is that of this engine. For engines in launchers the node says which launcher it is.
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

/// `a+b`, for texts.
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
