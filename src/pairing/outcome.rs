//! Taking note of what became of a command. Only the outcome of the last command about an engine, requester or provider counts:
//! what was ordered before it was given up when the next was ordered.

use super::{
    command::Why,
    event::{Answer, Cause, Condition, Stage, Target},
    ids::{EngineId, ProviderId, RequesterId},
    node::{Call, Kind, Node, Retry, State},
};
use crate::{
    model::Level,
    units::{Bytes, Generation, Tick},
};

type Result<'a> = &'a std::result::Result<Answer, Cause>;

impl Node {
    pub(super) fn outcome(&mut self, target: &Target, serial: u64, result: Result<'_>, now: Tick) {
        match target {
            Target::Engine(engine, generation) => {
                self.engine_outcome(engine, *generation, serial, result, now)
            }
            Target::Requester(requester) => self.requester_outcome(requester, serial, result, now),
            Target::Provider(provider) => self.provider_outcome(provider, serial, result, now),
        }
    }

    fn requester_outcome(&mut self, id: &RequesterId, serial: u64, result: Result<'_>, now: Tick) {
        let Some(requester) = self.requesters.get_mut(id) else { return };
        let Some(call) = take(&mut requester.call, serial) else { return };
        match (call.kind, result) {
            (Kind::Accelerators, Ok(Answer::Accelerators(found))) if !found.is_empty() => {
                requester.accelerators.clone_from(found);
                requester.accelerators.sort();
                requester.gated = call.stub;
                requester.retry = Default::default();
            }
            (Kind::Gate, Ok(_)) => {
                requester.gated = call.stub;
                requester.retry = Default::default();
            }
            (Kind::Finalize(wanted), Ok(_)) => {
                requester.seen.finalizer = wanted;
                requester.retry = Default::default();
            }
            (Kind::Release, Ok(_)) => requester.released = true,
            // It is being deleted, whenever that is seen.
            (Kind::Delete, Ok(_)) => {
                requester.seen.deleting.get_or_insert(now);
                requester.retry = Default::default();
            }
            _ => requester.retry.failed(now),
        }
    }

    fn provider_outcome(&mut self, id: &ProviderId, serial: u64, result: Result<'_>, now: Tick) {
        let Some(provider) = self.providers.get_mut(id) else { return };
        let Some(call) = take(&mut provider.call, serial) else { return };
        if result.is_err() {
            return provider.retry.failed(now);
        }
        provider.retry = Retry { failures: 0, at: now };
        provider.made |= call.kind == Kind::Create;
        if call.kind == Kind::Delete && *result == Ok(Answer::Condition(Condition::Absent)) {
            self.never_came(id, now);
        }
    }

    fn engine_outcome(
        &mut self,
        id: &EngineId,
        generation: Generation,
        serial: u64,
        result: Result<'_>,
        now: Tick,
    ) {
        let Some(engine) = self.engines.get_mut(id).filter(|e| e.generation == generation) else { return };
        let Some(call) = take(&mut engine.call, serial) else { return };
        let known = *result != Err(Cause::Unreachable);
        if known && matches!(call.kind, Kind::Create | Kind::Launch) {
            engine.may_start_until = Tick(0);
        }
        match (call.kind, result) {
            (Kind::Create, Ok(_)) => {
                let provider = self.providers.get_mut(&engine.provider);
                provider.into_iter().for_each(|provider| provider.made = true);
            }
            (Kind::Create, Err(Cause::Conflict)) => {
                engine.retry.failed(now);
                let provider = engine.provider.clone();
                self.name_taken(&provider, now);
            }
            (Kind::Create | Kind::Launch, Err(_)) => engine.failed = Some(Why::StartFailed),
            (Kind::Bind, Ok(_)) => {
                if let Some(binding) = &mut engine.binding {
                    binding.written = true;
                }
                engine.retry = Default::default();
            }
            (Kind::Launch, Ok(_)) => engine.enter(State::Starting, now),
            (Kind::Prove, Ok(_)) => self.proved(id, now),
            (Kind::Prove, Err(_)) => engine.failed = Some(Why::CanaryFailed),
            (Kind::Open, Ok(_)) => {
                engine.opened = call.stub;
                engine.retry = Default::default();
            }
            (Kind::Gate, Ok(_)) => {
                if let State::Draining { drained, .. } = &mut engine.state {
                    *drained = true;
                }
            }
            (Kind::Sleep, Ok(answer)) => {
                let measured = if let Answer::Asleep { residue } = answer { *residue } else { None };
                self.fell_asleep(id, measured, now);
            }
            (Kind::Sleep, Err(_)) => engine.failed = Some(Why::SleepFailed),
            (Kind::Wake, Ok(_)) => {
                engine.answers = true;
                engine.held_host = Bytes::ZERO;
            }
            (Kind::Wake, Err(_)) => engine.failed = Some(Why::WakeFailed),
            (Kind::Unbind, Ok(_)) => {
                engine.binding = None;
                engine.retry = Default::default();
                if matches!(engine.state, State::Asleep { .. }) {
                    engine.held = engine.residue();
                }
            }
            (Kind::Forget, Ok(_)) => {
                self.engines.remove(id);
            }
            (Kind::End, Ok(answer)) => self.ended(id, answer, now),
            (Kind::Query, Ok(Answer::Condition(condition))) => self.found(id, *condition, now),
            _ => engine.retry.failed(now),
        }
    }

