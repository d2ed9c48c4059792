//! What is to be done with an engine next. Each engine is looked at by itself: one that hangs delays nobody who does not wait for
//! its memory.

use super::{
    command::{EngineStep, EngineStopReason},
    event::{ProviderPhase, TemplateStatus},
    ids::ProviderMode,
    node::{PairingEngine, PairingEngineState, PairingRequester},
    node_plan::NodePlanBuilder,
};
use crate::{
    model::{SleepLevel, SleepLevelPolicy},
    units::{Millis, Tick},
};

/// A drain ends this long before the kubelet kills the stub, and lasts [`MIN_DRAIN`]: the stub needs a second to end its streams.
const KILL_MARGIN: Millis = Millis::secs(5);
const MIN_DRAIN: Millis = Millis::secs(1);

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
        // Nobody is behind the gate any more that could be waited for.
        if matches!(e.state, PairingEngineState::Draining { .. })
            && !self.requester(e).is_some_and(PairingRequester::is_stub_reachable)
        {
            return self.sleep_or_stop(e);
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
                if drained || until <= self.now() {
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

    /// Its requester has been held for as long as it may be.
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
            .any(|a| self.node.accelerators.get(a).is_some_and(|known| !known.facts.healthy))
    }

    fn phase(&self, e: &PairingEngine) -> ProviderPhase {
        self.node.providers.get(&e.provider).map_or(ProviderPhase::Pending, |provider| provider.phase)
    }

    /// From before a restart. Nothing is believed of it before it has been asked.
    fn unknown(&self, e: &PairingEngine) -> Option<EngineStep> {
        if self.is_past(e, self.context.settings.start_timeout) {
            return Some(EngineStep::Stop { reason: EngineStopReason::Lost });
        }
        let asked = if e.provider.is_launcher() { ProviderPhase::Ready } else { ProviderPhase::Running };
        let reachable =
            matches!(self.phase(e), ProviderPhase::Running | ProviderPhase::Ready | ProviderPhase::Crashed)
                && self.phase(e) >= asked;
        (reachable && self.may_retry(e)).then_some(EngineStep::Query)
    }

    fn creating(&self, e: &PairingEngine) -> Option<EngineStep> {
        if let Some(why) = self.start_abort_reason(e) {
            return Some(EngineStep::Stop { reason: why });
        }
        let known = self.node.providers.get(&e.provider);
        let taken = known.is_some_and(|known| known.name_taken && known.uid.is_none());
        if !self.may_retry(e) || !e.provider.is_launcher() && !taken {
            return None;
        }
        if taken {
            return Some(EngineStep::Create { record: e.record(e.last_used) });
        }
        let written = e.binding.as_ref().is_some_and(|binding| binding.written);
        Some(if written { EngineStep::Launch } else { EngineStep::Bind { record: e.record(e.last_used) } })
    }

    fn starting(&self, e: &PairingEngine) -> Option<EngineStep> {
        if let Some(why) = self.start_abort_reason(e) {
            return Some(EngineStep::Stop { reason: why });
        }
        if e.pending.is_some() {
            return Some(EngineStep::Stop { reason: EngineStopReason::CanaryFailed });
        }
        e.ready.then_some(EngineStep::SendCanary)
    }

    /// A start that failed, lasts too long, or that nobody waits for any more.
    fn start_abort_reason(&self, e: &PairingEngine) -> Option<EngineStopReason> {
        if !self.stays(e) {
            return Some(EngineStopReason::Unneeded);
        }
        let crashed = self.phase(e) == ProviderPhase::Crashed && !e.provider.is_launcher();
        let late = crashed || self.is_past(e, self.context.settings.start_timeout);
        e.failure.or_else(|| late.then_some(EngineStopReason::StartFailed))
    }

    fn waking(&self, e: &PairingEngine) -> Option<EngineStep> {
        if let Some(why) = e.failure {
            return Some(EngineStep::Stop { reason: why });
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
        if self.stays(e) { Some(EngineStep::SendCanary) } else { self.sleep_or_stop(e) }
    }

    fn awake(&self, e: &PairingEngine) -> Option<EngineStep> {
        if let Some(why) = e.failure {
            return Some(EngineStep::Stop { reason: why });
        }
        let Some(requester) = self.requester(e) else {
            return self.sleep_or_stop(e);
        };
        if !requester.stays() {
            // What was never opened has nobody to wait for. After a restart it may have been.
            let deadline = self.drains_until(requester);
            let id = e.requester()?.clone();
            let gate = EngineStep::CloseGate { requester: id, deadline };
            return if requester.is_stub_reachable() { Some(gate) } else { self.sleep_or_stop(e) };
        }
        let told = e.opened_stub.is_some() && e.opened_stub == requester.observed.stub_container;
        let requester = e.requester()?.clone();
        (!told && self.requester(e).is_some_and(PairingRequester::is_stub_reachable) && self.may_retry(e))
            .then_some(EngineStep::OpenGate { requester })
    }

    /// When the drain of this requester ends: after the configured time, but before the kubelet kills the stub. A killed stub can
    /// neither end its streams with an error nor put the engine to sleep.
    fn drains_until(&self, requester: &PairingRequester) -> Tick {
        let configured = self.now() + self.context.settings.drain_timeout;
        let Some(grace) = requester.observed.grace else { return configured };
        let killed = requester.observed.deleting_since.unwrap_or_else(|| self.now()) + grace;
        let before = Tick(killed.0.saturating_sub(KILL_MARGIN.0));
        configured.min(before.max(self.now() + MIN_DRAIN))
    }

    /// Nobody uses it: to sleep if it can, at level 1 where there is host RAM for it; as soon as that disturbs nobody's launch,
    /// and nobody disturbs what is measured of it.
    fn sleep_or_stop(&self, e: &PairingEngine) -> Option<EngineStep> {
        if self.is_on_faulty(e) || !self.node.exists {
            return Some(EngineStep::Stop { reason: EngineStopReason::Leaving });
        }
        let launcher = self.node.providers.get(&e.provider);
        let leaves = launcher.is_some_and(|launcher| self.context.build_policy(launcher).obsolete);
        if leaves || self.template_status(e) == TemplateStatus::Obsolete {
            return Some(EngineStep::Stop { reason: EngineStopReason::Obsolete });
        }
        let room = self.node.has_host_memory_for(e);
        let level = match e.level {
            _ if e.id.mode == ProviderMode::Plain => None,
            SleepLevelPolicy::Never => None,
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
        let Some(level) = level else { return Some(EngineStep::Stop { reason: EngineStopReason::Unneeded }) };
        (!self.must_delay_sleep(e)).then_some(EngineStep::Sleep { level, via })
    }

    /// Somebody's memory changes where it would fall asleep, and its requester can be held until that is over: for as long as
    /// draining may take, so that the time for the sleep itself is left.
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
            let why = match self.template_status(e) {
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
            return why.map(|why| EngineStep::Stop { reason: why });
        };
        if !self.may_retry(e) {
            return None;
        }
        let Some(requester) = self.node.staying_requester(e) else {
            return Some(EngineStep::Unbind { last_used: e.last_used, forget: false });
        };
        // It was bound before it was known how deep it sleeps.
        let lost = e.level == SleepLevelPolicy::OneOrStop && e.is_at_level_2();
        if e.failure.is_some() || lost {
            let why = if e.failure.is_some() {
                EngineStopReason::WakeFailed
            } else {
                EngineStopReason::LoraAdapters
            };
            return Some(EngineStep::Stop { reason: why });
        }
        if !binding.written {
            return Some(EngineStep::Bind { record: e.record(e.last_used) });
        }
        let PairingEngineState::Asleep { level } = e.state else { return None };
        requester.is_stub_reachable().then(|| EngineStep::Wake { level, via: binding.requester.clone() })
    }

    /// Its end has been ordered, or has to be ordered again. Its requester is let go whether it obeys or not; what is reserved for
    /// it stays reserved until it is seen gone.
    fn stopping(&self, e: &PairingEngine, why: EngineStopReason) -> Option<EngineStep> {
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
        // Ordered again, it may have no outcome either.
        (!e.stop_accepted || again && e.retry.at + self.context.settings.stop_timeout <= self.now())
            .then_some(EngineStep::Stop { reason: why })
    }

    /// What is left is an instance that stopped, or a Pod that ended; then its record.
    fn gone(&self, e: &PairingEngine) -> Option<EngineStep> {
        if !self.may_retry(e) {
            return None;
        }
        // A launcher that has ended has nothing left to take away.
        let taken = e.stop_accepted || e.provider.is_launcher() && self.phase(e) == ProviderPhase::Terminated;
        if !taken {
            return Some(EngineStep::Stop { reason: EngineStopReason::Lost });
        }
        if e.provider.is_launcher() {
            return Some(EngineStep::Unbind { last_used: e.last_used, forget: true });
        }
        e.binding.is_some().then_some(EngineStep::Unbind { last_used: e.last_used, forget: false })
    }
}
