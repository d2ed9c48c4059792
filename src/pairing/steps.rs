//! What is to be done with an engine next. Each engine is looked at by itself: one that hangs delays nobody who does not wait for
//! its memory.

use super::{
    command::{Step, Why},
    decide::Draft,
    event::{Stage, Standing},
    ids::Mode,
    node::{Engine, Requester, State},
};
use crate::{
    model::{Level, LevelPolicy},
    units::{Millis, Tick},
};

/// A drain ends this long before the kubelet kills the stub, and lasts [`AT_LEAST`]: the stub needs a second to end its streams.
const BEFORE_THE_KILL: Millis = Millis::secs(5);
const AT_LEAST: Millis = Millis::secs(1);

impl Draft<'_> {
    pub(super) fn next_step(&self, e: &Engine) -> Option<Step> {
        if let State::Ending { why, .. } = e.state {
            return self.ending(e, why);
        }
        if self.is_overdue(e) && !matches!(e.state, State::Asleep { .. } | State::Gone) {
            return Some(Step::End { why: Why::Overdue });
        }
        // Nobody is behind the gate any more that could be waited for.
        if matches!(e.state, State::Draining { .. }) && !self.requester(e).is_some_and(Requester::speaks) {
            return self.put_away(e);
        }
        if e.is_busy(self.now()) {
            return None;
        }
        match e.state {
            State::Unknown => self.unknown(e),
            State::Creating => self.creating(e),
            State::Starting => self.starting(e),
            State::Waking => self.waking(e),
            State::Awake => self.awake(e),
            State::Draining { until, drained } => {
                if drained || until <= self.now() {
                    return self.put_away(e);
                }
                let requester = e.requester()?.clone();
                self.may_retry(e).then_some(Step::Gate { requester, deadline: until })
            }
            State::FallingAsleep { .. } => Some(Step::End { why: e.failed.unwrap_or(Why::SleepFailed) }),
            State::Asleep { .. } => self.asleep(e),
            State::Gone => self.gone(e),
            State::Ending { .. } => None,
        }
    }

    fn may_retry(&self, e: &Engine) -> bool {
        e.retry.at <= self.now()
    }

    fn is_past(&self, e: &Engine, span: Millis) -> bool {
        e.since + span <= self.now()
    }

    fn requester(&self, e: &Engine) -> Option<&Requester> {
        self.node.requesters.get(e.requester()?)
    }

    fn stays(&self, e: &Engine) -> bool {
        self.node.staying(e).is_some()
    }

    /// Its requester has been held for as long as it may be.
    pub(super) fn is_overdue(&self, e: &Engine) -> bool {
        let deleting = self.requester(e).and_then(|requester| requester.seen.deleting);
        deleting.is_some_and(|since| since + self.rules.settings.hold(&e.sizes) <= self.now())
    }

    fn standing(&self, e: &Engine) -> Standing {
        self.rules.standings.get(&e.id.fingerprint).copied().unwrap_or(Standing::Current)
    }

    fn is_on_faulty(&self, e: &Engine) -> bool {
        e.id.accelerators
            .iter()
            .any(|a| self.node.accelerators.get(a).is_some_and(|known| !known.facts.healthy))
    }

    fn stage(&self, e: &Engine) -> Stage {
        self.node.providers.get(&e.provider).map_or(Stage::Pending, |provider| provider.stage)
    }

    /// From before a restart. Nothing is believed of it before it has been asked.
    fn unknown(&self, e: &Engine) -> Option<Step> {
        if self.is_past(e, self.rules.settings.start) {
            return Some(Step::End { why: Why::Lost });
        }
        let asked = if e.provider.is_launcher() { Stage::Ready } else { Stage::Running };
        let reachable =
            matches!(self.stage(e), Stage::Running | Stage::Ready | Stage::Trouble) && self.stage(e) >= asked;
        (reachable && self.may_retry(e)).then_some(Step::Query)
    }

    fn creating(&self, e: &Engine) -> Option<Step> {
        if let Some(why) = self.start_is_over(e) {
            return Some(Step::End { why });
        }
        let known = self.node.providers.get(&e.provider);
        let taken = known.is_some_and(|known| known.taken && known.uid.is_none());
        if !self.may_retry(e) || !e.provider.is_launcher() && !taken {
            return None;
        }
        if taken {
            return Some(Step::Create { record: e.record(e.last_used) });
        }
        let written = e.binding.as_ref().is_some_and(|binding| binding.written);
        Some(if written { Step::Launch } else { Step::Bind { record: e.record(e.last_used) } })
    }

    fn starting(&self, e: &Engine) -> Option<Step> {
        if let Some(why) = self.start_is_over(e) {
            return Some(Step::End { why });
        }
        if e.call.is_some() {
            return Some(Step::End { why: Why::CanaryFailed });
        }
        e.answers.then_some(Step::Prove)
    }

    /// A start that failed, lasts too long, or that nobody waits for any more.
    fn start_is_over(&self, e: &Engine) -> Option<Why> {
        if !self.stays(e) {
            return Some(Why::Unneeded);
        }
        let crashed = self.stage(e) == Stage::Trouble && !e.provider.is_launcher();
        let late = crashed || self.is_past(e, self.rules.settings.start);
        e.failed.or_else(|| late.then_some(Why::StartFailed))
    }

    fn waking(&self, e: &Engine) -> Option<Step> {
        if let Some(why) = e.failed {
            return Some(Step::End { why });
        }
        if e.call.is_some() {
            // Neither the wake nor the canary had an outcome in time.
            return Some(Step::End { why: if e.answers { Why::CanaryFailed } else { Why::WakeFailed } });
        }
        if !e.answers {
            return Some(Step::End { why: Why::WakeFailed });
        }
        if self.stays(e) { Some(Step::Prove) } else { self.put_away(e) }
    }

    fn awake(&self, e: &Engine) -> Option<Step> {
        if let Some(why) = e.failed {
            return Some(Step::End { why });
        }
        let Some(requester) = self.requester(e) else {
            return self.put_away(e);
        };
        if !requester.stays() {
            // What was never opened has nobody to wait for. After a restart it may have been.
            let deadline = self.drains_until(requester);
            let id = e.requester()?.clone();
            let gate = Step::Gate { requester: id, deadline };
            return if requester.speaks() { Some(gate) } else { self.put_away(e) };
        }
        let told = e.opened.is_some() && e.opened == requester.seen.stub;
        let requester = e.requester()?.clone();
        (!told && self.requester(e).is_some_and(Requester::speaks) && self.may_retry(e))
            .then_some(Step::Open { requester })
    }

    /// When the drain of this requester ends: after the configured time, but before the kubelet kills the stub. A killed stub can
    /// neither end its streams with an error nor put the engine to sleep.
    fn drains_until(&self, requester: &Requester) -> Tick {
        let configured = self.now() + self.rules.settings.drain;
        let Some(grace) = requester.seen.grace else { return configured };
        let killed = requester.seen.deleting.unwrap_or_else(|| self.now()) + grace;
        let before = Tick(killed.0.saturating_sub(BEFORE_THE_KILL.0));
        configured.min(before.max(self.now() + AT_LEAST))
    }

    /// Nobody uses it: to sleep if it can, at level 1 where there is host RAM for it; as soon as that disturbs nobody's launch,
    /// and nobody disturbs what is measured of it.
    fn put_away(&self, e: &Engine) -> Option<Step> {
        if self.is_on_faulty(e) || !self.node.exists {
            return Some(Step::End { why: Why::Leaving });
        }
        let launcher = self.node.providers.get(&e.provider);
        let leaves = launcher.is_some_and(|launcher| self.rules.terms(launcher).obsolete);
        if leaves || self.standing(e) == Standing::Obsolete {
            return Some(Step::End { why: Why::Obsolete });
        }
        let room = self.node.has_host_for(e);
        let level = match e.level {
            _ if e.id.mode == Mode::Plain => None,
            LevelPolicy::Never => None,
            LevelPolicy::One | LevelPolicy::OnlyOne | LevelPolicy::Auto if room => Some(Level::One),
            LevelPolicy::OnlyOne => None,
            LevelPolicy::One | LevelPolicy::Two | LevelPolicy::Auto => Some(Level::Two),
        };
        let via =
            self.requester(e).filter(|requester| requester.speaks()).and_then(|_| e.requester().cloned());
        let Some(level) = level else { return Some(Step::End { why: Why::Unneeded }) };
        (!self.is_disturbed(e)).then_some(Step::Sleep { level, via })
    }

    /// Somebody's memory changes where it would fall asleep, and its requester can be held until that is over: for as long as
    /// draining may take, so that the time for the sleep itself is left.
    fn is_disturbed(&self, e: &Engine) -> bool {
        let changes =
            |other: &Engine| other.is_shifting() || other.is_launching() && other.state != State::Unknown;
        let deleting = self.requester(e).and_then(|requester| requester.seen.deleting);
        let in_time = deleting.is_none_or(|since| since + self.rules.settings.drain > self.now());
        in_time && self.node.beside(&e.id).any(changes)
    }

    fn asleep(&self, e: &Engine) -> Option<Step> {
        let Some(binding) = &e.binding else {
            let why = match self.standing(e) {
                Standing::Obsolete => Some(Why::Obsolete),
                _ if e.failed.is_some() || self.stage(e) == Stage::Trouble => Some(Why::Lost),
                _ if self.is_on_faulty(e) || !self.node.exists => Some(Why::Leaving),
                _ if e.stops_at().is_some_and(|at| at <= self.now()) && !self.rooms().is_wanted(&e.id) => {
                    Some(Why::Idle)
                }
                _ => None,
            };
            return why.map(|why| Step::End { why });
        };
        if !self.may_retry(e) {
            return None;
        }
        let Some(requester) = self.node.staying(e) else {
            return Some(Step::Unbind { last_used: e.last_used, forget: false });
        };
        // It was bound before it was known how deep it sleeps.
        let lost = e.level == LevelPolicy::OnlyOne && e.is_at_level_2();
        if e.failed.is_some() || lost {
            let why = if e.failed.is_some() { Why::WakeFailed } else { Why::Adapters };
            return Some(Step::End { why });
        }
        if !binding.written {
            return Some(Step::Bind { record: e.record(e.last_used) });
        }
        let State::Asleep { level } = e.state else { return None };
        requester.speaks().then(|| Step::Wake { level, via: binding.requester.clone() })
    }

    /// Its end has been ordered, or has to be ordered again. Its requester is let go whether it obeys or not; what is reserved for
    /// it stays reserved until it is seen gone.
    fn ending(&self, e: &Engine, why: Why) -> Option<Step> {
        if e.is_busy(self.now()) || !self.may_retry(e) {
            return None;
        }
        let unanswered = e.retry.failures > 0 || e.call.is_some();
        if e.binding.is_some() && (e.ended || unanswered) {
            return Some(Step::Unbind { last_used: e.last_used, forget: false });
        }
        let again = e.ended && !e.provider.is_launcher() && self.is_past(e, self.rules.settings.end);
        // Ordered again, it may have no outcome either.
        (!e.ended || again && e.retry.at + self.rules.settings.end <= self.now()).then_some(Step::End { why })
    }

    /// What is left is an instance that stopped, or a Pod that ended; then its record.
    fn gone(&self, e: &Engine) -> Option<Step> {
        if !self.may_retry(e) {
            return None;
        }
        // A launcher that has ended has nothing left to take away.
        let taken = e.ended || e.provider.is_launcher() && self.stage(e) == Stage::Ended;
        if !taken {
            return Some(Step::End { why: Why::Lost });
        }
        if e.provider.is_launcher() {
            return Some(Step::Unbind { last_used: e.last_used, forget: true });
        }
        e.binding.is_some().then_some(Step::Unbind { last_used: e.last_used, forget: false })
    }
}
