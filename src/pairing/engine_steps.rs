//! Chooses the next step of each engine. Each engine is planned by itself, so a hung engine delays only requesters that
//! wait for its memory.

use super::{
    command::{EngineStep, EngineStopReason},
    event::{ProviderPhase, TemplateStatus},
    ids::ProviderMode,
    node::{Binding, PairingEngine, PairingEngineState, PairingRequester},
    node_plan::NodePlanBuilder,
};
use crate::{
    model::{SleepLevel, SleepLevelPolicy},
    units::Millis,
};

impl NodePlanBuilder<'_> {
    pub(super) fn next_engine_step(&self, e: &PairingEngine) -> Option<EngineStep> {
        if let PairingEngineState::Stopping { reason: why, .. } = e.state {
            return self.stopping(e, why);
        }
        if self.is_overdue(e)
            && !matches!(e.state, PairingEngineState::Asleep { .. } | PairingEngineState::Gone)
        {
            return Some(EngineStep::Stop { reason: EngineStopReason::Overdue });
        }
        if let PairingEngineState::Draining { until, .. } = e.state {
            // Without a stub there is no request left to drain.
            let stub = self.requester(e).filter(|requester| requester.is_stub_reachable());
            if stub.is_none_or(|requester| requester.drain_end(e.since, until) <= self.now()) {
                return self.sleep_or_stop(e);
            }
        }
        if e.is_busy(self.now()) {
            return None;
        }
        match e.state {
            PairingEngineState::Unknown => self.unknown(e),
            PairingEngineState::Creating => self.creating(e),
            PairingEngineState::Starting => self.starting(e),
            PairingEngineState::Waking => self.waking(e),
            PairingEngineState::Awake => self.awake(e),
            PairingEngineState::Draining { until, drained } => {
                if drained {
                    return self.sleep_or_stop(e);
                }
                let requester = e.requester()?.clone();
                self.may_retry(e).then_some(EngineStep::CloseGate { requester, deadline: until })
            }
            PairingEngineState::FallingAsleep { .. } => {
                Some(EngineStep::Stop { reason: e.failure.unwrap_or(EngineStopReason::SleepFailed) })
            }
            PairingEngineState::Asleep { .. } => self.asleep(e),
            PairingEngineState::Gone => self.gone(e),
            PairingEngineState::Stopping { .. } => None,
        }
    }

    fn may_retry(&self, e: &PairingEngine) -> bool {
        e.retry.at <= self.now()
    }

    fn is_past(&self, e: &PairingEngine, span: Millis) -> bool {
        e.since + span <= self.now()
    }

    fn requester(&self, e: &PairingEngine) -> Option<&PairingRequester> {
        self.node.requesters.get(e.requester()?)
    }

    fn stays(&self, e: &PairingEngine) -> bool {
        self.node.staying_requester(e).is_some()
    }

    /// Whether its deleted requester has been held for the maximum time.
    pub(super) fn is_overdue(&self, e: &PairingEngine) -> bool {
        let deleting = self.requester(e).and_then(|requester| requester.observed.deleting_since);
        deleting.is_some_and(|since| since + self.context.settings.max_hold(&e.sizes) <= self.now())
    }

    fn template_status(&self, e: &PairingEngine) -> TemplateStatus {
        self.context.template_statuses.get(&e.id.fingerprint).copied().unwrap_or(TemplateStatus::Current)
    }

    fn is_on_faulty(&self, e: &PairingEngine) -> bool {
        e.id.accelerators
            .iter()
            .any(|a| self.node.accelerators.get(a).is_some_and(|accelerator| !accelerator.facts.healthy))
    }

    fn phase(&self, e: &PairingEngine) -> ProviderPhase {
        self.node.providers.get(&e.provider).map_or(ProviderPhase::Pending, |provider| provider.phase)
    }

    /// Queries an engine from before a restart. Nothing is assumed of it before it answers.
    fn unknown(&self, e: &PairingEngine) -> Option<EngineStep> {
        if self.is_past(e, self.context.settings.start_timeout) {
            return Some(EngineStep::Stop { reason: EngineStopReason::Lost });
        }
        let required_phase =
            if e.provider.is_launcher() { ProviderPhase::Ready } else { ProviderPhase::Running };
        let reachable =
            matches!(self.phase(e), ProviderPhase::Running | ProviderPhase::Ready | ProviderPhase::Crashed)
                && self.phase(e) >= required_phase;
        (reachable && self.may_retry(e)).then_some(EngineStep::Query)
    }

    fn creating(&self, e: &PairingEngine) -> Option<EngineStep> {
        if let Some(reason) = self.start_abort_reason(e) {
            return Some(EngineStep::Stop { reason });
        }
        let provider = self.node.providers.get(&e.provider);
        let name_taken = provider.is_some_and(|provider| provider.name_taken && provider.uid.is_none());
        if !self.may_retry(e) || !e.provider.is_launcher() && !name_taken {
            return None;
        }
        if name_taken {
            return Some(EngineStep::Create { record: e.record(e.last_used) });
        }
        let written = e.binding.as_ref().is_some_and(|binding| binding.written);
        Some(if written { EngineStep::Launch } else { EngineStep::Bind { record: e.record(e.last_used) } })
    }

    fn starting(&self, e: &PairingEngine) -> Option<EngineStep> {
        if let Some(reason) = self.start_abort_reason(e) {
            return Some(EngineStep::Stop { reason });
        }
        if e.pending.is_some() {
            return Some(EngineStep::Stop { reason: EngineStopReason::CanaryFailed });
        }
        e.ready.then_some(EngineStep::SendCanary)
    }

    /// Why a start must be aborted: it failed, takes too long, or its requester no longer waits.
    fn start_abort_reason(&self, e: &PairingEngine) -> Option<EngineStopReason> {
        if !self.stays(e) {
            return Some(EngineStopReason::Unneeded);
        }
        let crashed = self.phase(e) == ProviderPhase::Crashed && !e.provider.is_launcher();
        let expired = crashed || self.is_past(e, self.context.settings.start_timeout);
        e.failure.or_else(|| expired.then_some(EngineStopReason::StartFailed))
    }

    fn waking(&self, e: &PairingEngine) -> Option<EngineStep> {
        if let Some(reason) = e.failure {
            return Some(EngineStep::Stop { reason });
        }
        if e.pending.is_some() {
            // Neither the wake nor the canary had an outcome in time.
            return Some(EngineStep::Stop {
                reason: if e.ready { EngineStopReason::CanaryFailed } else { EngineStopReason::WakeFailed },
            });
        }
        if !e.ready {
            return Some(EngineStep::Stop { reason: EngineStopReason::WakeFailed });
        }
        let is_wanted = self.stays(e) && self.node.sleep_order(e).is_none();
        if is_wanted { Some(EngineStep::SendCanary) } else { self.sleep_or_stop(e) }
    }

    fn awake(&self, e: &PairingEngine) -> Option<EngineStep> {
        if let Some(reason) = e.failure {
            return Some(EngineStep::Stop { reason });
        }
        let Some(requester) = self.requester(e) else {
            return self.sleep_or_stop(e);
        };
        if !requester.stays() || self.node.sleep_order(e).is_some() {
            // Closes the gate even if this leader did not open it: an earlier leader may have.
            let deadline = requester.drain_end(self.now(), self.now() + self.context.settings.drain_timeout);
            let id = e.requester()?.clone();
            let gate = EngineStep::CloseGate { requester: id, deadline };
            return if requester.is_stub_reachable() { Some(gate) } else { self.sleep_or_stop(e) };
        }
        let gate_opened = e.has_open_gate(requester.observed.stub_container.as_ref(), self.now());
        let requester = e.requester()?.clone();
        (!gate_opened
            && self.requester(e).is_some_and(PairingRequester::is_stub_reachable)
            && self.may_retry(e))
        .then_some(EngineStep::OpenGate { requester })
    }

    /// Puts an unused engine to sleep if it can sleep, else stops it. It sleeps at the level of the want if its policy
    /// allows that, else as its policy says: at level 1 if host RAM allows. The sleep waits for launches and memory
    /// moves on its accelerators: a sleep would disturb a launch, and either would disturb the measurement of its
    /// residue.
    fn sleep_or_stop(&self, e: &PairingEngine) -> Option<EngineStep> {
        if self.is_on_faulty(e) || !self.node.exists {
            return Some(EngineStep::Stop { reason: EngineStopReason::Leaving });
        }
        let launcher = self.node.providers.get(&e.provider);
        let is_leaving = launcher.is_some_and(|launcher| self.context.build_policy(launcher).obsolete);
        if is_leaving || self.template_status(e) == TemplateStatus::Obsolete {
            return Some(EngineStep::Stop { reason: EngineStopReason::Obsolete });
        }
        let room = self.node.host_memory_shortage(e).is_none();
        let wanted = self.node.sleep_order(e);
        let level = match e.level {
            _ if e.id.mode == ProviderMode::Plain => None,
            SleepLevelPolicy::Never => None,
            SleepLevelPolicy::Auto if wanted == Some(SleepLevel::Two) => wanted,
            SleepLevelPolicy::One | SleepLevelPolicy::OneOrStop | SleepLevelPolicy::Auto if room => {
                Some(SleepLevel::One)
            }
            SleepLevelPolicy::OneOrStop => None,
            SleepLevelPolicy::One | SleepLevelPolicy::Two | SleepLevelPolicy::Auto => Some(SleepLevel::Two),
        };
        let via = self
            .requester(e)
            .filter(|requester| requester.is_stub_reachable())
            .and_then(|_| e.requester().cloned());
        let Some(level) = level else {
            let reason =
                if wanted.is_some() { EngineStopReason::CannotSleep } else { EngineStopReason::Unneeded };
            return Some(EngineStep::Stop { reason });
        };
        (!self.must_delay_sleep(e)).then_some(EngineStep::Sleep { level, via })
    }

    /// Whether the sleep must wait because another engine's memory changes on its accelerators. The wait is limited to
    /// the drain timeout after the requester's deletion, so that time for the sleep itself is left.
    fn must_delay_sleep(&self, e: &PairingEngine) -> bool {
        let changes = |other: &PairingEngine| {
            other.is_moving_memory() || other.is_launching() && other.state != PairingEngineState::Unknown
        };
        let deleting = self.requester(e).and_then(|requester| requester.observed.deleting_since);
        let in_time = deleting.is_none_or(|since| since + self.context.settings.drain_timeout > self.now());
        in_time && self.node.engines_sharing(&e.id).any(changes)
    }

    fn asleep(&self, e: &PairingEngine) -> Option<EngineStep> {
        let Some(binding) = &e.binding else {
            let reason = match self.template_status(e) {
                TemplateStatus::Obsolete => Some(EngineStopReason::Obsolete),
                _ if e.failure.is_some() || self.phase(e) == ProviderPhase::Crashed => {
                    Some(EngineStopReason::Lost)
                }
                _ if self.is_on_faulty(e) || !self.node.exists => Some(EngineStopReason::Leaving),
                _ if e.stops_at().is_some_and(|at| at <= self.now())
                    && !self.fit_check().is_wanted(&e.id) =>
                {
                    Some(EngineStopReason::Idle)
                }
                _ => None,
            };
            return reason.map(|reason| EngineStep::Stop { reason });
        };
        if !self.may_retry(e) {
            return None;
        }
        let Some(requester) = self.node.staying_requester(e) else {
            return Some(EngineStep::Unbind { last_used: e.last_used, forget: false });
        };
        if e.awaits_want {
            return self.bound_sleeper(e, binding);
        }
        // The engine was bound before its sleep level was known.
        let lost = e.has_lost_adapters();
        if e.failure.is_some() || lost {
            let reason = if e.failure.is_some() {
                EngineStopReason::WakeFailed
            } else {
                EngineStopReason::LoraAdapters
            };
            return Some(EngineStep::Stop { reason });
        }
        if !binding.written {
            return Some(EngineStep::Bind { record: e.record(e.last_used) });
        }
        let PairingEngineState::Asleep { level } = e.state else { return None };
        requester.is_stub_reachable().then(|| EngineStep::Wake { level, via: binding.requester.clone() })
    }

    /// Stops a bound sleeper that cannot be woken, or that nothing may run in any more. Else only writes its binding:
    /// its wake waits in the queue.
    fn bound_sleeper(&self, e: &PairingEngine, binding: &Binding) -> Option<EngineStep> {
        let launcher = self.node.providers.get(&e.provider);
        let is_leaving = launcher.is_some_and(|launcher| self.context.build_policy(launcher).obsolete);
        let reason = if is_leaving || self.template_status(e) == TemplateStatus::Obsolete {
            Some(EngineStopReason::Obsolete)
        } else if e.has_lost_adapters() {
            Some(EngineStopReason::LoraAdapters)
        } else if e.failure.is_some() || self.phase(e) == ProviderPhase::Crashed {
            let is_relied_on = self.node.is_relied_on(e);
            Some(if is_relied_on { EngineStopReason::Lost } else { EngineStopReason::WakeFailed })
        } else {
            None
        };
        let bind = || EngineStep::Bind { record: e.record(e.last_used) };
        reason.map_or_else(|| (!binding.written).then(bind), |reason| Some(EngineStep::Stop { reason }))
    }

    /// Repeats the stop order until the engine obeys. Releases its requester whether the engine obeys or not. The
    /// reservation stays until the engine is seen gone.
    fn stopping(&self, e: &PairingEngine, reason: EngineStopReason) -> Option<EngineStep> {
        if e.is_busy(self.now()) || !self.may_retry(e) {
            return None;
        }
        let unanswered = e.retry.failures > 0 || e.pending.is_some();
        if e.binding.is_some() && (e.stop_accepted || unanswered) {
            return Some(EngineStep::Unbind { last_used: e.last_used, forget: false });
        }
        let again = e.stop_accepted
            && !e.provider.is_launcher()
            && self.is_past(e, self.context.settings.stop_timeout);
        // A repeated stop may also have no outcome, so the wait restarts at `retry.at`.
        (!e.stop_accepted || again && e.retry.at + self.context.settings.stop_timeout <= self.now())
            .then_some(EngineStep::Stop { reason })
    }

    /// Cleans up after a gone engine: deletes the stopped instance or ended Pod, then its record or binding.
    fn gone(&self, e: &PairingEngine) -> Option<EngineStep> {
        if !self.may_retry(e) {
            return None;
        }
        // A terminated launcher has no instance left to delete.
        let stop_obeyed =
            e.stop_accepted || e.provider.is_launcher() && self.phase(e) == ProviderPhase::Terminated;
        if !stop_obeyed {
            return Some(EngineStep::Stop { reason: EngineStopReason::Lost });
        }
        if e.provider.is_launcher() {
            return Some(EngineStep::Unbind { last_used: e.last_used, forget: true });
        }
        e.binding.is_some().then_some(EngineStep::Unbind { last_used: e.last_used, forget: false })
    }
}
