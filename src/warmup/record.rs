//! Outcomes of nodes, packed so that a status holds those of thousands of nodes.
//!
//! A node counts by 48 bits of a hash of its name: 8 characters instead of up to 253. Of 5,000 nodes, two have the same
//! hash with a probability of 1 in 20 million. Pods that are collected or deleted by hand take nothing from the record.

use std::collections::BTreeMap;

use serde::Serialize;

use super::cause::WarmupCause;
use crate::{pairing::ids::NodeName, shared_map::SharedMap, stable_hash::fnv1a};

/// Characters of one node in [`RecordGroup::nodes`].
const KEY_CHARS: usize = 8;
const BITS_PER_CHAR: u32 = 6;
const KEY_MASK: u64 = (1 << 48) - 1;
/// The digits of base64 for URLs.
const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// The outcomes of the nodes of one Warmup. A clone shares them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WarmupRecord {
    nodes: SharedMap<NodeKey, RecordedNode>,
}

/// 48 bits that stand for a node's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeKey(u64);

/// What is recorded of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordedNode {
    pub outcome: RecordedOutcome,
    /// Hash of the items that the node should have.
    pub items: u32,
    /// Failures so far; 0 for a node that is done.
    pub attempts: u32,
}

/// The outcome of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum RecordedOutcome {
    Done,
    /// With the reason of the cause.
    Failed(&'static str),
    /// Tried and not done yet.
    Retried,
}

/// Nodes with the same outcome, as a status has them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RecordGroup {
    pub state: RecordState,
    pub items: u32,
    pub attempts: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    /// 8 characters for each node.
    pub nodes: String,
}

/// The outcome of the nodes of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub enum RecordState {
    Done,
    Failed,
    Retried,
}

/// Why a record cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("a group of the record has {0} characters of nodes, which is no multiple of 8: remove the group")]
    Length(usize),
    #[error("a group of the record has a character that is no digit of a node's hash: remove the group")]
    Digit,
}

impl NodeKey {
    #[must_use]
    pub fn new(node: &NodeName) -> Self {
        let hash = fnv1a(node.as_str().bytes());
        // FNV-1a spreads the last characters badly, and those are what node names differ in.
        let mixed = (hash ^ (hash >> 32)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        Self((mixed ^ (mixed >> 29)) & KEY_MASK)
    }

    fn write(self, out: &mut String) {
        for place in (0..8_u32).rev() {
            let digit = (self.0 >> (place * BITS_PER_CHAR)) & 63;
            let digit = usize::try_from(digit).ok().and_then(|digit| DIGITS.get(digit));
            out.push(char::from(*digit.unwrap_or(&b'A')));
        }
    }

    fn read(digits: &[u8]) -> Result<Self, RecordError> {
        let add = |key: u64, digit: &u8| -> Result<u64, RecordError> {
            let value = DIGITS.iter().position(|known| known == digit).ok_or(RecordError::Digit)?;
            Ok((key << BITS_PER_CHAR) | u64::try_from(value).unwrap_or_default())
        };
        digits.iter().try_fold(0, add).map(Self)
    }
}

impl WarmupRecord {
    #[must_use]
    pub fn get(&self, key: NodeKey) -> Option<&RecordedNode> {
        self.nodes.get(&key)
    }

    /// The number of nodes with an outcome.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.nodes.len()
    }

    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = (NodeKey, &RecordedNode)> {
        self.nodes.iter().map(|(key, node)| (*key, node))
    }

    pub(super) fn set(&mut self, key: NodeKey, node: RecordedNode) {
        // A known value copies nothing that a report shares.
        if self.nodes.get(&key) != Some(&node) {
            self.nodes.insert(key, node);
        }
    }

    pub(super) fn remove(&mut self, key: NodeKey) {
        self.nodes.remove(&key);
    }

    pub(super) fn retain(&mut self, keep: impl Fn(NodeKey, &RecordedNode) -> bool) {
        let kept = self.nodes.iter().filter(|(key, node)| keep(**key, node));
        self.nodes = kept.map(|(key, node)| (*key, *node)).collect();
    }

    /// Packs the record for a status: one group for each outcome, sorted.
    #[must_use]
    pub fn groups(&self) -> Vec<RecordGroup> {
        let mut nodes: Vec<(RecordedNode, NodeKey)> =
            self.nodes.iter().map(|(key, node)| (*node, *key)).collect();
        nodes.sort_unstable();
        let mut groups: Vec<RecordGroup> = Vec::new();
        for same in nodes.chunk_by(|(node, _), (next, _)| node == next) {
            let Some((node, _)) = same.first() else { continue };
            let mut keys = String::with_capacity(same.len() * KEY_CHARS);
            same.iter().for_each(|(_, key)| key.write(&mut keys));
            let (state, cause) = match node.outcome {
                RecordedOutcome::Done => (RecordState::Done, None),
                RecordedOutcome::Failed(reason) => (RecordState::Failed, Some(reason.to_owned())),
                RecordedOutcome::Retried => (RecordState::Retried, None),
            };
            groups.push(RecordGroup {
                state,
                items: node.items,
                attempts: node.attempts,
                cause,
                nodes: keys,
            });
        }
        groups
    }

    /// Reads what [`Self::groups`] wrote. A later group wins over an earlier one that has the same node.
    ///
    /// # Errors
    /// A list of nodes is not what [`Self::groups`] writes.
    pub fn from_groups(groups: &[RecordGroup]) -> Result<Self, RecordError> {
        let mut nodes = BTreeMap::new();
        for group in groups {
            let outcome = match group.state {
                RecordState::Done => RecordedOutcome::Done,
                RecordState::Failed => {
                    let reason = group.cause.as_deref().unwrap_or_default();
                    RecordedOutcome::Failed(WarmupCause::from_reason(reason).reason())
                }
                RecordState::Retried => RecordedOutcome::Retried,
            };
            let node = RecordedNode { outcome, items: group.items, attempts: group.attempts };
            let (keys, rest) = group.nodes.as_bytes().as_chunks::<KEY_CHARS>();
            if !rest.is_empty() {
                return Err(RecordError::Length(group.nodes.len()));
            }
            for key in keys {
                nodes.insert(NodeKey::read(key)?, node);
            }
        }
        Ok(Self { nodes: nodes.into() })
    }
}
