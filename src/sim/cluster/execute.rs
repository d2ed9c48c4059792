//! What becomes of commands: they arrive late or not at all, have an effect and lose the answer, or come from a leader of before.

use super::{
    Cluster, Happening,
    pods::{Phase, Process, ProviderKey, Stub},
};
use crate::{
    engine::SLEEP_DENIAL,
    pairing::{
        command::{Command, OfProvider, OfRequester, Order, Step, Why},
        event::{Answer, Cause, Condition, Epoch, Event, Stage},
        ids::{EngineId, ProviderId, RequesterId, Uid},
    },
    units::{Generation, Millis},
};

/// What a command came to; `None`: that will be known when it has finished.
type Came = Option<Result<Answer, Cause>>;

const DONE: Came = Some(Ok(Answer::Done));
const UNREACHABLE: Came = Some(Err(Cause::Unreachable));
const CONFLICT: Came = Some(Err(Cause::Conflict));
const ABSENT: Came = Some(Ok(Answer::Condition(Condition::Absent)));

impl Cluster {
    /// A command leaves the controller.
    pub(super) fn send(&mut self, command: Command) {
        let (call, troubles) = (self.plot.settings.call, self.plot.troubles);
        let key = (command.epoch, command.serial);
        if self.chance(troubles.calls_lost) {
            return self.answer_after(call, &command, Err(Cause::Unreachable));
        }
        if self.chance(troubles.answers_lost) {
            self.books.unanswered.insert(key);
            if self.random.chance(0.5) {
                self.answer_after(call, &command, Err(Cause::Unreachable));
            }
        }
        let starts = matches!(command.order, Order::Engine { step: Step::Launch | Step::Create { .. }, .. });
        if starts && self.chance(troubles.starts_late) {
            // Given up, and carried out all the same.
            self.books.unanswered.insert(key);
            self.answer_after(call, &command, Err(Cause::Unreachable));
            let after = self.draw((call.0, call.0 * 2 - 100));
            return self.leave_for(after, command);
        }
        let after = self.draw(self.plot.network);
        self.leave_for(after, command);
    }

    fn leave_for(&mut self, after: Millis, command: Command) {
        let key = (command.epoch, command.serial);
        self.books.under_way.insert(key, command.clone());
        if let Order::Engine { engine, .. } = &command.order
            && let Some(place) = self.place_of(&command, engine)
            && let Some(provider) = self.providers.get(&place)
        {
            self.books.sent_to.insert(key, (provider.uid.clone(), provider.restarts));
        }
        self.add(after, Happening::Arrive(command));
    }

    /// Of a leader of before, if somebody can refuse it.
    pub(super) fn leave_late(&mut self, command: Command) {
        if is_fenced(&command.order) {
            let after = self.draw(self.plot.network);
            self.add(after, Happening::Arrive(command));
        }
    }

    /// Who leads next does so only after every write of the leader before has been carried out or can be no more. Calls to stubs and
    /// launchers stay under way: those are told the epoch.
    pub(super) fn flush_writes(&mut self) {
        for (_, command) in std::mem::take(&mut self.books.under_way) {
            if is_fenced(&command.order) {
                continue;
            }
            if self.random.chance(0.5) {
                self.carry_out(&command);
            }
        }
    }

    pub(super) fn arrive(&mut self, command: Command) {
        self.books.under_way.remove(&(command.epoch, command.serial));
        if command.epoch != self.epoch && !is_fenced(&command.order) {
            return;
        }
        if let Some(result) = self.carry_out(&command) {
            self.answer(&command, result);
        }
    }

    fn answer(&mut self, command: &Command, result: Result<Answer, Cause>) {
        if self.books.unanswered.remove(&(command.epoch, command.serial)) {
            return;
        }
        let after = self.draw(self.plot.network);
        self.answer_after(after, command, result);
    }

    fn answer_after(&mut self, after: Millis, command: &Command, result: Result<Answer, Cause>) {
        let (node, target) = (command.node.clone(), command.order.target());
        let event = Event::Outcome { node, target, serial: command.serial, result };
        self.add(after, Happening::Deliver(command.epoch, event));
    }

    fn carry_out(&mut self, command: &Command) -> Came {
        match &command.order {
            Order::Engine { engine, generation, step } => self.step(command, engine, *generation, step),
            Order::Requester { requester, step } => self.of_requester(command, requester, step),
            Order::Provider { provider, step } => {
                let key = Self::key(&command.node, provider);
                match (step, self.providers.contains_key(&key)) {
                    (OfProvider::Create { .. }, true) => CONFLICT,
                    (OfProvider::Create { asker }, false) => {
                        let build = self.build_for(asker.as_ref());
                        self.create_provider(&key, Some(build), Vec::new(), command.epoch);
                        DONE
                    }
                    (OfProvider::Delete { .. }, false) => ABSENT,
                    (OfProvider::Delete { .. }, true) => {
                        self.delete_provider(&key);
                        DONE
                    }
                }
            }
        }
    }

