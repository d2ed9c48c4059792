//! A Warmup as last observed, and what it was converted to.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Toleration;
use rouse::warmup::{WarmupLimits, WarmupProgress, WarmupRequest};

use super::nodes::CandidateChange;
use crate::{
    condition::tick,
    convert::warmup::{AcceptedWarmup, WarmupTarget, spec_hash, warmup_set},
    crd::{Warmup, ledger::ObjectName, warmup::TolerationSpec},
    warmup::targets::{ResolvedTargets, seen_tolerations},
};

/// One Warmup, and what it was converted to.
#[derive(Debug)]
pub(in crate::warmup) struct KnownWarmup {
    pub(in crate::warmup) object: Arc<Warmup>,
    /// What is wrong with it, if it is refused.
    pub(in crate::warmup) accepted: Result<AcceptedWarmup, String>,
    /// The nodes; `None` until they were looked for.
    pub(in crate::warmup) targets: Option<ResolvedTargets>,
    pub(super) stored: Arc<WarmupProgress>,
}

impl KnownWarmup {
    /// Returns what is warmed, in a few words.
    pub(in crate::warmup) fn target(&self) -> Option<String> {
        self.accepted.as_ref().ok().map(|accepted| accepted.target.to_string())
    }

    /// Returns the tolerations of its Pods: its own and those of the target.
    pub(in crate::warmup) fn tolerations(&self) -> Vec<Toleration> {
        let own = self.accepted.iter().flat_map(|accepted| &accepted.tolerations).map(toleration);
        let of_target = self.targets.iter().flat_map(|targets| &targets.tolerations).cloned();
        own.chain(of_target).collect()
    }

    pub(super) fn is_ending(&self) -> bool {
        self.object.metadata.deletion_timestamp.is_some()
    }

    pub(super) fn request(&self) -> WarmupRequest {
        let Ok(accepted) = &self.accepted else { return refused_request(&self.object) };
        let mut request = accepted.request.clone();
        let of_target = self.targets.iter().flat_map(|targets| seen_tolerations(&targets.tolerations));
        request.tolerations.extend(of_target);
        request
    }

    /// Returns the least change of a node that the targets may depend on.
    pub(super) fn least_change(&self) -> CandidateChange {
        match self.accepted.as_ref().map(|accepted| &accepted.target) {
            Ok(WarmupTarget::Model { nodes: Some(_), .. }) => CandidateChange::Order,
            // Its nodes are those on which its Pods run, whatever their labels are.
            Ok(WarmupTarget::Group { .. }) => CandidateChange::Existence,
            _ => CandidateChange::Labels,
        }
    }

    /// Whether the target chooses among the nodes that fit.
    pub(super) fn is_limited(&self) -> bool {
        let target = self.accepted.as_ref().map(|accepted| &accepted.target);
        matches!(target, Ok(WarmupTarget::Model { nodes: Some(_), .. }))
    }

    pub(super) fn model(&self) -> Option<&ObjectName> {
        match &self.accepted.as_ref().ok()?.target {
            WarmupTarget::Model { model, .. } => Some(model),
            WarmupTarget::Nodes { .. } | WarmupTarget::Group { .. } => None,
        }
    }

    pub(super) fn group(&self) -> Option<&ObjectName> {
        match &self.accepted.as_ref().ok()?.target {
            WarmupTarget::Group { group, .. } => Some(group),
            WarmupTarget::Nodes { .. } | WarmupTarget::Model { .. } => None,
        }
    }
}

/// The request of a Warmup that is refused. Nothing of it is carried out.
fn refused_request(warmup: &Warmup) -> WarmupRequest {
    let metadata = &warmup.metadata;
    WarmupRequest {
        generation: metadata.generation.and_then(|at| u64::try_from(at).ok()).unwrap_or_default(),
        spec_hash: spec_hash(&warmup.spec),
        created: metadata.creation_timestamp.as_ref().map(tick).unwrap_or_default(),
        paused: false,
        limits: WarmupLimits::default(),
        keep_warm: false,
        set: warmup_set(warmup),
        tolerations: Vec::new(),
    }
}

fn toleration(written: &TolerationSpec) -> Toleration {
    let TolerationSpec { key, operator, value, effect, toleration_seconds } = written.clone();
    Toleration { key, operator, value, effect, toleration_seconds }
}
