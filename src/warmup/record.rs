//! Outcomes of nodes, packed so that a status holds those of thousands of nodes.
//!
//! A node counts by 48 bits of a hash of its name: 8 characters instead of up to 253. Of 5,000 nodes, two have the same
//! hash with a probability of 1 in 20 million. Pods that are collected or deleted by hand take nothing from the record.
//!
//! A node that is created again under the name of a deleted one has another uid. Of the uid 18 bits are kept: one such
//! node of 262,143 counts as the deleted one.

use std::collections::BTreeMap;

use serde::Serialize;

use super::cause::WarmupCause;
use crate::{pairing::ids::NodeName, shared_map::SharedMap, stable_hash::fnv1a};

/// Characters of one node in [`RecordGroup::nodes`].
const KEY_CHARS: usize = 8;
/// Characters of one node in [`RecordGroup::uids`].
const UID_CHARS: usize = 3;
const BITS_PER_CHAR: u32 = 6;
const KEY_MASK: u64 = (1 << 48) - 1;
const UID_VALUES: u64 = (1 << 18) - 1;
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

/// 18 bits that stand for a node's uid; by default those of a uid that is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct NodeUidKey(u64);

/// What is recorded of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RecordedNode {
    pub outcome: RecordedOutcome,
    /// Hash of the items that the node should have.
    pub items: u32,
    /// Failures so far; 0 for a node that is done.
    pub attempts: u32,
    /// The node that this is about, among those that had or will have its name.
    pub uid: NodeUidKey,
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
    /// 3 characters for each node, in the same order; `None` if no uid is known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub uids: Option<String>,
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
    #[error(
        "a group of the record has {0} characters of uids, which is not 3 for each node: remove the group"
    )]
    Uids(usize),
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
}

impl NodeUidKey {
    #[must_use]
    pub fn new(uid: &str) -> Self {
        let hash = fnv1a(uid.bytes());
        // 0 stands for a uid that is not known.
        Self((hash ^ (hash >> 32)) % UID_VALUES + 1)
    }

    /// Whether the node has a uid that is known.
    #[must_use]
    pub const fn is_known(self) -> bool {
        self.0 != 0
    }

    /// Whether these are the uids of two nodes. One that is not known may be any.
    #[must_use]
    pub const fn differs_from(self, other: Self) -> bool {
        self.is_known() && other.is_known() && self.0 != other.0
    }
}

/// Appends the lowest bits as so many digits.
fn write_digits(value: u64, chars: usize, out: &mut String) {
    for place in (0..chars).rev() {
        let shift = u32::try_from(place).unwrap_or_default() * BITS_PER_CHAR;
        let digit = usize::try_from((value >> shift) & 63).ok().and_then(|digit| DIGITS.get(digit));
        out.push(char::from(*digit.unwrap_or(&b'A')));
    }
}

fn read_digits(digits: &[u8]) -> Result<u64, RecordError> {
    let add = |read: u64, digit: &u8| -> Result<u64, RecordError> {
        let value = DIGITS.iter().position(|known| known == digit).ok_or(RecordError::Digit)?;
        Ok((read << BITS_PER_CHAR) | u64::try_from(value).unwrap_or_default())
    };
    digits.iter().try_fold(0, add)
}

/// Reads the uids of so many nodes.
fn read_uids(uids: Option<&str>, nodes: usize) -> Result<Vec<NodeUidKey>, RecordError> {
    let Some(uids) = uids else { return Ok(vec![NodeUidKey::default(); nodes]) };
    let (digits, rest) = uids.as_bytes().as_chunks::<UID_CHARS>();
    if !rest.is_empty() || digits.len() != nodes {
        return Err(RecordError::Uids(uids.len()));
    }
    digits.iter().map(|digits| read_digits(digits).map(NodeUidKey)).collect()
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
        let class = |node: &RecordedNode| (node.outcome, node.items, node.attempts);
        nodes.sort_unstable_by_key(|(node, key)| (class(node), *key));
        let mut groups: Vec<RecordGroup> = Vec::new();
        for same in nodes.chunk_by(|(node, _), (next, _)| class(node) == class(next)) {
            let Some((node, _)) = same.first() else { continue };
            let mut keys = String::with_capacity(same.len() * KEY_CHARS);
            same.iter().for_each(|(_, key)| write_digits(key.0, KEY_CHARS, &mut keys));
            let has_uids = same.iter().any(|(node, _)| node.uid.is_known());
            let uids = has_uids.then(|| {
                let mut uids = String::with_capacity(same.len() * UID_CHARS);
                same.iter().for_each(|(node, _)| write_digits(node.uid.0, UID_CHARS, &mut uids));
                uids
            });
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
                uids,
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
            let (keys, rest) = group.nodes.as_bytes().as_chunks::<KEY_CHARS>();
            if !rest.is_empty() {
                return Err(RecordError::Length(group.nodes.len()));
            }
            let uids = read_uids(group.uids.as_deref(), keys.len())?;
            for (key, uid) in keys.iter().zip(uids) {
                let node = RecordedNode { outcome, items: group.items, attempts: group.attempts, uid };
                nodes.insert(NodeKey(read_digits(key)?), node);
            }
        }
        Ok(Self { nodes: nodes.into() })
    }
}