    fn of_requester(&mut self, command: &Command, id: &RequesterId, step: &OfRequester) -> Came {
        match step {
            OfRequester::Accelerators { gate } => {
                let Some(stub) = self.stub(command, id) else { return UNREACHABLE };
                if *gate {
                    stub.open = None;
                }
                let requester = self.requesters.get(id)?;
                Some(Ok(Answer::Accelerators(requester.accelerators.clone())))
            }
            OfRequester::Gate => {
                let Some(stub) = self.stub(command, id) else { return UNREACHABLE };
                stub.open = None;
                DONE
            }
            OfRequester::Release => {
                if self.stub(command, id).is_none() {
                    return UNREACHABLE;
                }
                self.add(Millis(5), Happening::StubEnds(id.clone()));
                DONE
            }
            OfRequester::Delete { why } => {
                self.count("requesters deleted");
                self.narrate(|| format!("  ({why})"));
                self.delete_requester(id);
                DONE
            }
            OfRequester::Finalize { wanted } => {
                let Some(requester) = self.requesters.get_mut(id) else { return CONFLICT };
                if *wanted && requester.deleting.is_some() {
                    return CONFLICT;
                }
                requester.finalizer = *wanted;
                self.show_requester(id);
                self.collect_requester(id);
                DONE
            }
        }
    }

    /// The stub of this requester, if it runs, can be reached, and has heard of no younger leader.
    fn stub(&mut self, command: &Command, id: &RequesterId) -> Option<&mut Stub> {
        if self.is_cut_off(&command.node) {
            return None;
        }
        let stub = self.requesters.get_mut(id)?.stub.as_mut()?;
        if stub.epoch > command.epoch {
            return None;
        }
        stub.epoch = command.epoch;
        Some(stub)
    }

    fn step(&mut self, command: &Command, engine: &EngineId, generation: Generation, step: &Step) -> Came {
        match step {
            Step::Create { record } => {
                let key = Self::key(&command.node, &ProviderId::direct(engine));
                if self.providers.contains_key(&key) {
                    return CONFLICT;
                }
                self.create_provider(&key, None, vec![record.clone()], command.epoch);
                return DONE;
            }
            Step::Open { requester } => {
                let place = self.place_of(command, engine);
                let pod = place.and_then(|key| self.providers.get(&key)).map(|provider| provider.uid.clone());
                let address = pod.map(|pod| (engine.clone(), pod));
                let Some(stub) = self.stub(command, requester) else { return UNREACHABLE };
                stub.open = address;
                return DONE;
            }
            Step::Gate { requester, .. } => {
                let Some(stub) = self.stub(command, requester) else { return UNREACHABLE };
                stub.open = None;
                let drains = self.draw((0, 3000));
                self.add(drains, Happening::Finish(command.clone()));
                return None;
            }
            _ => {}
        }
        let Some(key) = self.place_of(command, engine) else {
            return match step {
                Step::Unbind { .. } => DONE,
                Step::End { .. } if engine.mode != crate::pairing::ids::Mode::Launcher => ABSENT,
                _ => UNREACHABLE,
            };
        };
        match step {
            Step::Bind { record } => self.bind(&key, record.clone()),
            Step::Unbind { last_used, forget } => {
                if let Some(provider) = self.providers.get_mut(&key) {
                    if let Some(record) = provider.record(engine).filter(|r| r.generation == generation) {
                        (record.requester, record.last_used) = (None, *last_used);
                    }
                    provider
                        .records
                        .retain(|r| !(*forget && r.engine == *engine && r.generation == generation));
                }
                self.show_provider(&key);
                self.collect_provider(&key);
                DONE
            }
            Step::End { why } if !key.1.is_launcher() => {
                self.count("engines ended");
                self.narrate(|| format!("  ({why})"));
                let same = self
                    .providers
                    .get(&key)
                    .is_some_and(|p| p.records.iter().any(|r| r.generation == generation));
                if !same {
                    return ABSENT;
                }
                self.delete_provider(&key);
                DONE
            }
            _ => self.call(command, &key, engine, generation, step),
        }
    }

