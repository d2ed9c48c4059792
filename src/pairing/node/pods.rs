//! The Pods of a node: its requesters and its providers.
//!
//! Apart from the engines, because a Pod comes and goes by its own object, and an engine by its process.

use super::{PendingCommand, RetryState, pending_command::retry_delay};
use crate::{
    pairing::{
        command::{EngineStopReason, RequesterDeleteReason},
        event::{ObservedProvider, ObservedRequester, ProviderPhase},
        ids::{AcceleratorSet, LauncherBuild, Uid},
        settings::PairingSettings,
    },
    units::{Bytes, Millis, Tick},
};

/// Margin between the end of a drain and the kubelet's kill of the stub. The stub needs a second to end its streams. A
/// drain lasts at least [`MIN_DRAIN`].
const KILL_MARGIN: Millis = Millis::secs(5);
const MIN_DRAIN: Millis = Millis::secs(1);

#[derive(Clone, Debug)]
pub struct PairingRequester {
    pub observed: ObservedRequester,
    /// Sorted; empty until the stub reports them.
    pub accelerators: AcceleratorSet,
    /// What the requester lost, for which it must be deleted.
    pub delete_reason: Option<RequesterDeleteReason>,
    /// Why its deletion was ordered, if it was.
    pub delete_issued: Option<RequesterDeleteReason>,
    /// The stub container whose gate this leader has confirmed closed. The requester gets no engine before that.
    pub gated_stub: Option<Uid>,
    /// The stub has been released and may end.
    pub released: bool,
    /// Starts that failed in a row for this requester. `not_before` ends the pause after the last.
    pub failures: u32,
    /// Why the last start failed.
    pub last_failure: Option<EngineStopReason>,
    pub not_before: Tick,
    /// Why its last engine was stopped or lost; `None` once another is bound.
    pub engine_ended: Option<EngineStopReason>,
    pub pending: Option<PendingCommand>,
    pub retry: RetryState,
}

impl PairingRequester {
    /// Records a failed start. The delay before the next start grows with each failure.
    pub(in crate::pairing) fn start_failed(&mut self, why: EngineStopReason, now: Tick) {
        self.failures += 1;
        self.last_failure = Some(why);
        self.not_before = now + retry_delay(self.failures);
    }

    /// Whether the requester stays, as far as known: neither ended, nor deleted or about to be.
    #[must_use]
    pub const fn stays(&self) -> bool {
        let is_being_deleted = self.delete_issued.is_some() || self.delete_reason.is_some();
        self.observed.deleting_since.is_none() && !self.observed.terminated && !is_being_deleted
    }

    /// Whether the gate of its present stub container is confirmed closed. Behind it no client can reach an engine.
    #[must_use]
    pub fn is_gated(&self) -> bool {
        self.gated_stub.is_some() && self.gated_stub == self.observed.stub_container
    }

    /// Until when its stub is not released. Kubernetes gives the replacement of a deleted requester whatever is free, so
    /// a faulty accelerator stays taken until the replacement has been scheduled.
    pub(in crate::pairing) fn held_until(&self, settings: &PairingSettings) -> Option<Tick> {
        let since = self.observed.deleting_since?;
        let faulty = self.delete_issued == Some(RequesterDeleteReason::AcceleratorFaulty);
        faulty.then(|| since + settings.replacement_time)
    }

    /// When a drain that began at `since` ends: at `latest`, but before the kubelet kills the stub of a requester that
    /// leaves. A killed stub can neither end its streams with an error nor put the engine to sleep.
    pub(in crate::pairing) fn drain_end(&self, since: Tick, latest: Tick) -> Tick {
        let Some(grace) = self.observed.grace.filter(|_| !self.stays()) else { return latest };
        let killed = self.observed.deleting_since.unwrap_or(since) + grace;
        let before = Tick(killed.0.saturating_sub(KILL_MARGIN.0));
        latest.min(before.max(since + MIN_DRAIN))
    }

    /// Whether its stub container runs and can be called.
    #[must_use]
    pub const fn is_stub_reachable(&self) -> bool {
        !self.observed.terminated && self.observed.stub_container.is_some()
    }
}

#[derive(Clone, Debug)]
pub struct PairingProvider {
    /// `None`: ordered and not observed yet.
    pub uid: Option<Uid>,
    pub phase: ProviderPhase,
    pub deleting: bool,
    pub restarts: u32,
    /// Build of an observed launcher.
    pub build: Option<LauncherBuild>,
    /// Memory limit of the container, if observed and set.
    pub memory_limit: Option<Bytes>,
    pub since: Tick,
    /// Launchers only: when an engine in it first passed its canary.
    pub proven_since: Option<Tick>,
    /// The create command succeeded.
    pub created: bool,
    /// The create command was refused because another Pod has the name. `name_holder` is that Pod, once observed.
    pub name_taken: bool,
    pub name_holder: Option<ObservedProvider>,
    /// Launchers only: the commands for a direct provider are pending on its engine.
    pub pending: Option<PendingCommand>,
    pub retry: RetryState,
}
