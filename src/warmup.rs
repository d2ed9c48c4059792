//! Warmups: images and custom actions that nodes have before the Pods that need them start.
//!
//! A Pod on the node pulls each image, and another runs the custom action after all images are there. An item is
//! *present* when the node is seen to have it: by the image id in a container's status or by the node's own list, never
//! by an exit code, because an image may have no shell or be for another platform.
//!
//! ```text
//!   Warmups, targets, nodes, Pods ─▶ Warmups::on(event, now)
//!                                    Warmups::plan(now) ──▶ commands ──▶ API server
//!                                    Warmups::issued(commands, now)          │
//!            ▲                       Warmups::next_deadline()                │
//!            └──────────────── outcomes come back as events ◀────────────────┘
//! ```
//!
//! The status of a Warmup is its memory. A Pod is deleted only after the stored status has what the Pod showed, so a
//! leader that dies at any moment loses nothing, and its successor repeats nothing. The status stays small: outcomes of
//! nodes are packed ([`record`]), and only nodes that are not done are listed ([`report`]).
//!
//! A decision costs what has changed: Warmups and nodes with an event or an expired deadline are looked at, and sums
//! and ordered sets of a Warmup's nodes (`node_view`) answer the rest.

pub mod cause;
pub mod command;
pub mod event;
pub mod facts;
pub mod ids;
pub mod progress;
pub mod record;
pub mod report;
pub mod request;
pub mod verdict;

mod back_off;
mod labels;
mod node_progress;
mod node_start;
mod node_step;
mod node_summary;
mod node_view;
mod observe;
mod orders;
mod outcome;
mod phase;
mod plan;
mod pod_deletion;
mod report_build;
mod start_over;
mod state;

use std::collections::{BTreeMap, BTreeSet};

pub use self::{
    cause::{WarmupCause, classify_pull},
    command::WarmupCommand,
    event::{CommandError, WarmupEvent},
    facts::{
        NodeTaint, TaintEffect, TolerationOperator, WarmupNodeFacts, WarmupPod, WarmupPodState,
        WarmupToleration,
    },
    ids::{ActionHash, ImageName, WarmPodName, WarmSet, WarmupId, WarmupItem, WarmupSpecHash},
    plan::WarmupPlan,
    progress::{WarmupPhase, WarmupProgress},
    record::{
        NodeKey, NodeUidKey, RecordError, RecordGroup, RecordState, RecordedNode, RecordedOutcome,
        WarmupRecord,
    },
    report::{ItemState, MAX_LISTED_NODES, NodeReport, WarmupReason, WarmupReport},
    request::{NodeItems, WarmupLimits, WarmupRequest, WarmupTargets},
    verdict::{NodeCounts, WarmupVerdict, is_permanent, judge, nodes_to_begin},
};
use self::{labels::RefusedLabels, node_progress::KnownNode, state::WarmupState};
use crate::{due_times::DueTimes, pairing::ids::NodeName, units::Tick};

/// Decides everything about Warmups. Pure: the same events at the same moments give the same commands.
#[derive(Clone, Debug, Default)]
pub struct Warmups {
    leads: bool,
    is_listed: bool,
    warmups: BTreeMap<WarmupId, WarmupState>,
    nodes: BTreeMap<NodeName, KnownNode>,
    /// Where each Pod is.
    pods: BTreeMap<WarmPodName, (WarmupId, NodeName)>,
    /// The Warmups of each set.
    sets: BTreeMap<WarmSet, BTreeSet<WarmupId>>,
    known_sets: Option<BTreeSet<WarmSet>>,
    /// Warmups with events since they were last planned, or with commands that were not issued.
    dirty: BTreeSet<WarmupId>,
    /// The next deadline of each Warmup that has one.
    due: DueTimes<WarmupId>,
    labels_dirty: BTreeSet<NodeName>,
    labels_due: BTreeSet<(Tick, NodeName)>,
    /// `None` unless the API server refuses labels.
    refused_labels: Option<RefusedLabels>,
}

impl Warmups {
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records an observation or an outcome. Decides nothing.
    pub fn on(&mut self, event: WarmupEvent, now: Tick) {
        if self.leads || matches!(event, WarmupEvent::LeadershipGained) {
            self.observe(event, now);
        }
    }

    /// Plans the commands for this moment. Pass those that are executed to [`Self::issued`] first; the others are
    /// planned again.
    pub fn plan(&mut self, now: Tick) -> WarmupPlan {
        if self.is_listed { self.build_plan(now) } else { WarmupPlan::default() }
    }

    /// Records commands as issued, before they are executed. Planning again at the same moment yields none of them.
    pub fn issued(&mut self, commands: &[WarmupCommand], now: Tick) {
        for command in commands {
            self.record_issued(command, now);
        }
    }

    /// The next moment at which planning may yield something without an event in between.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Tick> {
        let of_warmups = self.due.first();
        let of_labels = self.labels_due.first().map(|(at, _)| *at);
        of_warmups.into_iter().chain(of_labels).min()
    }
}