    /// Where this engine runs or is to run.
    fn place_of(&self, command: &Command, engine: &EngineId) -> Option<ProviderKey> {
        let node = self.pairing.node(&command.node);
        let known = node.and_then(|node| node.engines.get(engine)).map(|known| known.provider.clone());
        let index = |a: &crate::model::AcceleratorId| {
            let machine = self.machines.get(&command.node);
            machine.and_then(|machine| machine.accelerators.get(a)).map_or(u32::MAX, |facts| facts.index)
        };
        let lowest = || engine.accelerators.iter().min_by_key(|a| index(a)).cloned();
        let provider = match known {
            Some(provider) => provider,
            None if engine.mode == crate::pairing::ids::Mode::Launcher => ProviderId::launcher(lowest()?),
            None => ProviderId::direct(engine),
        };
        Some(Self::key(&command.node, &provider)).filter(|key| self.providers.contains_key(key))
    }

    fn bind(&mut self, key: &ProviderKey, record: crate::pairing::event::Record) -> Came {
        let Some(provider) = self.providers.get_mut(key) else { return UNREACHABLE };
        if provider.deleting {
            return CONFLICT;
        }
        provider.records.retain(|known| known.engine != record.engine);
        provider.records.push(record);
        self.show_provider(key);
        DONE
    }

    /// What is asked of the launcher, the engine, or the stub before the engine.
    fn call(
        &mut self,
        command: &Command,
        key: &ProviderKey,
        id: &EngineId,
        generation: Generation,
        step: &Step,
    ) -> Came {
        let bound = self.providers.get_mut(key)?.record(id).and_then(|record| record.requester.clone());
        if let Step::Sleep { via: Some(via), .. } | Step::Wake { via, .. } = step
            && self.stub(command, via).is_none()
        {
            return UNREACHABLE;
        }
        if let Step::Sleep { via: Some(via), .. } = step
            && let Some(stub) = self.stub(command, via)
        {
            stub.open = None;
        }
        if *step == Step::Query
            && let Some(stub) = bound.as_ref().and_then(|bound| self.requesters.get_mut(bound)?.stub.as_mut())
        {
            stub.epoch = stub.epoch.max(command.epoch);
        }
        let sent_to = self.books.sent_to.get(&(command.epoch, command.serial));
        let other = |(uid, restarts): &(Uid, u32)| {
            self.providers.get(key).is_some_and(|own| own.uid != *uid || own.restarts != *restarts)
        };
        if sent_to.is_some_and(other) {
            return UNREACHABLE;
        }
        let (cut_off, launcher) = (self.is_cut_off(&command.node), key.1.is_launcher());
        let Some(provider) = self.providers.get_mut(key) else { return UNREACHABLE };
        let answers = !cut_off && !provider.hung && !matches!(provider.stage, Stage::Pending | Stage::Ended);
        if !answers || launcher && provider.stage != Stage::Ready {
            return UNREACHABLE;
        }
        if launcher && provider.epoch > command.epoch {
            return CONFLICT;
        }
        provider.epoch = provider.epoch.max(command.epoch);
        let puts_away = *step == Step::Query && provider.stopped.contains_key(id);
        if launcher && (puts_away || matches!(step, Step::End { .. })) {
            let ended = provider.ended.entry(id.clone()).or_insert(generation);
            *ended = generation.max(*ended);
        }
        let there = provider.processes.get(id).filter(|process| process.generation == generation).cloned();
        match (step, there) {
            // It was obeyed before, and the answer was lost.
            (Step::Launch, Some(_)) => DONE,
            (Step::Launch, _) if provider.stopped.get(id) == Some(&generation) => DONE,
            (Step::Launch, _) if provider.processes.contains_key(id) || provider.stopped.contains_key(id) => {
                CONFLICT
            }
            (Step::Launch, _) if provider.ended.get(id).is_some_and(|ended| generation <= *ended) => {
                Some(Err(Cause::Refused))
            }
            (Step::Launch, _) => {
                self.start_process(key, id, generation);
                DONE
            }
            (Step::End { why }, Some(_)) => {
                self.count(if *why == Why::Displaced { "engines displaced" } else { "engines ended" });
                let after = self.draw((20, 3000));
                self.add(after, Happening::Finish(command.clone()));
                None
            }
            (Step::End { .. } | Step::Query, None) if launcher => {
                self.put_away(key, id);
                if *step == Step::Query { ABSENT } else { DONE }
            }
            (Step::End { .. }, None) => DONE,
            (Step::Query, Some(process)) => Some(condition(&process, self.plot.knows_level)),
            (_, None) => UNREACHABLE,
            (_, Some(process)) => self.order(command, key, id, step, &process),
        }
    }

