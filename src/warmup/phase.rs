//! Begins, pauses and ends a Warmup.
//!
//! These are the steps of the state machine of KEP-129: a valid Warmup is in progress (step 1), its nodes are warmed
//! and counted (step 2), and when each has ended (step 3) the Warmup is completed (step 3.1) or has failed (step 3.2).

use super::{
    progress::WarmupPhase,
    report::WarmupReason,
    request::{WarmupRequest, WarmupTargets},
    state::WarmupState,
    verdict::{WarmupVerdict, judge},
};
use crate::units::{Millis, Tick};

/// Time for which a Warmup waits for its target, unless its own timeout is shorter.
const TARGET_TIMEOUT: Millis = Millis::secs(600);
/// Longest interval between two plans while a deadline is ahead.
const MAX_RECHECK: Millis = Millis::secs(600);

impl WarmupState {
    /// Moves the phase on. Returns whether the Warmup has ended now, which changes the views of all its nodes.
    pub(super) fn step_phase(&mut self, now: Tick) -> bool {
        let (Some(request), Some(targets)) = (self.request.clone(), &self.targets) else { return false };
        if self.progress.phase.is_finished() {
            return false;
        }
        let is_refused = matches!(targets, WarmupTargets::Refused { .. });
        let is_missing = match targets {
            WarmupTargets::Refused { .. } => false,
            WarmupTargets::Pending { .. } => true,
            WarmupTargets::Nodes(nodes) => nodes.is_empty() && self.counts().desired == 0,
        };
        self.progress.start.get_or_insert(now);
        self.progress.set_paused(request.paused, now);
        self.progress.phase = if request.paused { WarmupPhase::Paused } else { WarmupPhase::InProgress };
        let elapsed = self.progress.elapsed(now);
        self.missing_since = is_missing.then(|| self.missing_since.unwrap_or(elapsed));
        if request.keep_warm {
            // It never ends: a target that is refused now may be valid later.
            return false;
        }
        if is_refused {
            self.end(WarmupPhase::Failed, WarmupReason::InvalidSpec, now);
        } else {
            self.judge_progress(&request, now);
        }
        self.progress.phase.is_finished()
    }

    fn judge_progress(&mut self, request: &WarmupRequest, now: Tick) {
        let counts = self.counts();
        let is_over = |deadline: Option<Tick>| deadline.is_some_and(|at| at <= now);
        match judge(&counts, request.limits.max_failed_nodes) {
            WarmupVerdict::Failed => {
                self.end(WarmupPhase::Failed, WarmupReason::MaxFailedNodesExceeded, now);
            }
            WarmupVerdict::Completed if counts.failed > 0 => {
                self.end(WarmupPhase::Completed, WarmupReason::CompletedWithFailures, now);
            }
            WarmupVerdict::Completed => self.end(WarmupPhase::Completed, WarmupReason::AllNodesWarm, now),
            _ if is_over(self.target_deadline(request, now)) => {
                self.end(WarmupPhase::Failed, WarmupReason::TargetNotFound, now);
            }
            _ if is_over(self.timeout(request, now)) => {
                self.end(WarmupPhase::Failed, WarmupReason::TimeoutExceeded, now);
            }
            WarmupVerdict::WaitingForTarget | WarmupVerdict::InProgress => {}
        }
    }

    fn end(&mut self, phase: WarmupPhase, reason: WarmupReason, now: Tick) {
        self.progress.set_paused(false, now);
        self.progress.phase = phase;
        self.progress.completion = Some(now);
        self.ended = Some(reason);
        self.missing_since = None;
    }

    /// When the Warmup fails because nodes are still not warm. `None` while it is paused.
    fn timeout(&self, request: &WarmupRequest, now: Tick) -> Option<Tick> {
        self.at_elapsed(request.limits.timeout?, now)
    }

    /// When the Warmup fails because its target is still not there.
    fn target_deadline(&self, request: &WarmupRequest, now: Tick) -> Option<Tick> {
        let limit = request.limits.timeout.map_or(TARGET_TIMEOUT, |timeout| timeout.min(TARGET_TIMEOUT));
        self.at_elapsed(self.missing_since? + limit, now)
    }

    /// The moment at which this much time has passed without pauses.
    fn at_elapsed(&self, span: Millis, now: Tick) -> Option<Tick> {
        let is_running = self.progress.phase == WarmupPhase::InProgress;
        let left = Millis(span.0.saturating_sub(self.progress.elapsed(now).0));
        is_running.then(|| now + left)
    }

    /// Whether the finished Warmup may be deleted, which no status can follow: the end must be stored.
    pub(super) fn is_expired(&self, now: Tick) -> bool {
        let is_issued = self.deleting_until.is_some_and(|until| until > now);
        !is_issued
            && self.stored.completion.is_some()
            && self.stored.generation == self.progress.generation
            && self.expiry().is_some_and(|at| at <= now)
    }

    fn expiry(&self) -> Option<Tick> {
        let ttl = self.request.as_ref()?.limits.ttl?;
        Some(self.progress.completion? + ttl)
    }

    /// The next moment at which the Warmup may change without an event.
    pub(super) fn next_deadline(&self, now: Tick) -> Option<Tick> {
        let request = self.request.as_ref()?;
        let of_nodes = self.tally.due.first().map(|(at, _)| *at);
        let of_creation = self.creation.until.filter(|_| !self.tally.startable.is_empty());
        let of_phase = if self.progress.phase.is_finished() {
            [self.expiry(), self.deleting_until]
        } else if request.keep_warm {
            [None, None]
        } else {
            [self.timeout(request, now), self.target_deadline(request, now)]
        };
        // A clock that is set back must not delay a far deadline by more than this.
        let of_phase = of_phase.into_iter().flatten().map(|at| at.min(now + MAX_RECHECK));
        of_phase.chain(of_nodes).chain(of_creation).filter(|at| *at > now).min()
    }
}
