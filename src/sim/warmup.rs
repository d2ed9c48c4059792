//! A simulated cluster with one Warmup or two, which runs the real [`Warmups`](crate::warmup::Warmups).
//!
//! ```text
//!   watch, replies ─▶ Warmups::on … plan ─▶ issued ─▶ API server ─▶ kubelets, registry
//!        ▲                      │                         ▲              │
//!        │                      └─ reports ─▶ statuses ───┘              │
//!        └───────────────────────────────────────────────────────────────┘
//! ```
//!
//! Time is simulated: kubelets pull for a while, the registry fails, writes get lost, and a status is written at most
//! once a second. The leader can be killed after any of its commands. Its successor knows what the API server has, and
//! nothing else. Users edit the Warmup, and nodes are deleted and created again under their names. The world keeps its
//! own account of what nodes really pulled, and how often.

mod api_server;
mod disturb;
mod kubelet;
mod leader;
mod object;
mod world;

use crate::{
    units::{Millis, Tick},
    warmup::{WarmupLimits, WarmupPhase},
};

pub use self::world::WarmupWorld;

/// The simulated Warmup, its nodes and what goes wrong.
#[derive(Clone, Debug)]
pub struct WarmupScenario {
    pub seed: u64,
    pub nodes: u32,
    /// Images of each node.
    pub images: u32,
    /// Whether each node has an action, too.
    pub has_action: bool,
    pub limits: WarmupLimits,
    pub faults: WarmupFaults,
    /// A second, newer Warmup wants the images of the first on half of its nodes.
    pub has_overlap: bool,
    /// Whether targets are named: then a node that is deleted stays a target.
    pub has_names: bool,
    /// Edits of the first Warmup at random moments of the first half hour.
    pub edits: u32,
    /// The leader is killed as soon as it has issued this many commands, once.
    pub kill_leader_after: Option<u64>,
}

/// How often each fault happens: probabilities.
#[derive(Clone, Copy, Debug, Default)]
pub struct WarmupFaults {
    /// A pull fails, for a cause that is not final.
    pub failed_pull: f64,
    /// An image is missing in the registry: the node can never have it.
    pub missing_image: f64,
    pub failed_action: f64,
    /// A write fails without an effect.
    pub lost_write: f64,
    /// A write has its effect, and its reply is lost.
    pub lost_reply: f64,
    /// A user deletes a Pod.
    pub deleted_pod: f64,
    /// A node is cordoned for a while, when something of it is pulled.
    pub cordoned_node: f64,
    /// Admission refuses a Pod.
    pub refused_pod: f64,
    /// A node is deleted soon after something of it is pulled, and another of its name is created later.
    pub deleted_node: f64,
}

/// What happened so far.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WarmupRunTally {
    /// Most nodes with an unfinished Pod of one Warmup at a time.
    pub max_active: u32,
    /// Commands that were issued, of all kinds.
    pub commands: u64,
    /// Most commands about one node.
    pub max_commands_per_node: u32,
    /// Most Pods that were created on one node for one item.
    pub max_pods_per_item: u32,
    /// Most pulls from the registry of one image by one node that went through.
    pub max_pulls_per_image: u32,
    pub status_writes: u64,
    /// Most bytes of the packed record in a status.
    pub max_record_bytes: usize,
    /// Most bytes of the listed nodes in a status.
    pub max_listing_bytes: usize,
    pub ended: Option<(WarmupPhase, Tick)>,
    pub is_deleted: bool,
    /// Target nodes of the first Warmup, as are the numbers that follow.
    pub desired: u32,
    pub succeeded: u32,
    pub failed: u32,
    /// Warm nodes of the second Warmup.
    pub overlap_succeeded: u32,
    pub refused_pods: u32,
    pub deleted_nodes: u32,
    pub edits: u32,
}

impl Default for WarmupScenario {
    fn default() -> Self {
        Self {
            seed: 1,
            nodes: 10,
            images: 1,
            has_action: false,
            limits: WarmupLimits::default(),
            faults: WarmupFaults::default(),
            has_overlap: false,
            has_names: true,
            edits: 0,
            kill_leader_after: None,
        }
    }
}

impl WarmupFaults {
    /// Every fault of Pods and writes that a Warmup survives, often. Nothing is refused, and no node is deleted.
    #[must_use]
    pub const fn frequent() -> Self {
        Self {
            failed_pull: 0.2,
            missing_image: 0.0,
            failed_action: 0.1,
            lost_write: 0.05,
            lost_reply: 0.05,
            deleted_pod: 0.05,
            cordoned_node: 0.05,
            refused_pod: 0.0,
            deleted_node: 0.0,
        }
    }
}

/// Time from a command to its effect.
const WRITE_TIME: (u64, u64) = (5, 60);
/// Time from a change to its observation.
const WATCH_TIME: (u64, u64) = (1, 30);
/// Time that a pull takes.
const PULL_TIME: (u64, u64) = (2_000, 60_000);
const ACTION_TIME: (u64, u64) = (500, 5_000);
/// Statuses are written at most this often, except at changes of the phase.
const STATUS_INTERVAL: Millis = Millis::secs(1);
/// Time until a new leader begins. Writes of the former one are over by then.
const LEASE_TIME: Millis = Millis::secs(5);
