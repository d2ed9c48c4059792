//! What a user requests: limits, targets, and what each node should have.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    facts::WarmupToleration,
    ids::{ActionHash, ImageName, WarmSet, WarmupItem, WarmupSpecHash},
};
use crate::{
    pairing::ids::NodeName,
    stable_hash::fnv1a,
    units::{Millis, Tick},
};

/// One Warmup as its user wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarmupRequest {
    /// Generation of the object. Each edit of the spec changes it, a pause included.
    pub generation: u64,
    /// A different hash starts the Warmup anew. It covers the targets, too.
    pub spec_hash: WarmupSpecHash,
    /// When the object was created. Of two Warmups that need the same pull, the older one begins.
    pub created: Tick,
    /// Nothing new begins, and the time of the timeout stands still.
    pub paused: bool,
    pub limits: WarmupLimits,
    /// The Warmup never ends: it warms new target nodes, and nodes that have lost an image.
    pub keep_warm: bool,
    /// The set whose label a done node gets.
    pub set: WarmSet,
    pub tolerations: Vec<WarmupToleration>,
}

/// Limits of one Warmup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WarmupLimits {
    /// Nodes that are active at once. `None`: all.
    pub parallelism: Option<u32>,
    /// Failures of one node, whichever of its items failed, that are not final yet. `None`: no limit.
    pub backoff_limit: Option<u32>,
    /// Time from the start until the Warmup fails, without the time in which it is paused.
    pub timeout: Option<Millis>,
    /// Time from the end until the Warmup is deleted. `None`: it stays.
    pub ttl: Option<Millis>,
    /// Nodes that may fail. With one more the whole Warmup fails.
    pub max_failed_nodes: u32,
    /// The pause after the first failed attempt of a node, which doubles with each.
    pub retry_delay: Millis,
}

impl Default for WarmupLimits {
    fn default() -> Self {
        let retry_delay = Millis::secs(10);
        Self {
            parallelism: None,
            backoff_limit: None,
            timeout: None,
            ttl: None,
            max_failed_nodes: 0,
            retry_delay,
        }
    }
}

/// What one node should have. Nodes share it, so that a change of one target costs no copies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeItems {
    /// Pulled in parallel, before the action.
    pub images: BTreeSet<ImageName>,
    pub action: Option<ActionHash>,
}

impl NodeItems {
    /// The items in their order: the images, then the action.
    pub fn items(&self) -> impl Iterator<Item = WarmupItem> {
        let images = self.images.iter().cloned().map(WarmupItem::Image);
        images.chain(self.action.iter().cloned().map(WarmupItem::Action))
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.images.len() + usize::from(self.action.is_some())
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[must_use]
    pub fn contains(&self, item: &WarmupItem) -> bool {
        match item {
            WarmupItem::Image(image) => self.images.contains(image),
            WarmupItem::Action(action) => self.action.as_ref() == Some(action),
        }
    }

    /// Hash of the items. A node that is done with other items is warmed again.
    #[must_use]
    pub fn hash(&self) -> u32 {
        // 0 ends a name, and 1 an empty action's place, so no two lists have the same bytes.
        let images = self.images.iter().flat_map(|image| image.as_str().bytes().chain([0]));
        let action = self.action.iter().flat_map(|action| [1].into_iter().chain(action.as_str().bytes()));
        let hash = fnv1a(images.chain(action));
        // Both halves, so that no part of the hash is lost. It fits: the shift leaves 32 bits, and so does the mask.
        u32::try_from((hash >> 32) ^ (hash & u64::from(u32::MAX))).unwrap_or_default()
    }
}

/// The nodes of one Warmup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WarmupTargets {
    /// The spec or the target is invalid: the Warmup fails.
    Refused { reason: String },
    /// The target is not there yet: the Warmup waits for it, with a deadline.
    Pending { reason: String },
    /// Nodes that a user named may be missing in the cluster, which fails them. All others must exist.
    Nodes(BTreeMap<NodeName, Arc<NodeItems>>),
}
