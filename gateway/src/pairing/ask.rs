//! What a requester asks for.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use rouse::{
    model::LevelPolicy,
    pairing::{
        event::{Ask, Sizes},
        ids::{Fingerprint, Mode, NodeName},
    },
    units::Bytes,
};

use super::facts::{Doubt, Facts};
use crate::controllers::dual::{
    keys, provider,
    record::{self, Wanted},
};

/// As its annotations say it, and its server patch.
#[derive(Clone, Debug)]
pub(super) struct Asked {
    mode: Mode,
    fingerprint: Fingerprint,
    /// What the engine's Pod is to be found by.
    pub(super) labels: BTreeMap<String, String>,
    wanted: Wanted,
    level: LevelPolicy,
}

/// Why it cannot be had.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Error {
    #[error("{0}")]
    Patch(#[from] provider::Error),
    #[error("{0}")]
    Annotation(#[from] record::Error),
    #[error(
        "inference-server-config asks for mode launcher, which this version does not have: give a server-patch instead"
    )]
    Launcher,
    #[error("the annotation {} is no port: write \"8081\"", keys::ADMIN_PORT)]
    Port,
}

impl Asked {
    /// Of a Pod on this node.
    pub(super) fn of(pod: &Pod, node: &NodeName, mode: Mode) -> Result<Self, Error> {
        if keys::read(pod, keys::SERVER_CONFIG).is_some() {
            return Err(Error::Launcher);
        }
        keys::admin_port(pod).ok_or(Error::Port)?;
        let provider::Asked { fingerprint, labels } = provider::asked(pod, node)?;
        Ok(Self { mode, fingerprint, labels, wanted: record::wanted(pod)?, level: LevelPolicy::Auto })
    }

    /// Of who is to get nothing more.
    pub(super) fn nothing() -> Ask {
        let none = Bytes::ZERO;
        let sizes = Sizes { awake: none, asleep: none, host: none };
        Ask { mode: Mode::Plain, fingerprint: Fingerprint(0), sizes, level: LevelPolicy::Never }
    }

    pub(super) fn on(&self, node: &NodeName, facts: &Facts) -> Result<Ask, Doubt> {
        let sizes = facts.sizes(node, &self.wanted)?;
        Ok(Ask { mode: self.mode, fingerprint: self.fingerprint, sizes, level: self.level })
    }
}