    fn proved(&mut self, id: &EngineId, now: Tick) {
        let Some(engine) = self.engines.get_mut(id) else { return };
        if !matches!(engine.state, State::Starting | State::Waking) {
            return;
        }
        engine.enter(State::Awake, now);
        engine.last_used = now;
        if let Some(provider) = self.providers.get_mut(&engine.provider) {
            provider.proved.get_or_insert(now);
        }
        let requester = engine.requester().cloned().and_then(|r| self.requesters.get_mut(&r));
        if let Some(requester) = requester {
            requester.failures = 0;
        }
    }

    /// Its reservation shrinks to what it keeps: as declared, or more if that was measured. Somebody else's may be in that, where
    /// it could not wait for them; to be safe it counts all the same.
    fn fell_asleep(&mut self, id: &EngineId, measured: Option<Bytes>, now: Tick) {
        let Some(engine) = self.engines.get_mut(id) else { return };
        let State::FallingAsleep { level } = engine.state else { return };
        engine.enter(State::Asleep { level }, now);
        engine.sizes.asleep = engine.sizes.asleep.max(measured.unwrap_or_default());
        engine.held = engine.residue();
        self.slept(id, now);
    }

    fn slept(&mut self, id: &EngineId, now: Tick) {
        for accelerator in id.accelerators.iter() {
            if let Some(known) = self.accelerators.get_mut(accelerator) {
                known.last_sleep = Some(now);
            }
        }
    }

    fn ended(&mut self, id: &EngineId, answer: &Answer, now: Tick) {
        let Some(engine) = self.engines.get_mut(id) else { return };
        let absent = *answer == Answer::Condition(Condition::Absent);
        if now < engine.may_start_until && (absent || engine.provider.is_launcher()) {
            // What is not there now may come yet.
            engine.retry.at = engine.may_start_until;
            return;
        }
        engine.ended = true;
        engine.retry = Retry { failures: 0, at: now };
        if engine.provider.is_launcher() {
            self.process_gone(id, now);
        } else if absent {
            // One that has been seen will be seen gone as well.
            let provider = engine.provider.clone();
            self.never_came(&provider, now);
        }
    }

    /// The Pod that was ordered is not there. One that was seen is not forgotten before it is seen gone: what is seen late of it
    /// would be taken for the next one of its name.
    fn never_came(&mut self, id: &ProviderId, now: Tick) {
        match self.providers.get(id).filter(|provider| provider.uid.is_none()).map(|provider| provider.made) {
            // It was there, and went before it was seen.
            Some(true) => self.provider_vanished(id, now),
            Some(false) => self.provider_gone(id, now),
            None => {}
        }
    }

    /// What an engine from before says of itself.
    fn found(&mut self, id: &EngineId, condition: Condition, now: Tick) {
        let Some(engine) = self.engines.get_mut(id).filter(|e| e.state == State::Unknown) else { return };
        match condition {
            Condition::Busy => engine.retry.failed(now),
            Condition::Starting => {
                let provider = self.providers.get(&engine.provider);
                engine.enter(State::Starting, now);
                // That it answers may have been seen before it was asked, and it may have been too busy to say so.
                let ready = provider.is_some_and(|provider| provider.stage == Stage::Ready);
                engine.answers = ready && !engine.provider.is_launcher();
            }
            Condition::Awake => {
                engine.enter(State::Awake, now);
                engine.held_host = Bytes::ZERO;
            }
            Condition::Asleep { residue, .. } | Condition::AsleepSomehow { residue } => {
                let known = if let Condition::Asleep { level, .. } = condition { Some(level) } else { None };
                engine.enter(State::Asleep { level: known.unwrap_or(Level::Two) }, now);
                engine.sizes.asleep = engine.sizes.asleep.max(residue.unwrap_or_default());
                if known == Some(Level::Two) {
                    engine.held_host = Bytes::ZERO;
                }
                // A bound one is about to be woken, or nearly was.
                if engine.binding.is_none() {
                    engine.held = engine.residue();
                }
                self.slept(id, now);
            }
            // What is not there now may come yet.
            Condition::Absent if now < engine.may_start_until => engine.retry.at = engine.may_start_until,
            Condition::Absent => {
                self.lost(id, now);
                let Some(engine) = self.engines.get_mut(id) else { return };
                // Of a launcher nothing is left but the record, else a Pod.
                engine.ended = engine.provider.is_launcher();
                self.process_gone(id, now);
            }
        }
    }
}

/// The call, if it is this one that is awaited.
fn take(call: &mut Option<Call>, serial: u64) -> Option<Call> {
    if call.as_ref()?.serial == serial { call.take() } else { None }
}
