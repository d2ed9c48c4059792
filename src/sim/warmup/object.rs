//! A Warmup in the simulated API server.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::world::START;
use crate::{
    pairing::ids::NodeName,
    units::{Millis, Tick},
    warmup::{
        NodeItems, WarmupId, WarmupLimits, WarmupNodeFacts, WarmupProgress, WarmupReport, WarmupRequest,
        WarmupTargets,
    },
};

/// Time from an edit until the last command of the former spec has arrived.
const EDIT_SETTLES_IN: Millis = Millis::secs(1);

/// One Warmup, and what the present leader has reported of it.
#[derive(Clone, Debug)]
pub(super) struct WarmupObject {
    pub(super) id: WarmupId,
    /// `None` once it is deleted.
    pub(super) request: Option<Arc<WarmupRequest>>,
    pub(super) stored: Arc<WarmupProgress>,
    pub(super) items: Arc<NodeItems>,
    /// The nodes that it may have as targets, whether they exist or not.
    pub(super) names: BTreeSet<NodeName>,
    /// Whether nodes that do not exist are targets, too: they are named, not selected.
    pub(super) has_names: bool,
    pub(super) edited_at: Option<Tick>,
    pub(super) report: Option<Arc<WarmupReport>>,
    pub(super) last_status_at: Option<Tick>,
    pub(super) is_status_due: bool,
}

impl WarmupObject {
    pub(super) fn new(
        id: &str,
        age: u64,
        limits: WarmupLimits,
        items: NodeItems,
        names: BTreeSet<NodeName>,
        has_names: bool,
    ) -> Self {
        let request = WarmupRequest {
            generation: 1,
            spec_hash: "generation 1".into(),
            created: Tick(START.0 - age),
            paused: false,
            limits,
            keep_warm: false,
            set: format!("set-of-{id}").into(),
            tolerations: Vec::new(),
        };
        Self {
            id: id.into(),
            request: Some(Arc::new(request)),
            stored: Arc::default(),
            items: Arc::new(items),
            names,
            has_names,
            edited_at: None,
            report: None,
            last_status_at: None,
            is_status_due: false,
        }
    }

    pub(super) fn targets(&self, nodes: &BTreeMap<NodeName, WarmupNodeFacts>) -> WarmupTargets {
        let names = self.names.iter().filter(|name| self.has_names || nodes.contains_key(*name));
        WarmupTargets::Nodes(names.map(|name| (name.clone(), Arc::clone(&self.items))).collect())
    }

    /// Changes the spec: whether it is paused, or anything else.
    pub(super) fn edit(&mut self, now: Tick, edit: impl FnOnce(&mut WarmupRequest)) {
        let Some(request) = &self.request else { return };
        let mut edited = WarmupRequest::clone(request);
        edited.generation += 1;
        edit(&mut edited);
        if edited.paused == request.paused {
            edited.spec_hash = format!("generation {}", edited.generation).into();
        }
        self.request = Some(Arc::new(edited));
        self.edited_at = Some(now);
    }

    /// Whether commands that were decided before an edit may still arrive.
    pub(super) fn was_just_edited(&self, now: Tick) -> bool {
        self.edited_at.is_some_and(|at| now.since(at) < EDIT_SETTLES_IN)
    }

    /// Forgets what the former leader has reported.
    pub(super) fn begin_term(&mut self) {
        (self.report, self.is_status_due) = (None, false);
    }
}