    /// The engine itself is told. A hung one says nothing.
    fn order(
        &mut self,
        command: &Command,
        key: &ProviderKey,
        id: &EngineId,
        step: &Step,
        process: &Process,
    ) -> Came {
        if process.hung {
            return None;
        }
        let troubles = self.plot.troubles;
        let (phase, after, fails) = match (step, process.phase) {
            (Step::Sleep { level, .. }, Phase::Awake) => {
                self.check_gate(command, id);
                (Phase::FallingAsleep(*level), self.draw(self.plot.sleep), troubles.sleep_fails)
            }
            (Step::Wake { .. }, Phase::Asleep(level)) => {
                (Phase::Waking(level), self.draw(self.plot.wake), troubles.wake_fails)
            }
            (Step::Prove, Phase::Awake) => (Phase::Awake, self.draw((5, 200)), troubles.canary_fails),
            _ => return Some(Err(Cause::Refused)),
        };
        if self.chance(troubles.hangs) {
            self.count("hangs");
            self.change(key, id, |process| (process.hung, process.phase) = (true, phase));
            return None;
        }
        if self.chance(fails) {
            self.count("refusals");
            return Some(Err(Cause::Refused));
        }
        if matches!(step, Step::Sleep { .. }) && self.chance(troubles.sleep_denied) {
            self.count("sleeps denied");
            // It is awake all the time, and that is found out.
            if !self.books.unanswered.remove(&(command.epoch, command.serial)) {
                self.answer_after(SLEEP_DENIAL, command, Err(Cause::Refused));
            }
            return None;
        }
        self.change(key, id, |process| process.phase = phase);
        self.add(after, Happening::Finish(command.clone()));
        None
    }

    fn change(&mut self, key: &ProviderKey, id: &EngineId, change: impl FnOnce(&mut Process)) {
        if let Some(process) = self.providers.get_mut(key).and_then(|provider| provider.processes.get_mut(id))
        {
            change(process);
        }
    }

    pub(super) fn finish(&mut self, command: Command) {
        let Order::Engine { engine, generation, step } = &command.order else { return };
        let key = self.place_of(&command, engine);
        let process = key.as_ref().and_then(|key| self.providers.get(key)?.processes.get(engine));
        let process = process.filter(|process| process.generation == *generation).cloned();
        let result = match (step, process, key) {
            (Step::Gate { .. }, ..) => Ok(Answer::Done),
            (Step::End { .. }, process, Some(key)) => {
                if process.is_some() {
                    self.process_dies(&key, engine);
                }
                Ok(Answer::Done)
            }
            (Step::Sleep { level, .. }, Some(process), Some(key)) => {
                self.change(&key, engine, |process| process.phase = Phase::Asleep(*level));
                self.books.slept(&command.node, engine, self.now);
                self.count("sleeps");
                Ok(Answer::Asleep { residue: Some(process.residue) })
            }
            (Step::Wake { .. }, Some(_), Some(key)) => {
                self.change(&key, engine, |process| process.phase = Phase::Awake);
                self.count("wakes");
                Ok(Answer::Done)
            }
            (Step::Prove, Some(_), Some(_)) => Ok(Answer::Done),
            _ => Err(Cause::Unreachable),
        };
        self.answer(&command, result);
    }
}

fn condition(process: &Process, knows_level: bool) -> Result<Answer, Cause> {
    if process.hung {
        return Err(Cause::Unreachable);
    }
    Ok(Answer::Condition(match process.phase {
        Phase::Loading => Condition::Starting,
        Phase::Awake => Condition::Awake,
        Phase::Asleep(_) if !knows_level => Condition::AsleepSomehow { residue: Some(process.residue) },
        Phase::Asleep(level) => Condition::Asleep { level, residue: Some(process.residue) },
        Phase::FallingAsleep(_) | Phase::Waking(_) => Condition::Busy,
    }))
}

/// A stub or launcher hears it, and knows which leader is the last.
fn is_fenced(order: &Order) -> bool {
    match order {
        Order::Engine { engine, step, .. } => match step {
            Step::Open { .. } | Step::Gate { .. } | Step::Wake { .. } | Step::Sleep { via: Some(_), .. } => {
                true
            }
            Step::Launch | Step::End { .. } => engine.mode == crate::pairing::ids::Mode::Launcher,
            _ => false,
        },
        Order::Requester { step, .. } => {
            matches!(step, OfRequester::Accelerators { .. } | OfRequester::Gate | OfRequester::Release)
        }
        Order::Provider { .. } => false,
    }
}

/// Of which leader a command is, and which of its commands.
pub(super) type Key = (Epoch, u64);
